"""Open a model from a local directory or, through huggingface_hub (which --help does not import),
from the hub.
"""

import errno
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from gqa.checkpoint.files import MAX_HEADER_BYTES, TensorSpec, read_header, side_files, weight_files
from gqa.checkpoint.nearby import similar_directory
from gqa.checkpoint.read import (
    Checkpoint,
    cached_revision,
    read_checkpoint,
    read_json,
    what_to_pass,
)
from gqa.core.errors import CacheError, CorruptError, MissingError, RefusedError, explain

# Numbers of system errors that a disk causes, whatever is done on it.
_FULL = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
    }
)
# Those that a path causes; sockets have some of them, too.
_UNWRITABLE = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EISDIR,
    }
)
FIRST_BYTES = 2**16  # read first from a shard at the hub: nearly always its whole header
# True if a caller from Python wants no progress bars.
without_bars: ContextVar[bool] = ContextVar("without_bars", default=False)


def open_model(model: str, revision: str | None = None, headers_only: bool = False) -> Checkpoint:
    """The checkpoint of a directory or a model id, whose files are fetched into the hub's cache.

    Args:
        model: A directory or a model id.
        revision: A branch, tag or commit of a model id.
        headers_only: Fetch only the headers of a model id's weights, unless they have none (.bin);
            call `fetch_weights` before reading tensors.

    Raises:
        RefusedError: The model cannot be fetched or read.
        CacheError: The hub's cache cannot be written.
        OSError: This machine is the cause.
    """
    if os.path.lexists(model):
        if revision is not None:
            raise RefusedError(
                f"--revision is for model ids, but {model} is a local path; remove --revision"
            )
        return read_checkpoint(Path(model))
    _check_hub_id(model)
    with quiet("huggingface_hub"):
        return _from_hub(model, revision, headers_only)


def require_model(model: str, revision: str | None = None) -> None:
    """Raise what `open_model` raises for a name that is neither a path nor a model id that can be
    found. Of a model id only config.json is fetched.
    """
    if os.path.lexists(model):
        return
    _check_hub_id(model)
    with quiet("huggingface_hub"):
        _fetch(model, revision, "config.json")


def fetch_weights(checkpoint: Checkpoint) -> None:
    """Fetch the weights of a model id that was opened with `headers_only`.

    Raises what `open_model` raises.
    """
    if checkpoint.hub_id is None or _has_files(checkpoint.directory, checkpoint.files):
        return
    with quiet("huggingface_hub"):
        _fetch(checkpoint.hub_id, checkpoint.revision, *checkpoint.files)


def _has_files(directory: Path, files: Iterable[str]) -> bool:
    """Whether all of the files are in the directory."""
    return all((directory / file).exists() for file in files)


def _check_hub_id(model: str) -> None:
    """Raise RefusedError for a name that can only be a path."""
    if model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1:
        raise RefusedError(
            f"{_no_directory(model)}; pass a directory with config.json, or a model id (owner/name)"
        )


def _no_directory(model: str) -> str:
    """That there is no such directory, which one may be meant, or which command would write it."""
    text = f"there is no directory {model!r}"
    if Path(f"{model}-state").is_dir():
        return f"{text} (its training has not finished: repeat the gqa-uptrain command)"
    if similar := similar_directory(model):
        return f"{text} (did you mean {similar}?)"
    if re.search(r"-gqa\d*\b", model):
        return f"{text} (it has the name of a result: if it is yours, run gqa-convert first)"
    return text


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn errors of the hub and of its clients into RefusedError, errors of its cache into
    CacheError.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except RefusedError:
        raise
    except HFValidationError as error:
        raise RefusedError(
            f"{_no_directory(model)}, and it is not a model id (owner/name): {explain(error)}; "
            "pass a directory with config.json, or a model id"
        ) from error
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds
        if cause := local_cause(error):
            raise cache_error(cause, Path(constants.HF_HUB_CACHE)) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = hub_reason(error)
        if reason is None:
            reason = f"{model} at the hub: {type(error).__name__}: {explain(error)}"
        raise RefusedError(f"{_no_directory(model)}, and {reason}") from error


@contextmanager
def _cached(model: str, directory: Path) -> Iterator[None]:
    """Say in errors about the files of a model id that they are in the hub's cache, where they stay
    until deleted.
    """
    try:
        yield
    except MissingError:
        raise
    except CorruptError as error:
        remedy = f"to download it again delete {directory.parent.parent}"
        raise type(error)(
            f"{error}; it is in the cache of the hub, as {model}: {remedy}"
        ) from error
    except RefusedError as error:
        raise RefusedError(f"{model}: {error}") from error


def default_output(model: str, suffix: str) -> Path:
    """A model's path with a suffix: next to a local model.

    Of a model id or its cache, in the working directory.
    """
    path = Path(model)
    hub_id, _ = cached_revision(path)
    if path.is_dir() and not hub_id:
        # The last component of `.` or `..` is not the directory's name.
        if path.name in ("", ".."):
            path = path.resolve()
        return path.with_name(path.name + suffix)

    name = (hub_id or model).split("/")[-1]
    return Path(name + suffix)


