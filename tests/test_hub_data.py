"""Data sets of the hub, against a stand-in on this machine: what is read, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import lines
from hub_server import Hub, Machine

from gqa.corpus.sources import parse_source


def read(spec: str, options: dict[str, Any]) -> object:
    """The texts, or what was refused."""
    try:
        return list(parse_source(spec, **options).texts())
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def data_set(directory: Path) -> Path:
    """Two configurations, the first with two splits."""
    for name in ("a/train", "a/test", "b/train"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        lines(directory / f"{name}.jsonl", {"text": f"{name} 1", "n": 1}, {"text": f"{name} 2", "n": 2})
    (directory / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: train, path: a/train.jsonl}\n"
        "  - {split: test, path: a/test.jsonl}\n- config_name: b\n  data_files: b/train.jsonl\n---\n"
    )
    return directory


def starts(result: object, answer: object) -> bool:
    """Whether texts are equal, or a message begins as the answer does."""
    return result == answer or (isinstance(result, str) and isinstance(answer, str) and result.startswith(answer))


def test_hub(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing but what is raised is said."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    hub.repo("lab/data", data_set(tmp_path / "data"), token="hf_secret")
    hub.repo("lab/gated", data_set(tmp_path / "gated"), gated=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/train.parquet").write_bytes(b"PAR1 and no more")
    hub.repo("lab/broken", tmp_path / "broken")
    choose = "; write lab/data:CONFIG or lab/data:CONFIG:SPLIT"
    cannot = "CorpusError: the data set lab/data cannot be loaded: "
    missing = cannot + "Config name is missing. Please pick one among the available configs: ['a', 'b']"
    no_file = "CorpusError: there is no file or directory lab/"
    said: list[tuple[str, dict[str, object], object]] = [
        ("lab/data:a", {}, ["a/train 1", "a/train 2"]),
        ("lab/data:a:test", {}, ["a/test 1", "a/test 2"]),
        ("lab/data:a", {"split": "test"}, ["a/test 1", "a/test 2"]),
        ("lab/data:b", {"streaming": True}, ["b/train 1", "b/train 2"]),
        ("lab/data", {}, missing + choose),
        ("lab/data:c", {}, cannot + "BuilderConfig 'c' not found. Available: ['a', 'b']" + choose),
        ("lab/data:a:x", {}, cannot + "Unknown split \"x\". Should be one of ['train', 'test']" + choose),
        ("lab/data:a:x", {"streaming": True}, cannot + "Bad split: x. Available splits: ['train', 'test']" + choose),
        ("lab/data:a", {"field": "body"}, "CorpusError: lab/data:a has no field 'body'; it has 'n', 'text'"),
        ("lab/none", {}, no_file + "none, and huggingface_hub says: 404 Client Error. Repository Not Found for url: "),
        ("lab/gated", {}, "CorpusError: the data set lab/gated cannot be loaded: Dataset 'lab/gated' is a gated"),
        ("lab/broken", {}, "CorpusError: the data set lab/broken cannot be loaded: Parquet magic bytes not found in "
         "footer. Either the file is corrupted or this is not a parquet file"),
    ]  # fmt: skip
    with machine.entered(HF_TOKEN="hf_secret"):
        for spec, options, answer in said:
            assert starts(read(spec, options), answer)

    requests = len(hub.requests)
    offline: list[tuple[str, dict[str, object], object]] = [
        ("lab/data:a:test", {}, ["a/test 1", "a/test 2"]),
        ("lab/none", {}, "CorpusError: the data set lab/none cannot be loaded: Couldn't reach 'lab/none' on the Hub"),
    ]  # fmt: skip
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with machine.entered(HF_HUB_OFFLINE="1"):
        for spec, options, answer in offline:
            assert starts(read(spec, options), answer)
    assert len(hub.requests) == requests
    assert capfd.readouterr() == ("", "")
