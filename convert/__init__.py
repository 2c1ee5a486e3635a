"""Rewrite a Hugging Face checkpoint with fewer (or more) key/value heads.

    from gqa.convert import convert_checkpoint, plan_conversion

Torch and transformers are imported on first use of one of these, so that `gqa-convert --help` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gqa.checkpoint.errors import CorruptError, OutputError, RefusedError
    from gqa.convert.api import Conversion, Plan, convert_checkpoint, plan_conversion

__all__ = [
    "Conversion", "CorruptError", "OutputError", "Plan", "RefusedError", "convert_checkpoint", "plan_conversion",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("gqa.checkpoint.errors" if name.endswith("Error") else "gqa.convert.api"), name)
