"""What attention layers are given, guessed from the weights before them: second moments of the residual stream.

A mean field: the stream begins as the vocabulary's embeddings, attention adds the average of two tokens' values, an MLP
what it makes of Gaussian inputs (docs/methods.md). So the few directions that are written hundreds of times as
large as all others are known, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.blocks import find_embeddings, find_mlp
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.symmetries import Symmetry

Reads = Literal["normed", "stream", "attention's"]
_TOKENS = 2  # whose values attention averages
_SHARE = 0.01  # of independent inputs in the guess, for what it does not see
_NODES = 241  # of an integral over a Gaussian
_LITTLE = (1e-9, 1e-7, 1e-5, 1e-3)  # of independent inputs, until rounding leaves a matrix positive
_ROWS = 16_384  # of a table in float64 at a time
_PROBES = 512  # by which what a wide MLP's units are given is estimated: variances to 6 %, sqrt(2 / n)
_BLOCKS = 8  # columns of a triangle are multiplied in so many parts: 9/16 of the work of a square


@dataclass(frozen=True)
class Inputs:
    """What a layer is given: E[x x^T] = `factor` `factor`^T with a lower triangle (D, D), float32 where products are
    made; None where inputs are independent. Of a guess `_SHARE` is independent, for what it does not see.
    """

    factor: Tensor | None
    width: int

    def through(self, weights: Tensor) -> Tensor:
        """(n, D) rows of weights -> (n, K) float32 rows on the CPU, whose products with each other are the moments of
        what the weights make of these inputs. Rows that depend on each other still do, to the square of a rounding
        error in the moments.
        """
        if self.factor is None:
            return weights.float()
        guessed = by_lower(weights.to(self.factor), self.factor).cpu()
        return torch.cat([(1 - _SHARE) ** 0.5 * guessed, _SHARE**0.5 * weights.float()], 1)


class Stream:
    """E[x x^T] of what attention layers are given, one layer after another: (D, D), with a trace of D.

    Known where every layer is attention and MLP, both added to the stream, with norms before, after or both; from a
    layer on that is something else (experts, other mixers) inputs are taken to be independent.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Any, symmetry: Symmetry, width: int, guess: bool = True,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """`config` is that of the text part, D = `width`; without `guess` inputs are independent everywhere. Large
        products are made on `device`, in float32; what is factored and added up stays in float64.
        """
        self._checkpoint, self._config, self._symmetry, self._width = checkpoint, config, symmetry, width
        self._layer, self._device = 0, device
        self._sum = self._embedded() if guess else None
        self._factor: Tensor | None = None  # of the normed stream that the present layer reads

    def given(self, module: AttentionModule) -> Inputs:
        """Of the normed stream that `module` reads, before its norm's gain."""
        if module.layer != self._layer:  # layers without heads are between
            self._sum = None
        self._factor = self._factored()
        return Inputs(self._factor, self._width)

    @torch.no_grad()  # some activations have weights
    def add(self, module: AttentionModule, gain: Tensor, output: Tensor, value: Tensor) -> None:
        """Go through the layer of `module`, which was given last: its norm has `gain` (D,), its heads are `output`
        (H, e, D) and `value` (Hk, e, D).
        """
        mlp = None if self._factor is None else self._find_mlp(module, gain)
        if self._sum is None or self._factor is None or mlp is None:
            self._sum = None
            return
        values = by_lower((value * gain).flatten(0, 1).to(self._factor), self._factor)  # (Hk e, D)
        values = values.unflatten(0, value.shape[:2]).repeat_interleave(len(output) // len(value), 0).flatten(0, 1)
        through = output.flatten(0, 1).to(self._factor).mT @ values
        self._sum = self._sum + self._added(gram(through).double().cpu() / _TOKENS, mlp.after[:1])
        inside = self._factor if mlp.reads == "attention's" else self._factored()
        if inside is not None and mlp.reads == "stream":  # which is as large as it is
            inside = inside * (float(self._sum.trace()) / self._width) ** 0.5
        self._sum = None if inside is None else self._sum + self._added(mlp.moments(inside), mlp.after[1:])
        self._layer += 1

    def _added(self, moments: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
        """Of what is added to the stream, the moments of what attention or the MLP computes: a `norm` after it makes it
        as large as its gain (D,), and some configs multiply it.
        """
        for gain in norm:
            moments = moments * (self._width / moments.trace().clamp_min(1e-30)) * torch.outer(gain, gain)
        scale = float(getattr(self._config, "residual_multiplier", None) or 1.0)
        return moments * scale**2

    def _factored(self) -> Tensor | None:
        """The lower triangle of the normed stream's moments; None where they are no numbers, or not known."""
        if self._sum is None:
            return None
        moments = self._sum * (self._width / self._sum.trace().clamp_min(1e-30))  # a norm makes them as large as that
        own, diagonal = moments.diagonal().clone(), moments.diagonal()
        for little in _LITTLE:
            diagonal.copy_(own + little)
            factor, failed = torch.linalg.cholesky_ex(moments)
            if not bool(failed) and bool(factor.sum().isfinite()):
                found: Tensor = factor.float().to(self._device)
                return found
        return None

    def _embedded(self) -> Tensor | None:
        """Of the vocabulary, each token once, and of learned positions. None where there is no such table."""
        found = torch.zeros(self._width, self._width, dtype=torch.float64)
        tables = find_embeddings(self._checkpoint, self._config, self._width)
        for spec in tables:
            for stored in self._checkpoint.read(spec).split(_ROWS):
                rows = stored.double()
                found += rows.mT @ rows / spec.shape[0]
        return found * self._symmetry.embedded(self._config) ** 2 if tables else None

    def _find_mlp(self, module: AttentionModule, gain: Tensor) -> Mlp | None:
        """Of the layer of `module`, if that is all there is beside attention and norms."""
        found = find_mlp(self._checkpoint, self._config, self._symmetry, module, self._width)
        if found is None:
            return None
        if found.norm:
            gain = _gain(self._checkpoint, found.norm, self._symmetry)

        def read(spec: TensorSpec) -> Tensor:
            matrix = self._checkpoint.read(spec).to(self._device).float()
            return matrix.mT if self._symmetry.transposed else matrix

        gain = gain.float().to(self._device)
        up, down = read(found.up) * gain, read(found.down)
        gate = read(found.gate) * gain if found.gate and found.gate != found.up else None
        if found.gate == found.up:
            gate, up = up.chunk(2)
        reads: Reads = "normed" if found.norm else "stream" if found.after else "attention's"
        after = tuple(_gain(self._checkpoint, spec, self._symmetry) for spec in found.after)
        return Mlp(gate, up, down, ACT2FN[found.act], reads, after)


@dataclass(frozen=True)
class Mlp:
    """down(act(up x)), or down(act(gate x) * up x): `gate` and `up` (F, D) with the norm's gain in them, `down` (D, F).
    `reads`: the normed stream, the stream as it is, or what attention reads. `after`: the gains (D,) of norms of what
    attention and it add, if they are there.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]
    reads: Reads = "normed"
    after: tuple[Tensor, ...] = ()

    def moments(self, factor: Tensor) -> Tensor:
        """E[y y^T] (D, D), float64, of its output for Gaussian inputs of no mean and E[x x^T] = `factor` `factor`^T, if
        units depended on each other only by their means.
        """
        factor = factor.to(self.up)
        up = _sizes(self.up, factor)
        first = up if self.gate is None else _sizes(self.gate, factor)
        variance = first.square().sum(1, keepdim=True).clamp_min(1e-30)
        nodes = torch.linspace(-6, 6, _NODES).to(factor)
        weights = torch.exp(-nodes.square() / 2)
        weights, nodes = weights / weights.sum(), variance.sqrt() * nodes  # (F, nodes)
        acted = self.act(nodes)
        if self.gate is not None:  # up = slope * gate + what does not depend on the gate
            slope = (first * up).sum(1, keepdim=True) / variance
            beside = up.square().sum(1, keepdim=True) - slope.square() * variance
            mean = (acted * slope * nodes) @ weights
            square = (acted.square() * (slope.square() * nodes.square() + beside)) @ weights
        else:
            mean, square = acted @ weights, acted.square() @ weights
        middle, spread = self.down @ mean, (square - mean.square()).clamp_min(0).sqrt()
        return (gram(self.down * spread) + torch.outer(middle, middle)).cpu().double()


def _sizes(rows: Tensor, lower: Tensor) -> Tensor:
    """(n, D) @ (D, D) of a lower triangle L; of a wide one (n, `_PROBES`), the same by L R of random signs R, whose
    products of one row with another are off by chance and right on average (Johnson and Lindenstrauss).
    """
    if len(lower) <= 2 * _PROBES:
        return by_lower(rows, lower)
    signs = torch.randint(2, (len(lower), _PROBES), generator=torch.Generator().manual_seed(0)).to(lower) * 2 - 1
    found: Tensor = rows @ (lower @ signs / _PROBES**0.5)
    return found


def by_lower(rows: Tensor, lower: Tensor) -> Tensor:
    """(n, D) @ (D, D) of a lower triangle, whose zeros are not multiplied."""
    step = -(-len(lower) // _BLOCKS)
    return torch.cat([rows[:, at:] @ lower[at:, at : at + step] for at in range(0, len(lower), step)], 1)


def gram(rows: Tensor) -> Tensor:
    """(n, K) @ its transpose; what is above the diagonal is copied from below."""
    step, found = -(-len(rows) // _BLOCKS), rows.new_empty(len(rows), len(rows))
    for at in range(0, len(rows), step):
        block = rows[at:] @ rows[at : at + step].mT
        found[at:, at : at + step] = block
        found[at : at + step, at:] = block.mT
    return found


def norm_gain(checkpoint: Checkpoint, module: AttentionModule, symmetry: Symmetry, width: int) -> Tensor:
    """What the norm before attention multiplies each component with, (D,): of what another sequence is, nothing."""
    for norm in symmetry.norms if module.kind != "cross" else ():
        spec = checkpoint.tensors.get(f"{module.layer_path}.{norm}.weight")
        if spec is not None and spec.shape == (width,):
            return _gain(checkpoint, spec, symmetry)
    return torch.ones(width, dtype=torch.float64)


def _gain(checkpoint: Checkpoint, spec: TensorSpec, symmetry: Symmetry) -> Tensor:
    return checkpoint.read(spec).double() + (1.0 if symmetry.one_plus else 0.0)
