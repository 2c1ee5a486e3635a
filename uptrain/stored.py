"""Evaluate a model with the weights that would be stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.names import sources
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.uptrain.lora import adapter_parts, merge_adapter


@contextmanager
def stored_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[None]:
    """Give the model, within the block, the weights that would be stored: adapters merged, and trained parameters
    rounded to the dtype of the checkpoint. The training weights wait in the host's memory.
    """
    specs = ((checkpoint.tensors.get(stored), names) for stored, (_, names) in sources(model).items())
    dtypes = {name: spec.dtype for spec, names in specs if spec for name in names}
    parameters = dict(model.named_parameters())
    replaced: list[tuple[Tensor, Tensor]] = []

    def replace(parameter: Tensor, value: Tensor) -> None:
        replaced.append((parameter, _local(parameter).to("cpu", copy=True)))
        parameter.copy_(value)

    try:
        with torch.no_grad():
            for name, (base, *adapter) in adapter_parts(parameters).items():
                weight, dtype = parameters[base], dtypes.get(name, "F32")
                if dtype == "F32" or not (weight.requires_grad or adapter):
                    continue
                if not adapter:
                    replace(weight, stored_as(weight, dtype))
                    continue
                down, up = (parameters[part] for part in adapter)
                replace(weight, stored_as(merge_adapter(weight, down, up), dtype))
                replace(up, torch.zeros_like(up))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in replaced:
                _local(parameter).copy_(before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
