"""The result of a training: a checkpoint with the tensor names, dtypes and file layout of the
source, and its other files unchanged, so whatever loads the source loads the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.files import TensorSpec, shard_names
from gqa.checkpoint.output_directory import require_space
from gqa.checkpoint.provenance import METRICS, PROVENANCE, UPTRAINING
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import write_tensor
from gqa.checkpoint.writer import CheckpointWriter, new_shard
from gqa.core.errors import OutputError, RefusedError, explain, listing, verification_error
from gqa.models.classes import model_class
from gqa.models.names import saved_tensors
from gqa.uptrain.adapters import merge_adapters
from gqa.uptrain.card import CARD, trained_card
from gqa.uptrain.record import move_base_path
from gqa.uptrain.setup import OpenedRun
from gqa.uptrain.state_files import WEIGHTS, State

ReadTensor = Callable[[TensorSpec], Tensor]  # a tensor of the result, in its stored dtype


def write_result(run: OpenedRun, record: dict[str, Any], tensor_of: ReadTensor) -> None:
    """Write and verify the checkpoint of a run whose training is done. The directory appears only
    when it is complete.
    """
    source = run.checkpoint
    with run.open_output() as output:
        require_space(source.nbytes, output.out, what="the result takes")

        # Before the card, which shows the record
        is_moved = move_base_path(run, record)
        log = run.log_path if run.log_path.is_file() else ""  # users delete it
        card = result_card(run, output.out.name, record)
        documents: dict[str, str | Path] = {METRICS: log, CARD: card}
        if is_moved:
            documents[PROVENANCE] = json.dumps(record["conversion"], indent=2) + "\n"

        TrainedCheckpoint(source, tensor_of).write(output, UPTRAINING, record, documents)


def result_card(run: OpenedRun, name: str, record: dict[str, Any]) -> str:
    """The model card of the result, which is called `name`."""
    model = model_class(run.config, run.options.trust_remote_code)
    return trained_card(run.checkpoint, name, model, record)


class TrainedCheckpoint(CheckpointWriter):
    """A source checkpoint with other numbers in its tensors: those that `tensor_of` returns."""

    def __init__(self, source: Checkpoint, tensor_of: ReadTensor) -> None:
        by_file = groupby(source.tensors.values(), key=lambda spec: spec.file)
        parts = [list(specs) for _, specs in by_file]
        shards = dict(zip(shard_names(len(parts)), parts, strict=True))
        super().__init__(source, shards, not_copied=(CARD, UPTRAINING, METRICS))
        self._tensor_of = tensor_of

    def append_tensors(self, target: BinaryIO, tensors: Sequence[TensorSpec]) -> None:
        """One after the other: each is made when it is written."""
        for spec in tensors:
            write_tensor(target, self._tensor_of(spec))

    def verify(self, directory: Path) -> None:
        """Check that names, dtypes and shapes are those of the source."""
        wrong = _layout(self.source) ^ _layout(read_checkpoint(directory))
        if wrong:
            names = {name for name, _, _ in wrong}
            raise verification_error(f"{listing(names)} differ from {self.source.name}")


def _layout(checkpoint: Checkpoint) -> set[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor."""
    return {(name, spec.dtype, spec.shape) for name, spec in checkpoint.tensors.items()}


# --------------------------------------------------------------------------- tensors of the result


def result_tensors(
    model: PreTrainedModel, weights: dict[str, Tensor], source: Checkpoint
) -> ReadTensor:
    """How to get a tensor of the result: it is made of trained weights (whole ones, those of
    `weights_of_affected`), or read from the source if it did not train.

    What is returned raises OutputError if a number is too large for its dtype.
    """
    stored = saved_tensors(model, merge_adapters(weights)) if weights else {}

    def read(spec: TensorSpec) -> Tensor:
        return _cast(stored[spec.name], spec) if spec.name in stored else source.read(spec)

    return read


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A trained tensor in its stored dtype. Raises OutputError if it does not fit into that."""
    cast = stored_as(tensor.detach().cpu(), spec.dtype)
    may_overflow = cast.is_floating_point() and not bool(cast.isfinite().all())
    if may_overflow and bool(tensor.isfinite().all()):
        raise OutputError(
            f"{spec.name} has become too large for {spec.dtype}, its dtype in {spec.file}; train "
            "with a lower --learning-rate, or from a checkpoint in float32"
        )
    return cast


def save_changed_tensors(path: Path, tensor_of: ReadTensor, changed: Sequence[TensorSpec]) -> None:
    """Write the tensors of the result that training has changed into one safetensors file."""
    with new_shard(path, changed) as target:
        for spec in changed:
            write_tensor(target, tensor_of(spec))


def changed_tensors(
    source: Checkpoint, tensor_of: ReadTensor, trained: Collection[str]
) -> list[TensorSpec]:
    """The tensors of the result in which any byte differs from the source, or may differ, as the
    source cannot be read any more; `trained` are the names of those that may.

    Raises OutputError as `tensor_of` does.
    """
    changed = []
    for name, spec in source.tensors.items():
        if name not in trained:
            continue
        result = tensor_of(spec)
        try:
            is_equal = torch.equal(_bytes(result), _bytes(source.read(spec)))
        except (OSError, RefusedError):  # what was trained must not be lost
            is_equal = False
        if not is_equal:
            changed.append(spec)
    return changed


def _bytes(tensor: Tensor) -> Tensor:
    """(n,) bytes of a tensor: of numbers, NaN would differ from itself, and 0 equal -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def saved_tensors_of(source: Checkpoint, state: State) -> ReadTensor:
    """Read tensors of the result: those that `save_changed_tensors` has saved in `state`, and else
    those of the source.
    """
    try:
        file: Any = safe_open(state.path / WEIGHTS, framework="pt")
        names = set(file.keys())
    except Exception as error:  # of the safetensors library
        raise RefusedError(
            f"the trained weights in {state.path} cannot be read ({explain(error)}); delete that "
            "directory, and the same command continues from the state before, if there is one"
        ) from error

    def read(spec: TensorSpec) -> Tensor:
        if spec.name not in names:
            return source.read(spec)
        tensor: Tensor = file.get_tensor(spec.name)
        return tensor

    return read
