"""Evaluation of encoder-decoders against transformers' own loss, caches and texts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import run
from support.embedded import SOURCE
from support.evaluations import results, same_model, with_tokenizer, words
from support.tiny_models import TINY, build
from transformers import AutoTokenizer

from gqa.convert.api import convert_checkpoint
from gqa.eval.decode import greedy_decode
from gqa.models.loading import load_model

ROWS = [
    {"said": f"def f{n}(x):" + " pass" * (5 * n % 7), "meant": f"return x + {n}" + " + 1" * (n % 5)}
    for n in range(12)
]
T5_AND_BART = pytest.mark.parametrize("name", ["t5", "bart"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 and BART of 4 heads, their conversions to 2 and back to 4, pairs."""
    directory = tmp_path_factory.mktemp("seq2seq")
    for name in ("t5", "bart"):
        tiny = replace(
            TINY[f"gqa_{name}"], options={**TINY[f"gqa_{name}"].options, "vocab_size": 4096}
        )
        source = with_tokenizer(build(tiny, 4), directory / name)
        convert_checkpoint(source, 2, directory / f"{name}-2", method="mean")
        convert_checkpoint(directory / f"{name}-2", 4, directory / f"{name}-back")
    rows = [*ROWS, {"said": "", "meant": "nothing"}, {"said": "class A:", "meant": None}]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def line(place: Path, *names: str) -> str:
    """Models with the pairs."""
    models = " ".join(str(place / name) for name in names)
    return f"{models} --data {place / 'pairs.jsonl'} --text-column said --target-column meant"


@torch.no_grad()
@T5_AND_BART
def test_nats_are_those_of_labels(place: Path, name: str) -> None:
    """Of transformers' own class, pair by pair, so that padding makes no difference; a mask that is
    left out does.
    """
    model, tokenizer = load_model(str(place / name)), AutoTokenizer.from_pretrained(SOURCE)
    start, nats, unmasked = model.config.decoder_start_token_id, 0.0, 0.0
    for row in ROWS:
        ids = tokenizer(row["meant"], add_special_tokens=False)["input_ids"]
        labels = torch.tensor([[*ids, model.config.eos_token_id]])
        source = tokenizer(row["said"], return_tensors="pt")["input_ids"]
        padded = torch.nn.functional.pad(source, (0, 3), value=model.config.pad_token_id)
        inputs = {"decoder_input_ids": torch.tensor([[start, *ids]]), "labels": labels}
        nats += float(model(input_ids=source, **inputs).loss) * labels.numel()
        unmasked += float(model(input_ids=padded, **inputs).loss) * labels.numel()
    for size in (1, 5):
        record = results(line(place, name), "--batch-size", size)
        quality = record["models"][0]["quality"]
        # A pair needs both texts
        assert record["text"]["documents"] == len(ROWS)
        assert record["text"]["cut"] == 0
        assert quality["nats"] == pytest.approx(nats, rel=1e-5)
        assert quality["nats"] != pytest.approx(unmasked, rel=1e-5)
        target_bytes = sum(len(row["meant"]) for row in ROWS)
        assert quality["bits_per_byte"] == pytest.approx(
            nats / target_bytes / math.log(2), rel=1e-5
        )


def test_pairs_that_are_longer_than_the_context(place: Path) -> None:
    """They are cut to it, so that not all bytes are predicted."""
    assert results(line(place, "t5"), "--tokens", 1)["text"]["documents"] == 1
    cut = results(line(place, "t5"), "--context", 10)
    assert 0 < cut["text"]["cut"] < len(ROWS)
    assert cut["models"][0]["quality"]["bits_per_byte"] is None
    done = run(*words(line(place, "t5", "t5")), "--context", 10, "--kl", "-v", program="gqa-eval")
    done.expect(err=same_model("t5"))
    shown = " ".join(done.out.split())
    assert (
        f"sources and targets have at most 10 tokens, to which {cut['text']['cut']} were cut"
        in shown
    )


@T5_AND_BART
def test_divergence(place: Path, name: str) -> None:
    """None from itself or a conversion whose heads are only repeated;
    some of one that merged them.
    """

    def divergences(*names: str, err: str = "") -> list[float]:
        models = results(line(place, *names), "--kl", err=err)["models"][1:]
        return [model["against_baseline"]["kl"]["mean"] for model in models]

    itself, merged = divergences(name, name, f"{name}-2", err=same_model(name))
    (repeated,) = divergences(f"{name}-2", f"{name}-back")
    assert itself == 0
    assert repeated < 1e-9
    assert merged > 1e-7


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart-2"])
def test_greedy_tokens_are_those_of_generate(place: Path, name: str) -> None:
    model = load_model(str(place / name))
    ids = torch.randint(5, 4000, (3, 20), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    expected = model.generate(input_ids=ids, do_sample=False, num_beams=1, max_new_tokens=9)
    assert torch.equal(greedy_decode(model, ids, steps=8)[0], expected[:, 1:])
