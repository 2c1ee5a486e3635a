"""Where a model comes from: a local directory, or the hub through huggingface_hub."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from gqa.checkpoint.errors import CorruptError, RefusedError, explain
from gqa.checkpoint.headers import MAX_HEADER_BYTES, TensorSpec, read_header
from gqa.checkpoint.hub_errors import hub_reason, is_unreachable, quiet
from gqa.checkpoint.read import (
    SINGLE,
    TORCH_SINGLE,
    WEIGHT_SUFFIXES,
    Checkpoint,
    cached_revision,
    holds_weights,
    read_checkpoint,
    read_json,
    weight_files,
)

# Weights are fetched by name; the same model in other formats is not fetched at all.
OTHER_FORMATS = ("original/", "onnx/", "openvino/")
FIRST_BYTES = 2**16  # of a shard at the hub: nearly always its whole header
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
    check: Callable[[Checkpoint], object] | None = None,
) -> Checkpoint:
    """The checkpoint of a directory or a hub id, whose files are fetched into the hub's cache.

    headers_only: Of a hub id's weights fetch only the headers: everything is described, and no tensor can be read.
    check: Called with this description before weights are fetched, and may refuse them.
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
    try:
        with quiet("huggingface_hub"):
            return _from_hub(model, revision, headers_only, check)
    except RefusedError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds
        if isinstance(error, OSError) and error.errno is not None:  # of this machine: no space, no permission
            raise
        reason = hub_reason(error, model, revision) or f"{model} at the hub: {type(error).__name__}: {explain(error)}"
        raise RefusedError(f"there is no directory {model}, and {reason}") from error


def beside(model: str, suffix: str) -> Path:
    """The name of a model with a suffix: beside a local model, in the working directory for a hub id, also by the path
    that it has in the hub's cache.
    """
    path, (hub_id, _) = Path(model), cached_revision(Path(model))
    if path.is_dir() and not hub_id:
        path = path.resolve() if path.name in ("", "..") else path
        return path.with_name(path.name + suffix)
    return Path((hub_id or model).split("/")[-1] + suffix)


def _from_hub(
    model: str, revision: str | None, headers_only: bool, check: Callable[[Checkpoint], object] | None
) -> Checkpoint:
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(model, revision=revision)
    except Exception as error:
        if is_unreachable(error) and (cached := _cached(model, revision)):
            return cached
        raise
    present = {sibling.rfilename for sibling in info.siblings or []}
    if "config.json" not in present:
        raise RefusedError(f"{model} has no config.json; {_WANTED}")

    def fetch(names: Iterable[str]) -> Path:
        # By the name that was asked for, so that the cache knows it offline.
        patterns = [escape(name) for name in names]
        directory = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
        if directory.name != info.sha:
            raise RefusedError(f"{model} was changed at the hub while it was fetched; run the command again")
        return directory

    files, _ = weight_files(present, lambda index: read_json(fetch([index]), index))
    if not files:
        raise RefusedError(f"{model} has neither {SINGLE} nor {TORCH_SINGLE} (nor their index); {_WANTED}")
    if missing := set(files) - present:
        raise CorruptError(f"the index of {model} names {min(missing)}, which is not there; tell its owner")
    pickled = files[0].endswith(".bin")
    if headers_only and pickled:
        raise RefusedError(f"{model} has no safetensors headers; without --dry-run its .bin weights are fetched")
    directory = fetch(filter(is_side_file, present))
    describe = partial(read_checkpoint, directory, partial(_remote_table, model, info.sha), present)
    if headers_only:
        return describe()
    if check and not pickled and not all((directory / file).exists() for file in files):
        check(describe())
    return read_checkpoint(fetch(files))


def is_side_file(name: str) -> bool:
    """Whether a file of a repository is fetched beside the weights."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not (hidden or name.startswith(OTHER_FORMATS) or holds_weights(name))


def _remote_table(model: str, commit: str, file: str) -> list[TensorSpec]:
    """The tensors of a file at the hub, as strictly read as those of a local one: a file of its size, in which nothing
    follows the header.

    HfApi.parse_safetensors_file_metadata would not do: it gives no size of the file and keeps the last of two tensors
    of one name.
    """
    from huggingface_hub import HfFileSystem

    fs = HfFileSystem(skip_instance_cache=True)
    with (
        TemporaryDirectory() as place,
        fs.open(f"{model}/{file}", revision=commit, block_size=FIRST_BYTES) as stream,
    ):
        length = stream.read(8)
        copy = Path(place) / "header.safetensors"
        copy.write_bytes(length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
        os.truncate(copy, stream.size)
        return read_header(copy, file)


def _cached(model: str, revision: str | None) -> Checkpoint | None:
    """The model as the cache holds it; None when anything of it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        directory = Path(
            snapshot_download(model, revision=revision, ignore_patterns=_NO_SIDE_FILES, local_files_only=True)
        )
        present = {path.name for path in directory.iterdir()}
        files, _ = weight_files(present, partial(read_json, directory))
        if files and present.issuperset([*files, "config.json"]):
            return read_checkpoint(directory)
    return None
