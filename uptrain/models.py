"""Load the model and the teacher of a run, and check that they fit."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint
from gqa.core.devices import emulates, free_memory
from gqa.core.errors import RefusedError, explain, listing
from gqa.models.loading import WEIGHTS_SHARE, load_model
from gqa.models.names import follow_prefix, parameters_of_stored, shared_names
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.scope import freeze_parameters
from gqa.uptrain.sharding import shard_teacher

_FLOAT32 = 4  # bytes


def loading_device(
    checkpoint: Checkpoint, teacher: Checkpoint | None, accelerator: Accelerator
) -> str:
    """Where model and teacher are loaded before their frozen weights are rounded: on the device of
    the run if both fit there as they are loaded, else on the host.
    """
    device = accelerator.device
    free = free_memory(device)
    loaded = _FLOAT32 * checkpoint.parameters
    if teacher is not None:
        loaded += teacher.nbytes
    if free is None or loaded < WEIGHTS_SHARE * free:
        return str(device)
    return "cpu"


def load_trained_model(
    options: UptrainOptions, checkpoint: Checkpoint, accelerator: Accelerator, device: str
) -> PreTrainedModel:
    """The model in float32 on a device. Parameters that do not train are frozen.

    Under FSDP2 all parameters are empty: weights are read later, into shards. Raises RefusedError.
    """
    model = _load(checkpoint, options, accelerator, "float32", device)
    follow_prefix(model, checkpoint.tensors)

    # Adapters are initialized at random.
    set_seed(options.seed)
    freeze_parameters(model, checkpoint, options.scope, options.lora_rank)

    if options.gradient_checkpointing:
        # Its name before transformers 5.23 was gradient_checkpointing_enable
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise RefusedError(
                f"--gradient-checkpointing cannot be used ({explain(error)}); remove "
                "--gradient-checkpointing"
            ) from error
    return model


def load_teacher(
    options: UptrainOptions, checkpoint: Checkpoint, accelerator: Accelerator, device: str
) -> PreTrainedModel:
    """The teacher, the model of `checkpoint`, on a device, without gradients.

    It has its stored dtype, except on a CPU that emulates 16 bits, where float32 is faster: the
    example model trains on 1,300 instead of 600 tokens a second.

    Raises RefusedError.
    """
    dtype = "auto"
    if emulates(torch.bfloat16, str(accelerator.device)):
        dtype = "float32"
    teacher = _load(checkpoint, options, accelerator, dtype, device)
    teacher.requires_grad_(False)
    if accelerator.is_fsdp2:
        shard_teacher(teacher, checkpoint, accelerator)
    return teacher


def _load(
    checkpoint: Checkpoint,
    options: UptrainOptions,
    accelerator: Accelerator,
    dtype: str,
    device: str,
) -> PreTrainedModel:
    """The model of a checkpoint on a device; empty under FSDP2."""
    return load_model(
        str(checkpoint.directory),
        dtype=dtype,
        device=device,
        attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights=not accelerator.is_fsdp2,
    )


def check_exportable(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raise RefusedError if the model's class would store other tensors or shapes than its
    checkpoint has.
    """
    known = {name: spec.shape for name, spec in checkpoint.tensors.items()}
    stored = {name: shape for name, (shape, _) in parameters_of_stored(model).items()}
    tied = {
        name.replace(".base_layer.", ".")
        for name, same in shared_names(model).items()
        if len(same) > 1
    }

    different = []
    for name, shape in stored.items():
        has_other_shape = name in known and known[name] != shape
        # A checkpoint need not contain each name of a tied parameter.
        is_missing = name not in known and name not in tied
        if has_other_shape or is_missing:
            different.append(name)

    if different or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(different or stored)} differently from "
            f"{checkpoint.name}; load it with transformers, save it again and train that"
        )


def check_teacher(
    teacher_config: Any, teacher_tokenizer: Any, config: Any, tokenizer: Any, name: str
) -> None:
    """Raise RefusedError if the teacher of that name has a different tokenizer from the model, or
    lacks some of its tokens. `config` and `tokenizer` are the model's; no weights are needed.

    The number of rows of their embeddings may differ: some are padded to a multiple of 64, 128 or
    more.
    """
    vocabulary = tokenizer.get_vocab()
    if teacher_tokenizer.get_vocab() != vocabulary:
        raise RefusedError(
            f"the teacher {name} has a different tokenizer from the model, so their predictions "
            "cannot be compared; pass the checkpoint from which the model was converted"
        )

    needed = max(vocabulary.values()) + 1
    teacher_rows = teacher_config.get_text_config(decoder=True).vocab_size
    model_rows = config.get_text_config(decoder=True).vocab_size
    if teacher_rows != model_rows and teacher_rows < needed:
        raise RefusedError(
            f"the embedding of the teacher {name} has only {teacher_rows:,} of the {needed:,} "
            "tokens of the model's tokenizer; pass the checkpoint from which the model was "
            "converted"
        )
