"""A class' parameters and the tensors that its checkpoints store: the same under other names, in other pieces, tied."""

import re
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def stored_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `model` as its checkpoint stores it; tied weights under each of their names."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return found


def saved_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same without what a class computes and does not save (sinusoidal positions of Marian)."""
    computed = model._keys_to_ignore_on_save or ()
    return stored_tensors(model, {name: tensor for name, tensor in weights.items() if name not in computed})


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of parameters that have several."""
    return {name for name, same in shared_names(model).items() if len(same) > 1}


def _hollow(model: PreTrainedModel) -> dict[str, Tensor]:
    """A state dict without a byte in it; of shards that of the whole, without adapters."""
    return {
        name.replace(".base_layer.", "."): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


def parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Stored name -> the parameter's name, of tensors that are stored as they are."""
    weights = _hollow(model)
    by_identity = {id(tensor): name for name, tensor in weights.items()}
    stored = stored_tensors(model, weights)
    return {name: by_identity[id(tensor)] for name, tensor in stored.items() if id(tensor) in by_identity}


def sources(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Stored name -> the shape, and the names in a state dict without adapters of which alone `saved_tensors` makes it:
    one where it is stored as it is, else all of a layer that are put together or taken apart.
    """
    weights, groups = _hollow(model), defaultdict[str, list[str]](list)
    alone = set(parameter_names(model).values())
    for name in weights:
        groups[name if name in alone else re.sub(r"(\.\d+)\..*", r"\1", name)].append(name)
    return {
        stored: (tuple(tensor.shape), names)
        for names in groups.values()
        for stored, tensor in saved_tensors(model, {name: weights[name] for name in names}).items()
    }


def stored_parts(model: PreTrainedModel, name: str) -> list[str]:
    """Names of the tensors in which a checkpoint stores one parameter: itself, its experts, what it is fused into."""
    return list(stored_tensors(model, {name: model.get_parameter(name).to("meta")}))


def assembled(model: PreTrainedModel, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The parameter `name` out of what is stored of it, by transformers' own rules of loading. Raises KeyError where
    they do not put just these tensors together.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    whole, into = None, name
    for part in sorted(parts, key=dot_natural_key):
        into, pattern = rename_source_key(part, renamings, converters)
        whole = whole or deepcopy(by_pattern[pattern])
        whole.add_tensor(into, part, pattern, parts[part])
    if whole is None:
        raise KeyError(name)
    found: Tensor | list[Tensor] = whole.convert(into, model=model, config=model.config)[name]
    return found[0] if isinstance(found, list) else found


def shared_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Every parameter's names, in the order in which the model has them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: same for same in names.values() for name in same}
