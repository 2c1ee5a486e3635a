"""Multi-head checkpoints become grouped-query ones: convert, train further, measure. docs/api.md has examples.

    import gqa

    small = gqa.convert_model("examples/stdlib-mha", groups=2)
    model = small.load()

Torch and transformers are imported when a function is first called. What is listed in `__all__` is public, and so are
`gqa.convert.convert_checkpoint` and `plan_conversion`, which these functions build on.

All functions raise RefusedError, before anything is written, where a model, the text or an option cannot be used;
TypeError for options that there are not; OutputError where the result cannot be written or does not verify, and
nothing is left at `output`. Training raises DivergedError if the loss is not finite too often in a row, and
StoppedError after a signal: with `resume=True` a training, and by the same call a study, goes on.
"""

from gqa.checkpoint.errors import (
    CorpusError,
    CorruptError,
    DivergedError,
    OutputError,
    RefusedError,
    StoppedError,
)
from gqa.checkpoint.provenance import version
from gqa.convert.options import ConvertOptions
from gqa.eval.options import EvaluateOptions
from gqa.eval.study.options import AblateOptions
from gqa.uptrain.options import TrainOptions

from .functions import Evaluation, Result, Study, ablate, convert_model, evaluate, uptrain_model

__version__ = version()
__all__ = [  # noqa: RUF022 - functions, what they return, what they take, what they raise
    "convert_model", "uptrain_model", "evaluate", "ablate",
    "Result", "Evaluation", "Study",
    "ConvertOptions", "TrainOptions", "EvaluateOptions", "AblateOptions",
    "RefusedError", "CorruptError", "CorpusError", "OutputError", "DivergedError", "StoppedError",
    "__version__",
]  # fmt: skip
