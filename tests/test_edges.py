"""Unusual but sound checkpoints: accepted, converted right, and everything that need not change is
unchanged.
"""

import gc
import json
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bin_files import save_bin
from support.checkpoints import (
    DTYPES,
    INDEX,
    K0,
    MERGED,
    SIDE_FILES,
    V0,
    Tensors,
    check_refused,
    config,
    leftovers,
    llama,
    load,
    refusal,
    run,
    snapshot,
    tensor_bytes,
    weights,
)
from support.patches import forbid
from torch import Tensor

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import is_packed
from gqa.convert import rewrite
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.merge.layer import send
from gqa.core.errors import RefusedError
from gqa.models.loading import load_model


def merged(tensors: Tensors, kv: int, groups: int) -> Tensors:
    """What mean pooling must give, written down independently: the mean of neighboring heads,
    rounded once.
    """
    made = dict(tensors)
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            exact = tensor.double() if tensor.dtype is torch.float64 else tensor.float()
            heads = exact.reshape(groups, kv // groups, -1, *tensor.shape[1:])
            made[name] = (heads.sum(1) / (kv // groups)).flatten(0, 1).to(tensor.dtype)
    return made


def check_result(out: Path, expected: Tensors) -> None:
    """Names, dtypes, shapes and every byte; keys and values in float32 and float64 to a rounding
    error.
    """
    actual = load(out)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        if "k_proj" in name or "v_proj" in name:
            rounding = 0.0 if tensor.itemsize == 2 else 2 * torch.finfo(tensor.dtype).eps
            torch.testing.assert_close(actual[name], tensor, atol=0.0, rtol=rounding)
        else:
            assert tensor_bytes(actual[name]) == tensor_bytes(tensor), name


def convert(model: Path, *words: object, groups: int = 2) -> Path:
    """Converted, the source untouched, with no complaint but of tensors that the class does not
    read.
    """
    before, out = snapshot(model), model.parent / "out"
    result = run("--kv-heads", groups, "--method", "mean", "-o", out, *words, model)
    assert result.code == 0, result
    assert re.fullmatch(
        "(warning: transformers' LlamaForCausalLM does not read .*\n)?", result.complaints
    ), result
    assert snapshot(model) == before
    assert leftovers(model.parent) == []
    return out


@pytest.mark.parametrize(("dtype", "shards"), [*zip(DTYPES, (1, 3, 1, 3), strict=True)])
def test_every_dtype(dtype: str, shards: int, tmp_path: Path) -> None:
    """In 16 bits rounding the sum of four heads after each of them would show."""
    model = llama(tmp_path / "m", shards=shards, dtype=dtype)
    out = convert(model, groups=1)
    check_result(out, merged(weights(4, dtype), 4, 1))
    assert len(list(out.glob("*.safetensors"))) == shards
    assert (out / INDEX).exists() == (shards > 1)


def test_odd_tensors_are_copied(tmp_path: Path) -> None:
    """Empty, without dimensions, of odd size, integers and booleans, packed floats, buffers:
    wherever they lie.
    """
    at = "model.layers.1.self_attn"
    made = {
        "a.empty": torch.zeros(0, 5),
        "a.empty2": torch.zeros(3, 0, dtype=torch.int64),
        "a.scalar": torch.tensor(3.5),
        "a.bytes": torch.arange(7, dtype=torch.uint8),
        "a.flag": torch.tensor([True, False, True]),
        "a.count": torch.tensor(2**40),
        "ü name with spaces": torch.ones(1),
        "": torch.ones(2),
        **weights(),
        "z.empty": torch.zeros(0),
        "z.fp8": torch.ones(5).to(torch.float8_e4m3fn),
        f"{at}.rotary_emb.inv_freq": torch.ones(2),
        f"{at}.rotary_emb.cos_cached": torch.ones(3, 2),
        f"{at}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        f"{at}.masked_bias": torch.tensor(-1e9),
    }
    out = convert(llama(tmp_path / "m", shards=1, tensors=made))
    check_result(out, merged(made, 4, 2))


PACKINGS: dict[str, dict[str, Tensor]] = {
    "fp8": {
        "weight": torch.ones(16, 32).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(1, 1),
    },
    "compressed-tensors": {
        "weight_packed": torch.ones(16, 4, dtype=torch.int32),
        "weight_shape": torch.ones(2).long(),
        "weight_scale": torch.ones(16, 1).bfloat16(),
    },
    "mxfp4": {
        "weight_blocks": torch.ones(16, 1, 16, dtype=torch.uint8),
        "weight_scales": torch.ones(16, 1, dtype=torch.uint8),
        "weight_bias": torch.ones(16),
    },
}


@pytest.mark.parametrize("method", PACKINGS)
def test_attention_that_is_not_quantized_is_converted(method: str, tmp_path: Path) -> None:
    """What is quantized beside it is copied, and config.json goes on saying how it is."""
    made, key = weights(), {"quant_method": method, "modules_to_not_convert": ["self_attn"]}
    for name in [name for name in made if ".mlp." in name]:
        del made[name]
        made |= {name.removesuffix("weight") + end: part for end, part in PACKINGS[method].items()}
    model = llama(tmp_path / "m", shards=1, tensors=made, quantization_config=key)
    check_result(out := convert(model), merged(made, 4, 2))
    assert json.loads((out / "config.json").read_text())["quantization_config"] == key
    assert "cannot be run layer by layer: its other weights are quantized" in refusal(
        model, "--kv-heads", 2, "--method", "calibrated", "-o", tmp_path / "no"
    )
    words = ("--kv-heads", 2, "--method", "mean")
    assert "--dtype cannot be used because m has quantized weights" in refusal(
        model, *words, "--dtype", "float16"
    )
    assert run(*words, "--dry-run", model).code == 0


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "packed"),
    [
        ("gpt_neox.layers.0.attention.bias", "U8", (1, 1, 8, 8), False),
        ("transformer.h.0.attn.bias", "U8", (1, 1, 8, 8), False),
        ("model.layers.0.self_attn.q_proj.weight", "U8", (8, 8), True),
        ("model.layers.0.attention.dense.weight", "I8", (8, 8), True),
        ("model.layers.0.self_attn.q_proj.qweight", "I32", (8,), True),
        ("model.layers.0.self_attn.q_proj.bias", "U8", (8,), False),
    ],
)
def test_causal_masks_are_no_quantized_weights(
    name: str, dtype: str, shape: tuple[int, ...], packed: bool
) -> None:
    """Old checkpoints store them as bytes."""
    assert is_packed(TensorSpec(name, dtype, shape, "f", 0, 0)) == packed


@pytest.mark.parametrize("fails", [True, False])
def test_no_offloaded_weights_stay_of_a_model_that_is_gone(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if it cannot be loaded."""
    source = llama(tmp_path / "m", tensors=weights())
    if fails:
        (source / "config.json").write_text("{")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if fails:
        with pytest.raises(RefusedError):
            load_model(str(source), device="auto")
    else:
        model = load_model(str(source), device="auto")
        assert list(tmp_path.glob("gqa-offload-*"))
        del model
        gc.collect()
    assert not list(tmp_path.glob("gqa-offload-*"))


def test_a_tensor_that_stands_twice_is_sent_once() -> None:
    tensor = torch.ones(2)
    sent = send({"a": tensor, "b": (tensor, torch.ones(2))}, "meta")
    assert sent["a"] is sent["b"][0]
    assert sent["a"] is not sent["b"][1]
    assert sent["a"].is_meta


@pytest.mark.parametrize(
    ("path", "layer", "layer_path"),
    [
        ("model.layers.3.self_attn", 3, "model.layers.3"),
        ("model.language_model.layers.12.self_attn", 12, "model.language_model.layers.12"),
        ("transformer.h.0.attn", 0, "transformer.h.0"),
        # All of these count as the layer after the last
        ("model.mtp_block.0.self_attn", 28, "model.mtp_block.0"),
        ("mtp.layers.1.self_attn", 28, "mtp.layers.1"),
    ],
)
def test_the_names_of_a_layer_begin_with_its_own_number(
    path: str, layer: int, layer_path: str
) -> None:
    assert AttentionModule(path, layer, {}).layer_path == layer_path


@pytest.mark.parametrize(("name", "number"), [(K0, "nan"), (V0, "-inf")])
def test_heads_with_nan_and_inf_are_refused(name: str, number: str, tmp_path: Path) -> None:
    made = weights()
    made[name][5, 7] = float(number)
    assert f"{name} of m contains NaN or Inf" in refusal(
        llama(tmp_path / "m", tensors=made), *MERGED
    )


@pytest.mark.parametrize(("name", "number"), [("lm_head.weight", 1e6), (K0, 1e30)])
def test_what_a_cast_makes_infinite_is_seen_beside_what_was(
    name: str, number: float, tmp_path: Path
) -> None:
    """In copied and in merged tensors: nothing is published."""
    made = weights()
    made["lm_head.weight"][0, 0] = float("inf")
    model = llama(tmp_path / "m", tensors=made)
    assert run(*MERGED, "--dtype", "float16", "-o", tmp_path / "a", model).code == 0
    made[name][0, 1:] = number
    result = run(*MERGED, "--dtype", "float16", llama(tmp_path / "n", tensors=made))
    assert result.code != 0
    assert f"{name} has numbers too large for F16; pass another --dtype" in result.err
    assert not (tmp_path / "n-gqa2-mean").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_cast(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven numbers at a time, so that a tensor has several pieces and a last one that is
    shorter.
    """
    monkeypatch.setattr(rewrite, "CAST_CHUNK", 7)
    made = weights() | {"model.count": torch.arange(3), "model.empty": torch.zeros(0)}
    model = llama(tmp_path / "m", tensors=made, torch_dtype="float32")
    out = convert(model, "--dtype", dtype)
    target = getattr(torch, dtype)
    expected = {
        n: t.to(target) if t.is_floating_point() else t for n, t in merged(made, 4, 2).items()
    }
    check_result(out, expected)
    assert json.loads((out / "config.json").read_text()) == config(2, torch_dtype=dtype)


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_becomes_safetensors(shards: int, tmp_path: Path) -> None:
    """Tied, transposed, requiring gradients, 0-dim, empty: all that torch.save keeps of a plain
    tensor.
    """
    made = weights(dtype="F16") | {"a.scalar": torch.tensor(1.5), "a.empty": torch.zeros(0, 2)}
    made["lm_head.weight"] = made["model.embed_tokens.weight"]
    made["a.transposed"] = torch.arange(6.0).reshape(2, 3).T
    made["a.expanded"] = torch.ones(1).expand(4)
    made[V0] = made[V0].T.contiguous().T
    made["model.norm.weight"] = torch.nn.Parameter(made["model.norm.weight"])
    model = llama(tmp_path / "m", tie_word_embeddings=True)
    save_bin(model, made, shards)
    out = convert(model)
    check_result(out, merged(made, 4, 2))
    assert not list(out.glob("*.bin*"))
    assert len(list(out.glob("*.safetensors"))) == shards


def test_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers; the shards beside it are not what it loads."""
    model = llama(tmp_path / "m", shards=2, seed=1)
    llama(model, shards=1, seed=2)
    assert "warning: not copied" in run(*MERGED, "-o", tmp_path / "out", model).err
    check_result(tmp_path / "out", merged(weights(seed=2), 4, 2))


OLD_MODEL = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "params.json",
    "consolidated.safetensors",
    "onnx/config.json",
    "checkpoint-5/config.json",
    "checkpoint-5/model.safetensors",
    "checkpoint-6/trainer_state.json",
    "Modelfile",
    "original/params.json",
    "metal/settings.json",
    "metal/model.bin",
    "dense/model.safetensors",
    "model.onnx.data",
    "rank0.engine",
    "states/__0_0.distcp",
    "training_args.bin",
)
LOGS = ("training_log.jsonl", "trainer_log.jsonl")  # which no one misses in the result
MODULES = ("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/config.json")


def test_side_files_travel_unchanged_and_unread(tmp_path: Path) -> None:
    """Further modules travel with their weights; other forms of the old weights stay, and what
    describes them.
    """
    model = llama(tmp_path / "m", auto_map={"AutoModel": "modeling_mine.Model"})
    for name in (*OLD_MODEL, *LOGS, *MODULES, ".hidden"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(f"of {name}")
    (model / "README.md").write_text("a card without metadata")
    (model / "link.txt").symlink_to("assets/nested/vocab.txt")
    modules, out = set(sys.modules), tmp_path / "out"
    result = run(*MERGED, "-o", out, model)
    assert result.code == 0, result
    # Nothing of huggingface_hub
    assert all(line.startswith("warning: ") for line in result.err.splitlines())
    (warning,) = (
        line for line in result.err.splitlines() if line.startswith("warning: not copied")
    )
    assert set(warning.partition("weights: ")[2].split(", ")) == set(OLD_MODEL)
    assert "auto_map" in result.err
    assert not [name for name in set(sys.modules) - modules if "mine" in name]
    for name, content in (SIDE_FILES | {"link.txt": SIDE_FILES["assets/nested/vocab.txt"]}).items():
        assert (out / name).read_bytes() == content
        assert not (out / name).is_symlink()
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    made = {
        "config.json",
        INDEX,
        "README.md",
        "gqa_conversion.json",
        "link.txt",
        *SIDE_FILES,
        *MODULES,
    }
    assert names - {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)} == made


def pairs(path: Path) -> list[tuple[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list))


def test_only_the_changed_key_of_the_config_changes(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    out = convert(model)
    before, after = pairs(model / "config.json"), pairs(out / "config.json")
    assert [key for key, _ in after] == [key for key, _ in before]
    assert [pair for pair in after if pair not in before] == [("num_key_value_heads", 2)]
    absent = llama(tmp_path / "other" / "mha", kv=8, num_key_value_heads=...)
    assert pairs(convert(absent) / "config.json") == [
        *pairs(absent / "config.json"),
        ("num_key_value_heads", 2),
    ]


def test_modes_follow_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the product never sets, even to read it: other threads may write files of their own."""
    model = llama(tmp_path / "m")
    before = os.umask(mask := 0o027)
    try:
        with monkeypatch.context() as patch:
            forbid(patch, "os.umask", "it is set")
            out = convert(model)
    finally:
        os.umask(before)
    for path in (out, *out.rglob("*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("name", ["ünïcode 模型;'quote\"", "-dash", "new\nline", "%s{}"])
def test_names_of_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tmp_path / name, shards=1)
    assert run(*MERGED, f"{model}/").code == 0
    json.loads((tmp_path / f"{name}-gqa2-mean" / "gqa_conversion.json").read_text())
    monkeypatch.chdir(model)
    assert run("--kv-heads", 1, "--method", "mean", ".").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        name,
        f"{name}-gqa2-mean",
        f"{name}-gqa1-mean",
    }


def test_a_conversion_that_would_be_a_copy_is_refused(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    refusal = "m has 4 KV heads already, so the result would be a copy of it; pass 1 or 2"
    check_refused(run(model, "--kv-heads", 4), refusal)
    check_refused(run(model, "--kv-heads", 4, "--dry-run"), refusal)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    run(model, "--kv-heads", 4, "--dtype", "bfloat16").expect()


def test_as_many_heads_as_before_give_a_warning(tmp_path: Path) -> None:
    """Only the dtype changes, which somebody who mistyped a number would not expect."""
    model = llama(tmp_path / "m")
    done = run(model, "--kv-heads", 4, "--dtype", "bfloat16", "--dry-run")
    done.expect(
        out=None,
        err="warning: m has 4 KV heads already: no heads are merged, and the KV cache stays as "
        "large as it is\n",
    )
    assert "already" not in run(model, "--kv-heads", 2, "--method", "mean", "--dry-run").err
