"""Map the parameters of a class to the tensors of its checkpoints, which rename, split, join or tie
them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from gqa.core.compat import set_weight_conversions, unsaved_names, weight_conversions


def stored_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `model` as its checkpoint stores it.

    Tied weights under each of their names.
    """
    tensors: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return tensors


def saved_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same without tensors that the class computes and does not save (sinusoidal positions of
    Marian).
    """
    unsaved = unsaved_names(model)
    saved = {name: tensor for name, tensor in weights.items() if name not in unsaved}
    return stored_tensors(model, saved)


def follow_prefix(model: PreTrainedModel, names: Collection[str]) -> None:
    """Let `model` store its tensors without the prefix of the base model if the stored `names` have
    none, as in checkpoints of a base class, which transformers also loads into the class with a
    head.
    """
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in names):
        return
    model_has_prefix = any(name.startswith(prefix) for name in model.state_dict())
    if not model_has_prefix or not names:
        return

    conversions = weight_conversions(model)
    if conversions is None:  # transformers has none before weights are loaded
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
    prefix_change = PrefixChange(prefix_to_add=model.base_model_prefix)
    set_weight_conversions(model, [prefix_change, *conversions])


def _meta_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict on `meta`, with the whole shapes of sharded tensors and without adapters."""
    state = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        plain_name = name.replace(".base_layer.", ".")
        state[plain_name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return state


def parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Stored name -> the parameter's name, for parameters that are stored without conversion."""
    weights = _meta_state(model)
    by_identity = {id(tensor): name for name, tensor in weights.items()}
    stored = stored_tensors(model, weights)
    return {
        name: by_identity[id(tensor)]
        for name, tensor in stored.items()
        if id(tensor) in by_identity
    }


def parameters_of_stored(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """What `saved_tensors` makes each stored tensor of.

    Returns:
        Stored name -> its shape, and the names in a state dict without adapters from which it is
        made: one if it is stored without conversion, else all of its layer that are converted.
    """
    weights = _meta_state(model)
    unconverted = set(parameter_names(model).values())

    groups = defaultdict[str, list[str]](list)
    for name in weights:
        layer = re.sub(r"(\.\d+)\..*", r"\1", name)
        group = name if name in unconverted else layer
        groups[group].append(name)

    result = {}
    for names in groups.values():
        saved = saved_tensors(model, {name: weights[name] for name in names})
        for stored, tensor in saved.items():
            result[stored] = (tuple(tensor.shape), names)
    return result


class StoredNames:
    """How transformers loads stored tensors into a model: named as in checkpoints of the type or of
    the class, with the prefix of the base model or without.

    Used as `assemble(name, {stored: read(stored) for stored in stored_names_of(name)})`.

    Attributes:
        by_parameter: Parameter name -> the stored tensors that it is made of.
        unconverted: Stored name -> the parameter's name, where loading changes nothing but the
            name.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        self._model = model
        self._prefix = model.base_model_prefix
        self._parameters = dict.fromkeys(model.state_dict(), True)
        self._rules = (renamings, converters, self._prefix, self._parameters)
        self._tied = shared_names(model)
        self._patterns: dict[str, WeightConverter] = {}
        for converter in converters:
            self._patterns |= dict.fromkeys(converter.source_patterns, converter)

        self.by_parameter = defaultdict[str, list[str]](list)
        self.unconverted = dict[str, str]()
        for name in sorted(names, key=dot_natural_key):
            self._add(name)

    def _add(self, name: str) -> None:
        """Add a stored tensor to the attributes, if the model has a parameter for it."""
        into, pattern = rename_source_key(name, *self._rules)
        if into not in self._parameters:
            into, pattern = rename_source_key(name, [], [], self._prefix, self._parameters)
        if into not in self._parameters:
            return

        self.by_parameter[into].append(name)
        if pattern is None:
            self.unconverted[name] = into
            return

        # One conversion may make several parameters of the same tensors.
        targets = self._patterns[pattern].target_patterns
        for target in targets:
            parameter = into.replace(targets[0], target)
            self.by_parameter.setdefault(parameter, self.by_parameter[into])

    def stored_names_of(self, name: str) -> list[str]:
        """The stored tensors that the parameter `name`, or a parameter tied to it, is made of."""
        for alias in (name, *self._tied.get(name, ())):
            if self.by_parameter.get(alias):
                return self.by_parameter[alias]

        on_meta = self._model.get_parameter(name).to("meta")
        return list(stored_tensors(self._model, {name: on_meta}))

    def assemble(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Make the parameter `name` from tensors by their stored names.

        Raises KeyError if they are not those that it is made of.
        """
        in_order = sorted(parts, key=dot_natural_key)
        if not in_order:
            raise KeyError(name)
        if in_order[0] in self.unconverted:
            return parts[in_order[0]]

        _, pattern_of_all = rename_source_key(in_order[0], *self._rules)
        converter = deepcopy(self._patterns[pattern_of_all])
        into = name
        for part in in_order:
            into, pattern = rename_source_key(part, *self._rules)
            converter.add_tensor(into, part, pattern, parts[part])

        converted = converter.convert(into, model=self._model, config=self._model.config)
        tensor: Tensor | list[Tensor] = converted[name]
        return tensor[0] if isinstance(tensor, list) else tensor


def shared_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Each name of a parameter -> all names of the parameter, in the model's order."""
    by_identity: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity[id(parameter)].append(name)

    result: dict[str, list[str]] = {}
    for names in by_identity.values():
        result |= dict.fromkeys(names, names)
    return result
