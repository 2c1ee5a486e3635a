"""The metrics: one entry each.

`METRICS` are computed from arrays with one number per token of the scored text
(`gqa.eval.scoring`). From their entries come the records of `gqa-eval`, its tables on a terminal
and on the page, the rows, tables and axes of `gqa-ablate`, and the tables in docs/evaluating.md
(`python tests/test_metrics.py` writes them).

`RECALL_KINDS` are the kinds of questions about the context (`gqa.eval.recall`), shown in the same
places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gqa.corpus.statistics import mean_and_error, paired_ratio
from gqa.eval.page import Column, format_number
from gqa.eval.scoring import Scores
from gqa.eval.text import Text

Numbers = dict[str, Any]  # JSON-ready
TableName = Literal["quality", "distributions"]


@dataclass(frozen=True)
class RowNumber:
    """A number in the rows of a study.

    key: Its name in results.jsonl.
    path: Where it stands in the record of a model, like `quality.nats_per_token`.
    axis: What an axis of a picture calls it, if there is one.
    """

    key: str
    path: str
    axis: str = ""


@dataclass(frozen=True)
class Metric:
    """A number about a model's predictions of a text, with its error or interval.

    title, meaning, better: For the docs; `meaning` is the formula with its unit, `better` the
        direction.
    compares: Whether it compares a converted model with the base model. Records have metrics that
        do in `against_baseline`, others in `quality`.
    arrays: Names of the arrays per scored token that `measure` reads. Arrays of the base model are
        called `baseline_NAME`.
    measure: From arrays (tokens,) by name, and the text that they are from, to `keys` of the record
        and their values. A key may be missing where the text does not allow its value.
    keys: The value first, then what belongs to it: error, bounds, the sum that it is made of.
    table: The table of gqa-eval that shows it.
    columns: Columns of that table, of the numbers in `quality` or `against_baseline`.
    note: What is said of it below that table.
    row: Numbers in the rows of a study.
    study_columns: Columns of the table of a study, of the numbers in its rows.
    study_note: What is said of it below that table.
    """

    title: str
    meaning: str
    better: Literal["lower", "higher"]
    compares: bool
    arrays: tuple[str, ...]
    measure: Callable[[Scores, Text], Numbers]
    keys: tuple[str, ...]
    table: TableName = "quality"
    columns: tuple[Column, ...] = ()
    note: str = ""
    row: tuple[RowNumber, ...] = ()
    study_columns: tuple[Column, ...] = ()
    study_note: str = ""

    @property
    def section(self) -> str:
        """The part of a model's record that has its keys."""
        return "against_baseline" if self.compares else "quality"

    def is_measured(self, model: Mapping[str, Any]) -> bool:
        """Whether the record of a model has this metric."""
        return self.keys[0] in model.get(self.section, {})


def measure_text(scores: Scores, text: Text, compares: bool) -> Numbers:
    """Keys and values of all metrics that `scores` have the arrays for.

    Args:
        scores: Arrays (tokens,) by name.
        text: What the tokens are from.
        compares: Whether to return the metrics that compare with the base model, or the others.
    """
    numbers: Numbers = {}
    for metric in METRICS:
        if metric.compares == compares and scores.keys() >= {*metric.arrays}:
            numbers |= metric.measure(scores, text)
    return numbers


def arrays_read() -> set[str]:
    """Names of all arrays that metrics read."""
    return set(chain.from_iterable(metric.arrays for metric in METRICS))


def metrics_of_table(table: TableName) -> list[Metric]:
    """The metrics that a table of gqa-eval shows."""
    return [metric for metric in METRICS if metric.table == table]


def row_number(key: str) -> RowNumber:
    """The number in the rows of a study that is called `key`."""
    numbers = chain.from_iterable(metric.row for metric in METRICS)
    return next(number for number in numbers if number.key == key)


def mean_with_error(key: str, values: NDArray[Any]) -> Numbers:
    """The mean of values (tokens,) as `key`, and its standard error as `key_error`."""
    mean, error = mean_and_error(values)
    return {key: mean, f"{key}_error": error}


def _sum(nats: NDArray[Any]) -> float:
    return float(nats.sum(dtype="float64"))


