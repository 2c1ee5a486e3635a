"""Frozen weights of linear layers in training: in bfloat16, and once for model and teacher.

Autocast rounds the weight of a linear layer to bfloat16 whenever the layer is called. A weight that
trains stays in float32 nevertheless, because its steps are smaller than the gaps between numbers of
bfloat16. A frozen weight can be rounded once and for all: every result is the same, bit for bit,
the weight takes half of the memory, and no rounded copy of it waits for the backward pass.

Conversion changes attention alone, so elsewhere a teacher that is the base model has the same
weights. They are stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint
from gqa.models.names import shared_names
from gqa.uptrain.adapters import is_of_mamba
from gqa.uptrain.stored_weights import parameters_of_affected, stored_dtypes


def frozen_linear_layers(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, nn.Linear]:
    """The linear layers whose weights may be rounded to bfloat16 under autocast, by name.

    Left out are weights that other code reads too: those tied to an embedding, which autocast does
    not round, and output projections of Mamba mixers. So are weights whose float32 numbers become
    part of the result: those with adapters, and those that are stored in one tensor with others
    that train; unless they are stored in bfloat16, where rounding changes nothing.

    Args:
        model: The model, with `requires_grad` set. Subclasses of nn.Linear, like routers, may
            compute in float32: they do not count.
        checkpoint: Its checkpoint.
    """
    tied = shared_names(model)
    dtypes = stored_dtypes(model, checkpoint)
    affected = parameters_of_affected(model)

    layers = {}
    for path, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight.requires_grad:
            continue
        name = f"{path}.weight"
        if len(tied[name]) > 1 or is_of_mamba(model, path):
            continue
        plain_name = name.replace(".base_layer.", ".")
        if plain_name in affected and dtypes.get(plain_name) != "BF16":
            continue
        layers[path] = module
    return layers


def round_frozen_weights(
    model: PreTrainedModel, checkpoint: Checkpoint, teacher: PreTrainedModel | None
) -> None:
    """Round the frozen weights of linear layers to bfloat16, and let the teacher use those that are
    the same in it. Both models must run under bfloat16 autocast only.
    """
    layers = frozen_linear_layers(model, checkpoint)
    for layer in layers.values():
        rounded = layer.weight.to(torch.bfloat16)
        layer.weight = nn.Parameter(rounded, requires_grad=False)

    if teacher is None:
        return
    for layer, other in layers_of_both(layers, teacher):
        if torch.equal(other.weight.to(torch.bfloat16), layer.weight):
            other.weight = layer.weight


def layers_of_both(
    layers: Mapping[str, nn.Linear], teacher: PreTrainedModel
) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """The layers that the teacher has under the same name and in the same shape, with those of the
    teacher.
    """
    of_teacher = dict(teacher.named_modules())
    for path, layer in layers.items():
        other = of_teacher.get(path)
        if type(other) is nn.Linear and other.weight.shape == layer.weight.shape:
            yield layer, other
