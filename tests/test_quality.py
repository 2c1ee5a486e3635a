"""Floors of quality: what a conversion of the trained example may lose, and what one token may
change of that.

The floors stand somewhat above what README and docs/results.md say, because samples differ between
machines. They hold for the defaults; only the number of calibration tokens is smaller where a
comment says so.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.checkpoints import edit_json, edit_tensors
from support.embedded import SOURCE, copy_source, load, tokenizer
from support.training import scratch

import gqa
from gqa.convert.methods.table import METHODS
from gqa.corpus.stdlib import stdlib_texts

WINDOWS, WINDOW = 24, 512  # of held-out text, which perplexity is measured on
TOKENS = 16_384  # of calibration text, a quarter of the default

# Perplexity of the converted model with 2 of 8 KV heads / base model, at most; `mean` shows that a
# floor can be missed.
MOST = {"aligned": 2.3, "calibrated": 1.22}
LEAST_OF_MEAN = 10.0
MOST_LOST_RECALL = 0.05


@cache
def heldout_ids() -> torch.Tensor:
    """(WINDOWS, WINDOW) tokens, the beginnings of held-out modules of Python's library."""
    texts = (text[: 8 * WINDOW] for text in stdlib_texts("heldout"))
    ids = (tokenizer()(text)["input_ids"] for text in texts)
    long_enough = (one[:WINDOW] for one in ids if len(one) >= WINDOW)
    return torch.tensor(list(islice(long_enough, WINDOWS)))


@cache
def heldout_nats(model: Path) -> float:
    """Mean cross-entropy of the held-out text, in nats per token."""
    ids, network = heldout_ids(), load(model)
    with torch.no_grad():
        losses = [network(input_ids=rows, labels=rows).loss for rows in ids.split(4)]
    return float(torch.stack(losses).mean())


def conversion(method: str) -> Path:
    """The example with 2 of 8 KV heads by a method, made once for all processes of a test run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    directory = Path(tempfile.gettempdir()) / f"gqa-quality-{run}"
    directory.mkdir(exist_ok=True)
    out = directory / method

    tokens = {"tokens": TOKENS} if METHODS[method].reads == "text" else {}
    with FileLock(directory / f"{method}.lock"):
        if not out.exists():
            gqa.convert_model(SOURCE, kv_heads=2, method=method, output=out, quiet=True, **tokens)
    return out


def perplexity_ratio(method: str) -> float:
    return math.exp(heldout_nats(conversion(method)) - heldout_nats(SOURCE))


def test_the_mean_of_heads_is_no_model() -> None:
    """The control: what the other methods win is there to be lost."""
    assert perplexity_ratio("mean") > LEAST_OF_MEAN


@pytest.mark.parametrize("method", MOST)
def test_a_conversion_keeps_the_perplexity(method: str) -> None:
    assert perplexity_ratio(method) < MOST[method]


def test_a_conversion_keeps_recall() -> None:
    record = json.loads((conversion("calibrated") / "gqa_conversion.json").read_text())
    recall = record["quality"]["recall"]
    assert recall["base"] > 0.7
    assert recall["converted"] > recall["base"] - MOST_LOST_RECALL


# ------------------------------------------------------------------ one token that is unlike others


TOKEN = 620  # " import", in 1 of 200 positions: the token whose embedding is changed
SIZES = [1e-3, 1e-6, 0.0, 1e3]
# Enough to see whom a layer is fitted to
SHORT = {"data": "stdlib:train", "tokens": 4096, "refine_steps": 5}


@cache
def one_layer(size: float) -> Path:
    """The first layer of the example as a model, the embedding of TOKEN multiplied by `size`."""
    model = copy_source(scratch())
    edit_json(
        model / "config.json",
        lambda config: config | {"num_hidden_layers": 1, "tie_word_embeddings": False},
    )

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first = {
            name: tensor
            for name, tensor in tensors.items()
            if "layers" not in name or ".layers.0." in name
        }
        embeddings = first["model.embed_tokens.weight"]
        first["lm_head.weight"] = embeddings.clone()
        embeddings[TOKEN] *= size
        return first

    edit_tensors(model, change)
    return model


@cache
def lost_nats(method: str, size: float) -> float:
    """What the conversion of `one_layer` loses on held-out text."""
    model = one_layer(size)
    options = {
        key: value for key, value in SHORT.items() if method == "refined" or key != "refine_steps"
    }
    result = gqa.convert_model(
        model,
        kv_heads=2,
        method=method,
        output=scratch() / "out",
        quiet=True,
        check=False,
        **options,
    )
    return heldout_nats(result.path) - heldout_nats(model)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_no_token_owns_the_fit(method: str, size: float) -> None:
    """A token with a tiny embedding, or a huge one, costs the others nothing."""
    assert lost_nats(method, size) == pytest.approx(lost_nats(method, 1.0), abs=0.02)
