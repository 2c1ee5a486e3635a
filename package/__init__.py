"""Convert multi-head checkpoints to grouped-query ones, train them further, evaluate them.

Examples: docs/api.md.

    import gqa

    small = gqa.convert_model("examples/stdlib-mha", kv_heads=2)
    model = small.load()

Torch and transformers are imported when a function is first called. Public are the names in
`__all__`.

All functions raise RefusedError, before anything is written, if a model, text or option cannot be
used; TypeError for unknown options; OutputError if the result cannot be written or verified,
leaving nothing at `output`. Training raises DivergedError after a loss or gradient that is not
finite, and StoppedError after a signal: the same call continues the training or the study.
"""

from gqa.checkpoint.provenance import version
from gqa.convert.options import ConvertOptions
from gqa.core.errors import (
    CorruptError,
    DivergedError,
    OutputError,
    RefusedError,
    StoppedError,
    TextError,
)
from gqa.eval.options import EvaluateOptions
from gqa.study.options import AblateOptions
from gqa.uptrain.options import UptrainOptions

from .functions import (
    Evaluation,
    Result,
    Study,
    ablate_model,
    convert_model,
    evaluate_models,
    plan_conversion,
    uptrain_model,
)

__version__ = version()
__all__ = [  # noqa: RUF022 - functions, what they return, what they take, what they raise
    "convert_model",
    "plan_conversion",
    "uptrain_model",
    "evaluate_models",
    "ablate_model",
    "Result",
    "Evaluation",
    "Study",
    "ConvertOptions",
    "UptrainOptions",
    "EvaluateOptions",
    "AblateOptions",
    "RefusedError",
    "CorruptError",
    "TextError",
    "OutputError",
    "DivergedError",
    "StoppedError",
    "__version__",
]
