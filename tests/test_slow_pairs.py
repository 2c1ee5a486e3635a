"""Pairs of dimensions that rotary embedding hardly turns: which they are, and heads as they were before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scrambled import on_ids
from test_families import COPIED, write_checkpoint
from test_symmetries import CASES, UNSERVED, attention
from tiny_models import QUERY_HEADS, TINY, Tiny, build, config
from torch import Tensor

from gqa.convert import plan_conversion
from gqa.convert.align.alignment import slow_dims, unturned
from gqa.convert.align.pair import Pair
from gqa.convert.heads.families.table import find_family
from gqa.convert.heads.symmetries import Rotary, Symmetry


def symmetry_of(config: Any) -> Symmetry:
    family = find_family(config.model_type, config)
    assert family
    symmetry = family.symmetry(config)
    assert isinstance(symmetry, Symmetry)
    return symmetry


@pytest.mark.parametrize(
    ("base", "longest", "partial", "expected"),
    [
        (1e4, 4096, 1.0, 14),  # Llama-2: pair 50 of 64 turns by 3.07 over 4,096 tokens, pair 49 by 3.55
        (1e5, 8192, 1.0, 20),
        (1e4, 4096, 0.5, 7),
        (1e4, None, 1.0, 0),
        (None, 4096, 1.0, 0),
    ],
)
def test_which_pairs_are_slow(base: float | None, longest: int | None, partial: float, expected: int) -> None:
    config = SimpleNamespace(
        model_type="llama",
        rope_parameters={"rope_theta": base, "rope_type": "default", "partial_rotary_factor": partial},
        max_position_embeddings=longest,
    )
    rotary = symmetry_of(config).rotary(config, 0, 128)
    assert len(rotary.slow) == expected
    assert len(slow_dims(rotary)) == 2 * expected


def _turned(name: str, rope_type: str, **options: Any) -> Tiny:
    """A tiny model whose embedding is scaled, or chooses its speeds by the length of the text."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    return replace(
        TINY[name],
        name=f"{name}+{rope_type}",
        options={"rope_parameters": rope | options, "original_max_position_embeddings": 16},
    )


BY_LENGTH = ("llama+dynamic", "phi3+longrope")
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
TURNED = {
    tiny.name: tiny
    for tiny in (
        *(tiny for name, tiny in CASES.items() if name not in COPIED and tiny.model_type not in UNSERVED),
        replace(TINY["stablelm"], name="stablelm+wide", options={"head_dim": 32, "hidden_size": 128}),
        _turned("llama", "linear"),
        _turned("llama", "dynamic"),
        _turned("qwen2", "yarn", original_max_position_embeddings=16),
        _turned("phi3", "longrope", original_max_position_embeddings=16, **_FACTORS),
    )
}
# All of whose pairs turn by more, or nobody knows how far they turn.
FAST = {
    "mimo_v2_flash": "one pair of a head is turned",
    "stablelm": "one pair of a head is turned",
    "recurrent_gemma": "its config says nothing of a longest text",
    "recurrent_gemma+bias": "its config says nothing of a longest text",
}


def _rotary(tiny: Tiny, length: int = 8) -> tuple[bool, dict[int, Rotary]]:
    """Whether keys are free, and what is turned in the layers that turn anything."""
    text = config(tiny, QUERY_HEADS).get_text_config(decoder=True)
    symmetry = symmetry_of(text)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = {layer: symmetry.rotary(text, layer, dim, length) for layer in range(text.num_hidden_layers)}
    return symmetry.free_keys(text), {layer: rotary for layer, rotary in found.items() if rotary.dims}


SLOW = [name for name, tiny in TURNED.items() if any(rotary.slow for rotary in _rotary(tiny)[1].values())]


@pytest.mark.parametrize("name", TURNED)
def test_which_types_have_slow_pairs(name: str) -> None:
    free, rotary = _rotary(TURNED[name])
    assert (name in SLOW) == bool(free and rotary and name not in FAST)


@pytest.mark.parametrize(
    ("name", "length"),
    [*((name, 24) for name in SLOW), *((name, length) for name in BY_LENGTH for length in (8, 100))],
)
@torch.no_grad()
def test_queries_and_keys_are_turned_back(name: str, length: int, tmp_path: Path) -> None:
    """A layer that is given the same at every position has the same queries and keys there, before they are turned."""
    tiny = TURNED[name]
    directory = write_checkpoint(build(tiny, QUERY_HEADS, attention=attention(tiny)), tmp_path / "source")
    pair = Pair(plan_conversion(directory, 1, method="calibrated"), on_ids(batch=1))
    found = ((pair.module_of(layer), rotary) for layer, rotary in _rotary(tiny, length)[1].items() if rotary.slow)
    module, rotary = next((module, rotary) for module, rotary in found if module)
    pair.arrive(torch.full((1, length), 5))  # what layers are given besides
    same = torch.randn(pair.source.model.config.get_text_config(decoder=True).hidden_size).expand(1, length, -1)
    (seen,) = pair.original(module.layer, module).observe(same, "heads")
    for turned in seen.heads[:2]:
        dims = slow_dims(rotary)
        before, after = (_spread(heads[..., dims]) for heads in (unturned(turned, rotary), turned))
        assert before < 1e-4 * after
        others = [dim for dim in range(turned.shape[-1]) if dim not in dims]
        assert torch.equal(unturned(turned, rotary)[..., others], turned[..., others])


def _spread(heads: Tensor) -> float:
    """(B, H, T, d): how much positions differ from one another."""
    return float((heads - heads[:, :, :1]).abs().max())
