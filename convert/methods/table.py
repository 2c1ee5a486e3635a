"""The methods by name, from the one that loses most to the one that loses least; a control may
stand anywhere.

The output recommends the last one that a model allows. Imports no torch.
"""

from __future__ import annotations

from gqa.convert.methods.aligned import Aligned
from gqa.convert.methods.base import Method
from gqa.convert.methods.calibrated import Calibrated
from gqa.convert.methods.first import First
from gqa.convert.methods.mean import Mean
from gqa.convert.methods.procrustes import Procrustes
from gqa.convert.methods.random import Random
from gqa.convert.methods.refined import Refined

_METHODS: tuple[Method, ...] = (
    Random(),
    First(),
    Mean(),
    Procrustes(),
    Aligned(),
    Calibrated(),
    Refined(),
)
METHODS = {method.name: method for method in _METHODS}
DEFAULT_METHOD = "refined"
BUDGET_METHOD = "calibrated"  # by which --kv-budget measures what each layer loses by fewer heads
