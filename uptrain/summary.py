"""The output of a run: its plan and result, and the model card and the record of the trained checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gqa.checkpoint.provenance import (
    PROVENANCE,
    UPTRAINING,
    command_line,
    format_card,
    read_record,
    request,
    source_card,
    stamp,
    versions,
)
from gqa.checkpoint.read import Checkpoint
from gqa.convert.summary import size
from gqa.uptrain.loop import TrainingProgress, warmup_steps
from gqa.uptrain.setup import Setup

_MOMENTS = {"adamw": 8, "adafactor": 1}  # bytes of the optimiser's state for each weight that trains


def plan_record(setup: Setup) -> dict[str, Any]:
    """The plan of a run, JSON-ready."""
    options, dataloader, model = setup.options, setup.dataloader, setup.model
    parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    teacher = sum(p.numel() * p.element_size() for p in setup.teacher.parameters()) if setup.teacher else 0
    shares = setup.accelerator.num_processes if setup.accelerator.is_fsdp2 else 1
    return {
        "model": setup.checkpoint.hub_id or setup.checkpoint.name,
        "parameters": parameters,
        "trained_parameters": trained,
        "data": dataloader.summary,
        "steps": dataloader.steps,
        "tokens": dataloader.steps * dataloader.tokens_per_step,
        "tokens_per_step": dataloader.tokens_per_step,
        "block_size": setup.options.block,
        "micro_batch": setup.micro_batch,
        "processes": setup.accelerator.num_processes,
        "warmup_steps": warmup_steps(options.warmup, options.schedule, dataloader.steps),
        "heldout_tokens": dataloader.tokens(len(setup.dataloader.heldout)),
        "memory_bytes": memory_bytes(parameters, trained, options.optimizer, teacher, shares),
    }


def memory_bytes(parameters: int, trained: int, optimizer: str, teacher: int = 0, shares: int = 1) -> int:
    """Bytes of one process, if all is divided by `shares`: weights, gradients and optimiser state of those that train,
    and a `teacher` of so many bytes. Adafactor's rows and columns count as a byte per weight. Without activations.
    """
    return (4 * parameters + (4 + _MOMENTS[optimizer]) * trained + teacher) // shares


def plan_text(setup: Setup, record: Mapping[str, Any]) -> str:
    """The plan in words."""
    options = setup.options
    forwards = options.blocks_per_step // (setup.micro_batch * record["processes"])
    several, each = ("es", " on each") if record["processes"] > 1 else ("", "")
    lines = [
        f"model       {record['model']}: {record['trained_parameters']:,} of {record['parameters']:,} parameters train "
        f"({options.train})",
        f"teacher     {setup.teacher_text}" if options.distills else f"no teacher  {setup.teacher_text}",
        f"data        {', '.join(options.data)}: {record['data']}",
        f"steps       {record['steps']:,} of {options.batch_size} blocks = {record['tokens_per_step']:,} tokens "
        f"({record['processes']} process{several} x {forwards} x {setup.micro_batch}), "
        f"{record['tokens']:,} tokens in all",
        f"rate        {options.learning_rate:g} {options.optimizer}, {options.schedule}, "
        f"{record['warmup_steps']} steps of warm-up",
        f"memory      {size(record['memory_bytes'])}{each} for weights, gradients and optimiser, activations on top",
        f"held out    {record['heldout_tokens']:,} tokens; the state that does best on them is written"
        if setup.dataloader.heldout
        else "held out    nothing, as the data is short: the last state is written (see --heldout)",
    ]
    return "\n".join(lines)


def result_text(setup: Setup, progress: TrainingProgress) -> str:
    """The result in words."""
    lines, before, after = [], progress.heldout_before, progress.heldout_after
    if before and after:
        name, unit = ("distillation", "nats from the teacher") if setup.options.distills else ("nats", "nats per token")
        lines.append(
            f"held out    {before[name]:.4f} {unit} before, {after[name]:.4f} after {progress.best_step} steps"
        )
        if not progress.best_step:
            lines.append(
                f"unchanged   no step did better: the weights are those of {setup.checkpoint.name}. Try a lower "
                f"--learning-rate (now {setup.options.learning_rate:g}), or more tokens"
            )
    if progress.skipped:
        lines.append(f"skipped     {progress.skipped} steps whose loss or gradient was not finite")
    loads = "trust_remote_code=True" if "auto_map" in setup.checkpoint.config else "plain transformers"
    return "\n".join([*lines, f"written     {setup.options.output}: loads with {loads}, verified"])


def record_of(setup: Setup, progress: TrainingProgress, argv: Sequence[str]) -> dict[str, Any]:
    """The record of a run, JSON-ready, with the records of the source checkpoint inside. `argv`: arguments of the
    command.
    """
    source, options, dataloader = setup.checkpoint, setup.options, setup.dataloader
    recorded = request(options, argv)["options"]
    return {
        **stamp("gqa-uptrain", argv),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        "data": recorded["data"],
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "teacher": recorded["teacher"] if options.distills else None,
        "teacher_revision": setup.teacher_checkpoint and setup.teacher_checkpoint.revision,
        "losses": _losses(setup, progress),
        "data_summary": dataloader.summary,
        "data_fingerprint": dataloader.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": recorded,
        "conversion": read_record(source, PROVENANCE),
        "trained_before": read_record(source, UPTRAINING),
        "versions": versions("torch", "transformers", "accelerate"),
    }


def _losses(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """Losses in nats per token; with a teacher also the divergence from it, which selects the best state."""
    losses: dict[str, Any] = {"training": progress.loss}
    for when, heldout in (("before", progress.heldout_before), ("after", progress.heldout_after)):
        losses[f"heldout_{when}"] = heldout and heldout["nats"]
        if setup.options.distills:
            losses[f"distillation_{when}"] = heldout and heldout["distillation"]
    return losses | {"best_step": progress.best_step if setup.dataloader.heldout else progress.step}


def card(source: Checkpoint, name: str, record: dict[str, Any]) -> str:
    """README.md: the source card's metadata, a description of the training, and the source card below."""
    metadata, text = source_card(source, whole=UPTRAINING not in source.side_files)
    metadata.pop("model-index", None)  # results of the source weights
    tagged = {**metadata, "tags": [*metadata.get("tags", []), "gqa-uptrain"]}
    losses, heldout = record["losses"], ""
    if losses["heldout_before"] is not None:
        before, after = (f"{losses[f'heldout_{time}']:.4f}" for time in ("before", "after"))
        heldout = f"; held-out loss {before} before, {after} after (nats per token)"
        heldout += "" if losses["best_step"] else ", as no step made it better: these weights are unchanged"
    teacher = f", taught by `{record['teacher']}`" if record["teacher"] else ""
    share = f" (alpha {record['alpha']:g})" if record["alpha"] else ""
    description = (
        f"`{record['model']}` trained further{teacher}: {record['tokens']:,} tokens{share} of "
        f"{', '.join(record['data'])} in {record['steps']:,} steps{heldout} (gqa-uptrain {record['version']}; more in "
        f"`{UPTRAINING}`)."
    )
    return format_card(tagged, [f"# {name}", "", description], command_line(record["tool"], record["argv"]), text)
