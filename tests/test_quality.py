"""Floors of quality: what a conversion of the trained example may lose, and what must not change
that: one token, and the size in which a head is stored.

The floors stand somewhat above what README and docs/results.md say, because samples differ between
machines. They hold for the defaults; only calibration tokens and training steps are fewer where a
comment says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from filelock import FileLock
from support.checkpoints import edit_json, edit_tensors
from support.documents import lines
from support.embedded import SOURCE, copy_source, load, tokenizer
from support.repository import ROOT
from support.training import scratch

import gqa
from gqa.convert.methods.table import METHODS
from gqa.corpus.stdlib import stdlib_texts

WINDOWS, WINDOW = 8, 512  # of held-out text, which perplexity is measured on
TOKENS = 16_384  # of calibration text, a quarter of the default
REFINE_STEPS = 50  # a quarter of the default

# Perplexity of the converted model with 2 of 8 KV heads / base model, at most; `mean` shows that a
# floor can be missed.
MOST = {"aligned": 2.3, "calibrated": 1.22, "refined": 1.16}
LEAST_OF_MEAN = 10.0
MOST_LOST_RECALL = 0.05
# KL divergence on code, calibrated on prose / on code (1.6 and 1.8 were measured)
MOST_ON_OTHER_TEXT = 1.8


@cache
def heldout_ids() -> torch.Tensor:
    """(WINDOWS, WINDOW) tokens, the beginnings of held-out modules of Python's library."""
    texts = (text[: 8 * WINDOW] for text in stdlib_texts("heldout"))
    ids = (tokenizer()(text)["input_ids"] for text in texts)
    long_enough = (one[:WINDOW] for one in ids if len(one) >= WINDOW)
    return torch.tensor(list(islice(long_enough, WINDOWS)))


@cache
def prose_ids() -> torch.Tensor:
    """(WINDOWS, WINDOW) tokens of this project's pages: the example was not trained on prose."""
    pages = [ROOT / "docs" / f"{name}.md" for name in ("choosing", "design", "reading", "serving")]
    ids = [tokenizer()(page.read_text(encoding="utf-8"))["input_ids"] for page in pages]
    windows = [torch.tensor(one[: 2 * WINDOW]).view(2, WINDOW) for one in ids]
    return torch.cat(windows)


@cache
def heldout_nats(model: Path) -> float:
    """Mean cross-entropy of the held-out text, in nats per token."""
    ids, network = heldout_ids(), load(model)
    with torch.no_grad():
        losses = [network(input_ids=rows, labels=rows).loss for rows in ids.split(4)]
    return float(torch.stack(losses).mean())


def conversion(method: str) -> Path:
    """The example with 2 of 8 KV heads by a method, made once for all processes of a test run."""
    directory = Path(os.environ["GQA_TESTS_SHARED"]) / "quality"
    directory.mkdir(exist_ok=True)
    out = directory / method

    options = {"tokens": TOKENS} if METHODS[method].reads == "text" else {}
    if method == "refined":
        options["refine_steps"] = REFINE_STEPS
    with FileLock(directory / f"{method}.lock"):
        if not out.exists():
            gqa.convert_model(SOURCE, kv_heads=2, method=method, output=out, quiet=True, **options)
    return out


def perplexity_ratio(method: str) -> float:
    return math.exp(heldout_nats(conversion(method)) - heldout_nats(SOURCE))


def test_the_mean_of_heads_is_no_model() -> None:
    """The control: what the other methods win is there to be lost."""
    assert perplexity_ratio("mean") > LEAST_OF_MEAN


@pytest.mark.parametrize("method", MOST)
def test_a_conversion_keeps_the_perplexity(method: str) -> None:
    assert perplexity_ratio(method) < MOST[method]


@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_a_conversion_keeps_recall(method: str) -> None:
    record = json.loads((conversion(method) / "gqa_conversion.json").read_text())
    recall = record["quality"]["recall"]
    assert recall["base"] > 0.7
    assert recall["converted"] > recall["base"] - MOST_LOST_RECALL


@pytest.mark.usefixtures("alone")
def test_a_short_default_training_gains(tmp_path: Path) -> None:
    """An eighth of a default run: 256 steps of 256 tokens (0.89 of the divergence was measured).

    A quarter of these tokens gains 7% on one machine, and nothing on another.
    """
    converted = conversion("calibrated")
    out = tmp_path / "uptrained"
    gqa.uptrain_model(
        converted,
        data=str(code()),
        tokens=65_536,
        context=256,
        validation_tokens=2048,
        output=out,
        quiet=True,
    )
    assert divergence(out) < 0.93 * divergence(converted)


# --------------------------------------------------------------------------- text of another kind


def test_what_is_calibrated_on_prose_still_reads_code(tmp_path: Path) -> None:
    """Calibration on documentation loses more on code than calibration on code, but not much more.
    A weak refit of the output projection is what goes too far: a thousandth of the ridge fails.
    """
    prose = tmp_path / "prose.txt"
    prose.write_text("\n".join(text for _, text in sorted(topics.items())))

    def divergence_after(data: str) -> float:
        return divergence(calibrated_on(data, tmp_path / f"on-{Path(data).stem}"))

    assert divergence_after(str(prose)) < MOST_ON_OTHER_TEXT * divergence_after("stdlib:train")


