"""Weights in shards (FSDP2): each process reads its rows of every weight, and none holds a whole
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint
from gqa.core.compat import layer_classes
from gqa.core.devices import ranks
from gqa.models.loading import read_shards
from gqa.uptrain.training_model import TrainingModel


def shard_model(training: TrainingModel, checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Shard an empty model as accelerate does, and read the checkpoint into it.

    Raises the errors of `read_shards`.
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # it broadcasts whole weights from the first process
    fsdp2_prepare_model(accelerator, training)

    device = str(accelerator.device)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        device = "cpu"
    _read(training.model, checkpoint, device)


def shard_teacher(
    teacher: PreTrainedModel, checkpoint: Checkpoint, accelerator: Accelerator
) -> None:
    """Shard a frozen model, to be gathered a layer at a time, and read the checkpoint into it."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    classes = layer_classes(teacher)
    # A list: sharding changes the modules that are walked through
    layers = [module for module in teacher.modules() if type(module).__name__ in classes]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    _read(teacher, checkpoint, str(accelerator.device))


def _read(model: PreTrainedModel, checkpoint: Checkpoint, device: str) -> None:
    """Read the shards of this process from the files of a checkpoint."""
    files = sorted({str(checkpoint.path(spec.file)) for spec in checkpoint.tensors.values()})
    read_shards(model, str(checkpoint.directory), files, device)


def prepare_model(accelerator: Accelerator, training: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare`, which with FSDP2 maps parameters to shards by address; a shard without
    rows has none. Our optimizer already has the shards, so only the rest is done here.
    """
    if not accelerator.is_fsdp2:
        return accelerator.prepare(training, optimizer)  # type: ignore[no-any-return]
    return training, accelerator.prepare_optimizer(optimizer)


def gather(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights in the host's memory of the first process, gathered one at a time; nothing in
    the others.
    """
    whole = {}
    for name, tensor in weights.items():
        full = tensor
        # On the device of the mesh: offloaded shards cannot be gathered on the host
        if isinstance(tensor, DTensor):
            full = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        if ranks().is_main_process:
            whole[name] = full.cpu()
    return whole


def local_shard(tensor: Tensor) -> Tensor:
    """This process' part of a DTensor, or a whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
