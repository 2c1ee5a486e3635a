"""Print the help of a program on stdout, and the modules that it has imported on stderr.

python help_and_modules.py gqa-convert gqa.convert.cli
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module


def print_modules() -> None:
    print(*sys.modules, file=sys.stderr)


if __name__ == "__main__":
    program, module = sys.argv[1:]
    atexit.register(print_modules)

    sys.argv = [program, "--help"]
    import_module(module).main()
