"""The closed form of one layer: measure its heads on text, and solve for the maps that merge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gqa.checkpoint.loading import as_float64, float64_device
from gqa.convert.heads.family import Rotary
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.merge.layerwise import Layer, Stream
from gqa.convert.merge.linear_algebra import CUT, add_products, pseudo_inverse, ridge, typical_energy, unrotate
from gqa.convert.merge.moments import Moments, find_order, head_maps, heads_of, stack_groups
from gqa.convert.merge.pair import Pair, check_finite
from gqa.convert.methods import HeadMaps, query_order
from gqa.convert.plan import searches

LEAST_ENERGY = 0.1  # of a hidden state, relative to the typical one; of trained tokens it is 0.5 and more
_MIN_REMAINDER = 1e-2  # floor of 1 - a: below it v - o is lost in float32 rounding
SAMPLED = 16_384  # tokens that key and value maps are fitted to: more hardly improve them, unlike W_O
SCORES = 1 << 25  # scores of one head computed at a time
_CAUSAL_PARTS = 4  # parts of a block's queries: each is multiplied only with the keys up to its end
MAX_SCORES = 1 << 28  # of all heads: with more, values are split to a key's width, so that kernels store no scores


def significance_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, roots: Tensor, weights: Tensor,
    bias: Tensor | None = None, causal: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sensitivity of each query, (B, H, T): sum over keys s of (a_s / (1 - a_s))^2 |W_O (v_s - o)|^2, times the weight
    (B, T) of its position; and the sums of these terms by distance, (H, T), from the keys before a query and itself.

    A term is the squared change of the output W_O o if key s is dropped (a attention, v values). To first order it is
    a W_O (v - o), which vanishes where one key takes all attention, but there the look-up itself can be lost. Caps and
    sinks are ignored. Shapes as in `Moments.add`; `roots` (H, e, e) are `output_roots`; `mask` and `bias` (1 or B, 1 or
    H, T, S). Without a mask a query sees the keys up to its position, or all keys if not `causal`.
    """
    repeat, rows = q.shape[1] // k.shape[1], max(1, SCORES // (len(q) * k.shape[2]))
    if mask is None and causal:
        rows = min(rows, -(-q.shape[2] // _CAUSAL_PARTS))
    significance = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    distances = torch.zeros(q.shape[1], q.shape[2], device=q.device)
    for head in range(q.shape[1]):
        kv_head = head // repeat
        values = v[:, kv_head].float() @ roots[head].to(v.device)  # (B, S, e)
        sizes = values.square().sum(-1)
        for first in range(0, q.shape[2], rows):
            part = slice(first, min(first + rows, q.shape[2]))
            reach = min(part.stop, k.shape[2]) if mask is None and causal else k.shape[2]  # keys that can be seen
            scores = (q[:, head, part].float() * scaling) @ k[:, kv_head, :reach].float().mT  # (B, t, S)
            if bias is not None:
                scores += _of(bias, head, part)[..., :reach]
            if mask is None:
                if causal:
                    scores[..., first:] += torch.full_like(scores[0, :, first:], -torch.inf).triu(1)
            elif mask.dtype == torch.bool:
                scores.masked_fill_(~_of(mask, head, part), -torch.inf)
            else:
                scores += _of(mask, head, part)
            attention = scores.softmax(-1).nan_to_num_()
            outputs = attention @ values[:, :reach]
            squared_odds = attention.div_((1 - attention).clamp_min_(_MIN_REMAINDER)).square_()
            moved = torch.baddbmm(sizes[:, None, :reach], outputs, values[:, :reach].mT, alpha=-2, out=scores)
            moved = moved.add_(outputs.square().sum(-1, keepdim=True)).clamp_min_(0).mul_(squared_odds)  # (B, t, S)
            moved = moved.mul_(weights[:, part, None])
            significance[:, head, part] = moved.sum(-1)
            del attention, squared_odds  # their memory
            if reach >= part.stop:  # cross-attention, whose distances are not used, may have fewer keys
                shifted = torch.nn.functional.pad(moved.sum(0), (part.stop - first - 1, 0))  # diagonals become columns
                shifted = shifted.as_strided((len(shifted), part.stop), (shifted.shape[1] + 1, 1))
                distances[head, : part.stop] += shifted.sum(0).flip(0)
    return significance, distances


def _of(mask: Tensor, head: int, rows: slice) -> Tensor:
    """Rows (1 or B, t, S) of a mask or bias (1 or B, 1 or H, T, S) for the queries `rows` of a head."""
    return mask[:, min(head, mask.shape[1] - 1), rows]


def visible_keys(mask: Tensor | None, keys: Tensor) -> Tensor:
    """(B or 1, S) bool: whether any query may attend to the key; the other `keys` (B, Hk, S, d) are padding."""
    if mask is None:
        return torch.ones(1, keys.shape[2], dtype=torch.bool, device=keys.device)
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed.flatten(1, 2).any(1)


def output_roots(w_o: Tensor) -> Tensor:
    """(H, e, D) -> (H, e, e): R with R R^T = W W^T for each head's W, so |x R| = |x W| with fewer numbers."""
    values, vectors = torch.linalg.eigh(w_o.double() @ w_o.double().mT)
    roots: Tensor = vectors * values.clamp_min(0).sqrt()[:, None, :]
    return roots.float()


def position_weights(stream: Tensor, is_text: Tensor | None = None) -> Tensor:
    """Weight of an error at each position: 1 / mean square of its hidden state, because the next norm divides by that.

    Some positions, such as the first of a text, have hidden states that are hundreds of times as large as the others':
    they get the small weight that belongs to them. The opposite does not hold. Where the hidden state is zero or tiny
    (untrained or reserved tokens before the first layer), attention adds as much as elsewhere, and the next norm
    divides by the sum. So a mean square below LEAST_ENERGY times the typical one counts as that: no position weighs
    more than 1 / LEAST_ENERGY typical ones, in any units.

    Args:
        stream: (N, T, D) hidden states.
        is_text: (N, T) bool, False for padding, whose weight is 0; None where nothing is padding.

    Returns:
        (N, T) weights with the mean 1.
    """
    energies = mean_squares(stream)
    if is_text is None:
        is_text = torch.ones_like(energies, dtype=torch.bool)

    least = LEAST_ENERGY * typical_energy(energies[is_text])
    weights = is_text / energies.clamp_min(least)
    return weights / weights.mean()


def mean_squares(stream: Tensor) -> Tensor:
    """(N, T, D) -> (N, T), one block at a time to save memory."""
    return torch.stack([block.float().square().mean(-1) for block in stream])


@dataclass(frozen=True)
class LayerResult:
    """The maps of one attention module, and their error.

    error: Squared error of the attention output relative to the source's square, after the refit of W_O (on the
        calibration text) or the refinement (on held-out blocks); NaN if not measured.
    weights: Tensors that refinement trained, by stored name.
    """

    module: AttentionModule
    maps: HeadMaps
    error: float
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One attention module to merge: the source's `layer` on the converted model's hidden states `stream`, which the
    merged heads will read.

    targets: (N, T, D) attention output after which the hidden states are the source's again.
    position_weights: (N, T) weight of an error at each position, from the function of that name.
    converted: Converted tensors of the layer's modules before this one.
    head_outputs: (N, T, H e) to fill with the inputs of W_O; may be `targets`, which are read first.
    """

    pair: Pair
    module: AttentionModule
    layer: Layer
    stream: Stream
    targets: Tensor
    position_weights: Tensor
    converted: Mapping[str, Tensor] = field(default_factory=dict)
    head_outputs: Tensor | None = None

    def converted_layer(self, maps: HeadMaps) -> Layer:
        """The converted model's layer with these maps applied to the module."""
        return self.pair.merged(
            self.layer.index, self.module, {**self.converted, **self.pair.mapped(self.module, maps)}
        )

    def sample(self) -> tuple[Tensor, ...]:
        """Indices of the blocks of each batch of a sample of about SAMPLED tokens, evenly spaced in the text."""
        return self.stream.batches()[:: max(1, self.position_weights.numel() // SAMPLED)]


def closed_form(task: Task) -> LayerResult:
    """Fit key maps, then value maps under the merged attention, then refit W_O.

    If groups are searched for, heads are reordered with everything that belongs to them.
    """
    pair, (heads, groups), plan, order = task.pair, task.pair.heads(task.module), task.pair.plan, None
    text, symmetry, search = plan.config.text, pair.symmetry, searches(plan, pair.options.grouping)
    w_o = heads_of(plan.checkpoint, plan.changes_of(task.module))["output"]  # transposed: (H, e, D)
    assert symmetry is not None
    check_finite(task.layer.index, w_o)
    length = task.stream.hidden.shape[1]  # which dynamic RoPE depends on
    rotary = symmetry.rotary(text, task.module.layer, heads.key_dim, length)
    rotary = replace(rotary, frequencies=()) if task.module.kind == "cross" else rotary  # cross-attention has no RoPE
    free_keys, device = symmetry.free_keys(text), float64_device(pair.source.device)
    moments = Moments.zeros(heads, 1 if search else groups, length, device)
    moments = _measure_source(task, moments, rotary, w_o)
    if search:
        order = find_order(moments.cpu(), w_o.double(), groups, rotary, free_keys)
        moments = moments.regrouped(order or tuple(range(heads.kv)), groups)
    if order:
        w_o = w_o[query_order(order, heads.query)]
    keys = moments.shared_keys(rotary) if free_keys else []
    attended = _attended_values(task, head_maps(heads, groups, keys, [], order))
    w_o = w_o.to(device).double()
    shared_values = moments.shared_values(attended.unflatten(0, (groups, -1)), w_o)
    return _refit(task, head_maps(heads, groups, keys, shared_values, order), w_o.flatten(0, 1))


def _measure_source(task: Task, moments: Moments, rotary: Rotary, w_o: Tensor) -> Moments:
    """Moments of the source's heads on the converted model's hidden states."""
    roots = output_roots(w_o)
    for rows in task.sample():
        capture = task.layer.capture_blocks(task.stream, rows, "heads")
        q, k, v = capture.heads
        check_finite(task.layer.index, q, k, v)
        causal = getattr(task.layer.attention, "is_causal", True)
        options, weights = capture.options, task.position_weights[rows].to(q.device)
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        bias = options.get("position_bias")
        significance, distances = significance_of(q, k, v, capture.mask, scaling, roots, weights, bias, causal)
        visible = visible_keys(capture.mask, k) * weights.any(1, keepdim=True)
        moments.add(unrotate(q, rotary), unrotate(k, rotary), v, significance, visible, distances)
    return moments.averaged()


def _attended_values(task: Task, maps: HeadMaps) -> Tensor:
    """Second moments (H, m e, m e) of the attention-weighted stacked values of each query head."""
    heads, groups = task.pair.heads(task.module)
    width = heads.kv // groups * heads.value_dim
    device = float64_device(task.pair.source.device)
    moments = torch.zeros(heads.query, width, width, dtype=torch.float64, device=device)
    merged = task.converted_layer(maps)
    for rows in task.sample():
        v = task.layer.capture_blocks(task.stream, rows, "heads").heads[2]  # recomputed: storing all takes memory
        capture = merged.capture_blocks(task.stream, rows, "heads")
        q, k, _ = capture.heads
        stacked = stack_groups(v if maps.order is None else v[:, maps.order], groups).transpose(0, 1)  # (B, G, T, m e)
        width_at_once = width if q[..., 0].numel() * k.shape[2] <= MAX_SCORES else heads.value_dim
        attend = partial(task.pair.target.attend, merged.attention, q, k, mask=capture.mask, **capture.options)
        attended = torch.cat([attend(v=part) for part in stacked.split(width_at_once, -1)], -1)  # (B, T, H, m e)
        attended = attended * task.position_weights[rows].sqrt()[..., None, None].to(attended)
        add_products(moments, attended.flatten(0, 1).transpose(0, 1))
    return moments / task.position_weights[torch.cat(task.sample())].numel()


def _refit(task: Task, maps: HeadMaps, w_o: Tensor) -> LayerResult:
    """Refit W_O (H e, D) by weighted ridge regression of the targets on the merged heads' outputs."""
    assert maps.output is not None
    merged, device = task.converted_layer(replace(maps, output=None)), task.pair.target.device
    gram, cross, energy = w_o.new_zeros(len(w_o), len(w_o)), torch.zeros_like(w_o), w_o.new_zeros(())
    bias = getattr(merged.projection, "bias", None)
    for capture in merged.capture(task.stream, "head_outputs"):
        root = task.position_weights[capture.rows].flatten().sqrt()[:, None].to(device)
        target = task.targets[capture.rows].flatten(0, 1).to(device, torch.float32)
        target = (target if bias is None else target - bias) * root
        if task.head_outputs is not None:
            task.head_outputs[capture.rows] = capture.head_outputs.cpu()
        rows = capture.head_outputs.flatten(0, 1) * root
        energy += as_float64(target.square().sum(1)).sum()
        add_products(gram, rows)
        add_products(cross, rows, target)
    count = int(task.position_weights.count_nonzero())
    start = maps.output.to(w_o).T @ w_o
    fitted = ridge(gram / count, cross / count, start, task.pair.options.ridge)  # the new W_O
    output = maps.output.to(w_o).T + (fitted - start) @ pseudo_inverse(w_o.T @ w_o, CUT**2) @ w_o.T
    fitted = output @ w_o  # all of it, unless W_O has fewer rows than columns
    residual = float(energy) + float((fitted * (gram @ fitted - 2 * cross)).sum())
    error = max(residual, 0.0) / max(float(energy), 1e-300)
    return LayerResult(task.module, replace(maps, output=output.T.cpu()), error)
