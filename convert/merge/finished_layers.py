"""The finished layers of a conversion, beside its output: a stopped run continues after them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.write import replacing
from gqa.convert.head_maps import MAP_ROLES, HeadMaps, StoredMaps
from gqa.core.errors import CorruptError, RefusedError
from gqa.core.json_text import parse_json
from gqa.core.run_directory import RunDirectory, differences, fingerprint, refuse_another

_INTERVAL = 20  # seconds between states, which may take gigabytes

# What the entries of a run's description are called in errors; others have their own names.
_NAMES = {
    "method": "--method",
    "groups": "--kv-heads",
    "grouping": "--grouping",
    "name": "name of the model",
    "model": "content of the model",
    "device": "--device",
    "content": "content of --data",
    "precision": "--precision",
    "text sources": "--data",
    "text tokens": "--tokens",
    "text length": "--context",
    "text seed": "--seed",
    "text text_column": "--text-column",
    "text target_column": "--target-column",
    "text separator": "--separator",
    "text trust_remote_code": "--trust-remote-code",
    "refinement steps": "--refine-steps",
    "refinement seed": "--seed",
}


def maps_tensors(maps: Iterable[tuple[str, HeadMaps]]) -> dict[str, Tensor]:
    """The maps of attention modules by their paths -> tensors by the names that `StoredMaps`
    reads.
    """
    tensors: dict[str, Tensor] = {}
    for path, maps_of_module in maps:
        for role in MAP_ROLES:
            tensor = getattr(maps_of_module, role)
            if tensor is not None:
                tensors[f"{path}/{role}"] = tensor.float()
        if maps_of_module.order is not None:
            tensors[f"{path}/order"] = torch.tensor(maps_of_module.order)
    return tensors


def _save(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole and durable or not at all."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata)


class FinishedLayers:
    """Files of the finished layers of one conversion, in a hidden directory beside `out`.

    Methods that read text store a file for each layer. `state.safetensors`, written at most every
    20 s, has their number and the hidden states after the last of them: another run continues from
    there. Methods that read weights store a file for each module and no state: they begin anew.

    The run that uses it has locked `out`.

    Attributes:
        count: Layers (or modules) that need not be computed again. Files of further ones, which a
            stopped run may have left, are overwritten.
        errors: The error of each layer.
        drifts: The drift after each layer.
        holds_out: Whether a part of the text is held out for the check instead of calibrated on. A
            run that continues another one holds out the same, whether or not it checks the result.
    """

    def __init__(
        self, out: Path, description: Mapping[str, Any], overwrite: bool, holds_out: bool
    ) -> None:
        """Count the finished layers of a run with the same description.

        Raises RefusedError for layers of another run; with `overwrite` these are removed. Raises it
        in any case for a directory that no run of ours has made.
        """
        out = out.absolute()
        self._run_directory = RunDirectory(
            out.with_name(f".{out.name}.gqa-work"), "finished layers", fingerprint(description)
        )
        self._run_directory.refuse_foreign()

        self.directory = self._run_directory.path
        self._state = self.directory / "state.safetensors"
        self._description = description
        self.holds_out = holds_out
        self.count = 0
        self.errors: list[float | None] = []
        self.drifts: list[float] = []
        self._saved_at = time.monotonic()

        if self._state.exists():
            try:
                self._continue()
            except RefusedError:
                if not overwrite:
                    raise
        if not self.count:  # what is there is of no use
            self.remove()

    def _continue(self) -> None:
        """Count the stored layers. Raises RefusedError if they are of another run, or damaged."""
        try:
            with safe_open(self._state, framework="pt") as file:
                progress = parse_json(file.metadata()["progress"], self._state.name)
            changed = differences(self._description, progress["description"], _NAMES)
            errors = progress["errors"]
            drifts = progress["drifts"]
            count = progress["layers"]
            for layer in range(count):
                self._path(layer).stat()  # raises if the file is gone
            holds_out = bool(progress["holds_out"])
        except (
            SafetensorError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise CorruptError(f"{self._state} is damaged; start over with --overwrite") from error

        if changed:
            refuse_another(
                self._run_directory.path,
                "layers of another run",
                changed,
                "finish that with its options, or start over with --overwrite",
            )
        self.count = count
        self.errors = errors
        self.drifts = drifts
        self.holds_out = holds_out

    def _path(self, layer: int) -> Path:
        return self.directory / f"{layer:05d}.safetensors"

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Store one more file."""
        if not self.directory.exists():
            self._run_directory.claim()
        _save(self._path(self.count), tensors)
        self.count += 1

    def add_layer(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        error: float | None,
        drift: float,
    ) -> None:
        """Store one more layer with its error and the drift after it, and the state after it if it
        is time; another run continues there.
        """
        self.add(tensors)
        self.errors.append(error)
        self.drifts.append(drift)
        if time.monotonic() - self._saved_at >= _INTERVAL:
            progress = {
                "description": self._description,
                "layers": self.count,
                "errors": self.errors,
                "drifts": self.drifts,
                "holds_out": self.holds_out,
            }
            _save(self._state, state, {"progress": json.dumps(progress)})
            self._saved_at = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        """The state from which this run continues; empty if it begins anew."""
        return load_file(self._state) if self.count else {}

    def stored_maps(self, quality: Mapping[str, Any] | None) -> StoredMaps:
        """The maps of all finished layers, each read from its file when it is needed."""
        files = tuple(sorted(self.directory.glob("[0-9]*.safetensors")))
        return StoredMaps(files, self._description, self.errors, self.drifts, quality)

    def remove(self) -> None:
        """Remove the layers."""
        with suppress(OSError):  # what stays is removed by the next run
            self._run_directory.remove()

    def remove_unless_continuable(self) -> None:
        """Remove the layers if no run can continue after them: no state is stored."""
        if not self._state.exists():
            self.remove()
