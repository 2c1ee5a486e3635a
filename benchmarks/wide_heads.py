"""Fewer but wider KV heads in a KV cache of the same size: two heads of 32 or one of 64 dimensions.

    python benchmarks/wide_heads.py        # 10 minutes on two cores

An experiment with the example model, not a method of gqa-convert. Both results come from the same
closed form, which is simpler than that of `calibrated`, and from the training of `refined`. The
wide head costs twice the query and output weights and twice the operations of attention, and needs
every rotary frequency twice; `rope_type` longrope can say that, and transformers loads it.

Letters: H heads of the base model, d their dimension, n = d / 2 rotary frequencies, N tokens, D
the width of hidden states.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import EMBEDDED
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gqa.convert.merge.options import Refinement
from gqa.convert.merge.refine import refine
from gqa.convert.merge.sensitivity import position_weights
from gqa.corpus.stdlib import stdlib_texts

WINDOW = 256  # tokens
HELDOUT_WINDOWS = 32
SAMPLED_WINDOWS = 256
LEAST = 1e-12  # of a variance

Groups = list[list[int]]


# ------------------------------------------------------------------------------------ closed form


@dataclass
class AttentionWeights:
    """Weights of the base model's attention by head, in float64.

    Attributes:
        query, key: (H, n, D) complex: the two dimensions of a frequency as one number.
        value: (H, d, D).
        output: (H, d, D), W_O^T by head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @classmethod
    def of(cls, attention: Any, heads: int) -> AttentionWeights:
        def by_head(weight: Tensor) -> Tensor:
            return weight.detach().double().unflatten(0, (heads, -1))

        return cls(
            query=as_complex(by_head(attention.q_proj.weight)),
            key=as_complex(by_head(attention.k_proj.weight)),
            value=by_head(attention.v_proj.weight),
            output=by_head(attention.o_proj.weight.T),
        )


def as_complex(rotary: Tensor) -> Tensor:
    """(H, d, D) -> (H, n, D): dimension f and n + f are turned together."""
    real, imaginary = rotary.chunk(2, dim=1)
    return torch.complex(real, imaginary)


def as_real(rotary: Tensor) -> Tensor:
    """(H, n, D) complex -> (H, d, D)."""
    return torch.cat([rotary.real, rotary.imag], dim=1)


def leading(moments: Tensor, rank: int) -> tuple[Tensor, float]:
    """The `rank` eigenvectors (as columns) with the largest eigenvalues, and the sum of the other
    eigenvalues: what is lost without them.
    """
    energies, vectors = torch.linalg.eigh(moments)
    return vectors[:, -rank:], float(energies[:-rank].sum())


