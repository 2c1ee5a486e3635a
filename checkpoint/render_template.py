"""Render one chat template: a program that chat_template.py runs in a process of its own.

It imports nothing else of this package.

Reads JSON from stdin: the limits, and the arguments of transformers' own `render_jinja_template`.
Writes JSON to stdout: {"text": ...}, or {"error": ...} if the template raises or writes too much. A
process that is killed by one of its limits writes nothing.
"""

import json
import sys
from typing import Any


def limit_resources(seconds: int, added_bytes: int) -> None:
    """Let the system kill this process after so many seconds of computing, and refuse it more
    memory than so many bytes beside what its imports took. Windows has no such limits: there the
    caller's clock alone stops it.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(spent.ru_utime + spent.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_lower(whole, hard), hard))

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space(resource)
    resource.setrlimit(resource.RLIMIT_AS, (_lower(used + added_bytes, hard), hard))


def _lower(limit: int, hard: int) -> int:
    """The smaller of two limits, of which -1 (`RLIM_INFINITY`) is none."""
    return limit if hard < 0 else min(limit, hard)


def _address_space(resource: Any) -> int:
    """Bytes of address space that this process has.

    Elsewhere than on Linux the most memory that it used.
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * int(resource.getpagesize())
    except OSError:
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    request = json.load(sys.stdin)
    limit_resources(request["seconds"], request["bytes"])
    try:
        (text,), _ = render_jinja_template(
            [request["messages"]], chat_template=request["template"], **request["variables"]
        )
        answer = {"text": text}
        if len(text) > request["characters"]:
            answer = {"error": f"it writes {len(text):,} characters"}
    except MemoryError:
        answer = {"error": f"it takes more than {request['bytes']:,} bytes of memory"}
    except Exception as error:  # whatever a template raises
        answer = {"raised": str(error)[:1000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
