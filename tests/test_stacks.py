"""Which tensors are attention of the text stack: to convert, to leave alone, to refuse; by all
names that load.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import edit_json, edit_tensors, write_hollow
from support.families import all_tensors, write_checkpoint
from support.scrambled import Ids, equal, find_maps, on_ids
from support.tiny_configs import Tiny
from support.tiny_models import TINY, build, config, model_class
from support.tiny_nested import LARGER, larger
from support.training import options_for, tiny_checkpoint, trained
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.timm_wrapper import modeling_timm_wrapper

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.heads.config import read_config
from gqa.convert.heads.families.table import FAMILIES, NESTED
from gqa.convert.merge.budget import heads_within
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import Refinement
from gqa.convert.merge.pair import ModelPair
from gqa.core.errors import CorruptError, RefusedError
from gqa.models.loading import load_model
from gqa.models.names import saved_tensors

K, V = "self_attn.k_proj.weight", "self_attn.v_proj.weight"
TYPES = sorted(
    {t for family in FAMILIES for t in family.symmetries} & set(CONFIG_MAPPING) | set(NESTED)
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build(TINY["llama"], 4).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def change(directory: Path, added: dict[str, Tensor], removed: tuple[str, ...] = ()) -> None:
    edit_tensors(
        directory, lambda tensors: {n: t for n, t in tensors.items() if n not in removed} | added
    )


def attention(path: str, rows: int = 32) -> dict[str, Tensor]:
    return {f"{path}.{name}": torch.randn(rows, 32) for name in (K, V)}


@pytest.mark.parametrize("model_type", TYPES)
def test_default_configs_are_read(model_type: str) -> None:
    """The config that a class makes by itself, full-size, has a family and a number of groups to
    choose from.
    """
    raw = CONFIG_MAPPING[model_type]().to_dict()
    config = read_config(json.loads(json.dumps(raw)), model_type)
    assert config.main_heads.query % config.main_heads.kv == 0


@pytest.fixture
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers that timm makes are of one parameter."""
    monkeypatch.setattr(
        modeling_timm_wrapper,
        "_create_timm_model_with_error_handling",
        lambda *args, **_: nn.Linear(1, 1),
    )
    monkeypatch.setattr(modeling_timm_wrapper, "requires_backends", lambda *args: None)


def hollow(tiny: Tiny, kv_heads: int) -> tuple[PreTrainedModel, dict[str, tuple[int, ...]]]:
    """A model without weights, and the names and shapes that its checkpoint stores."""
    with torch.device("meta"):
        model = model_class(tiny)._from_config(config(tiny, kv_heads), dtype=torch.float32)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    return model, {
        name: tuple(tensor.shape) for name, tensor in saved_tensors(model, state).items()
    }


@pytest.mark.usefixtures("without_timm")
@pytest.mark.parametrize("model_type", LARGER)
def test_a_larger_model_becomes_what_its_class_stores_with_fewer_heads(
    model_type: str, tmp_path: Path
) -> None:
    """Names and shapes; and transformers loads them, without weights. test_families converts text
    parts alone.
    """
    tiny = larger(model_type)
    model, stored = hollow(tiny, 4)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    write_hollow(tmp_path, stored, "F32")
    plan = plan_conversion(tmp_path, 2, method="mean")
    assert plan.warnings == ()
    fewer = hollow(tiny, 2)[1]
    assert fewer != stored
    assert {tensor.name: tensor.shape for tensor in plan.tensors} == fewer


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        *(
            (path, 16)
            for path in (
                "mtp.layers.0",
                "model.mtp_layers.0",
                "model.mtp_block.0",
                "model.mtp.layers.0",
                "model.layers.2",
            )
        ),
        *(
            (path, 32)
            for path in ("vision_tower.layers.0", "model.audio_encoder.layers.0", "visual.blocks.1")
        ),
    ],
)
def test_layers_that_predict_further_tokens_are_converted_and_towers_not(
    source: Path, tmp_path: Path, path: str, rows: int
) -> None:
    change(source, added := attention(path))
    after = all_tensors(convert_checkpoint(source, 2, tmp_path / "out", method="mean").out)
    for name, tensor in added.items():
        assert after[name].shape == (rows, 32)
        if rows == 32:
            assert torch.equal(after[name], tensor)


