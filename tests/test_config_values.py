"""Whatever config.json says beside sound weights, a conversion is planned and computed, or refused
in one line.

A fixed seed draws a sample of the grid of models, keys and values; GQA_FUZZ=20 tries twenty times
as many, and others.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import check_refused, edit_json, llama, run
from support.tiny_models import TINY, build

from gqa.checkpoint.model_config import MAX_COUNT, check_against_headers, check_numbers
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.heads.config import check_config, read_config
from gqa.convert.heads.config_edits import edit_config
from gqa.convert.heads.layer_parts import _activation
from gqa.convert.heads.rotary import Rotary, unrotated
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.table import METHODS
from gqa.convert.plan import Plan
from gqa.convert.planning import make_plan
from gqa.core.errors import CorruptError, RefusedError, one_line

SCALE = int(os.environ.get("GQA_FUZZ", "1"))
SAMPLES = 10  # of a model
# Decoders with windows, experts, own factors and half-rotated heads; a larger model; an
# encoder-decoder; custom code.
MODELS = (
    "llama",
    "gemma2",
    "gpt_oss",
    "granite",
    "stablelm",
    "gemma3n_text",
    "llava",
    "t5gemma",
    "gqa_opt",
)
VALUES: tuple[Any, ...] = (
    float("nan"),
    float("inf"),
    -float("inf"),
    -3,
    -1,
    0,
    1,
    3,
    10**6,
    10**9,
    10**18,
    10**40,
    0.5,
    8.0,
    1e9,
    1e40,
    1e-320,
    "",
    "x",
    "8",
    None,
    True,
    False,
    [],
    [1, 2],
    ["x", "y"],
    [[[]]],
    {},
    {"a": 1},
    {"__float__": "x"},
    {"__float__": "Infinity"},
    {"full_attention": {"rope_theta": 0}},
)
# Keys that this package or transformers reads from some configs, whether the models have them or
# not.
KEYS = (
    "attention_chunk_size",
    "attn_implementation",
    "attn_logit_softcapping",
    "auto_map",
    "bos_token_id",
    "configuration_files",
    "dtype",
    "embedding_multiplier",
    "eos_token_id",
    "head_dim",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "kv_lora_rank",
    "layer_types",
    "layers_block_type",
    "max_position_embeddings",
    "no_rope_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_labels",
    "output_attentions",
    "partial_rotary_factor",
    "per_layer_config",
    "pruned_heads",
    "quantization_config",
    "residual_multiplier",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_pct",
    "sliding_window",
    "text_config",
    "tokenizer_class",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
)
# Each of these once ended in an unexpected error, or without end.
SEEN: tuple[tuple[str, str, Any], ...] = (
    ("llama", "layers_block_type", 5),
    ("llama", "num_kv_shared_layers", 3),
    ("llama", "sliding_window", "x"),
    ("llama", "max_position_embeddings", -1),
    ("llama", "partial_rotary_factor", float("nan")),
    ("llama", "partial_rotary_factor", -1),
    ("llama", "partial_rotary_factor", "x"),
    ("llama", "partial_rotary_factor", {}),
    ("llama", "partial_rotary_factor", 1e9),
    ("granite", "embedding_multiplier", [[[]]]),
    ("llama", "head_dim", 10**18),
    ("llama", "hidden_size", 10**18),
    ("llama", "dtype", 1),
    ("gpt_oss", "num_local_experts", 10**9),
    ("llava", "text_config", "x"),
)

Entry = tuple[str, ...]  # the keys that lead to it


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sound")
    for name in MODELS:
        build(TINY[name], 4).save_pretrained(directory / name)
    return {name: directory / name for name in MODELS}


def entries(config: dict[str, Any], above: Entry = ()) -> Iterator[Entry]:
    """Every entry of a config, of the objects in it, and those of `KEYS` that they could have."""
    is_config = not above or above[-1].endswith("config")
    for key in dict.fromkeys([*config, *(KEYS if is_config else ())]):
        yield (*above, key)
        if isinstance(config.get(key), dict):
            yield from entries(config[key], (*above, key))


def changed(config: dict[str, Any], entry: Entry, value: Any) -> dict[str, Any]:
    made = part = copy.deepcopy(config)
    for key in entry[:-1]:
        part = part[key]
    part[entry[-1]] = value
    return made


def convert(model: Path, method: str) -> Plan:
    """Everything of a conversion that computes by the config, but for writing."""
    plan = make_plan(read_checkpoint(model), 2, method)

    assert plan.cache_after.bytes_at(plan.cache_after.context or 100) > 0
    if method == "aligned":
        list(METHODS["aligned"].maps_by_module(plan))
    elif method == "calibrated" and not plan.config.raw.get("is_encoder_decoder"):
        blocks = torch.arange(64).reshape(4, 16) % 16 + 10
        calibrator = Calibrator(plan, blocks, MapsOptions())
        for layer in range(calibrator.n_layers):
            calibrator.run(layer)
    return plan


def refused_or_done(source: Path, config: dict[str, Any], method: str, directory: Path) -> str:
    """The line of a refusal of the weights of `source` with this config; empty if the conversion is
    done.
    """
    shutil.copytree(source, directory, copy_function=os.link, dirs_exist_ok=True)
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    try:
        convert(directory, method)
    except RefusedError as error:
        line = one_line(str(error))
        assert line.isprintable()
        return line
    finally:
        shutil.rmtree(directory)
    return ""


def config_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_any_value_is_refused_in_one_line_or_works(
    name: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(sound[name])
    draw = random.Random(name if SCALE == 1 else None)
    grid = [(entry, value) for entry in entries(config) for value in VALUES]

    for entry, value in draw.sample(grid, min(SAMPLES * SCALE, len(grid))):
        method = draw.choice(["mean", "aligned", "calibrated"])
        try:
            refused_or_done(sound[name], changed(config, entry, value), method, tmp_path / "m")
        except Exception as error:
            raise AssertionError(f"{'.'.join(entry)}: {value!r} with {method}") from error


@pytest.mark.parametrize(("name", "key", "value"), SEEN)
def test_a_refusal_names_the_key_and_its_value(
    name: str, key: str, value: Any, sound: dict[str, Path], tmp_path: Path
) -> None:
    config = changed(config_of(sound[name]), (key,), value)

    line = refused_or_done(sound[name], config, "aligned", tmp_path / "m")

    assert f"{key}: {json.dumps(value)}" in line


@pytest.mark.parametrize("key", ["num_key_value_heads", "num_attention_heads"])
def test_no_heads_are_not_as_many_as_there_are_others(
    key: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    """A count of 0 is stated, unlike one that is left out."""
    config = changed(config_of(sound["llama"]), (key,), 0)
    assert f"{key}: 0" in refused_or_done(sound["llama"], config, "mean", tmp_path / "m")


@pytest.mark.parametrize("name", MODELS)
def test_a_sound_config_is_not_refused(name: str, sound: dict[str, Path], tmp_path: Path) -> None:
    """The control of both tests."""
    assert refused_or_done(sound[name], config_of(sound[name]), "mean", tmp_path / "m") == ""


VARIED = {
    "sliding_window": 64,
    "hidden_act": "relu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


@pytest.mark.parametrize("key", VARIED)
def test_layers_may_differ_in_heads_only(key: str, sound: dict[str, Path], tmp_path: Path) -> None:
    """transformers reads such a config, but then has no value for the whole model."""
    value = VARIED[key]
    config = config_of(sound["llama"])
    config = changed(config, (key,), value)
    config = changed(config, ("per_layer_config",), {"0": {key: value}})
    for method in ("mean", "aligned"):
        refused_or_done(sound["llama"], config, method, tmp_path / method)


def test_heads_are_counted_before_their_numbers_are_tried(tmp_path: Path) -> None:
    """A loop over the possible numbers of KV heads would not end."""
    model = llama(tmp_path / "m")
    many = [10**12] * 2
    edit_json(
        model / "config.json", lambda config: config.update(num_attention_heads_per_layer=many)
    )
    result = run("--kv-heads", 2, "--dry-run", model)
    check_refused(result, f"{10**12} query heads", f"at most {MAX_COUNT} are allowed")


def test_a_part_of_a_config_may_be_null() -> None:
    """DBRX's class then has values of its own."""
    config = read_config({"model_type": "dbrx", "attn_config": None}, "m")
    edited, _ = edit_config(config, 4, "m")
    assert edited.raw["attn_config"] == {"kv_n_heads": 4}


