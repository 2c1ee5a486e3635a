"""Serving engines as clients: each continues a prompt greedily and returns tokens and
log-probabilities.

Each prepares a checkpoint by its own command (docs/serving.md), in this process: another would
import torch anew.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 32
TOP = 10
SCRIPT = "convert_hf_to_gguf.py"


class Answer(NamedTuple):
    """Greedy tokens and the log-probabilities (steps, V) they were chosen from, NaN where an engine
    returns none.
    """

    tokens: list[int]
    log_probs: Tensor


def transformers(checkpoint: Path, prompt: list[int]) -> Answer:
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Answer(
        output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).log_softmax(-1)
    )


def ctranslate2(checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
    import ctranslate2

    run_main(
        "ctranslate2.converters.transformers",
        "--model",
        checkpoint,
        "--output_dir",
        work,
        "--trust_remote_code",
    )
    pieces = AutoTokenizer.from_pretrained(checkpoint).convert_ids_to_tokens(prompt)
    engine = ctranslate2.Generator(
        os.fspath(work), device="cpu", compute_type="float32", intra_threads=1
    )
    options = {
        "max_length": STEPS,
        "sampling_topk": 1,
        "end_token": [],
        "include_prompt_in_result": False,
    }
    result = engine.generate_batch([pieces], return_logits_vocab=True, **options)[0]
    rows = torch.stack([torch.from_numpy(np.array(row)) for row in result.logits[0]])
    return Answer(result.sequences_ids[0], rows.log_softmax(-1))


def onnxruntime(checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
    import onnxruntime_genai

    words = (
        "-i",
        checkpoint,
        "-o",
        work,
        "-c",
        work / "cache",
        "-p",
        "fp32",
        "-e",
        "cpu",
        "--extra_options",
    )
    run_main("onnxruntime_genai.models.builder", *words, "hf_remote=true")
    model = onnxruntime_genai.Model(os.fspath(work))
    settings = onnxruntime_genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(prompt) + STEPS, do_sample=False)
    engine = onnxruntime_genai.Generator(model, settings)
    engine.append_tokens(prompt)
    tokens, rows = [], []
    while len(tokens) < STEPS and not engine.is_done():
        rows.append(
            torch.from_numpy(np.array(engine.get_logits())).flatten(0, -2)[-1].log_softmax(-1)
        )
        engine.generate_next_token()
        tokens.append(int(engine.get_next_tokens()[0]))
    return Answer(tokens, torch.stack(rows))


def llama_cpp(checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
    """With a cache in float32 and plain attention.

    Its defaults, float16 and flash attention, are 2e-3 off.

    The converter stops at a BPE tokenizer whose hash it does not know. For families that it gives
    no SentencePiece vocabulary ours is called a plain one: prompts here are ids, not text.
    """
    import xllamacpp

    work.mkdir()
    directory, file = Path(sys.prefix) / "llama.cpp", work / "model.gguf"
    with mock.patch.object(
        sys, "path", [os.fspath(directory), os.fspath(directory / "gguf-py"), *sys.path]
    ):
        base = importlib.import_module("conversion.base")
        with mock.patch.object(base.TextModel, "get_vocab_base_pre", return_value="default"):
            run_main(directory / SCRIPT, checkpoint, "--outfile", file, "--outtype", "f32")
    settings = xllamacpp.CommonParams()
    settings.model.path = os.fspath(file)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 512, 1, False, -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {
        "prompt": prompt,
        "n_predict": STEPS,
        "temperature": 0.0,
        "n_probs": TOP,
        "cache_prompt": False,
    }
    steps = xllamacpp.Server(settings).handle_completions(request)["choices"][0]["logprobs"][
        "content"
    ]
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    rows = torch.full((len(steps), config["vocab_size"]), torch.nan)
    for row, step in zip(rows, steps, strict=True):
        for entry in step["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    return Answer([step["id"] for step in steps], rows)


class Engine(NamedTuple):
    """`tolerance` is how far its log-probabilities may be from transformers', in nats."""

    answer: Callable[[Path, Path, list[int]], Answer]
    tolerance: float


ENGINES = {
    "CTranslate2": Engine(ctranslate2, 1e-5),
    "onnxruntime-genai": Engine(onnxruntime, 2e-5),
    "llama.cpp": Engine(llama_cpp, 1e-4),
}


def run_main(program: str | Path, *words: object) -> None:
    """`python -m MODULE WORDS` or `python SCRIPT WORDS` in this process, silently.

    Raises what the program raises.
    """
    run = runpy.run_path if isinstance(program, Path) else runpy.run_module
    with mock.patch.object(sys, "argv", [str(program), *map(str, words)]), quiet():
        try:
            run(str(program), run_name="__main__")
        except SystemExit as error:
            if error.code:
                raise RuntimeError(f"exit code {error.code}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what libraries print and log."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
