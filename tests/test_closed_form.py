"""The closed forms on numbers alone: what heads share; and what attention is given, guessed from
weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import edit_tensors
from support.embedded import SOURCE, copy_source, load, texts, tokenizer
from support.families import write_checkpoint
from support.tiny_models import TINY, build
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers.activations import ACT2FN

from gqa.convert.api import plan_conversion
from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge import maps_from_weights, sensitivity, shared_values
from gqa.convert.merge.input_moments import InputMoments, Mlp, gram
from gqa.convert.merge.sensitivity import (
    LEAST_ENERGY,
    output_roots,
    position_weights,
    query_sensitivity,
)
from gqa.convert.merge.shared_keys import shared_key
from gqa.convert.merge.shared_values import shared_value
from gqa.convert.methods.table import METHODS
from gqa.core.devices import as_float64

HEADS, REPEAT, DIM = 3, 2, 6
OWNER = torch.arange(HEADS).repeat_interleave(REPEAT)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def made(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What query heads see (some directions more than others, each somewhat in its own way), all
    values, W_O^T W_O.
    """
    generator, width = torch.Generator().manual_seed(seed), HEADS * DIM
    spread = normal(generator, width, width) + normal(generator, HEADS * REPEAT, width, width)
    spread = spread * (normal(generator, width) / 2).exp()
    seen, w_o = spread @ spread.mT, normal(generator, HEADS * REPEAT, DIM, 8 * DIM)
    return seen, seen.mean(0), w_o @ w_o.mT


def left(project: Tensor, restore: Tensor, seen: Tensor, outputs: Tensor) -> Tensor:
    """The share of the energy of outputs that is lost, straight from the definition."""
    lost, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for head, back in enumerate(restore):
        pick = torch.zeros(DIM, HEADS * DIM, dtype=torch.float64)
        pick[:, int(OWNER[head]) * DIM : (int(OWNER[head]) + 1) * DIM] = torch.eye(DIM)
        off = pick - back @ project
        lost = lost + (outputs[head] @ off @ seen[head] @ off.T).trace()
        whole = whole + (outputs[head] @ pick @ seen[head] @ pick.T).trace()
    return lost / whole


