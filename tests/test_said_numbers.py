"""What gqa-uptrain says and records is what was done: the measure that chooses, tokens, and options
left open.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import run
from support.documents import open_data, write
from support.embedded import texts
from support.evaluations import results
from support.patches import use_validation_losses
from support.training import material, options_for, tiny_checkpoint, trained, words_for

from gqa.convert.api import convert_checkpoint
from gqa.corpus.blocks import is_plain
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.text_data import percent

pytestmark = pytest.mark.usefixtures("alone")


def uptrain(out: Path, **options: Any) -> tuple[str, dict[str, Any], str]:
    """The output of the command, its record and the model card."""
    given = {"teacher": material() / "teacher", "steps": 4, "quiet": False} | options
    done = run(
        *words_for(material() / "model", material() / "data.jsonl", out, **given),
        program="gqa-uptrain",
    )
    assert done.code == 0, done.err
    record = json.loads((out / "gqa_uptraining.json").read_text())
    return done.said, record, " ".join((out / "README.md").read_text().split())


# ------------------------------------------------------------------------- the measure that chooses


def test_with_a_teacher_the_divergence_chooses_and_both_losses_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cross-entropy may rise meanwhile."""
    losses = (
        {
            "kl": 0.5 - number / 10,
            "cross_entropy": 8.3 + number / 10,
        }
        for number in count()
    )
    use_validation_losses(monkeypatch, losses)
    said, record, card = uptrain(tmp_path / "out")
    assert "the weights with the lowest KL divergence from the teacher on them are written" in said
    assert (
        "validation  KL divergence from the teacher 0.5000 -> 0.1000 nats per token (lowest: step "
        "4)" in said
    )
    assert (
        "cross-entropy 8.3000 -> 8.7000 nats per token (for information: the KL divergence chooses "
        "the step)" in said
    )
    assert record["losses"]["chosen_by"] == "distillation"
    assert "| KL divergence from the teacher | 0.5000 | 0.1000 |" in card
    assert "| cross-entropy | 8.3000 | 8.7000 |" in card
    assert (
        "The weights are those of the step with the lowest KL divergence from the teacher." in card
    )


def test_without_a_teacher_the_cross_entropy_chooses(tmp_path: Path) -> None:
    said, record, card = uptrain(tmp_path / "out", teacher="none")
    assert "the weights with the lowest cross-entropy on them are written" in said
    before, after = (record["losses"][f"validation_{when}"] for when in ("before", "after"))
    assert (
        f"validation  cross-entropy {before:.4f} -> {after:.4f} nats per token (lowest: step"
        in said
    )
    assert "divergence" not in said + card
    assert record["losses"]["chosen_by"] == "validation"


# ------------------------------------------------------------------------------------ alpha, tokens


def loader_of(tokenizer: Any, path: Path, **options: Any) -> Dataloader:
    given = {"validation_tokens": 1, "repeats": False} | options
    return open_data(UptrainOptions("m", Path("o"), data=(str(path),), **given), tokenizer, 64)


def positions(loader: Dataloader) -> set[int]:
    """Which tokens of the data, by their places in reading order,
    are trained on in blocks of text.
    """
    blocks = loader.steps * loader.options.blocks_per_step
    stored = {
        tuple(loader.blocks[number]["input_ids"].tolist()): number
        for number in range(len(loader.blocks))
    }
    read = (
        stored.get(tuple(loader.block(number)["input_ids"].tolist())) for number in range(blocks)
    )
    return {64 * number + token for number in read if number is not None for token in range(64)}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(("alpha", "batch"), [(0.1, 1), (0.3, 25), (0.5, 8), (1.0, 3)])
def test_the_tokens_that_are_said_are_those_trained_on(
    tokenizer: Any, tmp_path: Path, alpha: float, batch: int, repeats: bool
) -> None:
    """Distinct ones of the data: whole batches, repeats not counted.

    With repeats too, alpha is a share of the data.
    """
    path = write(tmp_path / "data.jsonl", texts(60, 1200))
    loader = loader_of(tokenizer, path, alpha=alpha, batch_size=batch, repeats=repeats)
    trained_on = positions(loader)
    assert loader.distinct_tokens == len(trained_on)
    total = loader.data_tokens or 0
    shown = f"{len(trained_on):,} of {total:,} tokens ({percent(len(trained_on), total)})"
    assert loader.summary.startswith(shown)
    in_all = 64 * batch * loader.steps
    assert loader.tokens_until(loader.steps) == in_all
    assert ("repeated passages" in loader.summary) == repeats
    # As much as fits into alpha in whole steps.
    of_a_step = 64 * batch
    assert alpha * total - of_a_step - 64 < len(trained_on) <= alpha * total
    assert in_all == pytest.approx((2 if repeats else 1) * len(trained_on), abs=2 * 64)


