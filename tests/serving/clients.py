"""Serving engines as clients: each takes a checkpoint and a prompt and gives greedy tokens and log-probabilities.

A checkpoint is prepared by the command that a user runs (docs/engines.md), but inside this process: importing torch and
transformers anew takes far longer than converting models this small.
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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from serving.gguf_converter import SCRIPT, gguf_converter

STEPS = 32
TOP = 10


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and the log-probabilities (steps, V) they were chosen from, NaN where an engine gives none."""

    tokens: list[int]
    log_probs: Tensor


class Client:
    """An engine. `tolerance` is how far its log-probabilities may be from transformers', in nats."""

    name: str
    package: str
    tolerance: float

    @property
    def version(self) -> str:
        return version(self.package)

    def answer(self, checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
        """Continue the prompt by STEPS tokens; `work` is a directory that does not exist yet."""
        raise NotImplementedError


class Transformers(Client):
    name, package, tolerance = "transformers", "transformers", 0.0

    @torch.no_grad()
    def answer(self, checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
        how = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": True}
        model = AutoModelForCausalLM.from_pretrained(checkpoint, **how).eval()
        tokens: list[int] = []
        rows, given, cache = [], prompt, None
        for _ in range(STEPS):
            output = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            rows.append(output.logits[0, -1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
            given, cache = tokens[-1:], output.past_key_values
        return Answer(tokens, torch.stack(rows))


class CTranslate2(Client):
    name, package, tolerance = "CTranslate2", "ctranslate2", 1e-5

    def answer(self, checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
        import ctranslate2

        words = ("--model", checkpoint, "--output_dir", work, "--trust_remote_code")
        run_main("ctranslate2.converters.transformers", *words)
        pieces = AutoTokenizer.from_pretrained(checkpoint).convert_ids_to_tokens(prompt)
        engine = ctranslate2.Generator(os.fspath(work), device="cpu", compute_type="float32", intra_threads=1)
        options = {"max_length": STEPS, "sampling_topk": 1, "end_token": [], "include_prompt_in_result": False}
        result = engine.generate_batch([pieces], return_logits_vocab=True, **options)[0]
        rows = torch.stack([torch.from_numpy(np.array(row)) for row in result.logits[0]])
        return Answer(result.sequences_ids[0], rows.log_softmax(-1))


class OnnxRuntime(Client):
    name, package, tolerance = "onnxruntime-genai", "onnxruntime-genai", 2e-5

    def answer(self, checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
        import onnxruntime_genai

        words = ("-i", checkpoint, "-o", work, "-c", work / "cache", "-p", "fp32", "-e", "cpu", "--extra_options")
        run_main("onnxruntime_genai.models.builder", *words, "hf_remote=true")
        model = onnxruntime_genai.Model(os.fspath(work))
        settings = onnxruntime_genai.GeneratorParams(model)
        settings.set_search_options(max_length=len(prompt) + STEPS, do_sample=False)
        engine = onnxruntime_genai.Generator(model, settings)
        engine.append_tokens(prompt)
        tokens, rows = [], []
        while len(tokens) < STEPS and not engine.is_done():
            rows.append(torch.from_numpy(np.array(engine.get_logits())).flatten(0, -2)[-1].log_softmax(-1))
            engine.generate_next_token()
            tokens.append(int(engine.get_next_tokens()[0]))
        return Answer(tokens, torch.stack(rows))


class LlamaCpp(Client):
    """With a cache in float32 and plain attention. Its defaults, float16 and flash attention, are 3e-3 off.

    cache: What keys and values are stored as, by ggml's names. It reads quantised values with flash attention alone.
    """

    name, package, tolerance = "llama.cpp", "xllamacpp", 1e-4

    def __init__(self, cache: str = "F32") -> None:
        self.cache = cache

    def answer(self, checkpoint: Path, work: Path, prompt: list[int]) -> Answer:
        import xllamacpp

        work.mkdir()
        write_gguf(checkpoint, work / "model.gguf")
        settings = xllamacpp.CommonParams()
        settings.model.path = os.fspath(work / "model.gguf")
        settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 512, 1, False, -1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.cache_type_k = settings.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{self.cache}")
        attention = "DISABLED" if self.cache == "F32" else "ENABLED"
        settings.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{attention}")
        engine = xllamacpp.Server(settings)
        request = {"prompt": prompt, "n_predict": STEPS, "temperature": 0.0, "n_probs": TOP, "cache_prompt": False}
        steps = engine.handle_completions(request)["choices"][0]["logprobs"]["content"]
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        rows = torch.full((len(steps), config["vocab_size"]), torch.nan)
        for row, step in zip(rows, steps, strict=True):
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
        return Answer([step["id"] for step in steps], rows)


ENGINES: tuple[Client, ...] = (CTranslate2(), OnnxRuntime(), LlamaCpp())


def write_gguf(checkpoint: Path, file: Path) -> None:
    """llama.cpp's converter, to float32.

    It tells BPE tokenizers apart by a hash of what they make of a text, and stops at one it does not know. For
    families that it gives no SentencePiece vocabulary ours is called a plain one: prompts here are ids, not text.
    """
    directory = gguf_converter()
    with mock.patch.object(sys, "path", [os.fspath(directory), os.fspath(directory / "gguf-py"), *sys.path]):
        base = importlib.import_module("conversion.base")
        with mock.patch.object(base.TextModel, "get_vocab_base_pre", return_value="default"):
            run_main(directory / SCRIPT, checkpoint, "--outfile", file, "--outtype", "f32")


def run_main(program: str | Path, *words: object) -> None:
    """`python -m MODULE WORDS` or `python SCRIPT WORDS` in this process, silently. Raises what the program raises."""
    with mock.patch.object(sys, "argv", [str(program), *map(str, words)]), quiet():
        try:
            if isinstance(program, Path):
                runpy.run_path(str(program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__")
        except SystemExit as left:
            if left.code:
                raise RuntimeError(f"exit code {left.code}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what libraries print and log."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
