"""Models written for another class: what is refused, what the result says, tokenizers, and heads that are aligned."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, refusal, run
from evaluations import cache_bytes
from safetensors.torch import load_file, save_file
from scrambled import on_ids
from test_families import all_tensors, error, write_checkpoint
from tiny_models import build, config
from tiny_native import CASES
from torch import Tensor
from transformers import GPT2ForSequenceClassification

from gqa.checkpoint.hub import open_model
from gqa.convert import convert_checkpoint
from gqa.convert.heads.families.table import FAMILIES, REFUSED
from gqa.convert.recast import targets
from gqa.convert.recast.native import NATIVE
from gqa.convert.recast.targets import RECASTINGS, checkpoint_cache

# ------------------------------------------------------------------------------------------------------- refused


def source(place: Path, name: str, change: Callable[[dict[str, Tensor]], object] | None = None, **config: Any) -> Path:
    """A source whose config.json or tensors were changed."""
    directory = place / "source"
    model = build(CASES[name].tiny, 4)
    if change is None:
        write_checkpoint(model, directory)
    else:
        model.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", lambda raw: raw.update(config))
    return directory


# Groups, or options or tensors of a source (then with one head), that no target expresses.
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gpt2", 2, r"--groups 2 is not possible for the 4 heads of source \(as gpt_bigcode\); choose 1 or 4"),
        ("gpt_neox", 3, r"for the 4 heads of source \(as phi\); choose 1, 2 or 4"),
        ("gpt_neox+rotary", 8, r"\(as starcoder2\); choose 1, 2 or 4"),
        ("gpt_neox", {"use_parallel_residual": False}, r"sequential layers with 0\.25 of each head rotated"),
        ("codegen+eight", 3, r"for the 8 heads of source \(as phi\); choose 1, 2, 4 or 8"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: GPTBigCode has no cross-attention"),
        ("gpt2", {"activation_function": "gelu_mine"}, "cannot build GPTBigCodeForCausalLM .*gelu_mine"),
        ("gpt_neox", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "0 rotated dimensions"),
        ("gpt_neox", {"rope_parameters": {"a": {"b": 1}}}, "phi reads its rope_parameters {'a': {'b': 1}, .* as "),
        ("gpt_neox", {"num_attention_heads": 0}, "cannot read config.json as gpt_neox|makes no sense"),
        ("gptj", {"rotary_dim": None}, "cannot read config.json as gptj"),
        ("gptj", {"rotary_dim": 3}, "rotary_dim 3, where an even number up to the 8 of a head is allowed"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim 10"),
        ("gptj", {"n_head": 0}, "makes no sense"),
        ("gptj", {"n_layer": 0}, "has no layers"),
        ("codegen", {"n_head": 2, "rotary_dim": 4}, "2 heads, where CodeGen's class needs a multiple of 4"),
        ("gpt2", {"n_layer": 3}, r"has no h\.2\.attn\.c_attn\.weight; give a checkpoint of the whole model"),
        ("gpt2", {"n_layer": 1}, r"h\.1\.attn.* are not known of a language model of type gpt2"),
        ("gpt2", {"n_embd": 64}, "cannot become transformer.h.0.attn.c_attn.bias: has 96 rows where"),
        ("gpt_neox", lambda t: t.pop("embed_out.weight"), "has no embed_out.weight or lm_head.weight"),
        ("gpt2", lambda t: t.update({"score.weight": torch.zeros(2, 32)}), "score.weight is not known of a language"),
        ("gptj", lambda t: t.update({"wte.weight": torch.zeros(96, 32)}), "with and without 'transformer.' before"),
        ("gpt2", lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.zeros(32, 128, dtype=torch.int8)}),
         "is stored as I8: quantised or packed weights cannot be laid out anew"),
        ("gpt_neox", lambda t: t.update({"gpt_neox.layers.0.input_layernorm.weight": torch.zeros(7)}),
         "input_layernorm.weight .7. cannot become model.layers.0.self_attn.q_proj.weight; is it of another model"),
        ("codegen", lambda t: t.update({"transformer.h.1.attn.qkv_proj.weight": torch.zeros(95, 32)}),
         "cannot become model.layers.1.self_attn.q_proj.weight"),
    ],
)  # fmt: skip
def test_what_no_target_expresses(
    name: str, change: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RECASTINGS", NATIVE)  # GPT-2 would get custom modelling code
    groups, options = change if isinstance(change, int) else 1, change if isinstance(change, dict) else {}
    directory = source(tmp_path, name, change if callable(change) else None, **options)
    said = refusal(directory, "--groups", groups, "--method", "mean")
    assert re.search(says, said), said


def test_what_overflows_is_refused(tmp_path: Path) -> None:
    """Weight times gain beyond float16: no half-written output, and nothing that only looks right."""

    def large(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.half()
        tensors["gpt_neox.layers.0.post_attention_layernorm.weight"] *= 30000
        tensors["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"] *= 30000

    directory = source(tmp_path, "gpt_neox", large)
    result = run("--groups", 4, directory)
    assert result.code == 1
    assert "fc1.weight has numbers too large for F16; give another --dtype" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert run("--groups", 4, "--dtype", "float32", directory).code == 0


# ------------------------------------------------------------------------------------------------ what is said


def test_every_entry_has_a_tiny_model() -> None:
    """An entry that nobody built is one that nobody tested; and no type is in two tables."""
    built = {(case.tiny.model_type, case.target) for case in CASES.values()}
    assert {(r.source, r.target) for r in RECASTINGS if r.way == "native"} == built
    sources, stated = {r.source for r in RECASTINGS}, {t for family in FAMILIES for t in family.model_types}
    assert not sources & (stated | set(REFUSED))
    assert {r.target for r in RECASTINGS} <= stated


def test_the_result_says_what_it_is(tmp_path: Path) -> None:
    directory = source(tmp_path, "gpt_neox")
    (directory / "notes.txt").write_bytes(b"\x00\xff carried along")
    done = run("--groups", 2, "--method", "mean", "--json", directory)
    assert "class       gpt_neox (GPTNeoXForCausalLM) -> phi (PhiForCausalLM), native" in done.err
    both = {
        "from": {"model_type": "gpt_neox", "architecture": "GPTNeoXForCausalLM"},
        "to": {"model_type": "phi", "architecture": "PhiForCausalLM"},
        "way": "native",
    }
    record, out = json.loads(done.out), tmp_path / "source-gqa2-mean"
    assert record["recast"] == json.loads((out / "gqa_conversion.json").read_text())["recast"] == both
    assert record["parameters"]["before"] == build(CASES["gpt_neox"].tiny, 4).num_parameters()
    card = (out / "README.md").read_text()
    assert "Class: phi (PhiForCausalLM), a class of transformers; the source is gpt_neox (GPTNeoXForCausalLM)" in card
    for name in ("generation_config.json", "notes.txt"):
        assert (out / name).read_bytes() == (directory / name).read_bytes()
    stated, before = (json.loads((path / "config.json").read_text()) for path in (out, directory))
    assert (stated["architectures"], stated["model_type"]) == (["PhiForCausalLM"], "phi")
    assert [stated[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 2, 0]
    assert stated["dtype"] == before["dtype"]
    assert "tokenizer_class" not in stated  # it has none


def test_the_cache_of_a_source_is_known(tmp_path: Path) -> None:
    """What gqa-eval says of a source, beside transformers' own cache."""
    for name in ("gpt_neox", "gpt2"):
        model = build(CASES[name].tiny, 4)
        directory = write_checkpoint(model, tmp_path / name)
        assert checkpoint_cache(open_model(str(directory))).bytes_at(9) == sum(cache_bytes(model, 9, 1))


