"""`make test-serving`: serving engines must agree with transformers on converted checkpoints.

Every engine continues a prompt by 32 greedy tokens. They must be those of transformers (float32, sdpa), and the
log-probabilities of the ten most probable tokens of each step must be as near as the engine's arithmetic allows. The
same comparison must reject a checkpoint whose key/value heads are swapped. What docs/engines.md says an engine refuses
or misreads is checked too, so that a new version which does better is noticed. So are llama.cpp's quantised KV caches:
how far each is off. Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer

from serving.clients import ENGINES, STEPS, TOP, Answer, Client, LlamaCpp, Transformers, quiet
from serving.gguf_converter import ConverterError, gguf_converter
from serving.models import EMBEDDED, HEADS, convert, swap_heads, write_random

PROMPT = 'import os\n\n\ndef read_lines(path):\n    """Return all lines of the file'
FAR = 1000  # times the tolerance: what a wrong checkpoint must be off at least


# Equal tokens, and log-probabilities within this tolerance (0: the engine's own); or an error that contains this text;
# or None: it runs and computes something else.
Expected = float | str | None
AGREES, MISREADS = 0.0, None
GELU = 3e-3  # llama.cpp looks GELU up in a table of float16 numbers
NO_HEAD_DIM = "axis 2 has dimension"
NO_BUILDER = "is not currently supported"
NO_LOADER = "No conversion is registered"
NOT_LOADED = "Failed to init server"

