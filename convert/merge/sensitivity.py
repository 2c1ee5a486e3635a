"""What an error at a position, a query or a key costs the layer:
the weights of all least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.convert.merge.linear_algebra import typical_energy

# The lowest energy of a hidden state, relative to the typical one, that counts as it is. Trained
# tokens have 0.5 or more.
LEAST_ENERGY = 0.1
_MIN_REMAINDER = 1e-2  # floor of 1 - a: below it v - o is lost in float32 rounding
SCORES_AT_ONCE = 1 << 25  # scores of queries with keys that are computed at a time
_CAUSAL_PARTS = 4  # parts of a block's queries: each is multiplied only with the keys up to its end


def position_weights(hidden: Tensor, is_text: Tensor | None = None) -> Tensor:
    """Weight of an error at each position: 1 / mean square of its hidden state.

    The next norm divides by the root of that. Some positions, such as the first of a text, have
    hidden states that are hundreds of times as large as the others': they get the small weight that
    belongs to them. The opposite does not hold. Where the hidden state is zero or tiny (untrained
    or reserved tokens before the first layer), attention adds as much as elsewhere, and the next
    norm divides by the sum. So a mean square below LEAST_ENERGY times the typical one counts as
    that: no position weighs more than 1 / LEAST_ENERGY typical ones, in any units.

    Args:
        hidden: (N, T, D).
        is_text: (N, T) bool, False for padding, whose weight is 0; None where nothing is padding.

    Returns:
        (N, T) weights with the mean 1.
    """
    energies = mean_squares(hidden)
    if is_text is None:
        is_text = torch.ones_like(energies, dtype=torch.bool)

    least = LEAST_ENERGY * typical_energy(energies[is_text])
    weights = is_text / energies.clamp_min(least)
    return weights / weights.mean()


def mean_squares(hidden: Tensor) -> Tensor:
    """(N, T, D) -> (N, T), one block at a time to save memory."""
    return torch.stack([block.float().square().mean(-1) for block in hidden])


def query_sensitivity(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    roots: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """How much the output loses where scores of a query are wrong, by query and by distance.

    The sensitivity of a query is the sum over its keys s of

        (a_s / (1 - a_s))^2 |W_O (v_s - o)|^2,

    the squared change of the output W_O o if key s is dropped (a: attention, v: values). To first
    order the change is a W_O (v - o). That vanishes where one key takes all attention, although
    there the look-up itself can be lost. Caps of scores and sinks are ignored.

    Args:
        q, k, v: Queries (B, H, T, d), keys (B, Hk, S, d) and values (B, Hk, S, e).
        mask, bias: (1 or B, 1 or H, T, S). Without a mask a query sees the keys up to its position,
            or all keys if not `causal`.
        scaling: Factor of the scores.
        roots: (H, e, e), from `output_roots`.
        weights: (B, T), from `position_weights`.

    Returns:
        The sensitivity (B, H, T) of each query, times the weight of its position; and the sums (H,
        T) of these terms by the distance of the key: 0, 1, ... positions before the query.
    """
    blocks, n_heads, length, _ = q.shape
    n_keys = k.shape[2]
    repeat = n_heads // k.shape[1]
    queries_at_once = max(1, SCORES_AT_ONCE // (blocks * n_keys))
    if mask is None and causal:
        queries_at_once = min(queries_at_once, -(-length // _CAUSAL_PARTS))
    heads_at_once = _heads_at_once(blocks * queries_at_once * n_keys, q.device)

    sensitivity = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    distance_weights = torch.zeros(n_heads, length, device=q.device)
    for heads in torch.arange(n_heads, device=q.device).split(heads_at_once):
        # Blocks and heads are one dimension: n = B h, for h heads at once. `written` is what W_O
        # makes of each value, in a basis of its own.
        queries = q[:, heads].float().flatten(0, 1) * scaling
        keys = k[:, heads // repeat].float().flatten(0, 1)
        written = v[:, heads // repeat].float() @ roots[heads]
        written = written.flatten(0, 1)  # (n, S, e)
        squares = written.square().sum(-1)
        block_weights = weights.repeat_interleave(len(heads), 0)  # (n, T)

        for first in range(0, length, queries_at_once):
            part = slice(first, min(first + queries_at_once, length))
            n_visible = n_keys  # keys that these queries can see
            if mask is None and causal:
                n_visible = min(part.stop, n_visible)

            scores = queries[:, part] @ keys[:, :n_visible].mT  # (n, t, S)
            by_head = scores.unflatten(0, (blocks, len(heads)))  # the same memory
            if bias is not None:
                by_head += _for_queries(bias, heads, part)[..., :n_visible]
            if mask is not None:
                _hide_by_mask(by_head, _for_queries(mask, heads, part))
            elif causal:
                future = torch.full_like(scores[0, :, first:], -torch.inf).triu(1)
                scores[..., first:] += future
            attention = scores.softmax(-1).nan_to_num_()

            moved = _squared_changes(
                attention, written[:, :n_visible], squares[:, :n_visible], out=scores
            )
            del attention  # its memory
            moved.mul_(block_weights[:, part, None])

            terms = moved.unflatten(0, (blocks, len(heads)))  # (B, h, t, S)
            sensitivity[:, heads, part] = terms.sum(-1)
            # Where keys are fewer than queries (cross-attention) there are no distances; where they
            # are not, those of cross-attention mean nothing, and nothing reads them.
            if n_visible >= part.stop:
                distance_weights[heads, : part.stop] += _sums_by_distance(terms, part.stop)
    return sensitivity, distance_weights


def _squared_changes(attention: Tensor, written: Tensor, squares: Tensor, out: Tensor) -> Tensor:
    """(a / (1 - a))^2 |v - o|^2 of each key, in `out` (n, t, S).

    |v - o|^2 is |v|^2 - 2 v o + |o|^2. These are the largest tensors, so all is computed in place:
    `attention` is lost.

    Args:
        attention: a (n, t, S).
        written: v (n, S, e), of which the outputs o = a v are made.
        squares: |v|^2 (n, S).
    """
    outputs = attention @ written
    squared_odds = attention.div_((1 - attention).clamp_min_(_MIN_REMAINDER)).square_()
    torch.baddbmm(squares[:, None], outputs, written.mT, alpha=-2, out=out)
    out.add_(outputs.square().sum(-1, keepdim=True)).clamp_min_(0)
    return out.mul_(squared_odds)


def _heads_at_once(scores: int, device: torch.device) -> int:
    """How many heads are computed in one call, if each has so many scores.

    One on a CPU, whose caches hold the scores of one head. On an accelerator a call takes longer to
    start than to compute one head.
    """
    if device.type == "cpu":
        return 1
    return max(1, SCORES_AT_ONCE // scores)


def _hide_by_mask(scores: Tensor, mask: Tensor) -> None:
    """Apply a mask to scores (B, h, t, S), in place: False or -inf for keys that are not seen."""
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        scores += mask


def _sums_by_distance(terms: Tensor, stop: int) -> Tensor:
    """Sums (h, stop) of the terms (B, h, t, S) of t queries, by the distance of the key: 0, 1, ...
    positions before its query. The last query is at position `stop` - 1.
    """
    heads, queries = terms.shape[1:3]
    shifted = torch.nn.functional.pad(terms.sum(0), (queries - 1, 0))
    # One more in the stride of rows turns diagonals, of one distance each, into columns.
    width = shifted.shape[2]
    diagonals = shifted.as_strided((heads, queries, stop), (queries * width, width + 1, 1))
    return diagonals.sum(1).flip(1)


def _for_queries(mask: Tensor, heads: Tensor, queries: slice) -> Tensor:
    """The part (1 or B, 1 or h, t, S) of a mask or bias (1 or B, 1 or H, T, S) for queries of some
    heads.
    """
    if mask.shape[1] > 1:
        mask = mask[:, heads]
    return mask[:, :, queries]


def visible_keys(mask: Tensor | None, keys: Tensor) -> Tensor:
    """(B or 1, S) bool: whether any query may attend to a key; other keys are padding.

    keys: (B, Hk, S, d).
    """
    if mask is None:
        return torch.ones(1, keys.shape[2], dtype=torch.bool, device=keys.device)
    allowed = mask
    if mask.dtype != torch.bool:
        allowed = mask > torch.finfo(mask.dtype).min / 2
    return allowed.flatten(1, 2).any(1)


def output_roots(w_o: Tensor) -> Tensor:
    """(H, e, D) -> (H, e, e): R with R R^T = W W^T for each head's W.

    So |x R| = |x W|, with fewer numbers.
    """
    values, vectors = torch.linalg.eigh(w_o.double() @ w_o.double().mT)
    roots: Tensor = vectors * values.clamp_min(0).sqrt()[:, None, :]
    return roots.float()
