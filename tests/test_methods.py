"""The arithmetic of merging: what each method yields, in which precision, rounded how often."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.families import all_tensors, load, write_checkpoint
from support.scrambled import on_ids, rearrange, relative
from support.tiny_models import TINY, build, inputs, logits
from torch import Tensor

from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.head_maps import HeadMaps
from gqa.convert.heads.layouts import Fused, FusedOrder, LayerHeads, Layout, Separate, Transposed
from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.fit import FitTask, FittedModule
from gqa.convert.merge.grouping import find_order, partitions, swap_heads
from gqa.convert.merge.maps_from_weights import ModuleEstimate
from gqa.convert.merge.moments import Moments, MomentSums
from gqa.convert.merge.procrustes import procrustes_key, procrustes_value
from gqa.convert.methods.base import Method
from gqa.convert.methods.table import METHODS
from gqa.convert.methods.text_method import TextMethod
from gqa.convert.methods.weights_method import WeightsMethod
from gqa.convert.options import ConvertOptions

DIM = 8
K = "model.layers.0.self_attn.k_proj.weight"
V_BIAS = "model.layers.1.self_attn.v_proj.bias"


def converted(
    source: Path, groups: int, place: Path, method: str = "mean", **options: Any
) -> dict[str, Tensor]:
    """The tensors of a conversion."""
    return all_tensors(
        convert_checkpoint(
            source, groups, place / "out", method=method, overwrite=True, **options
        ).out
    )


def grouped(tensor: Tensor, groups: int) -> Tensor:
    """(Hk * d, ...) -> (G, m, d, ...)."""
    return tensor.view(groups, 4 // groups, DIM, *tensor.shape[1:])


@pytest.mark.parametrize("groups", [1, 2])
def test_mean_and_first(source: Path, tmp_path: Path, groups: int) -> None:
    before = all_tensors(source)
    mean, first = (converted(source, groups, tmp_path, method) for method in ("mean", "first"))
    for name in (K, V_BIAS):
        expected = grouped(before[name].double(), groups).mean(1).flatten(0, 1)
        assert torch.allclose(mean[name].double(), expected, atol=1e-6, rtol=0)
        assert torch.equal(first[name], grouped(before[name], groups)[:, 0].flatten(0, 1))


def test_random_is_drawn_once_per_seed_and_tensor(source: Path, tmp_path: Path) -> None:
    one, again, other = (converted(source, 2, tmp_path, "random", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one[K], other[K])
    assert not torch.equal(one[K], one[K.replace("layers.0", "layers.1")])
    assert not torch.equal(one[K], one[K.replace("k_proj", "v_proj")])
    assert torch.count_nonzero(one[V_BIAS]) == 0
    draws = torch.cat(
        [one[n].flatten() for n in one if "k_proj.weight" in n or "v_proj.weight" in n]
    )
    assert abs(float(draws.std()) / 0.02 - 1) < 0.1
    assert abs(float(draws.mean())) < 0.002


def last_of_each(kv: int, groups: int) -> HeadMaps:
    """Maps that keep the last head of each group of `kv` heads."""
    weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
    weights[:, -1] = 1.0
    return HeadMaps(key=weights, value=weights)


def assert_keys_are_the_last_of_each(tensors: dict[str, Tensor], source: Path) -> None:
    """In two groups."""
    last = grouped(all_tensors(source)[K], 2)[:, 1]
    assert torch.equal(tensors[K].view(2, DIM, -1), last)


def test_a_method_is_one_entry(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another object in the table: it converts, and the card has its words."""

    class Last(Method):
        name = "first"
        cost = "seconds"
        result = "the last of each group"

        def fixed_maps(self, kv: int, groups: int) -> HeadMaps:
            return last_of_each(kv, groups)

    monkeypatch.setitem(METHODS, "first", Last())
    tensors = converted(source, 2, tmp_path, "first")
    assert_keys_are_the_last_of_each(tensors, source)
    assert (
        "the last of each group (`--method first`)" in (tmp_path / "out" / "README.md").read_text()
    )


