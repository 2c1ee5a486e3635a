"""Text that a model writes, `self:TOKENS`: what it is calibrated on, or what its conversion learns from.

Sequences sampled at temperature 1 need no data and look like what the model was trained on. They are stored in batches,
so that a longer run goes on where a shorter one ended, an interrupted one continues, and every rank and every resumed
run reads the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.console import SILENT, Watcher
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import FILLED, free_memory, load_tokenizer, native_bfloat16
from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import replacing
from gqa.convert.heads.config import read_config
from gqa.convert.merge.sampling import samples
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.corpus.tokens import MIX, Block, first_token, mixed

SAMPLED = 64  # sequences sampled together at most
SAMPLED_BYTES = 1 << 30  # that their caches may fill
DRAWN = 24  # bytes for each score of a token, while one is drawn
_MOST = 16384  # sequences at a time: attention kernels number them with 16 bits


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of `size` tokens that a model wrote: {"input_ids": (size,) int64}. Files of `directory` have `batch` each.

    lead: tokens at the beginning of each block that belong there (BOS); plain: they are as the model wrote them, else a
    part of them repeats itself (`mixed` in corpus/tokens.py).
    """

    directory: Path
    batch: int
    size: int
    n_blocks: int
    fingerprint: str
    seed: int
    lead: int
    plain: bool

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError outside."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        block = self._raw(index) if self.plain else mixed(self._raw, index, self.seed, self.lead)
        return {"input_ids": block.astype(np.int64)}

    def _raw(self, index: int) -> NDArray[np.int32]:
        file, row = divmod(int(index), self.batch)
        return np.fromfile(_batch_file(self.directory, file), np.int32, self.size, offset=4 * self.size * row)


def sampled_blocks(
    load: Callable[..., PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    size: int,
    n_blocks: int,
    seed: int,
    plain: bool,
    watcher: Watcher = SILENT,
    write: bool = True,
    trust_remote_code: bool = False,
) -> SampledBlocks:
    """The first `n_blocks` of `size` tokens that the model of `checkpoint` writes at temperature 1. They begin with the
    token that a sample starts from if its tokenizer begins texts with it: text is read as the model is used. Unless
    `plain`, a part of them repeats itself, since nothing that a model writes exercises what finds things again.

    `load(dtype=...)` gives the model on `device`; it is called if some of them are not there yet, with `device="auto"`
    where its weights do not fit there. Raises RefusedError where it cannot be sampled from. Unless it is to `write`,
    they are none that could be read.
    """
    source = as_it_is(checkpoint)
    start = first_token(read_config(source.config, source.name).text, source.name)
    lead = 0 if _begins(checkpoint, start, trust_remote_code) else 1
    # Samples are noise of temperature 1 anyway: what the device multiplies fast, however the model is stored.
    dtype = torch.bfloat16 if native_bfloat16(device) else torch.float32
    batch = max(1, min(SAMPLED, SAMPLED_BYTES // _cache_bytes(source, size, dtype)))
    if not write:
        return SampledBlocks(Path(), batch, size, n_blocks, "", seed, 1 - lead, plain)

    def begin(batches: int) -> tuple[Any, int]:
        """The model, and how many batches are sampled at a time."""
        watcher.stage(f"{checkpoint.name} writes", batches * batch * (size + lead - 1))
        spread = {"device": "auto"} if _too_large(source, dtype, device) else {}
        model = load(dtype=str(dtype).removeprefix("torch."), **spread)
        free = [free_memory(place) for place in {parameter.device for parameter in model.parameters()}]
        least = len(free) * min(of or 0 for of in free)  # none where some of it is in the host's memory or on its disk
        return model, max(1, at_once(source, size, dtype, least) // batch)

    def sample(model: Any, numbers: Sequence[int]) -> Tensor:
        seeds = [derive_seed(seed, number) for number in numbers]
        return samples(model, size + lead, seed=seeds, batch=batch, progress=watcher.update)[:, lead:]

    identity = f"{samples_identity(checkpoint, trust_remote_code)} {start} {lead} {seed} {size} {batch} {dtype}"
    directory = store_batches(identity, size, batch, n_blocks, begin, sample)
    fingerprint = f"self {directory.name} {'plain' if plain else MIX}"
    return SampledBlocks(directory, batch, size, n_blocks, fingerprint, seed, 1 - lead, plain)


def samples_identity(checkpoint: Checkpoint, trusted: bool) -> str:
    """What decides what a model writes: its contents, whether code that it brings is `trusted`, and what runs it."""
    code = trusted and "auto_map" in (checkpoint.source or checkpoint).config
    return f"{checkpoint_digest(checkpoint)} {versions('torch', 'transformers')}{' code' * code}"


def derive_seed(seed: int, label: int | str) -> int:
    """An independent seed: of a batch by its number, so that batches before it need not be sampled again; of text for
    another use than calibration, which has the seed itself, since weights predict the text they were fitted to better.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {label}".encode()).digest()[:7], "big")


def store_batches(
    identity: str, size: int, batch: int, rows: int,
    begin: Callable[[int], tuple[Any, int]], sample: Callable[[Any, Sequence[int]], Tensor],
) -> Path:  # fmt: skip
    """A directory in the cache of `datasets`, named by the hash of `identity`, with a file of (batch, size) int32 for
    each batch of `rows` rows. `begin(batches)` gives the model that makes those that are not there, and how many it
    makes at a time; `sample(model, numbers)` gives these, one below the other. Raises RefusedError.
    """
    from datasets.config import HF_DATASETS_CACHE

    directory = Path(HF_DATASETS_CACHE) / "gqa-samples" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / "lock"):
        files = {number: _batch_file(directory, number) for number in range(-(-rows // batch))}
        missing = [n for n, file in files.items() if not file.exists() or file.stat().st_size != 4 * batch * size]
        model, several = begin(len(missing)) if missing else (None, 1)
        for first in range(0, len(missing), several):
            numbers = missing[first : first + several]
            for number, ids in zip(numbers, sample(model, numbers).split(batch), strict=True):
                with replacing(files[number]) as temporary:
                    temporary.write_bytes(ids.numpy().astype(np.int32).tobytes())
    return directory


def _batch_file(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.int32"


def _begins(checkpoint: Checkpoint, token: int, trusted: bool) -> bool:
    """Whether the tokenizer begins a text with that token; a model without one is taken to need it."""
    try:
        ids = load_tokenizer(checkpoint, trusted)("a")["input_ids"]
    except RefusedError:
        return True
    return bool(ids) and ids[0] == token


def _too_large(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> bool:
    """Whether weights in that dtype are more than `device` has free, beside what models leave to what is computed."""
    weights = dtype.itemsize * sum(math.prod(spec.shape) for spec in checkpoint.tensors.values())
    free = free_memory(torch.device(device))
    return free is not None and weights > free * FILLED


def at_once(checkpoint: Checkpoint, length: int, dtype: torch.dtype, free: int) -> int:
    """How many sequences three quarters of so many free bytes hold."""
    vocabulary = int(read_config(checkpoint.config, checkpoint.name).text.vocab_size)
    return min(_MOST, free * 3 // 4 // (_cache_bytes(checkpoint, length, dtype) + DRAWN * vocabulary))


def _cache_bytes(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    cache = checkpoint_cache(checkpoint)
    return cache.bytes_per_token // cache.bytes_per_number * dtype.itemsize * length