# -------------------------------------------------------------------------------------------------- tokenizers

TEXT = "def train(model, data):\n    return  model(data)  # 3.14 <|endoftext|> naïve"


SPECIAL = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
# What is stored of a tokenizer, from all that transformers writes to the two files of the oldest repositories.
STORED: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {
    "all": (("tokenizer.json",), {"tokenizer_class": ..., **SPECIAL}),
    "no class": (("tokenizer.json", "vocab.json", "merges.txt"), {"model_max_length": 64}),
    "vocabulary": (("vocab.json", "merges.txt"), {"tokenizer_class": ..., "model_max_length": 64}),
    "vocabulary alone": (("vocab.json", "merges.txt"), None),
}


@cache
def trained_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found: Any = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    found.train_from_iterator([TEXT], how)
    return found


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        *((name, stored) for name in ("gpt_neox", "gpt2") for stored in STORED),
        *((name, "vocabulary alone") for name in ("gpt_neox+rotary", "gptj", "codegen")),
    ],
)
def test_tokenizers_stay_themselves(name: str, stored: str, tmp_path: Path) -> None:
    """AutoTokenizer gives the source's ids and special tokens, also where only the model type told its class."""
    from transformers import AutoTokenizer

    directory = source(tmp_path, name)
    files, tokenizer_config = STORED[stored]
    trained = trained_tokenizer()
    trained.save(str(directory / "tokenizer.json"))
    trained.model.save(str(directory))
    for file in {"tokenizer.json", "vocab.json", "merges.txt"} - set(files):
        (directory / file).unlink()
    if tokenizer_config is not None:
        of_type = {"gpt_neox": "GPTNeoXTokenizer", "codegen": "CodeGenTokenizer"}.get(name.partition("+")[0])
        told = {key: of_type or "GPT2Tokenizer" if value is ... else value for key, value in tokenizer_config.items()}
        (directory / "tokenizer_config.json").write_text(json.dumps(told))
    before = AutoTokenizer.from_pretrained(directory)
    out = convert_checkpoint(directory, 1, tmp_path / "out", method="mean").out
    found = AutoTokenizer.from_pretrained(out)
    assert found(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert len(found(TEXT)["input_ids"]) == 23
    assert found.decode(found(TEXT)["input_ids"]) == TEXT
    assert found.special_tokens_map == before.special_tokens_map
    assert found.eos_token_id == before.eos_token_id == 0
    assert found.model_max_length == before.model_max_length
    if CASES[name].target in ("phi", "starcoder2"):
        assert type(found) is type(before)
    for file in files:
        assert (out / file).read_bytes() == (directory / file).read_bytes()


def test_a_tokenizer_that_is_broken_is_carried_along(tmp_path: Path) -> None:
    """It is none of the weights' business, but said; and neither is a model without any."""
    directory = source(tmp_path, "gpt2")
    (directory / "tokenizer.json").write_text("{}")
    done = convert_checkpoint(directory, 1, tmp_path / "out", method="mean")
    out = done.out
    assert any("the tokenizer is copied as it is, its special tokens are not known: " in said for said in done.warnings)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "tokenizer_config.json").exists()
    assert "tokenizer_class" not in json.loads((out / "config.json").read_text())


