"""Where a study agrees with the GQA paper (arXiv 2305.13245), and where not: found in the rows, not asserted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas

from gqa.eval.study.tradeoff import heads

POOLED = ["mean", "first"]
PAPER = [*POOLED, "random"]
_HOW = ["train", "teacher"]


class Check(NamedTuple):
    """A claim of the paper at one place of the grid; `detail` has the numbers."""

    claim: str
    where: str
    agrees: bool
    detail: str


def checks(points: pandas.DataFrame) -> list[Check]:
    """All claims that the points have numbers for."""
    if points.empty:
        return []
    paper = points[points.method.isin(PAPER)]
    paper = paper.assign(method=pandas.Categorical(paper.method, PAPER))  # in this order
    pooled = paper[paper.method.isin(POOLED)]
    return [*_pooling(paper), *_uptraining(paper), *_useful_at_once(pooled), *_more_groups(pooled), *_decoding(points)]


def _table(points: pandas.DataFrame, lines: Sequence[str], across: str, value: str = "loss") -> pandas.DataFrame:
    return points.pivot(index=list(lines), columns=across, values=value)


def _how(train: str, teacher: str) -> str:
    return f"{f', {train}' if train != 'all' else ''}{', taught' if teacher != 'none' else ''}"


def _losses(losses: pandas.Series, sign: str = "") -> str:
    """By the number of heads."""
    return ", ".join(f"{heads(groups)} {loss:{sign}.3f}" for groups, loss in losses.items())


def _pooling(paper: pandas.DataFrame) -> Iterator[Check]:
    table = _table(paper, [*_HOW, "groups", "alpha"], "method").reindex(columns=PAPER).dropna()
    for (train, teacher, groups, alpha), losses in table.iterrows():
        yield Check(
            "mean before first before random (figure 4)",
            f"{heads(groups)}, alpha {alpha:g}{_how(train, teacher)}",
            losses.is_monotonic_increasing,
            ", ".join(f"{method} {loss:.3f}" for method, loss in losses.items()),
        )


def _uptraining(paper: pandas.DataFrame) -> Iterator[Check]:
    table = _table(paper, [*_HOW, "groups", "method"], "alpha").reindex(columns=[0.0, 0.05, 0.1]).dropna()
    for (train, teacher, groups, method), (untrained, five, ten) in table.iterrows():
        first, second = untrained - five, five - ten
        yield Check(
            "5 % of training gains, another 5 % gains less (figure 5)",
            f"{method}, {heads(groups)}{_how(train, teacher)}",
            first > 0 and first > second,
            f"{first:+.3f} nats gained by alpha 0.05, {second:+.3f} more by 0.1",
        )


def _useful_at_once(pooled: pandas.DataFrame) -> Iterator[Check]:
    """ "GQA already achieves reasonable performance after conversion while MQA requires uptraining" (section 3.3)."""
    untrained = pooled[pooled.alpha == 0].drop_duplicates(["method", "groups"])
    for method, increases in _table(untrained, ["method"], "groups", "loss_increase").iterrows():
        found = increases.dropna()
        if 1 in found.index and len(found) > 1:
            yield Check(
                "untrained, groups lose less than a single head (figure 5)",
                str(method),
                found.iloc[-1] < found[1] / 2,
                f"{_losses(found, '+')} (agrees below half)",
            )


def _more_groups(pooled: pandas.DataFrame) -> Iterator[Check]:
    longest = pooled[pooled.alpha == pooled.groupby(_HOW).alpha.transform("max")]
    for (train, teacher, method, alpha), losses in _table(longest, [*_HOW, "method", "alpha"], "groups").iterrows():
        found = losses.dropna()
        if len(found) > 1:
            yield Check(
                "more groups, better quality (figure 3, table 1)",
                f"{method}, alpha {alpha:g}{_how(train, teacher)}",
                found.is_monotonic_decreasing,
                _losses(found),
            )


def _decoding(points: pandas.DataFrame) -> Iterator[Check]:
    if "decode_seconds_per_token" not in points:
        return
    times = points.dropna(subset="decode_seconds_per_token").groupby("groups").decode_seconds_per_token.first() * 1e3
    if len(times) > 2:
        steps = times.diff().dropna()
        yield Check(
            "decoding takes longer with more groups, most from the last step (figure 6)",
            "all methods",
            times.is_monotonic_increasing and steps.iloc[-1] == steps.max(),
            ", ".join(f"{heads(groups)} {time:.2f} ms" for groups, time in times.items()),
        )
