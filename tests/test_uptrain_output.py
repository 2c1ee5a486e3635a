"""What is trained: exactly what was asked for. What is written: exactly as the source stores it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import load, tensor_bytes
from support.families import write_checkpoint
from support.patches import use_validation_losses
from support.tiny_models import TINY, build
from support.training import difference, losses, options_for, tiny_checkpoint, trained
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint
from gqa.core.errors import OutputError, RefusedError
from gqa.models.loading import load_model
from gqa.uptrain.adapters import merge_adapters
from gqa.uptrain.export import TrainedCheckpoint, result_tensors
from gqa.uptrain.options import Scope
from gqa.uptrain.run import uptrain
from gqa.uptrain.scope import attention_parameters, freeze_parameters, trained_names
from gqa.uptrain.setup import check_exportable, prepare

pytestmark = pytest.mark.usefixtures("alone")


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def rewrite(source: Path, tensors: dict[str, Tensor], kind: str = "model.safetensors") -> None:
    """A checkpoint has these instead of its own, in one file."""
    for path in (*source.glob("*.safetensors*"), *source.glob("*.bin")):
        path.unlink()
    save_file(tensors, source / kind) if kind.endswith("rs") else torch.save(tensors, source / kind)


def train(source: Path, out: Path, **given: Any) -> tuple[dict[str, Tensor], set[str]]:
    """What the source stores, and the names of what has changed; dtypes and shapes have not."""
    trained(options_for(source, out, **given))
    before, after = load(source), load(out)
    assert shapes(after) == shapes(before)
    return before, {name for name in before if not torch.equal(before[name], after[name])}


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "bfloat16"},  # three files
    "qwen2+tied": {"dtype": "float16"},
    "mixtral": {},  # experts are stored one by one, and are one parameter
    "gemma3": {"dtype": "bfloat16"},  # inside a larger model, with a tower that text does not reach
    "qwen2_vl": {},  # stored without the name of its text model
}


@pytest.mark.parametrize("name", KINDS)
def test_the_output_is_as_the_source(tmp_path: Path, name: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", name, **KINDS[name])
    # Byte for byte
    (source / "config.json").write_text(f"\n {(source / 'config.json').read_text()}")
    before, changed = train(source, tmp_path / "out")
    towers = {key for key in before if "vision" in key or "visual" in key or "projector" in key}
    assert changed == set(before) - towers
    written = sorted(p.name for p in source.glob("*.safetensors"))
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == written
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    named = json.loads((source / "config.json").read_text())["architectures"][0]
    # Which does not know Qwen2-VL
    cls = getattr(transformers, named) if name == "qwen2_vl" else AutoModelForCausalLM
    model, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert type(model).__name__ == named
    AutoTokenizer.from_pretrained(tmp_path / "out")


STORED = [
    "llama+tied",
    "falcon+old_alibi",
    "gpt_oss",
    "jamba",
    "gemma4_text",
    "zamba2",
    "olmoe",
    "llava",
    "qwen2_5_omni_thinker",
    "nemotron_h",
    "molmo2",
]


@pytest.mark.parametrize("name", STORED)
def test_weights_that_were_not_trained_are_written_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Whatever the class makes of them when it loads them."""
    tiny = TINY[name]
    source = read_checkpoint(write_checkpoint(build(tiny, tiny.kv_counts[0]), tmp_path / "source"))
    model = load_model(str(source.directory), dtype="float32")
    check_exportable(model, source)
    (tmp_path / "out").mkdir()
    tensor_of = result_tensors(model, model.state_dict(), source)
    TrainedCheckpoint(source, tensor_of).write_weights(tmp_path / "out")
    before, after = load(tmp_path / "source"), load(tmp_path / "out")
    assert shapes(before) == shapes(after)
    assert all(tensor_bytes(before[key]) == tensor_bytes(after[key]) for key in before)


