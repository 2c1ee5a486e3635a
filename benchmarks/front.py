"""Draw the README's picture: perplexity ratios of conversions, from what `gqa-eval --json` prints
for two published models.

python benchmarks/front.py docs/stories15m.json docs/smollm2.json -o docs/front.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

# Gray text on no background: readable on white and on black.
GRAY = "#808080"
METHODS = {"mean": "#c44e52", "aligned": "#dd8452", "calibrated": "#4c72b0", "refined": "#55a868"}
COLORS = METHODS | {"uptrained": "#8172b3"}
HIGHEST = 2.6  # what is higher is named in words: the rest would look all alike
LIMITS = (1.05, 1.5)  # of `good` and `trade-off`


def ratios(path: Path) -> dict[str, float]:
    """Perplexity divided by that of the base model, the first, by the name of each other model."""
    record = json.loads(path.read_text())
    perplexities = {
        model["name"]: model["quality"]["token_perplexity"] for model in record["models"]
    }
    base, *names = perplexities
    return {name: perplexities[name] / perplexities[base] for name in names}


def text(ratio: float) -> str:
    """A ratio as the tables have it: `x1.40`, `x12.2`, `x735`."""
    if ratio < 10:
        return f"x{ratio:.2f}"
    return f"x{ratio:,.3g}" if ratio < 100 else f"x{ratio:,.0f}"


def multi_head(axes: Any, ratio_of: dict[str, float]) -> None:
    """Models are named METHOD-HEADS.

    The title and the shares are those of stories15M, with 6 KV heads.
    """
    heads = (3, 2, 1)
    # Where the label of a point is: the curves lie close together.
    places = {
        "calibrated": [(0, 9), (0, 9), (0, 9)],
        "refined": [(-26, 0), (27, -9), (0, -17)],
        "uptrained": [(0, -17), (0, -17)],
    }
    for method, offsets in places.items():
        heights = [ratio_of[f"{method}-{g}"] for g in heads if f"{method}-{g}" in ratio_of]
        axes.plot(
            range(len(heights)), heights, "o-", color=COLORS[method], linewidth=2, label=method
        )
        for number, (height, offset) in enumerate(zip(heights, offsets, strict=True)):
            label(axes, number, height, offset, COLORS[method])

    axes.set(ylabel="perplexity ratio", xlim=(-0.75, len(heads) - 0.6))
    axes.set_title("stories15M, multi-head attention, 6 KV heads", fontsize=11)
    axes.set_xticks(
        range(len(heads)),
        [f"{g} KV head{'s' * (g > 1)}\ncache {6 / g:.0f}x smaller" for g in heads],
    )
    above = "\n".join(
        f"{method} " + ", ".join(text(ratio_of[f"{method}-{g}"]) for g in heads)
        for method in ("aligned", "mean")
    )
    axes.legend(title=f"higher:\n{above}", loc="upper left", frameon=False, alignment="left")


def grouped_query(axes: Any, ratio_of: dict[str, float]) -> None:
    """Models are named by their method, of `COLORS`."""
    shown = [method for method in COLORS if ratio_of[method] < HIGHEST]
    for number, method in enumerate(shown):
        ratio = ratio_of[method]
        axes.plot([number, number], [1, ratio], color=COLORS[method], linewidth=2)
        axes.plot([number], [ratio], "o", color=COLORS[method])
        label(axes, number, ratio, (0, 9), COLORS[method])

    above = [f"{method} {text(ratio_of[method])}" for method in COLORS if method not in shown]
    axes.text(0.02, 0.95, f"higher: {', '.join(above)}", transform=axes.transAxes, va="top")
    axes.set(xlim=(-0.5, len(shown) - 0.3))
    axes.set_title("SmolLM2-135M-Instruct, grouped-query attention, 3 KV heads to 1", fontsize=11)
    axes.set_xticks(range(len(shown)), shown)

    # The verdicts of docs/reading.md, beside the axes
    good, trade_off = LIMITS
    for verdict, height in (("damaged", 1.8), ("trade-off", (good + trade_off) / 2), ("good", 1.0)):
        axes.text(len(shown) - 0.25, height, verdict, va="center")


def label(axes: Any, x: float, ratio: float, offset: tuple[int, int], color: str) -> None:
    """Write a ratio beside its point."""
    axes.annotate(
        text(ratio), (x, ratio), xytext=offset, textcoords="offset points", color=color, ha="center"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("multi_head", type=Path)
    parser.add_argument("grouped_query", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gqa", "font.size": 11}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams |= dict.fromkeys(colors, GRAY)

    figure, panels = plt.subplots(1, 2, figsize=(11, 3.7), width_ratios=(1.15, 1))
    multi_head(panels[0], ratios(args.multi_head))
    grouped_query(panels[1], ratios(args.grouped_query))
    for axes in panels:
        axes.set(ylim=(0.83, HIGHEST))
        axes.set_yticks([1, 1.5, 2, 2.5], ["x1", "x1.5", "x2", "x2.5"])
        for height in LIMITS:
            axes.axhline(height, color=GRAY, linewidth=1, linestyle=":", zorder=0)
    figure.tight_layout()
    figure.savefig(args.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
