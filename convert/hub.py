"""Where a model comes from: a local directory, or the Hugging Face hub through huggingface_hub and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gqa.convert.checkpoint import (
    INDEX,
    SINGLE,
    Checkpoint,
    check_index,
    index_files,
    merge_tables,
    read_checkpoint,
    read_json,
)
from gqa.convert.errors import RefusedError
from gqa.convert.safetensors_header import TensorSpec, byte_size

_OTHER_FORMATS = ["*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.ot", "*.pth", "*.pt", "*.tflite", "original/*", "onnx/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def open_model(model: str, revision: str | None = None, headers_only: bool = False) -> Checkpoint:
    """The checkpoint of a directory or hub id. `headers_only` fetches config and headers of a hub id, no weights."""
    path = Path(model)
    if path.exists():
        if revision is not None:
            raise RefusedError(f"--revision is for hub ids; {model} is a local path")
        return read_checkpoint(path)
    if not _HUB_ID.fullmatch(model):
        raise RefusedError(f"there is no directory {model}, and it is no hub id (owner/name)")
    try:
        return _remote_headers(model, revision) if headers_only else _download(model, revision)
    except RefusedError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds; all mean the same to a user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RefusedError(
            f"there is no directory {model}, and fetching it from the hub failed ({type(error).__name__}: {reason})"
        ) from None


def _download(model: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(model, revision=revision, ignore_patterns=[*_OTHER_FORMATS, "*.bin"]))
    if not list(directory.glob("*.safetensors")):  # an old repository: weights only as .bin
        directory = Path(snapshot_download(model, revision=revision, ignore_patterns=_OTHER_FORMATS))
    return read_checkpoint(directory, model.split("/")[-1], revision=directory.name, hub_id=model)


def _remote_headers(model: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import HfApi, constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:  # headers can only come from what is in the cache already
        return _download(model, revision)
    api = HfApi()
    info = api.model_info(model, revision=revision)
    present = {sibling.rfilename for sibling in info.siblings or []}
    directory = Path(hf_hub_download(model, "config.json", revision=info.sha)).parent
    index: dict[str, Any] | None = None
    if INDEX in present:
        hf_hub_download(model, INDEX, revision=info.sha)
        index = read_json(directory, INDEX)
    elif SINGLE not in present:
        raise RefusedError(f"{model} has no safetensors weights; without --dry-run its .bin files are fetched")
    files = index_files(index, INDEX, ".safetensors") if index else [SINGLE]
    tables = {file: _remote_table(api, model, file, info.sha) for file in files}
    tensors = merge_tables(tables)
    if index is not None:
        check_index(index, tensors)
    config = read_json(directory, "config.json")
    name = model.split("/")[-1]
    return Checkpoint(name, None, config, tensors, tuple(files), revision=info.sha, hub_id=model)


def _remote_table(api: Any, model: str, file: str, revision: str | None) -> list[TensorSpec]:
    header = api.parse_safetensors_file_metadata(model, file, revision=revision)
    table = []
    for name, tensor in header.tensors.items():
        shape = tuple(tensor.shape)
        begin, end = tensor.data_offsets
        if end - begin != byte_size(tensor.dtype, shape):
            raise RefusedError(
                f"{file}: {name} has {end - begin} bytes where {tensor.dtype} {list(shape)} needs others"
            )
        table.append(TensorSpec(name, tensor.dtype, shape, file, begin, end))
    return sorted(table, key=lambda spec: spec.begin)


def push(directory: Path, repo: str, private: bool = True) -> str:
    """Upload a finished checkpoint; the repository is made if it is not there. Returns its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Converted with gqa-convert")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(f"{directory} is complete, but pushing it to {repo} failed: {reason}") from None
    return str(address)
