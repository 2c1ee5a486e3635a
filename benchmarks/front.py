"""The README's picture from the rows of a study: how many times the base model's perplexity conversions have.

python benchmarks/front.py docs/study -o docs/front.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

# Grey text on no background: readable on white and on black.
GREY = "#808080"
SHOWN = {"mean": "#c44e52", "aligned": "#dd8452", "calibrated": "#4c72b0", "refined": "#55a868"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in (args.study / "rows.jsonl").read_text().splitlines()]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gqa", "font.size": 11, "text.color": GREY}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for method, colour in SHOWN.items():
        cells = {r["groups"]: r for r in rows if r["method"] == method and not r["alpha"] and not r["error"]}
        groups = sorted((g for g in cells if cells[g]["kv_share"] < 1), reverse=True)
        ratios = [cells[g]["perplexity_ratio"] for g in groups]
        axes.plot(range(len(groups)), ratios, "o-", color=colour, linewidth=2)
        axes.annotate(f"{method}  x{ratios[-1]:.3g}", (len(groups) - 1, ratios[-1]), xytext=(9, 0),
                      textcoords="offset points", color=colour, va="center")  # fmt: skip
    axes.set(yscale="log", ylabel="perplexity, of the base model's", xlim=(-0.2, len(groups) - 0.2))
    axes.set_xticks(
        range(len(groups)), [f"{g} KV heads\ncache {1 / cells[g]['kv_share']:.0f}x smaller" for g in groups]
    )
    axes.set_yticks([1, 2, 5, 10, 20], ["x1", "x2", "x5", "x10", "x20"])
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