class SharedHeads:
    """Keys and values that groups of heads share, and the queries and outputs that use them.

    A shared value is what is left of the values of a group, as the output matrix sees them, in
    their `width` principal directions. A shared key has `width / d` numbers for each frequency: the
    principal directions of the keys of the group at this frequency, weighted by their queries.
    """

    def __init__(self, weights: AttentionWeights, inputs: Tensor, width: int) -> None:
        """
        Args:
            inputs: (N, D), what attention reads, in float64.
            width: Dimensions of a shared head, a multiple of d.
        """
        self.weights = weights
        self.width = width
        heads, d, _ = weights.value.shape
        self.heads = heads
        self.slots = width // d  # numbers for each frequency

        # Values in the metric of the output matrix: |v R| = |v W_O|
        energies, vectors = torch.linalg.eigh(weights.output @ weights.output.mT)
        sizes = energies.clamp_min(LEAST).sqrt()
        self.root = vectors * sizes[:, None] @ vectors.mT  # (H, d, d)
        self.inverse = vectors / sizes[:, None] @ vectors.mT
        values = torch.einsum("hde,hdx,nx->nhe", self.root, weights.value, inputs).flatten(1)
        self.value_moments = (values.T @ values / len(values)).view(heads, d, heads, d)

        # Keys of a frequency, times the typical size of the queries that read them
        queries = torch.einsum("hfx,nx->nhf", weights.query, inputs.cdouble())
        self.query_size = queries.abs().square().mean(0).sqrt()  # (H, n)
        keys = torch.einsum("hfx,nx->nhf", weights.key, inputs.cdouble()) * self.query_size
        self.key_moments = torch.einsum("nhf,ngf->fhg", keys, keys.conj()) / len(keys)

    def value_basis(self, group: Sequence[int]) -> tuple[Tensor, float]:
        """(heads of the group, d, width), and the energy outside."""
        moments = self.value_moments[group][:, :, group]
        size = len(group) * moments.shape[1]
        basis, lost = leading(moments.reshape(size, size), self.width)
        return basis.unflatten(0, (len(group), -1)), lost

    def key_basis(self, group: Sequence[int], frequency: int) -> tuple[Tensor, float]:
        """(heads of the group, slots), and the energy outside."""
        return leading(self.key_moments[frequency][group][:, group], self.slots)

    def best_groups(self, count: int) -> Groups:
        """The partition into one or two groups that loses the least, of keys and values alike."""
        frequencies = range(len(self.key_moments))
        key_energy = float(self.key_moments.diagonal(dim1=1, dim2=2).sum().real)
        value_energy = float(torch.einsum("hdhd->", self.value_moments))

        def loss(groups: Groups) -> float:
            keys = 0.0
            values = 0.0
            for group in groups:
                keys += sum(self.key_basis(group, frequency)[1] for frequency in frequencies)
                values += self.value_basis(group)[1]
            return keys / key_energy + values / value_energy

        return min(partitions(self.heads, count), key=loss)

    def projections(self, count: int) -> dict[str, Tensor]:
        """Weights of q_proj, k_proj, v_proj and o_proj with `count` KV heads."""
        weights = self.weights
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []

        for group in self.best_groups(count):
            basis, _ = self.value_basis(group)
            metric = self.root[group] @ weights.value[group]
            values.append(torch.einsum("hdw,hdx->wx", basis, metric))
            outputs.append(basis.mT @ self.inverse[group] @ weights.output[group])

            shared, reading = self._keys_and_queries(group)
            keys.append(as_real(shared[None])[0])
            queries.append(as_real(reading))

        # Query heads stand in the order of the groups that they read
        return {
            "q_proj": torch.cat(queries).flatten(0, 1),
            "k_proj": torch.cat(keys),
            "v_proj": torch.cat(values),
            "o_proj": torch.cat(outputs).flatten(0, 1).T,
        }

    def _keys_and_queries(self, group: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The shared key (n * slots, D), complex, and the queries (heads, n * slots, D)."""
        weights = self.weights
        n = weights.key.shape[1]
        keys: list[Tensor] = []
        queries: list[Tensor] = []
        for f in range(n):
            basis, _ = self.key_basis(group, f)
            size = self.query_size[group, f][:, None]
            keys.append(basis.mH @ (size * weights.key[group, f]))  # (slots, D)
            queries.append(basis.conj()[:, :, None] * (weights.query[group, f] / size)[:, None])

        # Scores are divided by the root of the width, which is larger
        scale = math.sqrt(self.slots)
        return torch.cat(keys), torch.cat(queries, dim=1) * scale


def partitions(heads: int, count: int) -> Iterator[Groups]:
    """All partitions of the heads into one group, or into two of equal size."""
    everything = list(range(heads))
    if count == 1:
        yield [everything]
        return
    for rest in itertools.combinations(everything[1:], heads // 2 - 1):
        first = [0, *rest]
        yield [first, [head for head in everything if head not in first]]


# ------------------------------------------------------------------------------------------ models


def shared_model(base: Any, inputs: Sequence[Tensor], count: int, width: int) -> Any:
    """The base model with `count` KV heads of `width` dimensions.

    inputs: (N, D) of each layer, what its attention reads.
    """
    config = base.config
    options = config.to_dict() | {"num_key_value_heads": count, "head_dim": width}
    if width > config.head_dim:
        options["rope_parameters"] = repeated_frequencies(config, width)
    model = LlamaForCausalLM(LlamaConfig(**options)).eval().requires_grad_(False)

    weights = base.state_dict()
    for index, layer in enumerate(base.model.layers):
        of_heads = AttentionWeights.of(layer.self_attn, config.num_attention_heads)
        shared = SharedHeads(of_heads, inputs[index], width)
        for name, weight in shared.projections(count).items():
            weights[f"model.layers.{index}.self_attn.{name}.weight"] = weight.float()
    model.load_state_dict(weights)
    return model


def repeated_frequencies(config: Any, width: int) -> dict[str, Any]:
    """Rotary parameters of heads of `width` dimensions with the frequencies of the base model, each
    several times in a row: longrope divides each frequency by a factor of its own.
    """
    d = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    slots = width // d
    factors = []
    for index in range(width // 2):
        wanted = theta ** (-2 * (index // slots) / d)
        factors.append(theta ** (-2 * index / width) / wanted)
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def rotary(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions of blocks."""
    positions = torch.arange(hidden.shape[1])[None]
    result: tuple[Tensor, Tensor] = model.model.rotary_emb(hidden[:1], positions)
    return result


def attend(model: Any, layer: Any, hidden: Tensor) -> Tensor:
    """What the attention of a layer adds to hidden states."""
    output: Tensor = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden),
        position_embeddings=rotary(model, hidden),
        attention_mask=None,
    )[0]
    return output


