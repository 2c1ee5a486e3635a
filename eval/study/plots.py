"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gqa.convert.methods import METHODS
from gqa.eval.plots import COLOURS, MARKERS, look, panels, powers_of_two
from gqa.eval.study.directory import Row
from gqa.eval.study.study import UNMERGED
from gqa.eval.study.tradeoff import BASE, heads, pareto_front, points

# Their colours, from the second on; what else is registered comes after them. The last is yellow.
_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")
_GREY, _BLACK = "#777777", "#000000"
_SHARED: Row = {"sharex": True, "sharey": True}  # axes of panels
_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10)  # nats per token above the base model


def draw_study(rows: Iterable[Row], source: Row, directory: Path) -> list[tuple[str, str]]:
    """All pictures that there are numbers for, as (name, title)."""
    study = _Study(rows, source, directory)
    pictures = {
        "frontier": study.frontier, "tradeoff": study.tradeoff, "alphas": study.alphas, "recall": study.recall,
        "groups": study.groups,
    }  # fmt: skip
    return [(name, title) for name, draw in pictures.items() if (title := draw())]


class _Study:
    """What is drawn. Each picture is a method that returns its title; nothing where it has no numbers.

    every: all points; points: those whose KV cache is not quantised; merged: of these, with fewer heads than the
    source; best: of each series and number of heads, the training that loses least; looks: of each series.
    """

    def __init__(self, rows: Iterable[Row], source: Row, directory: Path) -> None:
        self.every, self.source, self.directory = points(rows), source, directory
        self.points = self.every[self.every.bits == 0]
        self.merged = self.points[~self.points.method.isin(UNMERGED)]
        self.looks = _looks(self.every[~self.every.method.isin(UNMERGED)])
        self.best = _best(self.merged, "loss")
        self.counts = sorted(self.merged.groups.unique())

    def frontier(self) -> str:
        """Heads and bits: what is lost for what is saved."""
        smaller = self.every[self.every.kv_bytes_per_token < self.source["kv_bytes_per_token"]]
        if not self.every.bits.any() or smaller.kl.isna().any():
            return ""
        source, asked, best = self.source, "recall_text" in self.source, _best(smaller, "kl")
        base, kept = best[best.method.isin(UNMERGED)], source["kv_bytes_per_token"] / 1024
        halves = [kept / 2**n for n in range(12) if kept / 2**n >= best.kv_bytes_per_token.min() / 1024]
        lines = {series: best[best.series == series] for series in self.looks}
        with panels(self.directory, "frontier", 1, 1 + asked, width=7 * (1 + asked), height=6.5, sharex=True) as axes:
            for axis, column, unit in zip(axes[0], ("kl", "recall_text"), (1, 100), strict=False):
                told = f"{BASE}, {', '.join(f'int{bits}' for bits in base.bits)} cache"
                axis.plot(base.kv_bytes_per_token / 1024, base[column] * unit, "-*", color=_BLACK, label=told)
                for series, own in lines.items():
                    axis.plot(own.kv_bytes_per_token / 1024, own[column] * unit, label=series, **self.looks[series])
                powers_of_two(axis, halves)
                axis.set_xlabel("KV cache per token (KiB), scales included")
            pairs = [*zip(best.kv_bytes_per_token / 1024, best.kl, strict=True)]
            front = np.array([pairs[index] for index in pareto_front(pairs)])
            axes[0, 0].step(*front.T, where="post", color=_GREY, linewidth=5, alpha=0.4, zorder=0, label="Pareto front")
            axes[0, 0].set(ylabel="KL from the base model (nats per token)", yscale="log")
            axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
            for axis in axes[0, 1:]:
                axis.axhline(100 * source["recall_text"], color=_BLACK, linestyle=":", linewidth=1.5)
                axis.set(ylabel="second copies of the text recalled (%)", ylim=(0, 102))
        return "Heads and bits against the bytes of the KV cache, each method as it is trained best; dotted: base model"

    def tradeoff(self) -> str:
        """Figure 3: what is lost for what is saved."""
        if self.merged.empty:
            return ""
        source, asked = self.source, "recall_text" in self.source
        kept = source["kv_bytes_per_token"] / 1024
        with panels(self.directory, "tradeoff", 1, 1 + asked, width=6 * (1 + asked), height=5.5) as axes:
            for axis, column, unit in zip(axes[0], ("loss_increase", "recall_text"), (1, 100), strict=False):
                for series, style in self.looks.items():
                    own = self.best[self.best.series == series]
                    axis.plot(own.kv_bytes_per_token / 1024, own[column] * unit, label=series, **style)
                base = unit * source.get(column, 0)
                axis.plot(kept, base, "*", color=_BLACK, markersize=14, clip_on=False, label=BASE)
                powers_of_two(axis, {*self.best.kv_bytes_per_token / 1024, kept})
                axis.set_xlabel("KV cache per token (KiB)")
            pairs = [*zip(self.best.kv_bytes_per_token / 1024, self.best.loss_increase, strict=True), (kept, 0.0)]
            front = np.array([pairs[index] for index in pareto_front(pairs)])
            axes[0, 0].step(*front.T, where="post", color=_GREY, linewidth=1.5, zorder=0, label="Pareto front")
            _above_base(axes[0, :1], self.best.loss_increase)
            for axis in axes[0, 1:]:
                axis.set(ylabel="second copies of the text recalled (%)", ylim=(0, 102))
        return "Quality against the KV cache (figure 3 of the GQA paper), each method as it is trained best"

    def alphas(self) -> str:
        """Figure 5: a panel for each number of heads, a line for each method."""
        if self.merged.alpha.nunique() < 2:
            return ""
        alphas, control = sorted(self.points.alpha.unique()), self.points[self.points.series == BASE]
        width = max(6, 3.6 * len(self.counts) + 1)
        with panels(self.directory, "alphas", 1, len(self.counts), width=width, sharey=True) as axes:
            for axis, count in zip(axes[0], self.counts, strict=True):
                for series, style in self.looks.items():
                    line = self.merged[(self.merged.series == series) & (self.merged.groups == count)]
                    line = line.sort_values("alpha")
                    bars = _error_bars(line)
                    axis.errorbar(line.alpha, line.loss_increase, yerr=bars, capsize=3, label=series, **style)
                if len(control) > 1:
                    line = control.sort_values("alpha")
                    told = "base model, trained further"
                    axis.plot(line.alpha, line.loss_increase, ":", color=_BLACK, linewidth=1.5, label=told)
                # Alphas are chosen in ratios, and 0 is one of them.
                axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: x * abs(x)))
                axis.xaxis.set_major_locator(FixedLocator(alphas))
                axis.xaxis.set_minor_locator(NullLocator())
                axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
                axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
                axis.set(title=heads(count), xlabel="of the text trained on (alpha)")
            _above_base(axes[0], self.points.loss_increase)
        return "Loss by length of training (figures 4 and 5); error bars: lowest and highest seed"

    def recall(self) -> str:
        """Shares of second copies by distance: a panel for each number of heads."""
        if "recall_text" not in self.source:
            return ""
        width, kinds = max(6, 3.6 * len(self.counts)), {"text": "text", "random": "random tokens"}
        with panels(self.directory, "recall", 2, len(self.counts), width=width, height=8, **_SHARED) as axes:
            for line, (kind, told) in zip(axes, kinds.items(), strict=True):
                line[0].set(ylabel=f"{told} recalled (%)", ylim=(-2, 102))
                for axis, count in zip(line, self.counts, strict=True):
                    for point in self.best[self.best.groups == count].itertuples():
                        found, style = _by_distance(point.recall_by_distance, kind), self.looks[point.series]
                        axis.plot(*found, label=point.series, **style)
                    distances, shares = _by_distance(self.source["recall_by_distance"], kind)
                    axis.plot(distances, shares, "--", color=_BLACK, linewidth=1.5, label=BASE)
                    powers_of_two(axis, distances)
            for axis, below, count in zip(*axes, self.counts, strict=True):
                first = 100 * self.source["recall_first_reading"]
                axis.axhline(first, color=_GREY, linestyle=":", linewidth=1.5, label="base model, first copies")
                axis.set_title(heads(count))
                below.set_xlabel("tokens between the copies")
        return "Second copies: what is found again in the context, each method as it is trained best"

    def groups(self) -> str:
        """Figure 6: what a token costs by the number of heads."""
        at = pandas.concat([self.points, pandas.DataFrame([self.source])]).drop_duplicates("groups", keep="last")
        if self.points.empty or len(at) < 2:
            return ""
        at, timed = at.sort_values("groups"), "decode_seconds_per_token" in self.source
        with panels(self.directory, "groups", 1, 1 + timed, width=5 * (1 + timed) + 1, height=4.5) as axes:
            memory, *others = axes[0]
            memory.plot(at.groups, at.kv_bytes_per_token / 1024, **look(1))
            memory.set(ylabel="KV cache per token (KiB)", title="memory")
            for axis in others:
                times, low, high = at.decode_seconds_per_token, at.decode_fastest, at.decode_slowest
                errors = [(times - low) * 1e3, (high - times) * 1e3]
                axis.errorbar(at.groups, times * 1e3, yerr=errors, capsize=3, **look(2))
                title = f"time, {self.source['decode_tokens_before']:,} tokens read"
                axis.set(ylabel="decode step (ms)", title=title)
            for axis in axes[0]:
                powers_of_two(axis, at.groups)
                axis.set_xlabel("key/value heads")
                axis.set_ylim(bottom=0)
        return "Memory and time of decoding by the number of heads (figure 6); error bars: fastest and slowest"


