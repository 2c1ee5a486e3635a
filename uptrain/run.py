"""From options to a trained checkpoint: open, check, train, export. `uptrain` is what the command calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    LoggerType,
    set_seed,
)
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.loading import load_model, ranks
from gqa.checkpoint.provenance import without_place
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.checkpoint.write import OutputDirectory, finite, require_space
from gqa.corpus.sources import is_self
from gqa.uptrain.card import provenance
from gqa.uptrain.export import ADAPTER, METRICS, check_exportable, export
from gqa.uptrain.feed import Feed, open_feed, open_heldout, open_self
from gqa.uptrain.log import Log
from gqa.uptrain.loop import AfterStep, Progress, Weights, train
from gqa.uptrain.lora import merged, save_adapter
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import choose, unreached
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
    def metrics(self) -> Path:
        """The log of every step."""
        return self.states.directory / "metrics.jsonl"

    @property
    def trained(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def make_accelerator(options: TrainOptions, out: Path, micro: int, accumulation: int) -> Accelerator:
    """CPUs are named, for accelerate takes processes on them for unrelated ones otherwise. Raises RefusedError."""
    for name in set(options.report_to) & (set(LoggerType.list()) - {"all", *map(str, get_available_trackers())}):
        raise RefusedError(f"--report-to {name} needs its package; install it with: pip install {name}")
    try:
        accelerator = Accelerator(
            mixed_precision=options.precision,
            # Given as a number it would give way to a variable that the launcher sets for DeepSpeed.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
            cpu=not torch.accelerator.is_available(),
            log_with=list(options.report_to) or None,
            project_dir=str(_beside(out, "logs")),
            kwargs_handlers=[DistributedDataParallelKwargs()],
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise RefusedError(f"accelerate cannot start with these options: {explain(error)}") from None
    if options.precision == "fp16" and accelerator.device.type == "cpu":  # accelerate would compute in float32
        raise RefusedError("--precision fp16 needs a GPU; on a CPU use bf16")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": options.clip,
        }
    return accelerator


def _beside(out: Path, purpose: str) -> Path:
    return out.with_name(f"{out.name}-{purpose}")


def prepare(options: TrainOptions, resume: bool = False, teacher: PreTrainedModel | None = None) -> Setup:
    """Open and check everything. Raises RefusedError or CorpusError, before anything is written.

    `teacher` is the model that `options.teacher` names, where it is in memory already.
    """
    processes = ranks().num_processes
    micro = options.check(processes)
    checkpoint = open_model(options.model, options.revision)
    out = OutputDirectory(options.output, checkpoint.directory, options.overwrite).out  # refuses now
    require_space(checkpoint.nbytes, out)
    accelerator = make_accelerator(options, out, micro, options.batch_size // processes // micro)
    states = States(_beside(out, "state"), options.keep_last)
    if not resume and states.all():
        raise RefusedError(
            f"{states.directory} holds states of an unfinished run; continue it with --resume or delete the directory"
        )
    if resume:
        states.latest(whole=False)
    tokenizer = load_tokenizer(checkpoint, options.trust_remote_code)
    model = _model(checkpoint, options, accelerator)
    block_size = find_block_size(model.config, tokenizer, checkpoint, options)
    teacher = _teacher(model, tokenizer, options, accelerator, teacher)
    with accelerator.main_process_first():  # one process tokenises, the others find it done
        if is_self(options.data[0]):
            assert options.teacher is not None
            writer, device = open_model(options.teacher), str(accelerator.device)

            def load(dtype: str) -> PreTrainedModel:
                with _loaded_on_every_rank():
                    return _load(writer, options, device, dtype)

            feed = open_self(options, load, device, writer, block_size)
        else:
            feed = open_feed(options, tokenizer, block_size)
        heldout = open_heldout(options, tokenizer, block_size)
    return Setup(
        options, accelerator, checkpoint, tokenizer, model, teacher, feed, heldout, micro, block_size, states
    )  # fmt: skip


def _model(checkpoint: Checkpoint, options: TrainOptions, accelerator: Accelerator) -> PreTrainedModel:
    """In float32, with what does not train frozen. Sharded models stay on the CPU until they are shards."""
    sharded = accelerator.distributed_type == DistributedType.FSDP
    model = _load(checkpoint, options, "cpu" if sharded else str(accelerator.device), dtype="float32")
    if model.config.is_encoder_decoder:
        raise RefusedError(f"{checkpoint.name} is an encoder-decoder; gqa-uptrain trains decoders on plain text")
    check_exportable(model, checkpoint)
    set_seed(options.seed)  # of adapters
    choose(model, checkpoint, options.train, options.lora_rank)
    if accelerator.num_processes > 1 and not sharded:
        with accelerator.autocast():
            accelerator.ddp_handler.find_unused_parameters = bool(unreached(model))
    if options.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise RefusedError(f"--checkpointing: {explain(error)}") from None
    if options.compile:
        _check_compiler()
    return model


def _load(checkpoint: Checkpoint, options: TrainOptions, device: str, dtype: str) -> PreTrainedModel:
    return load_model(
        str(checkpoint.directory), dtype=dtype, device=device, attention=options.attention,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip


def _check_compiler() -> None:
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2))
    except Exception as error:  # of any of the layers below
        raise RefusedError(f"--compile: torch.compile does not work here ({explain(error, 200)}); do without") from None


def find_block_size(config: Any, tokenizer: Any, checkpoint: Checkpoint, options: TrainOptions) -> int:
    """What is asked for, or the positions of the model but `MAX_BLOCK` at most. Raises RefusedError."""
    config = config.get_text_config(decoder=True)
    if len(tokenizer) > config.vocab_size:
        raise RefusedError(
            f"the tokenizer of {checkpoint.name} has {len(tokenizer):,} tokens, its embedding only "
            f"{config.vocab_size:,}; give the tokenizer that belongs to the model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and options.block_size and options.block_size > positions:
        raise RefusedError(
            f"--block-size {options.block_size} is more than the {positions} positions of {checkpoint.name}"
        )
    return options.block_size or min(positions or MAX_BLOCK, MAX_BLOCK)


def _teacher(
    model: PreTrainedModel,
    tokenizer: Any,
    options: TrainOptions,
    accelerator: Accelerator,
    loaded: PreTrainedModel | None,
) -> PreTrainedModel | None:
    """In its own dtype, without gradients, whole on every device."""
    if options.teacher is None:
        return None
    checkpoint = open_model(options.teacher)
    with _loaded_on_every_rank():
        teacher = loaded or _load(checkpoint, options, str(accelerator.device), dtype="auto")
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, teacher))
    if ours != theirs:
        raise RefusedError(
            f"the teacher {checkpoint.name} predicts {theirs:,} tokens, the model {ours:,}; give the checkpoint from "
            "which the model was converted"
        )
    if load_tokenizer(checkpoint, options.trust_remote_code).get_vocab() != tokenizer.get_vocab():
        raise RefusedError(
            f"the tokenizer of the teacher {checkpoint.name} has other tokens than the model's; give the checkpoint "
            "from which the model was converted"
        )
    return teacher.requires_grad_(False)


@contextmanager
def _loaded_on_every_rank() -> Iterator[None]:
    """FSDP's option to load on one rank and send to the others is for the model that it shards; older transformers
    leave every other model empty too.
    """
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


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
    """See `uptrain`. Raises what `train` and `export` raise."""
    with held(setup):
        progress, found = train_prepared(setup, resume=resume, quiet=quiet, after_step=after_step)
        record = finite(provenance(setup.checkpoint, words, facts(setup, progress)))
        if setup.accelerator.is_main_process:
            _write(setup, found, record)
        setup.accelerator.wait_for_everyone()
    return progress, record


@contextmanager
def held(setup: Setup) -> Iterator[None]:
    """The states' directory is there, and no other run uses it. Raises RefusedError where one does."""
    with setup.states.held() if setup.accelerator.is_main_process else nullcontext():
        yield


