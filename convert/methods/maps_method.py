"""What methods have in common that read the model: maps are computed first and then applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gqa.convert.methods.base import Method

if TYPE_CHECKING:
    from gqa.convert.merge.finished_layers import FinishedLayers
    from gqa.convert.merge.options import MapsOptions
    from gqa.convert.merge.workload import Workload
    from gqa.convert.plan import Plan
    from gqa.core.console import Watcher


class MapsMethod(Method, ABC):
    """A method that computes maps for each attention module, of keys, values, queries and W_O."""

    needs = frozenset({"symmetry"})

    @abstractmethod
    def find_maps(
        self, plan: Plan, finished: FinishedLayers, options: MapsOptions, watcher: Watcher
    ) -> Mapping[str, Any] | None:
        """Add the maps of every module to `finished`, which may have the first ones from a run that
        was stopped.

        Returns:
            The quality of both models on held-out text; None if it is not measured.

        Raises:
            RefusedError: Weights or text cannot be used; TextError is one of this kind.
        """

    @abstractmethod
    def workload(self, plan: Plan, options: MapsOptions) -> Workload:
        """What `find_maps` computes and holds, for the estimates that are printed."""

    def describe_options(self, options: MapsOptions) -> dict[str, Any]:
        """All options that determine the maps, besides the device and how heads are grouped.

        They are a part of the description of a run (find_maps.py): only a run with the same can
        continue a stopped one.
        """
        return {}

    def out_of_memory_message(self, options: MapsOptions) -> str:
        """The message for a device on which `find_maps` ran out of memory."""
        return f"out of memory on {options.device}; pass another --device"