def advance(model: Any, layer: Any, hidden: Tensor) -> Tensor:
    """Hidden states after a layer."""
    result: Tensor = layer(hidden, attention_mask=None, position_embeddings=rotary(model, hidden))
    return result


def attention_inputs(base: Any, rows: Tensor) -> list[Tensor]:
    """(N, D) of each layer, in float64."""
    hidden = base.model.embed_tokens(rows)
    inputs = []
    for layer in base.model.layers:
        inputs.append(layer.input_layernorm(hidden).flatten(0, 1).double())
        hidden = advance(base, layer, hidden)
    return inputs


def refine_layers(base: Any, converted: Any, rows: Tensor, steps: int) -> None:
    """Train each attention module toward the base model's, layer by layer, as `refined` does."""
    settings = Refinement(steps=steps)
    before = base.model.embed_tokens(rows)
    after = before.clone()
    for base_layer, layer in zip(base.model.layers, converted.model.layers, strict=True):
        # The drift of earlier layers is part of the target
        targets = attend(base, base_layer, before) + before - after
        read = layer.input_layernorm(after)
        position_embeddings = rotary(converted, after)

        def arguments(
            chosen: Tensor, read: Tensor = read, turned: Any = position_embeddings
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = {"hidden_states": read[chosen], "position_embeddings": turned}
            return (), inputs | {"attention_mask": None}

        attention = layer.self_attn
        start = {name: weight.detach() for name, weight in attention.named_parameters()}
        with torch.enable_grad():
            trained = refine(
                attention, start, arguments, targets, position_weights(after), settings
            )
        attention.load_state_dict(trained.weights)

        before = advance(base, base_layer, before)
        after = advance(converted, layer, after)


# ------------------------------------------------------------------------------------- measurement


def divergence(base: Any, converted: Any, rows: Tensor) -> float:
    """KL divergence from the base model in nats per token."""
    total = 0.0
    for part in rows.split(8):
        expected = base(input_ids=part).logits.log_softmax(-1)
        predicted = converted(input_ids=part).logits.log_softmax(-1)
        total += float((expected.exp() * (expected - predicted)).sum())
    return total / rows.numel()


def heldout_windows(tokenizer: Any) -> Tensor:
    text = "\n".join(text[2000:9000] for text in stdlib_texts("heldout"))
    ids = tokenizer(text)["input_ids"][: HELDOUT_WINDOWS * WINDOW]
    return torch.tensor(ids).view(-1, WINDOW)


def sampled_windows(base: Any, start: int) -> Tensor:
    """Text that the base model generates."""
    torch.manual_seed(0)
    prompts = torch.full((SAMPLED_WINDOWS, 1), start)
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": WINDOW - 1}
    windows: Tensor = base.generate(prompts, max_new_tokens=WINDOW - 1, pad_token_id=0, **options)
    return windows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Refinement.steps, help="of each layer")
    steps = parser.parse_args().steps

    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    base = base.eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    rows = sampled_windows(base, tokenizer.bos_token_id)
    heldout = heldout_windows(tokenizer)
    inputs = attention_inputs(base, rows[:64])

    print("KV heads x dimensions   parameters   KL closed form   KL trained, nats per token")
    d = base.config.head_dim
    for count, width in ((2, d), (1, 2 * d)):
        model = shared_model(base, inputs, count, width)
        closed_form = divergence(base, model, heldout)
        refine_layers(base, model, rows, steps)
        trained = divergence(base, model, heldout)
        parameters = sum(weight.numel() for weight in model.parameters())
        print(
            f"{count} x {width:<19}{parameters:11,}{closed_form:17.3f}{trained:13.3f}", flush=True
        )


if __name__ == "__main__":
    main()
