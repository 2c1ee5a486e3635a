"""Recordings, which encoder-decoders that hear are given: files that are named, or what a column of a data set has of
them, paths or sounds, beside what is said in them.
"""

from __future__ import annotations

import glob
import hashlib
import os
import wave
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import RefusedError, explain
from gqa.corpus.pairs import read_pairs
from gqa.corpus.sources import Source

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")


@dataclass(frozen=True)
class Sound:
    """A recording as it is stored: the file at `place`, or the row there of a data set, which holds it itself."""

    place: str
    stored: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return Path(self.place).name

    def read(self) -> bytes:
        """Raises RefusedError."""
        try:
            return self.stored() if self.stored else Path(self.place).read_bytes()
        except OSError as error:
            raise RefusedError(f"{self.place} cannot be read: {error.strerror}") from None

    def digest(self) -> bytes:
        """What is in it, 32 bytes."""
        return hashlib.sha256(self.read()).digest()


def find_recordings(specs: Sequence[str], name: str, instead: str = "") -> list[Sound]:
    """The files that paths, patterns and directories name. Raises RefusedError where one names none, with what else
    can be done.
    """
    found = []
    for spec in specs:
        place = Path(os.path.expanduser(spec))
        files = sorted(file for file in place.glob("*") if _is_sound(file)) if place.is_dir() else glob.glob(str(place))
        if not files or not all(map(_is_sound, files)):
            raise RefusedError(
                f"the encoder of {name} is given sound: it takes recordings, and {spec} names none; give WAV files "
                f"with --data 'speech/*.wav', or rows that hold or name them with --field and --target-field{instead}"
            )
        found += [Sound(str(file)) for file in sorted(files)]
    return found


def _is_sound(file: Path | str) -> bool:
    return str(file).lower().endswith(SUFFIXES)


def read_transcripts(sources: Source, targets: Source) -> Iterator[tuple[Sound, str]]:
    """The recordings in one column of a data set, a `SoundField`, and what another one says of them. Paths are from
    where its file is; sounds lie in a file without a name, not in memory. Raises CorpusError.
    """
    held = TemporaryFile()  # noqa: SIM115 - it stays as long as what is in it
    for found, text in read_pairs(sources, targets):
        if found.sound is None:
            place = Path(found.name.rpartition(":")[0]).parent / os.path.expanduser(found.text.strip())
            yield Sound(str(place)), text
        else:
            at = held.tell()
            held.write(found.sound)
            held.flush()
            yield Sound(found.name, partial(_held, held, len(found.sound), at)), text


def _held(file: IO[bytes], size: int, at: int) -> bytes:
    return os.pread(file.fileno(), size, at)


def identify(sounds: Sequence[Sound]) -> str:
    """What is in them, as a hash."""
    return hashlib.sha256(b"".join(sound.digest() for sound in sounds)).hexdigest()


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

    def samples(self, sound: Sound) -> NDArray[np.float32]:
        """(n,) from -1 to 1, no more than the model hears. Raises RefusedError."""
        rate, longest = int(self._extractor.sampling_rate), getattr(self._extractor, "n_samples", None)
        found = _samples(sound, rate)
        if longest and len(found) > longest:  # the extractor would leave out the rest
            raise RefusedError(
                f"{sound.place} has {len(found) / rate:,.2f} s; {self.name} hears {longest / rate:g} s: cut it into "
                "such pieces, or leave it out"
            )
        return found

    def features(self, sound: Sound) -> Tensor:
        """What the encoder is given, without a batch. Raises RefusedError."""
        rate = int(self._extractor.sampling_rate)
        heard: Tensor = self._extractor(self.samples(sound), sampling_rate=rate, return_tensors="pt")[self.reads][0]
        return heard


@dataclass(frozen=True)
class Recording:
    """A sound, and how a model hears it. Raises RefusedError where it does not."""

    sound: Sound
    hearing: Hearing = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        self.hearing.samples(self.sound)

    def features(self) -> Tensor:
        """What the encoder is given, without a batch."""
        return self.hearing.features(self.sound)


def _samples(sound: Sound, rate: int) -> NDArray[np.float32]:
    """(n,) from -1 to 1, the mean of all channels; of what is no 16-bit WAV at this rate, as transformers reads it.

    Raises RefusedError.
    """
    stored, levels = sound.read(), np.zeros(0, np.float32)
    try:
        with wave.open(BytesIO(stored)) as file:
            found = file.getframerate(), file.getsampwidth(), file.getnchannels()
            if found[:2] == (rate, 2):
                frames = file.readframes(file.getnframes())
                levels = np.frombuffer(frames, "<i2").reshape(-1, found[2]).mean(1, np.float32) / np.float32(32768)
            told = f"has {file.getnframes():,} samples at {found[0]:,} Hz of {8 * found[1]} bits"
    except (EOFError, ValueError, wave.Error) as error:
        found, told = None, f"is no WAV file of PCM ({explain(error)})"
    if not found or found[:2] != (rate, 2):
        from transformers.audio_utils import load_audio

        try:
            levels = load_audio(f"data:;base64,{b64encode(stored).decode()}", rate)
        except ImportError:
            raise RefusedError(
                f"{sound.place} {told}; the model hears 16-bit PCM at {rate:,} Hz: ffmpeg -i IN -ar {rate} OUT.wav, "
                "or, to have it converted, pip install 'transformers[audio]'"
            ) from None
        except Exception as error:  # every library has its own
            raise RefusedError(f"{sound.place} is no recording that can be read: {explain(error)}") from None
    if not len(levels):
        raise RefusedError(f"{sound.place} {told}: there is nothing to hear; leave it out")
    return levels
