"""Multi-head, grouped-query and multi-query attention of one Llama-3-8B layer on this machine.

    python benchmarks/attention.py                                # about three minutes on two cores
    python benchmarks/attention.py --dtype bfloat16 --batch 16 --json figures.json

forward: a whole prompt through attention, projections included, as Yue Shui measured it in January 2025 on two RTX 4090
(syhya.github.io/posts/2025-01-16-group-query-attention). decode: one new token over a long KV cache by number of KV
heads, as in figure 6 of GQA (arXiv 2305.13245).

The functions are transformers' own. `grouped` is sdpa without a mask (enable_gqa); `repeated` is eager, which expands
keys and values to all heads first. A ratio is the median over rounds of the time by that of multi-head attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from harness import JSON_OPTION, write_json
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

PATHS = {"grouped": sdpa_attention_forward, "repeated": eager_attention_forward}
HIDDEN, HEADS, HEAD_DIM = 4096, 32, 128
PUBLISHED = {(512, 8): 0.77, (512, 1): 0.71, (1024, 8): 0.84, (1024, 1): 0.79, (1536, 8): 0.87, (1536, 1): 0.84}


class Attention(nn.Module):
    """What transformers' functions expect of a module with `groups` KV heads."""

    is_causal = True

    def __init__(self, groups: int, like: Tensor) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // groups
        rows = [HEADS * HEAD_DIM, groups * HEAD_DIM, groups * HEAD_DIM, HIDDEN]
        self.weights = [like.new_empty(n, HIDDEN).normal_(0, HIDDEN**-0.5) for n in rows]
        self.eval()

    def attend(self, path: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, H, T, d) queries to (B, G, S, d) keys and values."""
        output: Tensor = PATHS[path](self, query, key, value, mask, scaling=HEAD_DIM**-0.5)[0]
        return output

    def prompt(self, path: str, x: Tensor, mask: Tensor) -> Tensor:
        """All tokens of x (B, T, D) attend to those before them."""
        heads = [linear(x, w).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in self.weights[:3]]
        return linear(self.attend(path, *heads, mask if path == "repeated" else None).flatten(2), self.weights[3])


@torch.inference_mode()
def measure(runs: dict[tuple[str, int], Callable[[], Tensor]], rounds: int) -> list[dict[str, Any]]:
    """A row for each (path, KV heads), with the ratio of its time to that of 32 KV heads."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    outputs = {key: run() for key, run in runs.items()}
    for (_, groups), output in outputs.items():
        torch.testing.assert_close(output, outputs["repeated", groups], rtol=0.05, atol=0.05)
    for _ in range(rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds[key].append(time.perf_counter() - start)
    return [
        {
            "path": path, "groups": groups, "seconds": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, seconds[path, HEADS], strict=True)),
        }
        for (path, groups), taken in seconds.items()
    ]  # fmt: skip


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--length", "lengths", type=int, multiple=True, default=(512, 1024, 1536), help="Of a prompt.")
@click.option("--keys", default=2048, help="Tokens in the cache.")
@click.option("--batch", default=8, help="Of decoding; prompts are one at a time.")
@click.option("--repeats", default=10)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@JSON_OPTION
def main(lengths: tuple[int, ...], keys: int, batch: int, repeats: int, dtype: str, json_file: Path | None) -> None:
    torch.manual_seed(0)
    like = torch.empty(0, dtype=getattr(torch, dtype), device=torch.accelerator.current_accelerator() or "cpu")
    rows = []
    for length in lengths:
        x, runs = like.new_empty(1, length, HIDDEN).normal_(), dict[tuple[str, int], Callable[[], Tensor]]()
        mask = like.new_full((length, length), torch.finfo(like.dtype).min).triu(1)[None, None]
        for groups in (HEADS, 8, 1):
            module = Attention(groups, like)
            runs |= {(path, groups): partial(module.prompt, path, x, mask) for path in PATHS}
        rows += [{"what": "forward", "tokens": length, **row} for row in measure(runs, repeats)]
    query, runs = like.new_empty(batch, HEADS, 1, HEAD_DIM).normal_(), {}
    for groups in (HEADS, 16, 8, 4, 2, 1):
        key, value = (like.new_empty(batch, groups, keys, HEAD_DIM).normal_() for _ in range(2))
        runs |= {(path, groups): partial(Attention(groups, like).attend, path, query, key, value) for path in PATHS}
    rows += [{"what": "decode", "tokens": keys, **row} for row in measure(runs, repeats)]
    for row in rows:
        known = PUBLISHED.get((row["tokens"], row["groups"])) if row["what"] == "forward" else None
        print("{what:8}{tokens:6} tokens  {path:9}{groups:3} KV heads{seconds:9.4f} s  x{ratio:.2f}".format(**row)
              + (f"  published x{known}" if known else ""))  # fmt: skip
    write_json(rows, json_file)


if __name__ == "__main__":
    main()
