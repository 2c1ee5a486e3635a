"""Multi-head, grouped-query and multi-query attention on this machine, beside two published measurements.

    python benchmarks/attention.py                                # about three minutes on two cores
    python benchmarks/attention.py --batch 16 --repeats 20 --json figures.json

forward: a whole prompt through the attention of one Llama-3-8B layer, projections included, as Yue Shui measured it in
January 2025 on two RTX 4090 (syhya.github.io/posts/2025-01-16-group-query-attention). The batch size is not given
there, but the differences between the published memory figures are exactly those of 16 sequences in float32, split over
both GPUs and their memory added up: each holds the weights, and each K or V head takes batch x length x 128 numbers.

decode: one new token over a long KV cache by number of groups, as in figure 6 of GQA (arXiv 2305.13245; T5-XXL, 64
heads of 64, 2048 input tokens). The figure is of whole samples on TPUs and prints no numbers; read by eye, time is
flat from 1 to 8 groups and rises to about six times as much at 64. `layer` is `packed` with what a decoder step reads
besides, the projections and the feed-forward weights of one layer.

The attention functions are transformers' own. `grouped` is sdpa without a mask (enable_gqa), `packed` is sdpa with a
mask, where the queries of a group become rows of one query, and `repeated` is eager, which expands keys and values to
all heads first. Whoever measures that way can find grouped-query attention slower than multi-head attention. Every
round runs every variant once, one after another; a ratio is the median of the rounds' own ratios to multi-head.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from harness import JSON_OPTION, MIB, peak_from_here, write_json
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from gqa.eval.decode import clock

FLAT = 1.25  # a rise of at most this factor from 1 to 8 groups counts as flat
SURE = 0.75  # of the pairs of rounds must say the same
EXACT = 0.02  # memory saved may differ from what the shapes say by this part
NAMES = {32: "MHA", 8: "GQA-8", 1: "MQA"}
# Milliseconds and MB of MHA, GQA-8 and MQA by length.
PUBLISHED: dict[int, dict[int, tuple[float, float]]] = {
    512: {32: (53.0, 2706.4), 8: (40.9, 2322.3), 1: (37.4, 2210.3)},
    1024: {32: (102.1, 7314.4), 8: (85.6, 6738.3), 1: (80.8, 6570.3)},
    1536: {32: (168.8, 14354.4), 8: (147.6, 13586.3), 1: (141.5, 13362.3)},
}


@dataclass(frozen=True)
class Shape:
    """Of an attention layer; `wide` is that of the feed-forward part beside it."""

    hidden: int
    heads: int
    head_dim: int
    wide: int = 0


LLAMA = Shape(hidden=4096, heads=32, head_dim=128)
T5_XXL = Shape(hidden=4096, heads=64, head_dim=64, wide=10240)


def random_linear(rows: int, columns: int, like: Tensor) -> Tensor:
    scale: float = max(columns, 1) ** -0.5
    return torch.randn(rows, columns, dtype=like.dtype, device=like.device) * scale


class Weights:
    """Projections that do not depend on the number of groups, shared by all variants; `like` gives dtype and device."""

    def __init__(self, shape: Shape, like: Tensor) -> None:
        width = shape.heads * shape.head_dim
        self.query, self.output = random_linear(width, shape.hidden, like), random_linear(shape.hidden, width, like)
        self.gate, self.up = (random_linear(shape.wide, shape.hidden, like) for _ in range(2))
        self.down = random_linear(shape.hidden, shape.wide, like)


class Attention(nn.Module):
    """Attention with `groups` key/value heads, as transformers' functions expect a module to look."""

    def __init__(self, shape: Shape, groups: int, weights: Weights) -> None:
        super().__init__()
        self.shape, self.groups, self.weights = shape, groups, weights
        self.num_key_value_groups = shape.heads // groups
        rows = groups * shape.head_dim
        self.key, self.value = (random_linear(rows, shape.hidden, weights.query) for _ in range(2))
        self.eval()

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """From (batch, tokens, hidden) to (batch, heads, tokens, head_dim)."""
        return linear(x, weight).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def attend(self, path: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Queries (batch, H, tokens, d) to keys and values (batch, G, keys, d), by one of transformers' functions."""
        function = eager_attention_forward if path == "repeated" else sdpa_attention_forward
        given = None if path == "grouped" else mask
        out: Tensor = function(self, query, key, value, given, scaling=self.shape.head_dim**-0.5)[0]
        return out

    def prompt(self, path: str, x: Tensor, mask: Tensor) -> Tensor:
        """All tokens of `x` (batch, tokens, hidden) attend to those before them."""
        query, key, value = (self.heads(x, w) for w in (self.weights.query, self.key, self.value))
        return linear(self.attend(path, query, key, value, mask).flatten(2), self.weights.output)

    def layer(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """All that one layer does for one new token (batch, 1, hidden); its key and value are not appended."""
        query, _, _ = (self.heads(x, w) for w in (self.weights.query, self.key, self.value))
        attended = self.attend("packed", query, key, value, mask)
        x = x + linear(attended.flatten(2), self.weights.output)
        return x + linear(gelu(linear(x, self.weights.gate)) * linear(x, self.weights.up), self.weights.down)


@dataclass(frozen=True)
class Row:
    """One variant; the ratios are to multi-head attention on the same path, in every round."""

    path: str
    size: int  # tokens of the prompt, or keys in the cache
    groups: int
    seconds: float  # the median of the rounds
    fastest: float
    slowest: float
    ratio: float  # the median of `ratios`
    ratios: tuple[float, ...]
    peak_bytes: int | None = None  # weights, input and whatever the forward pass takes at once


Key = tuple[str, int]  # path, groups
Runs = Mapping[Key, Callable[[], Tensor]]


@torch.inference_mode()
def measure(runs: Runs, repeats: int, device: torch.device, size: int, heads: int, memory: bool = False) -> list[Row]:
    """Time every variant once a round, after a warm-up in which all paths must agree; memory is taken before."""
    outputs = {key: run() for key, run in runs.items()}
    for (path, groups), output in outputs.items():
        if path != "layer":
            torch.testing.assert_close(output, outputs["repeated", groups], rtol=0.05, atol=0.05)
    del outputs, output
    peaks = {key: peak_bytes(run, device) if memory else None for key, run in runs.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            start = clock(device)
            run()
            seconds[key].append(clock(device) - start)
    rows = []
    for (path, groups), taken in seconds.items():
        ratios = tuple(own / whole for own, whole in zip(taken, seconds[path, heads], strict=True))
        times = statistics.median(taken), min(taken), max(taken)
        rows.append(Row(path, size, groups, *times, statistics.median(ratios), ratios, peaks[path, groups]))
    return rows


def peak_bytes(run: Callable[[], Tensor], device: torch.device) -> int | None:
    """What a run takes above what is there before it; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else the run would take memory that was freed but kept
        peak = peak_from_here()
    except (OSError, AttributeError):
        return None
    run()
    return peak()


def forward(shape: Shape, lengths: Sequence[int], batch: int, repeats: int, like: Tensor) -> list[Row]:
    """Time and peak memory of the attention of whole prompts."""
    weights = Weights(shape, like)
    modules = {groups: Attention(shape, groups, weights) for groups in NAMES}
    rows = []
    for length in lengths:
        x = torch.randn(batch, length, shape.hidden, dtype=like.dtype, device=like.device)
        mask = torch.full((length, length), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
        mask = mask.triu(1)[None, None]
        runs: Runs = {
            (path, groups): partial(module.prompt, path, x, mask)
            for path in ("grouped", "repeated")
            for groups, module in modules.items()
        }
        for row in measure(runs, repeats, like.device, length, shape.heads, memory=True):
            held = x.nbytes + 2 * weights.query.nbytes + 2 * modules[row.groups].key.nbytes
            peak = None if row.peak_bytes is None else row.peak_bytes + held
            rows.append(replace(row, peak_bytes=peak))
        click.echo(f"forward, {length} tokens: measured", err=True)
    return rows


def decode(shape: Shape, keys: int, batch: int, repeats: int, like: Tensor) -> list[Row]:
    """Time of one decode step by number of groups."""
    weights = Weights(shape, like)
    x = torch.randn(batch, 1, shape.hidden, dtype=like.dtype, device=like.device)
    query = torch.randn(batch, shape.heads, 1, shape.head_dim, dtype=like.dtype, device=like.device)
    mask = torch.zeros(1, 1, 1, keys, dtype=like.dtype, device=like.device)
    runs: dict[Key, Callable[[], Tensor]] = {}
    for groups in (1 << i for i in range(shape.heads.bit_length())):
        module = Attention(shape, groups, weights)
        key, value = (
            torch.randn(batch, groups, keys, shape.head_dim, dtype=like.dtype, device=like.device) for _ in range(2)
        )
        for path in ("grouped", "packed", "repeated"):
            runs[path, groups] = partial(module.attend, path, query, key, value, mask)
        runs["layer", groups] = partial(module.layer, x, key, value, mask)
    rows = measure(runs, repeats, like.device, keys, shape.heads)
    click.echo(f"decode, {keys} keys: measured", err=True)
    return rows


@dataclass(frozen=True)
class Claim:
    """What a publication found, and whether the numbers measured here say the same; None where they are too noisy."""

    text: str
    path: str
    holds: bool | None
    numbers: str


def rising(rows: Sequence[Row]) -> bool | None:
    """Whether the ratio rises from row to row: for every step, in how many pairs of rounds it does."""
    shares = [
        statistics.mean(low < high for low, high in product(one.ratios, following.ratios))
        for one, following in pairwise(rows)
    ]
    if all(share >= SURE for share in shares):
        return True
    return False if min(shares) <= 1 - SURE else None


def by_path(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {path: [row for row in rows if row.path == path] for path in dict.fromkeys(row.path for row in rows)}


def forward_claims(rows: Sequence[Row], batch: int, itemsize: int) -> list[Claim]:
    claims = []
    for path, own in by_path(rows).items():
        lengths = sorted({row.size for row in own})
        ordered = [sorted((r for r in own if r.size == length), key=lambda r: r.groups) for length in lengths]
        judged = [rising(part) for part in ordered]
        holds = False if False in judged else None if None in judged else True
        shown = "; ".join(f"{mqa.ratio:.2f}, {gqa.ratio:.2f}, 1" for mqa, gqa, _ in ordered)
        claims.append(Claim("time: MQA < GQA-8 < MHA at every length", path, holds, shown))
        gqa = [part[1] for part in ordered]
        shown = ", ".join(f"{row.ratio:.2f}" for row in gqa)
        if len(gqa) > 1:
            claims.append(Claim("time: the longer the prompt, the less GQA-8 gains", path, rising(gqa), shown))
        if all(row.peak_bytes for row in own):
            claims.append(memory_claim(path, ordered, batch, itemsize))
    return claims


def memory_claim(path: str, ordered: Sequence[Sequence[Row]], batch: int, itemsize: int) -> Claim:
    """GQA-8 has 24 key and 24 value heads less: their rows of the weights, and their activations."""
    numbers = 2 * 24 * LLAMA.head_dim
    saved = [(mha.peak_bytes or 0) - (gqa.peak_bytes or 0) for _, gqa, mha in ordered]
    meant = [itemsize * numbers * (LLAMA.hidden + batch * part[0].size) for part in ordered]
    shown = ", ".join(f"{s / MIB:.0f} of {m / MIB:.0f} MiB" for s, m in zip(saved, meant, strict=True))
    holds = all(abs(s - m) <= EXACT * m for s, m in zip(saved, meant, strict=True))
    return Claim("memory: GQA-8 saves weights and activations of 24 K and V heads", path, holds, shown)


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for path, own in by_path(rows).items():
        ratios = {row.groups: row.ratio for row in own}
        rise = ratios[8] / ratios[1]
        claims.append(Claim(f"1 to 8 groups: flat (x {FLAT} at most)", path, rise <= FLAT, f"x {rise:.2f}"))
        tail = [row for row in own if row.groups >= 8]
        shown = ", ".join(f"{row.ratio:.2f}" for row in tail)
        claims.append(Claim("from 8 groups on: rising to MHA", path, rising(tail), shown))
    return claims


def published_ratio(length: int, groups: int, what: int) -> str:
    figures = PUBLISHED.get(length)
    return f"{figures[groups][what] / figures[32][what]:.2f}" if figures else "-"


def report(
    figures: Mapping[str, Any], rows: Mapping[str, Sequence[Row]], claims: Mapping[str, Sequence[Claim]]
) -> None:
    print(", ".join(f"{key} {value}" for key, value in figures.items()))
    print(f"\n{'forward':10}{'length':>7}{'':>7}{'median':>10}{'min - max':>19}", end="")
    print(f"{'of MHA':>8}{'published':>11}{'peak MiB':>10}{'of MHA':>8}{'published':>11}")
    whole = {(row.path, row.size): row.peak_bytes for row in rows["forward"] if row.groups == LLAMA.heads}
    for row in rows["forward"]:
        peak, reference = row.peak_bytes, whole[row.path, row.size]
        memory = f"{peak / MIB:10.0f}{peak / reference:8.2f}" if peak and reference else ""
        print(
            f"{row.path:10}{row.size:7}{NAMES[row.groups]:>7}{row.seconds * 1e3:8.1f}ms"
            f"{row.fastest * 1e3:9.1f} -{row.slowest * 1e3:6.1f}ms{row.ratio:8.2f}"
            f"{published_ratio(row.size, row.groups, 0):>11}{memory:>18}{published_ratio(row.size, row.groups, 1):>11}"
        )
    print(f"\n{'decode':10}{'groups':>7}{'median':>12}{'min - max':>20}{'of MHA':>8}")
    for row in sorted(rows["decode"], key=lambda row: row.path):
        print(
            f"{row.path:10}{row.groups:7}{row.seconds * 1e3:10.2f}ms"
            f"{row.fastest * 1e3:10.2f} -{row.slowest * 1e3:6.2f}ms{row.ratio:8.2f}"
        )
    for name, made in claims.items():
        print(f"\n{name}: does this machine agree with what was published?")
        for claim in made:
            verdict = {True: "agrees", False: "DIFFERS", None: "unclear"}[claim.holds]
            print(f"  {verdict:9}{claim.path:10}{claim.text}: {claim.numbers}")
    print("\nIs anything with fewer KV heads slower than multi-head attention?")
    for name, part in rows.items():
        for path, own in by_path(part).items():
            fewer = [row.ratio for row in own if row.groups < max(r.groups for r in own)]
            slower = f"{sum(ratio > 1 for ratio in fewer)} of {len(fewer)} are"
            print(f"  {name + ', ' + path:20}{slower}; they take {min(fewer):.2f} to {max(fewer):.2f} of its time")


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--sequence", "lengths", type=int, multiple=True, default=(512, 1024, 1536), help="Tokens of a prompt.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Prompts at a time.")
@click.option("--keys", type=click.IntRange(1), default=2048, help="Tokens in the cache of a decode step.")
@click.option("--decode-batch", type=click.IntRange(1), default=8, help="Sequences of a decode step.")
@click.option("--repeats", type=click.IntRange(1), default=5, help="Rounds; of decode steps twice as many.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32")
@click.option("--device", help="Default: a GPU where there is one.")
@JSON_OPTION
def main(
    lengths: tuple[int, ...], batch: int, keys: int, decode_batch: int, repeats: int, dtype: str, device: str | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    like = torch.empty(0, dtype=getattr(torch, dtype), device=place)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else f"{platform.machine()} processor",
        "threads": torch.get_num_threads(), "dtype": dtype, "batch": batch, "decode batch": decode_batch,
        "keys": keys, "rounds": repeats, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    rows = {
        "forward": forward(LLAMA, lengths, batch, repeats, like),
        "decode": decode(T5_XXL, keys, decode_batch, 2 * repeats, like),
    }
    claims = {
        "forward (Yue Shui, 2025)": forward_claims(rows["forward"], batch, like.itemsize),
        "decode (GQA, figure 6)": decode_claims(rows["decode"]),
    }
    report(figures, rows, claims)
    made = {key: [asdict(item) for item in part] for key, part in (rows | claims).items()}
    write_json(figures | made, json_file)


if __name__ == "__main__":
    main()
