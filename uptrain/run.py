"""Train and write the trained checkpoint: weights under the names, in the dtypes and in the files of the source
checkpoint, and everything else byte for byte, so whatever loads the source loads the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.errors import OutputError, RefusedError, listing
from gqa.checkpoint.files import TensorSpec, new_shard, shard_names, write_index
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.names import saved_tensors, sources
from gqa.checkpoint.provenance import UPTRAINING
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import (
    OutputDirectory,
    copy_file,
    copy_range,
    finite,
    require_space,
    write_tensor,
    write_text,
)
from gqa.uptrain.loop import TrainingProgress, train
from gqa.uptrain.lora import adapter_parts, merge_adapters
from gqa.uptrain.setup import Setup
from gqa.uptrain.summary import card, record_of
from gqa.uptrain.weights import gather_on_lookup

METRICS = "gqa_uptraining.jsonl"
_WRITTEN = frozenset({"README.md", UPTRAINING, METRICS, "config.json"})


def uptrain(setup: Setup, *, quiet: bool = True, argv: Sequence[str] = ()) -> tuple[TrainingProgress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; return the progress and the record that is written there.

    `argv` are the arguments of the command. Raises what `train` raises, and OutputError.
    """
    with setup.states.lock():
        with setup.explain_memory():
            progress, weights = train(setup, quiet=quiet)
        record = finite(record_of(setup, progress, argv))
        with gather_on_lookup(weights) as full_weights:
            if setup.accelerator.is_main_process:
                _export(setup, full_weights, record)
    return progress, record


def _export(setup: Setup, weights: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Write and verify the checkpoint, then remove the states. Without `weights` those of the source are written.

    The directory appears only when it is complete.
    """
    options, source = setup.options, setup.checkpoint
    assert options.output
    with OutputDirectory(options.output, source.directory, options.overwrite) as output:
        work = output.work
        require_space(source.nbytes, output.out)
        _write_weights(setup.model, weights, source, work)
        for name in source.side_files:
            if name not in _WRITTEN:
                copy_file(source.path(name), work / name)
        copy_file(setup.metrics, work / METRICS)
        write_text(work / "README.md", card(source, output.out.name, record))
        write_text(work / "config.json", json.dumps(source.config, indent=2, ensure_ascii=False) + "\n")
        _verify(work, source, options.trust_remote_code)
        output.commit(UPTRAINING, record)
    if not options.keep_state:
        setup.states.remove()


def _write_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], source: Checkpoint, work: Path) -> None:
    """Write the files of the source with their tensors in order; tensors that the class does not use are copied. Each
    weight is looked up only when it is written.

    Raises OutputError if a number is too large for its dtype.
    """
    files = [list(part) for _, part in groupby(source.tensors.values(), key=lambda spec: spec.file)]
    shards = dict(zip(shard_names(len(files)), files, strict=True))
    stored, parts = sources(model) if weights else {}, adapter_parts(weights)
    ready: dict[str, Tensor] = {}
    for file, specs in shards.items():
        with new_shard(work / file, specs) as target:
            for spec in specs:
                if spec.name in stored and spec.name not in ready:
                    needed = [part for name in stored[spec.name][1] for part in parts[name]]
                    ready |= saved_tensors(model, merge_adapters({name: weights[name] for name in needed}))
                if spec.name in ready:
                    write_tensor(target, _cast(ready.pop(spec.name), spec))
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
        load_model(str(work), device="meta", trust_remote_code=trust_remote_code)
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from error
    expected = {name: (spec.dtype, spec.shape) for name, spec in source.tensors.items()}
    actual = {name: (spec.dtype, spec.shape) for name, spec in written.tensors.items()}
    if wrong := {name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} not as in {source.name}")
