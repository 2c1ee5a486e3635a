"""Prepare a run from its options: model, teacher, data and processes, checked before training.

A run becomes ready in three steps, each of which adds to what the one before has found:

    resolve_run -> ResolvedRun    its options are decided, from configs and records
    open_run    -> OpenedRun      its weights are fetched, and its saved states are found
    load_run    -> ReadyRun       its models and its text are loaded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from gqa.checkpoint.hub import default_output, fetch_weights, open_model
from gqa.checkpoint.output_directory import OutputDirectory, require_space
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import check_config
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import from_main, ranks
from gqa.core.errors import RefusedError
from gqa.models.classes import check_predicts_tokens, read_auto_config
from gqa.models.tokenizer import load_tokenizer
from gqa.uptrain.accelerator import make_accelerator, precision_name
from gqa.uptrain.adapters import require_peft
from gqa.uptrain.build_data import build_data
from gqa.uptrain.data_sources import named_sources
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.defaults import decide_defaults
from gqa.uptrain.frozen_weights import round_frozen_weights
from gqa.uptrain.identity import describe_run
from gqa.uptrain.models import (
    check_exportable,
    check_teacher,
    load_teacher,
    load_trained_model,
    loading_device,
)
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.pair_data import check_pair_options
from gqa.uptrain.run_length import Length, length_without_data
from gqa.uptrain.sharding import shard_model
from gqa.uptrain.state import METRICS_LOG, States, find_states, states_directory
from gqa.uptrain.state_files import State
from gqa.uptrain.training_model import TrainingModel


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose options are decided as far as configs and records determine them, and the models
    that they name.

    Attributes:
        options: With output, teacher, data, length, repeats and scope decided. precision, context
            and batch_size may be None; so is repeats for text that the teacher writes.
        teacher_text: The teacher, or why there is none, in words.
        checkpoint: The model that is trained.
        teacher_checkpoint: The teacher, if there is one.
        config: transformers' config of the model.
        length: How long the run is; None if only the data says it.
    """

    options: UptrainOptions
    teacher_text: str
    checkpoint: Checkpoint
    teacher_checkpoint: Checkpoint | None
    config: Any
    length: Length | None


@dataclass(frozen=True)
class OpenedRun(ResolvedRun):
    """A run whose options are decided, and whose model and text are known, but not loaded.

    Attributes:
        options: Those of `ResolvedRun`, with precision decided.
        out: The output directory.
        accelerator: Of this process.
        states: What unfinished work is stored in.
        description: What makes it this run, by `describe_run`.
        continues_from: The saved state from which the run goes on; None if it begins at step 0. If
            its training is done, only the result is to be written.
    """

    out: Path
    accelerator: Accelerator
    states: States
    description: dict[str, Any]
    continues_from: State | None

    @property
    def log_path(self) -> Path:
        """The log of every step."""
        return self.states.directory / METRICS_LOG

    @property
    def is_trained(self) -> bool:
        """Whether only the result is to be written."""
        return self.continues_from is not None and self.continues_from.is_trained

    def open_output(self) -> OutputDirectory:
        """The output, not yet created. Raises RefusedError if it must not be."""
        return OutputDirectory(self.out, self.checkpoint.directory, self.options.overwrite)


@dataclass(frozen=True)
class ReadyRun(OpenedRun):
    """A run that is ready to start, with everything checked that can be checked before the first
    step.

    Attributes:
        options: Those of `OpenedRun`, with context and batch_size decided; `dataloader` has the
            same.
        model: The model that is trained.
        training_model: The same with its loss and its teacher.
        dataloader: The text, in blocks.
        micro_batch: Blocks of one forward pass on one process.
    """

    model: PreTrainedModel
    training_model: TrainingModel
    dataloader: Dataloader
    micro_batch: int


