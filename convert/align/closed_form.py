"""The closed form of one layer: what its heads compute on a text, and the maps that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.devices import as_float64
from gqa.checkpoint.errors import listing
from gqa.convert.align.alignment import CUT, pseudo_inverse, ridge, shared_key, shared_value, unturned
from gqa.convert.align.grouping import LayerMoments, find_order
from gqa.convert.align.layerwise import Stop, watched
from gqa.convert.align.pair import Pair, Streams, attention_of, check_finite, inputs_of, until_stop
from gqa.convert.heads.layout import Conv1D, LayerHeads
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.symmetries import Rotary, Symmetry
from gqa.convert.maps import HeadMaps, query_order


@dataclass
class Moments:
    """Sums of products of what heads compute, float64. Shapes: see `shared_key` and `shared_value`."""

    keys: Tensor
    key_means: Tensor
    queries: Tensor
    values: Tensor
    count: int

    @classmethod
    def zeros(cls, heads: LayerHeads, groups: int) -> Moments:
        m, d, e = heads.kv // groups, heads.key_dim, heads.value_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            zeros(groups, m * d, m * d), zeros(groups, m * d), zeros(heads.kv, d, d), zeros(groups, m * e, m * e), 0
        )

    def add(self, q: Tensor, k: Tensor, v: Tensor, significance: Tensor) -> None:
        """(B, H, T, d) queries, (B, Hk, T, d) keys, (B, Hk, T, e) values, (B, H, T) what errors of scores do."""
        groups = len(self.keys)  # one for the whole layer
        keys, values = stack_groups(k, groups), stack_groups(v, groups)
        rows = as_float64(keys.flatten(1, 2))  # (G, n, m d)
        self.keys += (rows.mT @ rows).cpu()
        self.key_means += rows.sum(1).cpu()
        rows = as_float64(values.flatten(1, 2))
        self.values += (rows.mT @ rows).cpu()
        rows = as_float64((q * significance.sqrt().unsqueeze(-1)).transpose(0, 1).flatten(1, 2))  # (H, n, d)
        self.queries += (rows.mT @ rows).unflatten(0, (k.shape[1], -1)).sum(1).cpu()
        self.count += q.shape[0] * q.shape[2]

    def of_layer(self, w_o: Tensor) -> LayerMoments:
        """What grouping looks at, of moments of one group; w_o (H, e, D)."""
        n, kv = self.count, len(self.queries)
        gains = (w_o.double() @ w_o.double().mT).unflatten(0, (kv, -1)).sum(1)
        return LayerMoments(self.keys[0] / n, self.key_means[0] / n, self.queries / n, self.values[0] / n, gains)

    def regrouped(self, order: tuple[int, ...], groups: int) -> Moments:
        """Of one group -> those of `groups` groups of heads in that order."""
        heads = torch.tensor(order).view(groups, -1)

        def rows(dim: int) -> Tensor:  # (G, m d)
            return (heads[:, :, None] * dim + torch.arange(dim)).flatten(1)

        def blocks(matrix: Tensor) -> Tensor:
            index = rows(len(matrix) // len(order))
            return matrix[index[:, :, None], index[:, None, :]]

        means = self.key_means[0][rows(self.key_means.shape[1] // len(order))]
        return Moments(blocks(self.keys[0]), means, self.queries[list(order)], blocks(self.values[0]), self.count)


def significance_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, roots: Tensor, causal: bool = True
) -> Tensor:
    """(B, H, T) how far an error of one score of a query moves the layer's output, squared and summed over its keys.

    To first order a score that is off by s moves the output by a s W_O (v - o), a the attention paid to the key, v its
    value and o what the query sees. Caps and sinks are left out: it is a weight. Shapes as in `Moments.add`; `roots`
    (H, e, e) are `output_roots`; `causal` is what no mask means.
    """
    repeat, length = q.shape[1] // k.shape[1], q.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril(0 if causal else length)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, -torch.inf)
    found = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        added = mask[:, min(head, mask.shape[1] - 1)].float().expand(len(q), -1, -1)
        scores = torch.baddbmm(added, q[:, head].float(), k[:, head // repeat].float().mT, alpha=scaling)  # (B, T, T)
        paid = scores.softmax(-1).nan_to_num()
        values = v[:, head // repeat].float() @ roots[head].to(v.device)  # (B, T, e)
        given, sizes = paid @ values, values.square().sum(-1, keepdim=True)
        sums = paid.square() @ torch.cat([values, sizes, torch.ones_like(sizes)], -1)  # of a^2 v, a^2 |v|^2 and a^2
        away = sums[..., -2] + sums[..., -1] * given.square().sum(-1) - 2 * (given * sums[..., :-2]).sum(-1)
        found[:, head] = away.clamp_min(0)
    return found


def output_roots(w_o: Tensor) -> Tensor:
    """(H, e, D) -> (H, e, e): R with |R x| = |W_O x| for each head, in fewer numbers."""
    values, vectors = torch.linalg.eigh(w_o.double() @ w_o.double().mT)
    roots: Tensor = vectors * values.clamp_min(0).sqrt()[:, None, :]
    return roots.float()


def position_weights(stream: Tensor) -> Tensor:
    """(N, T, D) -> (N, T) what an error at a position counts, one on average: the norm that reads the stream next
    divides by its size, and a few positions (the first, for one) are hundreds of times as large as the others.
    """
    found = 1 / stream.float().square().mean(-1).clamp_min(1e-30)
    return found / found.mean()


def stack_groups(heads: Tensor, groups: int) -> Tensor:
    """(B, Hk, T, d) -> (G, B, T, m * d)."""
    stacked: Tensor = heads.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return stacked.flatten(3)


@dataclass(frozen=True)
class Wanted:
    """What an attention layer should compute at N x T positions.

    inputs: (N, T, H * e) what the source's W_O is given on the source's own stream.
    drift: (N, T, D) what W_O should give beside that, see `gqa.convert.align.calibration`.
    counts: (N, T) how much an error counts, see `position_weights`.
    """

    inputs: Tensor
    drift: Tensor
    counts: Tensor


@dataclass(frozen=True)
class ClosedForm:
    """The maps of a layer, the relative error that is left, and what W_O could not be fitted to, in words."""

    maps: HeadMaps
    error: float
    warning: str = ""


def closed_form(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    own: nn.Module,
    attention: nn.Module,
    symmetry: Symmetry,
    wanted: Wanted,
    strength: float,
    search: bool = False,
) -> ClosedForm:
    """Keys, then values as the merged attention sees them, then the refit of W_O.

    Args:
        own, attention: The source's layer and its attention, with their weights.
        strength: Of the ridge.
        search: Whether heads are regrouped, all of them being moved together with what belongs to them.
    """
    config, layer = pair.plan.config, module.layer
    heads = config.heads(layer)
    groups = heads.kv * pair.plan.groups // config.main.kv
    w_o = _output_weight(pair, module, symmetry).unflatten(0, (heads.query, heads.value_dim))
    moments = Moments.zeros(heads, 1 if search else groups)
    rotary = symmetry.rotary(config.text, layer, heads.key_dim, streams.source.shape[1])
    free_keys = symmetry.free_keys(config.text)
    values = _watch_source(pair, streams, layer, own, attention, moments, rotary, w_o, wanted.counts)
    order = find_order(moments.of_layer(w_o), groups, rotary, free_keys) if search else None
    if search:
        moments = moments.regrouped(order or tuple(range(heads.kv)), groups)
    if order:
        values, rows = [v[:, order] for v in values], query_order(order, heads.query)
        inputs = wanted.inputs.unflatten(-1, (heads.query, -1))[:, :, rows].flatten(2)
        w_o, wanted = w_o[rows], replace(wanted, inputs=inputs)
    maps = replace(_key_maps(moments, heads, groups, rotary, free_keys), order=order)
    maps = _value_maps(pair, streams, module, maps, moments, values, w_o.double(), wanted.counts)
    return _refit(pair, streams, module, maps, symmetry, wanted, strength, w_o.double().flatten(0, 1))


def _watch_source(
    pair: Pair,
    streams: Streams,
    layer: int,
    own: nn.Module,
    attention: nn.Module,
    moments: Moments,
    rotary: Rotary,
    w_o: Tensor,
    counts: Tensor,
) -> list[Tensor]:
    """Adds up moments of the source's heads on the converted stream; returns all values (B, Hk, T, e)."""
    values: list[Tensor] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        check_finite(layer, q, k, v)
        scaling = options.get("scaling") or q.shape[-1] ** -0.5
        causal = getattr(module, "is_causal", True)
        significance = significance_of(q, k, v, mask, scaling, roots, causal) * next(weights)[:, None].to(q.device)
        moments.add(unturned(q, rotary), unturned(k, rotary), v, significance)
        values.append(v.cpu())
        raise Stop

    weights, roots = iter(counts.split(pair.batch)), output_roots(w_o)
    with watched(attention, attend), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, layer):
            until_stop(own, hidden, given)
    return values


