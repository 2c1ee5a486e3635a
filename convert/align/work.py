"""What layers gave, kept beside the output until that is there: the same command goes on after the last of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import replacing, write_text
from gqa.convert.align.pair import Streams
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import MapsFile, join_maps, open_maps, save_maps


class Work:
    """`with Work(output, told, overwrite) as work`: a hidden directory beside `output`, which one run at a time has.

    `told` decides the maps. A run that stops, in whatever way, leaves the directory; one that finished no layer removes
    it. Layers of a run that was told otherwise are refused, or forgotten with `overwrite`.
    """

    def __init__(self, output: Path, told: Mapping[str, Any], overwrite: bool) -> None:
        self._output, self._told, self._overwrite = output, json.loads(json.dumps(dict(told))), overwrite
        self.place = output.absolute().with_name(f".{output.absolute().name}.gqa-work")
        self._lock = FileLock(self.place / "lock")
        self._check()

    @property
    def layers(self) -> int:
        """How many are finished."""
        return int(self._done().get("layers", 0))

    @property
    def complete(self) -> bool:
        """Whether all are."""
        return self.layers > 0 and self.layers == self._done()["of"]

    def __enter__(self) -> Work:
        self.place.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RefusedError(
                f"another run is finding maps for {self._output}; wait for it or give another -o"
            ) from None
        self._check()
        if not self.layers:
            for left in (path for path in self.place.iterdir() if path.name != "lock"):
                left.unlink()
            write_text(self.place / "options.json", json.dumps(self._told))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self.layers:
            self.remove()
        self._lock.release()

    def keep(self, layer: int, module: str, maps: HeadMaps, weights: Mapping[str, Tensor]) -> None:
        """What came out of a layer, by the path of its attention module."""
        save_maps(self.place / f"{layer:04d}.safetensors", {module: maps}, weights, self._told)

    def finish(self, layer: int, layers: int, streams: Streams) -> None:
        """One more of `layers` is finished: the streams that leave it first, then the word that they are there."""
        file = f"streams-{layer:04d}.safetensors"
        save_file({"source": streams.source, "converted": streams.converted}, self.place / file)
        with replacing(self.place / "done.json") as temporary:
            temporary.write_text(json.dumps({"layers": layer + 1, "of": layers, "streams": file}))
        for old in self.place.glob("streams-*.safetensors"):
            if old.name != file:
                old.unlink()

    def streams(self) -> Streams | None:
        """What left the last finished layer."""
        if not self.layers:
            return None
        tensors = load_file(self.place / self._done()["streams"])
        return Streams(tensors["source"], tensors["converted"])

    def join(self, path: Path) -> MapsFile:
        """One file of what was kept."""
        join_maps(path, sorted(self.place.glob("[0-9]*.safetensors")), self._told)
        return open_maps(path)

    def remove(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)

    def _done(self) -> dict[str, Any]:
        """What is finished of a run that was told the same."""
        file = self.place / "done.json"
        return dict(json.loads(file.read_text())) if file.exists() and self._before() == self._told else {}

    def _before(self) -> dict[str, Any]:
        return dict(json.loads((self.place / "options.json").read_text()))

    def _check(self) -> None:
        """Raises RefusedError where another run has finished layers."""
        if self._overwrite or not (self.place / "done.json").exists():
            return
        before, told = self._before(), self._told
        for key in sorted(before.keys() | told.keys()):
            if before.get(key) != told.get(key):
                raise RefusedError(
                    f"{self.place} holds layers of an unfinished run with {key} {before.get(key)}, not "
                    f"{told.get(key)}; run it to its end, or start over with --overwrite"
                )
