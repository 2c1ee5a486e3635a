"""Prepare a run from its options: model, teacher, data and processes, all checked before training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    gather_object,
    parse_flag_from_env,
    set_seed,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.console import SILENT, Watcher
from gqa.checkpoint.errors import RefusedError, explain, listing
from gqa.checkpoint.hub import beside, open_model
from gqa.checkpoint.loading import (
    check_predicts_tokens,
    find_device,
    load_model,
    load_tokenizer,
    out_of_memory,
    positions,
    ranks,
    read_auto_config,
)
from gqa.checkpoint.names import follow_prefix, sources, tied_names
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import OutputDirectory, require_space
from gqa.convert.merge.self_samples import SampledBlocks, derive_seed, sampled_blocks
from gqa.convert.merge.text_pairs import PairMaker
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.sources import is_self, parse_self
from gqa.uptrain.dataloader import Dataloader, open_dataloader, open_pairs, open_sampled
from gqa.uptrain.defaults import settle
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import choose
from gqa.uptrain.state import States
from gqa.uptrain.training_model import TrainingModel
from gqa.uptrain.weights import shard_model, shard_teacher

_ACCELERATE = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
MAX_BLOCK, MAX_PAIR = 2048, 512  # tokens of a block; of a source or target with relative positions, as for T5


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start, with everything checked that can be checked before the first step.

    `options`: with all defaults decided. `teacher_text`: the teacher, or why there is none, in words. `training_model`:
    the model with its loss and its teacher. `micro_batch`: blocks of one forward pass on one process.
    """

    options: TrainOptions
    teacher_text: str
    accelerator: Accelerator
    checkpoint: Checkpoint
    teacher_checkpoint: Checkpoint | None
    model: PreTrainedModel
    teacher: PreTrainedModel | None
    training_model: TrainingModel
    dataloader: Dataloader
    micro_batch: int
    states: States

    @property
    def metrics(self) -> Path:
        """The log of every step."""
        return self.states.directory / "metrics.jsonl"

    @contextmanager
    def explain_memory(self) -> Iterator[None]:
        """Raise RefusedError with the batch that was tried and what to lower, if memory is too small."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise RefusedError(
                f"out of memory while training on {self.accelerator.device}; lower --micro-batch (now "
                f"{self.micro_batch}) or --context (now {self.options.block:,}), or give --checkpointing, --train lora "
                "or --optimizer adafactor"
            ) from error


def prepare(
    options: TrainOptions, teacher: PreTrainedModel | None = None, watcher: Watcher = SILENT, dry: bool = False
) -> Setup:
    """Open and check everything. Raises RefusedError or CorpusError, before anything is written.

    `teacher`: the model of `options.teacher` in its own dtype, if it is in memory already. `watcher` shows the progress
    of sampling. A `dry` run reads headers only; its models have no weights, and it cannot start.
    """
    processes = ranks().num_processes
    output = options.output or beside(options.model, "-uptrained")
    options = replace(options, output=output, precision=options.precision or _launcher_precision())
    options.check(processes)
    checkpoint = open_model(options.model, options.revision, headers_only=dry)
    if checkpoint.packed:
        raise RefusedError(f"{checkpoint.name} has quantised weights, which are not trained; uptrain the original")
    config = read_auto_config(str(checkpoint.directory), options.trust_remote_code)
    check_predicts_tokens(config, checkpoint.name, options.trust_remote_code)
    options, base, teacher_text = settle(options, checkpoint, headers_only=dry)
    options.check(processes)
    out = OutputDirectory(output, checkpoint.directory, options.overwrite).out  # refuses a bad output now
    if not dry:  # a dry run may be for another machine
        require_space(checkpoint.nbytes, out)
    accelerator = make_accelerator(options)
    if options.compile and not dry:
        _check_compiler()
    states = States(out.with_name(f"{out.name}-state"))
    if options.resume:  # defaults of the run before: they may depend on the number of processes
        saved = states.latest()[1].get("options", {})
        undecided = [name for name in ("context", "batch_size") if getattr(options, name) is None]
        options = replace(options, **{name: saved.get(name) for name in undecided})
        options.check(processes)
    elif states.complete():
        raise RefusedError(
            f"{states.directory} holds states of an unfinished run; continue it with --resume or delete the directory"
        )
    tokenizer = load_tokenizer(checkpoint, options.trust_remote_code)
    model = build_model(options, checkpoint, accelerator, dry)
    if base is not None:
        teacher = build_teacher(options, base, teacher, accelerator, dry)
        check_teacher(teacher, load_tokenizer(base, options.trust_remote_code), model, tokenizer, base.name)
    training = TrainingModel(model, teacher, options)
    if not dry:
        if accelerator.is_fsdp2:
            shard_model(training, checkpoint, accelerator)
        check_exportable(model, checkpoint)  # weights are read: it is known which of several tied names are stored
        check_finite(model, checkpoint.name)
        if base is not None:
            check_finite(teacher, base.name)
    dataloader = build_data(options, checkpoint, base, model, tokenizer, accelerator.device, watcher, dry)
    options = dataloader.options
    share = options.blocks_per_step // processes
    micro_batch = options.micro_batch or share
    accelerator.gradient_accumulation_steps = share // micro_batch
    return Setup(
        options, teacher_text, accelerator, checkpoint, base, model, teacher, training, dataloader,
        micro_batch, states,
    )  # fmt: skip


def build_model(
    options: TrainOptions, checkpoint: Checkpoint, accelerator: Accelerator, dry: bool = False
) -> PreTrainedModel:
    """The model in float32, with frozen parameters that do not train. They are empty in a `dry` run, and under FSDP2,
    which reads weights into shards later.
    """
    sharded, device = accelerator.is_fsdp2, str(accelerator.device)
    model = _load(checkpoint, options, device, "float32", weights=not (dry or sharded))
    follow_prefix(model, checkpoint.tensors)
    if options.target_field and not model.config.is_encoder_decoder:
        raise RefusedError(f"--target-field is for encoder-decoders, {checkpoint.name} is none; leave it out")
    set_seed(options.seed)  # initialises adapters
    choose(model, checkpoint, options.train or "all", options.lora_rank)
    if options.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise RefusedError(f"--checkpointing: {explain(error)}") from error
    return model


def build_teacher(
    options: TrainOptions, base: Checkpoint, loaded: PreTrainedModel | None, accelerator: Accelerator, dry: bool = False
) -> PreTrainedModel:
    """The model of `base` in its stored dtype, or the one that is `loaded` already, without gradients."""
    sharded = accelerator.is_fsdp2 and not dry and loaded is None
    teacher = loaded or _load(base, options, str(accelerator.device), "auto", weights=not (dry or sharded))
    teacher.requires_grad_(False)
    if sharded:
        shard_teacher(teacher, base, accelerator)
    return teacher


def build_data(
    options: TrainOptions, checkpoint: Checkpoint, base: Checkpoint | None, model: PreTrainedModel, tokenizer: Any,
    device: torch.device, watcher: Watcher, dry: bool,
) -> Dataloader:  # fmt: skip
    """The data to train on, which the model of `base` may write, and the held-out blocks. Raises RefusedError and
    CorpusError.
    """
    longest, processes = find_block_size(model.config, tokenizer, checkpoint, options), ranks().num_processes

    def sample(size: int, count: int) -> SampledBlocks:
        assert base is not None
        load, plain = partial(_load, base, options, device=str(device)), parse_self(options.data[0]).plain
        return sampled_blocks(
            load, str(device), base, size, count, derive_seed(options.seed, "training"), plain, watcher, not dry,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip

    def make_pairs(size: int) -> PairMaker:
        assert base is not None
        return PairMaker(base, str(device), size, options.seed, watcher, options.trust_remote_code)

    # One process tokenises, or samples from the teacher, and the others read its cache.
    with main_first():
        if model.config.is_encoder_decoder:
            encoder, teacher = PairEncoder(model.config, tokenizer, checkpoint.name), make_pairs if base else None
            return open_pairs(options, encoder, tokenizer, longest, processes, teacher, not dry)
        if is_self(options.data[0]):
            return open_sampled(options, tokenizer, sample, longest, processes)
        return open_dataloader(options, tokenizer, longest, processes)


@contextmanager
def main_first() -> Iterator[None]:
    """The main process goes through the block, then the others do, also if it fails."""
    processes = ranks()
    if not processes.is_main_process:
        processes.wait_for_everyone()
    try:
        yield
    finally:
        if processes.is_main_process:
            processes.wait_for_everyone()


def make_accelerator(options: TrainOptions) -> Accelerator:
    """The accelerator of a run. Raises RefusedError if it cannot start with these options."""
    older = parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") == "1"
    if older or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        other = "FSDP1" if older else "DeepSpeed"
        raise RefusedError(f"a configuration of {other} is not for gqa-uptrain; use examples/accelerate/fsdp2.yaml")
    processes = ranks().num_processes
    if options.device and processes > 1:
        raise RefusedError(f"--device {options.device} is for one process; a launcher gives each of several its own")
    device = find_device(options.device) if options.device else None
    try:
        accelerator = Accelerator(
            mixed_precision=_ACCELERATE[options.precision or "float32"],
            # A plain number would be overridden by the launcher's environment.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            cpu=not torch.accelerator.is_available(),  # else it takes several processes on CPUs for unrelated ones
            # Text does not reach the towers of a multimodal model, nor layers that are dropped at random.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
    except (ValueError, ImportError) as error:
        raise RefusedError(f"accelerate cannot start with these options: {explain(error)}") from error
    if device:
        accelerator.state.device = torch.device(device)  # of this run; the state of the process stays
    if options.precision == "float16" and accelerator.device.type == "cpu":  # accelerate would compute in float32
        raise RefusedError("--precision float16 needs a GPU; on a CPU use bfloat16")
    if accelerator.is_fsdp2 and options.optimizer == "adafactor":  # transformers' own keeps its state in whole tensors
        raise RefusedError("--optimizer adafactor does not go with FSDP2, which divides weights; use adamw")
    if accelerator.is_fsdp2:
        # With it transformers loads every model on the first process alone, also those that are never sharded.
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        # Without it each process holds unsharded gradients between micro-batches.
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        # Weights are gathered in 16 bits, but gradients added and sums returned in float32; accelerate rounds both.
        if dtype := {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return accelerator


def _launcher_precision() -> Any:
    """The precision that `accelerate launch` sets, else float32."""
    names = {name: precision for precision, name in _ACCELERATE.items()}
    return names.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "float32")


def _load(
    checkpoint: Checkpoint, options: TrainOptions, device: str, dtype: str, weights: bool = True
) -> PreTrainedModel:
    return load_model(
        str(checkpoint.directory), dtype=dtype, device=device, attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code, weights=weights,
    )  # fmt: skip


def check_exportable(model: PreTrainedModel, source: Checkpoint) -> None:
    """Raise RefusedError if the model's class would store other tensors or shapes than its source has."""
    stored = {name: shape for name, (shape, _) in sources(model).items()}
    tied = {name.replace(".base_layer.", ".") for name in tied_names(model)}
    known = {name: spec.shape for name, spec in source.tensors.items()}
    wrong = [name for name, shape in stored.items() if known.get(name) != shape and (name in known or name not in tied)]
    if wrong or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(wrong or stored)} otherwise than {source.name} does; load it "
            "with transformers, save it again and train that"
        )


