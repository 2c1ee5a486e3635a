"""The oracles on a real trained GPT-2, whose class has no number of KV heads: MGM's general model, 8 layers, 8 heads.

It is trained on communities of microbes, so text is what it samples itself. Weights come as in `test_real.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from published import load, nats, published
from real_model import MGM
from scrambled import relative
from test_native_targets import logits
from tiny_native import tie_heads
from torch import Tensor
from transformers import AutoModelForCausalLM

from gqa.convert import convert_checkpoint
from gqa.convert.merge.options import CalibrationText, MapsOptions
from gqa.convert.merge.sampling import samples

pytestmark = pytest.mark.real

HEADS, SEQUENCES, LENGTH = 8, 64, 128


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """The checkpoint; no test may change a byte of it."""
    with published(MGM) as directory:
        yield directory


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """By G and method, each converted once; calibration is on text of its own."""
    text = CalibrationText(tokens=16_384, length=LENGTH, seed=1)

    @cache
    def make(groups: int, method: str = "mean") -> Path:
        out = tmp_path_factory.mktemp("gpt2") / f"{method}{groups}"
        return convert_checkpoint(source, groups, out, method=method, calibration=MapsOptions(text)).out

    return make


@pytest.fixture(scope="module")
def text(source: Path) -> Tensor:
    """(SEQUENCES, LENGTH) ids that the source samples at temperature 1."""
    return samples(load(source), LENGTH, seed=0, batch=SEQUENCES)


def test_identity(source: Path, converted: Callable[..., Path], text: Tensor) -> None:
    """With its own heads the other class gives the very same logits."""
    same = load(converted(HEADS))
    assert same.config.model_type == "gpt_bigcode"
    assert relative(logits(same, {"input_ids": text[:4]}), logits(load(source), {"input_ids": text[:4]})) < 1e-6


@pytest.mark.parametrize(("groups", "model_type"), [(4, "gqa_gpt2"), (2, "gqa_gpt2"), (1, "gpt_bigcode")])
def test_expand_back(groups: int, model_type: str, source: Path, converted: Callable[..., Path], text: Tensor) -> None:
    """Merged heads, repeated in GPT-2's own class, are the converted model; source, `first` and tiles are not."""
    given = {"input_ids": text[:4]}
    model = load(converted(groups))
    assert model.config.model_type == model_type
    found = logits(model, given)
    tied, tiled = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval() for _ in range(2))
    tie_heads(tied, groups)
    assert relative(found, logits(tied, given)) < 1e-5
    assert relative(found, logits(load(source), given)) > 1e-2
    assert relative(logits(load(converted(groups, "first")), given), logits(tied, given)) > 1e-2
    if groups > 1:
        tie_heads(tiled, groups, tiled=True)
        assert relative(found, logits(tiled, given)) > 1e-2


@pytest.mark.parametrize(("groups", "expected"), [(4, 4.20), (2, 5.38), (1, 6.30)])
def test_what_merging_costs(
    groups: int, expected: float, source: Path, converted: Callable[..., Path], text: Tensor
) -> None:
    """Nats as docs/results.md has them: mean pooling loses much, `calibrated` little of it."""
    ways = (source, *(converted(groups, method) for method in ("mean", "aligned", "calibrated")))
    before, mean, aligned, calibrated = (nats(load(path), text) for path in ways)
    assert before == pytest.approx(2.82, abs=0.2)
    assert mean == pytest.approx(expected, abs=0.4)
    assert aligned < mean
    assert calibrated < before + 0.3 * (mean - before)
