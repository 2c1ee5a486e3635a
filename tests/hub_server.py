"""A stand-in for the Hugging Face hub on this machine: what huggingface_hub asks of it, and a record of every request.

Repositories are directories, one per revision. Weights are served as the hub serves LFS files: the address of a file
answers with a redirect to another one, and with the ETag and size of what it links to. `Machine` runs the command.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

from checkpoints import Result, check_refused, run
from huggingface_hub import close_session, constants

_CONTROLLED = re.compile(r"HF_|HUGGING|TRANSFORMERS_|XDG_|.*_PROXY$", re.IGNORECASE)
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".onnx", ".pth")


@dataclass(frozen=True)
class Request:
    """One request; `sent` counts the bytes of the answer."""

    method: str
    path: str
    token: str | None
    sent: int


class _RefusalError(Exception):
    """A status and the code that the hub gives the error."""


@dataclass
class Repo:
    """A model repository: the directory of each commit, and the names of commits."""

    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None  # without it the hub does not even say that the repository exists

    def add(self, ref: str, directory: Path) -> str:
        """A new commit with the content of a directory, at the tip of a branch."""
        commit = hashlib.sha1(f"{ref} {directory} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = directory
        self.refs[ref] = commit
        return commit


class Hub:
    """The server's state: repositories, and the record of requests."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.failing: dict[str, int] = {}  # beginning of a path -> status of the answer
        self.endpoint = ""

    def repo(self, name: str, directory: Path | None = None, **rights: Any) -> Repo:
        """A repository with one commit, which is empty without a directory."""
        self.repos[name] = made = Repo(**rights)
        made.add("main", directory or Path("/no such directory"))
        return made

    def sent(self, ending: str) -> int:
        """Bytes that went out from paths that end so."""
        return sum(r.sent for r in self.requests if r.path.endswith(ending))

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        found = {re.sub(r".*/(resolve|lfs)/[^/]+/", "", r.path) for r in self.requests if r.method == "GET"}
        return {name for name in found if not name.startswith(("/", "api/"))}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing: `Hub.requests` has the record."""

    def do_GET(self) -> None:
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.route = unquote(urlsplit(self.path).path)
        try:
            for start, status in self.hub.failing.items():
                if self.route.startswith(start):
                    raise _RefusalError(status, "as the test asked")
            for method, pattern, action in _ROUTES:
                if self.command in method.split() and (match := re.fullmatch(pattern, self.route)):
                    action(self, **{name: value for name, value in match.groupdict().items() if value is not None})
                    return
            raise _RefusalError(404, f"the stand-in knows no {self.command} {self.route}")
        except _RefusalError as refused:
            status, code = refused.args
            self._answer(status, {"error": code}, {"X-Error-Code": code})

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        body = b"" if self.command == "HEAD" else data
        if self.route != "/api/agent-harnesses":  # huggingface_hub asks that of the hub about itself
            self.hub.requests.append(Request(self.command, self.route, self.token, len(body)))
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # a client may leave
            self.wfile.write(body)

    def _repo(self, name: str) -> Repo:
        """The repository, if it may be seen."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.token is not None and repo.token != self.token):
            raise _RefusalError(404 if self.token else 401, "RepoNotFound")
        return repo

    def _commit(self, name: str, revision: str) -> tuple[Repo, str, Path]:
        repo = self._repo(name)
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise _RefusalError(404, "RevisionNotFound")
        return repo, commit, repo.commits[commit]

    def model_info(self, name: str, revision: str = "main") -> None:
        repo, commit, directory = self._commit(name, revision)
        siblings = [{"rfilename": path} for path, _ in _files(directory)]
        self._answer(200, {"id": name, "sha": commit, "siblings": siblings, "gated": repo.gated})

    def tree(self, name: str, revision: str, folder: str = ".") -> None:
        deep = "recursive=true" in self.path.lower()
        entries = [(PurePosixPath(entry["path"]), entry) for entry in _entries(self._commit(name, revision)[2])]
        inside = [(path, entry) for path, entry in entries if PurePosixPath(folder) in path.parents]
        self._answer(200, [entry for path, entry in inside if deep or str(path.parent) == folder])

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo, commit, directory = self._commit(name, revision)
        file = directory / path
        if repo.gated:
            raise _RefusalError(403 if self.token else 401, "GatedRepo")
        if path not in dict(_files(directory)):
            raise _RefusalError(404, "EntryNotFound")
        if path.endswith(LFS_SUFFIXES):
            headers = {"X-Repo-Commit": commit, "X-Linked-ETag": f'"{_sha256(file)}"'}
            headers |= {"X-Linked-Size": str(file.stat().st_size), "ETag": '"pointer"'}
            # An address on another host, as that of the hub's storage is: the token must not be sent there.
            headers["Location"] = f"{self.hub.endpoint.replace('127.0.0.1', 'localhost')}/lfs/{commit}/{path}"
            self._answer(302, b"", headers)
        else:
            self._content(file, {"X-Repo-Commit": commit, "ETag": f'"{_sha256(file)[:40]}"'})

    def storage(self, commit: str, path: str) -> None:
        directory = next(repo.commits[commit] for repo in self.hub.repos.values() if commit in repo.commits)
        self._content(directory / path, {"ETag": f'"{_sha256(directory / path)}"'})

    def _content(self, file: Path, headers: dict[str, str]) -> None:
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked or self.command == "HEAD":
            self._answer(200, data, headers)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(206, data[first : last + 1], headers)


