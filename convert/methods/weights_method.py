"""What methods have in common that compute maps from the weights alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gqa.convert.methods.maps_method import MapsMethod

if TYPE_CHECKING:
    from gqa.convert.head_maps import HeadMaps
    from gqa.convert.merge.finished_layers import FinishedLayers
    from gqa.convert.merge.maps_from_weights import ModuleEstimate
    from gqa.convert.merge.options import MapsOptions
    from gqa.convert.merge.workload import Workload
    from gqa.convert.plan import Plan
    from gqa.core.console import Watcher


class WeightsMethod(MapsMethod):
    """A method that reads the weights of one attention module after the other.

    If it needs `inputs`, it gets estimates of what each layer reads, from the embeddings and the
    layers before; otherwise all directions of the hidden states count alike.
    """

    reads = "weights"
    settings = frozenset({"maps"})

    @abstractmethod
    def module_maps(self, module: ModuleEstimate) -> HeadMaps:
        """The maps of one attention module, whose heads are in the order of the groups."""

    def maps_by_module(
        self, plan: Plan, search: bool = False, device: str = "cpu"
    ) -> Iterator[tuple[str, HeadMaps]]:
        """Yield path and maps of each attention module; with `search` for the best groups of heads.

        Raises RefusedError if weights are NaN or Inf.
        """
        from gqa.convert.merge.maps_from_weights import estimate_maps

        estimates_inputs = "inputs" in self.needs
        return estimate_maps(plan, self.module_maps, estimates_inputs, search, device)

    def workload(self, plan: Plan, options: MapsOptions) -> Workload:
        from gqa.convert.merge.workload import weights_workload

        return weights_workload(plan)

    def find_maps(
        self, plan: Plan, finished: FinishedLayers, options: MapsOptions, watcher: Watcher
    ) -> None:
        from gqa.convert.merge.finished_layers import maps_tensors

        watcher.stage(self.name, len(plan.changes), "module")
        search = plan.searches(options.grouping)
        for path, maps in self.maps_by_module(plan, search, options.device):
            finished.add(maps_tensors([(path, maps)]))
            watcher.update(1)
