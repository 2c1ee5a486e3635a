"""Models that are refined and trained to read a KV cache of few bits: gradients by hand, what they are worth with such
a cache and without, and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import check_refused
from embedded import SOURCE
from scrambled import Ids, on_ids, relative
from test_families import load as load_tiny
from test_families import write_checkpoint
from tiny_models import QUERY_HEADS, TINY, build
from torch import Tensor, nn
from training import Runs, difference, losses, material, metrics, options_for, tiny_checkpoint, words_for

from gqa.checkpoint.loading import load_model
from gqa.convert import convert_checkpoint, plan_conversion
from gqa.convert.align.attention import Attend, attend_sdpa
from gqa.convert.align.cache_bits import quantise_cache, quantised_attention
from gqa.convert.align.calibration import Calibrator
from gqa.convert.align.options import Refinement
from gqa.convert.align.rounding import reading, rounded
from gqa.corpus.likelihood import ChunkedHead
from gqa.corpus.windows import Window
from gqa.eval.evaluate import load as load_subject
from gqa.eval.options import EvaluateOptions
from gqa.eval.scoring import score
from gqa.eval.subjects import open_subjects
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import prepare

pytestmark = pytest.mark.usefixtures("alone")


def read(model: Any, bits: int | None, ids: Tensor) -> Tensor:
    """Its logits with a cache of so many bits."""
    with torch.no_grad(), quantised_attention([bits] if bits else []):
        if bits:
            quantise_cache(model, bits, 2, "m")
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


# ------------------------------------------------------------------------------------------------------- gradients


def test_the_gradient_of_rounding_is_that_of_the_identity() -> None:
    """Of a loss of what is read, by hand in float64; smallest numbers and steps, which depend on all, add nothing."""
    heads = torch.randn(2, 5, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = rounded(heads, 3)
    (given**3).sum().backward()
    assert heads.grad is not None
    assert heads.grad.equal(3 * given.detach() ** 2)
    assert given.equal(rounded(heads.detach(), 3))
    assert (heads.grad - 3 * heads.detach() ** 2).abs().max() > 0.1, "it is taken where the numbers were rounded to"


def test_the_gradient_through_attention() -> None:
    """That of the same attention at the rounded keys and values, for queries too."""
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, h, 6, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2)]
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]

    def gradients(attend: Attend, given: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        output = attend(module, *leaves, None, is_causal=True, scaling=0.5)
        return list(torch.autograd.grad(output.square().sum(), leaves))

    found = gradients(reading(attend_sdpa, 2), heads)
    expected = gradients(attend_sdpa, [heads[0], *(rounded(each, 2) for each in heads[1:])])
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    whole = gradients(attend_sdpa, heads)
    assert all((one - other).abs().max() > 0.01 for one, other in zip(found, whole, strict=True))


# ---------------------------------------------------------------------------------------------------------- refined


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(build(TINY["llama+bias"], QUERY_HEADS), tmp_path_factory.mktemp("bits") / "m")


def refinement(bits: int | None, steps: int = 8) -> Refinement:
    return Refinement(steps=steps, batch=8, heldout=0.25, autocast=False, cache_bits=bits)


@pytest.mark.parametrize(("groups", "kept"), [(2, 3), ((4, 1), 3), (2, None)])
def test_layers_are_given_what_the_converted_model_computes(
    groups: Any, kept: int | None, source: Path, tmp_path: Path
) -> None:
    """With such a cache or a whole one, also where it keeps all heads of a layer; with the other one, as a control, it
    computes something else. The base model's cache is whole.
    """
    plan = plan_conversion(source, groups, method="refined", headers_only=False)
    options = on_ids(refinement=refinement(kept))
    calibrator = Calibrator(plan, Ids().ids(), options)
    for layer in range(calibrator.layers):
        calibrator.run(layer)
    out = convert_checkpoint(source, groups, tmp_path / "out", method="refined", calibration=options).out
    for bits in (3, None):
        found: list[Tensor] = []
        model = load_model(str(out), dtype="float32", attention="sdpa")
        layers: Any = model.get_submodule("model.layers")
        layers[-1].register_forward_hook(lambda _, args, output, found=found: found.append(output))
        read(model, bits, Ids().ids())
        assert (relative(calibrator.streams.converted.hidden, found[-1]) < 1e-4) == (bits == kept)
    original = load_tiny(TINY["llama+bias"], source, "sdpa")
    original.get_submodule("model.layers")[-1].register_forward_hook(lambda _, args, output: found.append(output))  # type: ignore[index]
    read(original, None, Ids().ids())
    assert relative(calibrator.streams.source.hidden, found[-1]) < 1e-5


def test_refined_for_a_cache_of_2_bits_is_better_with_one(tmp_path: Path) -> None:
    """Than refined in as many steps without, of heads that are merged without loss; with a whole cache it is the other
    way round.
    """
    fewer = write_checkpoint(build(TINY["llama+bias"], 2), tmp_path / "fewer")
    source, ids = convert_checkpoint(fewer, QUERY_HEADS, tmp_path / "source").out, Ids().ids()
    expected, errors = read(load_tiny(TINY["llama+bias"], source, "sdpa"), None, ids), {}
    for bits in (2, None):
        options = on_ids(refinement=refinement(bits, steps=60))
        out = convert_checkpoint(source, 2, tmp_path / str(bits), method="refined", calibration=options).out
        for cache in (2, None):
            made = read(load_tiny(TINY["llama+bias"], out, "sdpa"), cache, ids)
            errors[bits, cache] = float((made - expected).square().mean())
    assert errors[2, 2] < 0.9 * errors[None, 2]
    assert errors[None, None] < 0.1 * errors[2, None]


# ------------------------------------------------------------------------------------------------------------ trained


def trained(out: Path, **options: Any) -> tuple[Any, Any, Any]:
    """A run's setup, how it went and its record."""
    setup = prepare(options_for(options.pop("model", material() / "model"), out, **options))
    return setup, *uptrain(setup)


