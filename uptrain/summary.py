"""What gqa-uptrain prints before and after a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gqa.convert.estimate import duration
from gqa.convert.summary import size
from gqa.core.errors import plural
from gqa.uptrain.advice import next_line
from gqa.uptrain.dry_run import DryRun
from gqa.uptrain.optimizer import is_relative
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.saver import states_kept
from gqa.uptrain.schedule import warmup_steps
from gqa.uptrain.setup import OpenedRun, ReadyRun
from gqa.uptrain.state_files import TrainingProgress
from gqa.uptrain.training_time import TrainingTime

# The two losses on validation text, in words.
KL_DIVERGENCE = "KL divergence"
CROSS_ENTROPY = "cross-entropy"


def plan_lines(run: OpenedRun) -> list[str]:
    """The plan of a run for people."""
    output_line = f"output      {run.options.output}"
    if not isinstance(run, ReadyRun):
        return [
            f"continues   training is done, in {run.states.directory}: only the result is written",
            output_line,
        ]

    lines = [
        _model_line(run),
        _teacher_line(run.options, run.teacher_text),
        f"data        {', '.join(run.options.data)}: {run.dataloader.summary}",
        _steps_line(run),
        _optimizer_line(run),
        _precision_line(run.options.precision),
        _validation_line(run),
        output_line,
    ]
    overlap = run.dataloader.overlap
    if overlap and overlap.was_found:
        lines.append(f"excluded    {overlap}")

    dropout = run.training_model.dropout
    if dropout:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in dropout.items())
        lines.append(f"dropout     off; the model asks for {rates}")

    if run.continues_from:
        lines.append(
            f"continues   after step {run.continues_from.record['step']:,}, saved in "
            f"{run.states.directory}"
        )
    return lines


def dry_run_lines(plan: DryRun) -> list[str]:
    """What a run would train and need, for people."""
    resolved = plan.resolved
    options = resolved.options
    needs = plan.needs

    model = resolved.checkpoint.hub_id or resolved.checkpoint.name
    trained = f"{needs.trained:,} of {needs.parameters:,} parameters train ({options.train})"
    lines = [
        f"model       {model}: {trained}",
        _teacher_line(options, resolved.teacher_text),
        f"data        {', '.join(options.data)}",
    ]
    if options.tokens:
        lines.append(f"length      {options.tokens:,} tokens")
    length = resolved.length
    if length:
        blocks = plural(length.blocks_per_step, "block")
        lines.append(
            f"steps       {length.steps:,}, each of {blocks} ({length.tokens_per_step:,} tokens)"
        )

    lines.append(_precision_line(plan.precision))
    if plan.time:
        lines.append(f"estimate    {_time_text(plan.time)}")

    parts = [("weights", needs.weights), ("their bfloat16 copies", needs.copies)]
    parts += [("gradients", needs.gradients), (options.optimizer, needs.optimizer)]
    parts += [("teacher", needs.teacher)]
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts if count)
    activations = "activations come on top"
    if needs.activations is not None:
        activations = f"about {size(needs.activations)} of activations on top"
    kept = states_kept(options)
    times = "twice" if kept == 1 else f"{kept + 1} times"
    lines += [
        f"memory      {size(needs.memory)} on a GPU ({listed}); {activations}",
        f"output      {options.output}",
        f"disk        {size(needs.result)} for the result; {size(needs.state)} for a saved state, "
        f"{times} while the next one is saved",
        "dry run     no weights were read, and nothing was written",
    ]
    return lines


def dry_run_record(plan: DryRun) -> dict[str, Any]:
    """The same, JSON-ready; sizes in bytes, times in seconds."""
    resolved = plan.resolved
    options = resolved.options
    teacher = options.teacher if options.distills else None
    length = resolved.length
    steps = length.steps if length else None
    tokens_per_step = length.tokens_per_step if length else None
    time = asdict(plan.time) if plan.time else None
    return {
        "dry_run": True,
        "model": resolved.checkpoint.hub_id or resolved.checkpoint.name,
        "output": str(options.output),
        "teacher": teacher,
        "train": options.train,
        "data": list(options.data),
        "tokens": options.tokens,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "precision": plan.precision,
        "time": time,
        **asdict(plan.needs),
        "state": plan.needs.state,
        "memory": plan.needs.memory,
        "warnings": list(plan.warnings),
    }


def _model_line(run: ReadyRun) -> str:
    parameters = run.model.num_parameters()
    trained = run.model.num_parameters(only_trainable=True)
    return (
        f"model       {run.checkpoint.hub_id or run.checkpoint.name}: "
        f"{trained:,} of {parameters:,} parameters train ({run.options.train})"
    )


def _teacher_line(options: TrainOptions, teacher_text: str) -> str:
    if options.distills:
        return f"teacher     {teacher_text}"
    return f"no teacher  {teacher_text}"


def _steps_line(run: ReadyRun) -> str:
    data = run.dataloader
    blocks = plural(run.options.blocks_per_step, "block")
    on_average = "" if data.tokens_of_blocks is None else " on average"
    repeats = ", with repeated passages" if run.options.repeats else ""
    return (
        f"steps       {data.steps:,}, each of {blocks} ({data.tokens_per_step:,} "
        f"tokens{on_average}); {data.tokens_until(data.steps):,} tokens in all{repeats}"
    )


def _optimizer_line(run: ReadyRun) -> str:
    options = run.options
    warmup = warmup_steps(options.warmup, options.schedule, run.dataloader.steps)
    return (
        f"optimizer   {options.optimizer}, learning rate {_peak_rate(options)}, "
        f"{options.schedule}, {warmup} warm-up steps"
    )


def _precision_line(precision: str | None) -> str:
    if precision == "float32":
        return "precision   float32"
    return f"precision   {precision}; weights that train and optimizer in float32"


def _time_text(time: TrainingTime) -> str:
    """`about 2 hours on cpu: 40 minutes to generate the text, 80 minutes to train`."""
    text = f"about {duration(time.total)} on {time.device}"
    if not time.generating:
        return text
    return (
        f"{text}: {duration(time.generating)} to generate the text, {duration(time.training)} to "
        "train"
    )


def _peak_rate(options: TrainOptions) -> str:
    """The peak learning rate in words."""
    if is_relative(options):
        return f"{options.learning_rate} of each weight's root mean square"
    return f"{options.learning_rate:g}"


def _validation_line(run: ReadyRun) -> str:
    """The line of a plan that says what the validation text is, and by which measure the best
    weights are chosen.
    """
    if not run.dataloader.validation_blocks:
        return (
            "validation  none (a stream or short data): the last weights are written; "
            "see --validation"
        )
    tokens = run.dataloader.validation_tokens
    return (
        f"validation  {tokens:,} tokens; the weights with the lowest {_measure(run.options)} "
        "on them are written"
    )


def _measure(options: TrainOptions) -> str:
    """The loss on validation text by which the best step is chosen, in words: it is the loss that
    training minimizes.
    """
    return f"{KL_DIVERGENCE} from the teacher" if options.distills else CROSS_ENTROPY


def result_lines(run: OpenedRun, progress: TrainingProgress) -> list[str]:
    """The result for people."""
    code = " with trust_remote_code=True" if "auto_map" in run.checkpoint.config else ""
    return [
        *_validation_lines(run, progress),
        f"written     {run.options.output}: verified, loads in transformers{code}",
        f"next        {next_line(run, progress)}",
    ]


def _validation_lines(run: OpenedRun, progress: TrainingProgress) -> list[str]:
    """The losses on validation text before and after; empty if there is none."""
    before = progress.first_validation
    after = progress.lowest_validation
    if not (before and after):
        return []

    measure = _measure(run.options)
    chosen = run.options.objective
    lines = [
        f"validation  {measure} {before[chosen]:.4f} -> {after[chosen]:.4f} "
        f"nats per token (lowest: step {progress.best_step:,})"
    ]
    if run.options.distills:
        lines.append(
            f"            {CROSS_ENTROPY} {before['cross_entropy']:.4f} -> "
            f"{after['cross_entropy']:.4f} nats per token (not what the step is chosen by)"
        )
    if progress.is_unchanged:
        lines.append(
            f"unchanged   no step lowered the {measure}: the weights are "
            f"those of {run.checkpoint.name}. Try a lower --learning-rate (now "
            f"{_peak_rate(run.options)}), or more tokens"
        )
    return lines
