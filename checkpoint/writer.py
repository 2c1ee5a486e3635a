"""Write a checkpoint: which files, and in which order. Conversion and training share it; what is in
the tensors is theirs.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gqa.checkpoint.files import INDEX, byte_size, format_header
from gqa.checkpoint.output_directory import OutputDirectory
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import copy_file, write_bytes, write_text


class CheckpointWriter(ABC):
    """Writes one checkpoint. Subclasses say what is in its tensors, and how it is verified.

    writer = ConvertedCheckpoint(plan)
    with OutputDirectory(out, source) as output:
        writer.write(output, "gqa_conversion.json", record, {"README.md": card})

    Tensors have a `name`, a `dtype` and a `shape`.
    """

    def __init__(
        self,
        source: Checkpoint,
        shards: Mapping[str, Sequence[Any]],
        *,
        config: str | None = None,
        not_copied: Collection[str] = (),
    ) -> None:
        """
        Args:
            source: The checkpoint whose side files are copied.
            shards: The tensors of each weight file, in the order of their bytes, by its name.
            config: The text of config.json; None if it is the source's, byte for byte.
            not_copied: Side files that are written anew, or that describe only the source.
        """
        self.source = source
        self.shards = shards
        self._config = config
        self._not_copied = not_copied

    def write(
        self,
        output: OutputDirectory,
        name: str,
        record: Mapping[str, Any],
        documents: Mapping[str, str | Path],
    ) -> dict[str, Any]:
        """Write the checkpoint and make it visible, complete and verified.

        Args:
            output: The directory, which this process has entered.
            name: The file of the record that lists all others.
            record: What is in it, JSON-ready.
            documents: What says how the checkpoint was made: texts, or files to copy, by name.

        Returns:
            The record as it was written.

        Raises:
            OutputError: The result could not be written or does not verify; nothing is left of it.
        """
        work = output.work
        self.write_weights(work)
        self._write_side_files(work)
        self._write_config(work)  # last: without it nothing looks like a checkpoint
        self.verify(work)

        for document, content in documents.items():
            if isinstance(content, Path):
                copy_file(content, work / document)
            else:
                write_text(work / document, content)
        return output.commit(name, record)

    def write_weights(self, directory: Path) -> None:
        """Write the weight files and, if there are several, their index."""
        self.write_shards(directory)
        write_index(directory, self.shards)

    def write_shards(self, directory: Path) -> None:
        """Write the weight files, one after the other."""
        for file, tensors in self.shards.items():
            with new_shard(directory / file, tensors) as target:
                self.append_tensors(target, tensors)

    @abstractmethod
    def append_tensors(self, target: BinaryIO, tensors: Sequence[Any]) -> None:
        """Append the bytes of these tensors to a weight file, whose header is written."""

    @abstractmethod
    def verify(self, directory: Path) -> None:
        """Read what was written, from disk. Raises OutputError if it is not what it should be."""

    def _write_side_files(self, directory: Path) -> None:
        """Everything that is neither weights nor config.json."""
        for name in self.source.side_files:
            if name not in self._not_copied:
                copy_file(self.source.path(name), directory / name)
        for name, text in self.source.extra_files.items():
            write_text(directory / name, text)

    def _write_config(self, directory: Path) -> None:
        """config.json, new or copied."""
        name = "config.json"
        if self._config is None:
            copy_file(self.source.path(name), directory / name)
        else:
            write_text(directory / name, self._config)


@contextmanager
def new_shard(path: Path, tensors: Sequence[Any]) -> Iterator[BinaryIO]:
    """Open a safetensors file and write its header; append the tensors' bytes in this order.

    The file is durable at the end of the block.

    tensors: Each has a `name`, a `dtype` and a `shape`.
    """
    header = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    with path.open("wb", buffering=0) as target:
        write_bytes(target, format_header(header))
        yield target
        os.fsync(target.fileno())


def write_index(directory: Path, shards: Mapping[str, Sequence[Any]]) -> None:
    """Write the index (tensor -> file), sorted as in transformers,
    unless there is a single file.
    """
    if len(shards) == 1:
        return

    weight_map: dict[str, str] = {}
    parameters = 0
    size = 0
    for file, tensors in shards.items():
        for tensor in tensors:
            weight_map[tensor.name] = file
            parameters += math.prod(tensor.shape)
            size += byte_size(tensor.dtype, tensor.shape)

    metadata = {"total_parameters": parameters, "total_size": size}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
