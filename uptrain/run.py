"""Train, and write a checkpoint with the tensor names, dtypes and file layout of the source, and
its other files unchanged, so whatever loads the source loads the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.files import TensorSpec, new_shard, shard_names, write_index
from gqa.checkpoint.output_directory import require_space
from gqa.checkpoint.provenance import (
    METRICS,
    PROVENANCE,
    UPTRAINING,
    path_of_record,
    read_record,
    relative_path,
    request,
    stamp,
    versions,
)
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import copy_file, finite, write_tensor, write_text
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import from_main, on_main, out_of_memory
from gqa.core.errors import (
    NoMemoryError,
    OutputError,
    RefusedError,
    UnfinishedError,
    explain,
    listing,
    plural,
)
from gqa.corpus.sources import parse_self
from gqa.models.loading import model_class
from gqa.models.names import saved_tensors
from gqa.uptrain.card import CARD, trained_card
from gqa.uptrain.loop import evaluation_interval, train, warmup_steps
from gqa.uptrain.models import is_base_model
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.setup import Run, Setup
from gqa.uptrain.state_files import WEIGHTS, State, TrainingProgress
from gqa.uptrain.weights import gather, merge_adapters, trained_bytes

# The two held-out losses, in words.
DISTILLATION, CROSS_ENTROPY = "KL divergence", "cross-entropy"
_WRITTEN = frozenset({CARD, UPTRAINING, METRICS})
ReadTensor = Callable[[TensorSpec], Tensor]  # a tensor of the result, in its stored dtype


def uptrain(run: Run, watcher: Watcher = SILENT) -> tuple[TrainingProgress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; return the progress and the record in it.

    The trained weights are saved before the checkpoint is written: whatever fails then, the same
    options continue there. Raises what `train` raises, OutputError, and UnfinishedError if work was
    done that the same options continue.
    """
    with run.states.lock():
        run = _look_again(run)
        start = run.start
        if start is None:
            on_main(run.states.clear)
        if start and start.is_trained:
            record = adapted_record(run, start.record["result"])
            on_main(lambda: _finish(run, record, saved_tensors_of(run.checkpoint, start)))
            return _progress_of(start), record

        assert isinstance(run, Setup)
        return _train_and_write(run, watcher)


def _look_again(run: Run) -> Run:
    """The run with the state from which it continues now that no other run can change it: another
    run of the same command may have saved one, or ended, since it was prepared. Raises
    RefusedError.
    """
    start = from_main(lambda: run.states.start(run.run))
    on_main(run.open_output)  # checks it: the other run may have written it
    if start is None and run.start is not None:
        raise RefusedError(
            "another run of the same command ended while this one was prepared; repeat the command"
        )
    batch_size = start and start.record["batch_size"]
    if start and not start.is_trained and batch_size != run.options.batch_size:
        raise RefusedError(
            f"another run of the same command saved step {start.record['step']:,} with "
            f"{batch_size} blocks a step "
            "while this one was prepared; repeat the command to continue from there"
        )
    return replace(run, start=start)


def _train_and_write(setup: Setup, watcher: Watcher) -> tuple[TrainingProgress, dict[str, Any]]:
    states = setup.states
    on_main(lambda: _check_result(setup))
    try:
        progress, weights = train(setup, watcher)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            if not setup.options.compile:
                raise
            raise RefusedError(
                f"training with --compile failed ({explain(error, 200)}); leave it out"
            ) from error
        advice = (
            f"out of memory while training on {setup.accelerator.device}; lower --micro-batch (now "
            f"{setup.micro_batch}) or --context (now {setup.options.block:,}), or give "
            "--checkpointing, --train lora or --optimizer adafactor"
        )
        if states.complete():
            raise UnfinishedError(
                f"{advice}. With --micro-batch or --checkpointing the same command continues: "
                f"{states.remains()}"
            ) from error
        raise NoMemoryError(advice) from error

    record, whole = finite(record_of(setup, progress)), gather(weights)
    on_main(lambda: _save_and_write(setup, whole, progress, record))
    return progress, record


