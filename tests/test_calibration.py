"""Finding maps: right in every layer, never worse than its start, and fitted where errors count."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.calibrations import SHORT, pairs, plan_of
from support.families import attention_of, write_checkpoint
from support.families import load as load_tiny
from support.scrambled import Ids, find_maps, on_ids, relative
from support.tiny_models import TINY, build, inputs, logits
from torch import Tensor

from gqa.convert.api import convert_checkpoint
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.fit import FitTask, FittedModule, fit_module
from gqa.convert.merge.layer import Stream
from gqa.convert.merge.options import MapsOptions, Refinement
from gqa.convert.merge.pair import StreamPair
from gqa.convert.merge.refine import TrainedWeights, refine
from gqa.convert.methods.table import METHODS


def layer_errors(source: Path, groups: int = 2, **how: Any) -> list[float]:
    """What every layer loses on the ids that it was calibrated on."""
    calibrator = Calibrator(plan_of(source, groups=groups), Ids().ids(), on_ids(**how))
    return [
        result.error for layer in range(calibrator.n_layers) for result in calibrator.run(layer)
    ]


@pytest.mark.parametrize(("name", "batch"), [("gpt_oss", 24), ("qwen2_vl_text", 24)])
def test_batches_do_not_matter(name: str, batch: int, tmp_path: Path) -> None:
    """Sums over batches, the last one smaller, with masks and positions for each size."""
    directory = write_checkpoint(build(TINY[name], 4), tmp_path / "source")
    assert layer_errors(directory) == pytest.approx(
        layer_errors(directory, most_blocks=batch), rel=1e-4
    )


def test_a_drift_is_in_units_of_what_attention_adds(tmp_path: Path) -> None:
    """Granite adds half of it: as if W_O and the MLP's last matrix were half as large."""
    tiny, errors = TINY["granite"], []
    for multiplier in (0.5, 1.0):
        model = build(replace(tiny, options={**tiny.options, "residual_multiplier": multiplier}), 4)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data *= 0.5 / multiplier
        errors.append(layer_errors(write_checkpoint(model, tmp_path / str(multiplier))))
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


def hidden_states(directory: Path) -> list[Tensor]:
    """What transformers computes after each layer, of the ids that are calibrated on."""
    states: list[Tensor] = []
    model = load_tiny(TINY["llama+bias"], directory)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: states.append(output))
    with torch.no_grad():
        model(input_ids=Ids().ids())
    return states


def test_the_drift_is_that_of_the_hidden_states_in_transformers(
    source: Path, tmp_path: Path
) -> None:
    result = convert_checkpoint(
        source, 2, tmp_path / "out", method="calibrated", maps_options=on_ids()
    )
    expected = [
        float(((after - before).norm(dim=-1) / before.norm(dim=-1)).median())
        for before, after in zip(hidden_states(source), hidden_states(result.out), strict=True)
    ]
    assert result.record["layer_drifts"] == pytest.approx(expected, rel=1e-3)
    assert 0 < expected[0] < expected[1]


def test_nothing_drifts_before_a_layer_whose_heads_merge(source: Path, tmp_path: Path) -> None:
    result = convert_checkpoint(
        source, (4, 2), tmp_path / "out", method="calibrated", maps_options=on_ids()
    )
    first, second = result.record["layer_drifts"]
    assert first == 0
    assert second > 0


def test_padding_does_not_drift() -> None:
    hidden = torch.ones(1, 4, 8)
    moved = hidden.clone()
    moved[0, :1] *= 1.5
    moved[0, 1:] *= 9
    is_text = torch.tensor([[True, False, False, False]])
    with_padding, without = (
        StreamPair(Stream(hidden, 1, Mock(), mask), Stream(moved, 1, Mock(), mask))
        for mask in (is_text, None)
    )
    assert with_padding.drift() == 0.5
    assert without.drift() == 8


