"""`--data self:TOKENS`: the teacher writes the text. Sampled before training, a batch at a time, and kept.

What is kept is named by the teacher, the seed and the length of a block, so a longer run goes on where a shorter one
ended, an interrupted one continues, and every rank and every resumed run reads the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from transformers import PreTrainedModel

from gqa.convert.attention import attention_modules
from gqa.convert.checkpoint import Checkpoint
from gqa.convert.maps_file import fingerprint
from gqa.convert.model_config import read_config
from gqa.convert.recast import as_it_is
from gqa.convert.sampling import samples
from gqa.corpus.tokens import Block

_BATCH = 64  # sequences sampled together


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of `size` tokens that a model wrote, out of a file of int32: {"input_ids": (size,) int64}."""

    file: Path
    size: int
    n_blocks: int
    fingerprint: str

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError outside."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        raw = np.fromfile(self.file, np.int32, self.size, offset=4 * self.size * int(index))
        return {"input_ids": raw.astype(np.int64)}


def sampled_blocks(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    size: int,
    n_blocks: int,
    seed: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> SampledBlocks:
    """The first `n_blocks` that `model` (of `checkpoint`) writes, sampling those that are not there yet."""
    from datasets.config import HF_DATASETS_CACHE

    known = as_it_is(checkpoint)
    modules = attention_modules(known, read_config(known.config, known.name))
    told = f"{fingerprint(known, modules)} {seed} {size} {_BATCH} {model.dtype}"
    name = hashlib.sha256(told.encode()).hexdigest()[:32]
    place = Path(HF_DATASETS_CACHE) / "gqa-samples"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{name}.int32"
    with FileLock(f"{file}.lock"):
        have = file.stat().st_size // (4 * size * _BATCH) if file.exists() else 0
        wanted = -(-n_blocks // _BATCH)
        with file.open("r+b" if file.exists() else "w+b") as stream:
            stream.truncate(4 * size * _BATCH * have)  # a batch that was not finished
            for number in range(have, wanted):
                # A batch has a seed of its own: those before need not be sampled again.
                ids = next(samples(model, size, seed=hash_seed(seed, number), batch=_BATCH))
                stream.seek(0, 2)
                stream.write(ids.numpy().astype(np.int32).tobytes())
                stream.flush()
                progress(ids.numel())
    return SampledBlocks(file, size, n_blocks, f"self {name}")


def hash_seed(seed: int, number: int) -> int:
    """The seed of one batch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")
