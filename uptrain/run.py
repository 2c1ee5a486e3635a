"""Train, and write a checkpoint with the tensor names, dtypes and file layout of the source, and its other files
unchanged, so whatever loads the source loads the result.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.console import SILENT, Watcher
from gqa.checkpoint.errors import OutputError, RefusedError, explain, listing, plural
from gqa.checkpoint.files import TensorSpec, new_shard, shard_names, write_index
from gqa.checkpoint.loading import on_main, out_of_memory
from gqa.checkpoint.names import saved_tensors
from gqa.checkpoint.provenance import (
    METRICS,
    PROVENANCE,
    UPTRAINING,
    read_record,
    relative_path,
    request,
    stamp,
    versions,
)
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import OutputDirectory, copy_file, finite, require_space, write_tensor, write_text
from gqa.corpus.sources import parse_self
from gqa.uptrain.card import CARD, trained_card
from gqa.uptrain.loop import evaluation_interval, train, warmup_steps
from gqa.uptrain.models import is_base_model
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.setup import Setup
from gqa.uptrain.state import TrainingProgress
from gqa.uptrain.weights import gather, merge_adapters

# The two held-out losses, in words.
DISTILLATION, CROSS_ENTROPY = "KL divergence", "cross-entropy"
_WRITTEN = frozenset({CARD, UPTRAINING, METRICS})


def uptrain(setup: Setup, watcher: Watcher = SILENT) -> tuple[TrainingProgress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; return the progress and the record in it. Raises what `train`
    raises, and OutputError.
    """
    with setup.states.lock(keep=setup.start is not None):
        try:
            progress, weights = train(setup, watcher)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                if not setup.options.compile:
                    raise
                raise RefusedError(f"training with --compile failed ({explain(error, 200)}); leave it out") from error
            raise RefusedError(
                f"out of memory while training on {setup.accelerator.device}; lower --micro-batch (now "
                f"{setup.micro_batch}) or --context (now {setup.options.block:,}), or give --checkpointing, "
                "--train lora or --optimizer adafactor"
            ) from error
        record, whole = finite(record_of(setup, progress)), gather(weights)
        on_main(lambda: _export(setup, whole, record))
    return progress, record