def prepare(
    options: UptrainOptions,
    argv: Sequence[str] = (),
    watcher: Watcher = SILENT,
    *,
    shares_states: bool = True,
) -> OpenedRun | ReadyRun:
    """Open, load and check all that a run needs, before anything is written to the output.

    Args:
        options: As the user passed them.
        argv: Arguments of the command.
        watcher: Shows the progress of sampling.
        shares_states: Whether runs of the same training with other outputs continue each other.

    Returns:
        A `ReadyRun`, which trains. Or only an `OpenedRun`, if an earlier one has trained the
        weights already and could not write its result: then nothing is loaded or trained.

    Raises:
        RefusedError, TextError: The options, the models or the text cannot be used.
        OutputError: There is no space for the result.
    """
    run = open_run(options, argv, watcher, shares_states)
    return load_unless_trained(run, watcher)


def resolve_run(options: UptrainOptions, processes: int, watcher: Watcher = SILENT) -> ResolvedRun:
    """Check the options of a run against its model, and decide what they leave open.

    Only configs, headers and records are read; of a model id, the weights are not fetched yet.
    Raises RefusedError and TextError.
    """
    output = options.output or default_output(options.model, "-uptrained")
    options = replace(options, output=output)
    # What the user passed; after the defaults once more, since they may contradict it.
    options.check(processes)

    checkpoint = open_model(options.model, options.revision, headers_only=True)
    if ranks().is_main_process:
        for warning in checkpoint.warnings:
            watcher.warn(warning)
    if checkpoint.packed:
        raise RefusedError(
            f"{checkpoint.name} has quantized weights, which cannot be trained; train the "
            "unquantized model, then quantize the result"
        )
    check_config(checkpoint.config, checkpoint.name)
    config = read_auto_config(str(checkpoint.directory), options.trust_remote_code)
    check_predicts_tokens(config, checkpoint.name, options.trust_remote_code)
    if options.target_column and not config.is_encoder_decoder:
        raise RefusedError(
            f"--target-column works only with encoder-decoders, but {checkpoint.name} is not one; "
            "remove --target-column"
        )
    options, teacher, teacher_text = decide_defaults(options, checkpoint, config, watcher)
    options.check(processes)
    if config.is_encoder_decoder:
        check_pair_options(options, checkpoint.name)

    # What does not exist is refused now: before weights are fetched, which may take hours
    named_sources(options)
    if options.scope == "lora":
        require_peft()
    length = length_without_data(options, config, checkpoint, processes)
    return ResolvedRun(options, teacher_text, checkpoint, teacher, config, length)


def open_run(
    options: UptrainOptions,
    argv: Sequence[str] = (),
    watcher: Watcher = SILENT,
    shares_states: bool = True,
) -> OpenedRun:
    """Decide the options of a run and look for its states.

    Raises RefusedError, TextError, OutputError.
    """
    resolved = resolve_run(options, ranks().num_processes, watcher)
    options = resolved.options
    checkpoint = resolved.checkpoint
    teacher = resolved.teacher_checkpoint
    output = options.output
    assert output is not None

    # Refuses a bad output now
    out = OutputDirectory(output, checkpoint.directory, options.overwrite).out
    require_space(checkpoint.nbytes, out, what="the result takes")

    # Each process looked for the base model itself
    if options.teacher != from_main(lambda: options.teacher):
        raise RefusedError(
            f"this process has another teacher ({resolved.teacher_text}) than the main process; "
            "pass it with --teacher, by a name that all machines can read"
        )
    accelerator = make_accelerator(options)  # refuses a device that is not there
    fetch_weights(checkpoint)
    if teacher:
        fetch_weights(teacher)

    options = replace(options, precision=precision_name(options))
    description = describe_run(options, checkpoint, teacher, str(accelerator.device), argv)
    states = States(states_directory(out), out)
    if shares_states:
        states = find_states(out, description)
    continues_from = from_main(lambda: states.state_to_continue(description))
    return OpenedRun(
        **vars(replace(resolved, options=options)),
        out=out,
        accelerator=accelerator,
        states=states,
        description=description,
        continues_from=continues_from,
    )


def load_unless_trained(run: OpenedRun, watcher: Watcher = SILENT) -> OpenedRun | ReadyRun:
    """Load a run, unless an earlier one has trained its weights already.

    Raises RefusedError and TextError.
    """
    if run.is_trained:
        return run
    return load_run(run, watcher)