# Model, G and what each engine does with it (docs/engines.md); an engine without a loader for the family is left out.
CASES: tuple[tuple[str, int | str, dict[str, Expected]], ...] = (
    (EMBEDDED.name, 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    (EMBEDDED.name, 1, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Llama, head_dim 64", 2, {"CTranslate2": NO_HEAD_DIM, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Mistral", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Qwen2", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Qwen2, head_dim 64", 2, {"CTranslate2": NO_HEAD_DIM, "onnxruntime-genai": AGREES, "llama.cpp": NOT_LOADED}),
    ("Qwen3", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Gemma", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": GELU}),
    ("Gemma, theta 1e5", 2, {"CTranslate2": MISREADS, "onnxruntime-genai": AGREES, "llama.cpp": MISREADS}),
    ("Phi", HEADS, {"llama.cpp": GELU}),
    ("Phi", 2, {"llama.cpp": NOT_LOADED}),
    ("Phi-3", 2, {"CTranslate2": "'type'", "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("StableLM", 2, {"llama.cpp": AGREES}),
    ("StableLM, theta 1e5", 2, {"llama.cpp": MISREADS}),
    ("OLMo 2", 2, {"llama.cpp": AGREES}),
    ("Granite", 2, {"onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Cohere", 2, {"llama.cpp": AGREES}),
    ("Falcon", 2, {"CTranslate2": AGREES, "llama.cpp": GELU}),
    ("Falcon, theta 1e5", 2, {"CTranslate2": MISREADS, "llama.cpp": MISREADS}),
    ("GPTBigCode", 1, {"CTranslate2": AGREES, "llama.cpp": GELU}),
    ("GPTBigCode", HEADS, {"llama.cpp": NOT_LOADED}),
    ("Pythia", HEADS, {"llama.cpp": GELU}),
    ("Pythia", 2, {"llama.cpp": NOT_LOADED}),
    ("RedPajama", 2, {"llama.cpp": GELU}),
    ("GPT-J", HEADS, {"llama.cpp": GELU}),
    ("GPT-2", 1, {"CTranslate2": AGREES, "llama.cpp": GELU}),
    # Layers with different numbers of heads, the first of them with the fewest: no engine may go by that.
    (EMBEDDED.name, "1,4,2,8,2,1", {"CTranslate2": NO_LOADER, "onnxruntime-genai": NO_BUILDER, "llama.cpp": AGREES}),
    ("Llama, head_dim 64", "1,4", {"llama.cpp": AGREES}),
    ("Llama, scaled rotary", "1,4", {"llama.cpp": "has no attribute 'max_position_embeddings'"}),
    ("Llama, BPE", "1,4", {"llama.cpp": "Cannot find Llama BPE tokenizer"}),
    ("Qwen3", "1,4", {"CTranslate2": NO_LOADER, "onnxruntime-genai": NO_BUILDER, "llama.cpp": "exit code 1"}),
)


def compare(answer: Answer, reference: Answer) -> tuple[int, float]:
    """Leading tokens that are equal, and max |difference| of log-probabilities in the steps that saw the same tokens.

    Of each step the engine's own ten most probable tokens: more than that not every engine tells.
    """
    pairs = zip(answer.tokens, reference.tokens, strict=False)
    equal = next((step for step, (a, b) in enumerate(pairs) if a != b), min(len(answer.tokens), STEPS))
    seen = min(equal + 1, len(answer.tokens))
    top = answer.log_probs[:seen].nan_to_num(nan=-torch.inf).topk(TOP).indices
    difference = (answer.log_probs - reference.log_probs[: len(answer.log_probs)])[:seen].gather(1, top)
    return equal, float(difference.abs().max())


def judge(expected: Expected, client: Client, outcome: tuple[int, float] | Exception) -> tuple[bool, str]:
    """Whether the outcome is the expected one, and what is said of it."""
    if isinstance(outcome, Exception):
        error = " ".join(str(outcome).split())[:80]
        if isinstance(expected, str) and expected in error:
            return True, f"refused, as documented: {error}"
        return False, f"FAILED: {type(outcome).__name__}: {error}"
    equal, difference = outcome
    figures = f"{equal:2}/{STEPS} tokens equal, max |Δ log p| {difference:.1e}"
    if isinstance(expected, float):
        allowed = expected or client.tolerance
        good = equal == STEPS and difference < allowed
        return good, figures if good else f"{figures}, FAILED: allowed is {allowed:.0e}"
    if expected is None and difference > FAR * client.tolerance:
        return True, f"{figures}, misread as documented"
    return False, f"{figures}, FAILED: not as docs/engines.md says any more; correct it and CASES"


def answers(
    checkpoint: Path, reference: Answer, prompt: list[int], names: dict[str, Expected]
) -> Iterator[tuple[Client, tuple[int, float] | Exception]]:
    """What each of the named engines makes of a checkpoint."""
    for client in ENGINES:
        if client.name in names:
            work = checkpoint.with_name(f"{checkpoint.name}-{client.name}")
            try:
                with quiet():
                    answer = client.answer(checkpoint, work, prompt)
                yield client, compare(answer, reference)
            except Exception as error:  # whatever an engine raises is what is to be judged
                yield client, error


def check_case(model: str, groups: int | str, expected: dict[str, Expected], prompt: list[int], work: Path) -> int:
    """One model in all engines; the number of failures."""
    source = EMBEDDED if model == EMBEDDED.name else write_random(model, work / "source")
    checkpoint = convert(source, groups, work / "converted")
    with quiet():
        reference = Transformers().answer(checkpoint, work, prompt)
    failures = 0
    for client, outcome in answers(checkpoint, reference, prompt, expected):
        good, text = judge(expected[client.name], client, outcome)
        failures += not good
        show(client, model, groups, text)
    if model == EMBEDDED.name and groups != 1:
        swapped = swap_heads(checkpoint, work / "swapped")
        agree = {name: what for name, what in expected.items() if isinstance(what, float)}
        for client, outcome in answers(swapped, reference, prompt, agree):
            rejected = not judge(AGREES, client, outcome)[0] and judge(MISREADS, client, outcome)[0]
            text = f"{outcome[0]:2}/{STEPS} equal, {outcome[1]:.1e}" if isinstance(outcome, tuple) else str(outcome)
            failures += not rejected
            verdict = "rejected, as it must be" if rejected else "FAILED: the check does not see it"
            show(client, "control, heads swapped", groups, f"{text}: {verdict}")
    return failures


# What llama.cpp stores keys and values as, and how many nats that is off at most; each is farther off than those above.
CACHES = (("F32", LlamaCpp.tolerance), ("Q8_0", 0.3), ("Q4_0", 3.0))


def check_caches(prompt: list[int], work: Path) -> int:
    """The embedded model with its own heads and KV caches of few bits; the number of failures."""
    with quiet():
        reference = Transformers().answer(EMBEDDED, work, prompt)
    failures, nearer = 0, 0.0
    for cache, bound in CACHES:
        client = LlamaCpp(cache)
        with quiet():
            equal, difference = compare(client.answer(EMBEDDED, work / cache, prompt), reference)
        good = 3 * nearer < difference < bound
        failures += not good
        verdict = "" if good else f", FAILED: allowed is {3 * nearer:.0e} to {bound:.0e}"
        text = f"{equal:2}/{STEPS} tokens equal, max |Δ log p| {difference:.1e}{verdict}"
        show(client, f"{EMBEDDED.name}, {cache}", HEADS, text)
        nearer = difference
    return failures


def show(client: Client, model: str, groups: int | str, text: str) -> None:
    click.echo(f"{client.name:17} {f'{client.package} {client.version}':24} {model:22} G={groups}  {text}")


def main() -> None:
    torch.set_num_threads(1)
    try:
        gguf_converter()
    except ConverterError as error:
        sys.exit(f"test-serving: {error}")
    start, failures = time.monotonic(), 0
    prompt = AutoTokenizer.from_pretrained(EMBEDDED)(PROMPT)["input_ids"]
    for model, groups, expected in CASES:
        with tempfile.TemporaryDirectory() as work:
            failures += check_case(model, groups, expected, prompt, Path(work))
    with tempfile.TemporaryDirectory() as work:
        failures += check_caches(prompt, Path(work))
    verdict = f"{failures} FAILED" if failures else "all as expected"
    click.echo(f"{verdict} in {time.monotonic() - start:.0f} s; reference: transformers {Transformers().version}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
