"""A hash of what a checkpoint computes: work that began on one is not continued on another."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import DEFAULT_JOBS, replacing

_BESIDE = re.compile(r"\.py$|\.model$|\.tiktoken$|^(tokenizer|vocab|merges|special_tokens|added_tokens)[^/]*$")


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the config and of the contents of all files that hold weights, code or the tokenizer."""
    origin = checkpoint.source or checkpoint
    files = [*origin.files, *filter(_BESIDE.search, origin.side_files)]
    config = hashlib.sha256(json.dumps(origin.config, sort_keys=True).encode()).hexdigest()
    return hashlib.sha256("\n".join([config, *file_digests(map(origin.path, files))]).encode()).hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of the contents of each file. A file is read once: its hash is kept in the cache, by its path, size,
    times and inode.
    """
    with ThreadPoolExecutor(max_workers=DEFAULT_JOBS) as pool:
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    from huggingface_hub.constants import HF_HOME

    path = path.resolve()
    stat = path.stat()
    cache = Path(HF_HOME) / "gqa-digests"
    # Tools such as rsync and tar set modification times; nothing sets the time of the last change.
    version = f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    known = cache / hashlib.sha256(version.encode()).hexdigest()
    with suppress(OSError):
        if len(text := known.read_text()) == 64:
            return text
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written to
        cache.mkdir(parents=True, exist_ok=True)
        with replacing(known) as temporary:
            temporary.write_text(digest)
    return digest
