"""Pairs of dimensions that rotary embedding hardly turns: which they are, and heads as they were before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_families import COPIED, write_checkpoint
from test_symmetries import CASES, UNSERVED, attention
from tiny_models import QUERY_HEADS, build
from torch import Tensor, nn

from gqa.convert import plan_conversion
from gqa.convert.align.alignment import shared_key, slow_dims, unturned
from gqa.convert.align.layerwise import Stop, watched
from gqa.convert.align.pair import Pair, attention_of, until_stop
from gqa.convert.align.symmetries import Rotary, find_symmetry

LENGTH = 24


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
    symmetry = find_symmetry(config)
    assert symmetry
    rotary = symmetry.rotary(config, 0, 128)
    assert len(rotary.slow) == expected
    assert len(slow_dims(rotary)) == 2 * expected


@pytest.mark.parametrize(
    "name", [name for name, tiny in CASES.items() if name not in COPIED and tiny.model_type not in UNSERVED]
)
@torch.no_grad()
def test_queries_and_keys_are_turned_back(name: str, tmp_path: Path) -> None:
    """A layer that is given the same at every position has the same queries and keys there, before they are turned."""
    tiny = CASES[name]
    directory = write_checkpoint(build(tiny, QUERY_HEADS, attention=attention(tiny)), tmp_path / "source")
    plan = plan_conversion(directory, 1, method="calibrated")
    config, symmetry = plan.config, find_symmetry(plan.config.text)
    assert symmetry
    pair = Pair.open(plan, "cpu", torch.float32, 1)
    module = next(found for layer in range(config.layers) if (found := pair.module_of(layer)))
    rotary = symmetry.rotary(config.text, module.layer, config.heads(module.layer).key_dim)
    if not rotary.slow:
        assert torch.equal(unturned(torch.ones(1, 1, 2, 4), rotary), torch.ones(1, 1, 2, 4))
        return
    pair.arrive(torch.full((1, LENGTH), 5))  # what layers are given besides
    own = pair.source.load(module.layer)
    seen: list[Tensor] = []

    def attend(_: nn.Module, q: Tensor, k: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.extend((q, k))
        raise Stop

    same = torch.randn(pair.source.model.config.get_text_config(decoder=True).hidden_size).expand(1, LENGTH, -1)
    with watched(attention_of(own, module), attend):
        until_stop(own, same, next(pair.batches(same, module.layer))[2])
    for turned in seen:
        dims = slow_dims(rotary)
        before, after = (_spread(heads[..., dims]) for heads in (unturned(turned, rotary), turned))
        assert before < 1e-4 * after
        others = [dim for dim in range(turned.shape[-1]) if dim not in dims]
        assert torch.equal(unturned(turned, rotary)[..., others], turned[..., others])


def _spread(heads: Tensor) -> float:
    """(B, H, T, d): how much positions differ from one another."""
    return float((heads - heads[:, :, :1]).abs().max())


def test_slow_pairs_share_what_one_frequency_each_cannot() -> None:
    """Keys of two heads that lie in four dimensions, but not frequency by frequency: nothing is lost, scores stay."""
    generator = torch.Generator().manual_seed(0)
    dim, heads = 4, 2
    seeds = torch.randn(500, dim, dtype=torch.float64, generator=generator)
    mixing = torch.randn(dim, heads * dim, dtype=torch.float64, generator=generator)
    keys = seeds @ mixing
    queries = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim)
    moments, means = keys.T @ keys / len(keys), torch.zeros(heads * dim, dtype=torch.float64)

    def lost(rotary: Rotary) -> float:
        found = shared_key(moments, queries, means, rotary)
        shared = keys @ found.key.T
        back = torch.cat([shared @ found.query[head] for head in range(heads)], 1)  # q'^T k' = q^T M^T C k
        return float((back - keys).square().sum() / keys.square().sum())

    assert lost(Rotary(dim, slow=(0.0,) * (dim // 2))) < 1e-10
    assert lost(Rotary(dim)) > 0.01