def test_text_that_is_read_several_times_is_counted_once(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", texts(20, 400))
    total = loader_of(tokenizer, path, alpha=1.0, batch_size=1).data_tokens
    loader = loader_of(tokenizer, path, steps=200, batch_size=1)
    assert loader.distinct_tokens == total
    assert loader.data_tokens == total
    assert (
        f"{total:,} of {total:,} tokens (100%), in 200 blocks of 64, read {200 * 64 / total:.2f} "
        "times" in (loader.summary)
    )


def test_blocks_with_repeats_take_passages_of_text_before_them(
    tokenizer: Any, tmp_path: Path
) -> None:
    loader = loader_of(
        tokenizer,
        write(tmp_path / "data.jsonl", texts(60, 1200)),
        steps=64,
        batch_size=1,
        repeats=True,
    )
    plain = [loader.block(number)["input_ids"] for number in range(64)]
    repeated = np.flatnonzero(~is_plain(np.arange(64))).tolist()
    assert repeated
    for number in repeated:
        before = np.concatenate([plain[n] for n in range(number) if is_plain(n)])
        assert np.isin(plain[number], before).all()


def test_output_record_and_card_state_distinct_tokens_and_all(tmp_path: Path) -> None:
    said, record, card = uptrain(tmp_path / "out", steps=None, alpha=0.5, batch_size=2)
    distinct, total, in_all = (
        record[name] for name in ("distinct_tokens", "data_tokens", "tokens")
    )
    assert f"data.jsonl: {distinct:,} of {total:,} tokens ({percent(distinct, total)})" in " ".join(
        said.split()
    )
    assert f"{in_all:,} tokens in all, with repeated passages" in " ".join(said.split())
    assert distinct < in_all
    assert f"(`gqa-uptrain`): {in_all:,} tokens of " in card
    share = f"(alpha 0.5, {distinct:,} of the {total:,} tokens of the data, with repeated passages)"
    assert share in card


def test_percentages_are_whole_only_of_all() -> None:
    assert [percent(part, 100_000) for part in (5, 4910, 99_999, 100_000)] == [
        "0.005%",
        "4.91%",
        "99.9%",
        "100%",
    ]


# -------------------------------------------------------------------------------- options left open


def test_a_record_of_training_has_what_was_chosen(tmp_path: Path) -> None:
    options = options_for(
        material() / "model", tmp_path / "out", teacher="none", validation_tokens=64
    )
    assert options.micro_batch is None
    assert options.warmup is None
    assert options.device is None
    _, record = trained(options)
    chosen = record["options"]
    assert chosen["micro_batch"] == 2
    assert chosen["warmup"] == 0
    assert chosen["eval_every"] is None  # as given: only then a run evaluates early
    assert chosen["device"] == "cpu"
    assert chosen["seed"] == 0
    assert chosen["precision"] == "float32"
    assert chosen["repeats"] is False


def test_a_record_of_generated_text_says_whether_it_repeats(tmp_path: Path) -> None:
    for data, expected in (("self", True), ("self:plain", False)):
        options = options_for(
            material() / "model",
            tmp_path / "out",
            data=(data,),
            teacher=str(material() / "teacher"),
        )
        _, record = trained(replace(options, overwrite=True, validation_tokens=64))
        assert record["options"]["repeats"] is expected


@pytest.mark.parametrize(
    ("how", "seed"),
    [
        ({"method": "mean", "kv_heads": 2}, None),
        ({"method": "random", "kv_heads": 2, "seed": 3}, 3),
        ({"method": "mean", "kv_budget": 0.75, "seed": 3, "tokens": 2048, "context": 64}, 3),
    ],
)
def test_a_record_of_a_conversion_has_the_seed_that_was_used(
    tmp_path: Path, how: dict[str, Any], seed: int | None
) -> None:
    """With a KV budget text is drawn to measure layers, though the method draws nothing."""
    import gqa

    source = tiny_checkpoint(tmp_path / "source", kv_heads=4)
    record = gqa.convert_model(source, **how, output=tmp_path / "out").record
    assert record["options"]["seed"] == seed
    assert record["options"]["output"] == "out"


def test_a_record_of_a_conversion_has_its_default_output_and_device(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", kv_heads=4)
    done = run(str(source), "-g", "2", "--method", "aligned", "-q", "--device", "cpu")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "source-gqa2-aligned" / "gqa_conversion.json").read_text())
    assert record["options"]["output"] == "source-gqa2-aligned"
    assert record["options"]["device"] == "cpu"
    assert (
        convert_checkpoint(source, 2, tmp_path / "x", method="mean").record["options"]["device"]
        is None
    )


def test_a_record_of_an_evaluation_has_what_was_chosen() -> None:
    options = results("SRC --data TEXT --tokens 600 --precision float32")["options"]
    assert options["context"] == 512
    assert options["recall"] is False
    assert re.fullmatch("cpu|cuda.*|mps", options["device"])
