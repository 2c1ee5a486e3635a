"""Likelihoods of next tokens, and how far two distributions of next tokens are apart.

KL is defined as in llama.cpp's `llama-perplexity --kl-divergence`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.models.chunked_head import CHUNK_NUMBERS


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p(target), and 0 for targets of -100: (n, V) float32 logits, (n,) ids -> (n,) float32."""
    rows = len(logits)
    # On a CPU, large results need new memory pages, small ones reuse them: 7 times as fast.
    if logits.device.type == "cpu" and not logits.requires_grad:
        rows = CHUNK_NUMBERS // 2 // logits.shape[-1]
    rows = max(1, rows)

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
    """KL(P || Q) = sum_v P(v) (ln P(v) - ln Q(v)) in nats: log-probabilities p and q, each (n, V),
    -> (n,).
    """
    divergence = (p.exp() * (p - q)).sum(-1)
    if bool(divergence.isnan().any()):  # 0 x (-inf - -inf) where a model excludes a token
        divergence = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1)
    return divergence.clamp_min(0.0)  # rounding can make it negative
