"""Open a model from a local directory or, through huggingface_hub (which --help does not import), from the hub."""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.files import MAX_HEADER_BYTES, TensorSpec, read_header, side_files, weight_files
from gqa.checkpoint.read import ADVICE, Checkpoint, cached_revision, read_checkpoint, read_json

FIRST_BYTES = 2**16  # read first from a shard at the hub: nearly always its whole header
# True if a caller from Python wants no progress bars.
without_bars: ContextVar[bool] = ContextVar("without_bars", default=False)


def open_model(model: str, revision: str | None = None, headers_only: bool = False) -> Checkpoint:
    """The checkpoint of a directory or a hub id, whose files are fetched into the hub's cache.

    headers_only: Fetch only the headers of a hub id's weights, unless they have none (.bin); call `fetch_weights`
        before reading tensors.
    Raises RefusedError if the model cannot be fetched, OSError if this machine is the cause.
    """
    if os.path.lexists(model):
        if revision is not None:
            raise RefusedError(f"--revision is for hub ids; {model} is a local path")
        return read_checkpoint(Path(model))
    with _hub_errors(model):
        return _from_hub(model, revision, headers_only)


def fetch_weights(checkpoint: Checkpoint) -> None:
    """Fetch the weights of a hub id that was opened with `headers_only`. Raises what `open_model` raises."""
    if checkpoint.hub_id is None or all((checkpoint.directory / file).exists() for file in checkpoint.files):
        return
    with _hub_errors(checkpoint.hub_id):
        _fetch(checkpoint.hub_id, checkpoint.revision, *checkpoint.files)


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn errors of the hub and of its clients into RefusedError."""
    try:
        with quiet("huggingface_hub"):
            yield
    except RefusedError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds
        if isinstance(error, OSError) and error.errno is not None:  # local: no space, no permission
            raise
        reason = hub_reason(error) or f"{model} at the hub: {type(error).__name__}: {explain(error)}"
        raise RefusedError(f"there is no directory {model}, and {reason}") from error


def default_output(model: str, suffix: str) -> Path:
    """A model's path with a suffix: next to a local model; of a hub id or its cache, in the working directory."""
    path, (hub_id, _) = Path(model), cached_revision(Path(model))
    if path.is_dir() and not hub_id:
        path = path.resolve() if path.name in ("", "..") else path
        return path.with_name(path.name + suffix)
    return Path((hub_id or model).split("/")[-1] + suffix)


def _from_hub(model: str, revision: str | None, headers_only: bool) -> Checkpoint:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    directory = _fetch(model, revision, "config.json")
    commit = directory.name
    try:
        names = set(HfApi().list_repo_files(model, revision=commit))
    except HfHubHTTPError:
        raise
    except Exception as unreachable:  # offline or no answer: use the cache
        try:
            return read_checkpoint(directory)
        except RefusedError as incomplete:
            raise unreachable from incomplete
    fetch = partial(_fetch, model, commit)
    if "config.json" not in names:
        raise RefusedError(f"{model} has no config.json; {ADVICE}")
    files, _ = weight_files(read_json(directory, "config.json"), names, lambda name: read_json(fetch(name), name))
    side, _ = side_files(names.difference(files))
    fetch(*side)
    stored = all((directory / file).exists() for file in files)
    if headers_only and not stored and not files[0].endswith(".bin"):
        return read_checkpoint(directory, partial(_remote_table, model, commit), names)
    return read_checkpoint(fetch(*files), present=names)


def _fetch(model: str, revision: str | None, *names: str) -> Path:
    """Fetch those of the files that the repository has; return their directory in the hub's cache."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=[escape(name) for name in names]))


def _remote_table(model: str, commit: str, file: str) -> list[TensorSpec]:
    """The tensors of a file at the hub: `read_header` of a sparse copy that contains only the header.

    HfApi.parse_safetensors_file_metadata does not return where in the file the tensors begin.
    """
    from huggingface_hub import HfFileSystem

    fs = HfFileSystem(skip_instance_cache=True)
    with TemporaryDirectory() as place, fs.open(f"{model}/{file}", revision=commit, block_size=FIRST_BYTES) as stream:
        length = stream.read(8)
        copy = Path(place) / "header.safetensors"
        copy.write_bytes(length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
        os.truncate(copy, stream.size)
        return read_header(copy, file)


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Silence messages of `huggingface_hub` or `datasets` (failures raise anyway), and their progress bars with
    --quiet, with `without_bars` or without a terminal. Their environment variables take precedence.
    """
    command = click.get_current_context(silent=True)
    utils: Any = importlib.import_module(f"{library}.utils")
    level, shown = utils.logging.get_verbosity(), not utils.are_progress_bars_disabled()
    if level == logging.WARNING:  # the default, so not chosen by the user
        utils.logging.set_verbosity(logging.CRITICAL)
    if shown and (without_bars.get() or not sys.stderr.isatty() or (command and command.params.get("quiet"))):
        with warnings.catch_warnings(action="ignore"):  # of an environment variable that takes precedence
            utils.disable_progress_bars()
    try:
        with quiet("huggingface_hub") if library == "datasets" else nullcontext():  # datasets fetches through it
            yield
    finally:
        utils.logging.set_verbosity(level)
        if shown:
            utils.enable_progress_bars()


def error_chain(error: BaseException) -> list[BaseException]:
    """An error and its chain of causes and contexts, as in a traceback."""
    chain = [error]
    while cause := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        if cause in chain:
            break
        chain.append(cause)
    return chain


def hub_reason(error: BaseException) -> str | None:
    """The message of huggingface_hub in an error, or that the hub is unreachable; None if the hub is not the cause."""
    from huggingface_hub import constants, errors

    for cause in error_chain(error):
        if isinstance(cause, errors.HfHubHTTPError | errors.OfflineModeIsEnabled | errors.HFValidationError):
            return f"huggingface_hub says: {explain(cause, 400)}"
        if type(cause).__module__.startswith("httpx"):  # httpx2 from huggingface_hub 2 on
            return (
                f"the hub at {constants.ENDPOINT} cannot be reached ({explain(cause)}); check the connection, "
                "HF_ENDPOINT and the proxy, or set HF_HUB_OFFLINE=1 to use what is in the cache"
            )
    return None
