"""`self:TOKENS`: a model writes the text that it is calibrated on, or that its conversion learns from, and it is kept.

What is kept is named by the model, the seed and the length of a block, so a longer run goes on where a shorter one
ended, an interrupted one continues, and every rank and every resumed run reads the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from transformers import PreTrainedModel

from gqa.checkpoint.devices import native_bfloat16
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.align.sampling import first_token, samples
from gqa.convert.heads.config import read_config
from gqa.convert.maps_file import digest_of
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.corpus.tokens import Block

_BATCH = 64  # sequences sampled together at most
_CACHE_BYTES = 1 << 30  # that their caches may fill


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
    load: Callable[[str], PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    size: int,
    n_blocks: int,
    seed: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> SampledBlocks:
    """The first `n_blocks` of `size` tokens that the model of `checkpoint` writes at temperature 1. They begin with the
    token that a sample starts from if its tokenizer begins texts with it: text is read as the model is used.

    `load` gives the model in the dtype of that name, on `device`; it is called if some of them are not there yet.
    Raises RefusedError where it cannot be sampled from.
    """
    from datasets.config import HF_DATASETS_CACHE

    known = as_it_is(checkpoint)
    start = first_token(read_config(known.config, known.name).text, known.name)
    lead = 0 if _begins(checkpoint, start) else 1
    # Samples are noise of temperature 1 anyway: what the device multiplies fast, however the model is stored.
    dtype = torch.bfloat16 if native_bfloat16(device) else torch.float32
    batch, whole = _batch(known, size, dtype), digest_of(checkpoint.origin, checkpoint.origin.tensors)
    told = f"{whole} {start} {lead} {seed} {size} {batch} {dtype}"
    name = hashlib.sha256(told.encode()).hexdigest()[:32]
    place = Path(HF_DATASETS_CACHE) / "gqa-samples"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{name}.int32"
    with FileLock(f"{file}.lock"):
        have = file.stat().st_size // (4 * size * batch) if file.exists() else 0
        wanted = -(-n_blocks // batch)
        if wanted > have:
            model = load(str(dtype).removeprefix("torch."))
        with file.open("r+b" if file.exists() else "w+b") as stream:
            stream.truncate(4 * size * batch * have)  # a batch that was not finished
            for number in range(have, wanted):
                # A batch has a seed of its own: those before need not be sampled again.
                ids = next(samples(model, size + lead, seed=_hash_seed(seed, number), batch=batch))[:, lead:]
                stream.seek(0, 2)
                stream.write(ids.numpy().astype(np.int32).tobytes())
                stream.flush()
                progress(ids.numel())
    return SampledBlocks(file, size, n_blocks, f"self {name}")


def _begins(checkpoint: Checkpoint, token: int) -> bool:
    """Whether the tokenizer begins a text with that token; a model without one is taken to need it."""
    try:
        found = load_tokenizer(checkpoint, instead="use self")("a")["input_ids"]
    except RefusedError:
        return True
    return bool(found) and found[0] == token


def _batch(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    """As many sequences as _CACHE_BYTES hold keys and values for: a step takes hardly longer for more of them."""
    cache = checkpoint_cache(checkpoint)
    each = cache.bytes_per_token // cache.bytes_per_number * dtype.itemsize * length
    return max(1, min(_BATCH, _CACHE_BYTES // each))


def _hash_seed(seed: int, number: int) -> int:
    """The seed of one batch."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")
