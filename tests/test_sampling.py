"""What a model writes is drawn from its own distribution, whatever makes it quick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from embedded import SOURCE, copy_source, load
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa.checkpoint.errors import RefusedError
from gqa.convert.align import sampling
from gqa.convert.align.sampling import Draw, attend_one, samples


def test_samples_are_the_models_own(tmp_path: Path) -> None:
    """The same for a seed; what generation_config.json asks for (top-p, penalties, an end) is not done."""
    plain = next(samples(load(SOURCE), 16, seed=1, batch=6))
    assert plain.shape == (6, 16)
    assert (plain[:, 0] == 1).all(), "BOS"
    habits = copy_source(tmp_path)
    (habits / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_p": 0.1, "top_k": 2, "temperature": 0.3, "repetition_penalty": 1.5,
                    "max_length": 5, "eos_token_id": [2, 3]})
    )  # fmt: skip
    same = next(samples(load(habits), 16, seed=1, batch=6))
    assert torch.equal(plain, same)
    other = next(samples(load(SOURCE), 16, seed=2, batch=6))
    assert not torch.equal(plain, other)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_samples_are_as_surprising_as_the_model_expects(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of -log p(token) - entropy is zero; of another temperature's samples it is not."""

    class Other(Draw):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores / temperature)

    monkeypatch.setattr(sampling, "Draw", Other)
    model = load(SOURCE)
    ids = next(samples(model, 65, seed=3, batch=64))
    with torch.no_grad():
        log = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
    surprise = -log.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log.exp() * log).sum(-1)
    spread = float((log.exp() * (log + entropy[..., None]).square()).sum(-1).mean()) ** 0.5
    deviations = float((surprise - entropy).mean()) / spread * surprise.numel() ** 0.5
    assert (abs(deviations) < 3) is (temperature == 1), deviations


def test_tokens_are_drawn_by_their_probability() -> None:
    shares = torch.tensor([0.0, 0.5, 1e-3, 0.0, 0.3, 0.199, 0.0])
    draw, rows = Draw(torch.Generator().manual_seed(0)), 200_000
    scores = draw(torch.zeros(rows, 1), (shares * 17).log().expand(rows, -1))
    assert ((scores == 0).sum(-1) == 1).all()
    assert torch.isneginf(scores[scores != 0]).all()
    counts = (scores == 0).sum(0)
    assert not counts[shares == 0].any()
    off = (counts - rows * shares)[shares > 0] / (rows * shares * (1 - shares))[shares > 0].sqrt()
    assert off.abs().max() < 4


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("mask", ["none", "allowed", "added", "heads"])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_query_attends_as_in_torch(groups: int, mask: str, scaling: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 1, 8), torch.randn(3, groups, 5, 8), torch.randn(3, groups, 5, 4)
    given = {
        "none": None,
        "allowed": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()[:, None, None],
        "added": torch.randn(3, 1, 1, 5),
        "heads": torch.randn(3, 6, 1, 5),
    }[mask]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(6 // groups, 1), v.repeat_interleave(6 // groups, 1), given, scale=scaling
    )
    torch.testing.assert_close(attend_one(q, k, v, given, scaling), expected.transpose(1, 2))


def known() -> list[dict[str, object]]:
    """All that transformers' registries say, and where they say it."""
    interfaces = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return [dict(table) for each in interfaces for table in (each._global_mapping, each._local_mapping)]


def test_transformers_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """After samples and after what fails; meanwhile other models attend as they did."""
    before, other, single = known(), load(SOURCE), []
    prompt, expected = torch.tensor([[5]]), load(SOURCE)(input_ids=torch.tensor([[5]])).logits
    monkeypatch.setattr(sampling, "attend_one", lambda *given: single.append(0) or attend_one(*given))

    class Beside(Draw):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert known() != before
            steps = len(single)
            assert torch.equal(other(input_ids=prompt).logits, expected)
            assert len(single) == steps
            return super().__call__(input_ids, scores)

    monkeypatch.setattr(sampling, "Draw", Beside)
    next(samples(load(SOURCE), 4, seed=0, batch=1))
    assert single
    assert known() == before
    failing = load(SOURCE)
    failing.forward = None  # nothing can be called
    with pytest.raises(RefusedError, match="cannot be sampled from"):
        next(samples(failing, 4, seed=0, batch=1))
    assert known() == before
