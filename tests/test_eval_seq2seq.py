"""What `gqa-eval` says of encoder-decoders, beside transformers' own loss, caches and texts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import run
from embedded import SOURCE
from evaluations import cache_bytes, refused, results, told, with_tokenizer
from tiny_models import TINY, build
from transformers import AutoTokenizer

from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import read_checkpoint
from gqa.convert import convert_checkpoint
from gqa.convert.recast.targets import checkpoint_cache
from gqa.eval import evaluate
from gqa.eval.decode import greedy_decode

ROWS = [
    {"said": f"def f{n}(x):" + " pass" * (5 * n % 7), "meant": f"return x + {n}" + " + 1" * (n % 5)} for n in range(12)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 and BART of 4 heads, their conversions to 2 and back to 4, pairs."""
    found = tmp_path_factory.mktemp("seq2seq")
    for name in ("t5", "bart"):
        tiny = replace(TINY[f"gqa_{name}"], options={**TINY[f"gqa_{name}"].options, "vocab_size": 4096})
        source = with_tokenizer(build(tiny, 4), found / name)
        convert_checkpoint(source, 2, found / f"{name}-2", method="mean")
        convert_checkpoint(found / f"{name}-2", 4, found / f"{name}-back")
    rows = [*ROWS, {"said": "", "meant": "nothing"}, {"said": "class A:", "meant": None}]
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def line(place: Path, *names: str) -> str:
    """Models with the pairs."""
    models = " ".join(str(place / name) for name in names)
    return f"{models} --data {place / 'pairs.jsonl'} --field said --target-field meant"


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_nats_are_those_of_labels(place: Path, name: str) -> None:
    """Of transformers' own class, pair by pair, so that padding makes no difference; a mask that is left out does."""
    model, tokenizer = load_model(str(place / name)), AutoTokenizer.from_pretrained(SOURCE)
    start, nats, unmasked = model.config.decoder_start_token_id, [], []
    for row in ROWS:
        ids = tokenizer(row["meant"], add_special_tokens=False)["input_ids"]
        labels = torch.tensor([[*ids, model.config.eos_token_id]])
        given = tokenizer(row["said"], return_tensors="pt")["input_ids"]
        filled = torch.nn.functional.pad(given, (0, 3), value=model.config.pad_token_id)
        read = torch.tensor([[start, *ids]])
        for inputs, losses in ((given, nats), (filled, unmasked)):
            loss = model(input_ids=inputs, decoder_input_ids=read, labels=labels).loss
            losses.append(float(loss) * labels.numel())
    for size in (1, 5):
        found = results(line(place, name), "--batch-size", size)
        quality = found["models"][0]["quality"]
        assert (found["text"]["documents"], found["text"]["cut"]) == (len(ROWS), 0)  # a pair without a text is none
        assert quality["nats"] == pytest.approx(sum(nats), rel=1e-5)
        assert quality["nats"] != pytest.approx(sum(unmasked), rel=1e-5)
        written = sum(len(row["meant"]) for row in ROWS)
        assert quality["bits_per_byte"] == pytest.approx(sum(nats) / written / math.log(2), rel=1e-5)


