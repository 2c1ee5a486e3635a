"""Read JSON that somebody else wrote: configs, indices and records.

Everything that is wrong is one line.

Python's own reader raises RecursionError for deep nesting, and takes some values that cannot be
written again or that exhaust what reads them later: nesting just below its own limit, half of a
surrogate pair, numbers of thousands of digits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gqa.core.errors import CorruptError

MAX_BYTES = 50_000_000  # of one file; the index of a model with 100,000 tensors has 10 million
# Lists and objects inside of each other; everything that walks such a value can recurse so far
MAX_DEPTH = 64
MAX_DIGITS = 100  # of one integer; 10 ** 30 stands for infinity in files of tokenizers


def parse_json(text: str | bytes, name: str) -> Any:
    """The value of a JSON text in UTF-8, which can be written again.

    Raises CorruptError, which begins with `name`.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, parse_int=_integer)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for half of a surrogate pair
    except ValueError as error:
        raise CorruptError(f"{name} is not JSON in UTF-8 ({error}); download it again") from error
    except RecursionError as error:
        raise _too_deep(name) from error

    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep(name)

    return value


def read_json_file(path: Path, name: str) -> Any:
    """The value in a file of JSON in UTF-8, which errors call `name`.

    Raises CorruptError, and OSError.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CorruptError(
            f"{name} has {size:,} bytes, but at most {MAX_BYTES:,} are read; download it again"
        )

    return parse_json(path.read_bytes(), name)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, but at most {MAX_DIGITS} are read")
    return int(digits)


def _too_deep(name: str) -> CorruptError:
    return CorruptError(
        f"{name} is not JSON in UTF-8 that can be read (nested deeper than {MAX_DEPTH} levels); "
        "download it again"
    )


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested in each other more than `limit` times.

    Without recursion.
    """
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return True
