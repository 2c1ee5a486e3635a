"""Pictures of a study, after figures 3 to 6 of the GQA paper (arXiv 2305.13245)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gqa.eval.plots import look, panels
from gqa.eval.study.study import UNMERGED
from gqa.eval.study.tradeoff import Point, pareto_front

Row = dict[str, Any]
Drawn = tuple[str, str]  # name and title

PICTURES = ("methods", "alphas", "groups", "tradeoff", "layers")
_METHODS = ("mean", "first", "random", "aligned", "calibrated", "refined", "procrustes")  # the last is yellow
_SOURCE = {"color": "#000000", "linestyle": "--", "linewidth": 1.5}


def draw_study(found: Sequence[Point], source: Row, directory: Path) -> list[Drawn]:
    """All pictures that the points have numbers for, as (name, title)."""
    merged = [point for point in found if point.method not in UNMERGED]
    looks = _looks(merged)
    drawn = []
    if merged:
        drawn.append(_methods(merged, directory))
        if len({point.alpha for point in merged}) > 1:
            drawn.append(_alphas(found, merged, looks, source, directory))
    if len({point.groups for point in found} | {source["groups"]}) > 1:
        drawn.append(_groups(found, source, directory))
    if merged:
        drawn.append(_tradeoff(merged, looks, source, directory))
        if any(point.rows[0].get("merge_errors") for point in merged):
            drawn.append(_layers(merged, looks, directory))
    return drawn


def _looks(merged: Sequence[Point]) -> dict[str, Row]:
    """Of each series: a colour and marker of its method, the same in every study; dashed and hollow where it is not the
    first way to train.
    """
    variants = list(dict.fromkeys((p.train, p.teacher) for p in merged))
    found = {}
    for point in merged:
        variant, style = variants.index((point.train, point.teacher)), look(_METHODS.index(point.method) + 1)
        found[point.series] = style | {
            "linestyle": ("-", "--", ":", "-.")[variant % 4], "markeredgecolor": "#333333", "markeredgewidth": 0.8,
            "markerfacecolor": "#ffffff" if variant else style["color"],
        }  # fmt: skip
    return found


def _methods(merged: Sequence[Point], directory: Path) -> Drawn:
    """Figure 4: bars, one panel for the shortest and one for the longest training."""
    alphas = sorted({point.alpha for point in merged})
    shown = list(dict.fromkeys((alphas[0], alphas[-1])))
    groups, names = sorted({p.groups for p in merged}), list(dict.fromkeys(p.series for p in merged))
    shades = mpl.colormaps["Blues"]
    with panels(directory, "methods", 1, len(shown), width=5 * len(shown) + 1, height=5, sharey=True) as (figure, axes):
        for axis, alpha in zip(axes[0], shown, strict=True):
            for number, count in enumerate(groups):
                bars = [(names.index(p.series), p) for p in merged if (p.alpha, p.groups) == (alpha, count)]
                width = 0.8 / len(groups)
                axis.bar(
                    [x + (number - (len(groups) - 1) / 2) * width for x, _ in bars],
                    [p.increase for _, p in bars], width,
                    yerr=_spread([p for _, p in bars]), capsize=3, edgecolor="#222222", linewidth=0.8,
                    color=shades((number + 1) / (len(groups) + 0.5)), label=_heads(count),
                )  # fmt: skip
            axis.set_xticks(range(len(names)), names, rotation=35, ha="right")
            axis.set_title(_share(alpha))
            axis.grid(visible=False, axis="x")
            axis.axhline(0, color="#000000", linewidth=1)
        axes[0, 0].set_ylabel("nats per token above the source")
        _legend(figure, axes[0, 0])
    return "methods", "Loss by method (figure 4 of the GQA paper); bars of error: lowest and highest seed"


def _alphas(
    found: Sequence[Point], merged: Sequence[Point], looks: dict[str, Row], source: Row, directory: Path
) -> Drawn:
    """Figure 5: a panel for each number of heads, a line for each method."""
    groups, alphas = sorted({p.groups for p in merged}), sorted({p.alpha for p in found})
    control = sorted((p for p in found if p.series == "source"), key=lambda p: p.alpha)
    with panels(
        directory, "alphas", 1, len(groups), width=max(6, 3.6 * len(groups)), height=5, sharey=True
    ) as (figure, axes):  # fmt: skip
        for axis, count in zip(axes[0], groups, strict=True):
            for name, style in looks.items():
                line = sorted((p for p in merged if (p.series, p.groups) == (name, count)), key=lambda p: p.alpha)
                axis.errorbar(
                    [p.alpha for p in line], [p.loss for p in line], yerr=_spread(line), capsize=3, label=name, **style
                )
            if len(control) > 1:
                axis.plot([p.alpha for p in control], [p.loss for p in control], ":", color="#000000",
                          linewidth=1.5, label="source, trained further")  # fmt: skip
            axis.axhline(source["loss"], label="source", **_SOURCE)
            axis.set_xscale("function", functions=(_root, lambda x: x * abs(x)))
            axis.xaxis.set_major_locator(FixedLocator(alphas))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:g} %"))
            axis.set_xlim(-alphas[-1] / 300, alphas[-1] * 1.2)
            axis.set(title=_heads(count), xlabel="alpha")
        axes[0, 0].set_ylabel("nats per token")
        _legend(figure, axes[0, 0])
    return "alphas", "Loss by length of training (figure 5)"


def _root(values: Any) -> Any:
    """Alphas are chosen in ratios, and 0 is one of them."""
    return np.sign(values) * np.sqrt(np.abs(values))


def _groups(found: Sequence[Point], source: Row, directory: Path) -> Drawn:
    """Figure 6: what a token costs by the number of heads."""
    at = {p.groups: p.rows[0] for p in found} | {source["groups"]: source}
    counts = sorted(at)
    timed = "decode_seconds_per_token" in source
    with panels(directory, "groups", 1, 1 + timed, width=5 * (1 + timed) + 1, height=4.5) as (_, axes):
        memory, *others = axes[0]
        memory.plot(counts, [at[c]["kv_bytes_per_token"] / 1024 for c in counts], **look(1))
        memory.set(ylabel="KiB of KV cache per token", title="memory")
        for axis in others:
            times = [at[c]["decode_seconds_per_token"] * 1e3 for c in counts]
            low, high = ([at[c][name] * 1e3 for c in counts] for name in ("decode_fastest", "decode_slowest"))
            errors = [
                [t - x for t, x in zip(times, low, strict=True)],
                [x - t for t, x in zip(times, high, strict=True)],
            ]
            axis.errorbar(counts, times, yerr=errors, capsize=3, **look(2))
            axis.set(
                ylabel="milliseconds per decode step", title=f"time, {source['decode_tokens_before']:,} tokens read"
            )
        for axis in axes[0]:
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xlabel("key/value heads")
            axis.set_ylim(bottom=0)
    return "groups", "Memory and time of decoding by the number of heads (figure 6); bars of error: fastest and slowest"


def _tradeoff(merged: Sequence[Point], looks: dict[str, Row], source: Row, directory: Path) -> Drawn:
    """Figure 3: what is lost for what is saved. Faint: shorter training."""
    longest = max(point.alpha for point in merged)
    costs = [("kv_bytes", "KiB of KV cache per token", 1 / 1024, source["kv_bytes_per_token"])]
    if merged[0].decode_seconds is not None:
        time = source["decode_seconds_per_token"]
        costs.append(("decode_seconds", "milliseconds per decode step", 1e3, time))
    with panels(
        directory, "tradeoff", 1, len(costs), width=5 * len(costs) + 1, height=5.5, sharey=True
    ) as (figure, axes):  # fmt: skip
        for axis, (name, label, unit, whole) in zip(axes[0], costs, strict=True):
            pairs = [(getattr(p, name) * unit, p.loss) for p in merged]
            for (cost, loss), point in zip(pairs, merged, strict=True):
                axis.plot(
                    cost, loss, **looks[point.series] | {"linestyle": "", "alpha": 1 if point.alpha == longest else 0.3}
                )
            _front(axis, [*pairs, (whole * unit, source["loss"])])
            axis.plot(whole * unit, source["loss"], "*", color="#000000", markersize=14)
            axis.set_xlabel(label)
        axes[0, 0].set_xscale("log", base=2)
        ticks = sorted({p.kv_bytes / 1024 for p in merged} | {source["kv_bytes_per_token"] / 1024})
        axes[0, 0].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes[0, 0].xaxis.set_minor_locator(NullLocator())
        axes[0, 0].set_ylabel("nats per token")
        handles = [Line2D([], [], label=series, **style | {"linestyle": ""}) for series, style in looks.items()]
        handles.append(Line2D([], [], marker="*", color="#000000", linestyle="", markersize=14, label="source"))
        handles.append(Line2D([], [], color="#777777", label="Pareto front"))
        figure.legend(handles=handles, loc="outside lower center", ncols=_columns(handles, figure))
    return "tradeoff", f"Quality against memory and time (figure 3); filled: alpha {longest:g}, faint: trained less"


def _front(axis: Axes, pairs: Sequence[tuple[float, float]]) -> None:
    """The steps between what nothing beats in both."""
    front = [pairs[index] for index in pareto_front(pairs)]
    costs, losses = zip(*front, strict=True)
    axis.step(costs, losses, where="post", color="#777777", linewidth=1.5, zorder=0)
    axis.plot(costs, losses, "o", markersize=15, markerfacecolor="none", markeredgecolor="#777777", zorder=0)


def _layers(merged: Sequence[Point], looks: dict[str, Row], directory: Path) -> Drawn:
    """What merging does to each attention module, before any training."""
    plain = [p for p in merged if not p.alpha and p.rows[0].get("merge_errors")]
    groups = sorted({p.groups for p in plain})
    kinds = {"merge_errors": "each alone", "merge_errors_accumulated": "accumulated"}
    with panels(
        directory, "layers", 2, len(groups), width=max(6, 3.6 * len(groups)), height=7, sharex=True, sharey=True
    ) as (figure, axes):  # fmt: skip
        for line, (column, kind) in zip(axes, kinds.items(), strict=True):
            line[0].set_ylabel(kind)
            for axis, count in zip(line, groups, strict=True):
                for point in plain:
                    if point.groups == count and point.teacher == plain[0].teacher and point.train == plain[0].train:
                        errors = [row[column] for row in point.rows]
                        means = [sum(layer) / len(layer) for layer in zip(*errors, strict=True)]
                        axis.plot(range(len(means)), means, label=point.series, **looks[point.series])
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 0].set_ylim(bottom=0)  # of all: they share it
        for axis, count in zip(axes[0], groups, strict=True):
            axis.set_title(_heads(count))
            axes[1, groups.index(count)].set_xlabel("layer")
        figure.supylabel("relative error of attention outputs", fontsize=13)
        _legend(figure, axes[0, 0])
    return "layers", "What merging does to each layer's attention output, untrained"


def _spread(some: Sequence[Point]) -> list[list[float]] | None:
    """From the mean down to the lowest seed and up to the highest; no bar where there is one seed."""
    if all(len(p.losses) == 1 for p in some):
        return None
    reach = [(p.loss - min(p.losses), max(p.losses) - p.loss) if p.losses[1:] else (np.nan, np.nan) for p in some]
    return [[down for down, _ in reach], [up for _, up in reach]]


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_columns(handles, figure))


def _columns(handles: Sequence[Any], figure: Figure) -> int:
    """Of a legend: as few lines as the width allows, all of a length."""
    most = max(2, int(figure.get_figwidth() / 2.2))
    return math.ceil(len(handles) / math.ceil(len(handles) / most))


def _heads(count: int) -> str:
    return f"{count} KV head{'s' * (count > 1)}"


def _share(alpha: float) -> str:
    return f"trained on {100 * alpha:g} % (alpha {alpha:g})" if alpha else "converted, untrained"
