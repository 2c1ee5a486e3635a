"""Checkpoints where fsspec reaches (s3://, gs://, memory:// ...), read from there and written there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import CorruptError, OutputError, RefusedError, explain, one_line
from gqa.checkpoint.headers import MAX_HEADER_BYTES, TensorSpec, parse_json, read_header
from gqa.checkpoint.read import (
    INDEX,
    MAX_JSON_BYTES,
    SINGLE,
    WEIGHT_SUFFIXES,
    Checkpoint,
    holds_weights,
    merge_tables,
    weight_files,
)
from gqa.checkpoint.remote import Remote

if TYPE_CHECKING:
    from collections.abc import Iterator

# Weights are fetched by name; the same model in other formats is not fetched at all.
OTHER_FORMATS = ("original/", "onnx/", "openvino/")
FIRST_BYTES = 2**16  # of a remote shard: nearly always its whole header
_LAST = ("config.json", INDEX)  # without them nothing takes what is there for a checkpoint


def is_url(place: str) -> bool:
    """Whether it is an address for fsspec rather than a path or a hub id."""
    return "://" in place


def name_in(url: str) -> str:
    """The last part of an address: what a local copy is called."""
    return url.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def _refusing(url: str) -> Iterator[None]:
    """What a file system raises as one line; its packages have errors of any kind."""
    try:
        yield
    except (RefusedError, OutputError):
        raise
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise RefusedError(
            f"{scheme}:// needs a package that is not installed ({explain(error)}); pip install it"
        ) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise
        raise RefusedError(one_line(f"{url}: {type(error).__name__}: {explain(error)}")) from None


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    return fs, root.rstrip("/")


def open_url(url: str, headers_only: bool, check: Callable[[Checkpoint], Path | None]) -> Checkpoint:
    """The checkpoint at an address, by its headers; its files are fetched to where `check` says, one by one.

    Raises RefusedError, also where `check` says nothing.
    """
    with _refusing(url):
        fs, root = _file_system(url)
        listed = {path[len(root) :].lstrip("/"): info for path, info in fs.find(root, detail=True).items()}
        if "config.json" not in listed:
            raise RefusedError(f"{url} has no config.json; give a directory with config.json and safetensors weights")

        def read(name: str) -> dict[str, Any]:
            if (size := int(listed[name]["size"])) > MAX_JSON_BYTES:
                raise CorruptError(f"{name} has {size} bytes, at most {MAX_JSON_BYTES} are allowed; is it one?")
            return parse_json(fs.cat_file(f"{root}/{name}"), name)

        files, index = weight_files(listed.keys(), read)
        if not files or files[0].endswith(".bin"):
            raise RefusedError(f"{url} has no safetensors weights ({SINGLE} or {INDEX}); save it as safetensors first")
        if missing := set(files) - listed.keys():
            raise CorruptError(f"the index of {url} names {min(missing)}, which is not there; copy it again")
        tensors = remote_tensors(files, index, fs, lambda file: f"{root}/{file}")
        told = json.dumps({name: fs.ukey(f"{root}/{name}") for name in sorted(listed)})
        identity = f"{url} {hashlib.sha256(told.encode()).hexdigest()}"
        remote = Remote(identity, lambda file, to: _get(fs, url, f"{root}/{file}", to / file))
        headers = Checkpoint(name_in(url), None, read("config.json"), tensors, tuple(files), remote=remote)
        if headers_only:
            return headers
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise RefusedError(f"several processes do not share what is fetched of {url}; copy it to a directory first")
        if place := check(headers):
            return opened(headers, place, listed.keys())
    raise RefusedError(f"only gqa-convert reads {url}; copy it to a directory first")


def _get(fs: Any, url: str, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{target.name}.incomplete")
    with _refusing(url):
        fs.get_file(path, str(partial_file))
    partial_file.replace(target)


def opened(headers: Checkpoint, place: Path, present: Collection[str]) -> Checkpoint:
    """A checkpoint of which everything but the weights is fetched to `place`, where weights come as they are read."""
    assert headers.remote is not None
    side = sorted(name for name in present if name != "config.json" and is_side_file(name))
    beside = [name for name in ("config.json", INDEX) if name in present]
    directory = headers.remote.open(place, [*beside, *side])
    return replace(headers, directory=directory, side_files=tuple(side))


def is_side_file(name: str) -> bool:
    """Whether a file of a repository is fetched beside the weights."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not (hidden or name.startswith(OTHER_FORMATS) or holds_weights(name))


def remote_tensors(
    files: Sequence[str], index: dict[str, Any] | None, fs: Any, path: Callable[[str], str], **how: Any
) -> dict[str, TensorSpec]:
    """The table of all tensors, of which only headers are fetched."""
    with ThreadPoolExecutor(8) as pool:
        tables = pool.map(lambda file: _remote_table(fs, path(file), file, **how), files)
        return merge_tables(dict(zip(files, tables, strict=True)), index)


def _remote_table(fs: Any, path: str, file: str, **how: Any) -> list[TensorSpec]:
    """The tensors of a file elsewhere, as strictly read as those of a local one: a file of its size, in which nothing
    follows the header.

    HfApi.parse_safetensors_file_metadata would not do: it gives no size of the file and keeps the last of two tensors
    of one name.
    """
    with TemporaryDirectory() as place, fs.open(path, block_size=FIRST_BYTES, **how) as stream:
        length = stream.read(8)
        copy = Path(place) / "header.safetensors"
        copy.write_bytes(length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)))
        os.truncate(copy, stream.size)
        return read_header(copy, file)


def check_target(url: str, overwrite: bool) -> None:
    """Find out before a long conversion what would stop the upload after it. Raises RefusedError."""
    with _refusing(url):
        fs, root = _file_system(url)
        there = {path[len(root) :].lstrip("/") for path in fs.find(root)}
        if there and not overwrite:
            raise RefusedError(f"{url} exists; choose another output with -o, or replace it with --overwrite")
        # An upload that was stopped has no config.json.
        if there and not any("/" not in name and Path(name).suffix in WEIGHT_SUFFIXES for name in there):
            raise RefusedError(
                f"{url} holds no checkpoint: --overwrite will not remove it; give another output with -o"
            )


def upload(directory: Path, url: str) -> None:
    """Copy a finished checkpoint to an address; what was there before is deleted, and config.json comes last.

    Files of the same size that a stopped upload left there are sent again: only the file system's own writes are whole
    or absent. Raises OSError with one line; the checkpoint stays where it is.
    """
    try:
        fs, root = _file_system(url)
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        for name in _LAST:
            if fs.exists(f"{root}/{name}"):
                fs.rm_file(f"{root}/{name}")
        for name in sorted(files, key=lambda name: (name in _LAST, name == "config.json", name)):
            target = f"{root}/{name}"
            fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            fs.put_file(str(files[name]), target)
        for path in fs.find(root):
            if path[len(root) :].lstrip("/") not in files:
                fs.rm_file(path)
    except Exception as error:  # its packages have errors of any kind
        raise OSError(
            f"{directory} is complete, but copying it to {url} failed: {type(error).__name__}: {explain(error)}"
        ) from None
