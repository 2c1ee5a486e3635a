"""Hub ids against a stand-in hub on this machine: what is fetched, what is recorded, what is said, what is pushed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import INDEX, SINGLE, Result, edit_json, llama, load, run, snapshot, weights, write_raw
from hub_server import Hub, Machine

NAME = "lab/tiny-llama"
FIRST_BYTES = 2**16  # of a shard, all that a dry run may fetch
CLOSED = "http://127.0.0.1:9"  # nothing listens on the port of the discard service
SHARDS = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]


def model(directory: Path, shards: int = 2, **changes: Any) -> Path:
    """A checkpoint whose shards are far larger than their headers."""
    made = weights(width=256, seed=changes.pop("seed", 0))
    return llama(directory, shards=shards, tensors=made, hidden_size=256, intermediate_size=128, **changes)


def same_weights(first: Path, second: Path) -> bool:
    """The shards of two directories, byte for byte."""
    files = sorted(path.name for path in first.glob("*.safetensors"))
    return files == sorted(p.name for p in second.glob("*.safetensors")) != [] and all(
        (first / name).read_bytes() == (second / name).read_bytes() for name in files
    )


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def pad_header(path: Path, spaces: int) -> int:
    """Spaces after a safetensors header, which the format allows; returns its new end in the file."""
    text = path.read_bytes()
    end = 8 + int.from_bytes(text[:8], "little")
    write_raw(path, text[8:end] + b" " * spaces, text[end:])
    return end + spaces


def plan(result: Result) -> dict[str, Any]:
    """The plan that --json printed; a line of JSON is all that is on stdout."""
    assert result.code == 0, result
    assert result.out.count("\n") == 1
    return dict(json.loads(result.out))


def test_hub_id_end_to_end(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n", encoding="utf-8")
    commit = hub.repo(NAME, source, token="hf_secret").refs["main"]
    result = machine.run("--groups", 2, NAME, HF_TOKEN="hf_secret")
    assert (result.code, result.err) == (0, ""), result.err
    out = machine.work / "tiny-llama-gqa2"
    assert [p.name for p in machine.work.iterdir()] == [out.name]

    local = run("--groups", 2, source, "-o", tmp_path / "local")
    assert local.code == 0, local
    assert same_weights(out, tmp_path / "local")
    ours = {key: value.split()[0] for key, value in snapshot(out).items()}
    theirs = {key: value.split()[0] for key, value in snapshot(tmp_path / "local").items()}
    assert {key for key in ours if ours[key] != theirs[key]} == {"README.md", "gqa_conversion.json"}
    assert ours.keys() == theirs.keys()
    assert not any(path.is_symlink() for path in out.rglob("*"))

    record = json.loads((out / "gqa_conversion.json").read_text())
    assert record["source"] == {"model": NAME, "revision": commit}
    assert f"--revision {commit} {NAME}" in record["command"]
    card = (out / "README.md").read_text()
    assert f"base_model: {NAME}\n" in card
    assert "license: mit\n" in card

    # The token goes to the hub with every request, and never to the storage behind it.
    assert {r.token for r in hub.requests if not r.path.startswith("/lfs/")} == {"hf_secret"}
    assert {r.token for r in hub.requests if r.path.startswith("/lfs/")} == {None}
    # The cache is links into blobs, and a conversion only reads it; again, it needs nothing but the commit's name.
    links = [path for path in machine.home.rglob("snapshots/*/*.safetensors") if path.is_symlink()]
    assert len(links) == 2
    before, weights_sent = machine.blobs(), hub.sent(".safetensors")
    again = machine.run("--groups", 2, "--overwrite", "--checksums", NAME, HF_TOKEN="hf_secret")
    assert (again.code, again.err) == (0, ""), again
    assert machine.blobs() == before
    assert hub.sent(".safetensors") == weights_sent
    # Offline and without a connection the cache is enough, and the commit is known.
    offline = machine.run("--groups", 2, "-o", "offline", NAME, HF_HUB_OFFLINE="1")
    assert (offline.code, offline.err) == (0, ""), offline
    assert same_weights(machine.work / "offline", out)
    assert json.loads((machine.work / "offline/gqa_conversion.json").read_text())["source"]["revision"] == commit
    machine.endpoint = CLOSED
    assert plan(machine.run("--groups", 1, "--dry-run", "--json", NAME))["revision"] == commit


def test_revision_is_resolved_and_recorded(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    repo = hub.repo(NAME, model(tmp_path / "main", shards=1))
    side = repo.add("side", model(tmp_path / "side", shards=1, seed=1))
    result = machine.run("--groups", 4, "--revision", "side", NAME)
    assert result.code == 0, result
    out = machine.work / "tiny-llama-gqa4"
    record = json.loads((out / "gqa_conversion.json").read_text())
    assert record["source"]["revision"] == side
    wanted = load(tmp_path / "side")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(out).items())


@pytest.mark.parametrize(("shards", "padding"), [(1, 90_000), (2, 0)])
def test_dry_run_fetches_headers_only(tmp_path: Path, hub: Hub, machine: Machine, shards: int, padding: int) -> None:
    source = model(tmp_path / "source", shards=shards)
    header_bytes = {path.name: pad_header(path, padding) for path in source.glob("*.safetensors")}
    commit = hub.repo(NAME, source).add("side", source)
    ours = plan(machine.run("--groups", 2, "--dry-run", "--json", "--revision", "side", NAME))
    theirs = plan(run("--groups", 2, "--dry-run", "--json", source))
    assert (ours.pop("model"), ours.pop("revision")) == (NAME, commit)
    assert (theirs.pop("model"), theirs.pop("revision")) == ("source", None)
    assert ours == theirs

    assert len(header_bytes) == shards
    for name, size in header_bytes.items():
        assert hub.sent(f"/lfs/{commit}/{name}") == max(size, FIRST_BYTES)
        assert (source / name).stat().st_size > 10 * FIRST_BYTES
    side_files = {"config.json", *([INDEX] if shards > 1 else [])}
    assert hub.fetched() == {*header_bytes, *side_files}
    assert {path.name for path in machine.home.rglob("snapshots/*/*")} == side_files
    assert list(machine.work.iterdir()) == []
    assert "is not completely in the cache" in machine.refused("--revision", commit, NAME, HF_HUB_OFFLINE="1")


def test_server_without_ranges(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from gqa.checkpoint import hub as client

    source = tmp_path / SINGLE
    source.write_bytes(bytes(range(256)) * 2**17)
    commit, hub.ranges = hub.repo(NAME, tmp_path).refs["main"], False
    monkeypatch.setenv("NO_PROXY", "*")
    url = f"{hub.endpoint}/lfs/{commit}/{SINGLE}"
    assert client._byte_range(url, 1000, 3000) == (source.read_bytes()[1000:3000], 2**25)
    assert hub.sent(SINGLE) < 2**24  # the answer was left unread; what lies in the buffers of sockets is lost


def test_only_what_is_needed_is_fetched(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    others = [
        "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "tiny.Q4_K.gguf",
        "onnx/model.onnx", "onnx/config.json",
        "original/consolidated.00.pth", "original/params.json", "openvino/openvino_model.xml", "tf_model.h5",
        "flax_model.msgpack",
    ]  # fmt: skip
    for name in others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"never to be fetched" * 1000)
    hub.repo(NAME, source)
    result = machine.run("--groups", 2, NAME)
    assert (result.code, result.err) == (0, ""), result
    side_files = {"tokenizer.json", "chat_template.jinja", "generation_config.json", "assets/nested/vocab.txt"}
    assert hub.fetched() == {"config.json", INDEX, *SHARDS, "modeling_mine.py", *side_files}


def test_bin_weights(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source", shards=1)
    torch.save(load(source), source / "pytorch_model.bin")
    (source / SINGLE).unlink()
    hub.repo(NAME, source)
    said = machine.refused("--dry-run", NAME)
    assert f"{NAME} has no safetensors headers; without --dry-run its .bin weights are fetched" in said
    assert hub.fetched() == set()
    result = machine.run("--groups", 2, NAME)
    assert (result.code, result.err) == (0, ""), result
    assert run("--groups", 2, source, "-o", tmp_path / "local").code == 0
    assert same_weights(machine.work / "tiny-llama-gqa2", tmp_path / "local")


def test_local_directory_wins(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.repo(NAME, model(tmp_path / "remote", shards=1))
    (machine.work / NAME).mkdir(parents=True)
    assert f"{NAME} has no config.json" in machine.run("--groups", 2, NAME).err
    assert "--revision is for hub ids; lab/tiny-llama is a local" in machine.run("-g2", "--revision", "main", NAME).err
    assert hub.requests == []


in_both = pytest.mark.parametrize("mode", [("--dry-run",), ()], ids=["dry", "full"])


class TestRefusals:
    """Each is one line on stderr and exit code 2, and nothing is written; also in a dry run where that differs."""

    def test_unknown_repository(self, machine: Machine) -> None:
        said = machine.refused("lab/none")
        assert "there is no directory lab/none, and the hub shows no repository lab/none: check the name" in said
        assert "if it is private, log in with `hf auth login` or set HF_TOKEN" in said
        assert "the present token has no access" in machine.refused("lab/none", HF_TOKEN="hf_other")

    def test_gated(self, tmp_path: Path, hub: Hub, machine: Machine) -> None:
        hub.repo(NAME, model(tmp_path / "source"), gated=True)
        said = machine.refused(NAME)
        assert f"{NAME} is gated: accept its terms at {hub.endpoint}/{NAME}, then log in" in said
        assert "(the present one has no access)" in machine.refused(NAME, HF_TOKEN="hf_other")

    def test_unknown_revision(self, tmp_path: Path, hub: Hub, machine: Machine) -> None:
        hub.repo(NAME, model(tmp_path / "source")).add("side", tmp_path / "source")
        said = machine.refused("--revision", "sidee", NAME)
        assert f"{NAME} at the hub has no revision 'sidee'; give a branch, a tag or a whole commit id" in said
        assert "it has main, side" in said

    def test_no_connection(self, machine: Machine) -> None:
        machine.endpoint = CLOSED
        said = machine.refused(NAME)
        assert "the hub at http://127.0.0.1:9 cannot be reached (" in said
        assert "check the connection, HF_ENDPOINT and the proxy" in said

    def test_offline_and_not_cached(self, hub: Hub, machine: Machine) -> None:
        said = machine.refused(NAME, HF_HUB_OFFLINE="1")
        assert f"{NAME} is not completely in the cache {machine.home}/hub while HF_HUB_OFFLINE is set; unset it" in said
        assert hub.requests == []

    @in_both
    @pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors"])
    def test_hostile_index(self, tmp_path: Path, hub: Hub, machine: Machine, mode: tuple[str, ...], file: str) -> None:
        source = model(tmp_path / "source")
        edit_json(source / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file}))
        hub.repo(NAME, source)
        said = machine.refused(*mode, NAME)
        assert f"{INDEX} says that model.norm.weight is in {file!r}; allowed are names of" in said
        assert hub.sent(".safetensors") == 0

    @in_both
    def test_missing_shard(self, tmp_path: Path, hub: Hub, machine: Machine, mode: tuple[str, ...]) -> None:
        source = model(tmp_path / "source")
        (source / SHARDS[1]).unlink()
        hub.repo(NAME, source)
        assert f"the index of {NAME} names {SHARDS[1]}, which is not there" in machine.refused(*mode, NAME)
        assert hub.sent(".safetensors") == 0

    @in_both
    def test_truncated_shard(self, tmp_path: Path, hub: Hub, machine: Machine, mode: tuple[str, ...]) -> None:
        source = model(tmp_path / "source")
        data = (source / SHARDS[1]).read_bytes()
        (source / SHARDS[1]).write_bytes(data[:-9])
        hub.repo(NAME, source)
        said = machine.refused(*mode, NAME)
        assert said.startswith(f"gqa-convert: {SHARDS[1]}: ")
        assert "truncated? download it again" in said

    @in_both
    def test_no_weights(self, tmp_path: Path, hub: Hub, machine: Machine, mode: tuple[str, ...]) -> None:
        source = model(tmp_path / "source", shards=1)
        (source / SINGLE).rename(source / "tiny.gguf")
        hub.repo(NAME, source)
        assert f"{NAME} has neither {SINGLE} nor pytorch_model.bin (nor their index);" in machine.refused(*mode, NAME)
        (source / "config.json").rename(source / "adapter_config.json")
        hub.repo(NAME, source)
        assert f"{NAME} has no config.json; give a repository with" in machine.refused(*mode, NAME)
        assert hub.sent(".gguf") == 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:40], "is truncated: header of"),
        (lambda data: b"", "is truncated: 0 bytes hold no safetensors header"),
        (lambda data: b"\xff" * 7 + b"\x7f" + data[8:], "header of 9223372036854775807 bytes, at most"),
        (lambda data: data[:8] + b"?" + data[9:], "its header is not JSON"),
        (lambda data: data + b"more", "4 bytes belong to no tensor"),
    ],
    ids=["header cut", "empty", "header too long", "not JSON", "longer"],
)  # fmt: skip
def test_broken_remote_header(tmp_path: Path, hub: Hub, machine: Machine, damage: Any, words: str) -> None:
    source = model(tmp_path / "source")
    (source / SHARDS[1]).write_bytes(damage((source / SHARDS[1]).read_bytes()))
    hub.repo(NAME, source)
    said = machine.refused("--dry-run", NAME)
    assert words in said
    assert SHARDS[1] in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a/b/c"], "there is no directory a/b/c, and it is no hub id (owner/name)"),
        (["./tiny"], "there is no directory ./tiny, and it is no hub id"),
        (["lab/bad--name"], "'lab/bad--name' is no hub id (owner/name of letters"),
        (["--revision", "", NAME], "--revision '' is not the name of a branch, a tag or a commit"),
        (["--revision", "../../x", NAME], "--revision '../../x' is not the name of"),
    ],
)
def test_what_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda socket, address: pytest.fail("the network was asked"))
    result = run("--groups", 2, *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "403 for lab/tiny-llama: the token may not"),
        (501, "501 for lab/tiny-llama: the hub is in trouble"),
    ],
)
def test_other_answers(hub: Hub, machine: Machine, status: int, said: str) -> None:
    hub.failing["/api/models"] = status
    assert said in machine.refused("--dry-run", NAME)


def test_cache_that_cannot_be_written(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.repo(NAME, model(tmp_path / "source", shards=1))
    (tmp_path / "file").touch()
    said = machine.refused("--dry-run", NAME, code=1, HF_HUB_CACHE=str(tmp_path / "file/hub"))
    assert f"Not a directory: '{tmp_path}/file/hub" in said


def test_push(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    result = machine.run("--groups", 2, "--push-to-hub", "me/pushed", source, HF_TOKEN="hf_write")
    assert (result.code, result.err) == (0, ""), result
    assert result.out.endswith(f"pushed      {hub.endpoint}/me/pushed\n")
    out = tmp_path / "source-gqa2"
    assert hub.pushed() == {path.relative_to(out).as_posix(): path.read_bytes() for path in files_of(out)}
    assert hub.repos["me/pushed"].private
    assert {r.token for r in hub.requests if not r.path.startswith("/upload/")} == {"hf_write"}
    assert {name for name, _ in hub.commits} == {"me/pushed"}


def test_failed_push_keeps_the_result(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.failing["/api/models/me/pushed/commit"] = 403
    source = model(tmp_path / "source")
    result = machine.run("--groups", 2, "-q", "--push-to-hub", "me/pushed", source, HF_TOKEN="hf_read")
    assert result.code == 1
    out = tmp_path / "source-gqa2"
    assert result.err.startswith(f"gqa-convert: {out} is complete, but pushing it failed: the hub answered 403")
    assert result.err.endswith(f"; push it with: hf upload me/pushed {out} . --private\n")
    assert result.err.count("\n") == 1
    assert load(out).keys() == load(source).keys()


def test_push_to_what_is_there(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    old = tmp_path / "old"
    llama(old, shards=1, side_files=False)
    (old / "pytorch_model.bin").write_bytes(b"old")
    (old / "adapter.safetensors").write_bytes(b"of somebody else")
    hub.repo("me/public", old)
    new = llama(tmp_path / "new", side_files=False)
    said = machine.push(new, "me/public")
    assert said == f"OSError {new} is complete but was not pushed: me/public is public; allow that with --public\n"
    assert hub.commits == []
    # Weights of before would be loaded instead of the new ones, or beside them.
    assert machine.push(new, "me/public", private=False) == f"{hub.endpoint}/me/public\n"
    assert hub.deleted() == {SINGLE, "pytorch_model.bin"}
    assert hub.pushed().keys() == {path.name for path in new.iterdir()}
    assert machine.push(new, "me/new", private=False) == f"{hub.endpoint}/me/new\n"
    assert not hub.repos["me/new"].private


def test_wrong_groups_are_refused_before_weights_are_fetched(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.repo(NAME, model(tmp_path / "source"))
    assert "choose 1, 2, 4 or 8" in machine.refused("--groups", 3, NAME)
    assert 0 < hub.sent(".safetensors") < 1 << 18  # of 2.4 MB


def test_push_that_cannot_work_is_refused_before_converting(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    hub.repo("me/public", source)
    push = ("--groups", 2, "--push-to-hub")
    assert "me/public is public; allow that" in machine.refused(*push, "me/public", source, HF_TOKEN="hf_write")
    assert "no token to use me/new with: log in" in machine.refused(*push, "me/new", source)
    assert "no repository name" in machine.refused(*push, "a/b/c", source, HF_TOKEN="hf_write")
    assert not (tmp_path / "source-gqa2").exists()


@pytest.mark.parametrize(
    ("repo", "environment", "said"),
    [
        ("me/x", {"HF_TOKEN": ""}, "the hub answered 401 for me/x: the token is not valid, or there is none: log in"),
        ("me/x", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it to use the hub"),
        ("me/x", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub at http://127.0.0.1:9 cannot be reached"),
        ("a/b/c", {}, "'a/b/c' is no hub id (owner/name of letters"),
    ],
)
def test_push_that_fails(
    tmp_path: Path, hub: Hub, machine: Machine, repo: str, environment: dict[str, str], said: str
) -> None:
    new = llama(tmp_path / "new", side_files=False)
    line = machine.push(new, repo, **environment)
    assert line.startswith(f"OSError {new} is complete, but pushing it failed: ")
    assert said in line
    assert line.count("\n") == 1
    assert hub.commits == []
