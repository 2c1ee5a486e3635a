"""The evaluator's numbers: identities, other implementations, and independence of how the work is
cut up.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import lines
from support.embedded import SOURCE, UNIFORM_VOCABULARY, copy_source, load, texts, tokenizer
from support.evaluations import NO_HARNESS, model_directory, results

from gqa.corpus.encoders import Encoders, HarnessEncoder
from gqa.corpus.likelihood import kl_divergence
from gqa.corpus.statistics import paired_ratio
from gqa.eval.metrics import measure_text
from gqa.eval.scoring import rolling_windows, score
from gqa.eval.text import CutDocument, Text, document_windows, make_text
from gqa.models.chunked_head import ChunkedHead

TEXTS = texts(4, 1500)


def text_of(tokenizer: Any, tokens: int | None = None) -> Text:
    """TEXTS, or their first tokens, in windows of 128 tokens."""
    encoders = Encoders(tokenizer, text_encoder=HarnessEncoder)
    rows = [(text,) for text in TEXTS]
    return make_text(document_windows(rows, encoders, 128, tokens), "rolling", 128)


@pytest.fixture(scope="module")
def source():
    return load(SOURCE)


@pytest.fixture(scope="module")
def text():
    return text_of(tokenizer())


@pytest.fixture(scope="module")
def part(text):
    """Its beginning."""
    return replace(text, windows=text.windows[:4])


@pytest.fixture(scope="module")
def scores(source, text):
    return score(ChunkedHead(source), text.windows, batch_size=4)


def perplexity(nats, text):
    """The metrics of one model."""
    return measure_text({"nats": nats}, text, compares=False)


def test_sums_and_sizes(text, scores):
    total = scores["nats"].sum(dtype="float64")
    assert (
        text.tokens == len(scores["nats"]) == sum(len(tokenizer()(t)["input_ids"]) for t in TEXTS)
    )
    assert text.bytes == sum(len(t.encode()) for t in TEXTS)
    quality = perplexity(scores["nats"], text)
    assert quality["token_perplexity"] == pytest.approx(math.exp(total / text.tokens))
    assert quality["bits_per_byte"] == pytest.approx(total / text.bytes / math.log(2))
    assert quality["byte_perplexity"] == pytest.approx(2 ** quality["bits_per_byte"])
    assert quality["word_perplexity"] == pytest.approx(math.exp(total / text.words))
    assert 5 < quality["token_perplexity"] < 30  # it was trained on such text


@pytest.mark.parametrize("limit", [1, 200, 10**6])
def test_a_limit_scores_the_first_tokens(text, limit):
    """Also within a document, of which only the beginning counts."""
    first = text_of(tokenizer(), limit)
    ids, whole = (
        [i for w in windows for i in w.ids[-w.scored :]]
        for windows in (first.windows, text.windows)
    )
    assert ids == whole[:limit]
    expected_bytes, expected_documents = {
        1: (0, 1),
        200: (len(tokenizer().decode(ids[1:])), 1),
        10**6: (text.bytes, 4),
    }[limit]
    assert first.bytes == expected_bytes
    assert first.documents == expected_documents


@pytest.mark.parametrize(("batch_size", "numbers"), [(1, None), (64, None), (4, 1), (3, 100_000)])
def test_any_batch_size_and_chunk_give_the_same(
    source, part, scores, monkeypatch, batch_size, numbers
):
    if numbers:
        # So few logits at once that a batch is scored in pieces
        monkeypatch.setattr("gqa.corpus.likelihood.CHUNK_NUMBERS", numbers)
        monkeypatch.setattr("gqa.models.chunked_head.CHUNK_NUMBERS", numbers)
        monkeypatch.setattr("gqa.models.chunked_head.LEAST_ROWS", 7)
    other, expected = (
        score(ChunkedHead(source), part.windows, batch_size=batch_size),
        scores["nats"][: part.tokens],
    )
    assert np.allclose(other["nats"], expected, atol=2e-5)
    assert other["nats"].sum(dtype="float64") == pytest.approx(
        expected.sum(dtype="float64"), rel=1e-7
    )


def test_only_arrays_that_are_asked_for_are_computed(source, part):
    """And nats, which show whether logits are finite; those of two models only with a baseline."""
    windows, head = part.windows[:1], ChunkedHead(source)
    alone = score(head, windows, batch_size=1, arrays=["hits", "kl"])
    assert alone.keys() == {"nats", "hits"}
    compared = score(head, windows, batch_size=1, arrays=["baseline_hits", "kl"], baseline=head)
    assert compared.keys() == {"nats", "hits", "baseline_nats", "baseline_hits", "kl"}
    assert (compared["baseline_hits"] == alone["hits"]).all()


def bytes_of(windows_of: Any, tokens: int) -> int:
    return text_of(windows_of, tokens).bytes


@pytest.mark.parametrize("tokens", [100, 700, 901])
def test_bytes_of_cut_text_are_those_of_the_text_itself(tokens: int) -> None:
    """With a tokenizer that has no decoder too, whose `decode` puts a space between any two
    tokens.
    """
    plain, bare = tokenizer(), copy.deepcopy(tokenizer())
    bare.backend_tokenizer.decoder = None
    ids = plain(TEXTS[0])["input_ids"][:100]
    assert len(bare.decode(ids)) > 1.2 * len(plain.decode(ids)), (
        "the control: decoded text is longer"
    )
    joined = "".join(TEXTS).encode()
    expected = bytes_of(plain, tokens)
    assert bytes_of(bare, tokens) == expected
    # As many bytes a token as in the whole text, more or less.
    total = sum(len(plain(text)["input_ids"]) for text in TEXTS)
    assert expected / tokens == pytest.approx(len(joined) / total, rel=0.25)


def test_bytes_of_text_cut_by_a_tokenizer_in_python_are_its_share() -> None:
    class Characters:
        is_fast, bos_token_id, eos_token_id = False, 1, 2

        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(character) for character in text]}

    assert bytes_of(Characters(), 150) == len(TEXTS[0][:150].encode())


def test_a_limit_counts_the_scored_tokens_of_chats(tmp_path: Path) -> None:
    """BOS, which the template writes, is none of them, and is not among the bytes."""
    model = copy_source(tmp_path, "chats")
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    line = f"{model} --data {lines(tmp_path / 'chats.jsonl', *chats)} --context 128"

    for limit in (50, 100, 900):
        assert results(f"{line} --tokens {limit}")["text"]["tokens"] == limit
    whole = results(line)["text"]
    assert whole["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert whole["words"] == sum(len(re.split(r"\s+", text)) for text in TEXTS)


def test_one_token_of_bos_has_no_bits_per_byte() -> None:
    text = make_text([CutDocument("", [*rolling_windows([1], 8, 1)])], "rolling", 8)
    assert perplexity(np.ones(1), text)["bits_per_byte"] is None


def test_uniform_predictions_have_the_vocabulary_as_perplexity(part):
    model = load(SOURCE)
    model.model.norm.weight.data.zero_()
    quality = perplexity(score(ChunkedHead(model), part.windows, batch_size=8)["nats"], part)
    assert quality["token_perplexity"] == pytest.approx(UNIFORM_VOCABULARY, rel=1e-6)


@torch.no_grad()
def test_comparison_with_torch_on_whole_logits(source, part, scores):
    grouped, expected = load(model_directory() / "gqa2"), {}
    compared = score(ChunkedHead(grouped), part.windows, batch_size=2, baseline=ChunkedHead(source))
    for window in part.windows:
        ids = torch.tensor([window.ids])
        p, q = (
            m(input_ids=ids[:, :-1]).logits[0, -window.scored :].double().log_softmax(-1)
            for m in (source, grouped)
        )
        for name, values in (
            ("nats", torch.nn.functional.nll_loss(q, ids[0, -window.scored :], reduction="none")),
            (
                "baseline_nats",
                torch.nn.functional.nll_loss(p, ids[0, -window.scored :], reduction="none"),
            ),
            ("kl", torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)),
            ("acceptance", 1 - (p.exp() - q.exp()).abs().sum(-1) / 2),
            ("top1_agreement", p.argmax(-1) == q.argmax(-1)),
            ("hits", q.argmax(-1) == ids[0, -window.scored :]),
        ):
            expected.setdefault(name, []).append(values)
    for name, values in expected.items():
        assert np.allclose(
            compared[name], torch.cat(values), atol=2e-4 if name == "kl" else 2e-5
        ), name
    # alone
    assert np.allclose(
        scores["nats"][: part.tokens], torch.cat(expected["baseline_nats"]), atol=2e-5
    )
    assert compared["kl"].mean() > 0.5
    assert max(compared["acceptance"].mean(), compared["top1_agreement"].mean()) < 0.9


P = 99  # the prefix


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 60))
def test_rolling_windows_are_those_of_the_harness(count: int, context: int) -> None:
    ids = list(range(1000, 1000 + count))
    utils = pytest.importorskip("lm_eval.utils", reason=NO_HARNESS)
    theirs = list(
        map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, P, context, 1))
    )
    ours = [
        (list(w.ids[: -w.scored]), list(w.ids[-w.scored :]))
        for w in rolling_windows(ids, context, P)
    ]
    assert ours == [(list(a), list(b)) for a, b in theirs]
    # Each once, in order
    assert [i for w in rolling_windows(ids, context, P) for i in w.ids[-w.scored :]] == ids


TASK = """task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 7}}
"""


def harness(model: Path, data: Path, directory: Path, **model_args: Any) -> dict[str, float]:
    """Perplexities by lm_eval, with the model that it loads itself."""
    lm_eval = pytest.importorskip("lm_eval", reason=NO_HARNESS)
    tasks = pytest.importorskip("lm_eval.tasks", reason=NO_HARNESS)
    (directory / "perplexity.yaml").write_text(TASK.format(data=data))
    with contextlib.redirect_stderr(io.StringIO()):
        record: Any = lm_eval.simple_evaluate(
            "hf",
            {"pretrained": str(model), "dtype": "float32"} | model_args,
            device="cpu",
            batch_size=4,
            tasks=["local_perplexity"],
            bootstrap_iters=10,
            task_manager=tasks.TaskManager(include_path=str(directory), include_defaults=False),
        )
    return dict(record["results"]["local_perplexity"])


@pytest.mark.parametrize(("model", "count", "context"), [("SRC", 3, 200), ("G4", 1, 1024)])
def test_rolling_perplexity_is_that_of_the_harness(
    model: str, count: int, context: int, tmp_path: Path
) -> None:
    """Word perplexity too, of several documents and of one that is longer than a window.

    That of another model differs.
    """
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count, 1800)))
    path, other = (SOURCE, "G4") if model == "SRC" else (model_directory() / "gqa4", "SRC")
    line = f"{path} {other} --data {data} --precision float32 --context {min(context, 512)}"
    ours, others = (each["quality"] for each in results(line)["models"])
    theirs = harness(path, data, tmp_path, max_length=min(context, 512))
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert ours[name] == pytest.approx(theirs[f"{name},none"], rel=1e-5), name
        assert others[name] != pytest.approx(ours[name], rel=1e-2), name


def distributions(kl, top1_agreement, acceptance):
    """The metrics of two models' distributions."""
    scores = {"kl": kl, "top1_agreement": top1_agreement, "acceptance": acceptance}
    text = make_text([CutDocument("a", [*rolling_windows([1, 2], 8, 1)])], "rolling", 8)
    return measure_text(scores, text, compares=True)