@pytest.mark.parametrize("layer", ["mtp.layers.0", "model.layers.0"])
def test_a_layer_that_has_lost_its_keys_and_values_is_refused(source: Path, layer: str) -> None:
    query = {f"{layer}.self_attn.q_proj.weight": torch.randn(32, 32)}
    change(source, query, (f"{layer}.{K}", f"{layer}.{V}"))
    with pytest.raises(CorruptError, match=f"{layer}.self_attn has queries but no keys and values"):
        convert_checkpoint(source, 2, method="mean")


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "procrustes"), *((name, "aligned") for name in ("smollm3", "cohere2"))],
)
def test_layers_that_predict_further_tokens_are_aligned(
    name: str, method: str, tmp_path: Path
) -> None:
    """Configs list kinds of layers, and not of those."""
    source = tmp_path / "source"
    build(TINY[name], 4).save_pretrained(source)
    last = {n: t for n, t in all_tensors(source).items() if ".layers.1." in n}
    change(source, {n.replace(".layers.1.", ".layers.2."): t for n, t in last.items()})
    after = all_tensors(convert_checkpoint(source, 2, tmp_path / "out", method=method).out)
    assert (
        after[f"model.layers.2.{K}"].shape
        == after[f"model.layers.1.{K}"].shape
        != last[f"model.layers.1.{K}"].shape
    )


@pytest.mark.parametrize(
    ("added", "removed", "method", "says"),
    [
        ("draft.layers.0", (), "mean", "several stacks"),
        ("model.resampled", (), "mean", "is not in one of its layers"),
        ("", (K, V), "mean", r"layers\.1\.self_attn has queries but no keys and values"),
        (
            "",
            ("self_attn.o_proj.weight",),
            "mean",
            r"layers\.1\.self_attn\.o_proj\.weight is not stored",
        ),
        (
            "",
            ("self_attn.o_proj.weight",),
            "calibrated",
            r"has k_proj, q_proj, v_proj but no o_proj",
        ),
    ],
)
def test_unknown_stacks_and_incomplete_modules_are_refused(
    source: Path, added: str, removed: tuple[str, ...], method: str, says: str
) -> None:
    change(
        source,
        attention(added) if added else {},
        tuple(f"model.layers.1.{name}" for name in removed),
    )
    with pytest.raises(RefusedError, match=says):
        plan_conversion(source, 2, method=method)


def test_what_several_parts_state_is_edited_in_each(tmp_path: Path) -> None:
    """The number of heads, and the dtype."""
    source = write_checkpoint(build(TINY["qwen2_vl"], 4), tmp_path / "source")

    def state(raw: dict[str, Any]) -> None:
        raw["num_key_value_heads"] = 4
        for part in (raw, raw["text_config"], raw["vision_config"]):
            part["dtype"] = "float32"

    edit_json(source / "config.json", state)
    new = plan_conversion(source, 2, dtype="bfloat16").new_config
    assert new["num_key_value_heads"] == new["text_config"]["num_key_value_heads"] == 2
    assert (
        new["dtype"] == new["text_config"]["dtype"] == new["vision_config"]["dtype"] == "bfloat16"
    )


# Whose tensors transformers stores under other names, or in other pieces, than those of the class.
OTHERWISE = [
    "aria",
    "cohere2_moe",
    "ernie4_5_vl_moe",
    "flint",
    "gemma3",
    "granitemoehybrid",
    "internvl",
    "jamba",
    "lfm3_vl",
    "llava_next",
    "minimax",
    "minimax_m3_vl",
    "mixtral",
    "nemotron_h",
    "olmo_hybrid",
    "paligemma",
    "phimoe",
    "qwen2_audio",
    "qwen3_omni_moe",
    "step3p7",
]


