"""Render chats by a chat template: a program that chat_template.py runs in a process of its own.

It imports nothing else of this package.

Each line of stdin and of stdout is JSON. The first line has the template, its variables and the
limits. Each further line is a request, and each has an answer:

    {"messages": [...], "add_generation_prompt": true, "characters": 100}
    {"text": ...}, with `mark_assistant` also {"spans": [[begin, end], ...]}
    {"raised": ...} if the template raises, {"error": ...} if it writes or takes too much

A process that is killed by one of its limits writes nothing.
"""

import json
import math
import sys
from typing import Any


def limit_seconds(seconds: int) -> None:
    """Let the system kill this process after so many seconds of computing from now on.

    The system counts whole seconds since the process began, so it may be up to one more. Windows
    has no such limit: there the caller's clock alone stops it.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(spent.ru_utime + spent.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_lower(limit, hard), hard))


def limit_memory(added_bytes: int) -> None:
    """Refuse this process more memory than so many bytes beside what its imports took. Windows has
    no such limit.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return

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
        unit = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def main() -> None:
    """Answer requests until stdin ends."""
    # Imported before the limits count, so that the first chat does not pay for it.
    import jinja2.sandbox  # noqa: F401
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = json.loads(sys.stdin.readline())
    limit_memory(settings["bytes"])

    for line in sys.stdin:
        request = json.loads(line)
        marks = request.get("mark_assistant", False)
        # The limit is that of one chat, as the process renders one after the other.
        limit_seconds(settings["seconds"])

        try:
            (text,), spans = render_jinja_template(
                [request["messages"]],
                chat_template=settings["template"],
                add_generation_prompt=request.get("add_generation_prompt", False),
                return_assistant_tokens_mask=marks,
                **settings["variables"],
            )
            answer: dict[str, Any] = {"text": text}
            if marks:
                answer["spans"] = spans[0]
            if len(text) > request["characters"]:
                answer = {"error": f"it writes {len(text):,} characters"}
        except MemoryError:
            answer = {"error": f"it takes more than {settings['bytes']:,} bytes of memory"}
        except Exception as error:  # whatever a template raises
            answer = {"raised": str(error)[:1000]}

        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