def test_a_comparison_by_hand():
    """A token that is ruled out; one cluster has no interval and one token no error."""
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert kl_divergence(p, p).item() == 0.0
    assert kl_divergence(torch.tensor([[0.5, 0.25, 0.25]]).log(), p).item() == math.inf
    means = distributions(np.array([0.1, 0.2]), np.array([True, False]), np.array([0.5, 0.7]))
    assert means["kl"] == {"mean": pytest.approx(0.15), "mean_error": pytest.approx(0.05)}
    assert means["top1_agreement"] == 0.5
    assert means["top1_agreement_error"] == pytest.approx(0.5)
    assert means["acceptance"] == pytest.approx(0.6)
    assert means["acceptance_error"] == pytest.approx(0.1)
    assert "ratio_low" not in paired_ratio(np.ones(5), np.ones(5), np.zeros(5, int))
    assert math.isnan(
        distributions(np.ones(1), np.ones(1, bool), np.ones(1))["top1_agreement_error"]
    )


def test_the_paired_error_is_smaller_than_the_unpaired():
    """sqrt((var Q + var P - 2 cov) / (n - 1)): what is common to both does not count."""
    generator, n = np.random.default_rng(0), 4000
    baseline = generator.gamma(2, 1, n)
    model = baseline + 0.1 + generator.normal(0, 0.05, n)
    ratio = paired_ratio(model, baseline, np.arange(n) // 20)
    variances = np.cov(model, baseline, bias=True)
    unpaired = variances[0, 0] + variances[1, 1]
    assert ratio["log_ratio_error"] == pytest.approx(
        math.sqrt((unpaired - 2 * variances[0, 1]) / (n - 1)), rel=1e-6
    )
    assert ratio["log_ratio_error"] < 0.1 * math.sqrt(unpaired / (n - 1))
    assert ratio["ratio_low"] < math.exp(0.1) < ratio["ratio_high"] < ratio["ratio_low"] + 0.02


def test_the_bootstrap_resamples_documents():
    """A long one weighs more than a short one; drawing one sample at a time changes nothing."""
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 20, 30)
    values, clusters = generator.gamma(2, 1, counts.sum()), np.repeat(np.arange(30), counts)
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=2000)
    expected = np.percentile(
        np.exp(weights @ np.bincount(clusters, values) / (weights @ counts)), (2.5, 97.5)
    )
    ratio = paired_ratio(values, np.zeros(len(values)), clusters)
    low, high = expected
    assert ratio["ratio_low"] == pytest.approx(low, rel=1e-12)
    assert ratio["ratio_high"] == pytest.approx(high, rel=1e-12)


def test_an_interval_of_two_blocks_is_as_wide_as_the_error():
    """The bootstrap of two clusters with the same mean has no width."""
    nats = np.random.default_rng(0).normal(0.2, 1.0, 250)
    both_blocks = np.concatenate([nats, nats])
    ratio = paired_ratio(both_blocks, np.zeros(500), np.arange(500) // 250)
    width = math.log(ratio["ratio_high"] / ratio["ratio_low"])
    assert width == pytest.approx(2 * 1.96 * ratio["log_ratio_error"])