def _best(found: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """Of each series and number of heads what has the least of a column."""
    return found.loc[found.groupby(["groups", "series"], sort=False)[column].idxmin()]


def _above_base(axes: Sequence[Axes], increases: pandas.Series) -> None:
    """The y axes of panels side by side in nats above the base model, logarithmic from the smallest of the `increases`
    on, so that what has lost everything does not squeeze the rest; on the right the ratio of perplexities.
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


def _by_distance(found: Sequence[Row], kind: str) -> tuple[list[int], list[float]]:
    """Distances, and the share in percent at each."""
    own = [one for one in found if one["kind"] == kind]
    return [one["distance"] for one in own], [100 * one["accuracy"] for one in own]


def _looks(merged: pandas.DataFrame) -> dict[str, Row]:
    """Of each series: a colour and marker of its method, the same in every study; dashed, and hollow or half so, where
    it is not the first way to train it or to keep its cache.
    """
    methods, found = list(dict.fromkeys([*_METHODS, *METHODS])), {}
    several = merged.drop_duplicates("series")
    for point, way in zip(several.itertuples(), several.groupby("method").cumcount(), strict=True):
        style = _method_look(methods.index(point.method))
        if way >= 4:  # the same again, darker
            style["color"] = tuple(part * 0.5 ** (way // 4) for part in to_rgb(style["color"]))
        found[point.series] = style | {
            "linestyle": ("-", "--", ":", "-.")[way % 4], "markeredgecolor": "#333333", "markeredgewidth": 0.8,
            "markerfacecolor": "#ffffff" if way % 4 == 1 else style["color"], "markerfacecoloralt": "#ffffff",
            "fillstyle": ("full", "full", "left", "bottom")[way % 4],
        }  # fmt: skip
    return found


def _method_look(index: int) -> Row:
    """Colour and marker of the index-th method. Black is the source's: colours come round first, with other markers."""
    return {"color": COLOURS[1 + index % (len(COLOURS) - 1)], "marker": MARKERS[(index + 1) % len(MARKERS)]}


def _error_bars(found: pandas.DataFrame) -> Any:
    """From the mean down to the lowest seed and up to the highest; no bar where there is one seed."""
    if (found.seeds == 1).all():
        return None
    return np.where(found.seeds > 1, [found.loss - found.lowest, found.highest - found.loss], np.nan)
