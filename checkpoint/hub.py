"""Where a model comes from: a local directory, or the hub through huggingface_hub."""

import os
import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import CorruptError, OutputError, RefusedError, explain
from gqa.checkpoint.filesystems import OTHER_FORMATS, is_side_file, opened, remote_tensors
from gqa.checkpoint.hub_errors import hub_reason, is_unreachable, quiet
from gqa.checkpoint.read import (
    INDEX,
    SINGLE,
    TORCH_INDEX,
    TORCH_SINGLE,
    WEIGHT_SUFFIXES,
    Checkpoint,
    read_checkpoint,
    read_json,
    weight_files,
)
from gqa.checkpoint.remote import Remote

_NO_SIDE_FILES = [*(f"*{suffix}" for suffix in WEIGHT_SUFFIXES), "*.index.json", *(f"{at}*" for at in OTHER_FORMATS)]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WANTED = (
    "give a repository with config.json and safetensors or .bin weights "
    "(GGUF and ONNX are made from one, an adapter is merged into one)"
)


def open_model(
    model: str,
    revision: str | None = None,
    headers_only: bool = False,
    check: Callable[[Checkpoint], Path | None] = lambda checkpoint: None,
) -> Checkpoint:
    """The checkpoint of a directory or a hub id, of which `headers_only` fetches config and headers.

    `check` is called with what the headers say before any weights are fetched. It may refuse, or name a directory that
    they are fetched to when they are read (`Checkpoint.remote`); else those of a hub id are fetched into its cache.
    Raises RefusedError for whatever keeps the model from being fetched, OSError where this machine is the cause.
    """
    if os.path.lexists(model):
        if revision is not None:
            raise RefusedError(f"--revision is for hub ids; {model} is a local path")
        return read_checkpoint(Path(model))
    if not _HUB_ID.fullmatch(model):
        raise RefusedError(f"there is no directory {model}, and it is no hub id (owner/name); give one of them")
    if revision is not None and (not revision.strip() or ".." in revision):
        raise RefusedError(f"--revision {revision!r} is not the name of a branch, a tag or a commit")
    with quiet("huggingface_hub"), _refusing(f"there is no directory {model}, and ", model, revision):
        return _from_hub(model, revision, headers_only, check)


def beside(model: str, suffix: str) -> Path:
    """The name of a model with a suffix: beside a local model, in the working directory for a hub id."""
    path = Path(model)
    if path.is_dir():
        path = path.resolve() if path.name in ("", "..") else path
        return path.with_name(path.name + suffix)
    return Path(model.split("/")[-1] + suffix)


@contextmanager
def _refusing(before: str, repo: str, revision: str | None = None) -> Iterator[None]:
    """What stands between here and a repository as a RefusedError, whose line begins with `before`."""
    try:
        yield
    except (RefusedError, OutputError):
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds
        if isinstance(error, OSError) and error.errno is not None:  # of this machine: no space, no permission
            raise
        raise RefusedError(f"{before}{_reason(error, repo, revision)}") from None


def _reason(error: BaseException, repo: str, revision: str | None = None) -> str:
    return hub_reason(error, repo, revision) or f"{repo} at the hub: {type(error).__name__}: {explain(error)}"


def _from_hub(
    model: str, revision: str | None, headers_only: bool, check: Callable[[Checkpoint], Path | None]
) -> Checkpoint:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download, try_to_load_from_cache

    try:
        info = HfApi().model_info(model, revision=revision)
    except Exception as error:
        if is_unreachable(error) and (cached := _cached(model, revision)):
            return cached
        raise
    present = {sibling.rfilename for sibling in info.siblings or []}
    if "config.json" not in present:
        raise RefusedError(f"{model} has no config.json; {_WANTED}")

    def read(name: str) -> dict[str, Any]:
        return read_json(Path(hf_hub_download(model, name, revision=info.sha)).parent, name)

    files, index = _weights_of(model, present, read)
    if headers_only and files[0].endswith(".bin"):
        raise RefusedError(f"{model} has no safetensors headers; without --dry-run its .bin weights are fetched")
    absent = {file for file in files if not isinstance(try_to_load_from_cache(model, file, revision=info.sha), str)}
    if files[0].endswith(".safetensors") and (headers_only or absent):
        headers = _headers(model, str(info.sha), read("config.json"), files, index, absent)
        if headers_only:
            return headers
        if place := check(headers):
            return opened(headers, place, present)
    needed = files + [name for name in present if is_side_file(name)]
    if index is not None:
        needed.append(INDEX if files[0].endswith(".safetensors") else TORCH_INDEX)
    # By the name that was asked for, so that the cache knows it offline; the commit is that of the headers.
    directory = Path(snapshot_download(model, revision=revision, allow_patterns=[escape(name) for name in needed]))
    if directory.name != info.sha:
        raise RefusedError(f"{model} was changed at the hub while it was fetched; run the command again")
    return read_checkpoint(directory, info.sha, model)


def _weights_of(
    model: str, present: AbstractSet[str], read: Callable[[str], dict[str, Any]]
) -> tuple[list[str], dict[str, Any] | None]:
    files, index = weight_files(present, read)
    if not files:
        raise RefusedError(f"{model} has neither {SINGLE} nor {TORCH_SINGLE} (nor their index); {_WANTED}")
    if missing := set(files) - present:
        raise CorruptError(f"the index of {model} names {min(missing)}, which is not there; tell its owner")
    return files, index


def _headers(
    model: str,
    commit: str,
    config: dict[str, Any],
    files: list[str],
    index: dict[str, Any] | None,
    absent: AbstractSet[str],
) -> Checkpoint:
    """What the headers of files say, and where these come from; those that are `absent` are not in the cache."""
    from huggingface_hub import HfFileSystem, constants, hf_hub_download

    def get(file: str, to: Path) -> None:
        with _refusing("", model):
            hf_hub_download(model, file, revision=commit, local_dir=to)

    fs = HfFileSystem(skip_instance_cache=True)
    tensors = remote_tensors(files, index, fs, lambda file: f"{model}/{file}", revision=commit)
    headers = Checkpoint(model.split("/")[-1], None, config, tensors, tuple(files), revision=commit, hub_id=model)
    missing = sum(size for file, size in headers.file_sizes.items() if file in absent)
    remote = Remote(f"{model} {commit}", get, Path(constants.HF_HUB_CACHE), missing)
    return replace(headers, remote=remote)


def _cached(model: str, revision: str | None) -> Checkpoint | None:
    """The model as the cache holds it; None when anything of it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how: Any = {"ignore_patterns": _NO_SIDE_FILES, "local_files_only": True}
    with suppress(LocalEntryNotFoundError):
        directory = Path(snapshot_download(model, revision=revision, **how))
        present = {path.name for path in directory.iterdir()}
        files, _ = weight_files(present, partial(read_json, directory))
        if files and present.issuperset([*files, "config.json"]):
            return read_checkpoint(directory, directory.name, model)
    return None