# --------------------------------------------------------------------------------------------------- classifiers


def test_a_classifier_is_refused_by_its_head(tmp_path: Path) -> None:
    GPT2ForSequenceClassification(config(CASES["gpt2"].tiny, 4)).save_pretrained(tmp_path / "m")
    said = refusal(tmp_path / "m", "--groups", 2, "--method", "mean")
    assert "custom modelling code has no class with the head of GPT2ForSequenceClassification" in said


@pytest.mark.parametrize(
    ("name", "groups", "method"),
    [
        *(("gpt_neox", 2, method) for method in ("mean", "aligned", "calibrated")),
        *((name, groups, "calibrated") for name, groups in (("gpt_neox+rotary", 2), ("codegen", 2), ("gpt2", 1))),
    ],
)
def test_what_is_seen_is_what_would_be_written(name: str, groups: int, method: str, tmp_path: Path) -> None:
    """Heads of a source are aligned and merged as those of the checkpoint that it becomes with all its heads."""
    directory = source(tmp_path, name)
    whole = convert_checkpoint(directory, 4, tmp_path / "whole").out
    made, expected, other = (
        all_tensors(convert_checkpoint(place, groups, tmp_path / out, method=how, calibration=on_ids()).out)
        for place, out, how in ((directory, "made", method), (whole, "expected", method), (whole, "other", "first"))
    )
    assert made.keys() == expected.keys()
    assert max(error(made[key], expected[key]) for key in made if "bias" not in key) < 1e-4
    assert max(error(other[key], expected[key]) for key in made if "bias" not in key) > 0.1
