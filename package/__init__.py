"""Multi-head checkpoints become grouped-query ones: convert, train further, measure. docs/api.md has examples.

    import gqa

    small = gqa.convert_model("examples/stdlib-mha", groups=2)
    model = small.load()

Torch and transformers are imported when a function is first called. What is listed in `__all__` is public, and so are
`gqa.convert.convert_checkpoint` and `plan_conversion`, which these functions build on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gqa.checkpoint.errors import CorpusError, CorruptError, OutputError, RefusedError
    from gqa.convert.api import Plan, plan_conversion
    from gqa.convert.options import ConvertOptions
    from gqa.eval.options import EvaluateOptions
    from gqa.eval.study.options import AblateOptions
    from gqa.uptrain.loop import DivergedError, StoppedError
    from gqa.uptrain.options import TrainOptions

    from .commands import ablate, convert_model, evaluate, uptrain_model
    from .results import ConvertedModel, Evaluation, Study, TrainedModel

    __version__: str

_MODULES = {
    "gqa.checkpoint.errors": ("CorpusError", "CorruptError", "OutputError", "RefusedError"),
    "gqa.convert.api": ("Plan", "plan_conversion"),
    "gqa.convert.options": ("ConvertOptions",),
    "gqa.eval.options": ("EvaluateOptions",),
    "gqa.eval.study.options": ("AblateOptions",),
    "gqa.uptrain.loop": ("DivergedError", "StoppedError"),
    "gqa.uptrain.options": ("TrainOptions",),
    "gqa.commands": ("ablate", "convert_model", "evaluate", "uptrain_model"),
    "gqa.results": ("ConvertedModel", "Evaluation", "Study", "TrainedModel"),
}
__all__ = [  # noqa: RUF022 - functions, what they give, what they take, what they raise
    "convert_model", "uptrain_model", "evaluate", "ablate", "plan_conversion",
    "ConvertedModel", "TrainedModel", "Evaluation", "Study", "Plan",
    "ConvertOptions", "TrainOptions", "EvaluateOptions", "AblateOptions",
    "RefusedError", "CorruptError", "CorpusError", "OutputError", "DivergedError", "StoppedError",
    "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        return import_module("gqa.checkpoint.provenance").version()
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
