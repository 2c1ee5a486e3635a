"""What methods have in common that run text through the model, layer by layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gqa.convert.methods.maps_method import MapsMethod

if TYPE_CHECKING:
    from gqa.convert.merge.finished_layers import FinishedLayers
    from gqa.convert.merge.fit import FitTask, FittedModule
    from gqa.convert.merge.options import MapsOptions
    from gqa.convert.merge.workload import Workload
    from gqa.convert.plan import Plan
    from gqa.core.console import Watcher


class TextMethod(MapsMethod):
    """A method that fits one attention module after the other to calibration text.

    `Calibrator` (merge/calibrate.py) observes each layer and calls `fit` for its modules.
    """

    reads = "text"
    settings = frozenset({"maps", "text", "seed"})
    needs = frozenset({"layers", "symmetry"})

    @abstractmethod
    def fit(self, task: FitTask) -> FittedModule:
        """The maps of one attention module, and weights that replace whole tensors, if any."""

    def find_maps(
        self, plan: Plan, finished: FinishedLayers, options: MapsOptions, watcher: Watcher
    ) -> Mapping[str, Any] | None:
        from gqa.convert.merge.calibrate_model import calibrate_model

        return calibrate_model(plan, self.fit, finished, options, watcher)

    def workload(self, plan: Plan, options: MapsOptions) -> Workload:
        from gqa.convert.merge.workload import calibration_workload

        return calibration_workload(plan, options)

    def describe_options(self, options: MapsOptions) -> dict[str, Any]:
        from gqa.checkpoint.provenance import portable

        text = {name: portable(value) for name, value in asdict(options.text).items()}
        return {
            "text": text | {"tokens": options.text.total_tokens},
            "content": options.text.identify(),
            "ridge": options.ridge,
            "precision": options.precision,
            "most_blocks": options.most_blocks,
        }

    def out_of_memory_message(self, options: MapsOptions) -> str:
        to_pass = "another --device"
        if options.precision == "float32":
            to_pass = f"--precision bfloat16 or {to_pass}"
        return (
            f"out of memory on {options.device}: a layer with {options.blocks_at_once} blocks of "
            f"{options.text.length} tokens does not fit; stop other programs that use it, "
            f"lower --context, or pass {to_pass}"
        )
