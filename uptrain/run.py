"""From options to a trained checkpoint: open, check, train, export. `uptrain` is what the command calls."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedModel

from gqa.convert.checkpoint import Checkpoint
from gqa.convert.errors import RefusedError, explain
from gqa.convert.hub import open_model
from gqa.convert.loading import load_model
from gqa.convert.writer import OutputDirectory
from gqa.uptrain.export import export, provenance
from gqa.uptrain.feed import Feed, open_feed, open_heldout
from gqa.uptrain.log import Log
from gqa.uptrain.loop import AfterStep, Progress, train, weights
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import adapter_weights, choose, merge_adapters
from gqa.uptrain.state import States
from gqa.uptrain.training_model import TrainingModel

MAX_BLOCK = 2048


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start: everything that can be refused has been checked."""

    options: TrainOptions
    accelerator: Accelerator
    checkpoint: Checkpoint
    tokenizer: Any
    model: PreTrainedModel
    teacher: PreTrainedModel | None
    feed: Feed
    heldout: list[Any]
    micro: int
    block_size: int
    states: States

    @property
    def trained(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def make_accelerator(options: TrainOptions, accumulation: int = 1) -> Accelerator:
    """CPUs are named, for accelerate takes processes on them for unrelated ones otherwise."""
    try:
        return Accelerator(
            mixed_precision=options.precision,
            gradient_accumulation_steps=accumulation,
            cpu=not torch.accelerator.is_available(),
            log_with=list(options.report_to) or None,
            project_dir=str(state_directory(options)),
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise RefusedError(f"accelerate cannot start with these options: {explain(error)}") from None


def state_directory(options: TrainOptions) -> Path:
    """Beside the output, which appears only at the end."""
    out = options.output
    return out.with_name(f"{out.name}-state")


def prepare(options: TrainOptions, resume: bool = False) -> Setup:
    """Open and check everything. Raises RefusedError or CorpusError, before anything is written."""
    from gqa.convert.loading import ranks

    micro = options.check(ranks().num_processes)
    accelerator = make_accelerator(options, options.batch_size // ranks().num_processes // micro)
    checkpoint = open_model(options.model, None if Path(options.model).is_dir() else options.revision)
    OutputDirectory(options.output, checkpoint.directory, options.overwrite)  # refuses now
    states = States(state_directory(options), options.keep_last)
    if not resume and states.all():
        raise RefusedError(
            f"{states.directory} holds states of an unfinished run; continue it with --resume or delete the directory"
        )
    path = str(checkpoint.directory)
    how: dict[str, Any] = {
        "device": str(accelerator.device),
        "attention": options.attention,
        "trust_remote_code": options.trust_remote_code,
    }
    tokenizer = _tokenizer(path, checkpoint.name, options)
    model = load_model(path, dtype="float32", **how)
    text_config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise RefusedError(f"{checkpoint.name} is an encoder-decoder; gqa-uptrain trains decoders on plain text")
    if len(tokenizer) > text_config.vocab_size:
        raise RefusedError(
            f"the tokenizer of {checkpoint.name} has {len(tokenizer):,} tokens, its embedding only "
            f"{text_config.vocab_size:,}; give the tokenizer that belongs to the model"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    block_size = options.block_size or min(positions or MAX_BLOCK, MAX_BLOCK)
    if positions and block_size > positions:
        raise RefusedError(f"--block-size {block_size} is more than the {positions} positions of {checkpoint.name}")
    teacher = _teacher(options, model, how)
    choose(model, checkpoint, options.train, options.lora_rank)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with accelerator.main_process_first():  # one process tokenises, the others find it done
        feed = open_feed(options, tokenizer, block_size)
        heldout = open_heldout(options, tokenizer, block_size)
    return Setup(
        options, accelerator, checkpoint, tokenizer, model, teacher, feed, heldout, micro, block_size, states
    )  # fmt: skip


def _tokenizer(path: str, name: str, options: TrainOptions) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a library raises about a tokenizer it cannot read
        raise RefusedError(f"transformers cannot load the tokenizer of {name}: {explain(error)}") from None


def _teacher(options: TrainOptions, model: PreTrainedModel, how: dict[str, Any]) -> PreTrainedModel | None:
    if options.teacher is None:
        return None
    checkpoint = open_model(options.teacher)
    teacher = load_model(str(checkpoint.directory), **how)
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, teacher))
    if ours != theirs:
        raise RefusedError(
            f"the teacher {checkpoint.name} predicts {theirs:,} tokens, the model {ours:,}; give the checkpoint from "
            "which the model was converted"
        )
    return teacher.requires_grad_(False)


def uptrain(
    options: TrainOptions,
    *,
    resume: bool = False,
    quiet: bool = True,
    words: Sequence[str] = (),
    after_step: AfterStep | None = None,
) -> tuple[Progress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; returns how it went and the record that is written there."""
    return run(prepare(options, resume), resume=resume, quiet=quiet, words=words, after_step=after_step)


def run(
    setup: Setup,
    *,
    resume: bool = False,
    quiet: bool = True,
    words: Sequence[str] = (),
    after_step: AfterStep | None = None,
) -> tuple[Progress, dict[str, Any]]:
    """See `uptrain`."""
    options, accelerator = setup.options, setup.accelerator
    torch.manual_seed(options.seed)
    training = TrainingModel(
        setup.model, setup.teacher, distill=options.distill, temperature=options.temperature, match=options.match,
        match_weight=options.match_weight, compile_backbone=options.compile,
    )  # fmt: skip
    directory = setup.states.directory
    if accelerator.is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
    metrics = directory / "metrics.jsonl"
    if not resume:
        metrics.unlink(missing_ok=True)
    if options.report_to:
        accelerator.init_trackers("gqa-uptrain", config={k: str(v) for k, v in options.binding().items()})
    progress = train(
        accelerator, training, setup.feed, setup.heldout, options, micro=setup.micro, states=setup.states,
        resume=resume, after_step=after_step,
        log=lambda first: Log(accelerator, metrics, setup.feed.steps, first, setup.parameters, quiet),
    )  # fmt: skip
    record = provenance(setup.checkpoint, list(words), facts(setup, progress))
    _finish(setup, training, record, metrics)
    if options.report_to:
        accelerator.end_training()
    return progress, record


def _finish(setup: Setup, training: TrainingModel, record: dict[str, Any], metrics: Path) -> None:
    options, accelerator = setup.options, setup.accelerator
    found = weights(accelerator, accelerator._models[-1])
    if accelerator.is_main_process:
        model, extra = setup.model, {"training_log.jsonl": metrics}
        if options.train == "lora":
            if options.keep_adapter:
                extra["adapter.pt"] = setup.states.directory / "adapter.pt"
                torch.save(adapter_weights(model), extra["adapter.pt"])
            merge_adapters(model)
            found = model.state_dict()
        export(model, found, setup.checkpoint, options.output, record, overwrite=options.overwrite, extra=extra)
        if not options.keep_state:
            shutil.rmtree(setup.states.directory)
    accelerator.wait_for_everyone()


def facts(setup: Setup, progress: Progress) -> dict[str, Any]:
    """What was trained on what, JSON-ready."""
    options, feed = setup.options, setup.feed
    return {
        "data": list(options.data),
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "teacher": options.teacher,
        "losses": {
            "training": progress.loss,
            "heldout_before": progress.heldout_before,
            "heldout_after": progress.heldout_after,
        },
        "data_summary": feed.summary,
        "data_fingerprint": feed.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": replace(options, output=Path(options.output.name)).binding() | {"block_size": setup.block_size},
    }
