"""Recordings that an encoder-decoder which hears is calibrated on, with what is said in them, or what the model itself
writes of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.pairs import WRITTEN, Pair, PairMaker
from gqa.convert.align.self_samples import SampledBlocks, batch_seed, content, kept
from gqa.convert.methods import instead
from gqa.corpus.recordings import Hearing, Sound, identify

INSTEAD = f", or use the method {instead(lambda method: method.needs == 'weights')}"


class RecordingMaker(PairMaker):
    """Pairs of what an encoder is given of a recording, and what is said in it. Raises RefusedError."""

    def __init__(self, checkpoint: Checkpoint, *how: Any) -> None:
        super().__init__(checkpoint, *how)
        self.hearing = Hearing(checkpoint.directory, checkpoint.name)

    def hear(self, rows: Sequence[tuple[Sound, str | None]], count: int) -> list[Pair]:
        """Of at most so many, chosen by a hash of their names and the seed; the decoder writes a text that is None.
        Raises RefusedError.
        """
        by_hash = sorted(rows, key=lambda row: hashlib.sha256(f"{self._seed} {row[0].name}".encode()).digest())[:count]
        sources = [self.hearing.features(sound) for sound, _ in by_hash]
        if texts := [text for _, text in by_hash if text is not None]:
            return [(heard, target) for heard, (_, target) in zip(sources, self._framed([], texts), strict=True)]
        self._announce(len(sources))
        return list(zip(sources, self._write(sources, self._seed), strict=True))

    def written(self, files: Sequence[Sound], write: bool = True) -> SampledBlocks:
        """What is written of each, in blocks of `length` tokens that are filled up with -1, and kept as samples are.
        Raises RefusedError. Unless it is to `write`, they are none that could be read.
        """
        if not write:
            return SampledBlocks(Path(), self.length, len(files), "", self._seed, 0, plain=True)

        def begin(batches: int) -> int:
            self._announce(len(files) - (-(-len(files) // WRITTEN) - batches) * WRITTEN)
            return 1

        def made(numbers: range) -> Tensor:
            rows, number = torch.full((WRITTEN, self.length), -1), numbers[0]
            sources = [self.hearing.features(sound) for sound in files[number * WRITTEN : (number + 1) * WRITTEN]]
            for row, ids in zip(rows, self._write(sources, batch_seed(self._seed, number)), strict=False):
                row[: len(ids)] = torch.tensor(ids)
            return rows

        known = content(self._checkpoint, self._trusted)
        told = f"heard {known} {identify(files)} {self._seed} {self.length} {self._dtype}"
        file = kept(told, self.length, WRITTEN, len(files), begin, made)
        return SampledBlocks(file, self.length, len(files), f"heard {file.stem}", self._seed, 0, plain=True)

    def given(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        return {self.hearing.reads: torch.stack(list(sources))}
