"""The README's picture: how many times the base model's perplexity conversions have, by the rows of a study and by what
`gqa-eval --json` says of a published model and its conversions.

python benchmarks/front.py docs/study docs/smollm2.json -o docs/front.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

# Grey text on no background: readable on white and on black.
GREY = "#808080"
DISTILLED = "refined, distilled"
COLOURS = {"mean": "#c44e52", "aligned": "#dd8452", "calibrated": "#4c72b0", "refined": "#55a868", DISTILLED: "#8172b3"}


def ratios(rows: list[dict[str, Any]], method: str) -> dict[int, float]:
    """Perplexity by that of the base model, by the number of heads; distilled is what was trained longest."""
    cells = [r for r in rows if r["method"] == method.partition(",")[0] and r["kv_share"] < 1 and not r["error"]]
    alpha = max(r["alpha"] or 0 for r in cells) if method == DISTILLED else 0
    return {r["groups"]: r["perplexity_ratio"] for r in cells if (r["alpha"] or 0) == alpha}


def study(axes: Any, rows: list[dict[str, Any]]) -> None:
    shares = {r["groups"]: 1 / r["kv_share"] for r in rows if r["kv_share"] < 1}
    heads = sorted(shares, reverse=True)
    axes.set_yscale("log")
    for method, colour in COLOURS.items():
        by_heads = ratios(rows, method)
        axes.plot(range(len(heads)), [by_heads[g] for g in heads], "o-", color=colour, linewidth=2)
        last, offset = by_heads[heads[-1]], (9, -6 if method == DISTILLED else 3)
        axes.annotate(f"{method}  x{last:.3g}", (len(heads) - 1, last), xytext=offset, textcoords="offset points",
                      color=colour, va="center")  # fmt: skip
    axes.set(ylabel="perplexity, of the base model's", xlim=(-0.2, len(heads) + 0.1), ylim=(0.9, 24))
    axes.set_title("embedded model, 5.8M parameters, 8 KV heads", fontsize=11)
    axes.set_xticks(range(len(heads)), [f"{g} KV heads\ncache {shares[g]:.0f}x smaller" for g in heads])
    axes.set_yticks([1, 2, 5, 10, 20], ["x1", "x2", "x5", "x10", "x20"])


def published(axes: Any, models: list[dict[str, Any]]) -> None:
    """The first is the base model; the others are in the order of `COLOURS`."""
    base, *perplexities = [model["quality"]["token_perplexity"] for model in models]
    heights = [perplexity / base for perplexity in perplexities]
    axes.set_yscale("log")
    for number, (colour, ratio) in enumerate(zip(COLOURS.values(), heights, strict=True)):
        axes.plot([number, number], [1, ratio], color=colour, linewidth=2)
        axes.plot([number], [ratio], "o", color=colour)
        axes.annotate(f"x{ratio:,.3g}" if ratio < 100 else f"x{ratio:,.0f}", (number, ratio), xytext=(0, 8),
                      textcoords="offset points", color=colour, ha="center")  # fmt: skip
    axes.set(xlim=(-0.6, len(heights) - 0.4), ylim=(0.85, 3 * max(heights)))
    axes.set_title("SmolLM2-135M-Instruct, 3 KV heads to 1", fontsize=11)
    axes.set_xticks(range(len(heights)), [name.replace(", ", ",\n") for name in COLOURS])
    axes.set_yticks([1, 10, 100, 1000], ["x1", "x10", "x100", "x1,000"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("published", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gqa", "font.size": 11, "text.color": GREY}
    figure, panels = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=(1.15, 1))
    study(panels[0], [json.loads(line) for line in (args.study / "results.jsonl").read_text().splitlines()])
    published(panels[1], json.loads(args.published.read_text())["models"])
    for axes in panels:
        axes.minorticks_off()
        axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
        axes.tick_params(colors=GREY)
        axes.yaxis.label.set_color(GREY)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    figure.tight_layout()
    figure.savefig(args.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