def test_alternating_steps_lose_less_than_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here quasi-Newton steps on both maps gain little more.

    The shared value is as large as those it stands for.
    """
    seen, values, outputs = made(1)
    found = shared_value(seen, values, outputs, OWNER)
    assert float((found.merge @ values @ found.merge.T).trace()) == pytest.approx(
        float(values.trace()) / HEADS
    )
    # The start alone, without iterations
    monkeypatch.setattr(shared_values, "_SWEEPS", 0)
    start = shared_value(seen, values, outputs, OWNER)
    assert left(found.merge, found.back, seen, outputs) < 0.75 * left(
        start.merge, start.back, seen, outputs
    )


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
def test_slow_pairs_share_what_single_frequencies_cannot(size: float) -> None:
    """Keys of two heads that lie in four dimensions, but not frequency by frequency: nothing is
    lost, scores stay.
    """
    generator = torch.Generator().manual_seed(0)
    # The second pair of either head
    mixing = normal(generator, 4, 8) * torch.tensor([1, size, 1, size] * 2)
    keys = normal(generator, 500, 4) @ mixing
    queries, means = (
        torch.eye(4, dtype=torch.float64).expand(2, 4, 4),
        torch.zeros(8, dtype=torch.float64),
    )

    def lost(rotary: Rotary) -> float:
        found = shared_key(
            keys.T @ keys / 500, queries, means, torch.ones(2, 3, dtype=torch.float64), rotary
        )
        # q'^T k' = q^T M^T C k
        back = torch.cat([keys @ found.merge.T @ found.back[head] for head in range(2)], 1)
        return float((back - keys).square().sum() / keys.square().sum())

    assert lost(Rotary(4, frequencies=(0.0, 0.0), longest=100)) < 1e-15
    assert lost(Rotary(4)) > 0.01
    used = queries * torch.tensor([1.0, 0.0])[:, None, None]  # the second head is not queried
    found = shared_key(keys.T @ keys / 500, used, means, torch.ones(2, 3), Rotary(4))
    assert found.back.isfinite().all()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_maps_of_keys_come_before_the_factor_of_rotated_dimensions(factor: float) -> None:
    """YaRN multiplies the two rotated dimensions of these heads, the maps mix them with the others:
    scores of the weights' heads stay, and do not with maps of the scaled ones.
    """
    generator = torch.Generator().manual_seed(0)
    stored = normal(generator, 500, 4) @ normal(generator, 4, 8)  # keys by the weights
    queries = normal(generator, 500, 4)
    scale = torch.tensor([factor, factor, 1, 1], dtype=torch.float64)
    measured = stored * scale.repeat(2)

    def error(told: float) -> float:
        found = shared_key(
            measured.T @ measured / 500,
            ((queries * scale).T @ (queries * scale)).expand(2, 4, 4),
            torch.zeros(8, dtype=torch.float64),
            torch.ones(2, 3, dtype=torch.float64),
            Rotary(2, frequencies=(0.0,), longest=100, factor=told),
        )
        worst = 0.0
        for head in range(2):
            scores = (queries * scale) @ measured[:, 4 * head : 4 * head + 4].T
            merged_queries = queries @ found.back[head].T * scale
            merged = merged_queries @ (stored @ found.merge.T * scale).T
            worst = max(worst, float((merged - scores).norm() / scores.norm()))
        return worst

    assert error(factor) < 1e-6
    if factor != 1:
        assert error(1.0) > 0.05


def test_keys_across_frequencies_have_the_least_error_of_scores() -> None:
    """Scores of rotated keys at distances of each head's own: less error than with each frequency
    alone, with distances that are the same in all heads, or with maps near by.
    """
    generator, frequencies = torch.Generator().manual_seed(0), (1.0, 0.1, 0.01, 0.001)
    keys, queries = (
        normal(generator, 60, 16) @ normal(generator, 16, 16),
        normal(generator, 2, 60, 8),
    )
    rotary, means = (
        Rotary(8, frequencies=frequencies, longest=1000),
        torch.zeros(16, dtype=torch.float64),
    )
    distances = torch.cat(
        [torch.arange(30.0).double(), torch.logspace(0, 3, 200, dtype=torch.float64)]
    )
    angles = torch.outer(distances, torch.tensor(frequencies, dtype=torch.float64).repeat(2))
    measured = torch.zeros(2, 30, dtype=torch.float64)
    measured[0, 1], measured[1, 20:] = 7, 2

    def turned(heads: Tensor) -> Tensor:  # (n, 8) -> (230, n, 8)
        swapped = torch.cat([-heads[:, 4:], heads[:, :4]], 1)
        return heads * angles.cos()[:, None] - swapped * angles.sin()[:, None]

    def error(merge: Tensor, back: Tensor) -> float:
        total = 0.0
        for head, weights in enumerate(measured / measured.sum(1, keepdim=True)):
            scores = queries[head] @ turned(keys[:, 8 * head : 8 * head + 8]).mT
            missing = (
                (scores - (queries[head] @ back[head].T) @ turned(keys @ merge.T).mT)
                .square()
                .mean((1, 2))
            )
            total += float(weights @ missing[:30] + missing[30:].mean())
        return total

    moments = keys.T @ keys / 60, queries.mT @ queries, means
    best, same, alone = (
        shared_key(*moments, weights, r)
        for weights, r in ((measured, rotary), (0 * measured, rotary), (measured, Rotary(8)))
    )
    least = error(best.merge, best.back)
    assert least < 0.92 * error(same.merge, same.back)
    assert least < 0.9 * error(alone.merge, alone.back)
    for _ in range(20):
        near = [
            m + 0.01 * m.abs().mean() * normal(generator, *m.shape) for m in (best.merge, best.back)
        ]
        assert error(*near) > 0.9999 * least


@pytest.mark.parametrize("rows", [1, 6])
def test_what_an_error_of_scores_does_without_a_mask(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal layers are given no mask either: then rows are those of a triangle.

    In others a query sees all keys.
    """
    # So few scores at once that a block is looked at in pieces
    monkeypatch.setattr(sensitivity, "SCORES_AT_ONCE", 2 * 6 * rows)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8, generator=generator) for _ in range(3))
    roots = output_roots(torch.randn(2, 8, 8, generator=generator))
    plain, ones = torch.randn(1, 2, 6, 6, generator=generator), torch.ones(2, 6)
    for bias in (None, plain):
        for causal in (True, False):
            mask = torch.ones(1, 1, 6, 6).tril(0 if causal else 6)
            found = query_sensitivity(q, k, v, None, 0.3, roots, ones, bias, causal)
            for same in (mask.bool(), mask.log()):
                torch.testing.assert_close(
                    found, query_sensitivity(q, k, v, same, 0.3, roots, ones, bias)
                )
            assert bool(found[0][:, :, 0].max() < 0.1) is causal  # one key takes all
    bias = torch.zeros(1, 2, 6, 6).index_fill(3, torch.arange(1, 6), -torch.inf)
    of_queries, _ = query_sensitivity(q, k, v, None, 0.3, roots, ones, bias, False)
    assert of_queries.max() < 0.1, "a bias is part of the scores"


