"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gqa.convert.methods import METHODS
from gqa.eval.plots import COLOURS, MARKERS, look, panels, powers_of_two
from gqa.eval.study.directory import Row
from gqa.eval.study.study import UNMERGED
from gqa.eval.study.tradeoff import heads, measured, pareto_front, points

# Their colours, from the second on; what else is registered comes after them. The last is yellow.
_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")
_GREY, _BLACK = "#777777", "#000000"


def draw_study(rows: Iterable[Row], source: Row, directory: Path) -> list[tuple[str, str]]:
    """All pictures that there are numbers for, as (name, title)."""
    study = _Study(rows, source, directory)
    pictures = {
        "methods": study.methods, "alphas": study.alphas, "groups": study.groups, "tradeoff": study.tradeoff,
        "layers": study.layers,
    }  # fmt: skip
    return [(name, title) for name, draw in pictures.items() if (title := draw())]


class _Study:
    """What is drawn. Each picture is a method that returns its title; nothing where it has no numbers.

    merged: points of fewer heads than the source's; looks: of each series of them.
    """

    def __init__(self, rows: Iterable[Row], source: Row, directory: Path) -> None:
        self.rows, self.points, self.source, self.directory = measured(rows), points(rows), source, directory
        self.merged = self.points[~self.points.method.isin(UNMERGED)]
        self.looks = _looks(self.merged)
        self.counts = sorted(self.merged.groups.unique())

    @contextmanager
    def panels(self, name: str, rows: int, columns: int, width: float, height: float, **more: Any) -> Iterator[Any]:
        """(rows, columns) axes, with a legend of the first below them: in as few lines as the width allows, all of a
        length.
        """
        with panels(self.directory, name, rows, columns, width=width, height=height, **more) as (figure, axes):
            yield axes
            handles, labels = axes[0, 0].get_legend_handles_labels()
            if handles:
                lines = math.ceil(len(handles) / max(2, int(width / 2.2)))
                figure.legend(handles, labels, loc="outside lower center", ncols=math.ceil(len(handles) / lines))

    def methods(self) -> str:
        """Figure 4: bars, one panel for the shortest and one for the longest training."""
        if self.merged.empty:
            return ""
        alphas = sorted({self.merged.alpha.min(), self.merged.alpha.max()})
        names, width = list(self.looks), 0.8 / len(self.counts)
        with self.panels("methods", 1, len(alphas), 5 * len(alphas) + 1, 5, sharey=True) as axes:
            for axis, alpha in zip(axes[0], alphas, strict=True):
                for number, count in enumerate(self.counts):
                    bars = self.merged[(self.merged.alpha == alpha) & (self.merged.groups == count)]
                    axis.bar(
                        [names.index(series) + (number - (len(self.counts) - 1) / 2) * width for series in bars.series],
                        bars.loss_increase, width, yerr=_error_bars(bars), capsize=3, edgecolor="#222222",
                        linewidth=0.8, color=mpl.colormaps["Blues"]((number + 1) / (len(self.counts) + 0.5)),
                        label=heads(count),
                    )  # fmt: skip
                axis.set_xticks(range(len(names)), names, rotation=35, ha="right")
                axis.set_title(f"trained on {100 * alpha:g} % (alpha {alpha:g})" if alpha else "converted, untrained")
                axis.grid(visible=False, axis="x")
                axis.axhline(0, color=_BLACK, linewidth=1)
            axes[0, 0].set_ylabel("nats per token above the source")
        return "Loss by method (figure 4 of the GQA paper); error bars: lowest and highest seed"

    def alphas(self) -> str:
        """Figure 5: a panel for each number of heads, a line for each method."""
        if self.merged.alpha.nunique() < 2:
            return ""
        alphas, control = sorted(self.points.alpha.unique()), self.points[self.points.series == "source"]
        with self.panels("alphas", 1, len(self.counts), max(6, 3.6 * len(self.counts)), 5, sharey=True) as axes:
            for axis, count in zip(axes[0], self.counts, strict=True):
                for series, style in self.looks.items():
                    line = self.merged[(self.merged.series == series) & (self.merged.groups == count)]
                    line = line.sort_values("alpha")
                    axis.errorbar(line.alpha, line.loss, yerr=_error_bars(line), capsize=3, label=series, **style)
                if len(control) > 1:
                    line = control.sort_values("alpha")
                    axis.plot(line.alpha, line.loss, ":", color=_BLACK, linewidth=1.5, label="source, trained further")
                axis.axhline(self.source["loss"], label="source", color=_BLACK, linestyle="--", linewidth=1.5)
                # Alphas are chosen in ratios, and 0 is one of them.
                axis.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: x * abs(x)))
                axis.xaxis.set_major_locator(FixedLocator(alphas))
                axis.xaxis.set_minor_locator(NullLocator())
                axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
                axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
                axis.set(title=heads(count), xlabel="alpha")
            axes[0, 0].set_ylabel("nats per token")
        return "Loss by length of training (figure 5)"

    def groups(self) -> str:
        """Figure 6: what a token costs by the number of heads."""
        at = pandas.concat([self.points, pandas.DataFrame([self.source])]).drop_duplicates("groups", keep="last")
        if self.points.empty or len(at) < 2:
            return ""
        at, timed = at.sort_values("groups"), "decode_seconds_per_token" in self.source
        with self.panels("groups", 1, 1 + timed, 5 * (1 + timed) + 1, 4.5) as axes:
            memory, *others = axes[0]
            memory.plot(at.groups, at.kv_bytes_per_token / 1024, **look(1))
            memory.set(ylabel="KiB of KV cache per token", title="memory")
            for axis in others:
                times, low, high = at.decode_seconds_per_token, at.decode_fastest, at.decode_slowest
                errors = [(times - low) * 1e3, (high - times) * 1e3]
                axis.errorbar(at.groups, times * 1e3, yerr=errors, capsize=3, **look(2))
                title = f"time, {self.source['decode_tokens_before']:,} tokens read"
                axis.set(ylabel="milliseconds per decode step", title=title)
            for axis in axes[0]:
                powers_of_two(axis, at.groups)
                axis.set_xlabel("key/value heads")
                axis.set_ylim(bottom=0)
        return "Memory and time of decoding by the number of heads (figure 6); error bars: fastest and slowest"

    def tradeoff(self) -> str:
        """Figure 3: what is lost for what is saved. Faint: shorter training."""
        if self.merged.empty:
            return ""
        source, longest = self.source, self.merged.alpha.max()
        costs = {"kv_bytes_per_token": ("KiB of KV cache per token", 1 / 1024)}
        if "decode_seconds_per_token" in source:
            costs["decode_seconds_per_token"] = ("milliseconds per decode step", 1e3)
        with self.panels("tradeoff", 1, len(costs), 5 * len(costs) + 1, 5.5, sharey=True) as axes:
            for axis, (column, (label, unit)) in zip(axes[0], costs.items(), strict=True):
                for series, style in self.looks.items():
                    own, dots = self.merged[self.merged.series == series], style | {"linestyle": ""}
                    for some, more in (own.alpha == longest, {"label": series}), (own.alpha < longest, {"alpha": 0.3}):
                        axis.plot(own[some][column] * unit, own[some].loss, **dots, **more)
                pairs = [*zip(self.merged[column], self.merged.loss, strict=True), (source[column], source["loss"])]
                front = np.array([pairs[index] for index in pareto_front(pairs)]) * (unit, 1)
                axis.plot(source[column] * unit, source["loss"], "*", color=_BLACK, markersize=14, label="source")
                axis.step(*front.T, where="post", color=_GREY, linewidth=1.5, zorder=0, label="Pareto front")
                axis.plot(*front.T, "o", markersize=15, markerfacecolor="none", markeredgecolor=_GREY, zorder=0)
                axis.set_xlabel(label)
            powers_of_two(
                axes[0, 0], {kept / 1024 for kept in (*self.merged.kv_bytes_per_token, source["kv_bytes_per_token"])}
            )
            axes[0, 0].set_ylabel("nats per token")
        return f"Quality against memory and time (figure 3); filled: alpha {longest:g}, faint: trained less"

    def layers(self) -> str:
        """What merging does to each attention module, before any training."""
        if "merge_errors" not in self.rows:
            return ""
        plain = self.rows[self.rows.merge_errors.notna() & self.rows.series.isin(self.looks)]
        if plain.empty:
            return ""
        first, counts = plain.iloc[0], sorted(plain.groups.unique())
        plain = plain[(plain.train == first.train) & (plain.teacher == first.teacher)]
        kinds = {"merge_errors": "each alone", "merge_errors_accumulated": "accumulated"}
        width = max(6, 3.6 * len(counts))
        with self.panels("layers", 2, len(counts), width, 7, sharex=True, sharey=True) as axes:
            for line, (column, kind) in zip(axes, kinds.items(), strict=True):
                line[0].set_ylabel(kind)
                for axis, count in zip(line, counts, strict=True):
                    for series, seeds in plain[plain.groups == count].groupby("series", sort=False)[column]:
                        axis.plot(np.mean(seeds.tolist(), axis=0), label=series, **self.looks[series])
                    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes[0, 0].set_ylim(bottom=0)  # of all: they share it
            for axis, below, count in zip(*axes, counts, strict=True):
                axis.set_title(heads(count))
                below.set_xlabel("layer")
            axes[0, 0].figure.supylabel("relative error of attention outputs", fontsize=13)
        return "What merging does to each layer's attention output, untrained"


def _looks(merged: pandas.DataFrame) -> dict[str, Row]:
    """Of each series: a colour and marker of its method, the same in every study; dashed and hollow where it is not the
    first way to train.
    """
    ways = list(dict.fromkeys(zip(merged.train, merged.teacher, strict=True)))
    methods, found = list(dict.fromkeys([*_METHODS, *METHODS])), {}
    for point in merged.itertuples():
        way, style = ways.index((point.train, point.teacher)), _method_look(methods.index(point.method))
        found[point.series] = style | {
            "linestyle": ("-", "--", ":", "-.")[way % 4], "markeredgecolor": "#333333", "markeredgewidth": 0.8,
            "markerfacecolor": "#ffffff" if way else style["color"],
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
