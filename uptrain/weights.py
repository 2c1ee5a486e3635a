"""The weights of a model in training: in shards (FSDP2: each process reads its rows of every
weight, and none holds a whole model), and as they would be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.core.compat import layer_classes
from gqa.core.devices import ranks
from gqa.core.errors import OutputError
from gqa.models.loading import read_shards
from gqa.models.names import parameters_of_stored
from gqa.uptrain.training_model import TrainingModel

LORA_ALPHA = 32  # adapters (LoRA, arXiv 2106.09685) are scaled by LORA_ALPHA / rank
# Parts of the names in a state dict of an adapted weight W, and of A and B of its adapter
_BASE = ".base_layer."
_DOWN = ".lora_A.default.weight"
_UP = ".lora_B.default.weight"


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


def trained_tensors(model: PreTrainedModel) -> dict[str, list[str]]:
    """The stored tensors that training may change -> the names in a state dict without adapters
    from which each is made. They are those that are not made of frozen parameters alone.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = set[str]()
    for name, parts in adapter_parts(parameters).items():
        if not any(parameters[part].requires_grad for part in parts):
            frozen.add(name)

    return {
        stored: names
        for stored, (_, names) in parameters_of_stored(model).items()
        if not frozen.issuperset(names)
    }


def exported_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of which `trained_tensors` are made."""
    return set(chain.from_iterable(trained_tensors(model).values()))


def trained_bytes(model: PreTrainedModel, checkpoint: Checkpoint) -> int:
    """Bytes of the tensors of a checkpoint that training may change, as they are stored."""
    trained = trained_tensors(model)
    return sum(spec.nbytes for name, spec in checkpoint.tensors.items() if name in trained)


def exported_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a state dict of which `trained_tensors` are made, adapters included."""
    exported = exported_names(model)
    parts = set[str]()
    for name, parts_of_name in adapter_parts(weights).items():
        if name in exported:
            parts.update(parts_of_name)
    return {name: tensor for name, tensor in weights.items() if name in parts}


def is_of_mamba(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer is the output projection of a Mamba mixer."""
    parent = name.rpartition(".")[0]
    return name.endswith("out_proj") and hasattr(model.get_submodule(parent), "conv1d")


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


@contextmanager
def stored_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[None]:
    """Give the model, within the block, the weights that would be stored: adapters merged, and
    trained parameters rounded to the dtype of the checkpoint. The training weights wait in the
    host's memory.
    """
    # First: reading the state dict has FSDP2 replace the local tensors of its parameters.
    dtypes = stored_dtypes(model, checkpoint)
    parameters = dict(model.named_parameters())
    training_weights: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for name, parts in adapter_parts(parameters).items():
                base, *adapter = parts
                weight = parameters[base]
                dtype = dtypes.get(name, "F32")
                is_trained = weight.requires_grad or bool(adapter)
                # Nothing would be rounded
                if dtype == "F32" or not is_trained:
                    continue

                # The adapter is B A: with zeros in B it adds nothing to the merged weight
                changed = [base, *adapter[1:]]
                for part in changed:
                    training_weights[part] = local_shard(parameters[part]).to("cpu", copy=True)
                merged = merge_adapter(weight, *(parameters[part] for part in adapter))
                weight.copy_(stored_as(merged, dtype))
                for up in adapter[1:]:
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


def adapter_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Plain name of each weight -> the names in a state dict that make it: W, or W, A and B."""
    parts = {}
    for name in names:
        path, base, tail = name.rpartition(_BASE)
        if base and tail == "weight":
            parts[f"{path}.weight"] = [name, path + _DOWN, path + _UP]
        elif base:  # a bias, to which no adapter adds
            parts[f"{path}.{tail}"] = [name]
        elif ".lora_" not in name:
            parts[name] = [name]
    return parts


def merge_adapter(weight: Tensor, *adapter: Tensor) -> Tensor:
    """W + LORA_ALPHA / r x B A: (out, in) weight; the adapter, if there is one: (r, in) A, (out, r)
    B.
    """
    if not adapter:
        return weight
    down, up = adapter
    return weight + (LORA_ALPHA / len(down)) * (up @ down)


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of a state dict into its weights, which get their plain names.

    Raises OutputError.
    """
    plain = {}
    for name, parts in adapter_parts(weights).items():
        plain[name] = merge_adapter(*(weights[part] for part in parts))
        has_adapter = len(parts) > 1
        if has_adapter and not bool(plain[name].isfinite().all()):
            raise OutputError(
                f"the adapter of {name.rpartition('.')[0]} is not finite, so nothing was written; "
                "repeat the command with --overwrite and a lower --learning-rate"
            )
    return plain
