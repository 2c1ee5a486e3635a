"""Convert multi-head checkpoints to grouped-query ones, train them further, evaluate them.

Examples: docs/api.md.

    import gqa

    small = gqa.convert_model("examples/stdlib-mha", kv_heads=2)
    model = small.load()

Torch and transformers are imported when a function is first called. Public are the names in
`__all__`, and `gqa.convert.api.plan_conversion`.

All functions raise RefusedError, before anything is written, if a model, text or option cannot be
used; TypeError for unknown options; OutputError if the result cannot be written or verified,
leaving nothing at `output`. Training raises DivergedError after a loss or gradient that is not
finite, and StoppedError after a signal: the same call continues the training or the study.
"""

from gqa.checkpoint.provenance import version
from gqa.convert.options import ConvertOptions
from gqa.core.errors import (
    CorpusError,
    CorruptError,
    DivergedError,
    OutputError,
    RefusedError,
    StoppedError,
)
from gqa.eval.options import EvaluateOptions
from gqa.study.options import AblateOptions
from gqa.uptrain.options import UptrainOptions

from .functions import Evaluation, Result, Study, ablate, convert_model, evaluate, uptrain_model

__version__ = version()
__all__ = [  # noqa: RUF022 - functions, what they return, what they take, what they raise
    "convert_model",
    "uptrain_model",
    "evaluate",
    "ablate",
    "Result",
    "Evaluation",
    "Study",
    "ConvertOptions",
    "UptrainOptions",
    "EvaluateOptions",
    "AblateOptions",
    "RefusedError",
    "CorruptError",
    "CorpusError",
    "OutputError",
    "DivergedError",
    "StoppedError",
    "__version__",
]