def _key_maps(moments: Moments, heads: LayerHeads, groups: int, rotary: Rotary, free_keys: bool) -> HeadMaps:
    """Shared keys with what they ask of the queries; values and outputs are still to come (first of each group)."""
    m, n = heads.kv // groups, moments.count
    weights = torch.zeros(groups, m, dtype=torch.float64)
    weights[:, 0] = 1.0
    if not free_keys:
        return HeadMaps(torch.full_like(weights, 1 / m), weights)
    key, query = [], []
    repeat = heads.query // heads.kv
    for j in range(groups):
        found = shared_key(
            moments.keys[j] / n, moments.queries[j * m : (j + 1) * m] / n, moments.key_means[j] / n, rotary
        )
        key.append(found.key)
        query.append(found.query.repeat_interleave(repeat, 0))
    return HeadMaps(torch.stack(key), weights, torch.cat(query))


def _value_maps(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    maps: HeadMaps,
    moments: Moments,
    values: Sequence[Tensor],
    w_o: Tensor,
    counts: Tensor,
) -> HeadMaps:
    """Shared values from what every query head sees of the stacked values under the merged attention; w_o (H, e, D)."""
    heads = pair.plan.config.heads(module.layer)
    groups, e = len(moments.values), heads.value_dim
    m, repeat = heads.kv // groups, heads.query // heads.kv
    seen = torch.zeros(heads.query, m * e, m * e, dtype=torch.float64)
    changed = pair.load_target(module, pair.weights(module, maps))
    attention = attention_of(changed, module)
    waiting, weights = iter(values), iter(counts.split(pair.batch))

    def attend(own: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        stacked = stack_groups(next(waiting).to(k.device), groups).transpose(0, 1)  # (B, G, T, m e)
        rows = pair.target.attend(own, q, k, stacked, mask, **options)  # (B, T, H, m e)
        rows = rows * next(weights).sqrt()[..., None, None].to(rows)
        for head in range(heads.query):  # one by one: m times as wide as what W_O is given
            one = as_float64(rows[:, :, head]).flatten(0, 1)
            seen[head] += (one.T @ one).cpu()
        raise Stop

    with watched(attention, attend), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, module.layer):
            until_stop(changed, hidden, given)
    owner = torch.arange(m).repeat_interleave(repeat)
    value, output = [], []
    for j in range(groups):
        of = slice(j * m * repeat, (j + 1) * m * repeat)
        found = shared_value(seen[of] / moments.count, moments.values[j] / moments.count, w_o[of] @ w_o[of].mT, owner)
        value.append(found.value)
        output += list(found.output)
    return replace(maps, value=torch.stack(value), output=torch.block_diag(*output))


