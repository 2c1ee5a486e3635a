"""Means of numbers per token, with standard errors and intervals.

Standard errors are defined as in llama.cpp's `llama-perplexity --kl-divergence`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

BOOTSTRAP_SAMPLES = 2000
ENOUGH_CLUSTERS = 20  # for an interval by the bootstrap alone


def mean_and_error(values: NDArray[Any]) -> tuple[float, float]:
    """Mean of values (n,) and its standard error sd / sqrt(n - 1), tokens taken as independent.

    The error of a single value is NaN.
    """
    values = values.astype(np.float64)
    count = len(values)
    mean = float(values.mean())
    if count < 2:
        return mean, math.nan
    return mean, float(values.std() / math.sqrt(count - 1))


def paired_ratio(model: Floats, baseline: Floats, cluster: Integers) -> dict[str, float]:
    """ln(PPL(Q) / PPL(P)) on the same tokens, with its standard error and a 95 % paired bootstrap
    interval.

    The error is llama.cpp's: sqrt((var_Q + var_P - 2 cov) / (n - 1)), tokens taken as independent.
    Within a text they are not, so the interval resamples whole clusters (documents, or windows of
    one document; Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 8.6). Of
    fewer than ENOUGH_CLUSTERS it is at least as wide as the error says.

    Args:
        model: Nats of each token by the model Q, (n,).
        baseline: Nats of each token by the baseline P, (n,).
        cluster: Number of the cluster that each token belongs to, (n,).

    Returns:
        `log_ratio`, `ratio` and `log_ratio_error`; with two clusters or more also the bounds
        `ratio_low` and `ratio_high`.
    """
    difference = model.astype(np.float64) - baseline
    mean, error = mean_and_error(difference)
    with np.errstate(over="ignore"):  # infinity beyond the range of floats
        result = {"log_ratio": mean, "ratio": float(np.exp(mean)), "log_ratio_error": error}
        low, high = _interval(difference, cluster)
        if math.isnan(low):
            return result

        # Resamples of a few clusters hardly differ: two give an interval of almost no width.
        if len(np.unique(cluster)) < ENOUGH_CLUSTERS:
            low = min(low, float(np.exp(mean - 1.96 * error)))
            high = max(high, float(np.exp(mean + 1.96 * error)))
    return result | {"ratio_low": low, "ratio_high": high}


def _interval(values: Floats, cluster: Integers) -> tuple[float, float]:
    """95 % bootstrap bounds of exp(mean) of values (n,): samples of clusters (n,) from a fixed
    seed. NaN for a single cluster.

    One sample is drawn at a time, so that memory does not grow with the number of clusters.
    """
    _, group = np.unique(cluster, return_inverse=True)
    sums = np.bincount(group, values)
    counts = np.bincount(group)
    clusters = len(sums)
    if clusters < 2:
        return math.nan, math.nan

    generator = np.random.default_rng(0)
    probabilities = np.full(clusters, 1 / clusters)
    means = []
    for _ in range(BOOTSTRAP_SAMPLES):
        weights = generator.multinomial(clusters, probabilities)
        means.append(weights @ sums / (weights @ counts))
    low, high = np.percentile(np.exp(means), (2.5, 97.5))
    return float(low), float(high)
