"""`gqa-eval` run in this process, on the embedded checkpoint, its conversions and a little text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from gqa.models.loading import cache_name
from support.checkpoints import Result, check_refused, edit_json, run
from support.embedded import SOURCE, converted, copy_source, texts
from support.patches import sample_at_once
from support.tiny_models import TINY, build
from support.training import scratch

# Why a test that runs lm_eval is skipped
NO_HARNESS = "lm-evaluation-harness is not installed beside the lowest versions"


@cache
def model_directory() -> Path:
    """Created once and not changed: stdlib-mha, gqa4 and gqa2, t5gemma (tiny, random), text.jsonl
    and text.txt.

    The embedded checkpoint and its conversions say that they have 512 positions, half of what they
    have: windows are as long as that where nothing else is asked for.
    """
    directory = scratch()
    for path in (
        copy_source(directory, SOURCE.name),
        converted(directory, 4),
        converted(directory, 2),
    ):
        edit_json(path / "config.json", lambda config: config.update(max_position_embeddings=512))
    rows = [{"text": text, "other": text[:40]} for text in texts(4, 1500)]
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "text.txt").write_text(texts(1)[0])
    tiny = TINY["t5gemma"]
    options = json.loads(json.dumps(dict(tiny.options)))
    for part in (options, options["encoder"], options["decoder"]):
        part["vocab_size"] = 4096
    with_tokenizer(build(dataclasses.replace(tiny, options=options), 4), directory / "t5gemma")
    return directory


@torch.inference_mode()
def cache_bytes(model: PreTrainedModel, tokens: int, batch: int) -> list[int]:
    """Bytes of transformers' cache for `batch` sequences of `tokens`: distinct storages of all
    layers' keys and values; for an encoder-decoder those of self- and of cross-attention, with
    sources as long as the targets.

    The last token is a decode step: right after a prefill a sliding-window layer holds views on the
    whole prompt.
    """
    ids = torch.randint(5, model.config.get_text_config(decoder=True).vocab_size, (batch, tokens))
    name, inputs, cache = cache_name(model), dict[str, Any](), None
    if model.config.is_encoder_decoder:
        inputs["encoder_outputs"] = model.get_encoder()(input_ids=ids, return_dict=True)
    for part in ids.split([tokens - 1, 1], dim=1):
        if part.shape[1]:
            inputs["decoder_input_ids" if "encoder_outputs" in inputs else "input_ids"] = part
            cache = model(**inputs, **{name: cache}, use_cache=True)[name]
    both = isinstance(cache, EncoderDecoderCache)
    sizes = []
    for half in [cache.self_attention_cache, cache.cross_attention_cache] if both else [cache]:
        tensors = [
            getattr(layer, part, None) for layer in half.layers for part in ("keys", "values")
        ]
        storages = [
            tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)
        ]
        sizes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    return sizes


def few_questions(patch: pytest.MonkeyPatch) -> None:
    """About the context, and few short texts that the model writes for them."""
    # Fewer questions are as good, and take a second
    patch.setattr("gqa.eval.recall.READ", 256)
    patch.setattr("gqa.eval.recall.SAMPLES", 12)
    patch.setattr("gqa.eval.recall.SAMPLE", 64)
    sample_at_once(patch, 12)


def with_tokenizer(model: Any, path: Path) -> Path:
    """A random model with the embedded checkpoint's tokenizer."""
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(SOURCE / name, path / name)
    return path


def words(line: str) -> list[str]:
    """SRC is the embedded checkpoint, G4 and G2 its conversions, T5 the encoder-decoder, TEXT
    text.jsonl.
    """
    directory = model_directory()
    names = {"SRC": SOURCE.name, "G4": "gqa4", "G2": "gqa2", "T5": "t5gemma", "TEXT": "text.jsonl"}
    return [
        str(directory / names[word]) if word in names else word.replace("PLACE", str(directory))
        for word in line.split()
    ]


def evaluate_models(line: str, *more: object) -> Result:
    """What `gqa-eval LINE` prints, with nothing on stderr."""
    result = run(*words(line), *more, program="gqa-eval")
    result.expect(err="")
    return result


def same_model(name: str) -> str:
    """The warning of a model that is compared with itself."""
    return f"warning: {name} is the same model as {name}: their quality cannot differ\n"


def results(line: str, *more: object, err: str = "") -> dict[str, Any]:
    """The one JSON object that --json puts on stdout, which is all that is there; `err` is all of
    stderr.
    """
    result = run(*words(line), *more, "--json", "-q", program="gqa-eval")
    result.expect(err=err)
    assert result.out.count("\n") == 1
    record = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(record, dict)
    return record


def refused(line: str, *more: object, code: int = 2) -> str:
    """The one line of a command that fails, which may come after what was measured before."""
    result = run(*words(line), *more, program="gqa-eval")
    *measured, last_line = result.err.splitlines(keepends=True)
    assert not measured or measured[0] == "measured so far:\n"
    failure = dataclasses.replace(result, err=last_line)
    message = check_refused(failure, code=code, program="gqa-eval", advice="")
    assert "please report" not in message
    return message
