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
from gqa.convert.align.pairs import Pair, PairMaker
from gqa.convert.methods import instead

_INSTEAD = f"or use --method {instead(lambda method: method.needs == 'weights')}"


def find_recordings(specs: Sequence[str], name: str) -> list[Path]:
    """The WAV files that paths, patterns and directories name. Raises RefusedError where one names none."""
    found = []
    for spec in specs:
        place = Path(spec).expanduser()
        files = (
            sorted(place.glob("*.wav")) if place.is_dir() else [Path(path) for path in sorted(glob.glob(str(place)))]
        )
        if not files or any(path.suffix.lower() != ".wav" for path in files):
            raise RefusedError(
                f"the encoder of {name} is given sound: calibration takes recordings, and {spec} names none; give WAV "
                f"files with --data 'speech/*.wav', {_INSTEAD}"
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

    def hear(self, files: Sequence[Path], count: int) -> list[Pair]:
        """Of at most so many, chosen by a hash of their names and the seed. Raises RefusedError."""
        by_hash = {hashlib.sha256(f"{self._seed} {path.name}".encode()).digest(): path for path in files}
        rate, sources = int(self._extractor.sampling_rate), list[Tensor]()
        for _, path in sorted(by_hash.items())[:count]:
            heard = self._extractor(_samples(path, rate), sampling_rate=rate, return_tensors="pt")
            sources.append(heard[self._extractor.model_input_names[0]][0])
        self._announce(len(sources))
        return list(zip(sources, self._write(sources, self._seed), strict=True))

    def given(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        return {self._extractor.model_input_names[0]: torch.stack(list(sources))}


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