_NAME = r"(?P<name>[\w.-]+(?:/[\w.-]+)?)"
_API = rf"/api/(?:models|datasets)/{_NAME}"  # names are those of both kinds of repositories
_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", rf"{_API}/revision/(?P<revision>.+)", _Handler.model_info),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    ("GET", _API, _Handler.model_info),
    ("GET HEAD", rf"(?:/datasets)?/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    ("GET HEAD", r"/lfs/(?P<commit>\w+)/(?P<path>.+)", _Handler.storage),
]


def _files(directory: Path) -> list[tuple[str, Path]]:
    return sorted((p.relative_to(directory).as_posix(), p) for p in directory.rglob("*") if p.is_file())


def _entries(directory: Path) -> list[dict[str, Any]]:
    """Folders and files as the hub describes them."""
    files = _files(directory)
    folders = {str(parent) for path, _ in files for parent in PurePosixPath(path).parents} - {"."}
    entries: list[dict[str, Any]] = [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]
    for path, file in files:
        size, oid = file.stat().st_size, _sha256(file)
        lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 130}} if path.endswith(LFS_SUFFIXES) else {}
        entries.append({"type": "file", "path": path, "size": size, "oid": oid[:40], **lfs})
    return entries


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub at `hub.endpoint` on a free port, in a thread."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class Machine:
    """A fresh machine: an empty hub cache, a working directory, and this process on it."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.home, self.work, self.endpoint = root / "hf", root / "work", endpoint
        self.work.mkdir()

    def _environment(self, given: dict[str, str]) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not _CONTROLLED.match(key)}
        ours = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        return clean | ours | given

    @contextmanager
    def entered(self, **environment: str) -> Iterator[None]:
        """This process on the machine: what huggingface_hub reads when it is imported, it reads again."""
        before = vars(constants).copy()
        try:
            with mock.patch.dict(os.environ, self._environment(environment), clear=True), chdir(self.work):
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

    def refused(self, *words: object, code: int = 2, groups: int | None = 2, **environment: str) -> str:
        """The one line that a failing command says; nothing is left in the working directory."""
        before = ("--groups", groups) if groups else ()
        said = check_refused(self.run(*before, *words, **environment), code=code, advice="")
        assert list(self.work.iterdir()) == []
        return said
