"""Checkpoints in PyTorch's `.bin` format."""

from pathlib import Path

import torch

from support.checkpoints import (
    Tensors,
    write_json,
)


def save_bin(model: Path, tensors: Tensors, shards: int) -> None:
    """torch.save files in place of the safetensors ones, sharded by layer."""
    for path in [*model.glob("*.safetensors"), *model.glob("*.json")]:
        if path.name != "config.json":
            path.unlink()
    if shards == 1:
        torch.save(tensors, model / "pytorch_model.bin")
        return
    files = {name: f"pytorch_model-0000{1 + ('v_proj' in name)}-of-00002.bin" for name in tensors}
    for file in set(files.values()):
        torch.save(
            {name: tensor for name, tensor in tensors.items() if files[name] == file}, model / file
        )
    write_json(model / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": files})
