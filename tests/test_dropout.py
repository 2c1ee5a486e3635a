"""Dropout in training: it is off, so that --micro-batch changes no result,
and the output says so.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load, run
from support.tiny_models import TINY, build, inputs
from support.training import (
    BLOCK,
    difference,
    pair_material,
    tiny_checkpoint,
    training_model,
    words_for,
    write_corpus,
)
from torch import nn

from gqa.uptrain.dropout import turn_off_dropout

pytestmark = pytest.mark.usefixtures("alone")

# Families, each with the names that its config has for rates of dropout.
RATES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},
    "gqa_gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
    "falcon": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "phi": {"attention_dropout": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
    "starcoder2": {"attention_dropout": 0.3, "embedding_dropout": 0.3, "residual_dropout": 0.3},
    "gqa_opt": {"attention_dropout": 0.3, "dropout": 0.3, "layerdrop": 0.5},
    "mixtral": {"attention_dropout": 0.3, "router_jitter_noise": 0.3},
    "phimoe": {"attention_dropout": 0.3, "router_jitter_noise": 0.01, "input_jitter_noise": 0.3},
    "gqa_t5": {"dropout_rate": 0.3},
    "gqa_bart": {
        "dropout": 0.3,
        "attention_dropout": 0.3,
        "activation_dropout": 0.3,
        "encoder_layerdrop": 0.5,
    },
}


def two_passes(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        first, second = (model(**batch, use_cache=False).logits for _ in range(2))
    return first, second


@pytest.mark.parametrize("name", RATES)
def test_nothing_is_random_in_training_mode(name: str) -> None:
    tiny = TINY[name]
    tiny = replace(tiny, options={**tiny.options, **RATES[name]})
    model, batch = build(tiny, 2).train(), inputs(tiny)
    first, second = two_passes(model, batch)
    assert not first.equal(second), "the control: with these rates passes differ"

    training = training_model(model).train()
    first, second = two_passes(model, batch)
    assert first.equal(second)
    assert training.dropout.keys() == {rate for rate in RATES[name] if "drop" in rate}
    assert model.eval()(**batch, use_cache=False).logits.allclose(first, atol=1e-5)


class Custom(nn.Module):
    """As code of a checkpoint may have it."""

    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.path, self.attn_drop, self.mlp = self.DropPath(), 0.1, nn.Sequential(nn.Dropout(0.4))
        self.config = type("Config", (), {"to_dict": dict})()
        self.config.ffn = {"ffn_pdrop": 0.3}


def test_custom_code_and_nested_dictionaries_lose_their_rates() -> None:
    model = Custom()
    assert turn_off_dropout(model) == {"ffn_pdrop": 0.3, "Dropout": 0.4}
    assert model.path.p == 0
    assert model.attn_drop == 0
    assert model.mlp[0].p == 0
    assert model.config.ffn["ffn_pdrop"] == 0


def uptrain(model: Path, data: Path, out: Path, **options: Any) -> str:
    done = run(*words_for(model, data, out, **options), program="gqa-uptrain")
    assert done.code == 0, done.err
    return done.said + done.err


@pytest.mark.parametrize("teacher", [False, True])
def test_the_micro_batch_changes_no_result_of_a_model_with_dropout(
    tmp_path: Path, teacher: bool
) -> None:
    model = tiny_checkpoint(tmp_path / "model", attention_dropout=0.3)
    base = (
        tiny_checkpoint(tmp_path / "base", kv_heads=4, attention_dropout=0.3) if teacher else "none"
    )
    data = write_corpus(tmp_path / "data.jsonl", 8)
    for micro in (1, 2, 4, 8):
        said = uptrain(
            model,
            data,
            tmp_path / f"{micro}",
            micro_batch=micro,
            steps=3,
            teacher=base,
            context=BLOCK,
            quiet=False,
        )
        assert "dropout     off; the model asks for attention_dropout 0.3" in said
        assert "random numbers" not in said
    moved = difference(model, tmp_path / "8")
    assert moved > 1e-3
    for micro in (1, 2, 4):
        assert difference(tmp_path / f"{micro}", tmp_path / "8") < 1e-2 * moved
    record = json.loads((tmp_path / "8" / "gqa_uptraining.json").read_text())
    assert record["dropout_turned_off"] == {"attention_dropout": 0.3}


def test_the_micro_batch_changes_no_result_of_an_encoder_decoder_with_dropout(
    tmp_path: Path,
) -> None:
    material = pair_material()
    model = tiny_checkpoint(tmp_path / "model", "gqa_t5", pad_token_id=0, dropout_rate=0.3)
    pairs = {
        "text_column": "said",
        "target_column": "meant",
        "teacher": "none",
        "steps": 2,
        "context": 32,
    }
    for micro in (1, 8):
        uptrain(model, material / "pairs.jsonl", tmp_path / f"{micro}", micro_batch=micro, **pairs)
    assert difference(tmp_path / "1", tmp_path / "8") < 1e-2 * difference(model, tmp_path / "8")


def test_the_config_of_the_result_keeps_its_dropout(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", attention_dropout=0.3)
    uptrain(
        model, write_corpus(tmp_path / "data.jsonl", 8), tmp_path / "out", steps=1, teacher="none"
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_dropout"] == 0.3
    assert load(tmp_path / "out").keys() == load(model).keys()


def test_a_model_that_draws_at_random_in_another_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def noisy(module: Any, states: torch.Tensor) -> torch.Tensor:
        return plain(module, states) * (1 + 0.3 * torch.rand(()) * module.training)

    # A model that draws random numbers of its own
    monkeypatch.setattr(LlamaMLP, "forward", noisy)
    model, data = tiny_checkpoint(tmp_path / "model"), write_corpus(tmp_path / "data.jsonl", 8)
    said = uptrain(model, data, tmp_path / "out", steps=1, teacher="none")
    assert "warning: model draws random numbers in training (not for dropout" in said
