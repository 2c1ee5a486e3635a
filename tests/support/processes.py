"""Commands as processes that can be killed: one process imports everything once, then forks a child
for each.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "fcntl.flock"}


def serve(start: Callable[[dict[str, Any]], object]) -> None:
    """Answer lines of JSON: {"wait": pid} with how a child ended, any other job with a child that
    does `start(job)`.
    """
    # What is imported is no garbage, and a page that a child does not touch is not copied for it
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)

    out = os.fdopen(os.dup(1), "w")
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = os.waitpid(job["wait"], 0)[1] if "wait" in job else os.fork() or _child(start, job)
        print(json.dumps(answer), file=out, flush=True)


def _child(start: Callable[[dict[str, Any]], object], job: dict[str, Any]) -> NoReturn:
    """What it says is in two files beside each other, `job["log"]` and "out" or "err"."""
    import torch

    # Its threads are made anew after a fork: not by two at once
    torch.set_num_threads(torch.get_num_threads())
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(job["log"] + stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code: Any = 99
    try:
        start(job)
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_at(change: int) -> None:
    """SIGKILL just before the nth time that this process changes a name (open for writing, rename,
    mkdir, unlink).
    """
    left = [change]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or event in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


@contextmanager
def small_disk(made: Path, size: str) -> Iterator[Path]:
    """A file system of that size (like `400k`) at a new directory.

    Skips the test where none may be mounted.
    """
    made.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(made)]
    if (
        shutil.which("mount") is None
        or subprocess.run(words, capture_output=True, check=False).returncode
    ):
        pytest.skip("a full disk is a small tmpfs, which only root on Linux may mount")
    try:
        yield made
    finally:
        subprocess.run(["umount", "-l", str(made)], check=True)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@dataclass
class Running:
    """A command under way."""

    server: Forks
    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(self.server.ask({"wait": self.pid}))

    def said(self, stream: str = "err") -> str:
        return Path(f"{self.log}{stream}").read_text()


class Forks:
    """A process of a script that ends in `serve`: a line of JSON asks, one answers.

    Logs are below `directory`.
    """

    def __init__(
        self, directory: Path, script: Path, *arguments: object, **environment: str
    ) -> None:
        self.directory = directory
        self.count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            | environment,
        )
        assert self._answer() == {}

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def start(self, **job: Any) -> Running:
        """A child that does a job, not waited for."""
        self.count += 1
        log = self.directory / f"log{self.count}"
        return Running(self, self.ask({"log": str(log), **job}), log)

    def ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
