"""Safetensors headers of files at the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.headers import MAX_HEADER_BYTES, TensorSpec, read_header
from gqa.checkpoint.read import (
    INDEX,
    Checkpoint,
    holds_weights,
    merge_tables,
)

if TYPE_CHECKING:
    pass

# Weights are fetched by name; the same model in other formats is not fetched at all.
OTHER_FORMATS = ("original/", "onnx/", "openvino/")
FIRST_BYTES = 2**16  # of a remote shard: nearly always its whole header


def opened(headers: Checkpoint, place: Path, present: Collection[str]) -> Checkpoint:
    """A checkpoint of which everything but the weights is fetched to `place`, where weights come as they are read."""
    assert headers.remote is not None
    side = sorted(name for name in present if name != "config.json" and is_side_file(name))
    beside = [name for name in ("config.json", INDEX) if name in present]
    directory = headers.remote.open(place, [*beside, *side])
    return replace(headers, directory=directory, side_files=tuple(side))


def is_side_file(name: str) -> bool:
    """Whether a file of a repository is fetched beside the weights."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not (hidden or name.startswith(OTHER_FORMATS) or holds_weights(name))


def remote_tensors(
    files: Sequence[str], index: dict[str, Any] | None, fs: Any, path: Callable[[str], str], **how: Any
) -> dict[str, TensorSpec]:
    """The table of all tensors, of which only headers are fetched."""
    with ThreadPoolExecutor(8) as pool:
        tables = pool.map(lambda file: _remote_table(fs, path(file), file, **how), files)
        return merge_tables(dict(zip(files, tables, strict=True)), index)


def _remote_table(fs: Any, path: str, file: str, **how: Any) -> list[TensorSpec]:
    """The tensors of a file elsewhere, as strictly read as those of a local one: a file of its size, in which nothing
    follows the header.

    HfApi.parse_safetensors_file_metadata would not do: it gives no size of the file and keeps the last of two tensors
    of one name.
    """
    with TemporaryDirectory() as place, fs.open(path, block_size=FIRST_BYTES, **how) as stream:
        length = stream.read(8)
        copy = Path(place) / "header.safetensors"
        copy.write_bytes(length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
        os.truncate(copy, stream.size)
        return read_header(copy, file)
