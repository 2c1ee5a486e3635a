"""What attention layers are given, guessed from the weights before them: second moments of the residual stream.

A mean field: the stream begins as the vocabulary's embeddings, attention adds the average of two tokens' values, an MLP
what it makes of Gaussian inputs (docs/methods.md). So the few directions that are written hundreds of times as
large as all others are known, and nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.layout import Conv1D
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.symmetries import Symmetry

# What the matrices of an MLP are called: gate (or none), up, down. The same name twice: the halves of one matrix.
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "c_fc", "c_proj"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # what configs call it
_ELSEWHERE = re.compile(r"lm_head|embed_out|output|\.\d+\.")  # what is no embedding, whatever its shape
_POSITIONS = re.compile(r"position|wpe")
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
        self._sum = self._embedded() if guess and not config.is_encoder_decoder else None

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
        stored = self._checkpoint.tensors
        tables = {n: s for n, s in stored.items() if s.shape[1:] == (self._width,) and not _ELSEWHERE.search(n)}
        rows = getattr(self._config, "vocab_size", None)
        tokens = [name for name, spec in tables.items() if spec.shape[0] == rows and not _POSITIONS.search(name)]
        if len(tokens) != 1:
            return None
        found = torch.zeros(self._width, self._width, dtype=torch.float64)
        for name in (*tokens, *filter(_POSITIONS.search, tables)):
            table = self._checkpoint.read(tables[name]).double()
            found += table.mT @ table / len(table)
        return found

    def _find_mlp(self, module: AttentionModule, gain: Tensor) -> Mlp | None:
        """Of the layer of `module`, if that is all there is beside attention and norms."""
        prefix, inside = f"{module.layer_path}.", {spec.name for spec in module.tensors.values()}
        others = {n.removeprefix(prefix): s for n, s in self._checkpoint.tensors.items() if n.startswith(prefix)}
        others = {name: spec for name, spec in others.items() if spec.name not in inside}
        matrices = {
            name.removesuffix(".weight").rpartition(".")[2]: s for name, s in others.items() if len(s.shape) > 1
        }
        norms = [name for name, spec in others.items() if spec.shape == (self._width,) and name.endswith(".weight")]
        norms = [name for name in norms if name.removesuffix(".weight") not in self._symmetry.norms]
        names = next((names for names in _MLPS if set(names) - {None} == matrices.keys()), None)
        acts = [getattr(self._config, field, None) for field in _ACTIVATIONS]
        act = next((act for act in acts if act in ACT2FN), None)
        if names is None or act is None or len(norms) > 1 or any(len(spec.shape) != 2 for spec in matrices.values()):
            return None
        if norms:
            gain = _gain(self._checkpoint, others[norms[0]], self._symmetry)
        gain = gain.float()
        read = {name: self._checkpoint.read(spec).float() for name, spec in matrices.items()}
        if isinstance(self._symmetry.output.layout, Conv1D):
            read = {name: matrix.mT for name, matrix in read.items()}
        up, down = read[names[1]] * gain, read[names[2]]
        gate = read[names[0]] * gain if names[0] else None
        if names[0] == names[1]:
            gate, up = up.chunk(2)
        return Mlp(gate, up, down, ACT2FN[act], beside=not norms)


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
