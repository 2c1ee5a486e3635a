"""Hub ids against a stand-in hub on this machine: what is fetched, what is recorded, what is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    INDEX,
    MERGED,
    SINGLE,
    Result,
    edit_json,
    llama,
    load,
    read_header,
    run,
    snapshot,
    weights,
    write_raw,
)
from hub_server import Hub, Machine

import gqa
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.hub import beside, open_model

NAME, OUT = "lab/tiny-llama", "tiny-llama-gqa2-mean"
FIRST_BYTES = 2**16  # of a shard, all that a dry run may fetch
CLOSED = "http://127.0.0.1:9"  # nothing listens on the port of the discard service
SHARDS = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]


def model(directory: Path, shards: int = 2, **changes: Any) -> Path:
    """A checkpoint whose shards are far larger than their headers."""
    made = weights(width=256, seed=changes.pop("seed", 0))
    return llama(directory, shards=shards, tensors=made, hidden_size=256, intermediate_size=128, **changes)


def same_weights(first: Path, second: Path) -> bool:
    """The shards of two directories, byte for byte."""
    ours, theirs = ({p.name: p.read_bytes() for p in place.glob("*.safetensors")} for place in (first, second))
    return ours == theirs != {}


def pad_header(path: Path, spaces: int) -> int:
    """Spaces after a safetensors header, which the format allows; returns its new end in the file."""
    header, data = read_header(path)
    text = json.dumps(header).encode() + b" " * spaces
    write_raw(path, text, data)
    return 8 + len(text)


def plan(result: Result) -> dict[str, Any]:
    """The plan that --json printed; a line of JSON is all that is on stdout."""
    assert result.code == 0, result
    assert result.out.count("\n") == 1
    return dict(json.loads(result.out))


def test_hub_id_end_to_end(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n", encoding="utf-8")
    local = run(*MERGED, source, "-o", tmp_path / "local")
    assert local.code == 0, local
    needed = {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "modeling_mine.py"}
    for name in (
        "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "tiny.Q4_K.gguf",
        "onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth", "original/params.json",
        "openvino/openvino_model.xml", "tf_model.h5", "flax_model.msgpack",
    ):  # fmt: skip
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"never to be fetched" * 1000)
    repo = hub.repo(NAME, model(tmp_path / "main", shards=1, seed=1), token="hf_secret")
    commit = repo.add("side", source)
    words = (*MERGED, "--revision", "side", NAME)
    result = machine.run(*words, HF_TOKEN="hf_secret")
    assert (result.code, result.err) == (0, ""), result.err
    out = machine.work / "tiny-llama-gqa2-mean"
    assert [p.name for p in machine.work.iterdir()] == [out.name]
    assert hub.fetched() == {*needed, "assets/nested/vocab.txt", "README.md", INDEX, *SHARDS}

    assert same_weights(out, tmp_path / "local")
    ours, theirs = (
        {key: value.split()[0] for key, value in snapshot(made).items()} for made in (out, tmp_path / "local")
    )
    assert {key for key in ours if ours[key] != theirs[key]} == {"README.md", "gqa_conversion.json"}
    assert ours.keys() == theirs.keys()
    assert not any(path.is_symlink() for path in out.rglob("*"))

    record = json.loads((out / "gqa_conversion.json").read_text())
    assert record["source"] == {"model": NAME, "revision": commit}
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
    again = machine.run(*words, "--overwrite", "--checksums", HF_TOKEN="hf_secret")
    assert (again.code, again.err) == (0, ""), again
    assert machine.blobs() == before
    assert hub.sent(".safetensors") == weights_sent
    # Offline and without a connection the cache is enough, and the commit is known.
    offline = machine.run(*words, "-o", "offline", HF_HUB_OFFLINE="1")
    assert (offline.code, offline.err) == (0, ""), offline
    assert same_weights(machine.work / "offline", out)
    assert json.loads((machine.work / "offline/gqa_conversion.json").read_text())["source"]["revision"] == commit
    machine.endpoint = CLOSED
    assert plan(machine.run(*words, "--dry-run", "--json"))["revision"] == commit


def test_a_path_in_the_cache_is_the_repository(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    """Nothing is written into the cache, where pruning would delete it, and nothing is called by a commit."""
    commit = hub.repo(NAME, model(tmp_path / "source")).refs["main"]
    assert machine.run(*MERGED, "-o", "by-name", NAME).code == 0
    cached, before = machine.home / f"hub/models--lab--tiny-llama/snapshots/{commit}", snapshot(machine.home)
    (machine.work / "link").symlink_to(cached)
    for place in (cached, "link"):
        assert machine.run(*MERGED, "--overwrite", place).code == 0
        assert sorted(path.name for path in machine.work.iterdir()) == ["by-name", "link", OUT]
        record = json.loads((machine.work / OUT / "gqa_conversion.json").read_text())
        assert record["source"] == {"model": NAME, "revision": commit}
        assert same_weights(machine.work / OUT, machine.work / "by-name")
        with machine.entered():
            assert beside(str(place), "-uptrained") == Path("tiny-llama-uptrained")
            assert open_model(str(place)).name == "tiny-llama"
    assert snapshot(machine.home) == before


def test_refused_before_weights_are_fetched(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    """By what measures layers or looks at them first, too."""
    hub.repo(NAME, model(tmp_path / "source"))
    (machine.work / "taken").touch()
    for (program, *words), says in ((("gqa-convert", "--kv-budget", "0.1", NAME), "--kv-budget 0.1 is not possible"),):
        failed = machine.run(*words, program=program)
        assert (failed.code, says in failed.err) == (2, True), failed
    assert (before := hub.sent(".safetensors")) < 10 * FIRST_BYTES
    with machine.entered(), pytest.raises(RefusedError, match="data is not used by method mean"):
        gqa.convert_model(NAME, groups=2, method="mean", data="self:1K")
    assert hub.sent(".safetensors") - before < 3 * FIRST_BYTES
    assert not list(machine.home.rglob("*.safetensors"))


@pytest.mark.parametrize(("shards", "padding"), [(1, 90_000), (2, 0)])
def test_dry_run_fetches_headers_only(tmp_path: Path, hub: Hub, machine: Machine, shards: int, padding: int) -> None:
    source = model(tmp_path / "source", shards=shards)
    header_bytes = {path.name: pad_header(path, padding) for path in source.glob("*.safetensors")}
    commit = hub.repo(NAME, source).add("side", source)
    ours = plan(machine.run(*MERGED, "--dry-run", "--json", "--revision", "side", NAME))
    theirs = plan(run(*MERGED, "--dry-run", "--json", source))
    assert (ours.pop("model"), ours.pop("revision")) == (NAME, commit)
    assert (theirs.pop("model"), theirs.pop("revision")) == ("source", None)
    assert ours.pop("estimates").keys() == theirs.pop("estimates").keys()  # how fast this device is just now
    assert ours == theirs

    assert len(header_bytes) == shards
    for name, size in header_bytes.items():
        assert min(size, FIRST_BYTES) < hub.sent(f"/lfs/{commit}/{name}") <= 8 + FIRST_BYTES + max(size, 0) * 2
        assert (source / name).stat().st_size > 10 * FIRST_BYTES
    side_files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} - {*header_bytes}
    assert hub.fetched() == {*header_bytes, *side_files}
    assert not list(machine.home.rglob("snapshots/*/*.safetensors"))
    assert list(machine.work.iterdir()) == []
    assert "is not completely in the cache" in machine.refused("--revision", commit, NAME, HF_HUB_OFFLINE="1")


def test_bin_weights(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source", shards=1)
    torch.save(load(source), source / "pytorch_model.bin")
    (source / SINGLE).unlink()
    hub.repo(NAME, source)
    said = machine.refused("--dry-run", NAME)
    assert f"{NAME} has no safetensors headers; without --dry-run its .bin weights are fetched" in said
    assert "pytorch_model.bin" not in hub.fetched()
    result = machine.run(*MERGED, NAME)
    assert (result.code, result.err) == (0, ""), result
    assert run(*MERGED, source, "-o", tmp_path / "local").code == 0
    assert same_weights(machine.work / "tiny-llama-gqa2-mean", tmp_path / "local")


def test_local_directory_wins(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.repo(NAME, model(tmp_path / "remote", shards=1))
    (machine.work / NAME).mkdir(parents=True)
    assert f"{NAME} has no config.json" in machine.run(*MERGED, NAME).err
    assert "--revision is for hub ids; lab/tiny-llama is a local" in machine.run("-g2", "--revision", "main", NAME).err
    assert hub.requests == []


# The rights of the repository (None: there is none), how the command is called, and what it says.
ACCESS: list[tuple[dict[str, Any] | None, tuple[object, ...], dict[str, str], tuple[str, ...]]] = [
    (None, (), {}, (f"there is no directory {NAME}, and the hub shows no repository {NAME}: check the name",
                    "if it is private, log in with `hf auth login` or set HF_TOKEN")),
    (None, (), {"HF_TOKEN": "hf_other"}, ("the present token has no access",)),
    ({"gated": True}, (), {}, (f"{NAME} is gated: accept its terms at {{hub}}/{NAME}, then log in",)),
    ({"gated": True}, (), {"HF_TOKEN": "hf_other"}, ("(the present one has no access)",)),
    ({}, ("--revision", "sidee"), {}, (
        f"{NAME} at the hub has no revision 'sidee'; give a branch, a tag or a whole commit id", "it has main, side")),
    ({}, (), {"HF_ENDPOINT": CLOSED}, ("the hub at http://127.0.0.1:9 cannot be reached (",
                                       "check the connection, HF_ENDPOINT and the proxy")),
    ({}, (), {"HF_HUB_OFFLINE": "1"}, (
        f"{NAME} is not completely in the cache {{home}}/hub while HF_HUB_OFFLINE is set; unset it",)),
    ({}, ("--groups", 3, "--method", "mean"), {}, ("choose 1, 2, 4 or 8",)),
]  # fmt: skip


@pytest.mark.parametrize(("rights", "words", "environment", "says"), ACCESS)
def test_repository_that_cannot_be_used(
    tmp_path: Path, hub: Hub, machine: Machine, rights: Any, words: Any, environment: dict[str, str], says: Any
) -> None:
    """One line on stderr and exit code 2, and nothing is written."""
    if rights is not None:
        hub.repo(NAME, model(tmp_path / "source"), **rights).add("side", tmp_path / "source")
    said = machine.refused(*words, NAME, **environment)
    assert all(text.format(hub=hub.endpoint, home=machine.home) in said for text in says), said
    assert (hub.requests == []) == bool(environment.keys() & {"HF_ENDPOINT", "HF_HUB_OFFLINE"})
    assert hub.sent(".safetensors") < 1 << 18  # of 2.4 MB: also wrong groups are refused before weights are fetched


def shard(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """The second shard is changed."""
    return lambda source: (source / SHARDS[1]).write_bytes(change((source / SHARDS[1]).read_bytes()))


def in_index(file: str) -> Callable[[Path], object]:
    return lambda source: edit_json(source / INDEX, lambda made: made["weight_map"].update({"model.norm.weight": file}))


def only_gguf(source: Path) -> None:
    (source / INDEX).unlink()
    for name in SHARDS:
        (source / name).rename(source / f"{name}.gguf")


# What is wrong in the repository, whether a header has to be fetched to know it, and what is said.
BROKEN: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    "index climbs": (in_index("../secret.safetensors"), False,
                     f"{INDEX} says that model.norm.weight is in '../secret.safetensors'; allowed are names of"),
    "missing shard": (lambda source: (source / SHARDS[1]).unlink(), False,
                      f"{NAME} has an index that names {SHARDS[1]}, which is not there"),
    "no weights": (only_gguf, False, f"{NAME} has neither {SINGLE} nor pytorch_model.bin (nor their index);"),
    "no config": (lambda source: (source / "config.json").rename(source / "adapter_config.json"), False,
                  f"{NAME} has no config.json; give a repository with"),
    "truncated": (shard(lambda data: data[:-9]), True, "is truncated or no safetensors file: "),
    "header cut": (shard(lambda data: data[:40]), True, "is truncated or no safetensors file: "),
    "empty": (shard(lambda data: b""), True, "is truncated or no safetensors file: "),
    "header too long": (shard(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]), True,
                        "header of 9223372036854775807 bytes, at most"),
    "longer": (shard(lambda data: data + b"more"), True, "is truncated or no safetensors file: "),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, "dry") for case in BROKEN]
    + [(case, "full") for case in BROKEN if case == "truncated" or not BROKEN[case][1]],
)
def test_broken_repository(tmp_path: Path, hub: Hub, machine: Machine, case: str, mode: str) -> None:
    breaks, header, says = BROKEN[case]
    source = model(tmp_path / "source")
    breaks(source)
    hub.repo(NAME, source)
    said = machine.refused(*(["--dry-run"] if mode == "dry" else []), NAME)
    assert says in said
    assert said.startswith(f"gqa-convert: {SHARDS[1]}") == header
    assert (hub.sent(".safetensors") > 0) == header
    assert hub.sent(".gguf") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a/b/c"], "there is no directory a/b/c, and it is no hub id (owner/name)"),
        (["./tiny"], "there is no directory ./tiny, and it is no hub id"),
        (["lab/bad--name"], "'lab/bad--name' is no hub id (owner/name of letters"),
        (["--revision", "", NAME], "Invalid value for '--revision': '' is no name"),
        (["--revision", "../../x", NAME], "--revision '../../x' is not the name of"),
    ],
)
def test_what_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda socket, address: pytest.fail("the network was asked"))
    result = run(*MERGED, *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "says"), [(403, "the token may not"), (501, "the hub is in trouble")])
def test_other_answers(hub: Hub, machine: Machine, status: int, says: str) -> None:
    hub.failing["/api/models"] = status
    assert f"{status} for {NAME}: {says}" in machine.refused("--dry-run", NAME)


def test_cache_that_cannot_be_written(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    hub.repo(NAME, model(tmp_path / "source", shards=1))
    (tmp_path / "file").touch()
    said = machine.refused("--dry-run", NAME, code=1, HF_HUB_CACHE=str(tmp_path / "file/hub"))
    assert f"{tmp_path}/file/hub: Not a directory" in said