def _export(setup: Setup, weights: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write and verify the checkpoint, then remove the training states. Empty `weights`: copy the source's.

    The directory appears only when it is complete.
    """
    options, source = setup.options, setup.checkpoint
    assert options.output
    with OutputDirectory(options.output, source.directory, options.overwrite) as output:
        work = output.work
        require_space(source.nbytes, output.out)
        _write_weights(setup.model, weights, source, work)
        for name in ("config.json", *source.side_files):
            if name not in _WRITTEN:
                copy_file(source.path(name), work / name)
        base = record["conversion"].get("source") if isinstance(record["conversion"], dict) else None
        if isinstance(base, dict) and base.get("path"):  # from the new place; users edit such files
            base["path"] = relative_path(source.directory / str(base["path"]), output.out)
            write_text(work / PROVENANCE, json.dumps(record["conversion"], indent=2) + "\n")
        copy_file(setup.metrics, work / METRICS)
        write_text(work / CARD, trained_card(source, output.out.name, type(setup.model), record))
        tables = (one.tensors.items() for one in (source, read_checkpoint(work)))
        expected, written = ({(name, spec.dtype, spec.shape) for name, spec in table} for table in tables)
        if wrong := {name for name, *_ in expected ^ written}:
            raise OutputError(f"the result does not verify: {listing(wrong)} differ from {source.name}")
        output.commit(UPTRAINING, record)
    if not options.keep_state:
        for state in setup.states.complete():
            shutil.rmtree(state, ignore_errors=True)
        setup.metrics.unlink(missing_ok=True)


def _write_weights(model: PreTrainedModel, weights: dict[str, Tensor], source: Checkpoint, work: Path) -> None:
    """Write the weight files with their tensors in the source's order; copy tensors that the class does not use.

    Raises OutputError if a number is too large for its dtype.
    """
    files = [list(part) for _, part in groupby(source.tensors.values(), key=lambda spec: spec.file)]
    shards = dict(zip(shard_names(len(files)), files, strict=True))
    stored = saved_tensors(model, merge_adapters(weights)) if weights else {}
    for file, specs in shards.items():
        with new_shard(work / file, specs) as target:
            for spec in specs:
                copied = spec.name not in stored
                write_tensor(target, source.read(spec) if copied else _cast(stored[spec.name], spec))
    write_index(work, shards)


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    cast = stored_as(tensor.detach().cpu(), spec.dtype)
    if cast.is_floating_point() and not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise OutputError(f"{spec.name} has become too large for {spec.dtype}, its dtype in {spec.file}")
    return cast


def plan_lines(setup: Setup) -> list[str]:
    """The plan of a run for people."""
    options, data, model = setup.options, setup.dataloader, setup.model
    parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    on_average = "" if data.pair_tokens is None else " on average"
    repeats = ", with repeated passages" if options.repeats else ""
    lines = [
        f"model       {setup.checkpoint.hub_id or setup.checkpoint.name}: {trained:,} of {parameters:,} parameters "
        f"train ({options.train})",
        f"teacher     {setup.teacher_text}" if options.distills else f"no teacher  {setup.teacher_text}",
        f"data        {', '.join(options.data)}: {data.summary}",
        f"steps       {data.steps:,}, each of {plural(options.blocks_per_step, 'block')} "
        f"({data.tokens_per_step:,} tokens{on_average}); {data.tokens_until(data.steps):,} tokens in all{repeats}",
        f"optimizer   {options.optimizer}, learning rate {options.learning_rate:g}, {options.schedule}, "
        f"{warmup_steps(options.warmup, options.schedule, data.steps)} warm-up steps",
        heldout_text(setup),
    ]
    if data.overlap and data.overlap.documents:
        lines.append(f"excluded    {data.overlap}")
    if dropout := setup.training_model.dropout:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout.items())
        lines.append(f"dropout     off; the model asks for {rates}")
    if setup.start:
        lines.append(f"continues   after step {setup.start.record['step']:,}, saved in {setup.states.directory}")
    return lines


def heldout_text(setup: Setup) -> str:
    """The line of a plan that says what is held out, and by which measure the best weights are chosen."""
    heldout = setup.dataloader.heldout
    if not heldout:
        return "held out    nothing (a stream or short data): the last weights are written; see --heldout"
    tokens = setup.dataloader.heldout_tokens
    return f"held out    {tokens:,} tokens; the weights with the lowest {measure_of(setup.options)} on them are written"


def measure_of(options: TrainOptions) -> str:
    """The held-out loss by which the best step is chosen, in words: it is the loss that training minimizes."""
    return f"{DISTILLATION} from the teacher" if options.distills else CROSS_ENTROPY


def result_lines(setup: Setup, progress: TrainingProgress) -> list[str]:
    """The result for people."""
    lines, before, after = [], progress.heldout_before, progress.heldout_after
    if before and after:
        chosen = "distillation" if setup.options.distills else "nats"
        lines.append(
            f"held out    {measure_of(setup.options)} {before[chosen]:.4f} -> {after[chosen]:.4f} nats per token "
            f"(lowest: step {progress.best_step:,})"
        )
        if setup.options.distills:
            lines.append(
                f"            {CROSS_ENTROPY} {before['nats']:.4f} -> {after['nats']:.4f} nats per token (not what "
                "the step is chosen by)"
            )
        if not progress.best_step:
            lines.append(
                f"unchanged   no step lowered the {measure_of(setup.options)}: the weights are those of "
                f"{setup.checkpoint.name}. Try a lower --learning-rate (now {setup.options.learning_rate:g}), or more "
                "tokens"
            )
    code = " with trust_remote_code=True" if "auto_map" in setup.checkpoint.config else ""
    return [*lines, f"written     {setup.options.output}: verified, loads in transformers{code}"]


def record_of(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """The record of a run, JSON-ready, including the records of the source checkpoint."""
    source, options, dataloader, argv = setup.checkpoint, setup.options, setup.dataloader, setup.run["argv"]
    recorded = request(options_used(setup), argv)["options"]
    conversion = read_record(source, PROVENANCE)
    base = conversion.get("source") if isinstance(conversion, dict) else None
    teacher_is_base = bool(
        setup.teacher_checkpoint and isinstance(base, dict) and is_base_model(setup.teacher_checkpoint, source, base)
    )
    return {
        **stamp("gqa-uptrain", argv),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        "data": recorded["data"],
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "teacher": recorded["teacher"] if options.distills else None,
        "teacher_is_base": teacher_is_base,
        "teacher_revision": setup.teacher_checkpoint and setup.teacher_checkpoint.revision,
        "losses": _losses(setup, progress),
        "dropout_turned_off": setup.training_model.dropout,
        "data_summary": dataloader.summary,
        "data_tokens": dataloader.data_tokens,
        "distinct_tokens": dataloader.distinct_tokens,
        "heldout_overlap": dataloader.overlap and asdict(dataloader.overlap),
        "data_fingerprint": dataloader.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": recorded,
        "conversion": conversion,
        "trained_before": read_record(source, UPTRAINING),
        "versions": versions("torch", "transformers", "accelerate"),
    }


def options_used(setup: Setup) -> TrainOptions:
    """The options of a run with what was chosen where an option was left open. Its length stays as it was given."""
    options, steps = setup.options, setup.dataloader.steps
    repeats = options.repeats
    if repeats is None:  # generated text, in which blocks repeat passages unless it is plain; pairs never do
        _, plain = parse_self(options.data[0])
        repeats = not plain and not setup.model.config.is_encoder_decoder
    default_heldout = "stdlib:heldout" if options.data == ("stdlib:train",) and not options.heldout_fraction else None
    return replace(
        options,
        repeats=repeats,
        heldout=options.heldout or default_heldout,
        micro_batch=setup.micro_batch,
        warmup=warmup_steps(options.warmup, options.schedule, steps),
        eval_every=evaluation_interval(options.eval_every, steps),
        device=options.device or str(setup.accelerator.device),
    )


def _losses(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """Losses in nats per token: the cross-entropy, and with a teacher also the divergence from it. `chosen_by`: which
    of the two is lowest at the best step; None if nothing is held out.
    """
    losses: dict[str, Any] = {"training": progress.loss}
    for when, heldout in (("before", progress.heldout_before), ("after", progress.heldout_after)):
        losses[f"heldout_{when}"] = heldout and heldout["nats"]
        if setup.options.distills:
            losses[f"distillation_{when}"] = heldout and heldout["distillation"]
    if not setup.dataloader.heldout:
        return losses | {"best_step": progress.step, "chosen_by": None}
    chosen_by = "distillation" if setup.options.distills else "heldout"
    return losses | {"best_step": progress.best_step, "chosen_by": chosen_by}
