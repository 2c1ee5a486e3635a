"""`calibrated`: merge heads in closed form on text, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gqa.convert.methods.text_method import TextMethod

if TYPE_CHECKING:
    from gqa.convert.merge.fit import FitTask, FittedModule


class Calibrated(TextMethod):
    """Shared keys and values in closed form on real inputs of the layer, and a refit of W_O.

    Models whose heads cannot be aligned are refused (`needs`); `refined` takes them.
    """

    name = "calibrated"
    cost = "5 to 6 minutes on an H200"
    result = "merged in closed form, fitted to the text"
    example_ratio = "x1.16"

    def fit(self, task: FitTask) -> FittedModule:
        from gqa.convert.merge.fit import fit_module

        return fit_module(task)
