"""Entries of config.json that say how a model is run stop nothing, reach no loader of kernels, and
are copied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import contents, edit_json, run
from support.embedded import bring_class
from support.evaluations import few_questions, with_tokenizer
from support.patches import use_data_cache
from support.tiny_models import TINY, build
from support.training import losses, options_for, trained, write_corpus
from transformers import LlamaConfig, LlamaForCausalLM

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.heads.config import transformers_config
from gqa.core.compat import attention_name
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer

KERNEL = "evil/kernel:fn"
FLAGS: dict[str, Any] = {
    "return_dict": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "use_cache": False,
    "attn_implementation": KERNEL,
    "_attn_implementation": "flash_attention_2",
    "experts_implementation": KERNEL,
    "_experts_implementation": KERNEL,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama without any of these entries."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = with_tokenizer(LlamaForCausalLM(config), tmp_path_factory.mktemp("plain") / "m")
    edit_json(
        model / "config.json",
        lambda config: {key: config[key] for key in config.keys() - FLAGS.keys()},
    )
    return model


@pytest.fixture(scope="module")
def flagged(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with all of them."""
    model = tmp_path_factory.mktemp("flagged") / "m"
    model.mkdir()
    for file in plain.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    edit_json(model / "config.json", lambda config: config | FLAGS)
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "d.jsonl")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_data_cache(monkeypatch, tmp_path / "cache")
    few_questions(monkeypatch)


def flags_of(model: Path) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    return {key: config[key] for key in FLAGS if key in config}


@pytest.mark.parametrize("text", ["self", "data"])
def test_conversion_is_the_same_and_copies_them(
    text: str, plain: Path, flagged: Path, data: Path, tmp_path: Path
) -> None:
    for name, model in (("plain", plain), ("flagged", flagged)):
        words = [
            "--kv-heads",
            2,
            "--refine-steps",
            2,
            "--tokens",
            512,
            "--context",
            32,
            "--no-check",
            "-q",
            "-o",
            tmp_path / name,
        ]
        result = run(*words, *(["--data", data] if text == "data" else []), model)
        assert result.code == 0, result.err

    weights = [contents(tmp_path / name)["model.safetensors"] for name in ("plain", "flagged")]
    assert weights[0] == weights[1]
    assert flags_of(tmp_path / "flagged") == FLAGS
    assert flags_of(tmp_path / "plain") == {}


def test_evaluation_is_the_same(plain: Path, flagged: Path, data: Path) -> None:
    losses = []
    for model in (plain, flagged):
        result = run(
            model, "--data", data, "--tokens", 500, "--recall", "--json", "-q", program="gqa-eval"
        )
        assert result.code == 0, result.err
        losses.append(json.loads(result.out)["models"][0]["quality"]["nats"])

    assert losses[0] == losses[1]


def test_training_is_the_same_and_copies_them(
    plain: Path, flagged: Path, data: Path, tmp_path: Path
) -> None:
    for name, model in (("plain", plain), ("flagged", flagged)):
        teacher = shutil.copytree(model, tmp_path / f"teacher-{name}")
        trained(
            options_for(model, tmp_path / name, data=(str(data),), context=32, teacher=str(teacher))
        )

    assert losses(tmp_path / "plain") == losses(tmp_path / "flagged")
    assert flags_of(tmp_path / "flagged") == FLAGS


@pytest.mark.parametrize("flag", FLAGS)
def test_each_alone_changes_nothing_that_is_loaded(flag: str, plain: Path, tmp_path: Path) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", lambda config: config | {flag: FLAGS[flag]})

    model = load_model(str(tmp_path))

    assert attention_name(model) == "sdpa"
    output = model(input_ids=torch.tensor([[1, 5, 6]]))
    assert output.hidden_states is None
    assert output.attentions is None
    assert output.past_key_values is not None
    assert model.name_or_path == str(tmp_path)
    assert len(load_tokenizer(read_checkpoint(tmp_path))) > 100


def test_a_part_of_a_larger_model_may_have_them(tmp_path: Path) -> None:
    build(TINY["llava"], 4).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config["text_config"].update(FLAGS))

    model = load_model(str(tmp_path))

    assert model.config.text_config.return_dict is True
    assert model.config.text_config.output_attentions is False
    assert attention_name(model.model.language_model) == "sdpa"


def test_code_of_a_checkpoint_is_run_without_them(flagged: Path, tmp_path: Path) -> None:
    for file in flagged.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    bring_class(tmp_path)

    model = load_model(str(tmp_path), trust_remote_code=True)

    assert type(model).__name__ == "Ours"
    assert attention_name(model) == "sdpa"
    assert model(input_ids=torch.tensor([[1, 5, 6]])).logits.argmax(-1).tolist() == [[7, 7, 7]]


def test_the_config_object_of_a_conversion_has_none(flagged: Path) -> None:
    config = transformers_config(read_checkpoint(flagged).config)

    assert config.return_dict is True
    assert config.output_attentions is False
    assert attention_name(LlamaForCausalLM(config)) == "sdpa"
