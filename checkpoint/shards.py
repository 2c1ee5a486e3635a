"""The weights of a checkpoint as it is written: safetensors files, and the index over them where they are several."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from gqa.checkpoint.files import INDEX, SINGLE
from gqa.checkpoint.headers import byte_size, format_header
from gqa.checkpoint.write import write_bytes, write_text


class Stored(Protocol):
    """A tensor as the header of its file names it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def shard_names(count: int) -> list[str]:
    """How transformers calls the files of weights that lie in so many."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


@contextmanager
def new_shard(path: Path, tensors: Sequence[Stored]) -> Iterator[BinaryIO]:
    """A file with its header, to which the bytes of these tensors are appended in this order; durable at the end."""
    with path.open("wb", buffering=0) as target:
        write_bytes(target, format_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}))
        yield target
        os.fsync(target.fileno())


def write_index(directory: Path, shards: Mapping[str, Sequence[Stored]]) -> None:
    """Which file has which tensor, sorted as transformers does; a single file needs no index."""
    if len(shards) == 1:
        return
    tensors = [tensor for part in shards.values() for tensor in part]
    weight_map = {tensor.name: file for file, part in shards.items() for tensor in part}
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(byte_size(tensor.dtype, tensor.shape) for tensor in tensors),
    }
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
