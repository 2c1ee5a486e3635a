"""Whether a model falls apart far into its context: its loss by the number of tokens read before, beside the base's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.corpus.windows import Window
from gqa.eval.statistics import Floats, paired_ratio

Ints = NDArray[np.integer[Any]]

BINS = 8
LONGEST = 8192  # tokens of a window that is not asked for: a model of 128k positions would take hours of a CPU
READ = 1 << 15  # tokens that are read in such windows, but two windows at least
RUN = 256  # tokens next to each other that are resampled together for an interval


def long_windows(stream: Ints, positions: int | None, context: int, prefix: int) -> list[Window]:
    """Windows as long as a model's positions (LONGEST at most), all of whose tokens are scored.

    They are spread over the text, of which `stream` are the token ids, without overlapping; halved until it has two of
    them. None where that is no more than the `context` in which the text is scored anyway.
    """
    length = min(positions or LONGEST, LONGEST)
    while length > max(context, len(stream) // 2):
        length //= 2
    if length <= context:
        return []
    starts = np.linspace(0, len(stream) - length, max(2, min(READ, len(stream)) // length)).astype(int)
    return [Window((prefix, *stream[start : start + length].tolist()), length, n) for n, start in enumerate(starts)]


def read_before(windows: Sequence[Window]) -> Ints:
    """Of each scored prediction how many tokens are read before it."""
    places: list[Ints] = [np.arange(len(window.ids) - window.scored, len(window.ids)) for window in windows]
    return np.concatenate(places)


def runs(windows: Sequence[Window]) -> Ints:
    """Of each scored prediction which run of tokens it is resampled with."""
    number: Ints = np.repeat(range(len(windows)), [window.scored for window in windows])
    return np.asarray(read_before(windows) // RUN + (LONGEST // RUN + 1) * number)


def by_context(
    nats: Floats, windows: Sequence[Window], baseline: Floats | None = None, cluster: Ints | None = None
) -> list[dict[str, Any]]:
    """Mean nats by the number of tokens read before: bins that double in width, as attention's reach is judged.

    With the `baseline`'s nats each bin has the ratio of perplexities too, and its interval (`paired_ratio`).
    """
    context, result = read_before(windows), []
    for low, high in pairwise([0, *sorted({math.ceil(int(context.max()) / 2**i) for i in range(BINS)})]):
        inside = (context > low) & (context <= high)
        if inside.any():
            found = {"from": low + 1, "to": high, "nats": float(nats[inside].mean(dtype=np.float64))}
            if baseline is not None and cluster is not None:
                ratio = paired_ratio(nats[inside], baseline[inside], cluster[inside])
                found |= {key: value for key, value in ratio.items() if key.startswith("ratio")}
            result.append(found | {"tokens": int(inside.sum())})
    return result
