"""A trained model as a checkpoint: its weights under the names, in the dtypes and the files of the checkpoint that it
came from, and everything else byte for byte. So nothing that read that one has to learn anything to read this one.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from gqa.checkpoint.errors import OutputError, RefusedError, listing
from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.names import stored_shapes, stored_tensors, tied_names
from gqa.checkpoint.read import Checkpoint, holds_weights, read_checkpoint, stored_as
from gqa.checkpoint.shards import new_shard, shard_names, write_index
from gqa.checkpoint.write import OutputDirectory, copy_file, copy_range, require_space, write_tensor, write_text
from gqa.uptrain.card import UPTRAINING, card

if TYPE_CHECKING:
    from torch import Tensor

METRICS = "gqa_uptraining.jsonl"
ADAPTER = "adapter"
_WRITTEN = frozenset({"README.md", UPTRAINING, METRICS, "config.json"})


def export(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    source: Checkpoint,
    out: Path,
    record: dict[str, Any],
    *,
    overwrite: bool = False,
    extra: dict[str, Path] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write `weights` (a state dict of `model`, which was loaded from `source`), verified by loading them again.

    `extra` are more files by their name in the output. The directory appears at once, complete. Raises OutputError.
    """
    with OutputDirectory(out, source.directory, overwrite) as output:
        work = output.work
        require_space(source.nbytes, output.out)
        _write_weights(stored_tensors(model, weights), source, work)
        for name in source.side_files:
            if name not in _WRITTEN and not holds_weights(name) and not name.startswith(f"{ADAPTER}/"):
                copy_file(source.path(name), work / name)
        for name, path in (extra or {}).items():
            copy_file(path, work / name)
        write_text(work / UPTRAINING, json.dumps(record, indent=2) + "\n")
        write_text(work / "README.md", card(source, out.name, record))
        copy_file(source.path("config.json"), work / "config.json")
        _verify(work, source, trust_remote_code)
        output.commit()


def check_exportable(model: PreTrainedModel, source: Checkpoint) -> None:
    """Raise RefusedError, before anything is trained, where what a model's class stores is not what its source has."""
    stored = stored_shapes(model)
    known = {name: spec.shape for name, spec in source.tensors.items()}
    tied = tied_names(model)
    odd = [name for name, shape in stored.items() if known.get(name, shape) != shape]
    odd += [name for name in stored if name not in known and name not in tied]
    if odd or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(odd or stored)} otherwise than {source.name} does; load it "
            "with transformers, save it again and train that"
        )


def _write_weights(stored: dict[str, Tensor], source: Checkpoint, work: Path) -> None:
    """The files of the source with their tensors in their order; what the class does not read stays as it is."""
    parts = [list(part) for _, part in groupby(source.tensors.values(), key=lambda spec: spec.file)]
    shards = dict(zip(shard_names(len(parts)), parts, strict=True))
    for file, specs in shards.items():
        with new_shard(work / file, specs) as target:
            for spec in specs:
                if spec.name in stored:
                    write_tensor(target, _cast(stored.pop(spec.name), spec))
                elif source.has_range(spec):
                    with source.path(spec.file).open("rb") as stream:
                        copy_range(stream, target, spec.begin, spec.nbytes)
                else:
                    write_tensor(target, source.read(spec))
    write_index(work, shards)


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    cast = stored_as(tensor.detach().cpu(), spec.dtype)
    if cast.is_floating_point() and not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise OutputError(f"{spec.name} has become too large for {spec.dtype}, in which {spec.file} stores it")
    return cast


def _verify(work: Path, source: Checkpoint, trust_remote_code: bool) -> None:
    try:
        written = read_checkpoint(work)
        load_model(str(work), trust_remote_code=trust_remote_code)
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None
    expected = {name: (spec.dtype, spec.shape) for name, spec in source.tensors.items()}
    actual = {name: (spec.dtype, spec.shape) for name, spec in written.tensors.items()}
    if wrong := {name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} not as in {source.name}")
