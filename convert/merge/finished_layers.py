"""The finished layers of a conversion, beside its output: a stopped run continues after them."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.write import replacing
from gqa.convert.head_maps import MAPS, HeadMaps, StoredMaps
from gqa.core.errors import CorruptError, RefusedError, differences
from gqa.core.json_text import parse_json
from gqa.core.work import claim, fingerprint, is_ours, remove

_INTERVAL = 20  # seconds between states, which may take gigabytes
_PURPOSE = "finished layers"  # of the directory of `FinishedLayers`

# What options are called in errors; the others have the names of `describe`.
_NAMES = {
    "method": "--method",
    "groups": "--groups",
    "grouping": "--grouping",
    "name": "name of the model",
    "model": "content of the model",
    "device": "--device",
    "content": "content of --data",
    "dtype": "--precision",
    "text sources": "--data",
    "text tokens": "--tokens",
    "text length": "--context",
    "text seed": "--seed",
    "text field": "--field",
    "text target_field": "--target-field",
    "text separator": "--separator",
    "text trust_remote_code": "--trust-remote-code",
    "refinement steps": "--refine-steps",
    "refinement seed": "--seed",
}


def _flat(description: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """A description for people: options by their names, values as they are typed,
    hashes shortened.
    """
    flat = dict[str, str]()
    for key, value in description.items():
        name = f"{within} {key}".strip()
        if isinstance(value, dict):
            flat |= _flat(value, name)
        elif isinstance(value, list):
            flat[_NAMES.get(name, name)] = ",".join(_short(str(one)) for one in value)
        else:
            flat[_NAMES.get(name, name)] = _short("none" if value is None else str(value))
    return flat


def _short(text: str) -> str:
    """A text, in which hashes have 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}", r"\1", text)


def maps_tensors(maps: Iterable[tuple[str, HeadMaps]]) -> dict[str, Tensor]:
    """The maps of attention modules by their paths -> tensors by the names that `StoredMaps`
    reads.
    """
    tensors: dict[str, Tensor] = {}
    for module, head_maps in maps:
        parts = {part: getattr(head_maps, part) for part in MAPS}
        tensors |= {
            f"{module}/{part}": tensor.float()
            for part, tensor in parts.items()
            if tensor is not None
        }
        if head_maps.order is not None:
            tensors[f"{module}/order"] = torch.tensor(head_maps.order)
    return tensors


def _save(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole and durable or not at all."""
    with replacing(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata,
        )


class FinishedLayers:
    """The layers of one conversion that are finished, in a hidden directory beside `out`: a file
    for each, and from time to time `state.safetensors` with what the next one needs, and their
    number.
    """

    def __init__(
        self, out: Path, description: Mapping[str, Any], overwrite: bool, holds_out: bool
    ) -> None:
        """Count the finished layers of a run with the same description.

        Raises RefusedError for layers of another run; with `overwrite` these are removed. Raises it
        in any case for a directory that no run of ours has made.

        holds_out: Whether text is held out for the check, and so is no calibration text. A run that
            continues another one takes the same text, whether or not it checks the result.
        """
        self.directory = out.absolute().with_name(f".{out.absolute().name}.gqa-work")
        if os.path.lexists(self.directory) and not is_ours(self.directory, _PURPOSE):
            raise RefusedError(
                f"{self.directory} was not left by a run of gqa; move it away or give another "
                "directory with -o"
            )

        self._state, self._description = self.directory / "state.safetensors", description
        self.holds_out = holds_out
        self.count, self.errors, self._saved = 0, list[float | None](), time.monotonic()
        if self._state.exists():
            with suppress(RefusedError) if overwrite else nullcontext():
                self._continue()
        if not self.count:
            self.remove()

    def _continue(self) -> None:
        """Count the stored layers. Raises RefusedError if they are of another run, or damaged."""
        try:
            with safe_open(self._state, framework="pt") as file:
                progress = parse_json(file.metadata()["progress"], self._state.name)
            for layer in range(progress["layers"]):
                (self.directory / f"{layer:05d}.safetensors").stat()
            now, before = _flat(self._description), _flat(progress["description"])
            holds_out = bool(progress["holds_out"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{self._state} is damaged; start over with --overwrite") from error
        if changed := differences(now, before):
            advice = "finish that with its options, or start over with --overwrite"
            raise RefusedError(
                f"{self.directory} holds layers of another run ({'; '.join(changed)}); {advice}"
            )
        self.count, self.errors, self.holds_out = progress["layers"], progress["errors"], holds_out

    def add(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None = None,
        error: float | None = None,
    ) -> None:
        """Store one more layer with its error, and the state after it if it is time; another run
        continues there.
        """
        if not self.directory.exists():
            claim(self.directory, _PURPOSE, fingerprint(self._description))
        _save(self.directory / f"{self.count:05d}.safetensors", tensors)
        self.count += 1
        if state is not None:
            self.errors.append(error)
            if time.monotonic() - self._saved >= _INTERVAL:
                progress = {
                    "description": self._description,
                    "layers": self.count,
                    "errors": self.errors,
                    "holds_out": self.holds_out,
                }
                _save(self._state, state, {"progress": json.dumps(progress)})
                self._saved = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        """The state from which this run continues."""
        return load_file(self._state) if self.count else {}

    def maps(self, quality: Mapping[str, Any] | None) -> StoredMaps:
        files = tuple(sorted(self.directory.glob("[0-9]*.safetensors")))
        return StoredMaps(files, self._description, self.errors, quality)

    def remove(self, keep: bool = False) -> None:
        """Remove the layers; with `keep` only if no run can continue after them."""
        if not (keep and self._state.exists()):
            with suppress(OSError):  # what stays is removed by the next run
                remove(self.directory, _PURPOSE)