def evaluated(out: Path, setup: Any, bits: int | None) -> float:
    """Nats a token of the held-out blocks, as gqa-eval measures a checkpoint with a cache of so many bits."""
    (subject,) = open_subjects([str(out)])
    rows = [block["input_ids"].tolist() for block in setup.heldout]
    with quantised_attention([bits] if bits else []):
        model = load_subject(subject.quantised(bits) if bits else subject, EvaluateOptions(precision="float32"))
        scores = score(ChunkedHead(model), [Window(tuple(ids), len(ids) - 1) for ids in rows], batch_size=4)
    return float(np.mean(scores.nats.astype(np.float64)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_held_out_loss_is_what_gqa_eval_measures(attention: str, tmp_path: Path) -> None:
    """Of the checkpoint that is written, with a cache of as many bits; without them, as a control, it is another."""
    out = tmp_path / "out"
    setup, progress, record = trained(out, cache_bits=2, heldout_fraction=0.2, steps=3, attention=attention)
    assert progress.best_step
    assert evaluated(out, setup, 2) == pytest.approx(progress.heldout_after["nats"], abs=1e-6)
    assert abs(evaluated(out, setup, None) - progress.heldout_after["nats"]) > 1e-4
    assert record["options"]["cache_bits"] == 2
    assert "--cache-bits" not in (out / "config.json").read_text()
    assert "to read a KV cache of 2 bits" in (out / "README.md").read_text()


def test_trained_for_a_cache_of_2_bits_is_better_with_one(tmp_path: Path) -> None:
    """The embedded model learns its own predictions, in which a whole cache leaves nothing to learn."""
    found = {}
    how = {"model": SOURCE, "teacher": str(SOURCE), "train": "attention", "batch_size": 4, "block_size": 64,
           "learning_rate": 2e-4, "heldout_fraction": 0.2, "heldout_tokens": 512}  # fmt: skip
    for bits, steps in ((2, 12), (None, 1)):
        _, progress, _ = trained(tmp_path / str(bits), cache_bits=bits, steps=steps, **how)
        found[bits] = progress.heldout_before["distillation"], progress.heldout_after["distillation"]
    (before, after), (whole, _) = found[2], found[None]
    assert whole < 1e-3 < 0.1 < before
    assert after < 0.97 * before


def test_activations_that_are_computed_twice_are_the_same(tmp_path: Path) -> None:
    """Step by step; of a whole cache, as a control, they are others."""
    runs: dict[Any, list[float]] = {}
    for bits, twice in ((3, False), (3, True), (None, False)):
        out = tmp_path / f"{bits}-{twice}"
        trained(out, cache_bits=bits, checkpointing=twice, steps=4, teacher=str(material() / "teacher"))
        runs[bits, twice] = [record["distillation"] for record in metrics(out / "gqa_uptraining.jsonl")]
    assert runs[3, True] == pytest.approx(runs[3, False], rel=1e-6)
    assert runs[3, False] != pytest.approx(runs[None, False], rel=1e-3)


def test_shards_read_it_too(runs: Runs, tmp_path: Path) -> None:
    """FSDP2, where a model has no weights until it is divided: what would not read it is refused at its first step."""
    words = {"steps": 2, "cache_bits": 3, "teacher": "teacher"}
    for way, before in (("ddp", ""), ("fsdp", "shard()")):
        runs.finish(*runs.words(tmp_path / way, **words), ranks=2, before=before)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-5)
    assert difference(tmp_path / "fsdp", tmp_path / "ddp") <= 1e-5
    falcon = tiny_checkpoint(tmp_path / "falcon", "falcon")
    data = material() / "data.jsonl"
    told = runs.run(*words_for(falcon, data, tmp_path / "out", steps=2, cache_bits=3), ranks=2, before="shard()")
    assert (told.code, "0 of 2 layers of falcon call" in told.err) == (2, True)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("llama", {"cache_bits": 1}, "1 is not in the range"),
        ("llama", {"cache_bits": 16}, "16 is not in the range"),
        (
            "llama",
            {"cache_bits": 4, "attn_implementation": "flex_attention"},
            "goes with sdpa and eager attention, m has flex",
        ),
        ("falcon", {"cache_bits": 4}, "0 of 2 layers of m call transformers' attention functions"),
        ("gqa_t5", {"cache_bits": 4}, "--cache-bits is for decoders with key/value heads, and m is none"),
    ],
)
def test_what_is_not_trained(name: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    words = words_for(tiny_checkpoint(tmp_path / "m", name), material() / "data.jsonl", tmp_path / "out", **options)
    check_refused(checkpoints.run(*words, program="gqa-uptrain"), says, program="gqa-uptrain")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("llama", "--method calibrated --cache-bits 4", "--cache-bits is not used by --method calibrated;"),
        ("llama", "--cache-bits 4", "--cache-bits is not used by --method auto"),
        ("llama", "--method refined --cache-bits 9", "9 is not in the range"),
        ("gqa_t5", "--method refined --cache-bits 4", "--cache-bits is for decoders with key/value heads"),
    ],
)
def test_what_is_not_refined(name: str, words: str, says: str, tmp_path: Path) -> None:
    source = write_checkpoint(build(TINY[name], QUERY_HEADS), tmp_path / "m")
    check_refused(checkpoints.run(source, "-g", 2, *words.split(), "-o", tmp_path / "out"), says)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
