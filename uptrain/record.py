"""The record of a training, gqa_uptraining.json."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from gqa.checkpoint.base_model import distills_from_base
from gqa.checkpoint.provenance import (
    PROVENANCE,
    UPTRAINING,
    describe_request,
    path_of_record,
    read_record,
    relative_path,
    stamp,
    versions,
)
from gqa.checkpoint.write import finite
from gqa.corpus.specs import heldout_of_built_in, parse_self
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.schedule import warmup_steps
from gqa.uptrain.setup import OpenedRun, ReadyRun
from gqa.uptrain.state_files import TrainingProgress


def record_of(run: ReadyRun, progress: TrainingProgress) -> dict[str, Any]:
    """The record of a run, JSON-ready, including the records of the source checkpoint."""
    source = run.checkpoint
    options = run.options
    data = run.dataloader
    argv = run.description["argv"]

    recorded_options = describe_request(options_used(run), argv)["options"]
    teacher = run.teacher_checkpoint
    teacher_name = recorded_options["teacher"] if options.distills else None

    record = {
        **stamp("gqa-uptrain", argv),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        "data": recorded_options["data"],
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "teacher": teacher_name,
        "teacher_is_base": distills_from_base(source, teacher),
        "teacher_revision": teacher and teacher.revision,
        "losses": _losses(run, progress),
        "dropout_turned_off": run.training_model.dropout,
        "data_summary": data.summary,
        "data_tokens": data.data_tokens,
        "distinct_tokens": data.distinct_tokens,
        "validation_overlap": data.overlap and asdict(data.overlap),
        "data_fingerprint": data.fingerprint,
        "ranks": run.accelerator.num_processes,
        "options": recorded_options,
        "conversion": read_record(source, PROVENANCE),
        "trained_before": read_record(source, UPTRAINING),
        "versions": versions("torch", "transformers", "accelerate"),
    }
    return dict(finite(record))


def options_used(run: ReadyRun) -> UptrainOptions:
    """The options of a run with what was chosen where an option was left open.

    Its length stays as it was given; so does `eval_every`, because only a run without it evaluates
    early.
    """
    options = run.options
    steps = run.dataloader.steps

    repeats = options.repeats
    # Generated text, in which blocks repeat passages unless it is plain; pairs never do
    if repeats is None:
        _, plain = parse_self(options.data[0])
        repeats = not plain and not run.model.config.is_encoder_decoder

    validation = options.validation
    if not validation and not options.validation_fraction:
        validation = heldout_of_built_in(options.data)

    return replace(
        options,
        repeats=repeats,
        validation=validation,
        micro_batch=run.micro_batch,
        warmup=warmup_steps(options.warmup, options.schedule, steps),
        device=options.device or str(run.accelerator.device),
    )


def _losses(run: ReadyRun, progress: TrainingProgress) -> dict[str, Any]:
    """Losses in nats per token.

    `validation_before`, `validation_after`: Cross-entropy on validation text.
    `distillation_before`, `distillation_after`: KL divergence from the teacher on it.
    `training`: Cross-entropy of the last step.
    `chosen_by`: The loss by which the best step was chosen, `distillation` with a teacher, else
        `validation`; None without validation text.
    `rate_cuts`: How often the run went back to its best weights at a third of the learning rate.
    """
    distills = run.options.distills
    losses: dict[str, Any] = {
        "training": progress.training_cross_entropy,
        "rate_cuts": progress.rate_cuts,
    }

    for when, measured in (
        ("before", progress.first_validation),
        ("after", progress.lowest_validation),
    ):
        losses[f"validation_{when}"] = measured and measured["cross_entropy"]
        if distills:
            losses[f"distillation_{when}"] = measured and measured["kl"]

    if not run.dataloader.validation_blocks:
        return losses | {"best_step": progress.step, "chosen_by": None}
    chosen_by = "distillation" if distills else "validation"
    return losses | {"best_step": progress.best_step, "chosen_by": chosen_by}


def adapted_record(run: OpenedRun, record: dict[str, Any]) -> dict[str, Any]:
    """The record of trained weights for this run, whose result may go elsewhere."""
    command = describe_request(run.options, run.description["argv"])
    of_this_run = {name: command["options"][name] for name in ("output", "overwrite")}
    return {
        **record,
        "argv": command["argv"],
        "options": record["options"] | of_this_run,
        # With the path from the checkpoint's place
        "conversion": finite(read_record(run.checkpoint, PROVENANCE)),
    }


def move_base_path(run: OpenedRun, record: dict[str, Any]) -> bool:
    """Let the record name the path of the base model from the result's place.

    Returns whether it has such a path (users edit these files). If not, the conversion's record is
    copied as it is.
    """
    conversion = record["conversion"]
    base = conversion.get("source") if isinstance(conversion, dict) else None
    if not isinstance(base, dict) or not base.get("path"):
        return False
    path = path_of_record(base["path"])
    base["path"] = relative_path(run.checkpoint.directory / path, run.out) if path else None
    return True
