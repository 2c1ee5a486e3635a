"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gqa.eval.plots import look, panels
from gqa.eval.study.directory import Row
from gqa.eval.study.study import UNMERGED
from gqa.eval.study.tradeoff import heads, measured, pareto_front, points

Drawn = tuple[str, str]  # name and title

_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")  # the last is yellow
_SOURCE: Row = {"color": "#000000", "linestyle": "--", "linewidth": 1.5}


def draw_study(rows: Iterable[Row], source: Row, directory: Path) -> list[Drawn]:
    """All pictures that there are numbers for, as (name, title)."""
    frame, found = measured(rows), points(rows)
    if found.empty:
        return []
    merged = found[~found.method.isin(UNMERGED)]
    looks = _looks(merged)
    drawn = []
    if len(merged):
        drawn.append(_methods(merged, directory))
        if merged.alpha.nunique() > 1:
            drawn.append(_alphas(found, merged, looks, source, directory))
    if len({*found.groups, source["groups"]}) > 1:
        drawn.append(_groups(found, source, directory))
    if len(merged):
        drawn.append(_tradeoff(merged, looks, source, directory))
        if "merge_errors" in frame and len(plain := frame[frame.merge_errors.notna() & frame.series.isin(looks)]):
            drawn.append(_layers(plain, looks, directory))
    return drawn


def _looks(merged: pandas.DataFrame) -> dict[str, Row]:
    """Of each series: a colour and marker of its method, the same in every study; dashed and hollow where it is not the
    first way to train.
    """
    variants = list(dict.fromkeys((point.train, point.teacher) for point in merged.itertuples()))
    found = {}
    for point in merged.itertuples():
        variant, style = variants.index((point.train, point.teacher)), look(_METHODS.index(point.method) + 1)
        found[point.series] = style | {
            "linestyle": ("-", "--", ":", "-.")[variant % 4], "markeredgecolor": "#333333", "markeredgewidth": 0.8,
            "markerfacecolor": "#ffffff" if variant else style["color"],
        }  # fmt: skip
    return found


@contextmanager
def _row_of_panels(directory: Path, name: str, count: int, width: float, height: float) -> Iterator[Sequence[Axes]]:
    """`count` axes side by side that share losses as their y, and a legend of the first below them."""
    with panels(directory, name, 1, count, width=width, height=height, sharey=True) as (figure, axes):
        yield axes[0]
        _legend(figure, *axes[0, 0].get_legend_handles_labels())


def _methods(merged: pandas.DataFrame, directory: Path) -> Drawn:
    """Figure 4: bars, one panel for the shortest and one for the longest training."""
    shown = sorted({merged.alpha.min(), merged.alpha.max()})
    groups, names = sorted(merged.groups.unique()), list(merged.series.unique())
    shades, width = mpl.colormaps["Blues"], 0.8 / len(groups)
    with _row_of_panels(directory, "methods", len(shown), 5 * len(shown) + 1, 5) as axes:
        for axis, alpha in zip(axes, shown, strict=True):
            for number, count in enumerate(groups):
                bars = merged[(merged.alpha == alpha) & (merged.groups == count)]
                axis.bar(
                    [names.index(series) + (number - (len(groups) - 1) / 2) * width for series in bars.series],
                    bars.loss_increase, width, yerr=_error_bars(bars), capsize=3, edgecolor="#222222", linewidth=0.8,
                    color=shades((number + 1) / (len(groups) + 0.5)), label=heads(count),
                )  # fmt: skip
            axis.set_xticks(range(len(names)), names, rotation=35, ha="right")
            axis.set_title(f"trained on {100 * alpha:g} % (alpha {alpha:g})" if alpha else "converted, untrained")
            axis.grid(visible=False, axis="x")
            axis.axhline(0, color="#000000", linewidth=1)
        axes[0].set_ylabel("nats per token above the source")
    return "methods", "Loss by method (figure 4 of the GQA paper); error bars: lowest and highest seed"


def _alphas(
    found: pandas.DataFrame, merged: pandas.DataFrame, looks: dict[str, Row], source: Row, directory: Path
) -> Drawn:
    """Figure 5: a panel for each number of heads, a line for each method."""
    groups, alphas = sorted(merged.groups.unique()), sorted(found.alpha.unique())
    control = found[found.series == "source"].sort_values("alpha")
    with _row_of_panels(directory, "alphas", len(groups), max(6, 3.6 * len(groups)), 5) as axes:
        for axis, count in zip(axes, groups, strict=True):
            for series, style in looks.items():
                line = merged[(merged.series == series) & (merged.groups == count)].sort_values("alpha")
                axis.errorbar(line.alpha, line.loss, yerr=_error_bars(line), capsize=3, label=series, **style)
            if len(control) > 1:
                axis.plot(control.alpha, control.loss, ":", color="#000000", linewidth=1.5,
                          label="source, trained further")  # fmt: skip
            axis.axhline(source["loss"], label="source", **_SOURCE)
            axis.set_xscale("function", functions=(_root, lambda x: x * abs(x)))
            axis.xaxis.set_major_locator(FixedLocator(alphas))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
            axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
            axis.set(title=heads(count), xlabel="alpha")
        axes[0].set_ylabel("nats per token")
    return "alphas", "Loss by length of training (figure 5)"


