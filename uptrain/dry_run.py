"""What a training would do and need, counted from configs and headers: no weights are loaded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from gqa.checkpoint.base_model import distills_from_base
from gqa.checkpoint.output_directory import OutputDirectory, require_space
from gqa.checkpoint.read import Checkpoint
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import find_device, ranks
from gqa.core.errors import OutputError, RefusedError
from gqa.models.loading import load_model
from gqa.models.names import follow_prefix
from gqa.models.training_memory import TrainingMemory, activation_memory, training_memory
from gqa.uptrain.accelerator import precision_name
from gqa.uptrain.data_sources import named_sources
from gqa.uptrain.frozen_weights import frozen_linear_layers, layers_of_both
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.saver import states_kept
from gqa.uptrain.scope import freeze_parameters
from gqa.uptrain.setup import ResolvedRun, resolve_run
from gqa.uptrain.stored_weights import affected_bytes
from gqa.uptrain.training_time import TrainingTime, generating_seconds, training_seconds


@dataclass(frozen=True)
class TrainingNeeds(TrainingMemory):
    """What a run on one GPU needs, in bytes.

    Attributes:
        parameters: Number of parameters of the model.
        trained: Number of those that train.
        activations: Of one forward pass, which `memory` does not count; None if only the data says
            how long a block is.
        result: Disk space of the result.
        trained_weights: Disk space of the weights that training changes, which are saved before the
            result is written.
        teacher_parameters: Number of parameters of the teacher; 0 without one.
    """

    parameters: int
    trained: int
    activations: int | None
    result: int
    trained_weights: int
    teacher_parameters: int


@dataclass(frozen=True)
class DryRun:
    """The plan of a run.

    Attributes:
        resolved: Options, models and, if no text has to be read for it, the length.
        precision: The dtype of the computation.
        needs: Memory and disk space.
        time: None if the length is not known.
        warnings: Why its output could not be written.
    """

    resolved: ResolvedRun
    precision: str
    needs: TrainingNeeds
    time: TrainingTime | None
    warnings: tuple[str, ...]


def dry_run(options: UptrainOptions, watcher: Watcher = SILENT) -> DryRun:
    """The plan of a run that is not started: no weights are read, and only the beginning of text.

    Raises RefusedError and TextError as a run would, except for what needs the tokenizer, the
    weights or more than the beginning of the text.
    """
    resolved = resolve_run(options, ranks().num_processes, watcher)
    _check_text(resolved.options)
    needs = training_needs(resolved)
    return DryRun(
        resolved=resolved,
        precision=precision_name(resolved.options),
        needs=needs,
        time=training_time(resolved, needs),
        warnings=tuple(_output_warnings(resolved, needs)),
    )


def _check_text(options: UptrainOptions) -> None:
    """Raise TextError for files that have no text; nothing is fetched."""
    for source in named_sources(options):
        if source.files:
            next(source.rows())


def training_needs(resolved: ResolvedRun) -> TrainingNeeds:
    """Memory and disk space, by the table of docs/scale.md, and roughly the activations."""
    options = resolved.options
    checkpoint = resolved.checkpoint
    model = _empty_model(checkpoint, options, "float32")
    follow_prefix(model, checkpoint.tensors)
    freeze_parameters(model, checkpoint, options.scope, options.lora_rank)

    parameters = model.num_parameters()
    trained = model.num_parameters(only_trainable=True)

    autocast = precision_name(options) == "bfloat16"
    rounded = frozen_linear_layers(model, checkpoint) if autocast else {}

    teacher = 0
    teacher_parameters = 0
    shared = 0
    if resolved.teacher_checkpoint:
        empty = _empty_model(resolved.teacher_checkpoint, options, "auto")
        teacher = sum(parameter.nbytes for parameter in empty.parameters())
        teacher_parameters = empty.num_parameters()
        # What was converted has the weights that conversion did not change
        if distills_from_base(checkpoint, resolved.teacher_checkpoint):
            shared = sum(other.weight.nbytes for _, other in layers_of_both(rounded, empty))

    memory = training_memory(
        parameters,
        trained,
        teacher,
        options.optimizer,
        autocast=autocast,
        rounded=sum(layer.weight.numel() for layer in rounded.values()),
        shared=shared,
    )
    return TrainingNeeds(
        **asdict(memory),
        parameters=parameters,
        trained=trained,
        activations=_activations(resolved),
        result=checkpoint.nbytes,
        trained_weights=affected_bytes(model, checkpoint),
        teacher_parameters=teacher_parameters,
    )


def training_time(resolved: ResolvedRun, needs: TrainingNeeds) -> TrainingTime | None:
    """How long the run takes, if its length is known."""
    options = resolved.options
    length = resolved.length
    hidden_size = getattr(resolved.config.get_text_config(decoder=True), "hidden_size", None)
    if length is None or not hidden_size:
        return None

    device = find_device(options.device)
    training = training_seconds(
        length.tokens,
        parameters=needs.parameters,
        trained=needs.trained,
        teacher_parameters=needs.teacher_parameters,
        checkpointing=options.gradient_checkpointing,
        device=device,
        hidden_size=hidden_size,
        dtype=precision_name(options),
    )

    generating = 0.0
    teacher = resolved.teacher_checkpoint
    if teacher and options.is_generated:
        validation_tokens = 0 if options.validation else options.validation_tokens
        sequences = math.ceil((length.tokens + validation_tokens) / length.block_size)
        generating = generating_seconds(teacher, sequences, length.block_size, device)
    return TrainingTime(device, generating, training / ranks().num_processes)


def _activations(resolved: ResolvedRun) -> int | None:
    """Bytes of activations of one forward pass on one process, if the length is known."""
    length = resolved.length
    config = resolved.config.get_text_config(decoder=True)
    hidden_size = getattr(config, "hidden_size", None)
    layers = getattr(config, "num_hidden_layers", None)
    if length is None or not hidden_size or not layers:
        return None

    options = resolved.options
    micro_batch = options.micro_batch or length.blocks_per_step // ranks().num_processes
    number_bytes = 2 if precision_name(options) == "bfloat16" else 4
    return activation_memory(
        hidden_size,
        layers,
        tokens=micro_batch * length.block_size,
        number_bytes=number_bytes,
        checkpointing=options.gradient_checkpointing,
    )


def _empty_model(checkpoint: Checkpoint, options: UptrainOptions, dtype: str) -> PreTrainedModel:
    """The model of a checkpoint on `meta`."""
    return load_model(
        str(checkpoint.directory),
        dtype=dtype,
        attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights=False,
    )


def _output_warnings(resolved: ResolvedRun, needs: TrainingNeeds) -> list[str]:
    """Why the output could not be written; empty if it could."""
    options = resolved.options
    checkpoint = resolved.checkpoint
    assert options.output is not None
    try:
        out = OutputDirectory(options.output, checkpoint.directory, options.overwrite).out
        states = states_kept(options) + 1  # with the one that is being saved
        require_space(states * needs.state, out, what="the saved states of the run take")
        require_space(
            needs.result + needs.trained_weights,
            out,
            what="the result and its trained weights take",
        )
    except (RefusedError, OutputError) as error:
        return [str(error)]
    return []
