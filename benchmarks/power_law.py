"""Draw KL divergence against tokens of distillation, with the power law that fits it, from what
`benchmarks/gpu.py --part distill` writes.

python benchmarks/power_law.py docs/gpu-distill.json -o docs/distillation.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

# Gray text on no background: readable on white and on black.
GRAY = "#808080"
COLORS = {2: "#4c72b0", 1: "#dd8452"}
TICKS = {1e6: "1M", 3e6: "3M", 1e7: "10M", 2e7: "20M", 5e7: "50M"}


def draw(axes: Any, kv_heads: int, tokens: np.ndarray, kl: np.ndarray) -> float:
    """Draw the measured points of one number of KV heads and a line through them.

    Returns:
        The exponent of the power law.
    """
    exponent, logarithm = np.polyfit(np.log(tokens), np.log(kl), 1)
    color = COLORS[kv_heads]
    axes.plot(tokens, kl, "o", color=color)
    axes.plot(tokens, np.exp(logarithm) * tokens**exponent, color=color, linewidth=2)
    less = 1 - 10**exponent
    label = f"{kv_heads} of 8 KV heads:\n10 times the tokens,\n{less:.0%} less KL"
    axes.annotate(
        label,
        (tokens[-1], kl[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        color=color,
        va="center",
    )
    return float(exponent)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.measured.read_text())["rows"]

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gqa", "font.size": 11}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    colors = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
    plt.rcParams |= dict.fromkeys(colors, GRAY)
    figure, axes = plt.subplots(figsize=(7.5, 3.6))

    for kv_heads in COLORS:
        measured = sorted(
            (row["tokens"], row["heldout_kl"]) for row in rows if row["kv_heads"] == kv_heads
        )
        tokens, kl = np.array(measured, dtype=float).T
        print(f"{kv_heads} KV heads: exponent {draw(axes, kv_heads, tokens, kl):.3f}")

    axes.set(xscale="log", yscale="log", xlim=(8e5, 2.5e8), ylim=(0.07, 0.3))
    axes.set(xlabel="tokens of distillation", ylabel="KL divergence, nats per token")
    axes.minorticks_off()
    axes.set_xticks([*TICKS], [*TICKS.values()])
    axes.set_yticks([0.08, 0.1, 0.15, 0.2, 0.25], ["0.08", "0.10", "0.15", "0.20", "0.25"])
    figure.tight_layout()
    figure.savefig(args.output, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
