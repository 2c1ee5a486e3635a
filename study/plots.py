"""Pictures of a study, after figures 3 to 5 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gqa.convert.methods.table import METHODS
from gqa.core.errors import plural
from gqa.eval.metrics import row_number
from gqa.study.options import BASE, UNMERGED
from gqa.study.rows import Row

# Okabe and Ito's palette, which color-blind readers can distinguish; markers repeat the
# information.
_STYLES = {
    "mean": ("#0072B2", "s"),
    "first": ("#D55E00", "^"),
    "random": ("#009E73", "D"),
    "procrustes": ("#F0E442", "*"),
    "aligned": ("#CC79A7", "v"),
    "calibrated": ("#E69F00", "P"),
    "refined": ("#000000", "X"),
}
_OTHER_STYLE = ("#56B4E9", "o")  # of methods without an entry
_INCREASE = row_number("loss_increase")  # what all pictures have on their y axis
_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "legend.frameon": False,
    "svg.hashsalt": "gqa",
}


def draw_study(rows: Sequence[Row], directory: Path) -> list[tuple[str, str]]:
    """Draw all pictures that measured rows, the base model's first, have numbers for, as SVG.

    Returns:
        Name and caption of each.
    """
    frame = pd.DataFrame(rows)
    frame["KiB"] = frame["kv_bytes_per_token"] / 1024
    merged = frame[frame["method"] != UNMERGED]

    pictures = []
    with mpl.rc_context(_STYLE):
        if len(merged):
            _save(_draw_tradeoff(frame.iloc[0], merged), directory / "tradeoff.svg")
            caption = (
                "Loss against KV cache size, each method with its best training (as figure 3 of "
                "the GQA paper)"
            )
            pictures.append(("tradeoff", caption))
        if merged["alpha"].nunique() > 1:
            _save(_draw_alphas(frame, merged), directory / "alphas.svg")
            pictures.append(("alphas", "Loss against length of training (as figures 4 and 5)"))
    return pictures


def _draw_tradeoff(base: Any, merged: Any) -> Figure:
    """Figure 3 of the paper: loss against KV cache bytes."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    _plot_losses(axis, merged, "KiB")
    axis.plot(base["KiB"], 0, "k*", markersize=14, clip_on=False, label=BASE)

    halvings = [base["KiB"] / 2**n for n in range(12)]
    ticks = [tick for tick in halvings if tick >= merged["KiB"].min()]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("KV cache per token (KiB)")
    _scale_losses(axis, merged[_INCREASE.key])
    return figure


def _draw_alphas(frame: Any, merged: Any) -> Figure:
    """Figure 5: a panel for each number of heads, a line for each method."""
    alphas = sorted({*frame["alpha"]})
    control = frame[frame["method"] == UNMERGED]

    panels = merged.groupby("groups")
    figure = Figure(figsize=(max(6, 3.6 * len(panels) + 1), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (count, cells) in zip(axes, panels, strict=True):
        _plot_losses(axis, cells, "alpha")
        if len(control) > 1:
            axis.plot(
                control["alpha"], control[_INCREASE.key], "k:", label="base model, trained further"
            )

        # Alphas are chosen in ratios, and 0 is one of them.
        axis.set_xscale("function", functions=(_signed_root, _signed_square))
        axis.set_xticks(alphas, [f"{100 * alpha:g}%" for alpha in alphas])
        axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
        axis.set(
            title=plural(count, "KV head"),
            xlabel="share of the text trained on (alpha)",
        )
        _scale_losses(axis, frame[_INCREASE.key])
    return figure


def _signed_root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: Any) -> Any:
    return x * abs(x)


def _plot_losses(axis: Axes, cells: Any, column: str) -> None:
    """The least loss of each method by a column, in nats above the base model.

    A method has the same color and marker in every study.
    """
    lines = cells.groupby(["method", column])[_INCREASE.key].min()
    for method in METHODS:
        if method not in lines:
            continue
        color, marker = _STYLES.get(method, _OTHER_STYLE)
        axis.plot(
            lines[method].index,
            lines[method],
            label=method,
            color=color,
            marker=marker,
            markeredgecolor="#333333",
        )


def _scale_losses(axis: Axes, losses: Any) -> None:
    """Set the y axis to nats above the base model, logarithmic from the smallest of the `losses`,
    so that failed conversions do not flatten the rest.
    """
    smallest = min(losses[losses > 0], default=0.0)
    # From the last tick that is not above the smallest loss: the next one is up to 3.4 times it.
    ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3, 10) if 3.4 * tick > smallest] or [10.0]
    least = ticks[0]  # linear up to it
    ticks = [-least, 0, *ticks]

    axis.set_yscale("symlog", linthresh=least, linscale=0.5)
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(min(0, 1.5 * losses.min()), max(1.5 * losses.max(), 2 * least))
    axis.set_ylabel(_INCREASE.axis)
    axis.axhline(0, color="black", linewidth=1)


def _save(figure: Figure, path: Path) -> None:
    """Save as SVG, with a legend of all panels below."""
    handles: dict[str, Any] = {}  # by label
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    columns = min(len(handles), int(figure.get_figwidth() / 1.8))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    figure.savefig(path, metadata={"Date": None})
