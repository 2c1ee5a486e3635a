"""Likelihoods of next tokens, and the statistics of a comparison of two models.

KL, agreement and standard errors are defined as in llama.cpp's `llama-perplexity --kl-divergence`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    pass

from gqa.models.chunked_head import CHUNK_NUMBERS

Floats = NDArray[np.floating[Any]]

BOOTSTRAP_SAMPLES = 2000


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p(target): (n, V) float32 logits, (n,) ids -> (n,) float32."""
    # On a CPU, large results need new memory pages, small ones reuse them: 7 times as fast.
    small = logits.device.type == "cpu" and not logits.requires_grad
    rows = max(1, CHUNK_NUMBERS // 2 // logits.shape[-1] if small else len(logits))
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    return torch.cat(
        [torch.nn.functional.cross_entropy(*piece, reduction="none") for piece in pieces]
    )


def common_log_probabilities(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that two models both have: float32 logits (n, V) and (n, W)
    -> twice (n, min(V, W)). Rows beyond are padding of the embedding, which no tokenizer uses: they
    are left out before the softmax.
    """
    common = min(first.shape[-1], second.shape[-1])
    return first[..., :common].log_softmax(-1), second[..., :common].log_softmax(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(P || Q) = sum_v P(v) (ln P(v) - ln Q(v)) in nats: log-probabilities p, q (n,
    V) -> (n,).
    """
    divergence = (p.exp() * (p - q)).sum(-1)
    if bool(divergence.isnan().any()):  # 0 x (-inf - -inf) where a model excludes a token
        divergence = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1)
    return divergence.clamp_min(0.0)  # rounding can make it negative


def mean_and_error(values: NDArray[Any]) -> tuple[float, float]:
    """Mean and its standard error sd / sqrt(n - 1), tokens taken as independent."""
    values = values.astype(np.float64)
    count = len(values)
    return float(values.mean()), float(
        values.std() / math.sqrt(count - 1)
    ) if count > 1 else math.nan


def kl_statistics(kl: Floats, same_top: NDArray[np.bool_], acceptance: Floats) -> dict[str, Any]:
    """Mean differences between a model's next-token distributions Q and the baseline's P.

    Args:
        kl: KL(P || Q) in nats; same_top: argmax P == argmax Q; acceptance: sum min(P, Q) =
            1 - sum |P - Q| / 2.
    """
    (mean, error), (share, share_error), (accepted, accepted_error) = map(
        mean_and_error, (kl, same_top, acceptance)
    )
    return {
        "kl": {"mean": mean, "mean_error": error},
        "same_top": share,
        "same_top_error": share_error,
        "acceptance": accepted,
        "acceptance_error": accepted_error,
    }


def paired_ratio(
    model: Floats, baseline: Floats, cluster: NDArray[np.integer[Any]]
) -> dict[str, float]:
    """ln(PPL(Q) / PPL(P)) on the same tokens, with its standard error and a 95 % paired bootstrap
    interval.

    The error is llama.cpp's: sqrt((var_Q + var_P - 2 cov) / (n - 1)), tokens taken as independent.
    Within a text they are not, so the interval resamples whole clusters (documents, or windows of
    one document; Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 8.6).
    """
    difference = model.astype(np.float64) - baseline
    mean, error = mean_and_error(difference)
    with np.errstate(over="ignore"):
        result = {"log_ratio": mean, "ratio": float(np.exp(mean)), "log_ratio_error": error}
        low, high = _interval(difference, cluster)
    return result if math.isnan(low) else result | {"ratio_low": low, "ratio_high": high}


def _interval(values: Floats, cluster: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """95 % bootstrap bounds of exp(mean) of values (n,): samples of clusters (n,) from a fixed
    seed.

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
