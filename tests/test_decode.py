"""What is timed is greedy decoding with the cache. No time is judged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import SOURCE, load, texts, tokenizer
from evaluations import model_directory
from tiny_models import TINY, build
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import cache_name
from gqa.convert import convert_checkpoint
from gqa.eval import decode
from gqa.eval.decode import greedy_decode, measure_decode

Calls = dict[str, list[tuple[Tensor, int]]]


@pytest.fixture(scope="module")
def pair() -> dict[str, PreTrainedModel]:
    """stdlib-mha and its conversion to 2 heads, in float32."""
    return {"mha": load(SOURCE), "gqa2": load(model_directory() / "gqa2")}


@pytest.fixture
def calls(pair: dict[str, PreTrainedModel]) -> Iterator[Calls]:
    """Inputs of each model, with the number of tokens in the cache before."""
    inputs: Calls = {name: [] for name in pair}

    def note(name: str, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get(cache_name(module))
        inputs[name].append((kwargs["input_ids"], cache.get_seq_length() if cache is not None else 0))

    handles = [m.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, m in pair.items()]
    yield inputs
    for handle in handles:
        handle.remove()


def test_a_clock_waits_for_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", devices.append)
    for name in ("cpu", "cuda", "mps", "xpu"):
        decode.clock(torch.device(name))
    assert [device.type for device in devices] == ["cuda", "mps", "xpu"]


def test_a_converted_model_drafts_for_its_original(pair: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    """The greedy text is the original's, in fewer of its passes (docs/engines.md); the draft's own is another."""
    base = pair["mha"]
    prompt = tokenizer()(texts(1)[0][:400], return_tensors="pt")
    greedy: Any = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24}
    expected = base.generate(**prompt, **greedy)
    by_layer = convert_checkpoint(SOURCE, (8, 4, 4, 2, 4, 4), tmp_path / "out", method="mean").out
    passes: list[Any] = []
    handle = base.register_forward_hook(lambda *args: passes.append(args))
    drafts = [pair["gqa2"], AutoModelForCausalLM.from_pretrained(by_layer, trust_remote_code=True, dtype="float32")]
    for draft in drafts:
        passes.clear()
        draft.generation_config.num_assistant_tokens = 4
        assert base.generate(**prompt, assistant_model=draft, **greedy).equal(expected)
        assert len(passes) < 24
        assert not draft.generate(**prompt, **greedy).equal(expected)
    handle.remove()


@pytest.mark.parametrize("name", ["mha", "gqa2", "mistral"])
def test_tokens_are_those_of_generate(pair: dict[str, PreTrainedModel], name: str) -> None:
    """Also with a sliding window (mistral) shorter than the context."""
    model = pair[name] if name in pair else build(TINY[name], 2, attention="sdpa")
    ids = torch.randint(10, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id = None
    expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[:, 12:]
    run = greedy_decode(model, ids, steps=8)
    assert torch.equal(run.tokens, expected)
    assert not torch.equal(greedy_decode(model, ids.flip(1), steps=8).tokens, expected)
    assert min(run.prefill_seconds, run.seconds_per_token) > 0


def test_each_step_reads_one_token_and_the_cache(pair: dict[str, PreTrainedModel], calls: Calls) -> None:
    run = greedy_decode(pair["gqa2"], torch.full((3, 20), 7), steps=4)
    shapes = [(tuple(ids.shape), cached) for ids, cached in calls["gqa2"]]
    assert shapes == [((3, 20), 0), ((3, 1), 20), ((3, 1), 21), ((3, 1), 22), ((3, 1), 23)]
    assert torch.equal(torch.cat([ids for ids, _ in calls["gqa2"][1:]], dim=1), run.tokens[:, :-1])


def test_a_model_that_returns_no_cache() -> None:
    with pytest.raises(RefusedError, match="--decode is for models that return a key/value cache, and "):
        greedy_decode(build(TINY["recurrent_gemma"], 2), torch.full((1, 8), 7), steps=2)


def test_points_of_two_models(pair: dict[str, PreTrainedModel], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which the n-th interval takes n seconds; a run takes three readings of it. All read one prompt."""
    clock = (n * (n + 1) / 2 for n in count())
    monkeypatch.setattr(decode, "clock", lambda device: next(clock))
    ticks: list[int] = []
    monkeypatch.setattr(decode, "REPEATS", 3)
    points = measure_decode([*pair.values()], [1, 4], [8, 30], steps=2, progress=ticks.append)
    cells = [(1, 8), (1, 30), (4, 8), (4, 30)]
    assert ticks == [1] * len(cells) * 3 * 2
    for model_points, turns in zip(points, ((0, 2, 4), (1, 3, 5)), strict=True):
        assert [(p["batch"], p["context"]) for p in model_points] == cells
        for p in model_points:
            assert p["tokens_per_second"] == p["batch"] / p["seconds_per_token"]
            assert (p["attention"], p["dtype"], p["turns"]) == ("sdpa", "float32", turns)
        # The warm-up of two models takes the first six readings: the prefill of run r of all ends at 6 + 3 r + 1.
        first, prefills = model_points[0], [7 + 3 * turn for turn in turns]
        assert first["prefill_seconds"] == prefills[1]
        seconds = [first[key] for key in ("fastest", "seconds_per_token", "slowest")]
        assert seconds == [(prefill + 1) / 2 for prefill in prefills]
    prompts = [ids for inputs in calls.values() for ids, _ in inputs if ids.shape == (4, 30)]
    assert len(prompts) == 2 * (1 + 3)  # a warm-up and three repeats of each
    assert all(torch.equal(ids, prompts[0]) for ids in prompts)
    assert len(prompts[0].unique()) > 5
