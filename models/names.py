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
    return stored_tensors(
        model, {name: tensor for name, tensor in weights.items() if name not in unsaved}
    )


def follow_prefix(model: PreTrainedModel, names: Collection[str]) -> None:
    """Let `model` store its tensors without the prefix of the base model if the stored `names` have
    none, as in checkpoints of a base class, which transformers also loads into the class with a
    head.
    """
    prefix = f"{model.base_model_prefix}."
    if prefix == "." or any(name.startswith(prefix) for name in names):
        return
    if any(name.startswith(prefix) for name in model.state_dict()) and names:
        conversions = weight_conversions(model)
        if conversions is None:  # transformers has none before weights are loaded
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        set_weight_conversions(
            model, [PrefixChange(prefix_to_add=model.base_model_prefix), *conversions]
        )


def _meta_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict on `meta`, with the whole shapes of sharded tensors and without adapters."""
    return {
        name.replace(".base_layer.", "."): torch.empty(
            tensor.shape, dtype=tensor.dtype, device="meta"
        )
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


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


def sources(model: PreTrainedModel) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Stored name -> the shape, and the names in a state dict without adapters from which
    `saved_tensors` makes it: one if it is stored without conversion, else all of its layer that are
    converted.
    """
    weights = _meta_state(model)
    groups = defaultdict[str, list[str]](list)
    alone = set(parameter_names(model).values())
    for name in weights:
        groups[name if name in alone else re.sub(r"(\.\d+)\..*", r"\1", name)].append(name)
    return {
        stored: (tuple(tensor.shape), names)
        for names in groups.values()
        for stored, tensor in saved_tensors(model, {name: weights[name] for name in names}).items()
    }


class Loading:
    """How transformers loads the stored tensors `names` into `model`: named as in checkpoints of
    the type or of the class, with the prefix of the base model or without.

    sources: Parameter name -> the stored tensors that it is made of.
    whole: Stored name -> the parameter's name, for parameters that are stored without conversion.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        transforms = get_model_conversion_mapping(model)
        known = dict.fromkeys(model.state_dict(), True)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        self._model = model
        self._rules = (renamings, converters, model.base_model_prefix, known)
        self._tied = shared_names(model)
        self._patterns = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        self.sources = defaultdict[str, list[str]](list)
        self.whole = dict[str, str]()
        for name in sorted(names, key=dot_natural_key):
            into, pattern = rename_source_key(name, *self._rules)
            if into not in known:
                into, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
            if into in known:
                self.sources[into].append(name)
                if pattern is None:
                    self.whole[name] = into
                # Made of the same tensors
                for other in self._patterns[pattern].target_patterns if pattern else ():
                    first = self._patterns[pattern].target_patterns[0]
                    self.sources.setdefault(into.replace(first, other), self.sources[into])

    def parts(self, name: str) -> list[str]:
        """The stored tensors that the parameter `name`, or a parameter tied to it, is made of."""
        tied = next(
            (
                self.sources[alias]
                for alias in (name, *self._tied.get(name, ()))
                if alias in self.sources
            ),
            None,
        )
        return tied or list(
            stored_tensors(self._model, {name: self._model.get_parameter(name).to("meta")})
        )

    def assemble(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Make the parameter `name` from tensors by their stored names.

        Raises KeyError if they are not its parts.
        """
        first = next(iter(parts))
        if first in self.whole:
            return parts[first]
        converter = None
        into = name
        for part in sorted(parts, key=dot_natural_key):
            into, pattern = rename_source_key(part, *self._rules)
            converter = converter or deepcopy(self._patterns[pattern])
            converter.add_tensor(into, part, pattern, parts[part])
        if converter is None:
            raise KeyError(name)
        tensor: Tensor | list[Tensor] = converter.convert(
            into, model=self._model, config=self._model.config
        )[name]
        return tensor[0] if isinstance(tensor, list) else tensor


def shared_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Each name of a parameter -> all names of the parameter, in the model's order."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: same for same in names.values() for name in same}
