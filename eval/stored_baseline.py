"""The baseline's predictions kept on disk, so that many models are compared with it and it runs once.

Of each place the most probable tokens are kept that together have the mass asked for, with logarithms in float16, and
all others as one number. What the rounding costs is measured while they are written, as KL(stored || exact), and
reported with every number that uses it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gqa.checkpoint.devices import as_float64
from gqa.checkpoint.errors import OutputError, explain
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.processes import main_first, total, wait_for_everyone
from gqa.checkpoint.write import write_text
from gqa.corpus.predictions import TopPredictions, open_rows, read_row, writing
from gqa.corpus.windows import Window
from gqa.eval.scoring import Predictions

_DATA, _META = "predictions-*.arrow", "baseline.json"
Record = Callable[[NDArray[np.int64], Tensor], None]


def fingerprint(model: str, windows: Sequence[Window], dtype: str) -> str:
    """Changes with the model's files, the windows and the dtype."""
    digest = hashlib.sha256(f"{model} {dtype}".encode())
    if Path(model).is_dir():
        for path in sorted(Path(model).iterdir()):
            if path.suffix in (".json", ".safetensors", ".bin"):
                status = path.stat()
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    for window in windows:
        digest.update(np.array([window.scored, *window.source, -1, *window.ids], np.int64).tobytes())
    return digest.hexdigest()


def record_baseline(
    directory: Path, key: str, mass: float, scored: Callable[[Record], NDArray[np.float32]]
) -> StoredBaseline:
    """Keep in `directory` what `scored` gives to the function that it gets, for `score(record=...)`, each process its
    own; it returns the nats (N,) of all. There is no baseline before all of it is written.

    Raises OutputError where it cannot be written.
    """
    rank, lost, kept = ranks().process_index, 0.0, 0
    try:
        with main_first():
            directory.mkdir(parents=True, exist_ok=True)
            for old in [directory / _META, *directory.glob(_DATA)] if rank == 0 else ():
                old.unlink(missing_ok=True)
        with writing(directory / _DATA.replace("*", f"{rank:06d}")) as write:

            def record(rows: NDArray[np.int64], exact: Tensor) -> None:
                nonlocal lost, kept
                top = TopPredictions.of(exact, mass)
                top = replace(top, logs=top.logs.half(), rest=top.rest.half())
                write({"rows": rows, **top.stored(exact.shape[-1])})
                lost, kept = lost + float(as_float64(top.divergence(exact).clamp_min(0.0)).sum()), kept + len(top.ids)

            nats = scored(record)
        told = {"fingerprint": key, "mass": mass, "tokens": len(nats), "kl_lost_mean": total(lost) / len(nats)}
        told["tokens_a_prediction"] = total(kept) / len(nats)  # all have written what they kept
        if rank == 0:
            np.save(directory / "nats.npy", nats)
            write_text(directory / _META, json.dumps(told, indent=2) + "\n")
        wait_for_everyone()
    except OSError as error:
        raise OutputError(f"the baseline cannot be kept in {directory} ({explain(error)}); nothing was kept") from None
    return StoredBaseline(directory, told)


class StoredBaseline:
    """A finished recording, in the place of a model (a `scoring.Baseline`)."""

    def __init__(self, directory: Path, record: dict[str, Any]) -> None:
        self.record = record
        self.nats: NDArray[np.float32] = np.load(directory / "nats.npy")
        files = [open_rows(path) for path in sorted(directory.glob(_DATA)) if path.stat().st_size]
        self._kept = [read_row(file, number) for file in files for number in range(file.num_record_batches)]
        order = np.concatenate([kept["rows"] for kept in self._kept]).argsort()
        if len(order) != len(self.nats):
            raise ValueError(f"{directory} lacks a part")
        self._counts, self._rest = (
            np.concatenate([kept[name] for kept in self._kept])[order] for name in ("top_counts", "top_rest")
        )
        begins = [kept["top_counts"].cumsum() - kept["top_counts"] for kept in self._kept]
        self._begin = np.concatenate(begins)[order]
        self._part = np.repeat(range(len(begins)), [len(begin) for begin in begins])[order]

    @classmethod
    def open(cls, directory: Path, key: str) -> StoredBaseline | None:
        """The recording in `directory`; None where there is none of this model, text and dtype."""
        try:
            record = json.loads((directory / _META).read_text())
            return cls(directory, record) if record["fingerprint"] == key else None
        except (OSError, ValueError, KeyError):  # cut short, or of another version: to be made again
            return None

    def __call__(self, inputs: dict[str, Tensor], places: Tensor, rows: NDArray[np.int64]) -> Predictions:
        def read(piece: slice) -> TopPredictions:
            own = rows[piece]
            spans = zip(self._part[own], self._begin[own], self._begin[own] + self._counts[own], strict=True)
            found = [(self._kept[part], slice(begin, end)) for part, begin, end in spans]
            ids, logs = (np.concatenate([kept[name][span] for kept, span in found]) for name in ("top_ids", "top_logs"))
            parts = (self._counts[own], ids.astype(np.int32), logs, self._rest[own])
            return TopPredictions(*(torch.from_numpy(part).to(places.device) for part in parts))

        return read
