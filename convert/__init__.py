"""Rewrite a Hugging Face checkpoint with fewer (or more) key/value heads.

    from gqa.convert import convert_checkpoint, plan_conversion

Torch and transformers are imported when one of these is first used, so that `gqa-convert --help` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gqa.checkpoint.errors import CorruptError, OutputError, RefusedError
    from gqa.convert.api import Conversion, Plan, convert_checkpoint, plan_conversion

__all__ = [  # noqa: RUF022 - functions, what they give and take, what they raise
    "convert_checkpoint", "plan_conversion", "Conversion", "Plan",
    "CorruptError", "OutputError", "RefusedError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = "gqa.checkpoint.errors" if name.endswith("Error") else "gqa.convert.api"
    return getattr(import_module(home), name)