def test_odd_sources(tmp_path: Path) -> None:
    """Several dtypes, a tied head that is stored twice, and tensors that the class does not read;
    as a `.bin` too.
    """
    source = tiny_checkpoint(tmp_path / "source", "llama+tied")
    tensors = {name: t if "norm" in name else t.bfloat16() for name, t in load(source).items()}
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4.0)}
    for kind in ("model.safetensors", "pytorch_model.bin"):
        rewrite(source, tensors, kind)
        trained(options_for(source, tmp_path / kind))
        after = load_file(tmp_path / kind / "model.safetensors")
        assert shapes(after) == shapes(tensors)
        assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
        assert not torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        assert torch.equal(after[name], tensors[name])
        # There is no card to go on with
        assert (tmp_path / kind / "README.md").read_text().count("\n# ") == 1
    assert difference(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin") == 0


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out loss falls with every step, so that the last weights are written whatever the
    rate is.
    """
    losses = ({"kl": loss, "cross_entropy": loss} for loss in count(9, -1))
    use_validation_losses(monkeypatch, losses)


def attention_of(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Stored names of tiny models in attention modules, and those that hold keys or values."""
    inside = {
        name
        for name, _ in model.named_parameters()
        if ".self_attn." in name or ".self_attention." in name
    }
    parts = ("k_proj", "v_proj", "qkv_proj", "query_key_value")
    return inside, {name for name in inside if any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *((name, "kv") for name in ("phi3", "falcon", "qwen2")),
        *((name, scope) for name in ("phi3", "qwen2_vl") for scope in ("attention", "lora")),
    ],
)
@pytest.mark.usefixtures("falling")
def test_a_scope_trains_exactly_its_weights(tmp_path: Path, name: str, scope: str) -> None:
    """Separate, fused, fused by group, with biases, under other names than are stored."""
    source = tiny_checkpoint(tmp_path / "source", name, dtype="bfloat16")
    _, changed = train(source, tmp_path / "out", train=scope, learning_rate=0.05, weight_decay=1.0)
    assert changed
    model = load_model(str(source))
    inside, kv = attention_of(model)
    stored = {
        key.replace("model.language_model.", "model.")
        for key in (inside if scope == "attention" else kv)
    }
    if scope == "lora":
        linear = {
            f"{key}.weight" for key, m in model.named_modules() if isinstance(m, torch.nn.Linear)
        }
        stored |= {
            key.replace("model.language_model.", "model.")
            for key in linear
            if key != "lm_head.weight"
        }
        stored = {key for key in stored if "visual" not in key}
    assert changed == stored


