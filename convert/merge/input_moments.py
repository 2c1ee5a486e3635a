"""Second moments of the inputs of attention, estimated from the weights (mean field).

The residual stream starts as the token embeddings; attention adds the average of two tokens'
values, an MLP its output for Gaussian inputs (docs/methods.md). This captures the few directions
that are hundreds of times as large as all others.

A *root* of second moments M (n, n) is any R (n, k) with R R^T = M. Roots are what is carried
through the layers, because W R is a root of the moments of W x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.layer_parts import find_embeddings, find_mlp
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.merge.linear_algebra import typical_energy

MlpInput = Literal["normed", "residual", "attention_input"]
_ATTENDED_TOKENS = 2  # attention averages the values of so many tokens
# Energy of an embedding relative to the typical one; trained tokens have up to 5 times as much.
_MOST_ENERGY = 10.0
_SHRINKAGE = 0.01  # weight of the identity; keeps the estimate positive definite
_NODES = 241  # quadrature nodes for Gaussian integrals
_ROWS = 16_384  # embeddings converted to float64 at a time
# Random projections for pre-activation variances of wide MLPs: error sqrt(2 / n) = 6 %.
_PROBES = 512
_BLOCKS = 8  # column blocks of a triangular product: 9/16 of the work of a full one


class InputMoments:
    """E[x x^T] of the inputs of attention, layer by layer: (D, D) with trace D.

    Estimated while every layer is attention and MLP, both added to the residual stream, with norms
    before, after or both. From the first layer with other parts (experts, other mixers) on, E[x
    x^T] is taken to be the identity. Biases are ignored.

    For each attention module, in their order:

        inputs.enter(module)              # `cholesky` is that of the module's layer
        inputs.root_of(weights)           # as often as wanted
        inputs.add(module, gain, ...)     # what attention and MLP of the layer add to the stream

    cholesky: (D, D) lower triangle L: L L^T are the moments of the normed stream that the current
        layer reads, before its norm's gain; float32 on the device. None for the identity.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Any,
        symmetry: Symmetry,
        width: int,
        estimates_inputs: bool,
        device: str,
    ) -> None:
        """Start with the embeddings.

        Args:
            config: transformers' config of the text part.
            width: D.
            estimates_inputs: If False, E[x x^T] is the identity everywhere.
            device: For large products, in float32; factorizations and sums stay in float64.
        """
        self._checkpoint = checkpoint
        self._config = config
        self._symmetry = symmetry
        self._width = width
        self._device = device
        self._layer = 0
        # Moments of the residual stream before the current layer; None if they are unknown.
        self._stream = self._embedded() if estimates_inputs else None
        self.cholesky: Tensor | None = None

    def enter(self, module: AttentionModule) -> None:
        """Set `cholesky` for the layer of `module`.

        If that does not follow the layer of the last `add`, the estimate is given up: from here on
        `cholesky` is None.
        """
        self.cholesky = None
        if module.layer != self._layer:  # layers without attention lie between
            self._stream = None
        if self._stream is None:
            return

        # After a norm the trace is D.
        size = self._stream.trace().clamp_min(1e-30)
        moments = self._stream * ((1 - _SHRINKAGE) * self._width / size)
        moments.diagonal().add_(_SHRINKAGE)
        cholesky, failed = torch.linalg.cholesky_ex(moments)
        if not bool(failed) and bool(cholesky.sum().isfinite()):
            self.cholesky = cholesky.float().to(self._device)

    def root_of(self, weights: Tensor) -> Tensor:
        """W (n, D) -> W L, a root of the moments of W x; float32 on the CPU.

        Linearly dependent rows stay dependent up to rounding.
        """
        if self.cholesky is None:
            return weights.float()
        return times_lower(weights.to(self.cholesky), self.cholesky).cpu()

    @torch.no_grad()
    def add(self, module: AttentionModule, gain: Tensor, output: Tensor, value: Tensor) -> None:
        """Advance the estimate through the layer last entered.

        With S the moments of the residual stream before the layer, s = tr S / D, and L the Cholesky
        factor of S / s, the moments of the normed stream:

        1. Attention adds A = W_O W_V L / sqrt(2), for an average of two tokens. The stream then has
           the moments S' = S + A A^T, with the root [L sqrt(s), A], and s' = tr S' / D.
        2. The MLP reads Gaussian inputs, whose moments have the root R: L where it reads what
           attention reads, [L sqrt(s), A] where it reads the stream, and that divided by sqrt(s')
           after a norm. With P a root of the moments of its output, the layer ends with
           S' + P P^T.

        Args:
            module: That of the last `enter`.
            gain: (D,), of the norm before attention.
            output: (H, e, D), heads of W_O.
            value: (Hk, e, D), roots of the moments of the value heads.
        """
        mlp = self._find_mlp(module, gain) if self.cholesky is not None else None
        if self._stream is None or self.cholesky is None or mlp is None:
            self._stream = None
            return

        repeat = len(output) // len(value)
        values = value.repeat_interleave(repeat, 0).flatten(0, 1).to(self.cholesky)
        w_o = output.flatten(0, 1).to(self.cholesky).mT
        added = self._as_added(w_o @ values / _ATTENDED_TOKENS**0.5, mlp.after[:1])
        size_before = float(self._stream.trace())
        self._stream.add_(gram(added).cpu())

        mlp_input = self._mlp_input(mlp, added, size_before)
        mlp_output = self._as_added(mlp.output_root(mlp_input), mlp.after[1:])
        self._stream.add_(gram(mlp_output).cpu())
        self._layer += 1

    def _mlp_input(self, mlp: Mlp, added: Tensor, size_before: float) -> Tensor:
        """A root (D, n) of the moments of what the MLP reads.

        Args:
            mlp: The MLP.
            added: (D, k), a root of the moments of what attention has added.
            size_before: Trace of the stream's moments before attention.
        """
        assert self.cholesky is not None
        assert self._stream is not None
        if mlp.input == "attention_input":
            return self.cholesky

        stream = torch.cat([self.cholesky * (size_before / self._width) ** 0.5, added], 1)
        if mlp.input == "normed":
            stream *= (self._width / float(self._stream.trace())) ** 0.5
        return stream

    def _as_added(self, root: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
        """The root (D, n) of an output's moments, scaled as the layer does before it adds the
        output to the residual stream: by the gain (D,) of the norm after it, if there is one, and
        by the residual multiplier.
        """
        for gain in norm:
            size = root.square().sum().clamp_min(1e-30)
            root = root * (gain.to(root) * (self._width / size).sqrt())[:, None]
        multiplier = getattr(self._config, "residual_multiplier", None) or 1.0
        return root if multiplier == 1 else root * float(multiplier)

    def _embedded(self) -> Tensor | None:
        """Moments of token embeddings (all tokens equally likely) and learned positions.

        None if there is no such table. Layers read hidden states through norms, in which a token
        with a larger embedding weighs no more. So the energy of a row counts up to _MOST_ENERGY
        times the typical one: none rules the moments.
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
        return moments * self._symmetry.embedding_factor(self._config) ** 2

    def _find_mlp(self, module: AttentionModule, gain: Tensor) -> Mlp | None:
        """The layer's MLP, or None if the layer has other parts.

        gain: (D,), of the norm before attention, which the MLP shares if it has none.
        """
        tensors = find_mlp(self._checkpoint, self._config, self._symmetry, module, self._width)
        if tensors is None:
            return None
        if tensors.norm:
            gain = stored_gain(self._checkpoint, tensors.norm, self._symmetry)

        def read(spec: TensorSpec) -> Tensor:
            matrix = self._checkpoint.read(spec).to(self._device).float()
            return matrix.mT if self._symmetry.stores_transposed else matrix

        up = read(tensors.up)
        down = read(tensors.down)
        gate = None
        if tensors.gate == tensors.up:  # halves of one matrix
            gate, up = up.chunk(2)
        elif tensors.gate:
            gate = read(tensors.gate)

        mlp_input: MlpInput = "attention_input"
        if tensors.norm:
            mlp_input = "normed"
        elif tensors.after:
            mlp_input = "residual"
        after = tuple(stored_gain(self._checkpoint, spec, self._symmetry) for spec in tensors.after)
        return Mlp(gate, up, down, ACT2FN[tensors.act], mlp_input, after, gain)


@dataclass(frozen=True)
class Mlp:
    """down(act(up x)), or down(act(gate x) * up x): `gate` and `up` (I, D), `down` (D, I).

    input: The normed stream, the residual stream itself, or the input of attention.
    after: Gains (D,) of the norms after attention and after the MLP, if any.
    gain: (D,), of the norm before the MLP.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]
    input: MlpInput = "normed"
    after: tuple[Tensor, ...] = ()
    gain: Tensor | None = None

    def output_root(self, input_root: Tensor) -> Tensor:
        """A root (D, I + 1) of the output's moments, for Gaussian inputs whose moments have the
        root `input_root` (D, n).

        Correlations between units beyond their means are ignored. Wide layers: the n columns are
        projected on `_PROBES` random sign vectors; inner products stay unbiased (Johnson and
        Lindenstrauss).
        """
        root = input_root.to(self.up)
        if len(root) > 2 * _PROBES:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(2, (root.shape[1], _PROBES), generator=generator).to(root)
            root = root @ ((2 * signs - 1) / _PROBES**0.5)
        if self.gain is not None:
            root = self.gain[:, None].to(root) * root

        up = self.up @ root
        activated = up if self.gate is None else self.gate @ root  # what the activation reads
        variance = activated.square().sum(1, keepdim=True).clamp_min(1e-30)

        # Moments of each unit by quadrature.
        standard = torch.linspace(-6, 6, _NODES).to(root)
        weights = torch.exp(-standard.square() / 2)
        weights = weights / weights.sum()
        nodes = variance.sqrt() * standard  # (I, nodes)
        acted = self.act(nodes)
        if self.gate is None:
            mean = acted @ weights
            square = acted.square() @ weights
        else:  # up = slope * gate + a part independent of the gate
            slope = (activated * up).sum(1, keepdim=True) / variance
            independent = up.square().sum(1, keepdim=True) - slope.square() * variance
            mean = (acted * slope * nodes) @ weights
            up_square = slope.square() * nodes.square() + independent
            square = (acted.square() * up_square) @ weights

        spread = (square - mean.square()).clamp_min(0).sqrt()
        return torch.cat([self.down * spread, (self.down @ mean)[:, None]], 1)


