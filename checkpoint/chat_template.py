"""Render a checkpoint's chat template within limits.

transformers renders templates in jinja's sandbox, which keeps them from running code, but limits
neither time nor memory. Two nested loops of 99,999 turns do not end, and `{{ 7 ** 99999999 }}` or a
long string that is multiplied is one call into C, which no signal handler, timer or thread
interrupts. So a process of its own renders, and the system ends it: that works from any thread, and
whatever the template does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from gqa.checkpoint import render_template
from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import RefusedError, explain

SECONDS = 5  # of computing; published templates take milliseconds
MEMORY = 1 << 30  # bytes beside those of the process itself
CHARACTERS = 100_000  # that it writes for one letter
# Seconds until the process has started, imported transformers and rendered, on a busy machine.
_DEADLINE = 120
_FILE = "chat_template.jinja"


def render_chat(tokenizer: Any, checkpoint: Checkpoint, content: str) -> str | None:
    """The chat of one user's message, as the checkpoint's chat template writes it.

    None if there is no template, or if it refuses such a chat. Raises RefusedError if it takes more
    time or memory, or writes more, than any template needs.
    """
    try:
        template = tokenizer.get_chat_template()
    except Exception:  # there is none, or several and none is the default
        return None

    special_tokens = tokenizer.special_tokens_map
    request = {
        "template": template,
        "messages": [{"role": "user", "content": content}],
        "variables": {
            name: str(token) for name, token in special_tokens.items() if isinstance(token, str)
        },
        "seconds": SECONDS,
        "bytes": MEMORY,
        "characters": CHARACTERS,
    }
    answer = _answer(json.dumps(request))
    if "error" not in answer:
        return answer.get("text")

    file = _FILE if _FILE in checkpoint.side_files else "tokenizer_config.json"
    raise RefusedError(
        f"the chat template of {checkpoint.name} ({file}) cannot be used: for a chat of "
        f"{len(content)} characters {answer['error']}; repair or remove it, or give text instead "
        "of self"
    )


@lru_cache(maxsize=8)
def _answer(request: str) -> dict[str, str]:
    """The answer of a process that renders: `text`, `raised` (what the template raised) or
    `error`.
    """
    command = [sys.executable, "-P", str(Path(render_template.__file__))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.run(
            command,
            input=request.encode(),
            capture_output=True,
            timeout=_DEADLINE,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it was stopped after {_DEADLINE} seconds"}

    if process.returncode == 0:
        answer: dict[str, str] = json.loads(process.stdout)
        return answer
    if process.returncode == -getattr(signal, "SIGXCPU", 0):
        return {"error": f"it was stopped after {SECONDS} seconds of computing"}
    if process.returncode < 0:
        return {"error": f"its process was stopped by signal {-process.returncode}"}
    reason = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return {"error": f"the process that renders it failed ({explain(RuntimeError(reason))})"}
