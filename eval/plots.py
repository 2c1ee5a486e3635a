"""Pictures of an evaluation, as SVG and PNG, in colours that colour-blind readers can distinguish."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

Results = dict[str, Any]

# Okabe and Ito's palette; a marker repeats the information of each colour.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: dict[Any, Any] = {
    "font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.linewidth": 2, "lines.markersize": 7, "legend.frameon": False, "svg.hashsalt": "gqa", "savefig.dpi": 120,
    "text.parse_math": False,  # names of models may have a $
}  # fmt: skip


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th line."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


@contextmanager
def panels(
    directory: Path, name: str, columns: int = 1, *, width: float = 8, height: float = 5, sharey: bool = False
) -> Iterator[Any]:
    """Yield (1, columns) axes and save them as NAME.svg and NAME.png, with the legend of the first below, in as few
    lines as the width allows.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield (axes := figure.subplots(1, columns, squeeze=False, sharey=sharey))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        for lines in range(1, 1 + len(handles)):
            legend = figure.legend(handles, labels, loc="outside lower center", ncols=math.ceil(len(handles) / lines))
            if lines == len(handles) or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
        figure.savefig(directory / f"{name}.png")


def draw(results: Results, directory: Path) -> list[tuple[str, str]]:
    """Draw all pictures that the results have numbers for; (name, caption) of each."""
    models: list[Results] = results["models"]
    drawn = []
    for name, (title, caption, plot) in _PICTURES.items():
        if any(model.get(name) for model in models):
            with panels(directory, name) as ((axes,),):
                plot(models, axes)
                axes.set_title(title)
            drawn.append((name, caption))
    return drawn


def _points(axes: Axes, x: list[float], y: list[float], low: list[float], high: list[float], **style: Any) -> None:
    """Draw a line through y with error bars from low to high."""
    axes.errorbar(x, y, np.abs(np.array([low, high]) - y), capsize=3, **style)


def _recall(models: list[Results], axes: Axes) -> None:
    natural_text = [[point for point in model["recall"] if point["kind"] in ("text", "samples")] for model in models]
    for index, (model, candidates) in enumerate(zip(models, natural_text, strict=True)):
        natural = [point for point in candidates if point["kind"] == candidates[0]["kind"]]
        random = [point for point in model["recall"] if point["kind"] == "random"]
        for kind, line, points in ((natural[0]["kind"], "-", natural), ("random tokens", ":", random)):
            shares = [[100 * point[f"accuracy{end}"] for point in points] for end in ("", "_low", "_high")]
            label = f"{model['name']}, {kind}"
            _points(axes, [point["distance"] for point in points], *shares, linestyle=line, label=label, **look(index))
    powers_of_two(axes, [point["distance"] for point in natural_text[0]])
    axes.set(xlabel="tokens between the copies", ylabel="recalled (%)", ylim=(0, 102))


def _decode(models: list[Results], axes: Axes) -> None:
    for index, model in enumerate(models):
        points = model["decode"]["points"]
        for number, batch in enumerate(sorted({p["batch"] for p in points})):
            line = [p for p in points if p["batch"] == batch]
            times = [[p[key] * 1e3 for p in line] for key in ("seconds_per_token", "fastest", "slowest")]
            dash, label = ("-", "--", ":", "-.")[number % 4], f"{model['name']}, batch {batch}"
            _points(axes, [p["context"] for p in line], *times, linestyle=dash, label=label, **look(index))
    powers_of_two(axes, [p["context"] for p in models[0]["decode"]["points"]])
    axes.set(xlabel="context (tokens)", ylabel="milliseconds per token")
    # An outlier's bar may leave the picture; the lines must not be flattened by it.
    axes.set_ylim(0, 1.4e3 * max(p["seconds_per_token"] for m in models for p in m["decode"]["points"]))


def powers_of_two(axes: Axes, ticks: Iterable[float]) -> None:
    """Make x logarithmic, with exactly these ticks."""
    shown = sorted(set(ticks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{tick:,.10g}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())


# By the key of the numbers in a record.
_PICTURES = {
    "recall": (
        "Recall of second copies in the context",
        "Share of tokens of a second copy that are the most probable ones; error bars: 95 % intervals. Only the "
        "first copy determines random tokens.",
        _recall,
    ),
    "decode": ("Time per generated token", "Medians; error bars: the fastest and the slowest run.", _decode),
}