def test_an_activation_with_parameters_is_not_estimated() -> None:
    """xIELU of Apertus: its two numbers are stored in each layer."""
    assert _activation(SimpleNamespace(hidden_act="silu")) == "silu"
    assert _activation(SimpleNamespace(hidden_act="xielu")) is None


def test_cross_attention_has_no_rotary_dimensions() -> None:
    """So its keys may be mixed by any matrix."""
    assert unrotated(Rotary(8, "interleaved", (1.0,) * 4)) == Rotary(0, "interleaved")


def test_rotated_dimensions_come_in_pairs(sound: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(sound["stablelm"])
    dim = config["hidden_size"] // config["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 3 / dim}
    config = changed(config, ("rope_parameters",), rope)
    config = changed(config, ("partial_rotary_factor",), 3 / dim)
    line = refused_or_done(sound["stablelm"], config, "aligned", tmp_path / "m")
    assert "they come in pairs" in line


def test_rotated_dimensions_are_not_multiplied_by_zero(
    sound: dict[str, Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 0}
    config = changed(config_of(sound["llama"]), ("rope_parameters",), rope)
    line = refused_or_done(sound["llama"], config, "aligned", tmp_path / "m")
    assert "its attention factor is 0, not above 0" in line


def test_a_table_of_rotary_embeddings_is_bounded() -> None:
    """GPT-J computes one of positions x rotary_dim, which no header bounds."""
    check_against_headers({"model_type": "gptj", "rotary_dim": 64}, "m", 9, 1024)
    with pytest.raises(CorruptError, match="rotary_dim: 4000000"):
        check_against_headers({"model_type": "gptj", "rotary_dim": 4_000_000}, "m", 9, 1024)


def test_layers_are_counted_before_they_are_built(tmp_path: Path) -> None:
    """Building as many layers as are allowed at most takes minutes."""
    model = llama(tmp_path / "m")
    edit_json(model / "config.json", lambda config: config.update(num_hidden_layers=MAX_COUNT))

    for program, words in (
        ("gqa-convert", ["--kv-heads", 2]),
        ("gqa-eval", ["--data", "stdlib:heldout"]),
    ):
        result = run(*words, model, program=program)
        check_refused(result, f"num_hidden_layers: {MAX_COUNT}", "21 tensors", program=program)


@pytest.mark.parametrize(
    "key", ["max_position_embeddings", "partial_rotary_factor", "sliding_window"]
)
def test_evaluation_and_training_refuse_it_too(key: str, tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    edit_json(model / "config.json", lambda config: config.update({key: "x"}))

    for program in ("gqa-eval", "gqa-uptrain"):
        words = ["--data", "stdlib:heldout", "--teacher", "none", "-o", tmp_path / "out"]
        result = run(*words[: 2 if program == "gqa-eval" else 6], model, program=program)
        check_refused(result, key, '"x"', program=program, advice="")


@pytest.mark.parametrize("key", ["max_position_embeddings", "max_source_positions"])
def test_positions_that_a_class_computes_are_few(key: str) -> None:
    """Marian and its like make their table of sinusoids number by number; decoders compute no
    table.
    """
    positions = 10_000_000
    check_numbers({"model_type": "llama", key: positions, "num_hidden_layers": 2}, "m")
    with pytest.raises(RefusedError, match=f"{key}: {positions}, but at most 100000 are allowed"):
        check_numbers({"model_type": "marian", key: positions, "decoder_layers": 2}, "m")


def test_types_that_cannot_be_converted_pass_the_check() -> None:
    check_config({"model_type": "mamba"}, "m")
    with pytest.raises(CorruptError, match="num_layers: 1000000"):
        check_config({"model_type": "mamba", "num_layers": 10**6}, "m")
