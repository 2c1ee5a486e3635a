"""What is timed is greedy decoding with the cache. No time is judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from embedded import SOURCE, load
from evaluations import model_directory
from tiny_models import TINY, build
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import cache_name
from gqa.eval import decode
from gqa.eval.decode import greedy_decode, time_decoding
from gqa.eval.options import EvaluateOptions

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
    ids = torch.randint(10, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id = None
    expected = model.generate(input_ids=ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[:, 12:]
    with calls_of(model) as calls:
        tokens, *seconds = greedy_decode(model, ids, steps=8)
    assert torch.equal(tokens, expected)
    assert [(tuple(ids.shape), length) for ids, length in calls[:3]] == [((2, 12), 0), ((2, 1), 12), ((2, 1), 13)]
    assert torch.equal(torch.cat([ids for ids, _ in calls[1:]], dim=1), expected[:, :-1])
    assert not torch.equal(greedy_decode(model, ids.flip(1), steps=8)[0], expected)
    assert min(seconds) > 0


def test_a_model_that_returns_no_cache() -> None:
    with pytest.raises(RefusedError, match="--decode is for models that return a key/value cache, and "):
        greedy_decode(build(TINY["recurrent_gemma"], 2), torch.full((1, 8), 7), steps=2)


def test_points_of_two_models(pair: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which the n-th interval takes n seconds; a run takes three readings of it. All read one prompt."""
    clock = (n * (n + 1) / 2 for n in count())
    monkeypatch.setattr(decode, "clock", lambda device: next(clock))
    monkeypatch.setattr(decode, "REPEATS", 3)
    subjects: Any = [Mock(load=Mock(return_value=model), vocabulary=4096) for model in pair.values()]
    options = EvaluateOptions(("mha", "gqa2"), decode_batches=(1, 4), decode_steps=2, quiet=True)
    records: list[dict[str, Any]] = [{}, {}]
    with calls_of(*pair.values()) as calls:
        time_decoding(subjects, records, options, [8, 30])
    points, cells = [record["decode"]["points"] for record in records], [(1, 8), (1, 30), (4, 8), (4, 30)]
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
    prompts = [ids for ids, _ in calls if ids.shape == (4, 30)]
    assert len(prompts) == 2 * (1 + 3)  # a warm-up and three repeats of each
    assert all(torch.equal(ids, prompts[0]) for ids in prompts)
    assert len(prompts[0].unique()) > 5