def as_the_class_has_them(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    tensors, kept = model.state_dict(), dict[int, str]()
    for name, tensor in tensors.items():
        kept.setdefault(tensor.data_ptr(), name)  # of tied ones the first
    ignored = model._keys_to_ignore_on_save or ()
    whole = {
        name: tensors[name].contiguous().clone() for name in kept.values() if name not in ignored
    }
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", [name for name in OTHERWISE if name in TINY])
def test_names_of_the_class(name: str, tmp_path: Path) -> None:
    """The layers that text runs through have its weights."""
    model = build(TINY[name], 4)
    assert saved_tensors(model, model.state_dict()).keys() != model.state_dict().keys()
    plan = plan_conversion(as_the_class_has_them(model, tmp_path), 2, method="calibrated")
    pair, expected = ModelPair(plan, on_ids()), model.state_dict()
    for layer in range(pair.n_layers):
        pair.base_model.load(layer)
    loaded = {
        key: tensor
        for key, tensor in pair.base_model.model.state_dict().items()
        if not tensor.is_meta
    }
    assert all(key.endswith("lm_head.weight") for key in expected.keys() - loaded.keys())
    assert equal(loaded, {key: expected[key].to(loaded[key].dtype) for key in loaded})


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight"
    }


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("mixtral", "the class' names"),
        ("flint", "the class' names"),
        ("qwen3", "Qwen3Model"),
        ("qwen3", "Qwen3ForSequenceClassification"),
    ],
)
@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_maps_are_those_of_other_names(name: str, head: str, method: str, tmp_path: Path) -> None:
    more = {"tie_word_embeddings": True} if name == "qwen3" else {}
    model = build(replace(TINY[name], options={**TINY[name].options, **more}), 4)
    model.save_pretrained(tmp_path / "a")
    if "names" in head:
        as_the_class_has_them(model, tmp_path / "b")
    else:
        # As Qwen3-Embedding is stored, whose config names the whole
        # model; classifiers, reward models
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        edit_json(
            tmp_path / "b" / "config.json", lambda config: config.update(architectures=[head])
        )
        edit_tensors(tmp_path / "b", without_prefix)
        if head.endswith("Classification"):
            edit_tensors(
                tmp_path / "b", lambda tensors: {f"model.{key}": tensors[key] for key in tensors}
            )
            edit_tensors(
                tmp_path / "b", lambda tensors: tensors | {"score.weight": torch.ones(2, 32)}
            )
    options = on_ids(refinement=Refinement(steps=2, blocks_per_step=8, autocast=False))
    maps = [
        find_maps(plan_conversion(tmp_path / side, 2, method=method), tmp_path / "out", options)
        for side in "ab"
    ]
    assert maps[0]
    numbers = [sorted(of.items(), key=lambda item: item[0].removeprefix("model.")) for of in maps]
    assert len(numbers[0]) == len(numbers[1])
    assert all(one.equal(other) for (_, one), (_, other) in zip(*numbers, strict=True))


def test_budgets_and_sampling_need_a_head(tmp_path: Path) -> None:
    """One line; with a head that is tied to the embedding, without the prefix,
    layers are measured.
    """
    tiny = replace(TINY["qwen3"], options={**TINY["qwen3"].options, "tie_word_embeddings": True})
    build(tiny, 4).save_pretrained(tmp_path / "a")
    edit_tensors(tmp_path / "a", without_prefix)
    edit_json(
        tmp_path / "a" / "config.json", lambda config: config.update(tie_word_embeddings=True)
    )
    heads, _ = heads_within(read_checkpoint(tmp_path / "a"), 0.5, on_ids(text=Ids(count=8)))
    assert sum(heads) <= 4
    edit_json(
        tmp_path / "a" / "config.json", lambda config: config.update(architectures=["Qwen3Model"])
    )
    sampled, head = (
        CalibrationText(tokens=128, length=16),
        "has no head that predicts tokens; pass text",
    )
    for text, message in (
        (sampled, head),
        (Ids(count=8), "returns no logits; pass a checkpoint that has its language-model head"),
    ):
        with pytest.raises(RefusedError, match=f"Qwen3Model {message}"):
            heads_within(read_checkpoint(tmp_path / "a"), 0.5, on_ids(text=text))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("train", ["all", "lora"])
def test_training_keeps_the_names(train: str, tmp_path: Path) -> None:
    """Without the prefix, too; and the result is what was trained."""
    source = tiny_checkpoint(tmp_path / "m", "qwen3", tie_word_embeddings=True)
    edit_tensors(source, without_prefix)
    index = source / "model.safetensors.index.json"
    if index.exists():
        edit_json(index, lambda of: of.update(weight_map=without_prefix(of["weight_map"])))
    before = read_checkpoint(source).tensors
    progress, _ = trained(options_for(source, tmp_path / "out", train=train, teacher="none"))
    assert progress.step == 2
    after = read_checkpoint(tmp_path / "out").tensors
    assert {name: of.shape for name, of in after.items()} == {
        name: of.shape for name, of in before.items()
    }
    weights = load_model(str(tmp_path / "out")).state_dict(), load_model(str(source)).state_dict()
    assert not equal(*weights)
