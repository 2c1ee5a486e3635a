"""The weights of a model in training: in shards (FSDP2: each process reads its rows of every weight, and none holds a
whole model), and as they would be stored.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.compat import add_model, layer_classes
from gqa.checkpoint.loading import ranks, read_shards
from gqa.checkpoint.names import sources
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.uptrain.lora import adapter_parts, merge_adapter
from gqa.uptrain.training_model import TrainingModel


def shard_model(training: TrainingModel, checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Shard an empty model as accelerate does, and read the checkpoint into it. Raises the errors of `read_shards`."""
    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # it broadcasts whole weights from the first process
    fsdp2_prepare_model(accelerator, training)
    offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    _read(training.model, checkpoint, "cpu" if offloaded else str(accelerator.device))


def shard_teacher(teacher: PreTrainedModel, checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Shard a frozen model, which is gathered a layer at a time, and read the checkpoint into it."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    classes = layer_classes(teacher)
    for module in [module for module in teacher.modules() if type(module).__name__ in classes]:
        fully_shard(module, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    _read(teacher, checkpoint, str(accelerator.device))


def _read(model: PreTrainedModel, checkpoint: Checkpoint, device: str) -> None:
    files = sorted({str(checkpoint.path(spec.file)) for spec in checkpoint.tensors.values()})
    read_shards(model, str(checkpoint.directory), files, device)


def prepare_model(accelerator: Accelerator, training: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare`, which with FSDP2 maps parameters to shards by address; a shard without rows has none. Our
    optimiser already has the shards, so only the rest is done here.
    """
    if not accelerator.is_fsdp2:
        return accelerator.prepare(training, optimizer)  # type: ignore[no-any-return]
    add_model(accelerator, training)
    return training, accelerator.prepare_optimizer(optimizer)


@contextmanager
def gather_on_lookup(weights: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Rank 0 all-gathers a DTensor on lookup; other ranks serve these gathers until it is done (or failed), and enter
    the block then.
    """
    main = ranks().is_main_process
    while not main and (name := broadcast_object_list([""])[0]):
        _whole(weights[name])
    try:
        yield _GatherOnLookup(weights)
    finally:
        if main:
            broadcast_object_list([""])
        ranks().wait_for_everyone()


class _GatherOnLookup(UserDict[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.data[name]
        if isinstance(tensor, DTensor):
            broadcast_object_list([name])
            tensor = _whole(tensor).cpu()
        return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This process' part of a DTensor, or a whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Any) -> Tensor:
    """Gather a DTensor, on the device of the mesh: offloaded shards cannot be gathered in the host's memory."""
    full: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return full


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
        replaced.append((parameter, local_shard(parameter).to("cpu", copy=True)))
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
                local_shard(parameter).copy_(before)
