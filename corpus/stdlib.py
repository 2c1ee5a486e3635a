"""The corpus that every user already has: the source of Python's standard library.

Documents are split by a hash of the module's *name*, so on every machine the same modules are held out, and what a
checkpoint was trained on in one place is not what it is evaluated on in another. Python versions agree on every module
that keeps its name.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_PER_MILLE = 50
# Tests, vendored wheels and generated tables: not prose that a person wrote in Python.
_EXCLUDED_PARTS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})
_EXCLUDED_PACKAGES = frozenset({"encodings", "pydoc_data", "turtledemo", "lib2to3"})


def stdlib_texts(split: Split) -> Iterator[str]:
    """The modules of one split in the order of their names. Files that are not UTF-8 are left out.

    Held out are those whose name (dotted) has a SHA-256 that is low.
    """
    root, found = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, below, files in os.walk(root):
        below[:] = {*below} - _EXCLUDED_PARTS  # packages that are installed are far more files
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found):
        parts = path.relative_to(root).with_suffix("").parts
        if _EXCLUDED_PARTS.intersection(parts) or parts[0] in _EXCLUDED_PACKAGES:
            continue
        if parts[0].startswith(("_sysconfigdata", "config-")):  # describes one machine
            continue
        module = ".".join(parts)
        heldout = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % 1000 < HELDOUT_PER_MILLE
        if heldout != (split == "heldout"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text
