"""A study as a page with pictures, from study.json and the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas

from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.provenance import command_line
from gqa.eval.page import PAGE, Page, made_aside, no_pictures
from gqa.eval.report import measured_with, texts_beside, verdict, what_is_scored
from gqa.eval.study.directory import RECORD, ROWS, Row, Rows, read_record, writing
from gqa.eval.study.study import Cell
from gqa.eval.study.tradeoff import BASE, Bounds, Recommendation, name, points, recommend
from gqa.eval.tables import Table, filled, not_measured, table

_BYTES = {"KV bytes/token": "{kv_bytes_per_token:,}"}
_SPEED = {"tokens/s": "{decode_tokens_per_second:,.0f}"}
CELL = {"method": "{method}", "KV heads": "{groups:.3g}", "seed": "{seed}", "trains": "{train}", "teacher": "{teacher}",
        "alpha": "{alpha:g}", "cache bits": "{bits:d}"}  # fmt: skip
_CELLS = {
    **CELL, "train tokens": "{train_tokens:,}", "nats/token": "{loss:.4f}",
    "above base": "{loss_increase:+.4f}",
    "95 % of the ratio": "{perplexity_ratio_low:.4g} - {perplexity_ratio_high:.4g}",
    "perplexity": "{perplexity:number}", "bits/byte": "{bits_per_byte:.4f}",
    "KL": "{kl:.4f}", "top-1 agreement": "{top1_agreement:.1%}",
    "accepted": "{acceptance:.1%}", "text recalled": "{recall_text:.1%}", "samples": "{recall_samples:.1%}",
    "random": "{recall_random:.1%}", "look-ups": "{recall_look_up:.1%}", "passkeys": "{recall_passkey:.1%}",
    "greedy tokens": "{greedy_tokens:.1f}", **_BYTES, **_SPEED,
    "s converting": "{seconds_converting:,.1f}", "s training": "{seconds_training:,.1f}",
    "s measuring": "{seconds_evaluating:,.1f}",
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """What a directory holds."""

    directory: Path
    record: Row
    rows: list[Row]

    @cached_property
    def points(self) -> pandas.DataFrame:
        return points(self.rows)

    @property
    def source(self) -> Row:
        found: Row = self.record["source"]
        return found

    @property
    def name(self) -> str:
        return str(self.record["identity"]["model"])

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["error"]]


def open_results(directory: Path) -> Results:
    """Raises RefusedError where there is no study, or none of its cells is measured."""
    record = read_record(directory)
    if record is None:
        raise RefusedError(f"{directory} holds no study ({RECORD}): name a MODEL to make one")
    rows = list(Rows(directory))
    if not rows or "source" not in record:
        raise RefusedError(f"{directory} holds a study of which nothing is measured yet: name its MODEL to continue it")
    return Results(directory, record, rows)


def _tables(results: Results) -> Iterator[Table]:
    """All of the report, the short one first."""
    yield short_table(results)
    yield _recall(results)
    if failed := results.failed:
        columns = filled(CELL | {"why": "{error}"}, failed)
        yield table("Cells that failed", columns, failed, "the same command tries them again")
    yield _cells(results)


def short_table(results: Results) -> Table:
    """What fits into a terminal: losses by method and number of heads, a column for each alpha."""
    note = "nats per token on held-out text, means over seeds ± half of their range"
    if failed := len(results.failed):
        note += f"; {failed} of {len(results.rows)} cells failed, as the report says"
    return _by_alpha(results, f"Study of {results.name}", _loss, _BYTES | _SPEED, note)


def _recall(results: Results) -> Table:
    """What the recommendation goes by, in the shape of the short table."""
    title, source = "Recall: second copies of the text", results.source
    if "recall_text" not in source:
        return not_measured(title, source.get("recall_refused", "this study has no numbers of it"))
    note = (
        f"share of tokens right at all distances within {source['text']['context']:,} tokens, means over seeds; where "
        f"they stand first the base model gets {source['recall_first_reading']:.1%} right"
    )
    return _by_alpha(results, title, lambda point: f"{point.recall_text:.1%}", {}, note)


def _by_alpha(results: Results, title: str, told: Callable[[Any], str], columns: Row, note: str) -> Table:
    found, alphas = results.points, [f"alpha {alpha:g}" for alpha in sorted(results.points.alpha.unique())]
    records = [
        some.iloc[0].to_dict() | {"at": {f"alpha {point.alpha:g}": told(point) for point in some.itertuples()}}
        for _, some in found.groupby(["groups", "series"], sort=False)
    ]
    if BASE not in set(found.series):
        source = pandas.Series(results.source | {"seeds": 1})
        records.insert(0, {"series": BASE, **results.source, "at": dict.fromkeys(alphas[:1], told(source))})
    columns = {"method": "{series}", "KV heads": "{groups:.3g}", **columns}
    return table(title, filled(columns | {alpha: f"{{at[{alpha}]}}" for alpha in alphas}, records), records, note)


def _loss(point: Any) -> str:
    return f"{point.loss:.4f}" + (f" ± {(point.highest - point.lowest) / 2:.3f}" if point.seeds > 1 else "")


def _cells(results: Results) -> Table:
    """One line a cell."""
    source = results.source
    note = f"base model: {source['loss']:.4f} nats per token; {what_is_scored(source['text'])}, held out"
    meanings = {
        "KL": "KL from the base model in nats",
        "accepted": "accepted: share of the tokens that the result drafts for the base model",
    }
    if "decode_tokens_before" in source:
        batch = results.record["identity"]["decode_batch"]
        meanings["tokens/s"] = f"tokens/s: decoding {batch} sequences after {source['decode_tokens_before']:,} tokens"
    rows = [Cell.of(row)._asdict() | {"loss": "failed"} if row["error"] else row for row in results.rows]
    return table("Cells", filled(_CELLS, rows), rows, note, meanings=meanings)


def write_study_report(results: Results, bounds: Bounds) -> list[str]:
    """report.html and, where matplotlib is installed, pictures beside the rows; returns all names.

    All are made aside first. Raises OutputError where they cannot be written; the rows are not touched.
    """
    with writing(results.directory), made_aside(results.directory) as aside:
        _make(results, aside, bounds)
        return [*sorted((path.name for path in aside.iterdir()), key=lambda name: (name != PAGE, name)), ROWS]


def _make(results: Results, directory: Path, bounds: Bounds) -> None:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval.study.plots import draw_study

        pictures = draw_study(results.rows, results.source, directory)
    runs = [run for run in results.record["runs"] if run["cells"]]
    advised, last = recommend(results.points, results.source, bounds), results.record["runs"][-1]
    made = list(dict.fromkeys(one_line(command_line("gqa-ablate", run["argv"]), 4000) for run in runs if run["argv"]))
    title, verdicts = f"{results.name}: methods, groups and training", _verdicts(results, advised)
    lead = f"{len(results.rows)} cells, measured in {sum(run['seconds'] for run in runs):,.0f} seconds."
    foot = " ".join([*filter(None, [remark]), f"{measured_with(last)}."])
    tables = list(_tables(results))
    Page(
        title=title, verdicts=verdicts, lead=lead, pictures=pictures, tables=tables, samples=_texts(results),
        commands=made, foot=foot,
    ).write(directory)  # fmt: skip


def _texts(results: Results) -> list[Any]:
    """What the base model writes and, of each smaller number of heads, the result of the least loss."""
    source, found = results.source, results.points
    if not {"samples"} <= source.keys() & {*found.columns}:  # recall was not measured, or by an earlier version
        return []
    shown = found[(found.groups < source["groups"]) & found.samples.notna()]  # rows of then have none
    best = shown.sort_values("loss").drop_duplicates("groups")
    models = [{"name": name(point), "samples": point.samples} for point in best.itertuples()]
    return list(texts_beside([{"name": BASE, **source}, *models]))


def _verdicts(results: Results, advised: Recommendation) -> list[str]:
    """What is recommended and what that costs, and why."""
    chosen, source = advised.chosen, results.source
    lines = [f"{label}: {line}." if label else f"{line}." for label, line in advised.lines]
    lines = [line[:1].upper() + line[1:] for line in lines]
    if chosen is None:
        return lines

    def record(of: Any, groups: float, **more: Any) -> Row:
        recalls = {"recall": of["recall_by_distance"]} if "recall_by_distance" in source else {}
        return {
            "heads": {"kv": f"{groups:.3g}"},
            "kv_cache": {"bytes_per_token": of["kv_bytes_per_token"]},
            **recalls,
            **more,
        }

    ratio = {name: chosen[f"perplexity_{name}"] for name in ("ratio", "ratio_low", "ratio_high")}
    ratio = {name: value for name, value in ratio.items() if pandas.notna(value)}  # one window has no bounds
    told = verdict(record(source, source["groups"]), record(chosen, chosen.groups, quality={}, against_baseline=ratio))
    trained = f"trained on {100 * chosen.alpha:g} % of the text" if chosen.alpha else "untrained"
    return [f"Recommended: {chosen.series}, {trained}. {told}.", *lines[1:]]
