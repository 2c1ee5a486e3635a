"""What gqa-uptrain prints before and after a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gqa.convert.estimate import duration
from gqa.convert.summary import size
from gqa.core.errors import plural
from gqa.corpus.specs import planned_source
from gqa.uptrain.advice import next_line
from gqa.uptrain.dry_run import DryRun, TrainingNeeds, training_needs, training_time
from gqa.uptrain.optimizer import is_relative
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.saver import states_kept
from gqa.uptrain.schedule import warmup_steps
from gqa.uptrain.setup import OpenedRun, ReadyRun, ResolvedRun
from gqa.uptrain.state_files import TrainingProgress
from gqa.uptrain.training_time import TrainingTime

# The two losses on validation text, in words.
KL_DIVERGENCE = "KL divergence"
CROSS_ENTROPY = "cross-entropy"

# Of one learning rate for all weights. Above it a percent sign was probably forgotten.
_LARGEST_USUAL_RATE = 0.01


def opened_lines(run: OpenedRun) -> list[str]:
    """What is known of a run before models and text are loaded, in lines for people."""
    output_line = f"output      {run.options.output}"
    if run.is_trained:
        return [
            f"continues   training is done, in {run.states.directory}: only the result is written",
            output_line,
        ]

    needs = training_needs(run)
    lines = [
        _model_line(run, needs),
        _teacher_line(run.options, run.teacher_text),
    ]
    time = training_time(run, needs)
    if time and run.continues_from is None:
        lines.append(f"estimate    {_time_text(time)}")
    return [*lines, output_line]


def ready_lines(run: OpenedRun) -> list[str]:
    """What is known besides once models and text are loaded; empty if nothing had to be."""
    if not isinstance(run, ReadyRun):
        return []

    lines = [
        f"data        {', '.join(run.options.data)}: {run.dataloader.summary}",
        _steps_line(run),
        _optimizer_line(run),
        _precision_line(run.options.precision),
        _validation_plan(run),
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
    """What a run would train and need, in lines for people."""
    resolved = plan.resolved
    options = resolved.options
    needs = plan.needs

    lines = [
        _model_line(resolved, needs),
        _teacher_line(options, resolved.teacher_text),
        f"data        {', '.join(map(planned_source, options.data))}",
    ]
    if options.tokens:
        lines.append(f"length      {options.tokens:,} tokens")
    if options.alpha:
        lines.append(f"length      {options.alpha:g} of the data, which a dry run does not count")
    length = resolved.length
    if length:
        blocks = plural(length.blocks_per_step, "block")
        is_rounded = options.batch_size is None and (options.micro_batch or 1) > 1
        unit = ", a multiple of --micro-batch" if is_rounded else ""
        lines.append(
            f"steps       {length.steps:,}, each of {blocks}{unit} "
            f"({length.tokens_per_step:,} tokens)"
        )

    lines.append(f"optimizer   {options.optimizer}, learning rate {_peak_rate(options)}")
    lines.append(_precision_line(plan.precision))
    if plan.time:
        lines.append(f"estimate    {_time_text(plan.time)}")
    return [
        *lines,
        _memory_line(needs, options.optimizer),
        f"output      {options.output}",
        _disk_line(needs, states_kept(options)),
        "dry run     no weights were read, and nothing was written",
    ]


def _memory_line(needs: TrainingNeeds, optimizer: str) -> str:
    """The memory that a training needs on its device, and what takes it."""
    sizes = {
        "weights": needs.weights,
        "their bfloat16 copies": needs.copies,
        "gradients": needs.gradients,
        optimizer: needs.optimizer,
        "teacher": needs.teacher,
    }
    parts = ", ".join(f"{name} {size(count)}" for name, count in sizes.items() if count)

    if needs.activations is None:
        return f"memory      {size(needs.memory)} on the device ({parts}), and activations"
    total = needs.memory + needs.activations
    return (
        f"memory      about {size(total)} on the device ({parts}, activations about "
        f"{size(needs.activations)})"
    )


def _disk_line(needs: TrainingNeeds, kept_states: int) -> str:
    """The space that a training needs on the disk. A new state is whole before an old one goes."""
    states = (kept_states + 1) * needs.state
    return (
        f"disk        {size(needs.result)} for the result, and up to {size(states)} for saved "
        "states while it runs"
    )


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


def _model_line(resolved: ResolvedRun, needs: TrainingNeeds) -> str:
    """The model's name, and how many of its parameters train."""
    model = resolved.checkpoint.hub_id or resolved.checkpoint.name
    return (
        f"model       {model}: {needs.trained:,} of {needs.parameters:,} parameters train "
        f"({resolved.options.train})"
    )


