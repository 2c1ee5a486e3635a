"""What attention is given, guessed from weights: Gaussian integrals against samples, the guess against the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embedded import SOURCE, load, texts, tokenizer
from test_families import write_checkpoint
from tiny_models import TINY, build
from torch import Tensor
from transformers.activations import ACT2FN

from gqa.convert.api import plan_conversion
from gqa.convert.merge import from_weights
from gqa.convert.merge.from_weights import InputMoments, Mlp, gram

KNOWN = (
    "llama", "phi3", "qwen2", "phi", "starcoder2", "gpt_bigcode", "gqa_gpt2", "gqa_opt", "olmo2", "gemma2", "glm4",
)  # fmt: skip
UNKNOWN = ("mixtral",)  # experts


def given(source: Path, groups: int, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What `aligned` takes each layer to be given."""
    found: list[Tensor] = []

    class Noted(InputMoments):
        def enter(self, module):
            super().enter(module)
            rows = self.project(torch.eye(self._width)).double()
            found.append(rows @ rows.mT)

    monkeypatch.setattr(from_weights, "InputMoments", Noted)
    assert list(from_weights.from_weights(plan_conversion(source, groups, method="aligned")))
    return found


@pytest.mark.parametrize(("act", "gated"), [("silu", True), ("gelu", False)])
def test_moments_of_an_mlp(act: str, gated: bool) -> None:
    """Of one unit they are exact: its mean square over many Gaussian inputs, whatever gate and up have in common."""
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    inputs = torch.randn(1 << 18, 6, dtype=torch.float64) @ root.mT
    up, act_fn = torch.randn(8, 6, dtype=torch.float64), ACT2FN[act]
    gate = 0.7 * up + 0.5 * torch.randn_like(up) if gated else None
    units = act_fn(inputs @ up.mT) if gate is None else act_fn(inputs @ gate.mT) * (inputs @ up.mT)
    down = torch.eye(8, dtype=torch.float64)
    factor = torch.linalg.cholesky(root @ root.mT)
    moments = gram(Mlp(gate, up, down, act_fn).root(factor))
    torch.testing.assert_close(moments.diagonal(), units.square().mean(0), rtol=0.03, atol=0)
    beside, means = moments.clone().fill_diagonal_(0), units.mean(0)
    torch.testing.assert_close(beside, torch.outer(means, means).fill_diagonal_(0), rtol=0.05, atol=0.01)
    if gate is not None:
        apart = gram(Mlp(gate.flip(0), up, down, act_fn).root(factor))
        assert not torch.allclose(apart.diagonal(), moments.diagonal(), rtol=0.1)


def test_the_units_of_a_wide_mlp_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 random signs by less than a fifth; units differ by much more."""
    torch.manual_seed(0)
    width, units = 256, 512
    root = torch.randn(width, 3)
    factor = torch.linalg.cholesky(torch.eye(width) + root @ root.mT)
    gate, up = (torch.randn(units, width) * (1 + 3 * torch.rand(units, 1)) / width**0.5 for _ in range(2))
    down = torch.eye(units)

    def sizes(probes: int) -> Tensor:
        monkeypatch.setattr("gqa.convert.merge.from_weights._PROBES", probes)
        return gram(Mlp(gate, up, down, ACT2FN["silu"]).root(factor)).diagonal()

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
    """Half again as like it as independent inputs are, in every layer; the embedded model's layers are real ones."""
    guessed, model, seen = given(SOURCE, 2, monkeypatch), load(SOURCE), list[Tensor]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(moments(args[0])))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokenizer()(text)["input_ids"][:128] for text in texts(8)]))
    independent = torch.eye(model.config.hidden_size, dtype=torch.float64)
    for guess, true in zip(guessed, seen, strict=True):
        assert float(guess.trace()) == pytest.approx(len(guess))
        assert alike(guess, true) > 1.5 * alike(independent, true)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_what_attention_adds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of two tokens' values, or as much as a norm after it says; written down once more, where the MLP adds
    nothing. Embeddings of Gemma are multiplied first.
    """

    def mixed(second: Tensor) -> Tensor:  # what a normed layer reads
        return 0.99 * second * (32 / second.trace()) + 0.01 * torch.eye(32)

    model = build(TINY[name], 4)
    layer, gemma = model.model.layers[0], name == "gemma2"
    layer.mlp.down_proj.weight.data.zero_()
    norms = {"input": name != "olmo2", "post_attention": name != "llama"}  # of attention's inputs, of its outputs
    for norm in (own for own, there in norms.items() if there and name != "llama"):
        layer.get_submodule(f"{norm}_layernorm").weight.data.uniform_(0.1, 0.9)
    before, after = (
        layer.get_submodule(f"{norm}_layernorm").weight.detach().double() + gemma if there else torch.ones(32)
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


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_layers_that_are_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, or the first alone (it is given embeddings): after it inputs are independent."""
    found = given(write_checkpoint(build(TINY[name], 4), tmp_path), 1, monkeypatch)
    independent = [torch.equal(one, torch.eye(len(one), dtype=one.dtype)) for one in found]
    assert len(found) > 1
    assert not independent[0]
    assert independent[1:] == [name in UNKNOWN] * len(independent[1:])


def test_layers_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten is not before two: then inputs would be independent from there on."""
    tiny = replace(TINY["llama"], options=TINY["llama"].options | {"num_hidden_layers": 11})
    found = given(write_checkpoint(build(tiny, 4), tmp_path), 2, monkeypatch)
    assert len(found) == sum(float(one.diagonal().std()) > 0 for one in found) == 11


def test_a_fused_gate_is_the_first_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model with two matrices and with one."""
    fused = build(TINY["phi3"], 4)
    apart = build(replace(TINY["llama"], options={"head_dim": None}), 4)
    one, own = given(write_checkpoint(fused, tmp_path / "one"), 2, monkeypatch), apart.state_dict()
    for name, tensor in fused.state_dict().items():
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        whole = name.split(".")[-2]
        names = parts.get(whole, (whole,))
        own |= {name.replace(whole, part): rows for part, rows in zip(names, tensor.chunk(len(names)), strict=True)}
    apart.load_state_dict(own)
    two = given(write_checkpoint(apart, tmp_path / "two"), 2, monkeypatch)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)