def _output_weight(pair: Pair, module: AttentionModule, symmetry: Symmetry) -> Tensor:
    """The source's W_O transposed, (H e, D)."""
    spec = module.tensors[f"{symmetry.output.tensor}.weight"]
    weight = pair.plan.checkpoint.read(spec).float()
    return weight if isinstance(symmetry.output.layout, Conv1D) else weight.T


def _refit(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    maps: HeadMaps,
    symmetry: Symmetry,
    wanted: Wanted,
    strength: float,
    w_o: Tensor,
) -> ClosedForm:
    """W_O (H e, D) once more, in least squares over all heads, from what the merged heads really give."""
    assert maps.output is not None
    changed = pair.load_target(module, pair.weights(module, replace(maps, output=None)))
    output = pair.projection(pair.target, module, symmetry.output.tensor)
    width = len(maps.output)
    device, weight = pair.target.device, w_o.float().to(pair.target.device)
    inverse = pseudo_inverse(w_o.T @ w_o, CUT**2) @ w_o.T  # what W_O turns into the drift is asked for on top
    inverse = inverse.float().to(device)
    gram, cross = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    asked = torch.zeros((), dtype=torch.float64)  # energy of what is wanted
    waiting = zip(*(part.split(pair.batch) for part in (wanted.inputs, wanted.drift, wanted.counts)), strict=True)

    def note(given: Tensor) -> None:
        inputs, drift, counts = (part.flatten(0, 1).to(device, torch.float32) for part in next(waiting))
        root = counts.sqrt()[:, None]
        target = (inputs + drift @ inverse) * root
        asked.add_(as_float64((target @ weight).square().sum(1)).sum().cpu())
        rows = as_float64(given.flatten(0, 1).float() * root)
        gram.add_((rows.T @ rows).cpu())
        cross.add_((rows.T @ target.to(rows)).cpu())
        raise Stop

    with inputs_of(output, note), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, module.layer):
            until_stop(changed, hidden, given)
    count = wanted.counts.numel()
    found = ridge(gram / count, cross / count, maps.output, strength)
    fitted = found.T @ w_o  # the new W_O
    left = float(asked) + float((fitted * (gram @ fitted - 2 * cross @ w_o)).sum())
    warning = _undetermined(gram, count, pair.plan.config.heads(module.layer).value_dim)
    return ClosedForm(replace(maps, output=found), max(left, 0.0) / max(float(asked), 1e-300), warning)


def _undetermined(gram: Tensor, count: int, dim: int) -> str:
    """Why the moments (H e, H e) of `count` positions are singular, in words; nothing where no reason is known."""
    if count < len(gram):
        return (
            f"W_O reads {len(gram)} dimensions and is fitted to {count} positions, the ridge decides the rest; "
            "give more --calibration-tokens"
        )
    energy = gram.diagonal().view(-1, dim).sum(1)
    dead = [str(head) for head, small in enumerate((energy <= 1e-12 * energy.max()).tolist()) if small]
    return (
        f"nothing comes from query heads {listing(dead)} on the calibration text; W_O is not fitted there"
        if dead
        else ""
    )
