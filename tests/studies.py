"""`gqa-ablate` on a tiny random model and a little text, run in this process, and rows made by hand."""

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
from checkpoints import Result, run
from training import BLOCK, expert_options, tiny_checkpoint, write_corpus

from gqa.corpus.sources import row_digest
from gqa.eval.study.study import AblateOptions, Cell

# What depends on the machine or on when it was measured.
TIMED = ("seconds_converting", "seconds_training", "seconds_evaluating")
# Of `study()`: what the command that made it says beside the defaults of `words`.
SAME: dict[str, Any] = {"groups": "1,4", "skip": "kl"}
# How gqa-uptrain trains what `words` trains.
PLAINLY: dict[str, Any] = {"teacher": "none", "train": "all", "learning_rate": 3e-3}


@cache
def place() -> Path:
    """Made once and left as it is: model (4 heads), train.jsonl and heldout.jsonl."""
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
    given: dict[str, Any] = {
        "data": place() / "train.jsonl", "heldout": place() / "heldout.jsonl", "methods": "mean,first", "groups": "1",
        "alphas": "0,0.1,0.3", "batch_size": 4, "context": BLOCK, "learning_rate": 3e-3, "skip": "kl,decode",
        "teachers": "none", "train": "all",
        "output": out, "quiet": True,
    }  # fmt: skip
    found = [str(options.pop("model", place() / "model"))]
    for name, value in (given | options).items():
        option = f"--{name.replace('_', '-')}"
        found += [option] if value is True else [] if value is None else [option, str(value)]
    return found


def ablate(out: Path, pictures: bool = False, **options: Any) -> Result:
    with expert_options(options, AblateOptions) as rest:
        return gqa_ablate(*words(out, **rest), pictures=pictures)


def gqa_ablate(*words: object, pictures: bool = False) -> Result:
    """`gqa-ablate WORDS`, without pictures, which take longer than what is measured, unless somebody looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:
            patch.setattr("gqa.eval.study.report.no_pictures", lambda: "no pictures")
        return run(*words, program="gqa-ablate")


def measured(out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a study that must succeed."""
    result = ablate(out, **options)
    assert (result.code, result.err) == (0, ""), result
    return rows(out)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def untimed(out: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the machine or the command."""
    known = (*TIMED, "environment", "options")
    return [{k: v for k, v in row.items() if k not in known and "decode" not in k} for row in rows(out)]


def copied(directory: Path) -> Path:
    """A finished study that may be changed."""
    return Path(shutil.copytree(study(), directory / "study"))


@cache
def study() -> Path:
    """A finished study, left as it is: 2 methods, 1 seed of each, 1 and 4 heads, 3 alphas."""
    out = place() / "study"
    measured(out, pictures=True, **SAME)
    return out


def row(method: str, groups: int, alpha: float, loss: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A measured row, above a source of 2 nats and 4 heads of 100 bytes."""
    cell = Cell(method, groups, seed, "all", "none", alpha)
    found = {"loss": loss, "loss_increase": loss - 2.0, "kv_bytes_per_token": 100 * groups, "error": None}
    shared = {"options": {"model": "org/name"}, "environment": {}}
    return {**cell._asdict(), **found, "train_tokens": int(1000 * alpha), **shared, **more}