def _root(values: Any) -> Any:
    """Alphas are chosen in ratios, and 0 is one of them."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _groups(found: pandas.DataFrame, source: Row, directory: Path) -> Drawn:
    """Figure 6: what a token costs by the number of heads."""
    at = pandas.concat([found, pandas.DataFrame([source])]).drop_duplicates("groups", keep="last").sort_values("groups")
    timed = "decode_seconds_per_token" in source
    with panels(directory, "groups", 1, 1 + timed, width=5 * (1 + timed) + 1, height=4.5) as (_, axes):
        memory, *others = axes[0]
        memory.plot(at.groups, at.kv_bytes_per_token / 1024, **look(1))
        memory.set(ylabel="KiB of KV cache per token", title="memory")
        for axis in others:
            time, low, high = at.decode_seconds_per_token, at.decode_fastest, at.decode_slowest
            axis.errorbar(at.groups, time * 1e3, yerr=[(time - low) * 1e3, (high - time) * 1e3], capsize=3, **look(2))
            axis.set(
                ylabel="milliseconds per decode step", title=f"time, {source['decode_tokens_before']:,} tokens read"
            )
        for axis in axes[0]:
            _powers_of_two(axis, at.groups)
            axis.set_xlabel("key/value heads")
            axis.set_ylim(bottom=0)
    return "groups", "Memory and time of decoding by the number of heads (figure 6); error bars: fastest and slowest"


def _powers_of_two(axis: Axes, ticks: Iterable[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def _tradeoff(merged: pandas.DataFrame, looks: dict[str, Row], source: Row, directory: Path) -> Drawn:
    """Figure 3: what is lost for what is saved. Faint: shorter training."""
    longest = merged.alpha.max()
    costs = [("kv_bytes_per_token", "KiB of KV cache per token", 1 / 1024)]
    if "decode_seconds_per_token" in source:
        costs.append(("decode_seconds_per_token", "milliseconds per decode step", 1e3))
    with panels(
        directory, "tradeoff", 1, len(costs), width=5 * len(costs) + 1, height=5.5, sharey=True
    ) as (figure, axes):  # fmt: skip
        for axis, (column, label, unit) in zip(axes[0], costs, strict=True):
            for point in merged.itertuples():
                style = looks[point.series] | {"linestyle": "", "alpha": 1 if point.alpha == longest else 0.3}
                axis.plot(getattr(point, column) * unit, point.loss, **style)
            _front(
                axis, [*zip(merged[column] * unit, merged.loss, strict=True), (source[column] * unit, source["loss"])]
            )
            axis.plot(source[column] * unit, source["loss"], "*", color="#000000", markersize=14)
            axis.set_xlabel(label)
        _powers_of_two(axes[0, 0], sorted({*merged.kv_bytes_per_token / 1024, source["kv_bytes_per_token"] / 1024}))
        axes[0, 0].set_ylabel("nats per token")
        handles = [Line2D([], [], label=series, **style | {"linestyle": ""}) for series, style in looks.items()]
        handles.append(Line2D([], [], marker="*", color="#000000", linestyle="", markersize=14, label="source"))
        handles.append(Line2D([], [], color="#777777", label="Pareto front"))
        _legend(figure, handles, [handle.get_label() for handle in handles])
    return "tradeoff", f"Quality against memory and time (figure 3); filled: alpha {longest:g}, faint: trained less"


def _front(axis: Axes, pairs: Sequence[tuple[float, float]]) -> None:
    """The steps between what nothing beats in both."""
    costs, losses = zip(*(pairs[index] for index in pareto_front(pairs)), strict=True)
    axis.step(costs, losses, where="post", color="#777777", linewidth=1.5, zorder=0)
    axis.plot(costs, losses, "o", markersize=15, markerfacecolor="none", markeredgecolor="#777777", zorder=0)


def _layers(plain: pandas.DataFrame, looks: dict[str, Row], directory: Path) -> Drawn:
    """What merging does to each attention module, before any training: `plain` are rows of merged, untrained cells."""
    first = plain.iloc[0]
    plain = plain[(plain.train == first.train) & (plain.teacher == first.teacher)]
    groups = sorted(plain.groups.unique())
    kinds = {"merge_errors": "each alone", "merge_errors_accumulated": "accumulated"}
    with panels(
        directory, "layers", 2, len(groups), width=max(6, 3.6 * len(groups)), height=7, sharex=True, sharey=True
    ) as (figure, axes):  # fmt: skip
        for line, (column, kind) in zip(axes, kinds.items(), strict=True):
            line[0].set_ylabel(kind)
            for axis, count in zip(line, groups, strict=True):
                for series, seeds in plain[plain.groups == count].groupby("series", sort=False)[column]:
                    axis.plot(np.mean(seeds.tolist(), axis=0), label=series, **looks[series])
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 0].set_ylim(bottom=0)  # of all: they share it
        for axis, below, count in zip(*axes, groups, strict=True):
            axis.set_title(heads(count))
            below.set_xlabel("layer")
        figure.supylabel("relative error of attention outputs", fontsize=13)
        _legend(figure, *axes[0, 0].get_legend_handles_labels())
    return "layers", "What merging does to each layer's attention output, untrained"


def _error_bars(found: pandas.DataFrame) -> Any:
    """From the mean down to the lowest seed and up to the highest; no bar where there is one seed."""
    if (found.seeds == 1).all():
        return None
    return np.where(found.seeds > 1, [found.loss - found.lowest, found.highest - found.loss], np.nan)


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[Any]) -> None:
    """Below, in as few lines as the width allows, all of a length."""
    lines = math.ceil(len(handles) / max(2, int(figure.get_figwidth() / 2.2)))
    figure.legend(handles, labels, loc="outside lower center", ncols=math.ceil(len(handles) / lines))
