"""The built-in corpus: the source of Python's standard library.

A hash of the module's *name* splits it, so the same modules are held out on every machine and, for
modules that keep their name, in every version of Python.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELDOUT_PER_MILLE = 50
# Tests, vendored wheels and generated tables.
_EXCLUDED_PARTS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
)
_EXCLUDED_PACKAGES = frozenset({"encodings", "pydoc_data", "turtledemo", "lib2to3"})


def stdlib_texts(split: str) -> Iterator[str]:
    """The modules of one split (train or heldout), sorted by path, without files that are not
    UTF-8.

    A module is held out if the SHA-256 of its dotted name, modulo 1000, is below
    `HELDOUT_PER_MILLE`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = list[Path]()
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = {*subfolders} - _EXCLUDED_PARTS  # site-packages has far more files
        paths += [Path(folder, name) for name in files if name.endswith(".py")]

    for path in sorted(paths):
        parts = path.relative_to(root).with_suffix("").parts
        if _EXCLUDED_PARTS.intersection(parts) or parts[0] in _EXCLUDED_PACKAGES:
            continue
        if parts[0].startswith(("_sysconfigdata", "config-")):  # describes one machine
            continue
        if _is_held_out(".".join(parts)) != (split == "heldout"):
            continue

        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text


def _is_held_out(module: str) -> bool:
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PER_MILLE
