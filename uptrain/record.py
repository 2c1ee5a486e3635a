"""The record of a training, gqa_uptraining.json."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from gqa.checkpoint.base_model import distills_from_base
from gqa.checkpoint.provenance import (
    PROVENANCE,
    UPTRAINING,
    path_of_record,
    read_record,
    relative_path,
    request,
    stamp,
    versions,
)
from gqa.checkpoint.write import finite
from gqa.corpus.specs import heldout_of_built_in, parse_self
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.schedule import warmup_steps
from gqa.uptrain.setup import Run, Setup
from gqa.uptrain.state_files import TrainingProgress


def record_of(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """The record of a run, JSON-ready, including the records of the source checkpoint."""
    source = setup.checkpoint
    options = setup.options
    data = setup.dataloader
    argv = setup.description["argv"]

    recorded_options = request(options_used(setup), argv)["options"]
    teacher = setup.teacher_checkpoint
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
        "losses": _losses(setup, progress),
        "dropout_turned_off": setup.training_model.dropout,
        "data_summary": data.summary,
        "data_tokens": data.data_tokens,
        "distinct_tokens": data.distinct_tokens,
        "heldout_overlap": data.overlap and asdict(data.overlap),
        "data_fingerprint": data.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": recorded_options,
        "conversion": read_record(source, PROVENANCE),
        "trained_before": read_record(source, UPTRAINING),
        "versions": versions("torch", "transformers", "accelerate"),
    }
    return dict(finite(record))


def options_used(setup: Setup) -> TrainOptions:
    """The options of a run with what was chosen where an option was left open.

    Its length stays as it was given; so does `eval_every`, because only a run without it evaluates
    early.
    """
    options = setup.options
    steps = setup.dataloader.steps

    repeats = options.repeats
    # Generated text, in which blocks repeat passages unless it is plain; pairs never do
    if repeats is None:
        _, plain = parse_self(options.data[0])
        repeats = not plain and not setup.model.config.is_encoder_decoder

    heldout = options.heldout
    if not heldout and not options.heldout_fraction:
        heldout = heldout_of_built_in(options.data)

    return replace(
        options,
        repeats=repeats,
        heldout=heldout,
        micro_batch=setup.micro_batch,
        warmup=warmup_steps(options.warmup, options.schedule, steps),
        device=options.device or str(setup.accelerator.device),
    )


def _losses(setup: Setup, progress: TrainingProgress) -> dict[str, Any]:
    """Losses in nats per token.

    `heldout_before`, `heldout_after`: cross-entropy on held-out text. `distillation_before`,
    `distillation_after`: KL divergence from the teacher on it. `training`: cross-entropy of the
    last step. `chosen_by`: the loss by which the best step was chosen, `distillation` with a
    teacher, else `heldout`; None if nothing is held out. `rate_cuts`: how often the run went back
    to its best weights at a third of the learning rate.
    """
    distills = setup.options.distills
    losses: dict[str, Any] = {
        "training": progress.training_cross_entropy,
        "rate_cuts": progress.rate_cuts,
    }

    for when, heldout in (("before", progress.first_heldout), ("after", progress.lowest_heldout)):
        losses[f"heldout_{when}"] = heldout and heldout["cross_entropy"]
        if distills:
            losses[f"distillation_{when}"] = heldout and heldout["kl"]

    if not setup.dataloader.heldout_blocks:
        return losses | {"best_step": progress.step, "chosen_by": None}
    chosen_by = "distillation" if distills else "heldout"
    return losses | {"best_step": progress.best_step, "chosen_by": chosen_by}


def adapted_record(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """The record of trained weights for this run, whose result may go elsewhere."""
    command = request(run.options, run.description["argv"])
    of_this_run = {name: command["options"][name] for name in ("output", "overwrite")}
    return {
        **record,
        "argv": command["argv"],
        "options": record["options"] | of_this_run,
        # With the path from the checkpoint's place
        "conversion": finite(read_record(run.checkpoint, PROVENANCE)),
    }


def move_base_path(run: Run, record: dict[str, Any]) -> bool:
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
