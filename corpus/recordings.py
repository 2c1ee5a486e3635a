"""Recordings, which encoder-decoders that hear are given: WAV files that are named, or that a column of a data set
names beside what is said in them.
"""

from __future__ import annotations

import glob
import hashlib
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import RefusedError, explain
from gqa.corpus.pairs import read_pairs
from gqa.corpus.sources import Source

if TYPE_CHECKING:
    from torch import Tensor


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
                f"with --data 'speech/*.wav', or rows that name them with --field and --target-field{instead}"
            )
        found += files
    return found


def names_recordings(spec: str) -> bool:
    return spec.lower().endswith(".wav") or any(Path(spec).glob("*.wav"))


def read_transcripts(sources: Source, targets: Source) -> Iterator[tuple[Path, str]]:
    """The recordings that one column of a data set names, from where its file is, and what another one says of them.

    Raises CorpusError.
    """
    for found, text in read_pairs(sources, targets):
        yield Path(found.name.rpartition(":")[0]).parent / Path(found.text.strip()).expanduser(), text


def digest(path: Path) -> bytes:
    """What is in a recording, 32 bytes."""
    return hashlib.sha256(path.read_bytes()).digest()


def identify(files: Sequence[Path]) -> str:
    """What is in them, as a hash."""
    return hashlib.sha256(b"".join(map(digest, files))).hexdigest()


class Hearing:
    """What the model in a directory is given of a recording; `reads` is the name of that argument of its forward.

    Raises RefusedError where its feature extractor is not known.
    """

    def __init__(self, directory: Path | str | None, name: str) -> None:
        from transformers import AutoFeatureExtractor

        self.name = name
        try:
            self._extractor: Any = AutoFeatureExtractor.from_pretrained(str(directory), trust_remote_code=False)
        except Exception as error:  # whatever a library raises of files it does not know
            told = explain(error)
            raise RefusedError(f"how {name} hears is not known ({told}): it needs preprocessor_config.json") from None
        self.reads = str(self._extractor.model_input_names[0])

    def samples(self, path: Path) -> NDArray[np.float32]:
        """(n,) from -1 to 1, no more than the model hears. Raises RefusedError."""
        rate, longest = int(self._extractor.sampling_rate), getattr(self._extractor, "n_samples", None)
        found = _samples(path, rate)
        if longest and len(found) > longest:  # the extractor would leave out the rest
            raise RefusedError(
                f"{path} has {len(found) / rate:,.2f} s; {self.name} hears {longest / rate:g} s: cut it into such "
                "pieces, or leave it out"
            )
        return found

    def features(self, path: Path) -> Tensor:
        """What the encoder is given, without a batch. Raises RefusedError."""
        rate = int(self._extractor.sampling_rate)
        heard: Tensor = self._extractor(self.samples(path), sampling_rate=rate, return_tensors="pt")[self.reads][0]
        return heard


@dataclass(frozen=True)
class Recording:
    """A file, and how a model hears it. Raises RefusedError where it does not."""

    path: Path
    hearing: Hearing = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        self.hearing.samples(self.path)

    def features(self) -> Tensor:
        """What the encoder is given, without a batch."""
        return self.hearing.features(self.path)


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
