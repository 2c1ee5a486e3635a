"""A stand-in for the Hugging Face hub in this process: it answers every HTTP request and records
those to the hub.

Repositories are directories, one per revision. `Machine` runs a command as on a computer that has
fetched nothing yet.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unittest import mock

from huggingface_hub import close_session, constants

from support.checkpoints import Result, check_refused, run

# huggingface_hub's client
http: Any = importlib.import_module("httpx2" if find_spec("httpx2") else "httpx")
_CONTROLLED = re.compile(r"HF_|HUGGING|TRANSFORMERS_|XDG_|.*_PROXY$", re.IGNORECASE)
# Information about a repository, its tree, or a file; names are those of models and data sets.
_ROUTE = re.compile(
    r"(?:/api)?(?:/models|/datasets)?/(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:/(?P<kind>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?"
)


class Request(NamedTuple):
    """One request; `sent` counts the bytes of the answer."""

    method: str
    path: str
    sent: int


@dataclass
class Repo:
    """A repository: the directory of each commit, and the names of commits."""

    gated: bool = False
    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, ref: str, directory: Path) -> str:
        """A new commit with the content of a directory, at the tip of a branch."""
        commit = hashlib.sha1(f"{ref} {directory} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = directory
        self.refs[ref] = commit
        return commit


class Hub:
    """Repositories by name, and the record of requests; `failure` is the status of all answers
    about repositories.
    """

    endpoint = "http://hub.test"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.failure = 0

    def repo(self, name: str, directory: Path, gated: bool = False) -> Repo:
        """A repository with one commit."""
        repo = self.repos[name] = Repo(gated)
        repo.add("main", directory)
        return repo

    def sent(self, ending: str) -> int:
        """Bytes that went out from paths that end so."""
        return sum(request.sent for request in self.requests if request.path.endswith(ending))

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        paths = (
            request.path.partition("/resolve/")[2]
            for request in self.requests
            if request.method == "GET"
        )
        return {path.partition("/")[2] for path in paths if path}

    def answer(self, request: Any) -> Any:
        """The response to a request. No other host can be reached."""
        if not str(request.url).startswith(self.endpoint):
            raise http.ConnectError("connection refused")
        route = _ROUTE.fullmatch(request.url.path)
        if not route:
            return http.Response(404)
        status, content, headers = self._content(**route.groupdict())
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers["Content-Length"] = str(len(data))
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2]), len(data) - 1)
            status, part = 206, data[first : last + 1]
            headers |= {
                "Content-Range": f"bytes {first}-{last}/{len(data)}",
                "Content-Length": str(len(part)),
            }
            data = part
        body = b"" if request.method == "HEAD" else data
        self.requests.append(Request(request.method, request.url.path, len(body)))
        return http.Response(status, headers=headers, content=body)

    def _content(
        self, name: str, kind: str | None, revision: str | None, path: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, content and headers of an answer."""
        if self.failure and kind != "resolve":
            return _refusal(self.failure, "as the test asked")
        if not (repo := self.repos.get(name)):
            return _refusal(401, "RepoNotFound")
        commit = repo.refs.get(revision or "main", revision or "")
        if not (directory := repo.commits.get(commit)):
            return _refusal(404, "RevisionNotFound")
        files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*")}
        if kind == "tree":
            inside = {
                name for name in files if PurePosixPath(path or ".") in PurePosixPath(name).parents
            }
            return 200, [_entry(name, files[name]) for name in sorted(inside)], {}
        if kind != "resolve":
            siblings = [{"rfilename": name} for name in files if files[name].is_file()]
            return 200, {"id": name, "sha": commit, "siblings": siblings, "gated": repo.gated}, {}
        if repo.gated:
            return _refusal(403, "GatedRepo")
        if path not in files:
            return _refusal(404, "EntryNotFound")
        return (
            200,
            files[path].read_bytes(),
            {"X-Repo-Commit": commit, "ETag": f'"{_digest(files[path])}"'},
        )


def _refusal(status: int, code: str) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": code}, {"X-Error-Code": code}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _entry(name: str, path: Path) -> dict[str, Any]:
    """A folder or a file as the hub describes it."""
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}


class Machine:
    """A fresh machine: an empty hub cache, a working directory, and this process on it."""

    def __init__(self, root: Path) -> None:
        self.home, self.work = root / "hf", root / "work"
        self.work.mkdir()

    @contextmanager
    def entered(self, **environment: str) -> Iterator[None]:
        """This process on the machine: what huggingface_hub reads when it is imported, it reads
        again.
        """
        before = vars(constants).copy()
        clean = {key: value for key, value in os.environ.items() if not _CONTROLLED.match(key)}
        clean |= {"HF_HOME": str(self.home), "HF_ENDPOINT": Hub.endpoint, "HF_HUB_DISABLE_XET": "1"}
        try:
            with mock.patch.dict(os.environ, clean | environment, clear=True), chdir(self.work):
                importlib.reload(constants)
                close_session()
                yield
        finally:
            vars(constants).update(before)
            close_session()

    def run(self, *words: object, program: str = "gqa-convert", **environment: str) -> Result:
        """`PROGRAM WORDS` in this process."""
        with self.entered(**environment):
            return run(*words, program=program)

    def refused(self, *words: object, **environment: str) -> str:
        """The one line that a failing command says; nothing is left in the working directory."""
        said = check_refused(self.run(*words, **environment), advice="")
        assert list(self.work.iterdir()) == []
        return said
