"""Generated text in the cache of `datasets`, in batches: a longer run continues a shorter or an
interrupted one, and every rank and every resumed run reads the same.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from torch import Tensor

from gqa.checkpoint.write import write_bytes
from gqa.corpus.cache import cache_errors, datasets_cache


def store_batches(
    identity: str,
    *,
    block_size: int,
    batch_size: int,
    n_blocks: int,
    sample: Callable[[Sequence[int]], Iterable[Tensor]],
) -> Path:
    """A file in the cache of `datasets` with at least `n_blocks` blocks (block_size,) of int32
    token ids.

    Each batch is durable before the next is sampled, and stays if one fails: another call continues
    there.

    Args:
        identity: What determines the blocks. The file is named by its hash.
        block_size: Tokens of a block.
        batch_size: Blocks of a batch.
        n_blocks: Blocks that the file has at least.
        sample: `sample(batch_indices)` yields the missing batches with these indices, one or
            several at a time.

    Raises:
        RefusedError: The text cannot be sampled.
        CacheError: The cache cannot be written, or is too small, as far as that is known before
            anything is sampled.
    """
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path = datasets_cache() / "gqa-samples" / f"{name}.int32"
    with cache_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        _append_batches(path, block_size, batch_size, n_blocks, sample)
    return path


def _append_batches(
    path: Path,
    block_size: int,
    batch_size: int,
    n_blocks: int,
    sample: Callable[[Sequence[int]], Iterable[Tensor]],
) -> None:
    """Append the batches that a file lacks; see `store_batches`."""
    batch_bytes = 4 * block_size * batch_size
    n_batches = math.ceil(n_blocks / batch_size)
    with FileLock(f"{path}.lock"), path.open("ab", buffering=0) as file:
        stored = file.tell() // batch_bytes
        file.truncate(batch_bytes * stored)  # drop the partial batch of an interrupted run
        missing = range(stored, n_batches)
        if not missing:
            return

        needed = batch_bytes * len(missing)
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            reason = (
                f"{needed:,} bytes of generated text do not fit into the {free:,} that are free"
            )
            raise OSError(errno.ENOSPC, reason, str(path))

        for ids in sample(missing):
            try:
                write_bytes(file, ids.numpy().astype(np.int32).tobytes())
                os.fsync(file.fileno())
            except OSError as error:
                stored = file.tell() // batch_bytes
                kept = f"{stored} of {n_batches} parts of the generated text are kept"
                reason = f"{error.strerror} ({kept})"
                raise OSError(error.errno, reason, str(path)) from error
