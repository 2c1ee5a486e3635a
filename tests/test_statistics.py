"""Statistics of a comparison, against numbers worked out by hand and by identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gqa.corpus.likelihood import chunks, kl_divergence
from gqa.eval.statistics import kl_statistics, paired_ratio


def test_kl_divergence_where_a_token_is_ruled_out():
    p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert kl_divergence(p, p).item() == 0.0
    assert kl_divergence(torch.tensor([[0.5, 0.25, 0.25]]).log(), p).item() == math.inf


def test_chunks_cover_all_rows_once():
    for count, vocabulary in ((1, 10), (1000, 1 << 20), (100_000, 50_000)):
        rows = [i for piece in chunks(count, vocabulary, torch.device("cpu")) for i in range(piece.start, piece.stop)]
        assert rows == list(range(count))


def test_a_comparison_by_hand():
    means = kl_statistics(np.array([0.1, 0.2]), np.array([True, False]), np.array([0.5, 0.7]))
    assert means["kl"] == {"mean": pytest.approx(0.15), "mean_error": pytest.approx(0.05)}
    assert (means["same_top"], means["same_top_error"]) == (0.5, pytest.approx(0.5))
    assert (means["acceptance"], means["acceptance_error"]) == (pytest.approx(0.6), pytest.approx(0.1))


def test_the_paired_error_is_smaller_than_the_unpaired():
    """sqrt((var Q + var P - 2 cov) / (n - 1)): what is common to both does not count."""
    generator, n = np.random.default_rng(0), 4000
    baseline = generator.gamma(2, 1, n)
    model = baseline + 0.1 + generator.normal(0, 0.05, n)
    ratio = paired_ratio(model, baseline, np.arange(n) // 20)
    variances = np.cov(model, baseline, bias=True)
    unpaired = variances[0, 0] + variances[1, 1]
    assert ratio["log_ratio_error"] == pytest.approx(math.sqrt((unpaired - 2 * variances[0, 1]) / (n - 1)), rel=1e-6)
    assert ratio["log_ratio_error"] < 0.1 * math.sqrt(unpaired / (n - 1))
    assert ratio["ratio_low"] < math.exp(0.1) < ratio["ratio_high"] < ratio["ratio_low"] + 0.02


def test_the_bootstrap_resamples_documents():
    """A long one weighs more than a short one; drawing one sample at a time changes nothing."""
    generator = np.random.default_rng(3)
    counts = generator.integers(1, 20, 30)
    values, clusters = generator.gamma(2, 1, counts.sum()), np.repeat(np.arange(30), counts)
    weights = np.random.default_rng(0).multinomial(30, np.full(30, 1 / 30), size=2000)
    expected = np.percentile(np.exp(weights @ np.bincount(clusters, values) / (weights @ counts)), (2.5, 97.5))
    ratio = paired_ratio(values, np.zeros(len(values)), clusters)
    assert (ratio["ratio_low"], ratio["ratio_high"]) == pytest.approx(tuple(expected), rel=1e-12)


def test_one_cluster_has_no_interval_and_one_token_no_error():
    assert "ratio_low" not in paired_ratio(np.ones(5), np.ones(5), np.zeros(5, int))
    assert math.isnan(kl_statistics(np.ones(1), np.ones(1, bool), np.ones(1))["same_top_error"])
