"""Import gqa and nothing else, and print which of the large packages came along."""

from __future__ import annotations

import sys

import gqa  # noqa: F401

if __name__ == "__main__":
    print(sorted({"torch", "transformers", "numpy"} & {*sys.modules}))
