"""Where a model comes from: a local directory, or the hub through huggingface_hub."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.files import SINGLE, TORCH_SINGLE, side_files, weight_files
from gqa.checkpoint.headers import MAX_HEADER_BYTES, TensorSpec, read_header
from gqa.checkpoint.hub_errors import hub_reason, is_unreachable, quiet
from gqa.checkpoint.read import Checkpoint, cached_revision, read_checkpoint, read_json

FIRST_BYTES = 2**16  # of a shard at the hub: nearly always its whole header
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WANTED = (
    "give a repository with config.json and safetensors or .bin weights "
    "(GGUF and ONNX are made from one, an adapter is merged into one)"
)


def open_model(
    model: str,
    revision: str | None = None,
    headers_only: bool = False,
    or_weights: bool = False,
) -> Checkpoint:
    """The checkpoint of a directory or a hub id, whose files are fetched into the hub's cache.

    headers_only: Of a hub id's weights fetch only the headers: no tensor can be read before `fetch_weights`.
    or_weights: Fetch weights that have no headers (.bin), which are refused else.
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
    with _hub_errors(model, revision):
        return _from_hub(model, revision, headers_only, or_weights)


def fetch_weights(checkpoint: Checkpoint) -> None:
    """Fetch the weights of a hub id that was opened by its headers. Raises what `open_model` raises."""
    if checkpoint.hub_id is None or all((checkpoint.directory / file).exists() for file in checkpoint.files):
        return
    from huggingface_hub import snapshot_download

    with _hub_errors(checkpoint.hub_id, checkpoint.revision):
        patterns = [*map(escape, checkpoint.files)]
        snapshot_download(checkpoint.hub_id, revision=checkpoint.revision, allow_patterns=patterns)


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub and of its clients as a RefusedError."""
    try:
        with quiet("huggingface_hub"):
            yield
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


def _from_hub(model: str, revision: str | None, headers_only: bool, or_weights: bool) -> Checkpoint:
    repository = _Repository(model, revision)
    names = repository.names
    if "config.json" not in names:
        raise repository.refusal(f"has no config.json; {_WANTED}")
    files, _ = weight_files(repository.read("config.json"), names, repository.read)
    if not files:
        raise repository.refusal(f"has neither {SINGLE} nor {TORCH_SINGLE} (nor their index); {_WANTED}")
    if missing := set(files) - names:
        raise repository.refusal(f"has an index that names {min(missing)}, which is not there; tell its owner")
    modules = repository.fetch("modules.json") / "modules.json" if "modules.json" in names else None
    side, _ = side_files(names.difference(files), modules.read_bytes() if modules else b"[]")
    directory = repository.fetch("config.json", *side)
    if headers_only and not all((directory / file).exists() for file in files):
        if not files[0].endswith(".bin"):
            return read_checkpoint(directory, partial(_remote_table, model, directory.name), names)
        if not or_weights:
            raise RefusedError(f"{model} has no safetensors headers; without --dry-run its .bin weights are fetched")
    return read_checkpoint(repository.fetch(*files))


class _Repository:
    """A model repository, whose files are fetched into the hub's cache; where the hub cannot be reached, what the cache
    holds of it.
    """

    def __init__(self, model: str, revision: str | None) -> None:
        from huggingface_hub import HfApi

        self._model, self._revision = model, revision
        self._unreachable: Exception | None = None
        self._commit: str | None = None
        self.names: set[str] = set()
        try:
            info = HfApi().model_info(model, revision=revision)
            self._commit = info.sha
            self.names = {sibling.rfilename for sibling in info.siblings or []}
        except Exception as error:
            if not is_unreachable(error):
                raise
            self._unreachable = error
            with suppress(FileNotFoundError):  # the revision is not in the cache
                directory = self.fetch("config.json")
                files = (path for path in directory.rglob("*") if path.is_file())
                self.names = {path.relative_to(directory).as_posix() for path in files}

    def fetch(self, *names: str) -> Path:
        """The directory in the cache, with these files."""
        from huggingface_hub import snapshot_download

        patterns, cached = [*map(escape, names)], self._unreachable is not None
        # By the revision that was asked for, not the commit: so the cache knows it offline.
        directory = snapshot_download(
            self._model, revision=self._revision, allow_patterns=patterns, local_files_only=cached
        )
        if self._commit and Path(directory).name != self._commit:
            raise RefusedError(f"{self._model} was changed at the hub while it was fetched; run the command again")
        return Path(directory)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file."""
        return read_json(self.fetch(name), name)

    def refusal(self, text: str) -> Exception:
        """What is wrong with the repository; that the hub cannot be reached where it is not known as a whole."""
        return self._unreachable or RefusedError(f"{self._model} {text}")


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
