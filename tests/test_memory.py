"""Caches of few bits: what attention reads of them; what decoding with a cache is timed on; what is
said where memory ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.embedded import SOURCE, load
from support.evaluations import evaluate_models, model_directory, results
from support.families import write_checkpoint
from support.tiny_models import QUERY_HEADS, TINY, build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gqa.convert.api import convert_checkpoint
from gqa.convert.heads.kv_cache import CachedLayer
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.maps_method import MapsMethod
from gqa.convert.methods.table import METHODS
from gqa.core.errors import RefusedError
from gqa.eval import cache_formats, decode
from gqa.eval.cache_formats import (
    CACHE_FORMATS,
    CacheFormatName,
    groups_per_head,
    round_in_groups,
    round_to_fp8,
    round_to_int4_per_head,
    round_to_int8_per_head,
)
from gqa.eval.decode import greedy_decode, time_decoding
from gqa.eval.options import EvaluateOptions
from gqa.eval.quantized_cache import quantize_cache
from gqa.models.loading import cache_name, load_model

# ------------------------------------------------------------------------------- caches of few bits

IDS = torch.arange(10, 40)[None]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_numbers_on_the_grid_stay_and_others_move_by_half_a_step(bits: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    parts = groups_per_head(dim)
    codes = torch.randint(0, 2**bits, (3, 5, parts, dim // parts), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 2**bits - 1
    heads = (codes * 0.25 - 3).flatten(-2)
    assert round_in_groups(heads, bits).equal(heads)
    drawn = torch.randn(3, 5, dim, generator=generator)
    cut = drawn.unflatten(-1, (parts, -1))
    step = (cut.amax(-1) - cut.amin(-1)) / (2**bits - 1)
    away = (round_in_groups(drawn, bits) - drawn).unflatten(-1, (parts, -1)).abs().amax(-1)
    assert (away <= 0.5 * step + 4e-3 * cut.abs().amax(-1)).all()  # edges are kept in 16 bits
    assert (away > 0.2 * step).all()
    assert round_in_groups(torch.full((2, dim), 0.5), bits).equal(torch.full((2, dim), 0.5))
    layer = CachedLayer(3, dim, dim, None)
    bytes_of_vector = math.ceil(dim * bits / 8) + 4 * parts
    assert layer.bytes_per_token(CACHE_FORMATS[bits].bytes_per_head) == 6 * bytes_of_vector


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_float16_are_quantized_as_others(bits: int, dtype: torch.dtype) -> None:
    """Massive values of a few models exceed 65,504, the largest float16."""
    heads = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    for size in (1.0, 2.0**40):
        rounded = round_in_groups(heads * size, bits).float() / size
        step = (heads.float().amax(-1) - heads.float().amin(-1)) / (2**bits - 1)
        away = (rounded - heads.float()).abs().amax(-1)
        # Edges are stored in 16 bits, of which bfloat16 has eight for the digits.
        assert (away <= 0.51 * step + 2**-7 * heads.float().abs().amax(-1)).all()


def test_values_near_the_largest_float16_stay_finite_in_float16() -> None:
    heads = torch.linspace(-65504, 65504, 64).half()[None]
    assert round_in_groups(heads, 3).isfinite().all()


def nearest_e4m3(heads: Tensor) -> Tensor:
    """The nearest of all numbers that float8_e4m3fn has; of two as near, the even code's."""
    codes = torch.arange(127, dtype=torch.uint8)  # from 0 to the largest number; 127 is NaN
    numbers = codes.view(torch.float8_e4m3fn).float()
    distances = (heads.float().abs().unsqueeze(-1) - numbers).abs()

    is_nearest = distances == distances.amin(-1, keepdim=True)
    preference = is_nearest * (2 - codes % 2)
    size = numbers[preference.argmax(-1)]
    return size.copysign(heads.float()).to(heads.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
def test_fp8_rounds_to_the_nearest_number_of_e4m3(dtype: torch.dtype, size: float) -> None:
    """From numbers below its smallest to numbers beyond its largest."""
    heads = (size * torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    rounded = round_to_fp8(heads)
    assert rounded.dtype == dtype
    assert rounded.equal(nearest_e4m3(heads))
    assert not rounded.equal(round_in_groups(heads, 8))


def test_fp8_saturates_beyond_448() -> None:
    """As vLLM's kernels do; the cast alone makes NaN of them in some versions of torch."""
    beyond = torch.tensor([448.0, 449.0, 465.0, 480.0, 1e30, float("inf")])
    assert round_to_fp8(beyond).equal(torch.full((6,), 448.0))
    assert round_to_fp8(-beyond).equal(torch.full((6,), -448.0))


def test_fp8_rounds_numbers_halfway_to_the_even_code() -> None:
    halfway = torch.tensor([17.0, 19.0, -17.0, 2.0**-10])
    assert round_to_fp8(halfway).tolist() == [16.0, 20.0, -16.0, 0.0]


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_int8_per_head_rounds_to_multiples_of_one_scale(dim: int) -> None:
    """The largest magnitude over 127, of vLLM's `int8_per_token_head`; halves away from zero."""
    generator = torch.Generator().manual_seed(dim)
    codes = torch.randint(-127, 128, (3, 5, dim), generator=generator).float()
    codes[..., 0] = -127
    on_the_grid = codes * 0.25
    assert round_to_int8_per_head(on_the_grid).equal(on_the_grid)

    halfway = on_the_grid.clone()
    halfway[..., 1], halfway[..., 2] = 0.625, -0.625
    rounded = round_to_int8_per_head(halfway)
    assert rounded[..., 1].eq(0.75).all()
    assert rounded[..., 2].eq(-0.75).all()

    drawn = torch.randn(3, 5, dim, generator=generator)
    away = (round_to_int8_per_head(drawn) - drawn).abs().amax(-1)
    scale = drawn.abs().amax(-1) / 127
    assert (away <= 0.501 * scale).all()
    assert (away > 0.3 * scale).all()
    assert round_to_int8_per_head(torch.zeros(2, dim)).equal(torch.zeros(2, dim))


def hadamard(size: int) -> Tensor:
    """By its definition: the sign of an entry is the parity of the common bits of its indices."""
    indices = range(size)
    return torch.tensor(
        [[(-1.0) ** (row & column).bit_count() for column in indices] for row in indices]
    )


@pytest.mark.parametrize(("dim", "run"), [(64, 64), (80, 16), (128, 128)])
def test_int4_per_head_rounds_rotated_numbers_to_16_steps(dim: int, run: int) -> None:
    """A Hadamard matrix in each run of numbers, after signs that are recovered from what the
    rounding leaves as it is.
    """
    rotation = cache_formats._rotation(dim)
    signs = rotation[:run, 0].sign()
    expected = signs[:, None] * hadamard(run) / math.sqrt(run)
    assert rotation.allclose(torch.block_diag(*[expected] * (dim // run)))
    assert set(signs.tolist()) == {-1.0, 1.0}

    generator = torch.Generator().manual_seed(dim)
    codes = torch.randint(0, 16, (3, 5, dim), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    on_the_grid = (codes - 6) * 0.25 @ rotation.T
    assert round_to_int4_per_head(on_the_grid).allclose(on_the_grid, atol=1e-5)

    drawn = torch.randn(3, 5, dim, generator=generator)
    rotated = drawn @ rotation
    step = (rotated.amax(-1) - rotated.amin(-1)) / 15
    away = ((round_to_int4_per_head(drawn) - drawn) @ rotation).abs().amax(-1)
    # The code of 0 is a whole number, so the numbers at the edges can move by another half.
    assert (away <= 1.001 * step).all()
    assert (away > 0.3 * step).all()
    assert round_to_int4_per_head(torch.zeros(2, dim)).equal(torch.zeros(2, dim))


def test_int4_per_head_spreads_one_large_number() -> None:
    """For which plain rounding has steps that are too large for the others."""
    heads = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    heads[:, 7] = 50
    others = torch.arange(64) != 7

    def lost(rounded: Tensor) -> float:
        return float((rounded - heads)[:, others].square().mean())

    assert lost(round_to_int4_per_head(heads)) < 0.5 * lost(round_in_groups(heads, 4))


@pytest.mark.parametrize(("bits", "size"), [(8, 132), (4, 68)])
def test_a_scaled_head_has_the_bytes_of_vllm(bits: int, size: int) -> None:
    cache_format = CACHE_FORMATS[f"int{bits}_per_token_head"]
    assert cache_format.bytes_per_head(128) == size


def round_to_3_bits(heads: Tensor) -> Tensor:
    return round_in_groups(heads, 3)


class RoundedCache(DynamicCache):
    """transformers' cache, whose keys and values are rounded."""

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rounded = rounded

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(self.rounded(keys), self.rounded(values), *args, **kwargs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gqa_gpt2", "by layer"])
@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (3, round_to_3_bits),
        ("fp8", nearest_e4m3),
        ("int8_per_token_head", round_to_int8_per_head),
        ("int4_per_token_head", round_to_int4_per_head),
    ],
)
def test_attention_reads_what_a_cache_of_these_bits_gives_back(
    name: str, bits: CacheFormatName, rounded: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """As transformers computes it with such a cache, token for token; a whole cache, as a control,
    does not.
    """
    path = write_checkpoint(
        build(TINY["llama" if name == "by layer" else name], QUERY_HEADS), tmp_path / "model"
    )
    if name == "by layer":
        path = convert_checkpoint(path, (1, 4), tmp_path / "out", method="mean").out
    model = load_model(str(path), dtype="float32")
    with torch.no_grad():
        plain, cache = model(input_ids=IDS).logits, {cache_name(model): RoundedCache(rounded)}
        expected = torch.cat(
            [model(input_ids=ids, **cache).logits for ids in IDS.split(1, dim=1)], 1
        )
        quantize_cache(model, CACHE_FORMATS[bits], 2, "m")
        logits = model(input_ids=IDS, use_cache=False).logits
    # A product's rounding may move it by a step, which 8 bits feel most
    assert (logits - expected).abs().max() < 2e-3 * expected.abs().max()
    assert (logits - expected).abs().mean() < 0.05 * (plain - expected).abs().mean()


def test_a_class_with_attention_code_of_its_own() -> None:
    model = build(TINY["falcon"], QUERY_HEADS)
    with pytest.raises(RefusedError, match=r"only if all layers call .* 0 of 2 layers of m do"):
        quantize_cache(model, CACHE_FORMATS[4], 2, "m")


def test_every_checkpoint_is_measured_with_it() -> None:
    base, merged, *others = results("SRC G2 --data TEXT --tokens 500 --kl --simulate-cache 8,2")[
        "models"
    ]
    assert [one["name"] for one in others] == [
        "stdlib-mha (int8)",
        "gqa2 (int8)",
        "stdlib-mha (int2)",
        "gqa2 (int2)",
    ]
    eight, two = others[0], others[2]
    assert eight["against_baseline"]["kl"]["mean"] < 1e-3 < two["against_baseline"]["kl"]["mean"]
    whole, *fewer = (one["kv_cache"]["bytes_per_token"] for one in (base, eight, two))
    assert fewer == [whole * (32 + 4) / 64, whole * (8 + 4) / 64], (
        "codes of 32 dimensions, their scale and least"
    )
    assert others[1]["quality"]["nats_per_token"] == pytest.approx(
        merged["quality"]["nats_per_token"], abs=1e-2
    )


def test_an_fp8_cache_beside_others() -> None:
    """Half of the bytes of 16 bits, without scales; the record has the name that was typed."""
    record = results("SRC --data TEXT --tokens 500 --kl --simulate-cache fp8,8")
    base, fp8, eight = record["models"]
    assert record["options"]["simulate_cache"] == ["fp8", 8]
    assert [model["name"] for model in (fp8, eight)] == ["stdlib-mha (fp8)", "stdlib-mha (int8)"]
    assert [model["kv_cache"]["bits"] for model in (base, fp8, eight)] == [16, "fp8", 8]
    assert fp8["kv_cache"]["bytes_per_token"] == base["kv_cache"]["bytes_per_token"] / 2

    # Three bits of a mantissa are coarser than 255 steps.
    fp8_loss = fp8["against_baseline"]["kl"]["mean"]
    assert eight["against_baseline"]["kl"]["mean"] < fp8_loss < 0.01


def test_the_memory_table_has_a_row_for_an_fp8_cache() -> None:
    _, _, table = evaluate_models("SRC --memory 1GB --simulate-cache fp8").out.partition("Memory\n")
    rows = [line for line in table.splitlines() if line.startswith("stdlib-mha")]
    assert ["(fp8)" in row for row in rows] == [False, True]
    assert "3.0 KiB" in rows[1]  # instead of 6


Calls = list[tuple[Tensor, int]]


@pytest.fixture(scope="module")
def pair() -> dict[str, PreTrainedModel]:
    """stdlib-mha and its conversion to 2 heads, in float32."""
    return {"mha": load(SOURCE), "gqa2": load(model_directory() / "gqa2")}


@contextmanager
def calls_of(*models: PreTrainedModel) -> Iterator[Calls]:
    """Inputs of the models, with the number of tokens in the cache before."""
    calls: Calls = []

    def note(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(cache_name(module))
        calls.append((kwargs["input_ids"], cache.get_seq_length() if cache is not None else 0))

    handles = [model.register_forward_pre_hook(note, with_kwargs=True) for model in models]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["mha", "gqa2", "mistral"])
def test_tokens_are_those_of_generate(pair: dict[str, PreTrainedModel], name: str) -> None:
    """Also with a sliding window (mistral) shorter than the context."""
    model = pair[name] if name in pair else build(TINY[name], 2, attention="sdpa")
    ids = torch.randint(
        10, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1)
    )
    model.generation_config.eos_token_id = None
    expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[
        :, 12:
    ]
    with calls_of(model) as calls:
        tokens, timing = greedy_decode(model, ids, steps=8)
    assert torch.equal(tokens, expected)
    assert [(tuple(ids.shape), length) for ids, length in calls[:3]] == [
        ((2, 12), 0),
        ((2, 1), 12),
        ((2, 1), 13),
    ]
    assert torch.equal(torch.cat([ids for ids, _ in calls[1:]], dim=1), expected[:, :-1])
    assert not torch.equal(greedy_decode(model, ids.flip(1), steps=8)[0], expected)
    assert min(timing.prefill_seconds, timing.step_seconds) > 0


def test_a_model_that_returns_no_cache() -> None:
    with pytest.raises(RefusedError, match="--decode needs a model that returns a KV cache, but "):
        greedy_decode(build(TINY["recurrent_gemma"], 2), torch.full((1, 8), 7), steps=2)


def test_points_of_two_models(
    pair: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock on which the n-th interval takes n seconds; a run takes three readings of it."""
    clock = (n * (n + 1) / 2 for n in count())
    # A clock that is the same on every machine
    monkeypatch.setattr(decode, "clock", lambda device: next(clock))
    monkeypatch.setattr(decode, "REPEATS", 3)
    subjects: Any = [
        Mock(load=Mock(return_value=model), vocabulary=4096) for model in pair.values()
    ]
    options = EvaluateOptions(("mha", "gqa2"), decode_batches=(1, 4), decode_steps=2, quiet=True)
    records: list[dict[str, Any]] = [{}, {}]
    time_decoding(subjects, records, options, [8, 30])
    points, cells = (
        [record["decode"]["points"] for record in records],
        [(1, 8), (1, 30), (4, 8), (4, 30)],
    )
    for model_points, turns in zip(points, ((0, 2, 4), (1, 3, 5)), strict=True):
        assert [(p["batch"], p["context"]) for p in model_points] == cells
        for p in model_points:
            assert p["tokens_per_second"] == p["batch"] / p["seconds_per_token"]
            assert p["attention"] == "sdpa"
            assert p["dtype"] == "float32"
        # The warm-up of two models takes the first six readings: the prefill of run r of all ends
        # at 6 + 3 r + 1.
        first, prefills = model_points[0], [7 + 3 * turn for turn in turns]
        assert first["prefill_seconds"] == prefills[1]
        seconds = [first[key] for key in ("fastest", "seconds_per_token", "slowest")]
        assert seconds == [(prefill + 1) / 2 for prefill in prefills]


# ------------------------------------------------------------------------------- too little memory


@pytest.mark.parametrize(
    ("precision", "advice"),
    [
        ("float32", "lower --context, or pass --precision bfloat16 or another --device"),
        ("bfloat16", "lower --context, or pass another --device"),
        ("float16", "lower --context, or pass another --device"),
    ],
)
def test_a_smaller_precision_is_advised_only_where_there_is_one(
    precision: str, advice: str
) -> None:
    method = METHODS["calibrated"]
    assert isinstance(method, MapsMethod)
    assert method.out_of_memory_message(MapsOptions(precision=precision)).endswith(advice)