def _check_result(setup: Setup) -> None:
    """Make everything of the result but its weights, as it will be made after training, and check
    the space for it, so that what is wrong is refused before the first step. Raises RefusedError
    and OutputError.
    """
    source = setup.checkpoint
    try:
        record = finite(record_of(setup, TrainingProgress()))
        json.dumps(record)
        _card(setup, setup.out.name, record)
        _conversion_record(setup, record)
    except OSError:
        raise
    except Exception as error:  # of a library that writes cards, or ours
        raise RefusedError(
            f"the record or the model card of {source.name} cannot be carried into the result "
            f"({explain(error)}); "
            f"remove {PROVENANCE}, {UPTRAINING} or README.md from {source.directory}"
        ) from error
    for name in ("config.json", *source.side_files):
        with source.path(name).open("rb") as stream:
            stream.read(1)
    setup.states.check_space(trained_bytes(setup.model, source), source.nbytes)


def _save_and_write(
    setup: Setup, whole: dict[str, Tensor], progress: TrainingProgress, record: dict[str, Any]
) -> None:
    """Save the trained weights, then write the result from there."""
    source, states = setup.checkpoint, setup.states
    trained = result_tensors(setup.model, whole, source)
    changed = [
        spec for spec in source.tensors.values() if whole and _differs(trained(spec), source, spec)
    ]

    def write(path: Path) -> None:
        with new_shard(path, changed) as target:
            for spec in changed:
                write_tensor(target, trained(spec))

    size = sum(spec.nbytes for spec in changed)
    more = {
        "batch_size": setup.options.batch_size,
        "stream": list[Any](),
        "unreadable_text": False,
        "result": record,
    }
    try:
        state = states.save_trained(write, vars(progress) | setup.run | more, size, source.nbytes)
    except OutputError:  # the result itself may still fit
        _finish(setup, record, trained)
        return
    if not setup.options.keep_state:
        states.drop_steps()
    _finish(setup, record, saved_tensors_of(source, state))


def result_tensors(
    model: PreTrainedModel, weights: dict[str, Tensor], source: Checkpoint
) -> ReadTensor:
    """Make tensors of the result from whole trained weights; read those that the class does not use
    from the source, and all if there are no weights. What is returned raises OutputError if a
    number is too large for its dtype.
    """
    stored = saved_tensors(model, merge_adapters(weights)) if weights else {}

    def read(spec: TensorSpec) -> Tensor:
        return _cast(stored[spec.name], spec) if spec.name in stored else source.read(spec)

    return read


def _differs(tensor: Tensor, source: Checkpoint, spec: TensorSpec) -> bool:
    """Whether any byte of a stored tensor has changed."""
    before = source.read(spec)
    return not torch.equal(
        *(one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, before))
    )


def saved_tensors_of(source: Checkpoint, state: State) -> ReadTensor:
    """Read tensors of the result: those that `_save_and_write` has saved in `state`, and else those
    of the source.
    """
    from safetensors import safe_open

    try:
        file: Any = safe_open(state.path / WEIGHTS, framework="pt")
        names = set(file.keys())
    except Exception as error:  # of the safetensors library
        raise RefusedError(
            f"the trained weights in {state.path} cannot be read ({explain(error)}); "
            "delete that directory, and the "
            "same command continues from the state before, if there is one"
        ) from error

    def read(spec: TensorSpec) -> Tensor:
        if spec.name not in names:
            return source.read(spec)
        tensor: Tensor = file.get_tensor(spec.name)
        return tensor

    return read


