"""A class' parameters and the tensors that its checkpoints store: the same under other names, in other pieces, tied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def stored_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `model` as its checkpoint stores it; tied weights under each of their names."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return found


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of parameters that have several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def stored_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of each stored tensor, without a byte of it."""
    weights = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in stored_tensors(model, weights).items()}


def parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Stored name -> the parameter's name, of tensors that are stored as they are."""
    weights = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    by_identity = {id(tensor): name for name, tensor in weights.items()}
    stored = stored_tensors(model, weights)
    return {name: by_identity[id(tensor)] for name, tensor in stored.items() if id(tensor) in by_identity}
