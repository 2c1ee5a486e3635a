"""Whether `--method auto` is ever worse than another method that looks at weights alone: a table of perplexity ratios.

    python benchmarks/auto.py                        # tiny models of several classes, trained here
    python benchmarks/auto.py --kind qwen3 --kind phi --steps 400
    python benchmarks/auto.py --kind none --model examples/stdlib-mha

The tiny models learn Python's standard library as `examples/pretrain.py` does, with the embedded tokenizer; `--model`
adds others. A ratio is the perplexity of the conversion by that of its base model, on the same held-out windows.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click
from harness import EMBEDDED, JSON_OPTION, write_json
from quality import nats, windows_of

COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 64, "query_pre_attn_scalar": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {}, "gemma2": {}, "gemma3_text": {}, "phi": {}, "olmo2": {}, "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 176},
}  # fmt: skip
METHODS = ("mean", "first", "procrustes", "aligned", "auto")
BATCH, CONTEXT = 16, 128  # of training


def optimizers(model: Any) -> list[Any]:
    """Muon for the matrices of layers, AdamW for the rest."""
    import torch

    outside = ("embed", "head", "wte", "wpe")
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not any(word in n for word in outside)]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(kind: str, out: Path, steps: int) -> Path:
    """A tiny model of one class; its rate falls linearly to zero after 40 % of the steps."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from gqa.corpus.sources import parse_source
    from gqa.corpus.tokens import Blocks, tokenise

    out.mkdir()
    for file in EMBEDDED.glob("*token*"):
        shutil.copyfile(file, out / file.name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(COMMON | KINDS[kind]))).float().train()
    found = optimizers(model)

    def rate(step: int) -> float:
        return min((step + 1) / 10, 1, (1 - step / steps) / 0.6)

    schedules = [torch.optim.lr_scheduler.LambdaLR(one, rate) for one in found]
    tokens = tokenise(parse_source("stdlib:train"), AutoTokenizer.from_pretrained(str(out)))
    blocks = Blocks(tokens, np.random.default_rng(0).permutation(len(tokens)), CONTEXT)
    order, start = np.random.default_rng(0).permutation(len(blocks)), time.perf_counter()
    for step in range(steps):
        rows = [int(order[(step * BATCH + row) % len(order)]) for row in range(BATCH)]
        ids = torch.stack([torch.from_numpy(blocks[row]["input_ids"]) for row in rows])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(found, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    print(f"{kind}: {model.num_parameters():,} parameters, {time.perf_counter() - start:.0f} s", flush=True)
    model.save_pretrained(out)
    return out


def measure(model: Path, options: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """A row for each number of heads: what `auto` took, and each method's ratio."""
    from gqa.convert import convert_checkpoint

    windows = windows_of(options["text"], str(model), options["windows"], options["length"])
    source, rows = nats(model, windows), []
    for groups in options["groups"]:
        row: dict[str, Any] = {"model": model.name, "perplexity": math.exp(source), "groups": groups}
        for method in METHODS:
            made = convert_checkpoint(model, groups, scratch / "made", method=method, dtype="float32", overwrite=True)
            row[method] = math.exp(nats(made.out, windows) - source)
        rows.append(row | {"taken": made.plan.method})
        ratios = " | ".join(f"{row[method]:.3f}" for method in METHODS)
        print(f"| {model.name} ({math.exp(source):.1f}) | {groups} | {ratios} ({made.plan.method}) |", flush=True)
    return rows


def of_models(
    measure: Callable[[Path, dict[str, Any], Path], list[Any]], kinds: Sequence[str], models: Sequence[Path],
    options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """The rows of every model that is trained, of `kinds` (none for none), and of every one that is there."""
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        trained = (train(kind, scratch / kind, options["steps"]) for kind in kinds if kind != "none")
        return [row for model in chain(trained, models) for row in measure(model, options, scratch)]


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--kind", "kinds", type=click.Choice((*KINDS, "none")), multiple=True, default=tuple(KINDS))
@click.option("--model", "models", type=click.Path(exists=True, path_type=Path), multiple=True, help="Others as well.")
@click.option("--groups", type=int, multiple=True, default=(4, 2, 1), help="Several times for several.")
@click.option("--steps", type=int, default=400, help="Of training, 2,048 tokens each.")
@click.option("--text", default="stdlib:heldout", help="To measure on, as for quality.py.")
@click.option("--windows", type=int, default=128)
@click.option("--length", type=int, default=128, help="Tokens of a window.")
@JSON_OPTION
def main(json_file: Path | None, kinds: tuple[str, ...], models: tuple[Path, ...], **options: Any) -> None:
    print(f"| model (perplexity) | KV heads | {' | '.join(METHODS)} |\n|---|---|{'---|' * len(METHODS)}")
    write_json(of_models(measure, kinds, models, options), json_file)


if __name__ == "__main__":
    main()