def test_scores_count_by_what_they_move() -> None:
    """The sum over keys of what the output moves without the key, from its parts, also by distance;
    hidden keys: 0.
    """
    torch.manual_seed(0)
    q, k, v, w_o = (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 2, 5, 8),
        torch.randn(2, 2, 5, 6),
        torch.randn(4, 6, 16),
    )
    mask = torch.ones(5, 5).tril().bool()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, 3:, 0] = False
    weights = torch.rand(2, 5)
    found, distances = query_sensitivity(q, k, v, mask, 0.3, output_roots(w_o), weights)
    for head in range(4):
        keys, values = k[:, head // 2], v[:, head // 2] @ w_o[head]
        paid = (0.3 * q[:, head] @ keys.mT).masked_fill(~mask[:, 0], -torch.inf).softmax(-1)
        moved, apart = torch.zeros(2, 5), torch.zeros(5)
        for key in range(5):
            left = paid.clone()
            left[:, :, key] = 0
            # One key alone: nothing is left, and it counts 0
            left = (left / left.sum(-1, keepdim=True)).nan_to_num()
            without = (
                (left @ values - paid @ values).square().sum(-1) * (left.sum(-1) > 0) * weights
            )
            moved, apart[: 5 - key] = moved + without, apart[: 5 - key] + without.sum(0)[key:]
        torch.testing.assert_close(found[:, head], moved, rtol=1e-3, atol=0.5)  # of up to 300
        torch.testing.assert_close(distances[head], apart, rtol=1e-3, atol=0.5)


def stream_with(sizes: dict[int, float], unit: float = 1.0) -> Tensor:
    """Hidden states (1, 64, 32) about as large as `unit`, those of some positions multiplied by
    `sizes`.
    """
    stream = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    for position, size in sizes.items():
        stream[:, position] *= size
    return stream * unit


def test_errors_count_by_the_inverse_square_of_hidden_states() -> None:
    """So positions that are hundreds of times as large as others hardly count."""
    stream = stream_with({0: 300.0, 7: 20.0})

    weights = position_weights(stream)

    energies = stream.square().mean(-1)
    torch.testing.assert_close(weights * energies, (1 / (1 / energies).mean()).expand(1, 64))
    assert float(weights.mean()) == pytest.approx(1.0)
    assert float(weights[0, 0] / weights[0, 1:7].mean()) < 1e-4


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-3])
def test_no_position_owns_the_weight(size: float, unit: float) -> None:
    """What is zero or tiny counts no more than a few others; whether it is rare, or more than half
    of the text.
    """
    for tiny in ([5], [5, 6], range(40), range(58)):
        weights = position_weights(stream_with(dict.fromkeys(tiny, size), unit))[0]

        others = [position for position in range(64) if position not in tiny]
        assert float(weights.max()) < 2 / LEAST_ENERGY * float(weights[others].mean())
        assert float(weights.mean()) == pytest.approx(1.0)


def test_hidden_states_of_zero_count_alike() -> None:
    assert position_weights(torch.zeros(2, 3, 4)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e6])
def test_padding_does_not_weigh(size: float) -> None:
    """Nor does it say how large hidden states are."""
    is_text = torch.arange(64)[None] < 10
    padded = stream_with(dict.fromkeys(range(10, 64), size) | {3: 0.0})

    weights = position_weights(padded, is_text)

    alone = position_weights(padded[:, :10])
    torch.testing.assert_close(weights[:, :10] / weights[:, :10].mean(), alone)
    assert not weights[:, 10:].any()


@pytest.mark.parametrize(("device", "where"), [("cpu", "cpu"), ("cuda", "cuda"), ("mps", "cpu")])
def test_float64_is_on_the_device_if_it_has_it(device: str, where: str) -> None:
    with FakeTensorMode():
        found = as_float64(torch.empty(3, 2, dtype=torch.bfloat16, device=device))
    assert found.device.type == where
    assert found.dtype == torch.float64
    assert tuple(found.shape) == (3, 2)
    assert as_float64(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)).tolist() == [1.5, -2.0]


# ---------------------------------------------------- what layers are given, from the weights alone


KNOWN = (
    "llama",
    "phi3",
    "qwen2",
    "phi",
    "starcoder2",
    "gpt_bigcode",
    "gqa_gpt2",
    "gqa_opt",
    "olmo2",
    "gemma2",
    "glm4",
)


