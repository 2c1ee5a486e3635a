"""The cache of `datasets`, which holds tokens and generated text: a directory that can be written,
and its errors.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gqa.checkpoint.hub import cache_error, local_cause
from gqa.core.console import SILENT
from gqa.core.errors import OutputError, RefusedError
from gqa.core.shelves import REMOVED_AT_EXIT


def datasets_cache() -> Path:
    """The directory of the cache of `datasets`, which exists and can be written.

    If it cannot be written, a temporary directory replaces it in this process, with one warning:
    the run then works, but stores nothing for later ones. Several processes share the cache, so
    they raise CacheError instead.
    """
    import datasets

    directory = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise cache_error(error, directory) from error
        temporary = tempfile.mkdtemp(prefix="gqa-cache-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        REMOVED_AT_EXIT.add(Path(temporary))
        datasets.config.HF_DATASETS_CACHE = Path(temporary)
        SILENT.warn(
            f"the cache {directory} cannot be written ({error.strerror or error}): tokens and "
            f"generated text are in {temporary} until this run ends; set HF_HOME to a directory "
            "that can be written to keep them"
        )
        return Path(temporary)
    return directory


@contextmanager
def cache_errors() -> Iterator[None]:
    """Turn errors of the system in a block that writes into the cache of `datasets` into a
    CacheError that names it.
    """
    import datasets

    try:
        yield
    except (RefusedError, OutputError):
        raise
    except Exception as error:
        cause = local_cause(error)
        if cause is None:
            raise
        raise cache_error(cause, Path(datasets.config.HF_DATASETS_CACHE)) from error
