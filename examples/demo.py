"""Convert the embedded checkpoint to 2 key/value heads and look at both with plain transformers.

    make demo

Every number is computed here and now: the KV cache on transformers' own cache object, the loss on modules of the
standard library that the checkpoint was never trained on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from gqa.convert import convert_checkpoint, plan_conversion
from gqa.convert.summary import size
from gqa.corpus.stdlib import stdlib_documents

SOURCE = Path(__file__).parent / "stdlib-mha"
PROMPT = 'def read_lines(path):\n    """'
CONTEXT = 512


def heldout_windows(tokenizer: PreTrainedTokenizerBase, count: int) -> torch.Tensor:
    """`count` windows of held-out source, evenly spread over all of it. Shape (count, CONTEXT)."""
    ids = [
        i
        for d in stdlib_documents("heldout")
        for i in [*tokenizer(d.text, verbose=False)["input_ids"], tokenizer.eos_token_id]
    ]
    windows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return windows[torch.linspace(0, len(windows) - 1, count).long()]


@torch.no_grad()
def loss(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Mean nats per token; the first token of each window is not scored."""
    nats, tokens = 0.0, 0
    for batch in windows.split(4):
        logits = model(input_ids=batch).logits[:, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        tokens += batch[:, 1:].numel()
    return nats / tokens


@torch.no_grad()
def cache_bytes(model: PreTrainedModel, tokens: torch.Tensor) -> int:
    """Bytes that one sequence really takes in transformers' cache."""
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens[:1], past_key_values=cache, use_cache=True)
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.no_grad()
def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    given = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--model", type=Path, default=SOURCE)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows of 512 tokens")
    parser.add_argument("--output", type=Path, help="keep the result here (default: thrown away)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.output or Path(scratch) / f"{args.model.name}-gqa{args.groups}"
        start = time.perf_counter()
        plan = plan_conversion(args.model, args.groups)
        convert_checkpoint(args.model, args.groups, out, overwrite=True)
        print(
            f"{args.model.name} -> {out.name}: {plan.config.main.kv} to {args.groups} key/value heads, "
            f"converted and verified in {time.perf_counter() - start:.1f} s\n"
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        windows = heldout_windows(tokenizer, args.windows)
        print(f"{'':24}{'KV heads':>9}{'KV cache, 512 tokens':>22}{'held-out loss (nats/token)':>28}")
        texts = {}
        for directory in (args.model, out):
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
            cached = size(cache_bytes(model, windows))
            scored = loss(model.float(), windows)
            print(f"{directory.name:24}{model.config.num_key_value_heads:>9}{cached:>22}{scored:>28.3f}")
            texts[directory.name] = continuation(model, tokenizer)
    for name, text in texts.items():
        print(f"\n--- {name} continues ---\n{text}")
    print(
        "\nAveraging heads (mean pooling) saves the memory and costs the quality seen above; training a little further "
        "is the second half of the recipe."
    )


if __name__ == "__main__":
    main()