def _check_compiler() -> None:
    """Raise RefusedError where torch.compile does not work: it needs a C++ compiler, or Triton on a GPU."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2))
    except Exception as error:  # of any of the layers below
        if out_of_memory(error):
            raise
        reason = explain(error, 200)
        raise RefusedError(f"--compile: torch.compile does not work here ({reason}); do without") from error


def check_finite(model: PreTrainedModel, name: str) -> None:
    """Raise RefusedError if weights are NaN or infinite: training would blame the learning rate."""
    weights = {key: weight.detach() for key, weight in model.named_parameters() if weight.is_floating_point()}
    local = {key: weight.to_local() if isinstance(weight, DTensor) else weight for key, weight in weights.items()}
    bad = [key for key, weight in local.items() if weight.element_size() > 1 and not bool(weight.isfinite().all())]
    if bad := gather_object(bad):
        raise RefusedError(
            f"{name} has weights that are NaN or infinite: {listing(set(bad))}; give an intact checkpoint"
        )


def check_teacher(teacher: Any, teacher_tokenizer: Any, model: Any, tokenizer: Any, name: str) -> None:
    """Raise RefusedError if the teacher of that name has another vocabulary than the model."""
    theirs, ours = (each.config.get_text_config(decoder=True).vocab_size for each in (teacher, model))
    if theirs != ours:
        difference = f"the teacher {name} predicts {theirs:,} tokens, the model {ours:,}"
    elif teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
        difference = f"the tokenizer of the teacher {name} has other tokens than the model's"
    else:
        return
    raise RefusedError(f"{difference}; give the checkpoint from which the model was converted")


def find_block_size(config: Any, tokenizer: Any, checkpoint: Checkpoint, options: TrainOptions) -> int:
    """Tokens of a block: --context, or the model's positions, `MAX_BLOCK` at most. Raises RefusedError."""
    default = MAX_PAIR if config.is_encoder_decoder else MAX_BLOCK
    config = config.get_text_config(decoder=True)
    if len(tokenizer) > config.vocab_size:
        raise RefusedError(
            f"the tokenizer of {checkpoint.name} has {len(tokenizer):,} tokens, its embedding only "
            f"{config.vocab_size:,}; give the tokenizer that belongs to the model"
        )
    longest = positions(config)
    if longest and options.context and options.context > longest:
        raise RefusedError(f"--context {options.context} is more than the {longest} positions of {checkpoint.name}")
    return options.context or min(longest or default, MAX_BLOCK)
