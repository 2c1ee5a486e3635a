"""What pictures have in common: SVG and PNG, in colours that colour-blind readers can distinguish."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

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


def powers_of_two(axes: Axes, ticks: Iterable[float]) -> None:
    """Make x logarithmic, with exactly these ticks."""
    shown = sorted(set(ticks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{tick:,.10g}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())
