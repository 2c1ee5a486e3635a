"""Draw the README's picture: perplexity ratios of conversions, from what `gqa-eval --json` prints
for the example model and for a published one.

python benchmarks/front.py docs/embedded.json docs/smollm2.json -o docs/front.svg
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
COLORS = METHODS | {"distilled": "#8172b3"}


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


def embedded(axes: Any, ratio_of: dict[str, float]) -> None:
    """Models are named METHOD-HEADS.

    The title and the shares are those of a model with 8 KV heads.
    """
    heads = (4, 2, 1)
    for method, color in METHODS.items():
        heights = [ratio_of[f"{method}-{g}"] for g in heads]
        axes.plot(range(len(heads)), heights, "o-", color=color, linewidth=2)
        label = f"{method}  {text(heights[-1])}"
        end = (len(heads) - 1, heights[-1])
        above = {"calibrated": 7, "refined": -4}.get(method, -1)  # they end close to each other
        axes.annotate(
            label, end, xytext=(9, above), textcoords="offset points", color=color, va="center"
        )
    axes.set(ylabel="perplexity ratio", yscale="log", xlim=(-0.2, len(heads) + 0.1), ylim=(0.9, 24))
    axes.set_title("example model, 5.8M parameters, 8 KV heads", fontsize=11)
    axes.set_xticks(
        range(len(heads)),
        [f"{g} KV head{'s' * (g > 1)}\ncache {8 / g:.0f}x smaller" for g in heads],
    )
    axes.set_yticks([1, 2, 5, 10, 20], ["x1", "x2", "x5", "x10", "x20"])


def published(axes: Any, ratio_of: dict[str, float]) -> None:
    """Models are named by their method, of `COLORS`."""
    for number, (method, color) in enumerate(COLORS.items()):
        ratio = ratio_of[method]
        axes.plot([number, number], [1, ratio], color=color, linewidth=2)
        axes.plot([number], [ratio], "o", color=color)
        axes.annotate(
            text(ratio),
            (number, ratio),
            xytext=(0, 8),
            textcoords="offset points",
            color=color,
            ha="center",
        )

    highest = 3 * max(ratio_of.values())
    axes.set(yscale="log", xlim=(-0.6, len(ratio_of) - 0.4), ylim=(0.85, highest))
    axes.set_title("SmolLM2-135M-Instruct, 3 KV heads to 1", fontsize=11)
    axes.set_xticks(range(len(COLORS)), COLORS)
    axes.set_yticks([1, 10, 100, 1000], ["x1", "x10", "x100", "x1,000"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("embedded", type=Path)
    parser.add_argument("published", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gqa", "font.size": 11}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams |= dict.fromkeys(colors, GRAY)

    figure, panels = plt.subplots(1, 2, figsize=(11, 3.7), width_ratios=(1.15, 1))
    embedded(panels[0], ratios(args.embedded))
    published(panels[1], ratios(args.published))
    for axes in panels:
        axes.minorticks_off()
        axes.axhline(1, color=GRAY, linewidth=1, linestyle=":")
    figure.tight_layout()
    figure.savefig(args.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