def calibrated_on(data: str, out: Path, tokens: int = 4096) -> Path:
    """The example with 2 of 8 KV heads, calibrated on a little text."""
    gqa.convert_model(
        SOURCE,
        kv_heads=2,
        method="calibrated",
        data=data,
        tokens=tokens,
        output=out,
        check=False,
        quiet=True,
    )
    return out


def test_general_text_keeps_what_the_model_does_not_write(tmp_path: Path) -> None:
    """By default a quarter of the text is general: the example, which writes code, loses less on
    prose (0.90 was measured), and hardly more on code (1.03).
    """
    by_itself = calibrated_on("self", tmp_path / "self", TOKENS)
    by_default = conversion("calibrated")
    on_prose = divergence(by_default, prose_ids) / divergence(by_itself, prose_ids)
    on_code = divergence(by_default) / divergence(by_itself)
    assert on_prose < 0.96
    assert on_code < 1.1


@torch.no_grad()
def divergence(model: Path, text: Callable[[], torch.Tensor] = heldout_ids) -> float:
    """Mean KL divergence of a model from the example on held-out text, in nats per token."""
    converted = load(model)
    parts = []
    for rows, expected in zip(text().split(4), log_probabilities_of_example(text), strict=True):
        predicted = converted(input_ids=rows).logits.log_softmax(-1)
        terms = torch.nn.functional.kl_div(predicted, expected, log_target=True, reduction="none")
        parts.append(float(terms.sum(-1).mean()))
    return sum(parts) / len(parts)


@cache
def log_probabilities_of_example(text: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """(4, WINDOW, vocabulary) of each four windows of a text."""
    example = load(SOURCE)
    with torch.no_grad():
        return [example(input_ids=rows).logits.log_softmax(-1) for rows in text().split(4)]


# --------------------------------------------------------------- what must not change the quality


# Enough to see whom a layer is fitted to. TOKEN is not among half as many.
SHORT_TOKENS = 4096
# A few steps lose more or less with another grouping, and two may be equally good for the search
SHORT_REFINEMENT = {"refine_steps": 5, "grouping": "contiguous"}


@cache
def code() -> Path:
    """A twentieth of the built-in corpus, of which all takes a second to read and to tokenize."""
    modules = list(stdlib_texts("train"))[::20]
    return lines(scratch() / "code.jsonl", *({"text": text} for text in modules))


Tensors = dict[str, torch.Tensor]


def one_layer(change: Callable[[Tensors], None]) -> Path:
    """The first layer of the example as a model, with an output matrix of its own; its tensors are
    changed in place by `change`.
    """
    model = copy_source(scratch())
    edit_json(
        model / "config.json",
        lambda config: config | {"num_hidden_layers": 1, "tie_word_embeddings": False},
    )

    def edit(tensors: Tensors) -> Tensors:
        first = {
            name: tensor
            for name, tensor in tensors.items()
            if "layers" not in name or ".layers.0." in name
        }
        first["lm_head.weight"] = first["model.embed_tokens.weight"].clone()
        change(first)
        return first

    edit_tensors(model, edit)
    return model


def lost_nats(method: str, model: Path) -> float:
    """What the conversion of a model of one layer loses on held-out text."""
    options = SHORT_REFINEMENT if method == "refined" else {}
    result = gqa.convert_model(
        model,
        kv_heads=2,
        data=str(code()),
        tokens=SHORT_TOKENS,
        method=method,
        output=scratch() / "out",
        quiet=True,
        check=False,
        **options,
    )
    return heldout_nats(result.path) - heldout_nats(model)


@cache
def lost_nats_unchanged(method: str) -> float:
    return lost_nats(method, one_layer(lambda tensors: None))


TOKEN = 620  # " import", in 1 of 200 positions


@pytest.mark.parametrize("size", [1e-3, 1e-6, 0.0, 1e3])
@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_no_token_owns_the_fit(method: str, size: float) -> None:
    """A token with a tiny embedding, or a huge one, costs the others nothing."""

    def resize(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][TOKEN] *= size

    lost = lost_nats(method, one_layer(resize))
    assert lost == pytest.approx(lost_nats_unchanged(method), abs=0.02)


ATTENTION = "model.layers.0.self_attn"
HEAD = slice(3 * 32, 4 * 32)  # rows of the fourth of eight heads


def test_the_size_in_which_a_value_is_stored_changes_nothing() -> None:
    """A head of values times 10, and its columns of W_O over 10: the same model."""

    def rescale(tensors: Tensors) -> None:
        tensors[f"{ATTENTION}.v_proj.weight"][HEAD] *= 10
        tensors[f"{ATTENTION}.o_proj.weight"][:, HEAD] /= 10

    lost = lost_nats("calibrated", one_layer(rescale))
    assert lost == pytest.approx(lost_nats_unchanged("calibrated"), abs=2e-3)


def test_the_size_in_which_a_key_is_stored_changes_nothing() -> None:
    """A head of keys times 10, and its queries over 10: the same model."""

    def rescale(tensors: Tensors) -> None:
        tensors[f"{ATTENTION}.k_proj.weight"][HEAD] *= 10
        tensors[f"{ATTENTION}.q_proj.weight"][HEAD] /= 10

    lost = lost_nats("calibrated", one_layer(rescale))
    assert lost == pytest.approx(lost_nats_unchanged("calibrated"), abs=2e-3)
