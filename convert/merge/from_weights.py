"""Maps from the weights alone: second moments of keys, queries and values are estimated, not measured on text.

No forward pass: moments are W E[x x^T] W^T with E[x x^T] estimated layer by layer (mean field). The residual stream
starts as the token embeddings; attention adds the average of two tokens' values, an MLP its output for Gaussian inputs
(docs/methods.md). This captures the few directions that are hundreds of times as large as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.family import LayerHeads, Symmetry
from gqa.convert.heads.modules import AttentionModule, attention_modules, find_embeddings, find_mlp, module_changes
from gqa.convert.merge.linear_algebra import procrustes_key, procrustes_value, typical_energy
from gqa.convert.merge.moments import Moments, find_order, head_maps, heads_of
from gqa.convert.methods import HeadMaps, query_order
from gqa.convert.plan import Plan

MlpInput = Literal["normed", "residual", "attention_input"]
_ATTENDED_TOKENS = 2  # attention averages the values of so many tokens
_MOST_ENERGY = 10.0  # of an embedding, relative to the typical one; trained tokens have up to 5 times as much
_SHRINKAGE = 0.01  # weight of the identity; keeps the estimate positive definite
_NODES = 241  # quadrature nodes for Gaussian integrals
_ROWS = 16_384  # embeddings converted to float64 at a time
_PROBES = 512  # random projections for pre-activation variances of wide MLPs: error sqrt(2 / n) = 6 %
_BLOCKS = 8  # column blocks of a triangular product: 9/16 of the work of a full one


def from_weights(plan: Plan, search: bool = False, device: str = "cpu") -> Iterator[tuple[str, HeadMaps]]:
    """Yield path and maps of each attention module. Raises RefusedError if weights are NaN or Inf.

    `aligned`: closed form on estimated inputs; `procrustes`: rotate and average.
    search: Find the grouping with the least loss. device: For large products.
    """
    checkpoint, text, symmetry = plan.checkpoint, plan.config.text, plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    guess, free_keys, stream = plan.merging.traits.guesses, symmetry.free_keys(text), None
    modules = sorted(attention_modules(checkpoint, plan.config), key=lambda module: module.layer)
    changed = [(m, module_changes(m, plan.config, plan.groups, symmetry.rules)) for m in modules]
    last = max(number for number, (_, changes) in enumerate(changed) if changes[0].groups < changes[0].heads.kv)
    for number, (module, changes) in enumerate(changed[: last + 1]):
        heads, groups, stored = changes[0].heads, changes[0].groups, heads_of(checkpoint, changes)
        if not all(bool(tensor.sum().isfinite()) for tensor in stored.values()):
            raise RefusedError(f"{module.path} of {checkpoint.name} contains NaN or Inf; its heads cannot be aligned")
        width = stored["key"].shape[-1]
        stream = stream or InputMoments(checkpoint, text, symmetry, width, guess, device)
        gain = norm_gain(checkpoint, module, symmetry, width).float()
        stream.enter(module)
        for role in ("query", "key", "value") if groups < heads.kv else ("value",):
            rows = stream.project((stored[role] * gain).flatten(0, 1))
            stored[role] = rows.unflatten(0, stored[role].shape[:2])
        if number < last:
            stream.add(module, gain, stored["output"], stored["value"])
        if groups >= heads.kv:
            continue
        # Estimated moments do not show how frequencies correlate: merging each alone loses less.
        rotary, order = replace(symmetry.rotary(text, module.layer, heads.key_dim), frequencies=()), None
        if search:
            order = find_order(_estimated(stored, heads, 1), stored["output"].double(), groups, rotary, free_keys)
        if order:
            orders = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
            stored = {role: tensor[orders[len(tensor)]] for role, tensor in stored.items()}
        moments, m = _estimated(stored, heads, groups), heads.kv // groups
        if guess:
            keys = moments.shared_keys(rotary)
            values = moments.shared_values((group[None] for group in moments.values), stored["output"])
        else:
            keys = [procrustes_key(group, rotary, m) for group in moments.keys]
            values = [procrustes_value(group, m, heads.query // heads.kv) for group in moments.values]
        yield module.path, head_maps(heads, groups, keys if free_keys else (), values, order)


def _estimated(rows: dict[str, Tensor], heads: LayerHeads, groups: int) -> Moments:
    """Moments of each group from factors R (n, w, K) by role (`InputMoments.project`): E[h h^T] = R R^T."""

    def moments_of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """Second moments (parts, w, w) and means (parts, w) of `role`, whose heads are split into `parts` of w rows."""
        whole = rows[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, w, K)
        bias = rows.get(f"{role}.bias")
        means = whole.new_zeros(whole.shape[:2]).double() if bias is None else bias.reshape(parts, -1).double()
        return torch.stack([gram(part.double()) for part in whole]) + means[:, :, None] * means[:, None, :], means

    queries = moments_of("query", heads.query)[0].unflatten(0, (heads.kv, -1)).sum(1)
    distances = queries.new_zeros(heads.kv, 0)
    return Moments(*moments_of("key", groups), queries, moments_of("value", groups)[0], distances)


class InputMoments:
    """E[x x^T] of the inputs of attention, layer by layer: (D, D) with trace D.

    Estimated while every layer is attention and MLP, both added to the residual stream, with norms before, after or
    both. From the first layer with other parts (experts, other mixers) on, E[x x^T] is taken to be the identity.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Any, symmetry: Symmetry, width: int, guess: bool, device: str
    ) -> None:
        """`config`: of the text part; `width`: D. Without `guess` E[x x^T] is the identity everywhere. Large products
        run on `device` in float32; factorisations and sums stay in float64.
        """
        self._checkpoint, self._config, self._symmetry, self._width = checkpoint, config, symmetry, width
        self._layer, self._device = 0, device
        self._sum = self._embedded() if guess else None
        # (D, D) lower triangle L: L L^T are the moments of the normed stream that the current layer reads, before its
        # norm's gain; float32 on `device`. None for the identity.
        self.factor: Tensor | None = None

    def enter(self, module: AttentionModule) -> None:
        """Advance to the layer of `module` and set `factor`; None if the moments are unknown or not finite."""
        self.factor = None
        if module.layer != self._layer:  # layers without attention lie between
            self._sum = None
        if self._sum is None:
            return
        # After a norm the trace is `_width`.
        moments = self._sum * ((1 - _SHRINKAGE) * self._width / self._sum.trace().clamp_min(1e-30))
        moments.diagonal().add_(_SHRINKAGE)
        factor, failed = torch.linalg.cholesky_ex(moments)
        if not bool(failed) and bool(factor.sum().isfinite()):
            self.factor = factor.float().to(self._device)

    def project(self, weights: Tensor) -> Tensor:
        """W (n, D) -> W L, float32 on the CPU: (W L)(W L)^T are the moments of W x. Linearly dependent rows stay
        dependent up to rounding.
        """
        return weights.float() if self.factor is None else by_lower(weights.to(self.factor), self.factor).cpu()

    @torch.no_grad()  # some activations have parameters
    def add(self, module: AttentionModule, gain: Tensor, output: Tensor, value: Tensor) -> None:
        """Advance the estimate through the layer last entered. gain (D,): of the norm before attention; output
        (H, e, D): heads of W_O; value (Hk, e, D): value heads, already projected.
        """
        mlp = None if self.factor is None else self._find_mlp(module, gain)
        if self._sum is None or self.factor is None or mlp is None:
            self._sum = None
            return
        values = value.repeat_interleave(len(output) // len(value), 0).flatten(0, 1).to(self.factor)
        added = self._normed(output.flatten(0, 1).to(self.factor).mT @ values / _ATTENDED_TOKENS**0.5, mlp.after[:1])
        before = float(self._sum.trace())
        self._sum.add_(gram(added).cpu())
        root, size = self.factor, float(self._sum.trace())
        if mlp.input != "attention_input":
            root = torch.cat([root * (before / self._width) ** 0.5, added], 1)  # of the residual stream
            root *= 1.0 if mlp.input == "residual" else (self._width / size) ** 0.5
        self._sum.add_(gram(self._normed(mlp.root(root), mlp.after[1:])).cpu())
        self._layer += 1

    def _normed(self, root: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
        """Scale R (D, n) as the layer does before the residual add: by post-norm gain (D,) and residual multiplier."""
        for gain in norm:
            root = root * (gain * (self._width / root.square().sum().clamp_min(1e-30)).sqrt())[:, None].to(root)
        scale = getattr(self._config, "residual_multiplier", None) or 1.0
        return root if scale == 1 else root * float(scale)

    def _embedded(self) -> Tensor | None:
        """Moments of token embeddings (all tokens equally likely) and learned positions; None without such a table.

        Layers read hidden states through norms, in which a token with a larger embedding weighs no more. So the energy
        of a row counts up to _MOST_ENERGY times the typical one: none rules the moments.
        """
        tables = find_embeddings(self._checkpoint, self._config, self._width)
        if not tables:
            return None

        moments = torch.zeros(self._width, self._width, dtype=torch.float64)
        for spec in tables:
            table = self._checkpoint.read(spec)
            energies = torch.cat([rows.double().square().sum(1) for rows in table.split(_ROWS)])
            most = _MOST_ENERGY * typical_energy(energies)

            for rows, energy in zip(table.split(_ROWS), energies.split(_ROWS), strict=True):
                shares = (most / energy.clamp_min(most)).sqrt()
                bounded = rows.double() * shares[:, None]
                moments += bounded.mT @ bounded / len(table)
        return moments * self._symmetry.embedded(self._config) ** 2

    def _find_mlp(self, module: AttentionModule, gain: Tensor) -> Mlp | None:
        """The layer's MLP, or None if the layer has other parts."""
        tensors = find_mlp(self._checkpoint, self._config, self._symmetry, module, self._width)
        if tensors is None:
            return None
        if tensors.norm:
            gain = _gain(self._checkpoint, tensors.norm, self._symmetry)

        def read(spec: TensorSpec) -> Tensor:
            matrix = self._checkpoint.read(spec).to(self._device).float()
            return matrix.mT if self._symmetry.transposed else matrix

        up, down = read(tensors.up), read(tensors.down)
        gate = read(tensors.gate) if tensors.gate and tensors.gate != tensors.up else None
        if tensors.gate == tensors.up:
            gate, up = up.chunk(2)
        mlp_input: MlpInput = "normed" if tensors.norm else "residual" if tensors.after else "attention_input"
        after = tuple(_gain(self._checkpoint, spec, self._symmetry) for spec in tensors.after)
        return Mlp(gate, up, down, ACT2FN[tensors.act], mlp_input, after, gain)


@dataclass(frozen=True)
class Mlp:
    """down(act(up x)), or down(act(gate x) * up x): `gate` and `up` (F, D), `down` (D, F). `input`: the normed stream,
    the residual stream itself, or the input of attention. `after`: gains (D,) of the norms after attention and after
    the MLP, if any. `gain` (D,): of the norm before the MLP.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]
    input: MlpInput = "normed"
    after: tuple[Tensor, ...] = ()
    gain: Tensor | None = None

    def root(self, root: Tensor) -> Tensor:
        """Factor R (D, F + 1) of the output moments for x ~ N(0, root root^T), ignoring correlations between units
        beyond their means. `root` is (D, n).

        Wide layers: project the n columns on `_PROBES` random sign vectors; inner products stay unbiased (Johnson
        and Lindenstrauss).
        """
        root = root.to(self.up)
        if len(root) > 2 * _PROBES:
            signs = torch.randint(2, (root.shape[1], _PROBES), generator=torch.Generator().manual_seed(0)).to(root)
            root = root @ ((2 * signs - 1) / _PROBES**0.5)
        if self.gain is not None:
            root = self.gain[:, None].to(root) * root
        up = self.up @ root
        first = up if self.gate is None else self.gate @ root
        variance = first.square().sum(1, keepdim=True).clamp_min(1e-30)
        nodes = torch.linspace(-6, 6, _NODES).to(root)
        weights = torch.exp(-nodes.square() / 2)
        weights, nodes = weights / weights.sum(), variance.sqrt() * nodes  # (F, nodes)
        acted = self.act(nodes)
        if self.gate is not None:  # up = slope * gate + a part independent of the gate
            slope = (first * up).sum(1, keepdim=True) / variance
            independent = up.square().sum(1, keepdim=True) - slope.square() * variance
            mean = (acted * slope * nodes) @ weights
            square = (acted.square() * (slope.square() * nodes.square() + independent)) @ weights
        else:
            mean, square = acted @ weights, acted.square() @ weights
        spread = (square - mean.square()).clamp_min(0).sqrt()
        return torch.cat([self.down * spread, (self.down @ mean)[:, None]], 1)


def by_lower(rows: Tensor, lower: Tensor) -> Tensor:
    """rows (n, D) @ lower (D, D), a lower triangle whose zeros are skipped."""
    step, product = -(-len(lower) // _BLOCKS), torch.empty_like(rows)
    for at in range(0, len(lower), step):
        torch.mm(rows[:, at:], lower[at:, at : at + step], out=product[:, at : at + step])
    return product


def gram(rows: Tensor) -> Tensor:
    """rows rows^T of (n, K) rows; the upper triangle is copied from the lower one."""
    step, product = -(-len(rows) // _BLOCKS), rows.new_empty(len(rows), len(rows))
    for at in range(0, len(rows), step):
        block = rows[at:] @ rows[at : at + step].mT
        product[at:, at : at + step] = block
        product[at : at + step, at:] = block.mT
    return product


def norm_gain(checkpoint: Checkpoint, module: AttentionModule, symmetry: Symmetry, width: int) -> Tensor:
    """Gain (D,) of the norm before attention; ones for cross-attention."""
    for norm in symmetry.norms if module.kind != "cross" else ():
        spec = checkpoint.tensors.get(f"{module.layer_path}.{norm}.weight")
        if spec is not None and spec.shape == (width,):
            return _gain(checkpoint, spec, symmetry)
    return torch.ones(width, dtype=torch.float64)


def _gain(checkpoint: Checkpoint, spec: TensorSpec, symmetry: Symmetry) -> Tensor:
    return checkpoint.read(spec).double() + (1.0 if symmetry.one_plus else 0.0)
