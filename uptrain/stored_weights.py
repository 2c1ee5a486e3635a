"""The stored tensors that training changes, and the weights of a model as they would be stored.

A *parameter* is of the model in memory; a *stored tensor* is of a checkpoint file, made of one
parameter or of several. Training *affects* the stored tensors that are made of at least one
parameter that trains; an affected tensor has *changed* if it differs in a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.models.names import parameters_of_stored
from gqa.uptrain.adapters import adapter_parts, merge_adapter
from gqa.uptrain.sharding import local_shard


def affected_tensors(model: PreTrainedModel) -> dict[str, list[str]]:
    """The stored tensors that training may change -> the names in a state dict without adapters
    from which each is made. They are those that are not made of frozen parameters alone.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = set[str]()
    for name, base_and_adapter in adapter_parts(parameters).items():
        if not any(parameters[part].requires_grad for part in base_and_adapter):
            frozen.add(name)

    return {
        stored: names
        for stored, (_, names) in parameters_of_stored(model).items()
        if not frozen.issuperset(names)
    }


def parameters_of_affected(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of which `affected_tensors` are made."""
    return set(chain.from_iterable(affected_tensors(model).values()))


def affected_bytes(model: PreTrainedModel, checkpoint: Checkpoint) -> int:
    """Bytes of the tensors of a checkpoint that training may change, as they are stored."""
    affected = affected_tensors(model)
    return sum(spec.nbytes for name, spec in checkpoint.tensors.items() if name in affected)


def weights_of_affected(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a state dict of which `affected_tensors` are made, adapters included."""
    affected = parameters_of_affected(model)
    wanted = set[str]()
    for name, base_and_adapter in adapter_parts(weights).items():
        if name in affected:
            wanted.update(base_and_adapter)
    return {name: tensor for name, tensor in weights.items() if name in wanted}


@contextmanager
def stored_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[None]:
    """Give the model, within the block, the weights that would be stored: adapters merged, and
    trained parameters rounded to the dtype of the checkpoint. The training weights wait in the
    host's memory.
    """
    # Before named_parameters: this reads the state dict, after which FSDP2 has other local tensors.
    dtypes = stored_dtypes(model, checkpoint)
    parameters = dict(model.named_parameters())
    training_weights: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name, base_and_adapter in adapter_parts(parameters).items():
                base, *adapter = base_and_adapter  # the names of W, and of A and B if there are any
                weight = parameters[base]
                dtype = dtypes.get(name, "F32")
                is_trained = weight.requires_grad or bool(adapter)
                # Nothing would be rounded
                if dtype == "F32" or not is_trained:
                    continue

                # The adapter is B A: with zeros in B it adds nothing to the merged weight
                ups = adapter[1:]  # B, or nothing
                for overwritten in (base, *ups):
                    shard = local_shard(parameters[overwritten])
                    training_weights[overwritten] = shard.to("cpu", copy=True)

                merged = merge_adapter(weight, *(parameters[part] for part in adapter))
                weight.copy_(stored_as(merged, dtype))
                for up in ups:
                    parameters[up].zero_()
        yield
    finally:
        with torch.no_grad():
            for name, tensor in training_weights.items():
                local_shard(parameters[name]).copy_(tensor)


def stored_dtypes(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, str]:
    """The dtype in which each parameter is stored, by the parameter's name."""
    dtypes: dict[str, str] = {}
    for stored, (_, names) in parameters_of_stored(model).items():
        spec = checkpoint.tensors.get(stored)
        if spec is not None:
            dtypes |= dict.fromkeys(names, spec.dtype)
    return dtypes