def train_prepared(
    setup: Setup, *, resume: bool = False, quiet: bool = True, after_step: AfterStep | None = None
) -> tuple[Progress, Weights]:
    """Train while the setup is `held`; no checkpoint is written. Raises what `train` raises."""
    options, accelerator = setup.options, setup.accelerator
    set_seed(options.seed, device_specific=True)  # dropout differs between ranks
    training = TrainingModel(
        setup.model, setup.teacher, distill=options.distill, temperature=options.temperature, match=options.match,
        match_weight=options.match_weight, compile_backbone=options.compile,
    )  # fmt: skip
    if options.report_to:
        accelerator.init_trackers("gqa-uptrain", config={k: str(v) for k, v in options.binding().items()})
    try:
        return train(
            accelerator, training, setup.feed, setup.heldout, options, micro=setup.micro, states=setup.states,
            resume=resume, after_step=after_step,
            log=lambda first: Log(accelerator, setup.metrics, setup.feed.steps, first, setup.parameters, quiet),
        )  # fmt: skip
    finally:
        if options.report_to:
            accelerator.end_training()


def _write(setup: Setup, found: Weights, record: dict[str, Any]) -> None:
    options, extra = setup.options, {METRICS: setup.metrics}
    if options.keep_adapter:
        names = {name for name, p in setup.model.named_parameters() if p.requires_grad}
        directory = setup.states.directory / ADAPTER
        save_adapter(found, names, directory)
        extra |= {f"{ADAPTER}/{path.name}": path for path in directory.iterdir()}
    export(
        setup.model, merged(found), setup.checkpoint, options.output, record, overwrite=options.overwrite, extra=extra,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if not options.keep_state:
        shutil.rmtree(setup.states.directory)


def facts(setup: Setup, progress: Progress) -> dict[str, Any]:
    """What was trained on what, JSON-ready."""
    options, feed = setup.options, setup.feed
    told = {
        name: [without_place(v) for v in value] if isinstance(value, list)
        else without_place(value) if isinstance(value, str) else value
        for name, value in options.binding().items()
    }  # fmt: skip
    return {
        "data": told["data"],
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "teacher": told["teacher"],
        "losses": {
            "training": progress.loss,
            "heldout_before": progress.heldout_before,
            "heldout_after": progress.heldout_after,
        },
        "data_summary": feed.summary,
        "data_fingerprint": feed.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": told | {"block_size": setup.block_size},
    }