def test_merged_adapters_are_the_adapted_model(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")
    given = options_for(source, tmp_path / "out", train="lora", lora_rank=4, learning_rate=0.05)
    setup = prepare(given)
    uptrain(setup)
    plain, written = load_model(str(source)), load_model(str(tmp_path / "out"))
    with torch.no_grad():
        adapted, *others = (
            model.eval()(input_ids=torch.arange(20, 60)[None], use_cache=False).logits
            for model in (setup.model, written, plain)
        )
    errors = [float((logits - adapted).abs().max() / adapted.abs().max()) for logits in others]
    assert errors[0] < 1e-5
    assert errors[1] > 1e-2


@pytest.mark.parametrize("scope", ["all", "lora"])
def test_the_held_out_loss_is_that_of_what_is_written(tmp_path: Path, scope: str) -> None:
    """In bfloat16 most of small steps is rounded away.

    A second run measures the written file before it trains.
    """
    source = tiny_checkpoint(tmp_path / "source", "llama+tied", dtype="bfloat16")
    given: dict[str, Any] = {
        "validation_tokens": 512,
        "learning_rate": 2e-4,
        "train": scope,
        "steps": 4,
    }
    progress, _ = trained(options_for(source, tmp_path / "out", **given))
    again, _ = trained(options_for(tmp_path / "out", tmp_path / "again", **given | {"steps": 1}))
    assert progress.lowest_validation == pytest.approx(again.first_validation, abs=1e-6)


@pytest.mark.parametrize("scope", ["all", "lora"])
def test_measuring_changes_no_training(tmp_path: Path, scope: str) -> None:
    """The weights that train come back after those that would be stored were measured.

    A constant rate is not lowered, whatever is measured.
    """
    source = tiny_checkpoint(tmp_path / "source", dtype="bfloat16")
    given: dict[str, Any] = {"train": scope, "steps": 4, "schedule": "constant"}
    for every in (1, 4):
        trained(options_for(source, tmp_path / f"{every}", eval_every=every, **given))
    assert losses(tmp_path / "1") == losses(tmp_path / "4")


ADAPTED = ["phimoe", "falcon_h1", "llama4_text", "nemotron_h", "glm4_moe", "zamba"]


@pytest.mark.usefixtures("falling")
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_on_routers_mixers_experts_and_shared_layers(tmp_path: Path, name: str) -> None:
    """Layers that return tuples or are read without being called stay as they are."""
    source = tiny_checkpoint(tmp_path / "source", name)
    _, changed = train(source, tmp_path / "out", train="lora", validation_tokens=64)
    assert [key for key in changed if "_proj" in key]
    assert not [
        key
        for key in changed
        if "router" in key or "mamba.out_proj" in key or "mixer.out_proj" in key
    ]


def test_records_and_cards_of_a_chain(place: Path, tmp_path: Path) -> None:
    """Conversion, training, more training: each says what it was made from, and cards do not grow
    with every step.
    """
    source = tiny_checkpoint(tmp_path / "source", kv_heads=4, dtype="bfloat16")
    (source / "README.md").write_text(
        "---\nlicense: mit\ntags:\n- mine\n- a: 1\nmodel-index:\n- name: x\n  results: "
        "[]\n---\n\n# Source\n\nBy "
        "me.\n"
    )
    convert_checkpoint(source, 2, tmp_path / "converted", method="mean")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    words = [
        f"{tmp_path}/converted",
        "--data",
        f"{place}/data.jsonl,{place}/b",
        f"--teacher={source}",
        f"-o{first}",
    ]
    given = options_for(
        words[0], first, alpha=0.1, steps=None, validation_tokens=256, teacher=str(source)
    )
    _, record = trained(given, argv=words)
    written = json.loads((first / "gqa_uptraining.json").read_text())
    assert written.pop("files") == sorted(path.name for path in first.iterdir())
    assert record == written
    assert record["argv"] == ["converted", "--data", "data.jsonl,b", "--teacher=source", "-ofirst"]
    assert record["model"] == "converted"
    assert record["teacher"] == "source"
    assert record["data"] == ["data.jsonl"]
    assert str(tmp_path) not in json.dumps(record)
    text, losses = (first / "README.md").read_text(), record["losses"]
    summary = (
        "`source` with 2 instead of 4 key/value heads (`gqa-convert`, method `mean`), then "
        "distilled from the base"
    )
    assert (
        f"{summary} model (`gqa-uptrain`): {record['tokens']:,} tokens of `data.jsonl` in " in text
    )
    assert (
        f"| cross-entropy | {losses['validation_before']:.4f} | {losses['validation_after']:.4f} |"
        in text
    )
    assert text.index("# first") < text.index("### Source\n\nBy me.")
    assert "license: mit" in text
    assert "- gqa-uptrain" in text
    assert "model-index" not in text
    for before, after in ((first, second), (second, third)):
        trained(options_for(before, after))
        record = json.loads((after / "gqa_uptraining.json").read_text())
        assert record["trained_before"]["tool"] == "gqa-uptrain"
        assert record["conversion"]["tool"] == "gqa-convert"
    sizes = [len((out / "README.md").read_text()) for out in (second, third)]
    assert abs(sizes[0] - sizes[1]) < 10
    convert_checkpoint(third, 1, tmp_path / "again", method="mean")  # is not what was trained
    assert (
        len([*third.glob("gqa_uptraining*")])
        > len([*(tmp_path / "again").glob("gqa_uptraining*")])
        == 0
    )


@pytest.mark.parametrize("scope", ["attention", "kv"])
def test_a_weight_that_is_named_as_an_adapter_trains_in_no_other_scope(
    tmp_path: Path, scope: Scope
) -> None:
    """Only `lora` adds adapters: with others it is a weight of the model outside attention."""
    source = tiny_checkpoint(tmp_path / "source")
    model = load_model(str(source))
    model.lora_gate = torch.nn.Linear(2, 2)
    freeze_parameters(model, read_checkpoint(source), scope)
    names = trained_names(model)
    assert any(name.endswith("k_proj.weight") for name in names)
    assert not any("lora_" in name for name in names)


def test_models_that_cannot_be_trained_so(tmp_path: Path) -> None:
    """A class that would store other tensors, linear layers that are none, and a projection that is
    not one tensor.
    """
    source = tiny_checkpoint(tmp_path / "source")
    model = load_model(str(source))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(7, 32))
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        RefusedError,
        match=r"would store extra\.bias, extra\.weight, lm_head\.weight differently from",
    ):
        check_exportable(model, read_checkpoint(source))
    gpt2 = tiny_checkpoint(tmp_path / "gpt2", "gqa_gpt2")
    with pytest.raises(
        RefusedError, match="GQAGPT2LMHeadModel has no other linear layers to adapt; use"
    ):
        prepare(options_for(gpt2, tmp_path / "out", train="lora"))
    molmo2 = read_checkpoint(write_checkpoint(build(TINY["molmo2"], 2), tmp_path / "molmo2"))
    with pytest.raises(RefusedError, match="cannot train alone; use --train all"):
        attention_parameters(load_model(str(molmo2.directory)), molmo2)


def test_numbers_that_cannot_be_stored(tmp_path: Path) -> None:
    """A weight that is too large for its dtype, and an adapter that is not finite."""
    source = read_checkpoint(tiny_checkpoint(tmp_path / "source", dtype="float16"))
    model = load_model(str(source.directory), dtype="float32")
    weights = model.state_dict()
    weights["model.norm.weight"][3] = 1e6
    (tmp_path / "out").mkdir()
    writer = TrainedCheckpoint(source, result_tensors(model, weights, source))
    with pytest.raises(OutputError, match=r"model\.norm\.weight has become too large for F16"):
        writer.write_weights(tmp_path / "out")
    weights = {"a.base_layer.weight": torch.ones(3, 2), "a.lora_A.default.weight": torch.ones(4, 2)}
    weights |= {"a.lora_B.default.weight": torch.full((3, 4), torch.inf)}
    with pytest.raises(OutputError, match="the adapter of a is not finite"):
        merge_adapters(weights)
