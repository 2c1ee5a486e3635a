"""The basis for a KV cache of few bits: the same logits, other keys and values, and less lost by rounding them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from embedded import SOURCE
from test_families import louder, write_checkpoint
from test_symmetries import CASES, attention, merged_logits
from tiny_models import QUERY_HEADS, TINY, build, inputs, logits

from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import read_checkpoint
from gqa.convert import cache_basis, convert_checkpoint
from gqa.convert.align.rounding import rounded
from gqa.convert.cache_basis import balance, cache_bases, spread
from gqa.convert.heads.symmetries import Rotary
from gqa.convert.maps import CacheBasis
from gqa.convert.plan import Plan, make_plan

IDS = torch.arange(10, 40)[None]
# Kinds of layouts, rotary embeddings, norms and biases.
SOME = (
    "llama+bias", "llama+queries", "qwen3", "olmo2", "phi3", "falcon", "gpt_oss", "cohere", "stablelm", "glm", "gemma2",
    "gqa_gpt2", "gqa_t5", "gqa_bart",
)  # fmt: skip


def in_basis(plan: Plan) -> Plan:
    return replace(plan, merging=replace(plan.merging, bases=cache_bases(plan)))


@pytest.mark.parametrize("name", SOME)
def test_a_model_in_another_basis_computes_the_same(name: str, tmp_path: Path) -> None:
    """With its own number of heads and with fewer; where values are not only rotated, as a control, it does not."""
    tiny = CASES[name]
    kept = 2 if 2 in tiny.kv_counts else 1
    own, fewer = (louder(tiny, build(tiny, kv, attention=attention(tiny))) for kv in (QUERY_HEADS, kept))
    whole = write_checkpoint(own, tmp_path / "own")
    same = in_basis(make_plan(read_checkpoint(whole), QUERY_HEADS, "mean", for_cache_bits=True))
    expected = logits(tiny, own, inputs(tiny))
    assert (merged_logits(tiny, same) - expected).abs().max() < 1e-5 * expected.abs().max()
    repeated = convert_checkpoint(write_checkpoint(fewer, tmp_path / "fewer"), QUERY_HEADS, tmp_path / "repeated").out
    plan = make_plan(read_checkpoint(repeated), kept, "mean", for_cache_bits=True)
    merged, bases = merged_logits(tiny, plan), cache_bases(plan)
    size = merged.abs().max()
    assert (merged_logits(tiny, in_basis(plan)) - merged).abs().max() < 1e-5 * size
    stretched = {
        path: basis.value * torch.linspace(0.5, 1.5, len(basis.value))[:, None] for path, basis in bases.items()
    }
    others = {path: CacheBasis(value) for path, value in stretched.items()}  # W_O undoes a rotation only
    other = merged_logits(tiny, replace(plan, merging=replace(plan.merging, bases=others)))
    assert (other - merged).abs().max() > 1e-4 * size


@pytest.mark.parametrize("size", [1, 3, 8, 64, 80, 96])
def test_a_rotation_spreads_what_one_dimension_has(size: int) -> None:
    turned = spread(size)
    assert (turned @ turned.T - torch.eye(size)).abs().max() < 1e-12
    assert turned.abs().max() < 1.42 * size**-0.5


def test_queries_and_keys_weigh_the_same_afterwards() -> None:
    """In every pair, up to one factor for a head; an unused dimension stays finite."""
    queries, keys = torch.rand(4, 8, dtype=torch.float64) + 0.1, torch.rand(2, 8, dtype=torch.float64) + 0.1
    keys[1, 7] = queries[3, 7] = 0
    scale = balance(queries, keys, Rotary(4))
    assert scale.isfinite().all()
    assert scale[:, :2].equal(scale[:, 2:4])
    q, k = queries.unflatten(0, (2, 2)).mean(1) / scale**2, keys * scale**2
    ratio = (q[0, :2] + q[0, 2:4]) / (k[0, :2] + k[0, 2:4])
    assert ratio.allclose((q[0, 4:] / k[0, 4:]).mean().expand(2))


@pytest.mark.parametrize("method", ["mean", "aligned", "calibrated", "refined", "own"])
def test_after_every_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that load and compute the same, in float16 too; keys not scaled in pairs, as a control, do not."""
    source = write_checkpoint(build(TINY["llama+bias"], QUERY_HEADS), tmp_path / "model")
    reads = method in ("calibrated", "refined")
    words = ["-g", QUERY_HEADS if method == "own" else 2, "-q", *(["--method", method] if method != "own" else [])]
    words += ["--data", "self:512", "--context", 32] if reads else []
    words += ["--refine-steps", 5] if method == "refined" else []

    def made(name: str, *more: object) -> torch.Tensor:
        done = checkpoints.run(source, *words, *more, "-o", tmp_path / name)
        assert done.code == 0, done.err
        with torch.no_grad():
            found: torch.Tensor = load_model(str(tmp_path / name), dtype="float32")(input_ids=IDS).logits
        return found

    plain, same = made("plain"), made("same", "--for-cache-bits", "--verify-load")
    assert (same - plain).abs().max() < 1e-5 * plain.abs().max()
    before, after = (checkpoints.load(tmp_path / name) for name in ("plain", "same"))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    if method != "mean":
        return
    half = made("half", "--for-cache-bits", "--dtype", "float16")
    assert (half - plain).abs().max() < 2e-2 * plain.abs().max()
    monkeypatch.setattr(cache_basis, "balance", lambda q, k, rotary: balance(q, k, Rotary(0)))
    assert (made("apart", "--for-cache-bits") - plain).abs().max() > 1e-3 * plain.abs().max()


def test_less_is_lost_in_4_bits() -> None:
    """Of values of which one dimension is larger than all others, by the rotation of the embedded model."""
    plan = make_plan(read_checkpoint(SOURCE), 8, "mean", for_cache_bits=True)
    value = {name: basis.value for name, basis in cache_bases(plan).items()}
    spiky = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
    spiky[:, 3] *= 20
    turned = next(iter(value.values())).float()
    back = rounded(spiky @ turned.T, 4) @ turned
    assert (back - spiky).square().sum() < 0.5 * (rounded(spiky, 4) - spiky).square().sum()


@pytest.mark.parametrize("name", ["doge", "gemma4_text"])
def test_refused_where_heads_cannot_change(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(build(TINY[name], QUERY_HEADS), tmp_path / "model")
    told = checkpoints.run(source, "-g", 2, "--for-cache-bits", "--dry-run")
    checkpoints.check_refused(told, "--for-cache-bits cannot change the heads of", "leave it out")


def test_the_plan_says_what_changes(tmp_path: Path) -> None:
    for name, says in (("llama", "values rotated, keys scaled; the same logits"), ("qwen3", "keys stay, a norm")):
        source = write_checkpoint(build(TINY[name], QUERY_HEADS), tmp_path / name)
        told = checkpoints.run(source, "-g", QUERY_HEADS, "--for-cache-bits", "--dry-run")
        assert says in told.said
        made = convert_checkpoint(source, QUERY_HEADS, for_cache_bits=True)
        assert made.out.name == f"{name}-gqa{QUERY_HEADS}-for-cache-bits"
