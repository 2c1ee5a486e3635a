"""Recordings that an encoder-decoder which hears is calibrated on, with what the model itself writes down of them."""

from __future__ import annotations

import glob
import hashlib
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoFeatureExtractor

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.pairs import WRITTEN, Pair, PairMaker
from gqa.convert.align.self_samples import SampledBlocks, batch_seed, content, kept
from gqa.convert.methods import instead

INSTEAD = f", or use --method {instead(lambda method: method.needs == 'weights')}"


def find_recordings(specs: Sequence[str], name: str, instead: str = "") -> list[Path]:
    """The WAV files that paths, patterns and directories name. Raises RefusedError where one names none, with what else
    can be done.
    """
    found = []
    for spec in specs:
        place = Path(spec).expanduser()
        files = (
            sorted(place.glob("*.wav")) if place.is_dir() else [Path(path) for path in sorted(glob.glob(str(place)))]
        )
        if not files or any(path.suffix.lower() != ".wav" for path in files):
            raise RefusedError(
                f"the encoder of {name} is given sound: it takes recordings, and {spec} names none; give WAV files "
                f"with --data 'speech/*.wav'{instead}"
            )
        found += files
    return found


def names_recordings(spec: str) -> bool:
    return spec.lower().endswith(".wav") or any(Path(spec).glob("*.wav"))


def identify(files: Sequence[Path]) -> str:
    """What is in them, as a hash."""
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()


class RecordingMaker(PairMaker):
    """Pairs of what an encoder is given of a recording, and what the decoder writes of it."""

    def __init__(self, checkpoint: Checkpoint, *how: Any) -> None:
        super().__init__(checkpoint, *how)
        try:
            self._extractor = AutoFeatureExtractor.from_pretrained(str(checkpoint.directory))
        except Exception as error:  # whatever a library raises of files it does not know
            told = explain(error)
            raise RefusedError(
                f"how {checkpoint.name} hears is not known ({told}): it needs preprocessor_config.json"
            ) from None
        self.reads = str(self._extractor.model_input_names[0])

    def hear(self, files: Sequence[Path], count: int) -> list[Pair]:
        """Of at most so many, chosen by a hash of their names and the seed. Raises RefusedError."""
        by_hash = {hashlib.sha256(f"{self._seed} {path.name}".encode()).digest(): path for path in files}
        sources = [self.features(path) for _, path in sorted(by_hash.items())[:count]]
        self._announce(len(sources))
        return list(zip(sources, self._write(sources, self._seed), strict=True))

    def features(self, path: Path) -> Tensor:
        """What the encoder is given of a recording, without a batch. Raises RefusedError."""
        rate, longest = int(self._extractor.sampling_rate), getattr(self._extractor, "n_samples", None)
        samples = _samples(path, rate)
        if longest and len(samples) > longest:  # the extractor would leave out the rest
            raise RefusedError(
                f"{path} has {len(samples) / rate:,.2f} s; {self.name} hears {longest / rate:g} s: cut it into such "
                "pieces, or leave it out"
            )
        heard: Tensor = self._extractor(samples, sampling_rate=rate, return_tensors="pt")[self.reads][0]
        return heard

    def written(self, files: Sequence[Path], write: bool = True) -> SampledBlocks:
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
            sources = [self.features(path) for path in files[number * WRITTEN : (number + 1) * WRITTEN]]
            for row, ids in zip(rows, self._write(sources, batch_seed(self._seed, number)), strict=False):
                row[: len(ids)] = torch.tensor(ids)
            return rows

        told = f"heard {content(self._checkpoint)} {identify(files)} {self._seed} {self.length} {self._dtype}"
        file = kept(told, self.length, WRITTEN, len(files), begin, made)
        return SampledBlocks(file, self.length, len(files), f"heard {file.stem}", self._seed, 0, plain=True)

    def given(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        return {self.reads: torch.stack(list(sources))}


def _samples(path: Path, rate: int) -> NDArray[np.float32]:
    """(n,) from -1 to 1, the mean of all channels. Raises RefusedError."""
    try:
        with wave.open(str(path)) as sound:
            found = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
            frames = sound.readframes(sound.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise RefusedError(f"{path} is no WAV file that can be read ({explain(error)}); give 16-bit PCM") from None
    if found[:2] != (rate, 2) or not frames:
        told = f"{len(frames) // found[1] // found[2]:,} samples at {found[0]:,} Hz of {8 * found[1]} bits"
        raise RefusedError(
            f"{path} has {told}; the model hears 16-bit PCM at {rate:,} Hz: ffmpeg -i IN -ar {rate} OUT.wav"
        )
    levels: NDArray[np.float32] = np.frombuffer(frames, "<i2").reshape(-1, found[2]).mean(1, np.float32)
    return levels / np.float32(32768)
