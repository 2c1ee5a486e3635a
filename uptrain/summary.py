"""A run in words, before and after, and as a record for programs."""

from __future__ import annotations

from typing import Any

from gqa.convert.summary import size
from gqa.uptrain.loop import Progress
from gqa.uptrain.schedule import warmup_steps
from gqa.uptrain.setup import Setup


def plan_record(setup: Setup) -> dict[str, Any]:
    """What would be trained on what, JSON-ready."""
    options, dataloader = setup.options, setup.dataloader
    return {
        "model": setup.checkpoint.hub_id or setup.checkpoint.name,
        "parameters": setup.parameters,
        "trained_parameters": setup.trainable_parameters,
        "data": dataloader.summary,
        "steps": dataloader.steps,
        "tokens": dataloader.steps * dataloader.tokens_per_step,
        "tokens_per_step": dataloader.tokens_per_step,
        "block_size": setup.block_size,
        "micro_batch": setup.micro,
        "processes": setup.accelerator.num_processes,
        "warmup_steps": warmup_steps(options.warmup, options.schedule, dataloader.steps),
        "heldout_tokens": len(setup.heldout) * setup.block_size,
        "memory_bytes": _memory(setup),
    }


def _memory(setup: Setup) -> int:
    """Weights, gradients, optimiser and teacher, of one process without sharding; activations come on top."""
    teacher = sum(p.numel() * p.element_size() for p in setup.teacher.parameters()) if setup.teacher else 0
    optimizer = 8 if setup.options.optimizer == "adamw" else 1  # Adafactor keeps rows and columns only
    return 4 * setup.parameters + (4 + optimizer) * setup.trainable_parameters + teacher


def plan_text(setup: Setup) -> str:
    """The same for people."""
    options, record = setup.options, plan_record(setup)
    forwards = options.batch_size // (setup.micro * record["processes"])
    processes = f"{record['processes']} process{'es' if record['processes'] > 1 else ''}"
    teacher = f"taught by {options.teacher}" if options.teacher else "no teacher"
    lines = [
        f"model       {record['model']}: {record['trained_parameters']:,} of {record['parameters']:,} parameters train "
        f"({options.train}), {teacher}",
        f"data        {', '.join(options.data)}: {record['data']}",
        f"steps       {record['steps']:,} of {options.batch_size} blocks = {record['tokens_per_step']:,} tokens "
        f"({processes} x {forwards} x {setup.micro}), {record['tokens']:,} tokens in all",
        f"rate        {options.learning_rate:g} {options.optimizer}, {options.schedule}, "
        f"{record['warmup_steps']} steps of warm-up",
        f"memory      {size(record['memory_bytes'])} for weights, gradients and optimiser, activations on top",
        f"held out    {record['heldout_tokens']:,} tokens" if setup.heldout else "held out    nothing (see --heldout)",
    ]
    return "\n".join(lines)


def result_text(setup: Setup, progress: Progress) -> str:
    """How it went."""
    lines = []
    if progress.heldout_before is not None:
        lines.append(
            f"held out    {progress.heldout_before:.4f} nats per token before, {progress.heldout_after:.4f} after"
        )
    if progress.skipped:
        lines.append(f"skipped     {progress.skipped} steps whose loss or gradient was not finite")
    return "\n".join([*lines, f"written     {setup.options.output}: loads with plain transformers, verified"])
