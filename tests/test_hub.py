"""Hub ids against a stand-in hub on this machine: what is fetched, what is recorded,
what is said.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    INDEX,
    MERGED,
    SINGLE,
    Result,
    check_refused,
    contents,
    llama,
    load,
    read_header,
    run,
    snapshot,
    weights,
    write_raw,
)
from support.hub_server import Hub, Machine
from support.patches import forbid_network

from gqa.checkpoint.hub import default_output, open_model

NAME, OUT = "lab/tiny-llama", "tiny-llama-gqa2-mean"
FIRST_BYTES = 2**16  # of a shard, all that a dry run may fetch
SHARDS = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]


def model(directory: Path, shards: int = 2, seed: int = 0) -> Path:
    """A checkpoint whose shards are far larger than their headers."""
    tensors = weights(width=256, seed=seed)
    return llama(directory, shards=shards, tensors=tensors, hidden_size=256, intermediate_size=128)


def record(directory: Path) -> Any:
    return json.loads((directory / "gqa_conversion.json").read_text())


def plan(result: Result) -> dict[str, Any]:
    """The plan that --json printed; a line of JSON is all that is on stdout."""
    assert result.code == 0, result
    assert result.out.count("\n") == 1
    return dict(json.loads(result.out))


def test_hub_id_end_to_end(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n", encoding="utf-8")
    assert run(*MERGED, source, "-o", tmp_path / "local").code == 0
    needed = {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_mine.py",
    }
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "tiny.Q4_K.gguf",
        "onnx/model.onnx",
        "onnx/config.json",
        "original/params.json",
        "tf_model.h5",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"never to be fetched" * 1000)
    commit = hub.repo(NAME, model(tmp_path / "main", shards=1, seed=1)).add("side", source)
    words = (*MERGED, "--revision", "side", NAME)
    result = machine.run(*words)
    result.expect(complaints="")
    out = machine.work / OUT
    assert [p.name for p in machine.work.iterdir()] == [out.name]
    assert hub.fetched() == {*needed, "assets/nested/vocab.txt", "README.md", INDEX, *SHARDS}
    assert contents(out) == contents(tmp_path / "local")
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert record(out)["source"] == {"model": NAME, "revision": commit}
    card = (out / "README.md").read_text()
    assert f"base_model: {NAME}\n" in card
    assert "license: mit\n" in card
    # A conversion only reads the cache; again, it needs nothing but the commit's name; offline not
    # even that.
    before, weights_sent = snapshot(machine.home), hub.sent(".safetensors")
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        again = machine.run(*words, "--overwrite", **environment)
        again.expect(complaints="")
        assert snapshot(machine.home) == before
        assert hub.sent(".safetensors") == weights_sent
        assert contents(out) == contents(tmp_path / "local")
        assert record(out)["source"] == {"model": NAME, "revision": commit}


def test_a_path_in_the_cache_is_the_repository(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    """Nothing is written into the cache, where pruning would delete it, and nothing is called by a
    commit.
    """
    commit = hub.repo(NAME, model(tmp_path / "source")).refs["main"]
    assert machine.run(*MERGED, "-o", "by-name", NAME).code == 0
    cached, before = (
        machine.home / f"hub/models--lab--tiny-llama/snapshots/{commit}",
        snapshot(machine.home),
    )
    assert machine.run(*MERGED, cached).code == 0
    assert sorted(path.name for path in machine.work.iterdir()) == ["by-name", OUT]
    assert record(machine.work / OUT)["source"] == {"model": NAME, "revision": commit}
    assert contents(machine.work / OUT) == contents(machine.work / "by-name")
    with machine.entered():
        assert default_output(str(cached), "-uptrained") == Path("tiny-llama-uptrained")
        assert open_model(str(cached)).name == "tiny-llama"
    assert snapshot(machine.home) == before


@pytest.mark.parametrize(("shards", "padding"), [(1, 90_000), (2, 0)])
def test_dry_run_fetches_headers_only(
    tmp_path: Path, hub: Hub, machine: Machine, shards: int, padding: int
) -> None:
    """Also of headers longer than what is fetched at first: spaces may follow them."""
    source, sizes = model(tmp_path / "source", shards=shards), {}
    for path in source.glob("*.safetensors"):
        header, data = read_header(path)
        text = json.dumps(header).encode() + b" " * padding
        write_raw(path, text, data)
        sizes[path.name] = 8 + len(text)
    commit = hub.repo(NAME, source).add("side", source)
    ours = plan(machine.run(*MERGED, "--dry-run", "--json", "--revision", "side", NAME))
    theirs = plan(run(*MERGED, "--dry-run", "--json", source))
    assert ours.pop("model") == NAME
    assert ours.pop("revision") == commit
    assert theirs.pop("model") == "source"
    assert theirs.pop("revision") is None
    for name in ("output", "free_bytes"):
        assert ours.pop(name)
        assert theirs.pop(name)
    # How fast this device is just now
    assert ours.pop("estimates").keys() == theirs.pop("estimates").keys()
    assert ours == theirs
    for name, size in sizes.items():
        assert (
            min(size, FIRST_BYTES)
            < hub.sent(f"/resolve/{commit}/{name}")
            <= 8 + FIRST_BYTES + size * 2
        )
        assert (source / name).stat().st_size > 10 * FIRST_BYTES
    assert not list(machine.home.rglob("snapshots/*/*.safetensors"))
    assert list(machine.work.iterdir()) == []
    assert "unset the `HF_HUB_OFFLINE`" in machine.refused(
        *MERGED, "--revision", commit, NAME, HF_HUB_OFFLINE="1"
    )
    # Before weights are fetched to measure layers
    refused = machine.refused("--kv-budget", "0.1", NAME)
    assert "--kv-budget 0.1 is not possible" in refused
    assert not list(machine.home.rglob("snapshots/*/*.safetensors"))


def test_a_hub_that_is_out_of_order_leaves_what_is_in_the_cache(
    tmp_path: Path, hub: Hub, machine: Machine
) -> None:
    hub.repo(NAME, model(tmp_path / "source"))
    machine.run(*MERGED, NAME, "-o", "before").expect()
    hub.failure = 503
    machine.run(*MERGED, NAME, "-o", "after").expect()
    assert contents(machine.work / "after") == contents(machine.work / "before")


def test_bin_weights(tmp_path: Path, hub: Hub, machine: Machine) -> None:
    source = model(tmp_path / "source", shards=1)
    torch.save(load(source), source / "pytorch_model.bin")
    (source / SINGLE).unlink()
    hub.repo(NAME, source)
    for words in (["--dry-run"], []):
        result = machine.run(*MERGED, *words, NAME)
        result.expect(complaints="")
    assert run(*MERGED, source, "-o", tmp_path / "local").code == 0
    assert contents(machine.work / OUT) == contents(tmp_path / "local")


# How the hub answers (None: it has no such repository), how the command is called, and what it
# says.
ACCESS: list[tuple[dict[str, Any] | None, tuple[object, ...], dict[str, str], str]] = [
    (
        None,
        (),
        {},
        f"there is no directory {NAME!r}, and huggingface_hub says: 401 Client Error. Repository "
        "Not Found",
    ),
    (
        {"gated": True},
        (),
        {"HF_TOKEN": "hf_other"},
        "403 Client Error. Cannot access gated repo for url",
    ),
    ({}, ("--revision", "no"), {}, "404 Client Error. Revision Not Found for url: "),
    ({}, (), {"HF_ENDPOINT": "http://no.test"}, "the hub at http://no.test cannot be reached ("),
    ({}, (), {"HF_HUB_OFFLINE": "1"}, f"Cannot reach {Hub.endpoint}/"),
    ({"failure": 501}, (), {}, "501 Not Implemented"),
    ({}, ("--kv-heads", 3), {}, "pass 1, 2 or 8"),
]


@pytest.mark.parametrize(("answers", "words", "environment", "says"), ACCESS)
def test_repository_that_cannot_be_used(
    tmp_path: Path,
    hub: Hub,
    machine: Machine,
    answers: Any,
    words: Any,
    environment: dict[str, str],
    says: str,
) -> None:
    """One line on stderr and exit code 2, and nothing is written."""
    if answers is not None:
        hub.failure = answers.get("failure", 0)
        hub.repo(NAME, model(tmp_path / "source"), answers.get("gated", False))
    assert says in machine.refused(*MERGED, *words, NAME, **environment)
    assert (hub.requests == []) == bool(environment.keys() & {"HF_ENDPOINT", "HF_HUB_OFFLINE"})
    # Of 2.4 MB: also wrong groups are refused before weights are fetched
    assert hub.sent(".safetensors") < 1 << 18


def shard(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """The second shard is changed."""
    return lambda source: (source / SHARDS[1]).write_bytes(
        change((source / SHARDS[1]).read_bytes())
    )


TRUNCATED = f"gqa-convert: {SHARDS[1]} is truncated or not a safetensors file: "


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (
            lambda source: (source / INDEX).rename(source / "x.gguf"),
            f"has neither {SINGLE} nor pytorch_model.bin, nor an index of one of them; its "
            f"weights: {SHARDS[0]}, ",
        ),
        (shard(lambda data: data[:-9]), TRUNCATED),
        (shard(lambda data: b"\xff" * 7 + b"\x7f" + data[8:]), TRUNCATED),
    ],
    ids=["no weights", "truncated", "header too long"],
)
def test_broken_repository(
    tmp_path: Path, hub: Hub, machine: Machine, breaks: Callable[[Path], object], says: str
) -> None:
    """Without an index, nothing of any weights is fetched."""
    breaks(source := model(tmp_path / "source"))
    hub.repo(NAME, source)
    for words in (["--dry-run"], []):
        assert says in machine.refused(*MERGED, *words, NAME)
        assert (hub.sent(".safetensors") > 0) == (source / INDEX).exists()
    assert hub.sent(".gguf") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (
                [path],
                f"there is no directory {path!r}; pass a directory with config.json, or a model id "
                "(owner/name)\n",
            )
            for path in ("a/b/c", "./Llama-2-7b-hf", "../lab", "/lab", "labs/")
        ),
        (
            ["lab/bad--name"],
            "'lab/bad--name', and it is not a model id (owner/name): Cannot have -- or .. in "
            "repo_id",
        ),
        (["--revision", "", NAME], "--revision '' is not a name"),
        (["lab/here"], "lab/here has no config.json"),
        (
            ["--revision", "main", "lab/here"],
            "--revision is for model ids, but lab/here is a local path; remove --revision",
        ),
    ],
)
def test_what_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    """A directory of the same name wins."""
    (tmp_path / "lab/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    forbid_network(monkeypatch)
    result = run(*MERGED, *words)
    result.expect(2, out="", err_lines=1)
    assert said in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]


@pytest.mark.parametrize(
    "word",
    [
        "models/lama-mha",
        "./models/lama-mha",
        "ABSOLUTE/models/lama-mha",
        "model/llama-mha",
        "modles/lama-mha",
    ],
)
def test_a_mistyped_path_names_the_checkpoint_that_is_nearly_there(
    machine: Machine, word: str
) -> None:
    """Before the network is spoken of."""
    llama(machine.work / "models/llama-mha", side_files=False)
    (machine.work / "models/lama-mhas").mkdir()  # no checkpoint
    path = word.replace("ABSOLUTE", str(machine.work))
    meant = "models/llama-mha"
    if "ABSOLUTE" in word:
        meant = str(machine.work / meant)
    done = machine.run(*MERGED, path, HF_HUB_OFFLINE="1")
    check_refused(done, f"there is no directory {path!r} (did you mean {meant}?)", advice="")


@pytest.mark.parametrize("name", ["lab/llama-gqa2-refined", "llama-gqa1-mean", "stdlib-gqa2"])
def test_a_missing_result_names_the_command_that_writes_it(machine: Machine, name: str) -> None:
    done = machine.run(*MERGED, name, HF_HUB_OFFLINE="1")
    hint = "(it has the name of a result: if it is yours, run gqa-convert first)"
    check_refused(done, f"there is no directory {name!r} {hint}, and ", advice="")


def test_the_result_of_a_training_that_was_stopped_is_said_to_be_unfinished(
    machine: Machine,
) -> None:
    (machine.work / "trained-state").mkdir()
    done = machine.run(*MERGED, "./trained", HF_HUB_OFFLINE="1")
    hint = "(its training has not finished: repeat the gqa-uptrain command)"
    check_refused(done, f"there is no directory './trained' {hint}; pass", advice="")


def test_a_name_like_no_directory_is_a_hub_id(machine: Machine) -> None:
    llama(machine.work / "lab/llama-mha", side_files=False)
    done = machine.run(*MERGED, "lab/pythia", HF_HUB_OFFLINE="1")
    check_refused(done, "there is no directory 'lab/pythia', and huggingface_hub says", advice="")