def test_a_sample_of_few_long_blocks_is_of_blocks_that_count(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first block, if that is for validation: nothing would be fitted to."""
    # Each block is as long as all that is sampled
    monkeypatch.setattr("gqa.convert.merge.fit.FITTED_TOKENS", Ids.length)
    sampled: list[list[int]] = []

    def sample(task: FitTask) -> FittedModule:
        weights = task.position_weights.clone()
        weights[0] = 0
        refined = replace(task, position_weights=weights)
        sampled.extend(rows.tolist() for rows in refined.fitted_batches())
        return fit_module(task)

    Calibrator(plan_of(source), Ids(count=4).ids(), on_ids(most_blocks=1), sample).run(0)
    assert sampled == [[1]]


# --------------------------------------------------------------------------------------- refinement


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The validation errors of one module after another, before and after it is trained."""
    errors: list[tuple[float, float]] = []

    def refine_and_record(*args: Any) -> TrainedWeights:
        result = refine(*args)
        errors.append((result.error_before, result.error))
        return result

    # Notes the errors of each module, which are not part of any result
    monkeypatch.setattr("gqa.convert.merge.fit_and_refine.refine", refine_and_record)
    return errors


@pytest.mark.parametrize("name", ["diffllama", "qwen3_5_text", "gqa_opt"])
def test_refinement_lowers_the_error(
    name: str, tmp_path: Path, trained: list[tuple[float, float]]
) -> None:
    """Of types without a known symmetry from the mean, of others from the closed form; and the
    result loads.
    """
    tiny = TINY[name]
    directory = write_checkpoint(build(tiny, 4), tmp_path / "source")
    options = on_ids(
        refinement=Refinement(steps=40, validation=0.25), text=Ids(high=tiny.tokens, count=192)
    )
    refined, mean = (
        convert_checkpoint(directory, 2, tmp_path / method, method=method, maps_options=how).out
        for method, how in (("refined", options), ("mean", None))
    )
    assert trained
    assert all(after < before for before, after in trained)
    source, after, pooled = (
        logits(tiny, load_tiny(tiny, place, attention_of(tiny.model_type)), inputs(tiny))
        for place in (directory, refined, mean)
    )
    assert (after - source).square().mean() < (pooled - source).square().mean()


def test_every_module_of_an_encoder_decoder_is_refined(
    tmp_path: Path, trained: list[tuple[float, float]]
) -> None:
    """Self- and cross-attention: training lowers their errors,
    and what is padding changes nothing.
    """
    encoding, errors = write_checkpoint(build(TINY["gqa_t5"], 4), tmp_path), []
    for padding, steps, rate in ((0, 30, 0.02), (0, 1, 1e-9), (8, 1, 1e-9)):
        how = Refinement(steps=steps, learning_rate=rate, validation=0.25, autocast=False)
        calibrator = Calibrator(
            plan_of(encoding, "refined"),
            pairs(TINY["gqa_t5"].tokens, padding),
            on_ids(refinement=how, most_blocks=12),
            METHODS["refined"].fit,
        )
        results = [
            result for layer in range(calibrator.n_layers) for result in calibrator.run(layer)
        ]
        errors.append({result.module.path: result.error for result in results})
    assert sum(after for _, after in trained[:4]) < sum(before for before, _ in trained[:4]) < 4
    _, before, padded = errors
    assert len(before) == 4
    assert padded == pytest.approx(before, rel=1e-3)


def refined(
    module: torch.nn.Linear,
    hidden: Tensor,
    start: dict[str, Tensor],
    targets: Tensor,
    counts: Tensor | None = None,
    **how: Any,
) -> TrainedWeights:
    """What `refine` finds in steps of 8 blocks; every position counts one unless it is said."""
    counted = torch.ones(targets.shape[:2]) if counts is None else counts
    return refine(
        module,
        start,
        lambda rows: ((hidden[rows],), {}),
        targets,
        counted,
        Refinement(blocks_per_step=8, autocast=False, **how),
    )


def test_refinement_looks_where_errors_count() -> None:
    """Nothing is learnt from wrong targets where they count nothing; a rate that breaks everything
    leaves the start.
    """
    torch.manual_seed(0)
    module, hidden = torch.nn.Linear(4, 4), torch.randn(32, 5, 4)
    start = {name: parameter.detach() for name, parameter in module.named_parameters()}
    targets, counts = module(hidden).detach(), torch.ones(32, 5)
    targets[:, 0] += 100.0
    counts[:, 0] = 0.0
    assert refined(module, hidden, start, targets, counts, steps=16).error_before < 1e-12

    result = refined(module, hidden, start, targets, steps=16)
    assert result.error < result.error_before, "there is something to learn where it counts"

    result = refined(module, hidden, start, targets, steps=16, learning_rate=1e4)
    assert result.error == result.error_before
    assert all(torch.equal(result.weights[name], start[name]) for name in start)


def test_validation_blocks_are_not_trained_on() -> None:
    """Whichever the seed has chosen."""
    module, hidden = torch.nn.Linear(4, 4), torch.arange(32.0)[:, None, None].expand(32, 5, 4)
    seen: dict[bool, set[float]] = {}
    module.register_forward_pre_hook(
        lambda _, args: seen.setdefault(torch.is_grad_enabled(), set()).update(
            args[0][:, 0, 0].tolist()
        )
    )
    validation = []
    for seed in (0, 1):
        seen.clear()
        refined(
            module,
            hidden,
            module.state_dict(),
            torch.ones(32, 5, 4),
            steps=16,
            validation=0.25,
            seed=seed,
        )
        assert len(seen[False]) == 8
        assert seen[True] == set(range(32)) - seen[False]
        validation.append(seen[False])
    assert validation[0] != validation[1]


@pytest.mark.parametrize("method", ["refined", "calibrated"])
def test_validation_blocks_are_new_to_the_start(source: Path, method: str) -> None:
    """Refinement starts from what other blocks say alone; `calibrated` fits to all blocks."""
    ids, found = Ids().ids(), []
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    validation = int(order[0])
    one_block = Refinement(steps=1, learning_rate=1e-9, validation=1 / len(ids))
    for _ in range(2):
        options = on_ids(refinement=one_block)
        calibrator = Calibrator(plan_of(source, method), ids, options, METHODS[method].fit)
        (result,) = calibrator.run(0)
        found.append(result.maps)
        ids = ids.clone()
        ids[validation] = ids[validation].flip(0)
    for part in ("key", "query", "value", "output"):
        one, other = (getattr(maps, part) for maps in found)
        assert torch.equal(one, other) is (method == "refined"), part


def test_records_have_all_settings_of_training() -> None:
    """Else a stopped run could be continued with other settings."""
    settings = Refinement(steps=7, blocks_per_step=3, validation=0.25, seed=5)
    described = METHODS["refined"].describe_options(MapsOptions(refinement=settings))
    assert described["refinement"] == asdict(settings)


@pytest.mark.parametrize(("dtype", "autocast"), [("bfloat16", False), ("float16", True)])
def test_layers_in_16_bits_are_refined(
    source: Path, tmp_path: Path, dtype: str, autocast: bool, trained: list[tuple[float, float]]
) -> None:
    how = replace(SHORT, steps=40, autocast=autocast)
    find_maps(
        plan_of(source, "refined"), tmp_path / "maps", on_ids(refinement=how, precision=dtype)
    )
    assert len(trained) == 2
    assert all(after < before < 1 for before, after in trained)


def test_the_refit_is_least_squares(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards the source's inputs of W_O and what W_O turns into the drift, each position by what
    it counts; and the error that is said is the one that is left.
    """
    torch.manual_seed(0)
    errors: list[float] = []

    def compared(task: FitTask) -> FittedModule:
        # Streams are equal before the first layer
        drift = torch.randn(task.targets.shape) * task.targets.std()
        task = replace(
            task,
            targets=task.targets + drift,
            position_weights=torch.rand(task.position_weights.shape),
        )
        projection = task.base_attention.projection
        assert projection is not None
        outputs = (task.targets - projection.bias).double().flatten(0, 1)
        result = fit_module(task)
        w_o = projection.weight.detach().mT.double()
        task.apply(replace(result.maps, output=None))
        given = [
            capture.head_outputs
            for capture in task.converted_attention.capture(task.inputs, "head_outputs")
        ]
        root = task.position_weights.double().sqrt().flatten()[:, None]
        rows = torch.cat(given).double().flatten(0, 1) * root
        target = outputs @ torch.linalg.pinv(w_o) * root
        best = torch.linalg.lstsq(rows, target, driver="gelsd").solution
        left = float(((rows @ best - target) @ w_o).square().sum() / (target @ w_o).square().sum())
        assert torch.allclose(
            result.maps.output, best.mT, rtol=0, atol=1e-5 * float(best.abs().max())
        )
        assert result.error == pytest.approx(left, rel=1e-5)
        errors.append(left)
        return result

    options = on_ids(most_blocks=24, ridge=0.0, grouping="contiguous")
    Calibrator(plan_of(source), Ids().ids(), options, compared).run(0)
    assert errors


def test_the_ridge_counts_as_tokens_of_text(source: Path) -> None:
    """The same text twice is fitted like the text once with half the ridge; with the same ridge it
    is fitted more closely.
    """

    def first_error(copies: int, ridge: float) -> float:
        ids = Ids().ids().repeat(copies, 1)
        options = on_ids(ridge=ridge, grouping="contiguous")
        (result,) = Calibrator(plan_of(source), ids, options).run(0)
        return result.error

    assert first_error(2, ridge=4_000) == pytest.approx(first_error(1, ridge=2_000), rel=1e-4)
    assert first_error(2, ridge=2_000) < 0.99 * first_error(1, ridge=2_000)


# A model, and whose weights are zero, along which dimension, and what part of them.
DEATHS = [
    ("llama", "v_proj", 0, 1),
    ("glm", "k_proj", 0, 2),
    ("granitemoehybrid+nope", "k_proj", 0, 2),
    ("llama", "o_proj", 1, 2),
    ("phi", "k_proj", 0, 1),  # the keys are its bias
]


@pytest.mark.parametrize(("name", "projection", "dim", "share"), DEATHS)
def test_dead_heads_are_merged(
    name: str, projection: str, dim: int, share: int, tmp_path: Path
) -> None:
    """Values, keys of a group (with and without rotated dimensions) and outputs; float16 holds what
    is written.
    """
    tiny = TINY[name]
    model = build(tiny, 4)
    for own, weight in model.named_parameters():
        if own.endswith(f".{projection}.weight"):
            weight.data.narrow(dim, 0, weight.shape[dim] // share).zero_()
    source = write_checkpoint(model, tmp_path / "source")
    options = on_ids(
        ridge=0.0, text=Ids(high=tiny.tokens), refinement=Refinement(steps=4, blocks_per_step=16)
    )
    expected, lost = logits(tiny, model, inputs(tiny)), {}
    for method in ("mean", "refined", *(["aligned"] if name in ("llama", "glm", "phi") else [])):
        how = None if method == "mean" else options
        out = convert_checkpoint(
            source, 2, tmp_path / method, method=method, dtype="float16", maps_options=how
        ).out
        lost[method] = relative(logits(tiny, load_tiny(tiny, out, "sdpa"), inputs(tiny)), expected)
    assert max(lost.values()) == lost["mean"], "no number is NaN, and none is worse"


@pytest.mark.parametrize(("name", "causal"), [("paligemma", False), ("gemma", True)])
def test_paligemma_sees_what_follows(tmp_path: Path, name: str, causal: bool) -> None:
    plan = plan_of(write_checkpoint(build(TINY[name], 4), tmp_path))

    def first_states(last: int) -> Tensor:
        ids = Ids().ids()
        ids[:, -1] = last
        calibrator = Calibrator(plan, ids, on_ids())
        calibrator.run(0)
        return calibrator.calibration_states.base.hidden[:, 0]

    assert torch.equal(first_states(3), first_states(4)) == causal


def test_a_step_of_refined_has_a_limited_number_of_blocks_and_of_tokens() -> None:
    lengths = (64, 256, 512, 1024, 2048, 4096, 8192)
    assert [Refinement().blocks_of_step(length) for length in lengths] == [8, 8, 8, 4, 2, 1, 1]


@pytest.mark.parametrize(("tokens_per_step", "blocks"), [(24, 3), (10**6, 6)])
def test_steps_take_the_blocks_of_a_step(tokens_per_step: int, blocks: int) -> None:
    """The training pass after the first measurement reads so many blocks of 8 tokens."""
    targets = torch.randn(24, 8, 4, generator=torch.Generator().manual_seed(0))
    read = list[int]()

    def arguments(rows: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        read.append(len(rows))
        return (targets[rows],), {}

    layer = torch.nn.Linear(4, 4, bias=False)
    settings = Refinement(
        steps=1,
        blocks_per_step=6,
        tokens_per_step=tokens_per_step,
        validation=1 / 24,
        autocast=False,
    )
    start = {"weight": layer.weight.detach()}
    refine(layer, start, arguments, targets, torch.ones(24, 8), settings)
    assert read == [1, blocks, 1]  # one block is for validation, before and after the step
