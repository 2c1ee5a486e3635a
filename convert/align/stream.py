"""What attention layers are given, guessed from the weights before them: second moments of the residual stream.

A mean field: the stream begins as the vocabulary's embeddings, attention adds the average of two tokens' values, an MLP
what it makes of Gaussian inputs (docs/methods.md). So the few directions that are written hundreds of times as
large as all others are known, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.blocks import find_embeddings, find_mlp
from gqa.convert.heads.layout import Conv1D
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.symmetries import Symmetry

_TOKENS = 2  # whose values attention averages
_SHARE = 0.01  # of independent inputs in the guess, for what it does not see
_NODES = 241  # of an integral over a Gaussian


class Stream:
    """E[x x^T] of what attention layers are given, one layer after another: (D, D), with a trace of D.

    Known where every layer is norm, attention, norm and MLP, both added to the stream; from a layer on that is
    something else (experts, norms after attention, other mixers) inputs are taken to be independent.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, symmetry: Symmetry, width: int, guess: bool = True) -> None:
        """`config` is that of the text part, D = `width`; without `guess` inputs are independent everywhere."""
        self._checkpoint, self._config, self._symmetry, self._width = checkpoint, config, symmetry, width
        self._layer = 0
        self._sum = self._embedded() if guess else None

    def given(self, module: AttentionModule) -> Tensor:
        """Of the normed stream that `module` reads, before its norm's gain."""
        independent = torch.eye(self._width, dtype=torch.float64)
        if module.layer != self._layer:  # layers without heads are between
            self._sum = None
        return independent if self._sum is None else (1 - _SHARE) * _normed(self._sum) + _SHARE * independent

    @torch.no_grad()  # some activations have weights
    def add(self, module: AttentionModule, gain: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Go through the layer of `module`, whose norm has `gain` (D,) and whose heads are `stored`: `output`
        (H, e, D) and `value` (Hk, e, D).
        """
        mlp = None if self._sum is None else self._find_mlp(module, gain)
        if self._sum is None or mlp is None:
            self._sum = None
            return
        repeat = len(stored["output"]) // len(stored["value"])
        values = stored["value"].repeat_interleave(repeat, 0).flatten(0, 1) * gain
        through, given = stored["output"].flatten(0, 1).mT @ values, _normed(self._sum)
        self._sum = self._sum + through @ given @ through.mT / _TOKENS
        self._sum = self._sum + mlp.moments(given if mlp.beside else _normed(self._sum))
        self._layer += 1

    def _embedded(self) -> Tensor | None:
        """Of the vocabulary, each token once, and of learned positions. None where there is no such table."""
        found = torch.zeros(self._width, self._width, dtype=torch.float64)
        tables = find_embeddings(self._checkpoint, self._config, self._width)
        for spec in tables:
            table = self._checkpoint.read(spec).double()
            found += table.mT @ table / len(table)
        return found if tables else None

    def _find_mlp(self, module: AttentionModule, gain: Tensor) -> Mlp | None:
        """Of the layer of `module`, if that is all there is beside attention and norms."""
        found = find_mlp(self._checkpoint, self._config, self._symmetry, module, self._width)
        if found is None:
            return None
        if found.norm:
            gain = _gain(self._checkpoint, found.norm, self._symmetry)

        def read(spec: TensorSpec) -> Tensor:
            matrix = self._checkpoint.read(spec).float()
            return matrix.mT if isinstance(self._symmetry.output.layout, Conv1D) else matrix

        up, down = read(found.up) * gain.float(), read(found.down)
        gate = read(found.gate) * gain.float() if found.gate and found.gate != found.up else None
        if found.gate == found.up:
            gate, up = up.chunk(2)
        return Mlp(gate, up, down, ACT2FN[found.act], beside=found.norm is None)


@dataclass(frozen=True)
class Mlp:
    """down(act(up x)), or down(act(gate x) * up x): `gate` and `up` (F, D) with the norm's gain in them, `down` (D, F).
    `beside`: whether it reads what attention reads.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]
    beside: bool

    def moments(self, given: Tensor) -> Tensor:
        """E[y y^T] (D, D) of its output for Gaussian inputs of no mean and E[x x^T] = `given`, if units depended on
        each other only by their means.
        """
        first, given = self.up if self.gate is None else self.gate, given.to(self.up)
        variance = ((first @ given) * first).sum(1, keepdim=True).clamp_min(1e-30)
        nodes = torch.linspace(-6, 6, _NODES).to(given)
        weights = torch.exp(-nodes.square() / 2)
        weights, nodes = weights / weights.sum(), variance.sqrt() * nodes  # (F, nodes)
        acted = self.act(nodes)
        if self.gate is not None:  # up = slope * gate + what does not depend on the gate
            slope = ((self.gate @ given) * self.up).sum(1, keepdim=True) / variance
            beside = ((self.up @ given) * self.up).sum(1, keepdim=True) - slope.square() * variance
            mean = (acted * slope * nodes) @ weights
            square = (acted.square() * (slope.square() * nodes.square() + beside)) @ weights
        else:
            mean, square = acted @ weights, acted.square() @ weights
        middle = self.down @ mean
        return (
            (self.down * (square - mean.square()).clamp_min(0)) @ self.down.mT + torch.outer(middle, middle)
        ).double()


def norm_gain(checkpoint: Checkpoint, module: AttentionModule, symmetry: Symmetry, width: int) -> Tensor:
    """What the norm before attention multiplies each component with, (D,): of what another sequence is, nothing."""
    for norm in symmetry.norms if module.kind != "cross" else ():
        spec = checkpoint.tensors.get(f"{module.layer_path}.{norm}.weight")
        if spec is not None and spec.shape == (width,):
            return _gain(checkpoint, spec, symmetry)
    return torch.ones(width, dtype=torch.float64)


def _gain(checkpoint: Checkpoint, spec: TensorSpec, symmetry: Symmetry) -> Tensor:
    return checkpoint.read(spec).double() + (1.0 if symmetry.one_plus else 0.0)


def _normed(moments: Tensor) -> Tensor:
    """What a norm makes of them: as large as their number."""
    return moments * (len(moments) / moments.trace().clamp_min(1e-30))
