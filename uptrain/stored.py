"""The weights that a checkpoint would store, in the place of those that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.names import sources
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.uptrain.lora import adapted, parts


@contextmanager
def stored_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[None]:
    """Within the block the model has the weights that would be written: adapters merged, and everything that trains
    rounded to the dtype in which the checkpoint stores it. What is replaced is in the memory of the host meanwhile.
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
            for name, (own, *adapter) in parts(parameters).items():
                weight, dtype = parameters[own], dtypes.get(name, "F32")
                if dtype == "F32" or not (weight.requires_grad or adapter):
                    continue
                if not adapter:
                    replace(weight, stored_as(weight, dtype))
                    continue
                down, up = (parameters[each] for each in adapter)
                replace(weight, stored_as(adapted(weight, down, up), dtype))
                replace(up, torch.zeros_like(up))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in replaced:
                _local(parameter).copy_(before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
