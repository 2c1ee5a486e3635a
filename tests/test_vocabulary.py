"""Models of one tokenizer whose embeddings are padded to different numbers of rows: distillation
and evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edit_json, edit_tensors, run
from support.embedded import SOURCE, copy_source
from support.evaluations import few_questions, results
from support.training import tiny_checkpoint, words_for, write_corpus

from gqa.convert.generate.sampling import sample_sequences
from gqa.uptrain.training_model import next_token_loss

pytestmark = pytest.mark.usefixtures("alone")

ROWS, MORE = 4104, 64  # of the tiny models; of padding


def padded(model: Path, rows: int) -> Path:
    """The checkpoint with rows of padding added to its embedding and head; the head would prefer
    them to any token.
    """

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "embed_tokens" in name or "lm_head" in name:
                more = tensor[:rows].float() * 0 + 3 * tensor.float().abs().max()
                tensors[name] = torch.cat([tensor, more.to(tensor.dtype)])

    edit_tensors(model, pad)
    edit_json(
        model / "config.json", lambda config: config.update(vocab_size=config["vocab_size"] + rows)
    )
    return model


def test_the_divergence_leaves_out_rows_of_padding_on_either_side() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 40, generator=generator) for _ in range(2))
    targets = torch.arange(5)
    padding = torch.full((5, 8), 9.0)
    expected, _ = next_token_loss(student, targets, teacher)
    for ours, theirs in (
        (student, torch.cat([teacher, padding], 1)),
        (torch.cat([student, padding], 1), teacher),
    ):
        divergence, _ = next_token_loss(ours, targets, theirs)
        assert float(divergence) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("wider", ["teacher", "model"])
def test_a_teacher_with_other_padding_teaches(tmp_path: Path, wider: str) -> None:
    """As one without.

    Also on text that it generates, in which ids of padding would exceed the model's embedding.
    """
    model = tiny_checkpoint(tmp_path / "model")
    teacher = tiny_checkpoint(tmp_path / "teacher", kv_heads=4)
    data = write_corpus(tmp_path / "data.jsonl", 8)

    def divergence(name: str, source: Path | str) -> Any:
        words = words_for(
            model, source, tmp_path / name, teacher=teacher, steps=1, validation_tokens=256
        )
        done = run(*words, program="gqa-uptrain")
        assert done.code == 0, done.err
        return json.loads((tmp_path / name / "gqa_uptraining.json").read_text())["losses"][
            "distillation_before"
        ]

    plain = divergence("plain", data)
    padded({"model": model, "teacher": teacher}[wider], MORE)
    assert divergence("padded", data) == pytest.approx(plain, rel=1e-4)
    if wider == "teacher":
        assert divergence("self", "self") > 0


def test_samples_have_no_ids_of_padding(tmp_path: Path) -> None:
    from gqa.models.loading import load_model

    model = load_model(str(padded(tiny_checkpoint(tmp_path / "model"), MORE)))
    for limit, expected in ((None, True), (ROWS, False)):
        ids = sample_sequences(model, 20, seeds=[1], sequences_per_seed=8, id_limit=limit)
        assert bool((ids >= ROWS).any()) is expected


@pytest.mark.parametrize("order", ["BASE WIDE", "WIDE BASE"])
def test_evaluation_compares_models_with_other_padding(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one model but for padding: nothing differs over the tokens that both have."""
    few_questions(monkeypatch)
    wide = padded(copy_source(tmp_path, "wide"), MORE)
    line = order.replace("BASE", str(SOURCE)).replace("WIDE", str(wide))
    record = results(
        f"{line} --data TEXT --tokens 300 --kl --recall --context 128 --precision float32"
    )
    first, second = record["models"]
    compared = second["against_baseline"]
    assert compared["kl"]["mean"] == pytest.approx(0, abs=1e-5)
    assert compared["top1_agreement"] == 1.0
    assert compared["acceptance"] == pytest.approx(1.0, abs=1e-5)
    # Perplexities are over all rows of each model: the padding of this one has probability.
    by_name: dict[str, Any] = {
        model["name"]: model["quality"]["nats_per_token"] for model in (first, second)
    }
    assert by_name["wide"] > by_name[SOURCE.name]
