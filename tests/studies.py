"""`gqa-ablate` on a tiny random model and a little text, run in this process."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Result, check_refused, run, snapshot
from training import BLOCK, expert_options, tiny_checkpoint, words_for, write_corpus

from gqa.corpus.sources import row_digest
from gqa.eval.study.options import AblateOptions


@cache
def place() -> Path:
    """A directory with model (4 heads), train.jsonl and heldout.jsonl."""
    torch.set_num_threads(1)  # sums in the same order
    directory = Path(tempfile.mkdtemp(prefix="gqa-ablate-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tiny_checkpoint(directory / "model", kv_heads=4)
    write_corpus(directory / "train.jsonl", 10)
    write_corpus(heldout := directory / "heldout.jsonl", 3, first=10)
    lines = heldout.read_text().splitlines(keepends=True)  # in the order in which a study reads documents
    heldout.write_text("".join(sorted(lines, key=lambda line: row_digest(json.loads(line)["text"]))))
    return directory


def words(out: Path, **options: Any) -> list[str]:
    """The command of a small study; an option that is None is left out, one that is True is a flag."""
    defaults: dict[str, Any] = {
        "model": place() / "model", "data": place() / "train.jsonl", "heldout": place() / "heldout.jsonl",
        "methods": "mean,first", "groups": "1", "alphas": "0,0.1,0.3", "batch_size": 4, "context": BLOCK,
        "learning_rate": 3e-3, "skip": "kl", "teacher": "none", "train": "all",
    }  # fmt: skip
    options = defaults | options
    return words_for(options.pop("model"), options.pop("data"), out, **options)


def ablate(out: Path, **options: Any) -> Result:
    with expert_options(options, AblateOptions) as rest:
        return gqa_ablate(*words(out, **rest))


def gqa_ablate(*words: object) -> Result:
    """`gqa-ablate WORDS` without pictures, which take longer than the measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gqa.eval.study.report.no_pictures", lambda: "no pictures")
        return run(*words, program="gqa-ablate")


def measured(out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a study that must succeed."""
    result = ablate(out, **options)
    assert (result.code, result.err) == (0, ""), result
    return rows(out)


def refused(out: Path, *messages: str, **options: Any) -> None:
    """A study that must be refused, with nothing written."""
    before = snapshot(out.parent)
    check_refused(ablate(out, **options), *messages, program="gqa-ablate", advice="")
    assert snapshot(out.parent) == before


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@cache
def study() -> Path:
    """A finished study: 2 methods, 1 and 4 heads, 3 alphas."""
    out = place() / "study"
    measured(out, groups="1,4")
    return out