def _exp(value: float) -> float:
    """exp(value), infinity beyond the range of floats."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _is_whole(text: Text) -> bool:
    """Whether its words and bytes are those of the scored tokens: no pair is cut, and the tokens
    cover any text (not if there is only BOS).
    """
    return not text.cut and text.bytes > 0


def _loss(scores: Scores, text: Text) -> Numbers:
    total = _sum(scores["nats"])
    tokens = len(scores["nats"])
    return {"nats": total, "nats_per_token": total / tokens, "tokens": tokens}


def _token_perplexity(scores: Scores, text: Text) -> Numbers:
    return {"token_perplexity": _exp(_sum(scores["nats"]) / len(scores["nats"]))}


def _word_perplexity(scores: Scores, text: Text) -> Numbers:
    if not _is_whole(text):
        return {"word_perplexity": None}
    return {"word_perplexity": _exp(_sum(scores["nats"]) / text.words)}


def _byte_perplexity(scores: Scores, text: Text) -> Numbers:
    if not _is_whole(text):
        return {"byte_perplexity": None}
    return {"byte_perplexity": _exp(_sum(scores["nats"]) / text.bytes)}


def _bits_per_byte(scores: Scores, text: Text) -> Numbers:
    if not _is_whole(text):
        return {"bits_per_byte": None}
    return {"bits_per_byte": _sum(scores["nats"]) / text.bytes / math.log(2)}


def _perplexity_ratio(scores: Scores, text: Text) -> Numbers:
    return dict(paired_ratio(scores["nats"], scores["baseline_nats"], text.clusters))


def _mean_kl(scores: Scores, text: Text) -> Numbers:
    return {"kl": mean_with_error("mean", scores["kl"])}


def _agreement(scores: Scores, text: Text) -> Numbers:
    return mean_with_error("top1_agreement", scores["top1_agreement"])


def _acceptance(scores: Scores, text: Text) -> Numbers:
    return mean_with_error("acceptance", scores["acceptance"])


# In the order of the columns.
METRICS = (
    Metric(
        title="loss",
        meaning="mean of -ln q(token) over all tokens, in nats",
        better="lower",
        compares=False,
        arrays=("nats",),
        measure=_loss,
        keys=("nats_per_token", "nats", "tokens"),
        row=(
            RowNumber("loss", "quality.nats_per_token"),
            RowNumber(
                "loss_increase",
                "against_baseline.log_ratio",
                axis="nats per token above the base model",
            ),
            RowNumber("loss_increase_error", "against_baseline.log_ratio_error"),
        ),
        study_columns=(
            Column("nats/token", "{loss:.4f}"),
            Column("above base", "{loss_increase:+.4f}"),
            # Of the perplexity ratio below, exp(loss_increase): its interval stands beside it
            Column(
                "95% of the ratio", "{perplexity_ratio_low:,.3f} - {perplexity_ratio_high:,.3f}"
            ),
        ),
    ),
    Metric(
        title="perplexity",
        meaning="exp(nats / tokens)",
        better="lower",
        compares=False,
        arrays=("nats",),
        measure=_token_perplexity,
        keys=("token_perplexity",),
        columns=(Column("perplexity", lambda quality: format_number(quality["token_perplexity"])),),
        row=(RowNumber("perplexity", "quality.token_perplexity"),),
        study_columns=(Column("perplexity", lambda row: format_number(row["perplexity"])),),
    ),
    Metric(
        title="word perplexity",
        meaning="exp(nats / words)",
        better="lower",
        compares=False,
        arrays=("nats",),
        measure=_word_perplexity,
        keys=("word_perplexity",),
    ),
    Metric(
        title="byte perplexity",
        meaning="exp(nats / bytes)",
        better="lower",
        compares=False,
        arrays=("nats",),
        measure=_byte_perplexity,
        keys=("byte_perplexity",),
    ),
    Metric(
        title="perplexity ratio",
        meaning="perplexity / that of the baseline, on the same tokens; 1 is no loss",
        better="lower",
        compares=True,
        arrays=("nats", "baseline_nats"),
        measure=_perplexity_ratio,
        keys=("ratio", "ratio_low", "ratio_high", "log_ratio", "log_ratio_error"),
        columns=(
            Column("ratio", "{ratio:,.3f}"),
            Column("95% interval", "{ratio_low:,.3f} - {ratio_high:,.3f}"),
        ),
        row=(
            RowNumber("perplexity_ratio", "against_baseline.ratio"),
            RowNumber("perplexity_ratio_low", "against_baseline.ratio_low"),
            RowNumber("perplexity_ratio_high", "against_baseline.ratio_high"),
        ),
    ),
    Metric(
        title="bits per byte",
        meaning="nats / (bytes x ln 2); comparable between tokenizers",
        better="lower",
        compares=False,
        arrays=("nats",),
        measure=_bits_per_byte,
        keys=("bits_per_byte",),
        columns=(Column("bits/byte", "{bits_per_byte:.4f}"),),
        row=(RowNumber("bits_per_byte", "quality.bits_per_byte"),),
        study_columns=(Column("bits/byte", "{bits_per_byte:.4f}"),),
    ),
    Metric(
        title="KL divergence",
        meaning="mean of KL(baseline || model) over all tokens, in nats",
        better="lower",
        compares=True,
        arrays=("kl",),
        measure=_mean_kl,
        keys=("kl",),
        table="distributions",
        columns=(Column("mean KL", "{kl[mean]:.4f} ± {kl[mean_error]:.1g}"),),
        note="KL(baseline || model) in nats, over the vocabulary that both models have",
        row=(RowNumber("kl", "against_baseline.kl.mean"),),
        study_columns=(Column("KL", "{kl:.4f}"),),
        study_note="KL from the base model in nats",
    ),
    Metric(
        title="top-1 agreement",
        meaning="share of positions where argmax p = argmax q",
        better="higher",
        compares=True,
        arrays=("top1_agreement",),
        measure=_agreement,
        keys=("top1_agreement", "top1_agreement_error"),
        table="distributions",
        columns=(Column("top-1 agreement", "{top1_agreement:.2%}"),),
        row=(RowNumber("top1_agreement", "against_baseline.top1_agreement"),),
        study_columns=(Column("top-1 agreement", "{top1_agreement:.1%}"),),
    ),
    Metric(
        title="acceptance",
        meaning="mean of sum over x of min(p(x), q(x)): the share of tokens drafted by the model "
        "that the baseline accepts in speculative decoding at temperature 1 "
        "([2211.17192](https://arxiv.org/abs/2211.17192), section 3.2)",
        better="higher",
        compares=True,
        arrays=("acceptance",),
        measure=_acceptance,
        keys=("acceptance", "acceptance_error"),
        table="distributions",
        columns=(Column("acceptance", "{acceptance:.2%}"),),
        note="acceptance: share of tokens drafted by the model that the baseline accepts in "
        "speculative decoding at temperature 1",
        row=(RowNumber("acceptance", "against_baseline.acceptance"),),
        study_columns=(Column("acceptance", "{acceptance:.1%}"),),
        study_note="acceptance: share of drafted tokens that the base model accepts",
    ),
)


@dataclass(frozen=True)
class RecallKind:
    """A kind of questions about the context; the number is the share of right answers.

    name: In records, and the title of its column.
    question, counted: For the docs: what the model reads, and which predictions are answers.
    study_title: Of its column in gqa-ablate, where other columns stand beside it; by default its
        name.
    """

    name: str
    question: str
    counted: str
    study_title: str = ""

    @property
    def row_key(self) -> str:
        """Its name in the rows of a study."""
        return recall_key(self.name)


def recall_key(kind: str) -> str:
    """The name, in the rows of a study, of the recall of a kind of questions."""
    return f"recall_{kind}"


RECALL_KINDS = (
    RecallKind(
        "text",
        study_title="text recalled",
        question=(
            "a passage of N tokens from `--data`, then its first tokens again, at most 192. N: "
            "from 64 to what fits into `--context`"
        ),
        counted="the second copy without its first token",
    ),
    RecallKind(
        "generated",
        question="the same with text generated by the base model, N up to 512",
        counted="the same",
    ),
    RecallKind(
        "random",
        question="the same with random tokens, which only lookup can predict, N up to 512",
        counted="the same",
    ),
    RecallKind(
        "values",
        question="16 lines of the form `key: value` (both random words), then text, then all keys "
        "in a different order",
        counted="the value of each key",
    ),
    RecallKind(
        "passkeys",
        question="a text that contains five random words at one of five depths, and asks for them "
        "at its end",
        counted="each word",
    ),
)


def main_kind(recall: Collection[str]) -> str:
    """The kind of recall that counts for a verdict: that of the text, or without one of
    generated text.
    """
    return "text" if "text" in recall else "generated"


def recall_by_kind(model: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of each kind of question over all distances, from the record of a model."""
    answers = dict[str, int]()
    right = dict[str, float]()
    for line in model["recall"]:
        kind = line["kind"]
        answers[kind] = answers.get(kind, 0) + line["answers"]
        right[kind] = right.get(kind, 0.0) + line["accuracy"] * line["answers"]
    return {kind: right[kind] / answers[kind] for kind in answers}
