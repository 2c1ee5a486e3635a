"""Statistics of a comparison, against numbers worked out by hand and by identities."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch

from gqa.corpus.likelihood import chunks, kl_divergence
from gqa.eval import statistics
from gqa.eval.statistics import kl_statistics, paired_ratio


def test_kl_divergence_where_a_token_is_ruled_out():
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert kl_divergence(p, p).item() == 0.0
    assert kl_divergence(torch.tensor([[0.5, 0.25, 0.25]]).log(), p).item() == math.inf


def test_chunks_cover_all_rows_once():
    for count, vocabulary in ((1, 10), (1000, 1 << 20), (100_000, 50_000)):
        rows = [i for piece in chunks(count, vocabulary) for i in range(piece.start, piece.stop)]
        assert rows == list(range(count))


def test_a_comparison_by_hand():
    found = kl_statistics(np.array([0.1, 0.2]), np.array([True, False]), np.array([0.5, 0.7]))
    assert found["kl"] == {"mean": pytest.approx(0.15), "mean_error": pytest.approx(0.05)}
    assert found["same_top"] == 0.5
    assert found["same_top_error"] == pytest.approx(0.5)
    assert (found["acceptance"], found["acceptance_error"]) == (pytest.approx(0.6), pytest.approx(0.1))


def test_the_paired_error_is_smaller_than_the_unpaired():
    """sqrt((var Q + var P - 2 cov) / (n - 1)): what is common to both does not count."""
    generator = np.random.default_rng(0)
    common = generator.gamma(2, 1, 4000)
    model, baseline = common + 0.1 + generator.normal(0, 0.05, 4000), common
    found = paired_ratio(model, baseline, np.arange(4000) // 20)
    n = len(model)
    covariance = np.cov(model, baseline, bias=True)
    expected = math.sqrt((covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / (n - 1))
    assert found["log_ratio_error"] == pytest.approx(expected, rel=1e-6)
    assert found["log_ratio_error"] < 0.1 * math.sqrt((covariance[0, 0] + covariance[1, 1]) / (n - 1))
    assert found["ratio_low"] < math.exp(0.1) < found["ratio_high"]
    assert found["ratio_high"] - found["ratio_low"] < 0.02


def test_the_bootstrap_s_memory_does_not_grow_with_the_documents(monkeypatch):
    monkeypatch.setattr(statistics, "BOOTSTRAP_SAMPLES", 200)
    values = np.random.default_rng(0).gamma(2, 1, 20_000)
    tracemalloc.start()
    found = paired_ratio(values, np.zeros(20_000), np.arange(20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # all weights of the samples at once, and as floats, are 61 MiB
    assert found["ratio_low"] < found["ratio"] < found["ratio_high"]


@pytest.mark.parametrize("numbers", [1, 90, 1 << 20])
def test_the_bootstrap_draws_the_same_however_many_at_a_time(monkeypatch, numbers):
    monkeypatch.setattr(statistics, "BOOTSTRAP_NUMBERS", numbers)
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 20, 30)  # a long document weighs more than a short one
    values, clusters = generator.gamma(2, 1, counts.sum()), np.repeat(np.arange(30), counts)
    sums = np.bincount(clusters, values)
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=2000)
    expected = np.percentile(np.exp(weights @ sums / (weights @ counts)), (2.5, 97.5))
    found = paired_ratio(values, np.zeros(len(values)), clusters)
    assert (found["ratio_low"], found["ratio_high"]) == pytest.approx(tuple(expected), rel=1e-12)


def test_one_cluster_has_no_interval_and_one_token_no_error():
    assert "ratio_low" not in paired_ratio(np.ones(5), np.ones(5), np.zeros(5, int))
    assert math.isnan(kl_statistics(np.ones(1), np.ones(1, bool), np.ones(1))["same_top_error"])