def test_a_method_that_reads_weights_is_one_object(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last head of each group, found from what is known of each module."""

    class Last(WeightsMethod):
        name = "procrustes"
        cost = "seconds"
        result = "the last of each group"

        def module_maps(self, module: ModuleEstimate) -> HeadMaps:
            return last_of_each(len(module.heads_by_role["key"]), module.groups)

    monkeypatch.setitem(METHODS, "procrustes", Last())
    tensors = converted(source, 2, tmp_path, "procrustes", grouping="contiguous")
    assert_keys_are_the_last_of_each(tensors, source)


def test_a_method_that_reads_text_is_one_object(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean of each group: it writes what `mean` writes, and its quality is measured on text."""

    class Measured(TextMethod):
        name = "calibrated"
        cost = "two forward passes"
        result = "the mean of each group, measured on text"

        def fit(self, task: FitTask) -> FittedModule:
            return FittedModule(task.module, task.pair.mean_maps(task.module), error=0.5)

    mean = converted(source, 2, tmp_path / "mean", "mean")
    monkeypatch.setitem(METHODS, "calibrated", Measured())
    made = convert_checkpoint(
        source, 2, tmp_path / "out", method="calibrated", maps_options=on_ids(check=True)
    )

    tensors = all_tensors(made.out)
    assert all(torch.equal(tensors[name], mean[name]) for name in mean)
    assert made.record["layer_errors"] == [0.5, 0.5]
    assert made.record["quality"]["ratio"] > 0
    card = (made.out / "README.md").read_text()
    assert "the mean of each group, measured on text (`--method calibrated`)" in card


def test_every_kind_of_setting_belongs_to_a_method_and_an_option() -> None:
    of_options = {
        field.metadata["setting"] for field in ConvertOptions.__dataclass_fields__.values()
    }
    of_methods = {setting for method in METHODS.values() for setting in method.settings}
    assert of_options - {""} == of_methods == {"maps", "text", "training", "seed"}


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(), (5, 7)),
        (Separate("key"), (24, 7)),
        (Separate("key"), (24,)),
        (Separate("value", axis=1), (7, 20)),
        (Separate("value", axis=1), (7,)),
        (Separate("key", "one"), (4, 6)),
        (Separate("query"), (48, 7)),
        *((Fused(order), (96, 7)) for order in get_args(FusedOrder)),
        *((Fused(order), (96,)) for order in get_args(FusedOrder)),
        (Transposed(Fused("stacked")), (7, 96)),
        (Transposed(Fused("stacked")), (96,)),
        (Transposed(Separate("output", axis=1)), (40, 7)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Layout) else str(value),
)
def test_a_layout_states_the_shape_of_what_it_joins(
    layout: Layout, shape: tuple[int, ...], groups: int
) -> None:
    heads = LayerHeads(query=8, kv=4, key_dim=6, value_dim=6 if "Fused" in str(layout) else 5)
    parts = {
        part: tensor[torch.zeros(groups, dtype=torch.int)] if part in ("key", "value") else tensor
        for part, tensor in layout.split(torch.zeros(shape), heads).items()
    }
    assert layout.shape(shape, heads, groups) == layout.join(parts, heads).shape


# -------------------------------------------------------------------------------- which heads share


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (6, 3), (8, 4), (6, 1), (6, 6)])
def test_each_partition_once(heads: int, groups: int) -> None:
    """Against every order of heads, cut into groups."""
    size = heads // groups
    cuts = (
        [order[at : at + size] for at in range(0, heads, size)]
        for order in permutations(range(heads))
    )
    assert sorted(partitions(tuple(range(heads)), size)) == sorted(
        {tuple(sorted(tuple(sorted(group)) for group in cut)) for cut in cuts}
    )


