"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gqa.convert.methods import METHODS
from gqa.eval.plots import COLOURS, MARKERS, panels, powers_of_two
from gqa.eval.study.directory import Row
from gqa.eval.study.study import UNMERGED
from gqa.eval.study.tradeoff import BASE, heads, pareto_front

# Their colours, from the second on; what else is registered comes after them. The last is yellow.
_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")
_GREY, _BLACK = "#777777", "#000000"
_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)  # nats per token above the base model


def draw_study(points: pandas.DataFrame, source: Row, directory: Path) -> list[tuple[str, str]]:
    """Draw all pictures that the `points` of a study have numbers for; (name, caption) of each."""
    pictures = {"tradeoff": draw_tradeoff, "alphas": draw_alphas}
    return [(name, caption) for name, draw in pictures.items() if (caption := draw(points, source, directory))]


def draw_tradeoff(points: pandas.DataFrame, source: Row, directory: Path) -> str:
    """Figure 3 of the paper: loss against KV cache bytes, by heads and bits."""
    smaller = points[points.kv_bytes_per_token < source["kv_bytes_per_token"]]
    if smaller.empty:
        return ""
    best, looks, recalled = _best(smaller, "loss"), _looks(smaller), "recall_text" in source
    source_kib, smallest_kib = source["kv_bytes_per_token"] / 1024, best.kv_bytes_per_token.min() / 1024
    with panels(directory, "tradeoff", 1 + recalled, width=6.5 * (1 + recalled), height=6) as axes:
        for axis, column, unit in zip(axes[0], ("loss_increase", "recall_text"), (1, 100), strict=False):
            for series, style in looks.items():
                line = best[best.series == series]
                axis.plot(line.kv_bytes_per_token / 1024, line[column] * unit, label=series, **style)
            base = unit * source[column]
            axis.plot(source_kib, base, "*", color=_BLACK, markersize=14, clip_on=False, label=BASE)
            powers_of_two(axis, [x for n in range(12) if (x := source_kib / 2**n) >= smallest_kib])
            axis.set_xlabel("KV cache per token (KiB)")
        pairs = [*zip(best.kv_bytes_per_token / 1024, best.loss_increase, strict=True), (source_kib, 0.0)]
        front = np.array([pairs[index] for index in pareto_front(pairs)])
        axes[0, 0].step(*front.T, where="post", color=_GREY, linewidth=1.5, zorder=0, label="Pareto front")
        _above_base(axes[0, :1], best.loss_increase)
        for axis in axes[0, 1:]:
            axis.set(ylabel="second copies of the text recalled (%)", ylim=(0, 102))
    return "Quality against the KV cache (figure 3 of the GQA paper), each method as it is trained best"


def draw_alphas(points: pandas.DataFrame, source: Row, directory: Path) -> str:
    """Figure 5: a panel for each number of heads, a line for each method."""
    points = points[points.bits == 0]
    merged = points[~points.method.isin(UNMERGED)]
    if merged.alpha.nunique() < 2:
        return ""
    alphas, counts = sorted(points.alpha.unique()), sorted(merged.groups.unique())
    control, looks = points[points.series == BASE].sort_values("alpha"), _looks(merged)
    with panels(directory, "alphas", len(counts), width=max(6, 3.6 * len(counts) + 1), sharey=True) as axes:
        for axis, count in zip(axes[0], counts, strict=True):
            for series, style in looks.items():
                line = merged[(merged.series == series) & (merged.groups == count)].sort_values("alpha")
                axis.errorbar(line.alpha, line.loss_increase, yerr=_error_bars(line), capsize=3, label=series, **style)
            if len(control) > 1:
                label = "base model, trained further"
                axis.plot(control.alpha, control.loss_increase, ":", color=_BLACK, linewidth=1.5, label=label)
            # Alphas are chosen in ratios, and 0 is one of them.
            axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: x * abs(x)))
            axis.xaxis.set_major_locator(FixedLocator(alphas))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
            axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
            axis.set(title=heads(count), xlabel="of the text trained on (alpha)")
        _above_base(axes[0], points.loss_increase)
    return "Loss by length of training (figures 4 and 5); error bars: lowest and highest seed"


def _best(points: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """The point with the smallest value of a column, for each series and number of heads."""
    return points.loc[points.groupby(["groups", "series"], sort=False)[column].idxmin()]


def _above_base(axes: Sequence[Axes], increases: pandas.Series) -> None:
    """Set the y axes to nats above the base model, logarithmic from the smallest of the `increases`, so that failed
    conversions do not flatten the rest; perplexity ratios are on the right.
    """
    positive = increases[increases > 0]
    least = max([tick for tick in _TICKS if len(positive) and tick <= positive.min()], default=_TICKS[0])
    ticks = [tick for tick in _TICKS if tick >= least]
    shown = [*(-tick for tick in reversed(ticks)), 0, *ticks]
    limits = min(0, 1.5 * increases.min()), max(1.5 * increases.max(), 2 * least)
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


def _looks(merged: pandas.DataFrame) -> dict[str, Row]:
    """Style of each series: colour and marker of its method, the same in every study; dashes and fill distinguish the
    trainings and caches of a method.
    """
    methods, styles = list(dict.fromkeys([*_METHODS, *METHODS])), {}
    first_points = merged.drop_duplicates("series")
    for point, variant in zip(first_points.itertuples(), first_points.groupby("method").cumcount(), strict=True):
        base = point.method in UNMERGED
        style: Row = {"color": _BLACK, "marker": "*"} if base else _method_look(methods.index(point.method))
        if variant >= 4:  # the same again, darker
            style["color"] = tuple(part * 0.5 ** (variant // 4) for part in to_rgb(style["color"]))
        styles[point.series] = style | {
            "linestyle": ("-", "--", ":", "-.")[variant % 4], "markeredgecolor": "#333333", "markeredgewidth": 0.8,
            "markerfacecolor": "#ffffff" if variant % 4 == 1 else style["color"], "markerfacecoloralt": "#ffffff",
            "fillstyle": ("full", "full", "left", "bottom")[variant % 4],
        }  # fmt: skip
    return styles


def _method_look(index: int) -> Row:
    """Colour and marker of the index-th method; black is the source's. Colours repeat with other markers."""
    return {"color": COLOURS[1 + index % (len(COLOURS) - 1)], "marker": MARKERS[(index + 1) % len(MARKERS)]}


def _error_bars(line: pandas.DataFrame) -> Any:
    """Distances from the mean to the lowest and highest seed; None, or NaN, for one seed."""
    if (line.seeds == 1).all():
        return None
    return np.where(line.seeds > 1, [line.loss - line.lowest, line.highest - line.loss], np.nan)