def _teacher_line(options: UptrainOptions, teacher_text: str) -> str:
    """Which model is the teacher, or why there is none."""
    if options.distills:
        return f"teacher     {teacher_text}"
    return f"no teacher  {teacher_text}"


def _steps_line(run: ReadyRun) -> str:
    """The length of the run."""
    data = run.dataloader
    blocks = plural(run.options.blocks_per_step, "block")
    on_average = "" if data.tokens_of_blocks is None else " on average"
    repeats = ", with repeated passages" if run.options.repeats else ""
    return (
        f"steps       {data.steps:,}, each of {blocks} ({data.tokens_per_step:,} "
        f"tokens{on_average}); {data.tokens_until(data.steps):,} tokens in all{repeats}"
    )


def _optimizer_line(run: ReadyRun) -> str:
    """The optimizer, and how its learning rate goes."""
    options = run.options
    warmup = warmup_steps(options.warmup, options.schedule, run.dataloader.steps)
    return (
        f"optimizer   {options.optimizer}, learning rate {_peak_rate(options)}, "
        f"{options.schedule}, {warmup} warm-up steps"
    )


def _precision_line(precision: str | None) -> str:
    """In which dtypes the run computes."""
    if precision == "float32":
        return "precision   float32"
    return f"precision   {precision}; weights that train and optimizer in float32"


def _time_text(time: TrainingTime) -> str:
    """`about 2 hours on cpu: 40 minutes to generate the text, 80 minutes to train`.

    Text that is in the cache is not generated again, so that is the most it takes.
    """
    text = f"about {duration(time.total)} on {time.device}"
    if not time.generating:
        return text
    return (
        f"{text}: at most {duration(time.generating)} to generate the text, "
        f"{duration(time.training)} to train"
    )


def _peak_rate(options: UptrainOptions) -> str:
    """The peak learning rate in words."""
    if is_relative(options):
        return f"{options.learning_rate} of each weight tensor's root mean square"
    text = f"{_rate_as_typed(options)} for all weights"
    if float(options.learning_rate) > _LARGEST_USUAL_RATE:
        text += f" (did you mean {_rate_as_typed(options)}%, relative to each weight?)"
    return text


def _rate_as_typed(options: UptrainOptions) -> str:
    """`0.3%`, or `0.0001`."""
    if is_relative(options):
        return str(options.learning_rate)
    return f"{options.learning_rate:g}"


def _validation_plan(run: ReadyRun) -> str:
    """How long the validation text is, and by which loss on it the weights are chosen."""
    if not run.dataloader.validation_blocks:
        return (
            "validation  none (a stream or short data): the last weights are written; "
            "see --validation"
        )
    tokens = run.dataloader.validation_tokens
    return (
        f"validation  {tokens:,} tokens; the weights with the lowest {_loss_in_words(run.options)} "
        "on them are written"
    )


def _loss_in_words(options: UptrainOptions) -> str:
    """The loss that training minimizes; on validation text it chooses the best step."""
    return f"{KL_DIVERGENCE} from the teacher" if options.distills else CROSS_ENTROPY


def result_lines(run: OpenedRun, progress: TrainingProgress) -> list[str]:
    """The result, in lines for people."""
    how = ""
    if "auto_map" in run.checkpoint.config:
        how = " with trust_remote_code=True"
    return [
        *_validation_result(run, progress),
        f"written     {run.options.output}: verified, loads in transformers{how}",
        f"next        {next_line(run, progress)}",
    ]


def _validation_result(run: OpenedRun, progress: TrainingProgress) -> list[str]:
    """The losses on validation text before and after the training; empty without such text."""
    before = progress.first_validation
    after = progress.lowest_validation
    if not (before and after):
        return []

    loss = _loss_in_words(run.options)
    name = run.options.objective
    lines = [
        f"validation  {loss} {before[name]:.4f} -> {after[name]:.4f} "
        f"nats per token (lowest: step {progress.best_step:,})"
    ]
    if run.options.distills:
        lines.append(
            f"            {CROSS_ENTROPY} {before['cross_entropy']:.4f} -> "
            f"{after['cross_entropy']:.4f} nats per token (for information: the KL divergence "
            "chooses the step)"
        )
    if progress.is_unchanged:
        lines.append(
            f"unchanged   no step lowered the {loss}: the weights are "
            f"those of {run.checkpoint.name} (the learning rate was {_rate_as_typed(run.options)})"
        )
    return lines