def test_pairs_that_are_longer_than_the_context(place: Path) -> None:
    """Are cut to it, and then not all bytes were predicted."""
    assert results(line(place, "t5"), "--tokens", 1)["text"]["documents"] == 1
    cut = results(line(place, "t5"), "--context", 10)
    assert 0 < cut["text"]["cut"] < len(ROWS)
    assert cut["models"][0]["quality"]["bits_per_byte"] is None
    shown = told(line(place, "t5", "t5"), "--context", 10, "--kl", "-v")
    assert f"source and target texts of 10 tokens ({cut['text']['cut']} are longer and cut)" in shown


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_divergence(place: Path, name: str) -> None:
    """None from itself or a conversion whose heads are only repeated; some of one that merged them."""

    def divergences(*names: str) -> list[float]:
        found = results(line(place, *names), "--kl")["models"][1:]
        return [model["against_baseline"]["kl"]["mean"] for model in found]

    itself, merged = divergences(name, name, f"{name}-2")
    (again,) = divergences(f"{name}-2", f"{name}-back")
    assert itself == 0
    assert again < 1e-9
    assert merged > 1e-7


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_cache_bytes(place: Path, name: str) -> None:
    """By formula, and as transformers holds them."""
    both: dict[str, list[int]] = {}
    for where in (place / name, place / f"{name}-2"):
        cache, model = checkpoint_cache(read_checkpoint(where)), load_model(str(where))
        held = both[where.name] = cache_bytes(model, 9, 3)
        assert held == [3 * cache.bytes_at(9, 0), 3 * (cache.bytes_at(9) - cache.bytes_at(9, 0))]
        assert cache.bytes_at(5, 9) == 5 * cache.bytes_per_token + 9 * cache.cross_bytes_per_token
    full, half = both[name], both[f"{name}-2"]
    assert [2 * part for part in half] == full


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart-2"])
def test_greedy_tokens_are_those_of_generate(place: Path, name: str) -> None:
    model = load_model(str(place / name))
    ids = torch.randint(5, 4000, (3, 20), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    expected = model.generate(input_ids=ids, do_sample=False, num_beams=1, max_new_tokens=9)
    made = greedy_decode(model, ids, steps=8)
    assert torch.equal(made.tokens, expected[:, 1:])


def test_decoding_and_memory(place: Path) -> None:
    short = "--decode --decode-contexts 24 --decode-batches 2 --decode-steps 3"
    models = f"{place / 't5'} {place / 't5-2'}"
    first, second = results(f"{models} {short}")["models"]
    for model in (first, second):
        assert len(model["decode"]["points"]) == 1
    assert first["kv_cache"]["cross_bytes_per_token"] == 2 * second["kv_cache"]["cross_bytes_per_token"]
    shown = told(f"{models} {short}")
    assert "2 of 4 heads: KV cache 2x smaller" in shown
    assert "KV/token of source of baseline" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bart --decode --decode-contexts 60", "60 tokens and 32 steps are more than the 64 positions of bart"),
        ("t5 --recall", "--recall is for decoders, and t5 is an encoder-decoder"),
        ("t5 --data PAIRS --field said --target-field none", "has no field 'none'; it has 'meant', 'said'"),
    ],
)
def test_refused(place: Path, words: str, message: str) -> None:
    name, _, rest = words.partition(" ")
    rest = rest.replace("PAIRS", str(place / "pairs.jsonl"))
    assert message in refused(f"{place / name} {rest}")


def test_a_conversion_says_both(place: Path, tmp_path: Path) -> None:
    done = run(place / "t5", "--groups", 2, "--method", "mean", "-o", tmp_path / "out")
    assert " per token of the source" in " ".join((done.out + done.err).split())


def test_what_is_written(place: Path) -> None:
    """A model says what it says itself to the end; texts are transformers' own."""
    words = line(place, "t5", "t5", "t5-2") + " --kl --precision float32 --batch-size 5"
    first, again, merged = results(words)["models"]
    assert (first["greedy"]["whole"], first["greedy"]["texts"], again["greedy"]) == (1.0, len(ROWS), first["greedy"])
    assert merged["greedy"]["tokens"] < first["greedy"]["tokens"]
    model, tokenizer = load_model(str(place / "t5")), AutoTokenizer.from_pretrained(SOURCE)
    longest = max(len(tokenizer(row["meant"])["input_ids"]) for row in ROWS)
    expected = []
    for row in ROWS[:4]:
        given = tokenizer(row["said"], return_tensors="pt")
        (ids,) = model.generate(**given, do_sample=False, num_beams=1, max_new_tokens=longest)
        expected.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert [one["text"] for one in first["samples"]] == expected
    assert [one["prompt"] for one in first["samples"]] == [row["said"] for row in ROWS[:4]]


def test_writing_that_does_not_fit_costs_nothing_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "write", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    done = run(*line(place, "t5", "t5-2").split(), "--kl", "--json", program="gqa-eval")
    models = json.loads(done.out)["models"]
    assert (done.code, [sorted(model.keys() & {"quality", "greedy"}) for model in models]) == (1, [["quality"]] * 2)
    assert "is too small for greedy texts; give a smaller --batch-size or --context; the rest is measured" in done.err
    assert "\n\nWhat is written for the sources\nnot measured\nt5: the memory" in done.err
