"""`refined`: `calibrated`, then each layer is trained toward the base model's layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gqa.convert.methods.text_method import TextMethod

if TYPE_CHECKING:
    from gqa.convert.merge.fit import FitTask, FittedModule
    from gqa.convert.merge.options import MapsOptions
    from gqa.convert.merge.workload import Workload
    from gqa.convert.plan import Plan


class Refined(TextMethod):
    """The closed form, then training; from the mean where heads cannot be aligned."""

    name = "refined"
    cost = "8 to 22 minutes on an H200"
    result = "merged in closed form, then adjusted layer by layer"
    example_ratio = "x1.11"
    settings = TextMethod.settings | {"training"}
    needs = frozenset({"layers"})

    def fit(self, task: FitTask) -> FittedModule:
        from gqa.convert.merge.fit_and_refine import fit_and_refine

        return fit_and_refine(task)

    def workload(self, plan: Plan, options: MapsOptions) -> Workload:
        from gqa.convert.merge.workload import refinement_workload

        return refinement_workload(plan, options)

    def describe_options(self, options: MapsOptions) -> dict[str, Any]:
        return super().describe_options(options) | {"refinement": asdict(options.refinement)}