def _from_hub(model: str, revision: str | None, headers_only: bool) -> Checkpoint:
    """The checkpoint of a model id; see `open_model`."""
    directory = _fetch(model, revision, "config.json")
    commit = directory.name
    names, unreachable = _names_at_hub(model, commit)
    if names is None:
        return _read_cache(model, directory, unreachable)

    fetch = partial(_fetch, model, commit)
    if "config.json" not in names:
        raise RefusedError(f"{model} has no config.json; {what_to_pass(names)}")
    with _cached(model, directory):
        config = read_json(directory, "config.json")
        files, _ = weight_files(config, names, lambda name: read_json(fetch(name), name))
    side, _ = side_files(names.difference(files))
    fetch(*side)

    is_pickled = files and files[0].endswith(".bin")  # without headers to read
    if headers_only and not _has_files(directory, files) and not is_pickled:
        with _hub_errors(model):
            return read_checkpoint(directory, partial(_remote_table, model, commit), names)
    fetch(*files)
    with _cached(model, directory):
        return read_checkpoint(directory, present=names)


def _names_at_hub(model: str, commit: str) -> tuple[set[str] | None, Exception | None]:
    """The names of a repository's files; or None, and why the hub cannot be reached.

    Raises RefusedError if the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with _hub_errors(model):
        try:
            return set(HfApi().list_repo_files(model, revision=commit)), None
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            return None, error  # the hub is out of order
        except Exception as error:  # offline or no answer
            return None, error


def _read_cache(model: str, directory: Path, unreachable: Exception | None) -> Checkpoint:
    """The checkpoint in the hub's cache, if all of it is there.

    Raises RefusedError with what is wrong with it: that the hub cannot be reached only if something
    is missing.
    """
    try:
        with _cached(model, directory):
            return read_checkpoint(directory)
    except MissingError as error:
        reason = unreachable and hub_reason(unreachable)
        if reason is None:
            raise
        raise RefusedError(
            f"{model} is not complete in the cache of the hub ({error}), and {reason}"
        ) from error


def _fetch(model: str, revision: str | None, *names: str) -> Path:
    """Fetch those of the files that the repository has.

    Return their directory in the hub's cache.
    """
    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in names]
    with _hub_errors(model):
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def _remote_table(model: str, commit: str, file: str) -> list[TensorSpec]:
    """The tensors of a file at the hub: `read_header` of a sparse copy that contains only the
    header.

    HfApi.parse_safetensors_file_metadata does not return where in the file the tensors begin.
    """
    from huggingface_hub import HfFileSystem

    fs = HfFileSystem(skip_instance_cache=True)
    with (
        TemporaryDirectory() as temporary,
        fs.open(f"{model}/{file}", revision=commit, block_size=FIRST_BYTES) as stream,
    ):
        length = stream.read(8)
        header = stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
        copy = Path(temporary) / "header.safetensors"
        copy.write_bytes(length + header)
        os.truncate(copy, stream.size)
        return read_header(copy, file)


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Silence messages of `huggingface_hub` or `datasets` (failures raise anyway), and their
    progress bars with --quiet, with `without_bars` or without a terminal. Their environment
    variables take precedence.
    """
    utils: Any = importlib.import_module(f"{library}.utils")
    level = utils.logging.get_verbosity()
    has_bars = not utils.are_progress_bars_disabled()

    if level == logging.WARNING:  # the default, so not chosen by the user
        utils.logging.set_verbosity(logging.CRITICAL)
    if has_bars and not _wants_bars():
        # The library warns if an environment variable takes precedence.
        with warnings.catch_warnings(action="ignore"):
            utils.disable_progress_bars()

    # `datasets` fetches through `huggingface_hub`.
    inner = quiet("huggingface_hub") if library == "datasets" else nullcontext()
    try:
        with inner:
            yield
    finally:
        utils.logging.set_verbosity(level)
        if has_bars:
            utils.enable_progress_bars()


def _wants_bars() -> bool:
    """Whether somebody watches progress bars and has not turned them off."""
    if without_bars.get() or not sys.stderr.isatty():
        return False
    command = click.get_current_context(silent=True)
    return not (command and command.params.get("quiet"))


def error_chain(error: BaseException) -> list[BaseException]:
    """An error and its chain of causes and contexts, as in a traceback."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        context = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or context
    return chain


def local_cause(error: BaseException) -> OSError | None:
    """The error in a chain that a file or a disk of this machine caused; None if there is none."""
    for cause in error_chain(error):
        if isinstance(cause, OSError):
            has_path = cause.filename is not None  # errors of sockets have none
            if cause.errno in _FULL or (has_path and cause.errno in _UNWRITABLE):
                return cause

        number = re.search(r"\(os error (\d+)\)", str(cause))  # of a library in Rust
        if number and int(number[1]) in _FULL | _UNWRITABLE:
            return OSError(int(number[1]), os.strerror(int(number[1])))
    return None


def cache_error(cause: OSError, directory: Path | None = None) -> CacheError:
    """The one-line error for a cache below HF_HOME, or this directory, that cannot be written."""
    from huggingface_hub import constants

    what = cause.strerror or os.strerror(cause.errno or errno.EIO)
    return CacheError(
        f"the cache {directory or constants.HF_HOME} cannot be written: {what}; "
        "free some space there, or set HF_HOME to a directory that can be written"
    )


def hub_reason(error: BaseException) -> str | None:
    """The message of huggingface_hub in an error, or that the hub is unreachable.

    None if the hub is not the cause.
    """
    from huggingface_hub import constants, errors

    hub_errors = (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.HFValidationError)
    for cause in error_chain(error):
        if isinstance(cause, hub_errors):
            return f"huggingface_hub says: {explain(cause, 400)}"
        if type(cause).__module__.startswith("httpx"):  # httpx2 from huggingface_hub 2 on
            return (
                f"the hub at {constants.ENDPOINT} cannot be reached ({explain(cause)}); "
                "check the name, the connection, HF_ENDPOINT and the proxy, "
                "or set HF_HUB_OFFLINE=1 to use what is in the cache"
            )
    return None