def given(source: Path, groups: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What `aligned` takes each layer to be given."""
    found: list[Tensor] = []

    class Noted(InputMoments):
        def enter(self, module):
            super().enter(module)
            rows = self.root_of(torch.eye(self._width)).double()
            found.append(rows @ rows.mT)

    # Notes the estimates, which are not part of any result
    monkeypatch.setattr(maps_from_weights, "InputMoments", Noted)
    plan = plan_conversion(source, groups, method="aligned")
    assert list(METHODS["aligned"].maps_by_module(plan))
    return found


@pytest.mark.parametrize(("act", "gated"), [("silu", True), ("gelu", False)])
def test_moments_of_an_mlp(act: str, gated: bool) -> None:
    """Of one unit they are exact: its mean square over many Gaussian inputs, whatever gate and up
    have in common.
    """
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    inputs = torch.randn(1 << 18, 6, dtype=torch.float64) @ root.mT
    up, act_fn = torch.randn(8, 6, dtype=torch.float64), ACT2FN[act]
    gate = 0.7 * up + 0.5 * torch.randn_like(up) if gated else None
    units = act_fn(inputs @ up.mT) if gate is None else act_fn(inputs @ gate.mT) * (inputs @ up.mT)
    down = torch.eye(8, dtype=torch.float64)
    factor = torch.linalg.cholesky(root @ root.mT)
    moments = gram(Mlp(gate, up, down, act_fn).output_root(factor))
    torch.testing.assert_close(moments.diagonal(), units.square().mean(0), rtol=0.03, atol=0)
    beside, means = moments.clone().fill_diagonal_(0), units.mean(0)
    torch.testing.assert_close(
        beside, torch.outer(means, means).fill_diagonal_(0), rtol=0.05, atol=0.01
    )


def test_the_units_of_a_wide_mlp_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 random signs by less than a fifth; units differ by much more."""
    torch.manual_seed(0)
    width, units = 256, 512
    root = torch.randn(width, 3)
    factor = torch.linalg.cholesky(torch.eye(width) + root @ root.mT)
    gate, up = (
        torch.randn(units, width) * (1 + 3 * torch.rand(units, 1)) / width**0.5 for _ in range(2)
    )
    down = torch.eye(units)

    def sizes(probes: int) -> Tensor:
        # More or fewer probes than the estimate takes
        monkeypatch.setattr("gqa.convert.merge.input_moments._PROBES", probes)
        return gram(Mlp(gate, up, down, ACT2FN["silu"]).output_root(factor)).diagonal()

    exact = sizes(width // 2)
    assert exact.std() > exact.mean()
    assert 0 < (sizes(100) / exact - 1).abs().median() < 0.2


def moments(stream: Tensor) -> Tensor:
    """E[x x^T] of what a norm makes of a stream (B, T, D), but for its first positions."""
    rows = stream[:, 8:].flatten(0, 1).double()
    normed = rows / rows.square().mean(-1, keepdim=True).sqrt()
    return normed.mT @ normed / len(normed)


def alike(one: Tensor, other: Tensor) -> float:
    """The cosine between them."""
    return float((one * other).sum() / one.norm() / other.norm())


def test_the_guess_is_like_what_the_model_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half again as like it as independent inputs are, in every layer; the embedded model's layers
    are real ones.
    """
    guessed, model, seen = given(SOURCE, 2, monkeypatch), load(SOURCE), list[Tensor]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(moments(args[0])))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokenizer()(text)["input_ids"][:128] for text in texts(8)]))
    independent = torch.eye(model.config.hidden_size, dtype=torch.float64)
    for guess, true in zip(guessed, seen, strict=True):
        assert float(guess.trace()) == pytest.approx(len(guess))
        assert alike(guess, true) > 1.5 * alike(independent, true)


def test_no_embedding_owns_the_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is a thousand times as large as others is one of 4,096, as what layers read is
    normed.
    """
    model = copy_source(tmp_path)
    edit_tensors(model, lambda tensors: tensors["model.embed_tokens.weight"][300].mul_(1e3))

    plain, guessed = given(SOURCE, 2, monkeypatch), given(model, 2, monkeypatch)

    assert plain
    for one, other in zip(plain, guessed, strict=True):
        assert alike(one, other) > 0.99


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_what_attention_adds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of two tokens' values, or as much as a norm after it says; written down once
    more, where the MLP adds nothing. Embeddings of Gemma are multiplied first.
    """

    def mixed(second: Tensor) -> Tensor:  # what a normed layer reads
        return 0.99 * second * (32 / second.trace()) + 0.01 * torch.eye(32)

    model = build(TINY[name], 4)
    layer, gemma = model.model.layers[0], name == "gemma2"
    layer.mlp.down_proj.weight.data.zero_()
    # Of attention's inputs, of its outputs
    norms = {"input": name != "olmo2", "post_attention": name != "llama"}
    for norm in (own for own, there in norms.items() if there and name != "llama"):
        layer.get_submodule(f"{norm}_layernorm").weight.data.uniform_(0.1, 0.9)
    before, after = (
        layer.get_submodule(f"{norm}_layernorm").weight.detach().double() + gemma
        if there
        else torch.ones(32)
        for norm, there in norms.items()
    )
    _, found = given(write_checkpoint(model, tmp_path), 2, monkeypatch)
    table, value, output = (
        part.weight.detach().double()
        for part in (model.model.embed_tokens, layer.self_attn.v_proj, layer.self_attn.o_proj)
    )
    start = table.mT @ table / len(table) * (32 if gemma else 1)
    through = output @ (value * before).repeat_interleave(output.shape[1] // len(value), 0)
    added = through @ mixed(start) @ through.mT
    size = 0.5 if name == "llama" else 32 / added.trace()
    expected = mixed(start + added * size * torch.outer(after, after))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "layers"), [*((name, 2) for name in KNOWN), ("llama", 11)])
def test_inputs_of_all_layers_are_estimated(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order: with ten before two, inputs would be independent from there on."""
    tiny = replace(TINY[name], options={**TINY[name].options, "num_hidden_layers": layers})
    found = given(write_checkpoint(build(tiny, 4), tmp_path), 1, monkeypatch)
    assert len(found) == layers
    assert not any(torch.equal(one, torch.eye(len(one), dtype=one.dtype)) for one in found)


def test_a_fused_gate_is_the_first_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model with two matrices and with one."""
    fused = build(TINY["phi3"], 4)
    apart = build(replace(TINY["llama"], options={"head_dim": None}), 4)
    one, own = given(write_checkpoint(fused, tmp_path / "one"), 2, monkeypatch), apart.state_dict()
    for name, tensor in fused.state_dict().items():
        parts = {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }
        whole = name.split(".")[-2]
        names = parts.get(whole, (whole,))
        own |= {
            name.replace(whole, part): rows
            for part, rows in zip(names, tensor.chunk(len(names)), strict=True)
        }
    apart.load_state_dict(own)
    two = given(write_checkpoint(apart, tmp_path / "two"), 2, monkeypatch)
    assert one
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------- the size in which heads are stored


def second_moments(*shape: int, seed: int) -> Tensor:
    """(..., n, n) of random vectors of which some directions are rare, in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape[:-1], 200, shape[-1], generator=generator, dtype=torch.float64)
    rows = rows * torch.logspace(0, -2, shape[-1], dtype=torch.float64)
    return rows.mT @ rows / 200


SIZES = torch.tensor([1.0, 1e4, 1e-4], dtype=torch.float64)  # of three heads
HEAD_DIM = 4


def test_the_size_of_keys_that_are_not_rotated_changes_no_score() -> None:
    """Keys times a number, and queries over it: the model is the same, and so is what is merged."""
    keys = second_moments(3 * HEAD_DIM, seed=0)
    queries = second_moments(3, HEAD_DIM, seed=1)
    by_row = SIZES.repeat_interleave(HEAD_DIM)
    no_means = torch.zeros(3 * HEAD_DIM, dtype=torch.float64)
    no_distances = torch.zeros(3, 0, dtype=torch.float64)
    rotary = Rotary(0)

    one = shared_key(keys, queries, no_means, no_distances, rotary)
    other = shared_key(
        keys * by_row[:, None] * by_row,
        queries / SIZES[:, None, None] ** 2,
        no_means,
        no_distances,
        rotary,
    )
    scores = one.back.mT @ one.merge  # (m, d, m d)
    same_scores = other.back.mT @ other.merge * by_row / SIZES[:, None, None]
    assert torch.allclose(scores, same_scores, rtol=1e-6, atol=1e-9)


def test_the_size_of_values_changes_no_output() -> None:
    """Values times a number, and their rows of W_O over it."""
    values = second_moments(3 * HEAD_DIM, seed=2)
    outputs = second_moments(3, HEAD_DIM, seed=3)
    by_row = SIZES.repeat_interleave(HEAD_DIM)
    owner = torch.arange(3)

    one = shared_value(values[None], values, outputs, owner)
    resized = values * by_row[:, None] * by_row
    other = shared_value(resized[None], resized, outputs / SIZES[:, None, None] ** 2, owner)

    restored = one.back @ one.merge  # (m, d, m d)
    same_restored = other.back @ other.merge * by_row / SIZES[:, None, None]
    assert torch.allclose(restored, same_restored, rtol=1e-6, atol=1e-9)
