"""What `gqa-eval` cannot do is one line, with nothing written."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from checkpoints import edit_json, run
from embedded import copy_source
from evaluations import evaluate_models, model_directory, refused, words
from safetensors.torch import load_file, save_file

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model
from gqa.eval import decode, evaluate
from gqa.eval.subjects import Subject

LOAD = Subject.load


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("SRC G2", "nothing to measure: give text with --data, or --recall, --decode or --memory"),
        ("SRC G2 --kl --memory 1GB", "--kl means nothing without --data"),
        ("SRC G2 --data TEXT --decode-steps 3", "--decode-steps means nothing without --decode"),
        ("SRC --data TEXT --kl", "--kl compares checkpoints: give at least two"),
        ("SRC --data PLACE/short.txt", "the text has 4 tokens, less than one window of 512"),
        ("SRC --data TEXT --field nothere", "has no field 'nothere'; it has 'other', 'text'"),
        ("SRC --data PLACE/nothere.txt", "there is no file or directory"),
        ("SRC --data TEXT --revision main", "--revision is for hub ids"),
        ("SRC --decode --context 64", "--context means nothing without --data or --recall or --memory: give one"),
        ("SRC --memory 1GB --device cpu", "--device means nothing without --data or --recall or --decode"),
        ("SRC --decode --decode-contexts 500", "500 tokens and 32 steps are more than the 512 positions of stdlib-mha"),
        ("SRC --data TEXT --device nonsense", "--device nonsense cannot be used"),
        ("SRC --data TEXT --device cuda:99", "--device cuda:99 cannot be used: "),  # nowhere, whatever GPUs there are
        ("T5 --data TEXT", "t5gemma is an encoder-decoder: name the text to predict with --target-field"),
        ("SRC --data TEXT --target-field other", "--target-field is for encoder-decoders, stdlib-mha is not one"),
        ("T5 --data TEXT --target-field text", "are the same text; name two columns"),
        ("T5 --data PLACE/text.txt --target-field other", "text.txt is plain text and has no field 'other'"),
        ("T5 --recall", "--recall is for decoders, and t5gemma is an encoder-decoder"),
        ("T5 --data TEXT --target-field none", "has no field 'none'; it has 'other', 'text'"),
        ("T5 --data TEXT --target-field other --cache-bits 4", "--cache-bits is for decoders with key/value heads"),
        ("SRC --data TEXT --cache-bits 4 --decode", "--cache-bits is about quality and bytes"),
        ("SRC --data TEXT --cache-bits 1", "'1' is not a whole number from 2 to 8"),
        ("SRC --data TEXT --context 600", "--context 600 is more than the 512 positions"),
        ("T5 SRC --data TEXT --target-field other", "different kinds of models (one is an encoder-decoder)"),
    ],
)
def test_refusals(line: str, message: str) -> None:
    (model_directory() / "short.txt").write_text("import os\n")
    assert message in refused(line)


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_models_that_predict_no_tokens(tmp_path: Path, name: str) -> None:
    """A base class, a classifier: also where it is only compared with. What needs no prediction is measured."""
    path = copy_source(tmp_path, "headless")
    edit_json(path / "config.json", lambda config: config.update(architectures=[name]))
    for line in (f"{path} --data TEXT", f"SRC {path} --decode", f"SRC {path} --recall"):
        assert f"headless is a {name}, which does not predict the next token" in refused(line)
    assert "KV/token" in evaluate_models(f"{path} --memory 1GB -o {tmp_path / 'report'}").out


Damage = Callable[[Path, dict[str, torch.Tensor]], Any]
KEY, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight"


def fewer_tokens(path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:3000].clone()
    edit_json(path / "config.json", lambda config: config.update(vocab_size=3000))


def exchange_tokens(path: Path, weights: dict[str, torch.Tensor]) -> None:
    def exchange(tokenizer: Any) -> None:
        one, other, vocabulary = "▁import", "▁return", tokenizer["model"]["vocab"]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    edit_json(path / "tokenizer.json", exchange)


DAMAGES: dict[str, Damage] = {
    "missing": lambda path, weights: weights.pop(KEY),
    "unexpected": lambda path, weights: weights.update({"model.layers.1.self_attn.extra.weight": torch.zeros(3)}),
    "mismatched": lambda path, weights: weights.update({KEY: weights[KEY][:128].contiguous()}),
    "nan": lambda path, weights: weights[UP][5].fill_(math.nan),
    "vocabulary": fewer_tokens,
    "tokenizer": lambda path, weights: (path / "tokenizer.json").write_text("{"),
    "other tokenizer": exchange_tokens,
}


def damaged(path: Path, damage: str) -> Path:
    """A copy of a checkpoint with one thing wrong."""
    weights = load_file(path / "model.safetensors")
    DAMAGES[damage](path, weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("damage", "line", "message"),
    [
        ("missing", "SRC BAD --data TEXT", "loads with missing keys: model.layers.1.self_attn.k_proj.weight"),
        ("unexpected", "SRC BAD --data TEXT", "loads with unexpected keys: model.layers.1.self_attn.extra.weight"),
        ("mismatched", "SRC BAD --data TEXT", "mismatched keys: ('model.layers.1.self_attn.k_proj.weight', "),
        ("nan", "SRC BAD --data TEXT", "bad: logits are not finite; look for NaN"),
        ("nan", "SRC BAD --data TEXT --kl", "bad: logits are not finite"),
        ("nan", "BAD SRC --data TEXT --kl", "bad: logits are not finite"),
        ("vocabulary", "SRC BAD --data TEXT", "stdlib-mha and bad have different vocabulary sizes"),
        ("vocabulary", "BAD --data TEXT", "its embedding has 3000; they do not belong together"),
        ("tokenizer", "SRC BAD --data TEXT", "transformers cannot load the tokenizer of bad"),
        ("other tokenizer", "SRC BAD --data TEXT", "stdlib-mha and bad have different tokenizers"),
    ],
)
def test_bad_checkpoints(tmp_path: Path, damage: str, line: str, message: str) -> None:
    bad = damaged(copy_source(tmp_path, "bad"), damage)
    assert message in refused(line.replace("BAD", str(bad)), "-o", tmp_path / "report", "--context", 64)
    assert not (tmp_path / "report").exists()


def test_an_adapter_beside_weights(tmp_path: Path) -> None:
    """It may be merged into them already: no function loads such a directory."""
    bad = copy_source(tmp_path, "bad")
    (bad / "adapter_config.json").write_text("{}")
    assert "bad has an adapter beside its weights (adapter_config.json)" in refused(f"SRC {bad} --data TEXT")
    for weights in (True, False):
        with pytest.raises(RefusedError, match="remove the adapter's files if it is merged already"):
            load_model(str(bad), weights=weights)


def test_transformers_prints_nothing_while_it_loads(tmp_path: Path, caplog: Any) -> None:
    """Tables of keys: the error is one line, whatever level of messages is set."""
    logger, level = logging.getLogger("transformers"), transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_info()
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RefusedError, match="loads with missing keys: "):
            load_model(str(damaged(copy_source(tmp_path, "bad"), "missing")))
        assert transformers.utils.logging.get_verbosity() == logging.INFO
    finally:
        logger.removeHandler(caplog.handler)
        transformers.utils.logging.set_verbosity(level)
    assert caplog.records == []


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "score", lambda *args, **more: signal.raise_signal(signal.SIGINT))
    result = run(*words("SRC --data TEXT"), "-o", tmp_path / "report", program="gqa-eval")
    assert (result.code, result.out) == (130, "")
    assert result.err.strip() == "gqa-eval: interrupted; no report was written"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["head, found to split", "head", "decoding"])
@pytest.mark.parametrize(("error", "message"), [
    (torch.OutOfMemoryError("CUDA out of memory.\nlines"), "out of memory: CUDA out of memory. lines; use smaller"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory: DefaultCPUAllocator"),
    (RuntimeError("a kernel failed"), "unexpected RuntimeError: a kernel failed"),
])  # fmt: skip
def test_what_fails_is_not_taken_for_another_kind_of_head(
    where: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever memory ends or a kernel fails; in decoding before anything else is measured."""
    runs = list[int]()

    def load(*args: Any) -> Any:
        model = LOAD(*args)
        model.base_model.register_forward_hook(count)
        return model

    def count(*args: Any) -> None:
        runs.append(1)
        if len(runs) == {"head, found to split": 2, "head": 4}.get(where):
            raise error

    monkeypatch.setattr(Subject, "load", load)
    line = "SRC --data TEXT --context 64 --batch-size 3"
    if where == "decoding":
        monkeypatch.setattr(decode, "measure_decode", Mock(side_effect=error))
        monkeypatch.setattr(evaluate, "score", Mock(side_effect=AssertionError))
        line += " --decode"
    result = run(*words(line), program="gqa-eval")
    assert (result.code, result.out, message in result.err) == (1, "", True), result
