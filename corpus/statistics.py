"""Statistics of a comparison, from arrays with one number per scored token. KL, agreement and standard errors are
defined as in llama.cpp's `llama-perplexity --kl-divergence`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

BOOTSTRAP_SAMPLES = 2000


def mean_and_error(values: NDArray[Any]) -> tuple[float, float]:
    """Mean and its standard error sd / sqrt(n - 1), tokens taken as independent."""
    values = values.astype(np.float64)
    count = len(values)
    return float(values.mean()), float(values.std() / math.sqrt(count - 1)) if count > 1 else math.nan


def kl_statistics(kl: Floats, same_top: NDArray[np.bool_], acceptance: Floats) -> dict[str, Any]:
    """Mean differences between a model's next-token distributions Q and the baseline's P.

    Args:
        kl: KL(P || Q) in nats; same_top: argmax P == argmax Q; acceptance: sum min(P, Q) =
            1 - sum |P - Q| / 2.
    """
    (mean, error), (share, share_error), (accepted, accepted_error) = map(mean_and_error, (kl, same_top, acceptance))
    return {
        "kl": {"mean": mean, "mean_error": error},
        "same_top": share,
        "same_top_error": share_error,
        "acceptance": accepted,
        "acceptance_error": accepted_error,
    }


def paired_ratio(model: Floats, baseline: Floats, cluster: NDArray[np.integer[Any]]) -> dict[str, float]:
    """ln(PPL(Q) / PPL(P)) on the same tokens, with its standard error and a 95 % paired bootstrap interval.

    The error is llama.cpp's: sqrt((var_Q + var_P - 2 cov) / (n - 1)), tokens taken as independent. Within a text they
    are not, so the interval resamples whole clusters (documents, or windows of one document; Efron and Tibshirani,
    An Introduction to the Bootstrap, 1993, section 8.6).
    """
    difference = model.astype(np.float64) - baseline
    mean, error = mean_and_error(difference)
    with np.errstate(over="ignore"):
        result = {"log_ratio": mean, "ratio": float(np.exp(mean)), "log_ratio_error": error}
        low, high = _interval(difference, cluster)
    return result if math.isnan(low) else result | {"ratio_low": low, "ratio_high": high}


def _interval(values: Floats, cluster: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """95 % bootstrap bounds of exp(mean) of values (n,): samples of clusters (n,) from a fixed seed.

    One sample is drawn at a time, so that memory does not grow with the number of clusters.
    """
    _, group = np.unique(cluster, return_inverse=True)
    sums, counts = np.bincount(group, values), np.bincount(group)
    generator, n = np.random.default_rng(0), len(sums)
    if n < 2:
        return math.nan, math.nan
    samples = (generator.multinomial(n, np.full(n, 1 / n)) for _ in range(BOOTSTRAP_SAMPLES))
    low, high = np.percentile(np.exp([w @ sums / (w @ counts) for w in samples]), (2.5, 97.5))
    return float(low), float(high)
