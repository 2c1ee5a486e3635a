"""`make test-serving`: serving engines must agree with transformers on converted checkpoints.

Every engine continues a prompt by 32 greedy tokens. They must be those of transformers (float32,
sdpa), and the log-probabilities of the ten most probable tokens of each step must be as near as the
engine's arithmetic allows. The same comparison must reject a checkpoint whose key/value heads are
swapped. What docs/models.md says an engine refuses or misreads is checked too, so that a new
version which does better is noticed. Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer

from gqa.convert.api import convert_checkpoint
from serving.clients import ENGINES, STEPS, TOP, Answer, quiet, transformers
from serving.models import EMBEDDED, HEADS, swap_heads, write_random

PROMPT = 'import os\n\n\ndef read_lines(path):\n    """Return all lines of the file'
FAR = 1000  # times the tolerance: what a wrong checkpoint must be off at least


# Equal tokens, and log-probabilities within this tolerance (0: the engine's own); or an error that
# contains this text; or None: it runs and computes something else.
Expected = float | str | None
AGREES, MISREADS = 0.0, None
GELU = 3e-3  # llama.cpp looks GELU up in a table of float16 numbers
NO_HEAD_DIM = "axis 2 has dimension"
NO_BUILDER = "is not currently supported"
NO_LOADER = "No conversion is registered"
NOT_LOADED = "Failed to init server"

# Model, G and what each engine does with it (docs/models.md); an engine without a loader for the
# family is left out.
CASES: tuple[tuple[str, int | str, dict[str, Expected]], ...] = (
    (EMBEDDED.name, 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    (EMBEDDED.name, 1, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    (
        "Llama, head_dim 64",
        2,
        {"CTranslate2": NO_HEAD_DIM, "onnxruntime-genai": AGREES, "llama.cpp": AGREES},
    ),
    ("Mistral", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Qwen2", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    (
        "Qwen2, head_dim 64",
        2,
        {"CTranslate2": NO_HEAD_DIM, "onnxruntime-genai": AGREES, "llama.cpp": NOT_LOADED},
    ),
    ("Qwen3", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": AGREES}),
    ("Gemma", 2, {"CTranslate2": AGREES, "onnxruntime-genai": AGREES, "llama.cpp": GELU}),
    (
        "Gemma, theta 1e5",
        2,
        {"CTranslate2": MISREADS, "onnxruntime-genai": AGREES, "llama.cpp": MISREADS},
    ),
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
    ("GPT-2", 1, {"CTranslate2": AGREES, "llama.cpp": GELU}),
    # Layers with different numbers of heads, the first of them with the fewest: no engine may go by
    # that.
    (
        EMBEDDED.name,
        "1,4,2,8,2,1",
        {"CTranslate2": NO_LOADER, "onnxruntime-genai": NO_BUILDER, "llama.cpp": AGREES},
    ),
    ("Llama, head_dim 64", "1,4", {"llama.cpp": AGREES}),
    ("Llama, scaled rotary", "1,4", {"llama.cpp": "has no attribute 'max_position_embeddings'"}),
    ("Llama, BPE", "1,4", {"llama.cpp": "Cannot find Llama BPE tokenizer"}),
    (
        "Qwen3",
        "1,4",
        {"CTranslate2": NO_LOADER, "onnxruntime-genai": NO_BUILDER, "llama.cpp": "exit code 1"},
    ),
)


def compare(
    name: str, checkpoint: Path, prompt: list[int], reference: Answer
) -> tuple[int, float] | Exception:
    """Number of leading tokens that equal transformers', and max |difference| of log-probabilities
    up to the first that does not, over the engine's ten most probable tokens of a step; or what the
    engine raises.
    """
    try:
        with quiet():
            answer = ENGINES[name].answer(
                checkpoint, checkpoint.with_name(f"{checkpoint.name}-{name}"), prompt
            )
    except Exception as error:
        return error
    pairs = zip(answer.tokens, reference.tokens, strict=False)
    equal = next(
        (step for step, (a, b) in enumerate(pairs) if a != b), min(len(answer.tokens), STEPS)
    )
    steps = min(equal + 1, len(answer.tokens))
    top = answer.log_probs[:steps].nan_to_num(nan=-torch.inf).topk(TOP).indices
    difference = (answer.log_probs - reference.log_probs[: len(answer.log_probs)])[:steps].gather(
        1, top
    )
    return equal, float(difference.abs().max())


def check(
    name: str, model: str, expected: Expected, outcome: tuple[int, float] | Exception
) -> bool:
    """Whether an engine does what is expected; prints a line."""
    tolerance = ENGINES[name].tolerance
    if isinstance(outcome, Exception):
        good = isinstance(expected, str) and expected in str(outcome)
        text = " ".join(f"{type(outcome).__name__}: {outcome}".split())[:80]
    else:
        equal, difference = outcome
        text = f"{equal:2}/{STEPS} tokens equal, max |Δ log p| {difference:.1e}"
        good = difference > FAR * tolerance if expected is MISREADS else False
        if isinstance(expected, float):
            good = equal == STEPS and difference < (expected or tolerance)
    verdict = (
        "" if good else "  FAILED: if the engine has changed, correct docs/models.md and CASES"
    )
    click.echo(f"{name:17} {model:36} {text}{verdict}")
    return good


def check_case(
    model: str, groups: int | str, expected: dict[str, Expected], prompt: list[int], work: Path
) -> int:
    """One model in all engines, and with its heads swapped, which no engine that agrees may accept;
    the failures.
    """
    source = EMBEDDED if model == EMBEDDED.name else write_random(model, work / "source")
    checkpoint, swapped = work / "converted", work / "swapped"
    heads = tuple(map(int, groups.split(","))) if isinstance(groups, str) else groups
    convert_checkpoint(source, heads, checkpoint, method="mean", dtype="float32")
    with quiet():
        reference = transformers(checkpoint, prompt)
    results = [
        check(name, f"{model}, G={groups}", what, compare(name, checkpoint, prompt, reference))
        for name, what in expected.items()
    ]
    if model == EMBEDDED.name and groups != 1:
        swap_heads(checkpoint, swapped)
        results += [
            check(
                name,
                f"heads swapped, G={groups}",
                MISREADS,
                compare(name, swapped, prompt, reference),
            )
            for name, what in expected.items()
            if what == AGREES
        ]
    return results.count(False)


def main() -> None:
    torch.set_num_threads(1)
    failures, prompt = 0, AutoTokenizer.from_pretrained(EMBEDDED)(PROMPT)["input_ids"]
    for model, groups, expected in CASES:
        with tempfile.TemporaryDirectory() as work:
            failures += check_case(model, groups, expected, prompt, Path(work))
    packages = ("transformers", "ctranslate2", "onnxruntime-genai", "xllamacpp")
    click.echo(
        ", ".join(
            [f"{failures} failures", *(f"{package} {version(package)}" for package in packages)]
        )
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
