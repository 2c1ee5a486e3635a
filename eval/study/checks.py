"""Where a study agrees with the GQA paper (arXiv 2305.13245), and where not: found in the rows, not asserted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gqa.eval.study.tradeoff import Point

PAPER = ("mean", "first", "random")


@dataclass(frozen=True)
class Check:
    """A claim of the paper at one place of the grid; `detail` has the numbers."""

    claim: str
    where: str
    agrees: bool
    detail: str


def checks(found: Sequence[Point]) -> list[Check]:
    """All claims that the points have numbers for."""
    return [*_pooling(found), *_uptraining(found), *_useful_at_once(found), *_more_groups(found), *_decoding(found)]


def _merged(found: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """By what is trained and who teaches."""
    variants: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        variants.setdefault((point.train, point.teacher), []).append(point)
    return variants


def _variant(key: tuple[str, str]) -> str:
    train, teacher = key
    return f"{f', {train}' if train != 'all' else ''}{', taught' if teacher != 'none' else ''}"


def _pooling(found: Sequence[Point]) -> Iterator[Check]:
    for key, some in _merged(found).items():
        for groups, alpha in sorted({(p.groups, p.alpha) for p in some}):
            at = {p.method: p for p in some if (p.groups, p.alpha) == (groups, alpha) and p.method in PAPER}
            if len(at) == len(PAPER):
                losses = [at[method].loss for method in PAPER]
                yield Check(
                    "mean before first before random (figure 4)",
                    f"{_heads(groups)}, alpha {alpha:g}{_variant(key)}",
                    losses == sorted(losses),
                    ", ".join(f"{method} {loss:.3f}" for method, loss in zip(PAPER, losses, strict=True)),
                )


def _uptraining(found: Sequence[Point]) -> Iterator[Check]:
    for key, some in _merged(found).items():
        for method, groups in dict.fromkeys((p.method, p.groups) for p in some if p.method in PAPER):
            at = {p.alpha: p.loss for p in some if (p.method, p.groups) == (method, groups)}
            if {0.0, 0.05, 0.1} <= at.keys():
                first, second = at[0.0] - at[0.05], at[0.05] - at[0.1]
                yield Check(
                    "5 % of training gains, another 5 % gains less (figure 5)",
                    f"{method}, {_heads(groups)}{_variant(key)}",
                    first > 0 and first > second,
                    f"{first:+.3f} nats gained by alpha 0.05, {second:+.3f} more by 0.1",
                )


def _useful_at_once(found: Sequence[Point]) -> Iterator[Check]:
    """ "GQA already achieves reasonable performance after conversion while MQA requires uptraining" (section 3.3)."""
    for method in dict.fromkeys(p.method for p in found if p.method in PAPER[:2]):
        at = {p.groups: p.increase for p in found if p.method == method and not p.alpha}
        if 1 in at and len(at) > 1:
            least = max(groups for groups in at)
            yield Check(
                "untrained, groups lose less than a single head (figure 5)",
                method,
                at[least] < at[1] / 2,
                ", ".join(f"{_heads(groups)} {at[groups]:+.3f}" for groups in sorted(at)) + " (agrees below half)",
            )


def _more_groups(found: Sequence[Point]) -> Iterator[Check]:
    for key, some in _merged(found).items():
        alpha = max(p.alpha for p in some)
        for method in dict.fromkeys(p.method for p in some if p.method in PAPER[:2]):
            at = {p.groups: p.loss for p in some if p.method == method and p.alpha == alpha}
            if len(at) > 1:
                losses = [at[groups] for groups in sorted(at)]
                yield Check(
                    "more groups, better quality (figure 3, table 1)",
                    f"{method}, alpha {alpha:g}{_variant(key)}",
                    losses == sorted(losses, reverse=True),
                    ", ".join(f"{_heads(groups)} {at[groups]:.3f}" for groups in sorted(at)),
                )


def _decoding(found: Sequence[Point]) -> Iterator[Check]:
    at = {p.groups: p.decode_seconds for p in found if p.decode_seconds is not None}
    if len(at) > 2:
        times = [at[groups] for groups in sorted(at)]
        steps = [later / earlier for earlier, later in pairwise(times)]
        yield Check(
            "decoding takes longer with more groups, most from the last step (figure 6)",
            "all methods",
            times == sorted(times) and steps[-1] == max(steps),
            ", ".join(f"{_heads(groups)} {at[groups] * 1e3:.2f} ms" for groups in sorted(at)),
        )


def _heads(groups: int) -> str:
    return f"{groups} head{'s' * (groups > 1)}"