def _finish(run: Run, record: dict[str, Any], tensor_of: ReadTensor) -> None:
    """Write the result, then remove the training states.

    Raises UnfinishedError, whatever goes wrong.
    """
    try:
        _export(run, record, tensor_of)
    # A full disk, a name that is taken, a mistake of ours: the weights must not be lost.
    except Exception as error:
        reason = str(error) if isinstance(error, OutputError | RefusedError) else explain(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            reason = f"{error.filename}: {error.strerror}"
        raise UnfinishedError(
            f"the result could not be written: {reason}. But {run.states.remains()}"
        ) from error
    with suppress(OSError):  # the result is complete: what stays of the states is no reason to fail
        run.states.finish(run.options.keep_state)


def _export(run: Run, record: dict[str, Any], tensor_of: ReadTensor) -> None:
    """Write and verify the checkpoint. The directory appears only when it is complete."""
    source = run.checkpoint
    with run.open_output() as output:
        work = output.work
        require_space(source.nbytes, output.out)
        _write_weights(source, tensor_of, work)
        for name in ("config.json", *source.side_files):
            if name not in _WRITTEN:
                copy_file(source.path(name), work / name)
        if conversion := _conversion_record(run, record):
            write_text(work / PROVENANCE, json.dumps(conversion, indent=2) + "\n")
        if run.metrics.is_file():
            copy_file(run.metrics, work / METRICS)
        else:  # users delete it
            write_text(work / METRICS, "")
        write_text(work / CARD, _card(run, output.out.name, record))

        tables = (one.tensors.items() for one in (source, read_checkpoint(work)))
        expected, written = (
            {(name, spec.dtype, spec.shape) for name, spec in table} for table in tables
        )
        if wrong := {name for name, *_ in expected ^ written}:
            raise OutputError(
                f"the result does not verify: {listing(wrong)} differ from {source.name}"
            )
        output.commit(UPTRAINING, record)


def _conversion_record(run: Run, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the conversion, with the path of the base model from the result's place, also
    in `record`; None if it has none: users edit such files.
    """
    conversion = record["conversion"]
    base = conversion.get("source") if isinstance(conversion, dict) else None
    if not isinstance(base, dict) or not base.get("path"):
        return None
    path = path_of_record(base["path"])
    base["path"] = relative_path(run.checkpoint.directory / path, run.out) if path else None
    return dict(conversion)


def _card(run: Run, name: str, record: dict[str, Any]) -> str:
    model = model_class(run.config, run.options.trust_remote_code)
    return trained_card(run.checkpoint, name, model, record)


def _progress_of(state: State) -> TrainingProgress:
    return TrainingProgress(**{name: state.record[name] for name in vars(TrainingProgress())})


def adapted_record(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """The record of trained weights for this run, whose result may go elsewhere."""
    options = request(run.options, run.run["argv"])
    # With the path from the checkpoint's place
    conversion = read_record(run.checkpoint, PROVENANCE)
    changed = {
        name: value for name, value in options["options"].items() if name in ("output", "overwrite")
    }
    return {
        **record,
        "argv": options["argv"],
        "options": record["options"] | changed,
        "conversion": finite(conversion),
    }


def _write_weights(source: Checkpoint, tensor_of: ReadTensor, work: Path) -> None:
    """Write the weight files with their tensors in the source's order."""
    files = [list(part) for _, part in groupby(source.tensors.values(), key=lambda spec: spec.file)]
    shards = dict(zip(shard_names(len(files)), files, strict=True))
    for file, specs in shards.items():
        with new_shard(work / file, specs) as target:
            for spec in specs:
                write_tensor(target, tensor_of(spec))
    write_index(work, shards)


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    cast = stored_as(tensor.detach().cpu(), spec.dtype)
    if (
        cast.is_floating_point()
        and not bool(cast.isfinite().all())
        and bool(tensor.isfinite().all())
    ):
        raise OutputError(
            f"{spec.name} has become too large for {spec.dtype}, its dtype in {spec.file}"
        )
    return cast


def plan_lines(run: Run) -> list[str]:
    """The plan of a run for people."""
    if not isinstance(run, Setup):
        return [
            f"continues   training is done, in {run.states.directory}: only the result is written"
        ]
    setup = run
    options, data, model = setup.options, setup.dataloader, setup.model
    parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    on_average = "" if data.pair_tokens is None else " on average"
    repeats = ", with repeated passages" if options.repeats else ""
    lines = [
        f"model       {setup.checkpoint.hub_id or setup.checkpoint.name}: "
        f"{trained:,} of {parameters:,} parameters "
        f"train ({options.train})",
        f"teacher     {setup.teacher_text}"
        if options.distills
        else f"no teacher  {setup.teacher_text}",
        f"data        {', '.join(options.data)}: {data.summary}",
        f"steps       {data.steps:,}, each of {plural(options.blocks_per_step, 'block')} "
        f"({data.tokens_per_step:,} tokens{on_average}); {data.tokens_until(data.steps):,} tokens "
        f"in all{repeats}",
        f"optimizer   {options.optimizer}, learning rate {options.learning_rate:g}, "
        f"{options.schedule}, "
        f"{warmup_steps(options.warmup, options.schedule, data.steps)} warm-up steps",
        heldout_text(setup),
    ]
    if data.overlap and data.overlap.documents:
        lines.append(f"excluded    {data.overlap}")
    if dropout := setup.training_model.dropout:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout.items())
        lines.append(f"dropout     off; the model asks for {rates}")
    if setup.start:
        lines.append(
            f"continues   after step {setup.start.record['step']:,}, saved in "
            f"{setup.states.directory}"
        )
    return lines


def heldout_text(setup: Setup) -> str:
    """The line of a plan that says what is held out, and by which measure the best weights are
    chosen.
    """
    heldout = setup.dataloader.heldout
    if not heldout:
        return (
            "held out    nothing (a stream or short data): the last weights are written; "
            "see --heldout"
        )
    tokens = setup.dataloader.heldout_tokens
    return (
        f"held out    {tokens:,} tokens; the weights with the lowest {measure_of(setup.options)} "
        "on them are written"
    )


def measure_of(options: TrainOptions) -> str:
    """The held-out loss by which the best step is chosen, in words: it is the loss that training
    minimizes.
    """
    return f"{DISTILLATION} from the teacher" if options.distills else CROSS_ENTROPY


def result_lines(setup: Run, progress: TrainingProgress) -> list[str]:
    """The result for people."""
    lines, before, after = [], progress.heldout_before, progress.heldout_after
    if before and after:
        chosen = "distillation" if setup.options.distills else "nats"
        lines.append(
            f"held out    {measure_of(setup.options)} {before[chosen]:.4f} -> {after[chosen]:.4f} "
            f"nats per token (lowest: step {progress.best_step:,})"
        )
        if setup.options.distills:
            lines.append(
                f"            {CROSS_ENTROPY} {before['nats']:.4f} -> {after['nats']:.4f} nats per "
                "token (not what the step is chosen by)"
            )
        if not progress.best_step:
            lines.append(
                f"unchanged   no step lowered the {measure_of(setup.options)}: the weights are "
                f"those of {setup.checkpoint.name}. Try a lower --learning-rate (now "
                f"{setup.options.learning_rate:g}), or more tokens"
            )
    code = " with trust_remote_code=True" if "auto_map" in setup.checkpoint.config else ""
    return [*lines, f"written     {setup.options.output}: verified, loads in transformers{code}"]


def record_of(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """The record of a run, JSON-ready, including the records of the source checkpoint."""
    source, options, dataloader, argv = (
        setup.checkpoint,
        setup.options,
        setup.dataloader,
        setup.run["argv"],
    )
    recorded = request(options_used(setup), argv)["options"]
    conversion = read_record(source, PROVENANCE)
    base = conversion.get("source") if isinstance(conversion, dict) else None
    teacher_is_base = bool(
        setup.teacher_checkpoint
        and isinstance(base, dict)
        and is_base_model(setup.teacher_checkpoint, source, base)
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
    """The options of a run with what was chosen where an option was left open.

    Its length stays as it was given.
    """
    options, steps = setup.options, setup.dataloader.steps
    repeats = options.repeats
    # Generated text, in which blocks repeat passages unless it is plain; pairs never do
    if repeats is None:
        _, plain = parse_self(options.data[0])
        repeats = not plain and not setup.model.config.is_encoder_decoder
    default_heldout = (
        "stdlib:heldout"
        if options.data == ("stdlib:train",) and not options.heldout_fraction
        else None
    )
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
    """Losses in nats per token: the cross-entropy, and with a teacher also the divergence from it.

    `chosen_by`: which of the two is lowest at the best step; None if nothing is held out.
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
