"""What layers gave, kept beside the output until that is there: the same command goes on after the last of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import locked
from gqa.convert.align.pair import Streams
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import MapsFile, join_maps, open_maps, save_maps


class Work:
    """A hidden directory beside `output`, which one run at a time has while it is `held`.

    `told` decides the maps. A run that stops, in whatever way, leaves the directory; one that finished no layer removes
    it, and so does one that looks at weights alone: what it kept of layers is not finished. Layers of a run that was
    told otherwise are refused, or forgotten with `overwrite`.
    """

    def __init__(self, output: Path, told: Mapping[str, Any], overwrite: bool) -> None:
        self._output, self._told, self._overwrite = output, json.loads(json.dumps(dict(told))), overwrite
        self.place = output.absolute().with_name(f".{output.absolute().name}.gqa-work")
        self._state = self.place / "streams.safetensors"
        self._check()

    @property
    def layers(self) -> int:
        """How many are finished."""
        done = self._done()
        return int(done["layers"]) if done and done["told"] == self._told else 0

    @property
    def complete(self) -> bool:
        """Whether all are."""
        return self.layers > 0 and self.layers == self._done()["of"]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises RefusedError where another run has it."""
        self.place.mkdir(parents=True, exist_ok=True)
        told = f"another run is finding maps for {self._output}; wait for it or give another -o"
        with locked(self.place / "lock", told):
            self._check()
            if not self.layers:
                for left in (path for path in self.place.iterdir() if path.name != "lock"):
                    left.unlink()
            try:
                yield
            except BaseException:
                if not self.layers:
                    self.remove()
                raise
            self.remove()

    def keep(self, layer: int, module: str, maps: HeadMaps, weights: Mapping[str, Tensor]) -> None:
        """What came out of a layer, by the path of its attention module."""
        save_maps(self.place / f"{layer:04d}.safetensors", {module: maps}, weights, self._told)

    def finish(self, layer: int, layers: int, streams: Streams) -> None:
        """One more of `layers` is finished: that word is in the file of the streams that leave it."""
        done = json.dumps({"told": self._told, "layers": layer + 1, "of": layers})
        temporary = self._state.with_suffix(".partial")
        save_file({"source": streams.source, "converted": streams.converted}, temporary, {"done": done})
        temporary.replace(self._state)

    def streams(self) -> Streams | None:
        """What left the last finished layer."""
        return Streams(**load_file(self._state)) if self.layers else None

    def join(self, path: Path) -> MapsFile:
        """One file of what was kept."""
        join_maps(path, sorted(self.place.glob("[0-9]*.safetensors")), self._told)
        return open_maps(path)

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def _done(self) -> dict[str, Any]:
        """What is finished, of whatever run."""
        if not self._state.exists():
            return {}
        with safe_open(self._state, framework="pt") as stream:
            return dict(json.loads(stream.metadata()["done"]))

    def _check(self) -> None:
        """Raises RefusedError where another run has finished layers."""
        if self._overwrite or not (done := self._done()):
            return
        before, told = done["told"], self._told
        for key in sorted(before.keys() | told.keys()):
            if before.get(key) != told.get(key):
                raise RefusedError(
                    f"{self.place} holds layers of an unfinished run with {key} {before.get(key)}, not "
                    f"{told.get(key)}; run it to its end, or start over with --overwrite"
                )