def times_lower(rows: Tensor, lower: Tensor) -> Tensor:
    """rows (n, D) @ lower (D, D), a lower triangle whose zeros are skipped."""
    step = -(-len(lower) // _BLOCKS)
    product = torch.empty_like(rows)
    for start in range(0, len(lower), step):
        columns = slice(start, start + step)
        torch.mm(rows[:, start:], lower[start:, columns], out=product[:, columns])
    return product


def gram(rows: Tensor) -> Tensor:
    """rows rows^T of (n, K) rows; the upper triangle is copied from the lower one."""
    step = -(-len(rows) // _BLOCKS)
    product = rows.new_empty(len(rows), len(rows))
    for start in range(0, len(rows), step):
        columns = slice(start, start + step)
        block = rows[start:] @ rows[columns].mT
        product[start:, columns] = block
        product[columns, start:] = block.mT
    return product


def norm_gain(
    checkpoint: Checkpoint, module: AttentionModule, symmetry: Symmetry, width: int
) -> Tensor:
    """Gain (D,) of the norm before attention; ones for cross-attention."""
    norms = symmetry.norms if module.kind != "cross" else ()
    for norm in norms:
        spec = checkpoint.tensors.get(f"{module.layer_path}.{norm}.weight")
        if spec is not None and spec.shape == (width,):
            return stored_gain(checkpoint, spec, symmetry)
    return torch.ones(width, dtype=torch.float64)


def stored_gain(checkpoint: Checkpoint, spec: TensorSpec, symmetry: Symmetry) -> Tensor:
    """Gain (D,) of a norm, which some types store minus one."""
    gain: Tensor = checkpoint.read(spec).double()
    return gain + 1.0 if symmetry.one_plus else gain
