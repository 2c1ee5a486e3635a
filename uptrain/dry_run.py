"""What a training would do and need, counted from configs and headers: no weights are loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from gqa.checkpoint.output_directory import OutputDirectory, require_space
from gqa.checkpoint.read import Checkpoint
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import ranks
from gqa.core.errors import OutputError, RefusedError
from gqa.models.loading import load_model
from gqa.models.training_memory import TrainingMemory, training_memory
from gqa.uptrain.models import freeze_parameters
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.setup import Resolved, resolve_options


@dataclass(frozen=True)
class TrainingNeeds(TrainingMemory):
    """What a run on one GPU needs, in bytes, besides activations.

    Attributes:
        parameters: Number of parameters of the model.
        trained: Number of those that train.
        result: Disk space of the result.
    """

    parameters: int
    trained: int
    result: int


@dataclass(frozen=True)
class DryRun:
    """The plan of a run: options and models, needs, and why its output could not be written."""

    resolved: Resolved
    needs: TrainingNeeds
    warnings: tuple[str, ...]


def dry_run(options: TrainOptions, watcher: Watcher = SILENT) -> DryRun:
    """The plan of a run that is not started: neither weights nor text are read.

    Raises RefusedError and CorpusError as a run would, for options and models.
    """
    resolved = resolve_options(options, ranks().num_processes, watcher)
    needs = training_needs(resolved)
    return DryRun(resolved, needs, tuple(_output_warnings(resolved)))


def training_needs(resolved: Resolved) -> TrainingNeeds:
    """Memory and disk space, by the table of docs/scale.md."""
    options = resolved.options
    checkpoint = resolved.checkpoint
    model = _empty_model(checkpoint, options, "float32")
    freeze_parameters(model, checkpoint, options.train or "all", options.lora_rank)

    parameters = model.num_parameters()
    trained = model.num_parameters(only_trainable=True)

    teacher = 0
    if resolved.teacher_checkpoint:
        empty = _empty_model(resolved.teacher_checkpoint, options, "auto")
        teacher = sum(parameter.nbytes for parameter in empty.parameters())

    memory = training_memory(parameters, trained, teacher, options.optimizer)
    return TrainingNeeds(
        **asdict(memory), parameters=parameters, trained=trained, result=checkpoint.nbytes
    )


def _empty_model(checkpoint: Checkpoint, options: TrainOptions, dtype: str) -> PreTrainedModel:
    """The model of a checkpoint on `meta`."""
    return load_model(
        str(checkpoint.directory),
        dtype=dtype,
        attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights=False,
    )


def _output_warnings(resolved: Resolved) -> list[str]:
    """Why the output could not be written; empty if it could."""
    options = resolved.options
    checkpoint = resolved.checkpoint
    assert options.output is not None
    try:
        out = OutputDirectory(options.output, checkpoint.directory, options.overwrite).out
        require_space(checkpoint.nbytes, out)
    except (RefusedError, OutputError) as error:
        return [str(error)]
    return []
