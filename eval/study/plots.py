"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gqa.convert.methods import METHODS
from gqa.eval.study.directory import Row
from gqa.eval.study.options import UNMERGED
from gqa.eval.study.recommendation import BASE, cache_bytes, loss, measured

# In the order of the colours; methods registered elsewhere follow.
_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")
_BLACK = "#000000"
# Okabe and Ito's palette without black, which colour-blind readers can distinguish; markers repeat the information.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
_MARKERS = ("s", "^", "D", "v", "P", "X", "*", "o")
_STYLE: dict[Any, Any] = {
    "font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.linewidth": 2, "lines.markersize": 7, "legend.frameon": False, "svg.hashsalt": "gqa",
}  # fmt: skip
_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)  # nats per token above the base model


def draw_study(rows: Sequence[Row], directory: Path) -> list[tuple[str, str]]:
    """Draw all pictures that the rows have numbers for; (name, caption) of each."""
    pictures = {"tradeoff": draw_tradeoff, "alphas": draw_alphas}
    return [(name, caption) for name, draw in pictures.items() if (caption := draw(measured(rows), directory))]


@contextmanager
def _panels(path: Path, columns: int, width: float, height: float, sharey: bool = False) -> Iterator[Any]:
    """Yield axes (columns,) and save them as SVG, with the legend of the first below."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield (axes := figure.subplots(1, columns, squeeze=False, sharey=sharey)[0])
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), int(width / 1.8)))
        figure.savefig(path, metadata={"Date": None})


def draw_tradeoff(points: list[Row], directory: Path) -> str:
    """Figure 3 of the paper: loss, and recall, against KV cache bytes."""
    base, *points = points
    best: dict[tuple[str, int], Row] = {}
    for point in sorted(points, key=lambda point: (point["groups"], loss(point))):
        if cache_bytes(point) < cache_bytes(base):
            best.setdefault((point["method"], point["groups"]), point)
    if not best:
        return ""
    recalled, base_kib = "recall_text" in base, _kib(base)
    with _panels(directory / "tradeoff.svg", 1 + recalled, 6.5 * (1 + recalled), 6) as axes:
        for axis, column, unit in zip(axes, ("loss_increase", "recall_text"), (1, 100), strict=False):
            for method in _methods(best.values()):
                line = [point for point in best.values() if point["method"] == method]
                sizes, values = [_kib(point) for point in line], [unit * point[column] for point in line]
                axis.plot(sizes, values, label=method, **method_look(method))
            axis.plot(base_kib, unit * base[column], "*", color=_BLACK, markersize=14, clip_on=False, label=BASE)
            axis.set_xscale("log", base=2)
            ticks = [x for n in range(12) if (x := base_kib / 2**n) >= min(map(_kib, best.values()))]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xlabel("KV cache per token (KiB)")
        _above_base(axes[:1], [point["loss_increase"] for point in best.values()])
        for axis in axes[1:]:
            axis.set(ylabel="second copies of the text recalled (%)", ylim=(0, 102))
    return "Quality against the KV cache (figure 3 of the GQA paper), each method as it is trained best"


def draw_alphas(points: list[Row], directory: Path) -> str:
    """Figure 5: a panel for each number of heads, a line for each method."""
    merged = [point for point in points if point["method"] != UNMERGED]
    if len({point["alpha"] for point in merged}) < 2:
        return ""
    alphas, counts = sorted({p["alpha"] for p in points}), sorted({p["groups"] for p in merged})
    control = [point for point in points if point["method"] == UNMERGED]
    with _panels(directory / "alphas.svg", len(counts), max(6, 3.6 * len(counts) + 1), 5, sharey=True) as axes:
        for axis, count in zip(axes, counts, strict=True):
            for method in _methods(merged):
                line = [point for point in merged if (point["method"], point["groups"]) == (method, count)]
                _plot_alphas(axis, line, label=method, **method_look(method))
            if len(control) > 1:
                _plot_alphas(axis, control, linestyle=":", color=_BLACK, label="base model, trained further")
            # Alphas are chosen in ratios, and 0 is one of them.
            axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: x * abs(x)))
            axis.xaxis.set_major_locator(FixedLocator(alphas))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
            axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
            axis.set(title=f"{count} KV heads" if count > 1 else "1 KV head", xlabel="of the text trained on (alpha)")
        _above_base(axes, [point["loss_increase"] for point in points])
    return "Loss by length of training (figures 4 and 5)"


def _plot_alphas(axis: Axes, line: Sequence[Row], **style: Any) -> None:
    axis.plot([point["alpha"] for point in line], [point["loss_increase"] for point in line], **style)


def _kib(point: Row) -> float:
    return cache_bytes(point) / 1024


def _above_base(axes: Sequence[Axes], increases: Sequence[float]) -> None:
    """Set the y axes to nats above the base model, logarithmic from the smallest of the `increases`, so that failed
    conversions do not flatten the rest; perplexity ratios are on the right.
    """
    smallest = min((increase for increase in increases if increase > 0), default=0.0)
    least = max((tick for tick in _TICKS if tick <= smallest), default=_TICKS[0])
    ticks = [tick for tick in _TICKS if tick >= least]
    shown = [*(-tick for tick in reversed(ticks)), 0, *ticks]
    limits = min(0, 1.5 * min(increases)), max(1.5 * max(increases), 2 * least)
    ratios = axes[-1].twinx()
    for axis, form in [*((axis, "{0:g}") for axis in axes), (ratios, "x {1:.3g}")]:
        axis.set_yscale("symlog", linthresh=least, linscale=0.5)
        axis.set_yticks(shown, [form.format(tick, math.exp(tick)) for tick in shown])
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(limits)
    axes[0].set_ylabel("nats per token above the base model")
    ratios.set_ylabel("perplexity ratio")
    ratios.grid(visible=False)
    for axis in axes:
        axis.axhline(0, color=_BLACK, linewidth=1)


def _methods(points: Any) -> list[str]:
    """The methods of the points, each once, in the order of the registry."""
    present = {point["method"] for point in points}
    return [method for method in METHODS if method in present]


def method_look(method: str) -> Row:
    """Colour and marker of a method, the same in every study; black is the base model's. Colours repeat with other
    markers.
    """
    index = list(dict.fromkeys([*_METHODS, *METHODS])).index(method)
    return {
        "color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)],
        "markeredgecolor": "#333333", "markeredgewidth": 0.8,
    }  # fmt: skip
