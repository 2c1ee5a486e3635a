"""Layer by layer, under every name that transformers loads: as it stores tensors, as the class has them, without the
prefix of the base model, and without a head.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json
from safetensors.torch import load_file, save_file
from scrambled import Ids, equal, find_maps, on_ids
from tiny_models import TINY, build
from training import options_for, tiny_checkpoint, trained

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.names import saved_tensors
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import plan_conversion
from gqa.convert.merge.budget import heads_within
from gqa.convert.merge.options import Refinement
from gqa.convert.merge.pair import Pair

# Whose tensors transformers stores under other names, or in other pieces, than those of the class.
OTHERWISE = [
    "aria", "cohere2_moe", "ernie4_5_vl_moe", "flint", "gemma3", "granitemoehybrid", "internvl", "jamba", "lfm3_vl",
    "llava_next", "minimax", "minimax_m3_vl", "mixtral", "nemotron_h", "olmo_hybrid", "paligemma", "phimoe",
    "qwen2_audio", "qwen3_omni_moe", "step3p7",
]  # fmt: skip


def as_the_class_has_them(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    tensors, kept = model.state_dict(), dict[int, str]()
    for name, tensor in tensors.items():
        kept.setdefault(tensor.data_ptr(), name)  # of tied ones the first
    ignored = model._keys_to_ignore_on_save or ()
    whole = {name: tensors[name].contiguous().clone() for name in kept.values() if name not in ignored}
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", [name for name in OTHERWISE if name in TINY])
def test_names_of_the_class(name: str, tmp_path: Path) -> None:
    """Both models, the source's and the converted one's, have its weights; what is trained has a stored name."""
    model = build(TINY[name], 4)
    assert saved_tensors(model, model.state_dict()).keys() != model.state_dict().keys()
    plan = plan_conversion(as_the_class_has_them(model, tmp_path), 2, method="calibrated")
    pair, expected = Pair(plan, on_ids()), model.state_dict()
    for layer in range(len(pair.source.layers)):
        pair.source.load(layer, {})
    loaded = {key: tensor for key, tensor in pair.source.model.state_dict().items() if not tensor.is_meta}
    assert all(key.endswith("lm_head.weight") for key in expected.keys() - loaded.keys())
    assert equal(loaded, {key: expected[key].to(loaded[key].dtype) for key in loaded})
    changed = {tensor.name for tensor in plan.changed}
    for layer in range(len(pair.target.layers)):
        for module in pair.modules_of(layer):
            attention = pair.merged(layer, module, {}).attention
            assert attention
            names = pair.trainable(module, attention)
            parameters = {own: attention.get_parameter(below) for below, own in names.items()}
            assert pair.stored(parameters).keys() & changed


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


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
    else:  # as Qwen3-Embedding is stored, whose config names the whole model; classifiers, reward models
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        edit_json(tmp_path / "b" / "config.json", lambda config: config.update(architectures=[head]))
        tensors = without_prefix(load_file(tmp_path / "a" / "model.safetensors"))
        if head.endswith("Classification"):
            tensors = {f"model.{key}": tensor for key, tensor in tensors.items()}
            tensors["score.weight"] = tensors["model.norm.weight"].repeat(2, 1)
        save_file(tensors, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    options = on_ids(refinement=Refinement(steps=2, batch=8, autocast=False), grouping="search")
    maps = [find_maps(plan_conversion(tmp_path / side, 2, method=method), tmp_path / "out", options) for side in "ab"]
    assert maps[0]
    numbers = [sorted(of.items(), key=lambda item: item[0].removeprefix("model.")) for of in maps]
    assert len(numbers[0]) == len(numbers[1])
    assert all(one.equal(other) for (_, one), (_, other) in zip(*numbers, strict=True))


def test_budgets_and_sampling_need_a_head(tmp_path: Path) -> None:
    """One line; with a head that is tied to the embedding, without the prefix, layers are measured."""
    tiny = replace(TINY["qwen3"], options={**TINY["qwen3"].options, "tie_word_embeddings": True})
    build(tiny, 4).save_pretrained(tmp_path / "a")
    tensors = without_prefix(load_file(tmp_path / "a" / "model.safetensors"))
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "a" / "config.json", lambda config: config.update(tie_word_embeddings=True))
    heads, _ = heads_within(read_checkpoint(tmp_path / "a"), 0.5, on_ids(text=Ids(count=8)))
    assert sum(heads) <= 4
    edit_json(tmp_path / "a" / "config.json", lambda config: config.update(architectures=["Qwen3Model"]))
    with pytest.raises(RefusedError, match="Qwen3Model has no head that predicts tokens; give text instead of self"):
        heads_within(read_checkpoint(tmp_path / "a"), 0.5, on_ids(text=Ids(count=8)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("train", ["all", "lora"])
def test_training_keeps_the_names(train: str, tmp_path: Path) -> None:
    """Without the prefix, too; and the result is what was trained."""
    source = tiny_checkpoint(tmp_path / "m", "qwen3", tie_word_embeddings=True)
    for file in source.glob("*.safetensors"):
        save_file(without_prefix(load_file(file)), file, {"format": "pt"})
    index = source / "model.safetensors.index.json"
    if index.exists():
        edit_json(index, lambda of: of.update(weight_map=without_prefix(of["weight_map"])))
    before = read_checkpoint(source).tensors
    progress, _ = trained(options_for(source, tmp_path / "out", train=train, teacher="none"))
    assert progress.step == 2
    after = read_checkpoint(tmp_path / "out").tensors
    assert {name: of.shape for name, of in after.items()} == {name: of.shape for name, of in before.items()}
    weights = load_model(str(tmp_path / "out")).state_dict(), load_model(str(source)).state_dict()
    assert not equal(*weights)
