"""Token ids -> windows for scoring: integers only, without model or tensors.

A window is `ids` of length n + 1: the model reads ids[:-1] and predicts ids[1:], and the last `scored` of those n
predictions count. Every protocol is a list of windows, so scoring and batching do not depend on the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """`ids`: inputs and the last target; `scored`: number of predictions that count, from the end; `document`: number
    of the text; `source`: ids of the encoder, if there is one.
    """

    ids: tuple[int, ...]
    scored: int
    document: int = 0
    source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.scored < len(self.ids), f"{self.scored} scored of {len(self.ids)} ids"


def rolling_windows(ids: Sequence[int], context: int, prefix: int, document: int = 0) -> Iterator[Window]:
    """Each token scored exactly once: the windows of lm-evaluation-harness' `loglikelihood_rolling`.

    The first window starts with the token `prefix` (BOS) and scores up to `context` tokens; each later one scores the
    next `context` (or what is left, with left context up to `context` tokens in all).
    """
    first = min(context, len(ids))
    if first:
        yield Window((prefix, *ids[:first]), first, document)
    for begin in range(first, len(ids), context):
        end = min(begin + context, len(ids))
        yield Window(tuple(ids[end - context - 1 : end]), end - begin, document)


def batches(windows: Sequence[Window], size: int) -> Iterator[list[int]]:
    """Indices of windows, longest first so that little is padded, `size` at a time."""
    order = sorted(range(len(windows)), key=lambda i: (-len(windows[i].ids), -len(windows[i].source), i))
    for start in range(0, len(order), size):
        yield order[start : start + size]
