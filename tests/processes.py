"""Conversions as processes that can be killed: one process imports everything once, then forks a child for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Reads {"start": words, ...} and {"wait": pid} from its input, one JSON object a line, and answers likewise.
# "fatal": n kills the child just before the nth time that it changes a name (open for writing, rename, mkdir, unlink).
# "exchange": false takes the atomic exchange of two names away, as on systems that have none.
_SERVER = """
import json, os, signal, sys, traceback
from gqa.checkpoint import write as writer
from gqa.convert.cli import main

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "ctypes.dlsym", "fcntl.flock"}

def arm(fatal):
    left = [fatal]
    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def command(words):
    sys.argv = ["gqa-convert", *words]
    try:
        main()
        return 0
    except SystemExit as leaving:
        return leaving.code or 0

def child(job):
    for descriptor, log in ((1, "out"), (2, "err")):
        os.dup2(os.open(job["log"] + log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = 99
    try:
        if not job.get("exchange", True):
            writer.exchange = lambda one, other: False
        if job.get("fatal"):
            arm(job["fatal"])
        code = command(job["start"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

out = os.fdopen(os.dup(1), "w")
sys.stdout = open(os.devnull, "w")
command(["--groups", "2", "-q", "-o", sys.argv[2], sys.argv[1]])
print("{}", file=out, flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        answer = os.waitpid(job["wait"], 0)[1]
    else:
        answer = os.fork() or child(job)
    print(json.dumps(answer), file=out, flush=True)
"""


@dataclass
class Running:
    """A conversion under way."""

    server: Server
    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(self.server.ask({"wait": self.pid}))

    def said(self, stream: str = "err") -> str:
        return Path(f"{self.log}{stream}").read_text()


class Forks:
    """A process that has imported everything and forks a child for each job: a line of JSON asks, one answers.

    Logs are below `directory`.
    """

    def __init__(self, directory: Path, code: str, *arguments: str, **environment: str) -> None:
        self.directory = directory
        self.count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert self._answer() == {}

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Server(Forks):
    """`with Server(model, directory) as server`: warm after one conversion of a small model into `directory`."""

    def __init__(self, model: Path, directory: Path) -> None:
        super().__init__(directory, _SERVER, str(model), str(directory / "warm"))

    def start(self, *words: object, **options: Any) -> Running:
        """`gqa-convert WORDS`, not waited for."""
        self.count += 1
        log = self.directory / f"log{self.count}"
        return Running(self, self.ask({"start": [*map(str, words)], "log": str(log), **options}), log)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
