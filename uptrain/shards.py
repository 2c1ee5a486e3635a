"""Models under FSDP2: each process reads its rows of every weight; no process holds a whole model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.compat import add_model, layer_classes
from gqa.checkpoint.loading import ranks, read_shards
from gqa.checkpoint.processes import broadcast_str, wait_for_everyone
from gqa.checkpoint.read import Checkpoint
from gqa.uptrain.training_model import TrainingModel

_RESULT = "the result to be written"


def share_model(training: TrainingModel, checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Shard an empty model as accelerate does, and read the checkpoint into it. Raises the errors of `read_shards`."""
    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # it broadcasts whole weights from the first process
    fsdp2_prepare_model(accelerator, training)
    offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    _read(training.model, checkpoint, "cpu" if offloaded else str(accelerator.device))


def share_teacher(teacher: PreTrainedModel, checkpoint: Checkpoint, accelerator: Accelerator) -> None:
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
def gathered(weights: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """In the main process looking up a weight all-gathers it; the other processes serve these gathers until the main
    process leaves the block, also by an error, and enter the block then.
    """
    main = ranks().is_main_process
    while not main and (name := broadcast_str("", _RESULT)):
        _whole(weights[name])
    try:
        yield _Gathered(weights)
    finally:
        if main:
            broadcast_str("", _RESULT)
        wait_for_everyone(_RESULT)


class _Gathered(UserDict[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.data[name]
        if isinstance(tensor, DTensor):
            broadcast_str(name, _RESULT)
            tensor = _whole(tensor).cpu()
        return tensor


def _whole(tensor: Any) -> Tensor:
    """Gather a DTensor, on the device of the mesh: offloaded shards cannot be gathered in the host's memory."""
    full: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return full
