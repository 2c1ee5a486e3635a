"""Render chats by a checkpoint's chat template within limits.

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
import tempfile
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Event, Timer
from typing import IO, Any

from gqa.checkpoint import render_template
from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import RefusedError, explain

SECONDS = 5  # of computing for one chat; published templates take milliseconds
MEMORY = 1 << 30  # bytes beside those of the process itself
MAX_CHARACTERS = 100_000  # that it writes for one letter
# Seconds until the process has started, imported transformers and rendered, on a busy machine.
_DEADLINE = 120
_FILE = "chat_template.jinja"

Answer = dict[str, Any]


class ChatRenderer:
    """A process that renders chats by one template, each within the limits of this module.

    The process starts with the first chat and serves until this object is no longer used, as the
    start takes seconds and a chat takes less than a millisecond.
    """

    def __init__(self, template: str, variables: dict[str, str]) -> None:
        self._settings = {
            "template": template,
            "variables": variables,
            "seconds": SECONDS,
            "bytes": MEMORY,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        characters: int,
        *,
        add_generation_prompt: bool = False,
        mark_assistant: bool = False,
    ) -> Answer:
        """Render one chat, of which the template may write so many `characters`.

        Returns:
            `text`, and with `mark_assistant` the `spans` [begin, end) of it inside
            `{% generation %}` blocks; or `raised`: what the template raised; or `error`: the limit
            that it broke, in words.
        """
        request = {
            "messages": list(messages),
            "characters": characters,
            "add_generation_prompt": add_generation_prompt,
            "mark_assistant": mark_assistant,
        }
        process = self._start()
        assert process.stdin
        assert process.stdout

        late = Event()

        def end_late_process() -> None:
            late.set()
            process.kill()

        clock = Timer(_DEADLINE, end_late_process)
        clock.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it ended before it read all of that
            line = b""
        finally:
            clock.cancel()

        if line.endswith(b"\n"):
            answer: Answer = json.loads(line)
            return answer
        return {"error": self._end(process, late.is_set())}

    def _start(self) -> subprocess.Popen[bytes]:
        """The process, which may have been started by an earlier call."""
        if self._process is not None:
            return self._process

        command = [sys.executable, "-P", str(Path(render_template.__file__))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            # Ctrl-C is for the command, which may end only after the step that it is in.
            start_new_session=True,
        )
        weakref.finalize(self, _stop, process, errors)
        self._errors = errors
        self._process = process

        assert process.stdin
        process.stdin.write(json.dumps(self._settings).encode() + b"\n")
        return process

    def _end(self, process: subprocess.Popen[bytes], late: bool) -> str:
        """Why the process ended; the next chat starts another one."""
        self._process = None
        code = process.wait()
        assert self._errors
        self._errors.seek(0)
        errors = self._errors.read()
        _stop(process, self._errors)

        if late:
            return f"it was stopped after {_DEADLINE} seconds"
        if code == -getattr(signal, "SIGXCPU", 0):
            return f"it was stopped after {self._settings['seconds']} seconds of computing"
        if code < 0:
            return f"its process was stopped by signal {-code}"
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process that renders it failed ({explain(RuntimeError(reason))})"


def _stop(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        assert pipe
        try:
            pipe.close()
        except OSError:  # what it did not read anymore
            continue


def template_of(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer; None if there is none, or several and none is the
    default.
    """
    try:
        template: str = tokenizer.get_chat_template()
    except Exception:  # transformers raises ValueError, tokenizers in Python others
        return None
    return template


def variables_of(tokenizer: Any) -> dict[str, str]:
    """The special tokens, by the names under which chat templates read them."""
    tokens = tokenizer.special_tokens_map
    return {name: str(token) for name, token in tokens.items() if isinstance(token, str)}


def render_chat(tokenizer: Any, checkpoint: Checkpoint, content: str) -> str | None:
    """The chat of one user's message, as the checkpoint's chat template writes it.

    None if there is no template, or if it refuses such a chat. Raises RefusedError if it takes more
    time or memory, or writes more, than any template needs.
    """
    template = template_of(tokenizer)
    if template is None:
        return None

    answer = _render_once(template, tuple(sorted(variables_of(tokenizer).items())), content)
    if "error" not in answer:
        return answer.get("text")

    file = _FILE if _FILE in checkpoint.side_files else "tokenizer_config.json"
    raise RefusedError(
        f"the chat template of {checkpoint.name} ({file}) cannot be used: for a chat of "
        f"{len(content)} characters {answer['error']}; repair or remove it, or pass text with "
        "--data instead of self"
    )


@lru_cache(maxsize=8)
def _render_once(template: str, variables: tuple[tuple[str, str], ...], content: str) -> Answer:
    """The answer for the chat of one user's message, by a process of its own."""
    messages = [{"role": "user", "content": content}]
    return ChatRenderer(template, dict(variables)).render(messages, MAX_CHARACTERS)
