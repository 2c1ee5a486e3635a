"""Oracle 6: converted Llama checkpoints against an independent attention, a dozen lines that share no code with
transformers or with the converter: causal, left-padded, and token by token with a cache of G heads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_families import TOLERANCE, all_tensors, decode, error, left_padded, load, write_checkpoint
from tiny_models import TINY, build, inputs
from torch import Tensor

from gqa.convert.api import convert_checkpoint

HEADS, DIM = 4, 8
Weights = dict[str, Tensor]


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2). x (B, heads, T, d), positions (B, T)."""
    frequencies = theta ** (-torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None, :, None] * frequencies  # (B, 1, T, d/2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q (B, H, T, d), k and v (B, G, S, d), visible (B, T, S) -> (B, T, H * d). Head i reads group i // (H // G)."""
    groups = k.shape[1]
    outputs = []
    for i in range(q.shape[1]):
        j = i // (q.shape[1] // groups)
        scores = q[:, i] @ k[:, j].transpose(1, 2) / math.sqrt(DIM)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, j])
    return torch.cat(outputs, -1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def heads(x: Tensor) -> Tensor:
    """(B, T, n * d) -> (B, n, T, d)."""
    return x.view(*x.shape[:2], -1, DIM).transpose(1, 2)


def forward(w: Weights, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of a Llama read straight from its stored tensors."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    length = ids.shape[1]
    visible = torch.ones(length, length).tril().bool() & mask[:, None, :].bool()
    visible = visible | torch.eye(length).bool()  # a padded query sees itself: its output is not looked at
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(2):
        p = f"model.layers.{layer}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (heads(h @ w[f"{p}self_attn.{n}_proj.weight"].T) for n in "qkv")
        q, k = rotate(q, positions), rotate(k, positions)
        x = x + grouped_attention(q, k, v, visible) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_converted_llama_agrees_with_an_independent_attention(groups: int, tmp_path: Path) -> None:
    """The control: the same weights with the queries in strided order are another model."""
    tiny = TINY["llama"]
    source = write_checkpoint(build(tiny, HEADS), tmp_path / "source")
    out = convert_checkpoint(source, groups, tmp_path / "out", method="mean").out
    model, w = load(tiny, out, "sdpa"), all_tensors(out)
    assert w["model.layers.0.self_attn.k_proj.weight"].shape[0] == groups * DIM
    given = left_padded(inputs(tiny), 3)
    for mask in (torch.ones_like(given["input_ids"]), given["attention_mask"]):
        expected = forward(w, given["input_ids"], mask)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            actual = model(input_ids=given["input_ids"], attention_mask=mask, position_ids=positions).logits
        assert error(actual[mask.bool()], expected[mask.bool()]) < TOLERANCE
    full = forward(w, given["input_ids"], torch.ones_like(given["input_ids"]))
    assert error(decode(model, inputs(tiny)), full[:, 8:]) < TOLERANCE
    for name in (name for name in w if "q_proj" in name):
        w[name] = w[name].view(HEADS, DIM, -1)[[0, 2, 1, 3]].flatten(0, 1)
    assert error(forward(w, given["input_ids"], torch.ones_like(given["input_ids"])), full) > 100 * TOLERANCE
