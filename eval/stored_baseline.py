"""The baseline's predictions kept on disk, so that many models are compared with it and it runs once.

Log-probabilities are stored in float16, 2 bytes for every token of the vocabulary at every scored position. What that
rounding costs is measured while they are written, as KL(exact || stored), and reported with every number that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gqa.checkpoint.devices import as_float64
from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.write import write_text
from gqa.corpus.likelihood import kl_divergence
from gqa.corpus.recordings import digest as recording_digest
from gqa.corpus.windows import Window
from gqa.eval.scoring import Predictions

_DATA, _META = "log_probabilities.f16", "baseline.json"


def fingerprint(model: str, windows: Sequence[Window], dtype: str) -> str:
    """Changes with the model's files, the windows and the dtype."""
    digest = hashlib.sha256(f"{model} {dtype}".encode())
    if Path(model).is_dir():
        for path in sorted(Path(model).iterdir()):
            if path.suffix in (".json", ".safetensors", ".bin"):
                status = path.stat()
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    for window in windows:
        digest.update(recording_digest(window.heard.path) if window.heard else b"")
        digest.update(np.array([window.scored, *window.source, -1, *window.ids], np.int64).tobytes())
    return digest.hexdigest()


class Recorder:
    """Pass it to `score(record=...)`, then `finish()`: the file is not a baseline before that."""

    def __init__(self, directory: Path, key: str, tokens: int, vocabulary: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _META).unlink(missing_ok=True)
        self._directory, self._key, self._shape = directory, key, (tokens, vocabulary)
        size = tokens * vocabulary * 2
        try:
            with (directory / _DATA).open("wb") as stream:
                if hasattr(os, "posix_fallocate"):  # a write to a mapped hole of a full disk would kill the process
                    os.posix_fallocate(stream.fileno(), 0, size)
                stream.truncate(size)
            self._data = np.memmap(directory / _DATA, np.float16, "r+", shape=self._shape)
        except OSError as error:
            (directory / _DATA).unlink(missing_ok=True)
            raise OutputError(f"cannot keep {size:,} bytes in {directory}: {error}") from None
        self._sum, self._worst = 0.0, 0.0

    def __call__(self, rows: NDArray[np.int64], exact: Tensor) -> None:
        # Below float16's range a probability is 0 for every purpose, and -inf would make differences NaN.
        stored = exact.clamp_min(torch.finfo(torch.float16).min).to(torch.float16)
        self._data[rows] = stored.cpu().numpy()
        lost = kl_divergence(exact, stored.float())
        self._sum += float(as_float64(lost).sum())
        self._worst = max(self._worst, float(lost.max()))

    def finish(self, nats: NDArray[np.float32]) -> StoredBaseline:
        self._data.flush()
        np.save(self._directory / "nats.npy", nats)
        record = {
            "fingerprint": self._key,
            "tokens": self._shape[0],
            "vocabulary": self._shape[1],
            "kl_lost_mean": self._sum / self._shape[0],
            "kl_lost_maximum": self._worst,
        }
        write_text(self._directory / _META, json.dumps(record, indent=2) + "\n")
        return StoredBaseline(self._directory, record)


class StoredBaseline:
    """A finished recording, in the place of a model (a `scoring.Baseline`)."""

    def __init__(self, directory: Path, record: dict[str, Any]) -> None:
        shape = (record["tokens"], record["vocabulary"])
        self.record = record
        self.nats: NDArray[np.float32] = np.load(directory / "nats.npy")
        self._data = np.memmap(directory / _DATA, np.float16, "r", shape=shape)

    @classmethod
    def open(cls, directory: Path, key: str) -> StoredBaseline | None:
        """The recording in `directory`; None where there is none of this model, text and dtype."""
        try:
            record = json.loads((directory / _META).read_text())
            return cls(directory, record) if record["fingerprint"] == key else None
        except (OSError, ValueError, KeyError):  # cut short, or of another version: to be made again
            return None

    def __call__(self, inputs: dict[str, Tensor], places: Tensor, rows: NDArray[np.int64]) -> Predictions:
        return lambda piece: torch.from_numpy(self._data[rows[piece]]).to(places.device).float()