def load_run(run: OpenedRun, watcher: Watcher = SILENT) -> ReadyRun:
    """Load models and text of a run. Raises RefusedError and TextError."""
    processes = ranks().num_processes
    if run.continues_from:  # the default batch may depend on the number of processes
        batch_size = run.continues_from.record["batch_size"]
        options = replace(run.options, batch_size=batch_size)
        options.check(processes)
        run = replace(run, options=options)

    # Models first: the text may take hours to write, and a model that cannot be loaded is refused
    # before
    tokenizer = load_tokenizer(run.checkpoint, run.options.trust_remote_code)
    model, teacher, training_model = _load_models(run, tokenizer)
    dataloader = _build_data_and_move_models(run, model, teacher, tokenizer, watcher)

    options = dataloader.options
    blocks_of_process = options.blocks_per_step // processes
    micro_batch = options.micro_batch or blocks_of_process
    run.accelerator.gradient_accumulation_steps = blocks_of_process // micro_batch

    run = replace(run, options=options)
    return ReadyRun(
        **vars(run),
        model=model,
        training_model=training_model,
        dataloader=dataloader,
        micro_batch=micro_batch,
    )


def _load_models(
    run: OpenedRun, tokenizer: Any
) -> tuple[PreTrainedModel, PreTrainedModel | None, TrainingModel]:
    """The model, the teacher if there is one, and the module that trains.

    `tokenizer` is the model's. Raises RefusedError if they do not fit each other or the run.
    """
    options = run.options
    checkpoint = run.checkpoint
    teacher_checkpoint = run.teacher_checkpoint
    accelerator = run.accelerator

    # We round frozen weights to bfloat16 once. FSDP2 rounds each layer when it gathers it.
    rounds_frozen = accelerator.mixed_precision == "bf16" and not accelerator.is_fsdp2
    device = str(accelerator.device)
    if rounds_frozen:
        device = loading_device(checkpoint, teacher_checkpoint, accelerator)

    # Before weights are read, which may take minutes
    if teacher_checkpoint:
        _check_teacher(run, teacher_checkpoint, tokenizer)

    model = load_trained_model(options, checkpoint, accelerator, device)
    teacher = None
    if teacher_checkpoint:
        teacher = load_teacher(options, teacher_checkpoint, accelerator, device)

    training_model = TrainingModel(model, teacher, options.compile)
    if accelerator.is_fsdp2:
        shard_model(training_model, checkpoint, accelerator)
    # Weights are read: it is known which of several tied names are stored
    check_exportable(model, checkpoint)
    if rounds_frozen:
        round_frozen_weights(model, checkpoint, teacher)
    return model, teacher, training_model


def _check_teacher(run: OpenedRun, teacher: Checkpoint, tokenizer: Any) -> None:
    """Raise RefusedError if the teacher does not fit the model, whose tokenizer is given."""
    trust_remote_code = run.options.trust_remote_code
    teacher_config = read_auto_config(str(teacher.directory), trust_remote_code)
    teacher_tokenizer = load_tokenizer(teacher, trust_remote_code)
    check_teacher(teacher_config, teacher_tokenizer, run.config, tokenizer, teacher.name)


def _build_data_and_move_models(
    run: OpenedRun,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    tokenizer: Any,
    watcher: Watcher,
) -> Dataloader:
    """The data of a run, whose models are moved to its device. Raises RefusedError and TextError.

    A teacher that generates text has the device to itself: meanwhile the models wait on the host.
    """
    options = run.options
    accelerator = run.accelerator
    device = str(accelerator.device)
    loaded = [one for one in (model, teacher) if one is not None]

    if options.is_generated and accelerator.is_main_process and not accelerator.is_fsdp2:
        _move(loaded, "cpu")
    dataloader = build_data(
        options, run.checkpoint, run.teacher_checkpoint, model.config, tokenizer, device, watcher
    )
    if not accelerator.is_fsdp2:
        _move(loaded, device)
    return dataloader


def _move(models: Sequence[PreTrainedModel], device: str) -> None:
    """Move models to a device. Weights that they share stay shared."""
    for model in models:
        model.to(device)
