"""Compute the maps of a plan by its method, and hold them while the result is written; a stopped
run can continue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.convert.head_maps import StoredMaps
from gqa.convert.merge.finished_layers import FinishedLayers
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.maps_method import MapsMethod
from gqa.convert.plan import Plan
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import out_of_memory
from gqa.core.errors import LayerwiseError, NoMemoryError, RefusedError, alternatives


@contextmanager
def method_errors(method: MapsMethod, options: MapsOptions, instead: str) -> Iterator[None]:
    """Say in the errors of the block what the user can do.

    Raises NoMemoryError with advice of the method, and RefusedError for a model that cannot be run
    layer by layer, with what to do `instead`.
    """
    try:
        yield
    except BaseException as error:
        if out_of_memory(error):
            raise NoMemoryError(method.out_of_memory_message(options)) from error
        if isinstance(error, LayerwiseError):
            raise RefusedError(f"{error}; {instead}") from error
        raise


@contextmanager
def with_maps(
    plan: Plan,
    out: Path,
    options: MapsOptions | None,
    watcher: Watcher = SILENT,
    overwrite: bool = False,
) -> Iterator[StoredMaps | None]:
    """Yield the maps of a plan's method, which exist while the block runs; None if the plan needs
    no maps. `options` may be None only then.

    Layers calibrated on text are stored beside `out` until the block succeeds, so that the same
    call can continue after the last of them.

    Raises RefusedError and TextError. A model that cannot be run layer by layer is refused with
    the methods that read no text.
    """
    method = plan.method
    if not isinstance(method, MapsMethod):
        yield None
        return

    assert options is not None
    description = _description(plan, method, options)
    layers = FinishedLayers(out, description, overwrite, holds_out=options.check)
    is_continued = layers.count > 0

    usable = [other.name for other in plan.available_methods if other.reads != "text"]
    try:
        with method_errors(method, options, f"use --method {alternatives(usable)}"):
            quality = method.find_maps(plan, layers, options, watcher)
    except BaseException as error:
        # What is refused once is refused again, so what this run made goes; layers of an earlier
        # run stay. Memory may be there another time.
        comes_again = isinstance(error, RefusedError) and not isinstance(error, NoMemoryError)
        if comes_again and not is_continued:
            layers.remove()
        else:
            layers.remove_unless_continuable()
        raise

    try:
        yield layers.stored_maps(quality)
    except BaseException:  # the result could not be written: layers that took hours stay
        layers.remove_unless_continuable()
        raise
    layers.remove()


def _description(plan: Plan, method: MapsMethod, options: MapsOptions) -> dict[str, Any]:
    """Everything that determines the maps, as JSON: only a run with the same continues this one."""
    grouping = "search" if plan.searches(options.grouping) else "contiguous"
    description = {
        "method": method.name,
        "groups": plan.kv_heads,
        "grouping": grouping,
        "name": plan.checkpoint.hub_id or plan.checkpoint.name,
        "model": checkpoint_digest(plan.checkpoint),
        "device": options.device,
        "versions": versions("gqa", "torch", "transformers"),
        **method.describe_options(options),
    }
    return dict(json.loads(json.dumps(description)))  # as it is read back: tuples are lists
