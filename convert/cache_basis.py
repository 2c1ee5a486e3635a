"""A basis in which a KV cache of few bits loses less, of a model that stays what it is.

A cache rounds a key or a value in steps of its range (`gqa.convert.align.rounding`). Values are rotated, so
that no dimension alone decides the range, and W_O undoes it (QuaRot, arXiv 2404.00456, section 4). The two dimensions
of a frequency of a key are multiplied by s = (E|q|^2 / E|k|^2)^(1/4) and those of its queries divided, so that what is
rounded weighs as much in scores wherever it is; s commutes with the rotary embedding. E is what the weights give to
independent inputs: measured on text it brings no more (docs/budget.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gqa.convert.align.alignment import pairs
from gqa.convert.align.stream import norm_gain
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.heads.symmetries import Rotary, Symmetry
from gqa.convert.maps import CacheBasis
from gqa.convert.plan import Plan

_LEAST = 1e-6  # of a head's largest energy: what is smaller is taken for this


def cache_bases(plan: Plan) -> dict[str, CacheBasis]:
    """Of every attention module by its path, for the heads that the plan gives it; nothing where it was not asked.

    The plan has all of its maps. One module is in memory at a time.
    """
    symmetry, config, found = plan.config.symmetry, plan.config, dict[str, CacheBasis]()
    if not plan.for_cache_bits:
        return found
    assert isinstance(symmetry, Symmetry)  # others are refused by the plan
    for module in attention_modules(plan.checkpoint, config):
        changes = module_changes(module, config, plan.groups, symmetry.rules)
        heads, scale = changes[0].heads, None
        if symmetry.free_keys(config.text):
            rotary = symmetry.rotary(config.text, module.layer, heads.key_dim)
            scale = balance(*_energies(plan, module, changes, symmetry), rotary)
        found[module.path] = CacheBasis(spread(heads.value_dim), scale)
    return found


def balance(queries: Tensor, keys: Tensor, rotary: Rotary) -> Tensor:
    """(H, d) and (G, d) energies E[q^2] and E[k^2] of each dimension -> (G, d) factors of keys, with a geometric mean
    of 1 in each head, so that keys stay as large as they are.
    """
    queries = queries.unflatten(0, (len(keys), -1)).mean(1)
    both = torch.stack([queries, keys])
    real, imaginary = pairs(rotary)
    both[..., real] = both[..., imaginary] = both[..., real] + both[..., imaginary]
    both = both.clamp_min(1e-30).maximum(_LEAST * both.amax(-1, keepdim=True))
    logarithm = (both[0].log() - both[1].log()) / 4
    return (logarithm - logarithm.mean(-1, keepdim=True)).exp()


def spread(size: int) -> Tensor:
    """(e, e) float64 orthogonal: Hadamard's matrix of the largest power of two in e, times a cosine transform."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(found)) == 0:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    found, odd = found / math.sqrt(len(found)), size // len(found)
    steps = torch.arange(odd, dtype=torch.float64)
    cosines = torch.cos(math.pi / odd * (steps + 0.5) * steps[:, None]) * math.sqrt(2 / odd)
    cosines[0] /= math.sqrt(2)
    return torch.kron(found, cosines)


def _energies(plan: Plan, module: AttentionModule, changes: list[Change], symmetry: Symmetry) -> tuple[Tensor, Tensor]:
    """(H, d) and (G, d): what converted queries and keys are like on independent inputs, biases with them."""
    found, checkpoint = dict[str, Tensor](), plan.checkpoint
    for change in changes:
        if not change.rule.projection:
            continue
        parts = change.after.split(plan.merging.apply(change, [checkpoint.read(spec) for spec in change.sources]))
        for part in ("query", "key"):
            if (rows := parts.get(part)) is not None:
                bias, rows = rows.ndim == 2, rows.double()
                gained = rows[..., None] if bias else rows * norm_gain(checkpoint, module, symmetry, rows.shape[-1])
                found[part] = found.get(part, torch.zeros(())) + gained.square().sum(-1)
    return found["query"], found["key"]
