"""Quantising before and after a conversion: the table of docs/quantising.md.

    make quantise

The embedded checkpoint and its conversion to 2 key/value heads go through llama.cpp's converter to GGUF (f32, f16,
q8_0), are read back by transformers, which dequantises them, and are compared with the float32 source on modules of the
standard library that it was never trained on. q4_0 is what GGUF's reference code makes of every matrix. What is
measured is the rounding of weights: an engine that multiplies quantised numbers rounds activations as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from serving.gguf_converter import SCRIPT, ConverterError, gguf_converter
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from gqa.convert import convert_checkpoint
from gqa.corpus.stdlib import stdlib_documents

SOURCE = Path(__file__).parents[1] / "examples" / "stdlib-mha"
CONTEXT = 512
OUTTYPES = ("f32", "f16", "q8_0")


def heldout_windows(count: int) -> Tensor:
    """`count` windows of held-out source, evenly spread over all of it. Shape (count, CONTEXT)."""
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    texts = [tokenizer(document.text, verbose=False)["input_ids"] for document in stdlib_documents("heldout")]
    ids = [token for text in texts for token in (*text, tokenizer.eos_token_id)]
    windows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return windows[torch.linspace(0, len(windows) - 1, count).long()]


def write_gguf(checkpoint: Path, outtype: str) -> Path:
    """The checkpoint's GGUF file, beside its weights."""
    file = checkpoint / f"{outtype}.gguf"
    command = [sys.executable, os.fspath(gguf_converter() / SCRIPT), os.fspath(checkpoint)]
    subprocess.run([*command, "--outfile", os.fspath(file), "--outtype", outtype], check=True, capture_output=True)
    return file


def load(checkpoint: Path, file: Path | None = None) -> PreTrainedModel:
    """In float32, from the safetensors weights or from a GGUF file beside them."""
    name = file.name if file else None
    return AutoModelForCausalLM.from_pretrained(checkpoint, gguf_file=name, dtype=torch.float32).eval()


def through_4_bits(checkpoint: Path, out: Path) -> Path:
    """The checkpoint with every matrix that has whole blocks of 32 in its rows quantised to q4_0 and dequantised."""
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.gguf"))
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            packed = quantize(tensor.float().numpy(), GGMLQuantizationType.Q4_0)
            tensors[name] = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q4_0))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def as_checkpoint(model: PreTrainedModel, like: Path, out: Path) -> Path:
    """A model's weights, dequantised as they are, in a copy of the checkpoint `like`."""
    shutil.copytree(like, out, ignore=shutil.ignore_patterns("*.gguf"))
    names = load_file(like / "model.safetensors")
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in names}, out / "model.safetensors", metadata={"format": "pt"})
    return out


@torch.no_grad()
def log_probs(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """(windows, CONTEXT - 1, V): the first token of each window is not scored."""
    return torch.stack([model(window[None]).logits[0, :-1].log_softmax(-1) for window in windows])


def kl_divergence(p: Tensor, q: Tensor) -> float:
    """Mean KL(P || Q) over all positions, in nats, without rounding errors below zero."""
    nats = sum(float((a.exp() * (a - b)).sum()) for a, b in zip(p, q, strict=True))
    return max(nats / p[..., 0].numel(), 0.0)


def variants(work: Path, groups: int) -> Iterator[tuple[str, str, int | None, PreTrainedModel]]:
    """(heads, weights, bytes of the file, model) of every row."""
    source = convert_checkpoint(SOURCE, 8, work / "source", dtype="float32", method="mean").out
    merged = convert_checkpoint(SOURCE, groups, work / "merged", dtype="float32", method="aligned").out
    for heads, checkpoint in (("8", source), (f"{groups}", merged)):
        for outtype in OUTTYPES:
            file = write_gguf(checkpoint, outtype)
            yield heads, outtype, file.stat().st_size, load(checkpoint, file)
        yield heads, "q4_0", None, load(through_4_bits(checkpoint, work / f"{checkpoint.name}-q4_0"))
    quantised = as_checkpoint(load(source, source / "q8_0.gguf"), source, work / "q8_0")
    early = convert_checkpoint(quantised, groups, work / "q8_0-merged", method="aligned").out
    file = write_gguf(early, "q8_0")
    yield f"8 -> {groups}", "q8_0, then q8_0", file.stat().st_size, load(early, file)
    early = convert_checkpoint(work / "source-q4_0", groups, work / "q4_0-merged", method="aligned").out
    yield f"8 -> {groups}", "q4_0, then q4_0", None, load(through_4_bits(early, work / "q4_0-twice"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--windows", type=int, default=16, help="held-out windows of 512 tokens")
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    windows = heldout_windows(args.windows)
    print("| KV heads | weights | GGUF file | perplexity | KL from source | KL from own float32 |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        source = log_probs(load(SOURCE), windows)
        for heads, weights, size, model in variants(Path(work), args.groups):
            found = log_probs(model, windows)
            if weights == "f32":
                own = found
            perplexity = -found.gather(-1, windows[:, 1:, None]).mean()
            figures = f"{perplexity.exp():.3f} | {kl_divergence(source, found):.1e} | {kl_divergence(own, found):.1e}"
            print(f"| {heads} | {weights} | {f'{size / 1e6:.1f} MB' if size else ''} | {figures} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConverterError as error:
        sys.exit(f"quantise: {error}")
