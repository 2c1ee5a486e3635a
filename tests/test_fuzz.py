"""Fuzzed configs and whole checkpoints: refused in our own words or read as others read them.

GQA_FUZZ=20 runs twenty times as many examples, and other ones each time.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.checkpoints import config, llama, weights

from gqa.checkpoint.read import Checkpoint, read_checkpoint
from gqa.convert.planning import make_plan
from gqa.core.errors import RefusedError, one_line

SCALE = int(os.environ.get("GQA_FUZZ", "1"))


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples * SCALE,
        deadline=None,
        database=None,
        derandomize=SCALE == 1,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )


NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]),
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["", "\ud800", "\0", "\n", "../x", "F32", "__metadata__", "{", "\x1b[2J"]),
)
JSON = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


TOKENS = [
    b"-0",
    b"1.0",
    b"1e0",
    b"NaN",
    b"Infinity",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'"\\ud800"',
    b"  ",
    b"\xef\xbb\xbf",
    b"99999999999999999999",
    b"\xff",
    b"a",
    b"F32",
    b",",
    b":",
    b"0",
    b"\0",
]


@st.composite
def mutated(draw: st.DrawFn, sound: bytes) -> bytes:
    """Some bytes replaced, removed or inserted."""
    raw = sound
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        removed = draw(st.integers(0, 4))
        raw = (
            raw[:at]
            + draw(st.one_of(st.binary(max_size=2), st.sampled_from(TOKENS)))
            + raw[at + removed :]
        )
    return raw


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(llama(tmp_path_factory.mktemp("fuzz") / "m", side_files=False))


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma2": {"head_dim": 4},
    "gemma4_text": {"num_global_key_value_heads": 2, "attention_k_eq_v": False},
    "mimo_v2_flash": {},
    "laguna": {"num_attention_heads_per_layer": [8, 4]},
    "diffllama": {},
    "llava": {"text_config": config()},
    "gemma3": {"text_config": config(model_type="gemma3_text")},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4},
    "gpt_bigcode": {"multi_query": False},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "n_heads": 8, "d_model": 32},
    "stablelm": {},
    "gpt2": {},
    "opt": {},
    "gqa_opt": {},
    "gqa_bart": {
        "d_model": 32,
        "decoder_attention_heads": 8,
        "decoder_layers": 2,
        "encoder_attention_heads": 8,
    },
}
KEYS = sorted(
    {key for extra in CONFIGS.values() for key in (*extra, *config())}
    | {
        "head_dim",
        "hidden_act",
        "initializer_range",
        "layers_block_type",
        "per_layer_config",
        "quantization_config",
        "auto_map",
        "torch_dtype",
        "dtype",
        "architectures",
        "num_kv_shared_layers",
        "rope_parameters",
        "rope_scaling",
        "max_position_embeddings",
        "attention_chunk_size",
        "use_sliding_window",
        "is_encoder_decoder",
        "id2label",
    }
)


@fuzz(300)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    st.booleans(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "bfloat16"]),
)
@example("mistral", {"num_kv_shared_layers": "0"}, False, 1, None)
@example("mistral", {"num_kv_shared_layers": [None]}, False, 1, None)
@example("mistral", {"initializer_range": ":"}, False, 1, None)
@example("llama", {"layer_types": [1, 2]}, False, 2, None)
@example("dbrx", {"num_hidden_layers": ""}, False, 1, None)
@example("llava", {"model_type": [[]]}, True, 1, None)
@example("gqa_opt", {"hidden_act": [[]]}, False, 1, None)
@example("dbrx", {"architectures": None, "dtype": []}, False, 1, None)
def test_configs(
    sound: Checkpoint,
    model_type: str,
    odd: dict[str, Any],
    below: bool,
    groups: int,
    dtype: str | None,
) -> None:
    """Any config beside sound tensors gives a plan or a refusal."""
    raw = json.loads(json.dumps(config(model_type=model_type, **CONFIGS[model_type])))
    part = raw["text_config"] if below and "text_config" in raw else raw
    part |= odd
    try:
        plan = make_plan(replace(sound, config=raw), groups, "mean", dtype=dtype)
    except RefusedError:
        return
    assert {t.name for t in plan.tensors} == weights().keys()
    assert plan.cache_after.bytes_per_token >= 0


@fuzz(400)
@given(st.data())
def test_mutated_checkpoints(sound: Checkpoint, data: st.DataObject) -> None:
    """One file of a checkpoint is damaged: refused in one line, or read as the format's library
    reads it, and planned.

    Also with the length of a header set right again, so that what follows is reached.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(shutil.copytree(str(sound.directory), name, dirs_exist_ok=True))
        victim = data.draw(st.sampled_from(sorted(directory.iterdir())))
        raw = victim.read_bytes()[: 8000 if victim.suffix != ".safetensors" else None]
        if victim.suffix == ".safetensors" and data.draw(st.booleans()):
            header, rest = raw[8 : (end := 8 + struct.unpack("<Q", raw[:8])[0])], raw[end:]
            header = data.draw(mutated(header))
            victim.write_bytes(struct.pack("<Q", len(header)) + header + rest)
        else:
            victim.write_bytes(data.draw(mutated(raw)))
        try:
            checkpoint = read_checkpoint(directory)
            for file in checkpoint.files:
                raw = (directory / file).read_bytes()
                ours = {
                    spec.name: {
                        "dtype": spec.dtype,
                        "shape": [*spec.shape],
                        "data": raw[spec.begin : spec.end],
                    }
                    for spec in checkpoint.tensors.values()
                    if spec.file == file
                }
                assert dict(safetensors.deserialize(raw)) == ours  # type: ignore[no-untyped-call]
            make_plan(checkpoint, 2, "mean")
        except RefusedError as error:
            line = one_line(str(error))
            assert len(line) < 1100
            assert line.isprintable()