@pytest.mark.parametrize(("heads", "size"), [(16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (40, 5)])
def test_swaps_find_the_groups_that_cost_least(heads: int, size: int) -> None:
    """Pairs of heads of a hidden group cost a tenth of others, which differ by a factor of 3."""
    generator = torch.Generator().manual_seed(heads + size)
    hidden = torch.randperm(heads, generator=generator) // size
    costs = 1 + 2 * torch.rand(heads, heads, generator=generator, dtype=torch.float64)
    costs = costs + costs.mT
    costs[hidden[:, None] == hidden] *= 0.1
    costs.fill_diagonal_(0)

    neighbors = tuple(tuple(range(at, at + size)) for at in range(0, heads, size))
    partition = swap_heads(neighbors, costs)
    assert sorted(chain.from_iterable(partition)) == list(range(heads))
    assert {len(group) for group in partition} == {size}
    assert all(len(set(hidden[list(group)].tolist())) == 1 for group in partition)


def test_swaps_end_at_the_best_partition_of_few_heads() -> None:
    """Against all partitions of eight heads, with costs of no structure."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        costs = torch.rand(8, 8, generator=generator, dtype=torch.float64)
        costs = costs + costs.mT
        costs.fill_diagonal_(0)

        def total(partition: tuple[tuple[int, ...], ...], costs: Tensor = costs) -> float:
            return sum(float(costs[list(group)][:, list(group)].sum()) for group in partition)

        least = min(total(partition) for partition in partitions(tuple(range(8)), 2))
        neighbors = tuple((at, at + 1) for at in range(0, 8, 2))
        assert total(swap_heads(neighbors, costs)) == pytest.approx(least)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_swaps_end_with_costs_that_say_nothing(value: float) -> None:
    neighbors = tuple((at, at + 1) for at in range(0, 16, 2))
    partition = swap_heads(neighbors, torch.full((16, 16), value, dtype=torch.float64))
    assert sorted(chain.from_iterable(partition)) == list(range(16))


def test_moments_follow_their_heads() -> None:
    """Moments of all heads, cut into groups in another order, are those of heads in that order."""
    q, k, v, significance = (torch.randn(2, heads, 5, 4) for heads in (8, 4, 4, 8))
    distances = torch.rand(8, 5)
    order = (2, 0, 3, 1)
    found = []
    for groups, kv in ((1, [0, 1, 2, 3]), (2, list(order))):
        of = [2 * head + one for head in kv for one in (0, 1)]
        weights = significance[:, of, :, 0].square()
        sums = MomentSums(LayerHeads(8, 4, 4, 4), groups, 5)
        sums.add(q[:, of], k[:, kv], v[:, kv], weights, torch.ones(1, 5), distances[of])
        found.append(sums.averaged())
    whole, cut = found[0].regrouped(order, 2), found[1]
    for name in ("keys", "key_means", "queries", "values", "distances"):
        torch.testing.assert_close(getattr(whole, name), getattr(cut, name), rtol=1e-5, atol=1e-5)


def test_keys_and_values_decide_together_in_whatever_units() -> None:
    generator, orders = torch.Generator().manual_seed(3), []
    roots = (
        torch.randn(n, 64 // n, 64 // n, generator=generator, dtype=torch.float64)
        for n in (2, 16, 2, 16)
    )
    keys, queries, values, w_o = (
        root[: len(root) // 2] @ root[: len(root) // 2].mT for root in roots
    )
    for key_unit, value_unit in ((1, 1), (1e6, 1), (1, 1e6), (1, 0), (0, 1)):
        means, distances = keys.new_zeros(1, 32), keys.new_zeros(8, 0)
        moments = Moments(key_unit * keys, means, queries, value_unit * values, distances)
        orders.append(find_order(moments, w_o, 4, Rotary(4), aligns_keys=True))
    assert orders[:3] == orders[:1] * 3
    assert orders[0] not in orders[3:]


@pytest.mark.parametrize("rotated", [0, 4, 8])
def test_an_aligned_mean_has_the_mean_energy(rotated: int) -> None:
    """Of three heads that are not alike."""
    root = torch.randn(24, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    moments = root @ root.mT
    for maps in (procrustes_key(moments, Rotary(rotated), 3), procrustes_value(moments, 3, 1)):
        assert float((maps.merge @ moments @ maps.merge.mT).trace()) == pytest.approx(
            float(moments.trace()) / 3
        )


@pytest.mark.parametrize(
    ("method", "heads", "groups"),
    [
        ("procrustes", 4, 2),
        ("calibrated", 4, 2),
        ("calibrated", 8, 4),
        ("procrustes", 16, 4),
        ("calibrated", 16, 8),
        ("procrustes", 32, 8),
    ],
)
def test_from_the_option_to_the_checkpoint(
    tmp_path: Path, method: str, heads: int, groups: int
) -> None:
    """The KV heads of a group are equal, and no neighbors, so that neighbors lose a lot.

    Each is read by two query heads. All partitions of 4 and 8 heads are tried, of 16 and 32 pairs.
    """
    options = {
        **TINY["llama+bias"].options,
        "num_attention_heads": 2 * heads,
        "hidden_size": 8 * heads,
        "head_dim": 8,
    }
    tiny = replace(TINY["llama+bias"], options=options)
    source = write_checkpoint(build(tiny, groups), tmp_path / "source")
    model = convert_checkpoint(source, heads, tmp_path / "equal", method="mean").out
    rearrange(model)

    expected = logits(tiny, load(tiny, model), inputs(tiny))
    lost = {}
    for grouping in ("contiguous", "auto"):
        calibration = on_ids(grouping=grouping)
        out = convert_checkpoint(
            model, groups, tmp_path / grouping, method=method, maps_options=calibration
        ).out
        lost[grouping] = relative(logits(tiny, load(tiny, out), inputs(tiny)), expected)
    assert lost["auto"] < 1e-4
    assert lost["contiguous"] > 1e-2


@pytest.mark.parametrize(
    ("name", "heads", "groups", "method", "searched"),
    [
        ("llama", 8, 2, "aligned", True),
        ("llama", 12, 2, "refined", True),  # 924 groups of six heads: by swaps
        ("llama", 14, 7, "aligned", True),  # 91 pairs, and 135,135 ways to divide into pairs
        ("llama", 128, 64, "refined", True),
        ("llama", 136, 68, "refined", False),  # 9,180 pairs, and more with every head
        ("llama", 8, 1, "calibrated", False),  # all share
        ("llama", 8, 2, "mean", False),
        ("falcon+rw", 4, 1, "procrustes", False),  # ALiBi: a head's place is its slope
        ("diffllama", 8, 2, "refined", False),  # it cannot be aligned
    ],
)
def test_groups_are_searched_without_being_asked(
    name: str, heads: int, groups: int, method: str, searched: bool, tmp_path: Path
) -> None:
    options = {**TINY[name].options, "num_attention_heads": heads, "hidden_size": 8 * heads}
    directory = write_checkpoint(
        build(replace(TINY[name], options=options), heads), tmp_path / "source"
    )
    plan = plan_conversion(directory, groups, method=method)
    assert plan.searches("auto") is searched
    assert not plan.searches("contiguous")
