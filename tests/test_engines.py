"""Notes on serving engines: shown where a limit is met and only there. `make test-serving` tests the limits."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import llama, run

from gqa.checkpoint.custom_code import MODEL_TYPES
from gqa.convert.heads.config import read_config
from gqa.convert.heads.engines import LIMITS, engine_notes
from gqa.convert.heads.families.table import FAMILIES
from gqa.convert.heads.kv_cache import kv_cache


def notes(model_type: str, kv: int = 2, **changes: Any) -> tuple[str, ...]:
    """Of a model with 8 query heads of dimension 4 and the default rope_theta; `changes` to that, `...` for absent."""
    raw = {
        "model_type": model_type, "num_attention_heads": 8, "num_key_value_heads": kv, "hidden_size": 32, "head_dim": 4,
        "num_hidden_layers": 2, "rope_theta": 10000.0,
    } | changes  # fmt: skip
    config = read_config({key: value for key, value in raw.items() if value is not ...}, "m")
    return engine_notes(config, kv_cache(config, range(2), "F32"))


ORDINARY = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "stablelm", "olmo2")
BIGCODE: dict[str, Any] = {"n_head": 8, "n_embd": 32}
FALCON: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": ...}
PHI = "llama.cpp: its converter gives phi as many KV heads as query heads, so it cannot load the result"
CACHED = "transformers caches 8 heads a layer, other engines only the 2 key/value heads"


NO_LAYERS = "CTranslate2, onnxruntime-genai: they know no model whose layers have different numbers of KV heads"
BPE = "llama.cpp: its converter refuses the result if the tokenizer is BPE without byte fallback"
LLAMA_3 = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 64}}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options", "starts"),
    [
        ("gqa_llama", {}, (NO_LAYERS, BPE)),
        ("gqa_llama", {"vocab_size": 128_256}, (NO_LAYERS,)),
        ("gqa_llama", {"vocab_size": 128_256} | LLAMA_3, (NO_LAYERS, "llama.cpp: its converter cannot read the tok")),
        ("llama", LLAMA_3, ()),
        ("gqa_qwen2", {}, (NO_LAYERS, "llama.cpp: of models whose layers have different numbers of KV heads it knows")),
        *((name, {"kv": kv}, ()) for name in ORDINARY for kv in (2, 8)),
        ("phi", {}, (PHI,)),
        ("phi", {"kv": 8}, ()),
        ("gpt_bigcode", BIGCODE | {"multi_query": True}, ()),
        ("gpt_bigcode", BIGCODE | {"multi_query": False}, ("llama.cpp: its converter gives gpt_bigcode one KV head",)),
        ("llama", {"head_dim": 8}, ("CTranslate2",)),
        ("qwen2", {"head_dim": 8}, ("llama.cpp", "CTranslate2")),
        *((name, {"head_dim": 8}, ()) for name in ("mistral", "qwen3", "gemma")),
        ("falcon", FALCON, (CACHED,)),
        ("falcon", FALCON | {"rope_theta": 5e5}, ("llama.cpp", "CTranslate2", CACHED)),
        # Engines load the text part of a larger model with another loader than the plain model.
        ("llava", {"text_config": {"model_type": "qwen2", "hidden_size": 32, "head_dim": 8}}, ()),
    ],
)
def test_which_limits_are_met(model_type: str, options: dict[str, Any], starts: tuple[str, ...]) -> None:
    found = notes(model_type, **options)
    assert len(found) == len(starts), found
    assert all(note.startswith(start) for note, start in zip(found, starts, strict=True)), found


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "stablelm"])
@pytest.mark.parametrize("form", ["rope_theta", "rope_parameters"])
def test_rope_theta(model_type: str, form: str) -> None:
    """As transformers 4 and as transformers 5 write it."""
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6}
    found = notes(model_type, **{form: changes[form]})
    assert f"llama.cpp: its converter does not write the rope_theta of {model_type}: " in found[0]
    assert all(note.endswith("it computes with 10000, not 1000000") for note in found)
    engines = [note.partition(":")[0] for note in found]
    assert engines == (["llama.cpp"] if model_type == "stablelm" else ["llama.cpp", "CTranslate2"])


def test_limits_name_model_types_that_can_be_converted() -> None:
    supported = {model_type for family in FAMILIES for model_type in family.model_types}
    assert {model_type for limit in LIMITS for model_type in limit.model_types} <= supported | MODEL_TYPES


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_command_shows_them(words: list[str], tmp_path: Path) -> None:
    """Not as warnings: nothing is wrong with the result."""
    expected = "CTranslate2: its loader knows no head_dim of llama but hidden_size / heads: it refuses or misreads 4"
    model = llama(tmp_path / "m", hidden_size=64, head_dim=4)
    shown = run("--groups", 2, "--method", "mean", "-o", tmp_path / "out", *words, model)
    assert (shown.code, shown.err) == (0, "")
    assert f"\nnote        {expected}\n" in shown.said
    record = json.loads(run("--groups", 2, "--method", "mean", "-o", tmp_path / "out2", "--json", *words, model).out)
    assert record["engine_notes"] == [expected]
    assert record["warnings"] == []
    plain = run("--groups", 2, "--method", "mean", "-o", tmp_path / "out3", *words, llama(tmp_path / "plain"))
    assert "note" not in plain.out
