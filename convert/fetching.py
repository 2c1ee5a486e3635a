"""A model that lies elsewhere and the space there is for it: all of it is fetched first, or one file after another."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.hub_errors import quiet
from gqa.checkpoint.write import OutputDirectory, existing, require_space
from gqa.convert.methods import instead
from gqa.convert.plan import Plan, Shard


def files_of(plan: Plan, shard: Shard) -> set[str]:
    """The files of the source that a file of the result is made of."""
    read = plan.checkpoint.files_of
    return {file for tensor in shard.tensors for spec in tensor.sources for file in read(spec)}


def held_at_once(plan: Plan, jobs: int) -> int:
    """Bytes of the source that lie beside the result at the most while `jobs` neighbouring files of it are written:
    what these read, and what was read before them and is read again after.
    """
    sizes, held = plan.checkpoint.file_sizes, [0] * len(plan.shards)
    needed = [files_of(plan, shard) for shard in plan.shards]
    for file, size in sizes.items():
        readers = [number for number, files in enumerate(needed) if file in files]
        for first in range(max(0, readers[0] - jobs + 1), readers[-1] + 1) if readers else ():
            held[first] += size
    return max(held)


def jobs_within(plan: Plan, jobs: int, space: int) -> int:
    """As many jobs, up to `jobs`, as there is space for what they fetch; one at least."""
    return next((number for number in range(jobs, 1, -1) if held_at_once(plan, number) <= space), 1)


def fetched_beside(plan: Plan, output: OutputDirectory) -> Path | None:
    """Where files of the source are fetched to when they are read: beside the output. None where all of them go to the
    cache of the hub first: where there is space for that, or where something looks at the whole model.

    Raises OutputError where there is too little space, before any weights are fetched.
    """
    remote = plan.checkpoint.remote
    assert remote is not None
    if remote.cache:
        cache, place = existing(remote.cache), existing(output.out)
        beside = plan.total_bytes if os.stat(cache).st_dev == os.stat(place).st_dev else 0
        free = shutil.disk_usage(cache).free
        if free >= remote.missing + beside and shutil.disk_usage(place).free >= plan.total_bytes:
            return None
        if plan.looks_first:
            other = f"with --method {instead(lambda method: False)}"
            raise OutputError(
                f"no space left: {plan.looks_first} looks at the whole model: {remote.missing:,} bytes are fetched to "
                f"{cache} (HF_HOME says where) and the result takes {plan.total_bytes:,}; {free:,} are free; free some "
                f"space, or fetch file by file {other}"
            )
    place = output.sibling("fetched")
    require_space(plan.total_bytes, output.out, _at_once(plan), there=bytes_in(output.work) + bytes_in(place))
    return place


def _at_once(plan: Plan) -> int:
    """Bytes of the source that lie beside the result at a time."""
    return sum(plan.checkpoint.file_sizes.values()) if plan.looks_first else held_at_once(plan, 1)


@contextmanager
def fetched(plan: Plan, whole: bool) -> Iterator[None]:
    """While the block runs, files of a model elsewhere are here once they are read, or all of them; after it none."""
    with ExitStack() as stack:
        if remote := plan.checkpoint.remote:
            stack.enter_context(quiet("huggingface_hub"))
            stack.enter_context(remote)
            for file in plan.checkpoint.files if whole else ():
                remote.fetch(file)
        yield


def bytes_in(directory: Path) -> int:
    """Of all files below it, which a run before may have left."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def fetching_record(plan: Plan) -> dict[str, Any] | None:
    """What has to be fetched of a model that is not here, for --dry-run; None of one that is."""
    if not (remote := plan.checkpoint.remote):
        return None
    return {
        "bytes": remote.missing if remote.cache else sum(plan.checkpoint.file_sizes.values()),
        "whole_model_first": bool(plan.looks_first),
        "bytes_at_once": _at_once(plan),
    }
