"""A study as report.md, report.html and pictures, from study.json and the rows alone."""

from __future__ import annotations

import re
import tempfile
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import pandas

from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.write import write_text
from gqa.eval.report import Table, no_pictures, shown
from gqa.eval.study.checks import checks
from gqa.eval.study.directory import RECORD, ROWS, Row, Rows, read_record, writing
from gqa.eval.study.tradeoff import points, recommend

BUDGETS = (0.01, 0.03, 0.1, 0.3, 1.0)  # nats per token
_BYTES, _SPEED = "{kv_bytes_per_token:,}", "{decode_tokens_per_second:,.0f}"
_CELL = {"method": "{method}", "KV heads": "{groups}", "seed": "{seed}", "trains": "{train}", "teacher": "{teacher}",
         "alpha": "{alpha:g}"}  # fmt: skip
_FOUND = {
    "train tokens": "{train_tokens:,}", "nats/token": "{loss:.4f}", "above source": "{loss_increase:+.4f}",
    "95 % of the ratio": "{perplexity_ratio_low:.4g} - {perplexity_ratio_high:.4g}",
    "perplexity": "{perplexity:number}", "bits/byte": "{bits_per_byte:.4f}",
    "KL": "{kl:.4f}", "top-1 agreement": "{top1_agreement:.1%}",
    "KV bytes/token": _BYTES, "tokens/s": _SPEED,
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


def short_table(results: Results) -> Table:
    """What fits into a terminal: losses by method and number of heads, a column for each alpha."""
    source, found = results.source, results.points
    alphas = sorted(found["alpha"].unique()) if len(found) else []
    rows = []
    if found.empty or "source" not in set(found.series):
        loss = [f"{source['loss']:.4f}", *[""] * (len(alphas) - 1)]
        rows.append(("source", f"{source['groups']}", *shown(source, (_BYTES, _SPEED)), *loss[: len(alphas)]))
    for (groups, series), some in found.groupby(["groups", "series"], sort=False) if len(found) else ():
        losses = {point.alpha: _loss(point) for point in some.itertuples()}
        rows.append(
            (series, f"{groups}", *shown(some.iloc[0], (_BYTES, _SPEED)), *(losses.get(alpha, "") for alpha in alphas))
        )
    header = ("method", "KV heads", "KV bytes/token", "tokens/s", *(f"alpha {alpha:g}" for alpha in alphas))
    note = "nats per token on held-out text, means over seeds ± half of their range"
    if failed := len(results.failed):
        note += f"; {failed} of {len(results.rows)} cells failed, as the report says"
    return Table(f"Study of {results.record['identity']['model']}", header, tuple(rows), note)


def _loss(point: Any) -> str:
    return f"{point.loss:.4f}" + (f" ± {(point.highest - point.lowest) / 2:.3f}" if point.seeds > 1 else "")


def _all_rows(results: Results) -> Table:
    """One line a cell."""
    rows = []
    for row in results.rows:
        found = ("", "failed", *[""] * (len(_FOUND) - 2)) if row["error"] else shown(row, _FOUND.values())
        rows.append((*shown(row, _CELL.values()), *found))
    text, source = results.source["text"], results.source
    note = (
        f"source: {source['loss']:.4f} nats per token; {text['tokens']:,} held-out tokens in {text['documents']:,} "
        f"documents, rolling windows of {text['context']:,}; KL in nats and top-1 agreement with the source"
    )
    if lost := source.get("kl_lost_to_rounding"):
        note += f" (rounding its predictions alone is a KL of {lost:.1g})"
    if "decode_tokens_before" in source:
        batch = results.record["identity"]["decode_batch"]
        note += f"; tokens/s: decoding {batch} sequences after {source['decode_tokens_before']:,} tokens"
    return Table("Cells", (*_CELL, *_FOUND), tuple(rows), note)


def _tables(results: Results) -> Iterator[Table]:
    """All of the report, the short one first."""
    yield short_table(results)
    if found := checks(results.points):
        rows = tuple((c.claim, c.where, "agrees" if c.agrees else "does not", c.detail) for c in found)
        agreeing = sum(check.agrees for check in found)
        note = f"{agreeing} of {len(found)} agree; numbers are nats per token, of means over seeds"
        header: tuple[str, ...] = ("claim of the GQA paper", "where", "this study", "numbers")
        yield Table("Where this agrees with the paper", header, rows, note)
    yield _budgets(results)
    if failed := results.failed:
        rows = tuple((*shown(row, _CELL.values()), row["error"]) for row in failed)
        yield Table("Cells that failed", (*_CELL, "why"), rows, "the same command tries them again")
    yield _all_rows(results)


def _budgets(results: Results) -> Table:
    rows, whole = [], results.source["kv_bytes_per_token"]
    for budget in BUDGETS:
        chosen = recommend(results.points, whole, budget).chosen
        if chosen is None:
            found = ["nothing smaller than the source", *[""] * 5]
        else:
            share = chosen.kv_bytes_per_token / whole
            names = "{series}", "{groups}", "{alpha:g}", _BYTES
            found = [*shown(chosen, names), f"{share:.0%}", f"{chosen.worst:+.4f}"]
        rows.append((f"{budget:g}", *found))
    header = ("nats above source, at most", "method", "KV heads", "alpha", "KV bytes/token", "of the source", "above")
    return Table("The smallest cache within a budget", header, tuple(rows), "of the worst seed")


def write_study_report(results: Results) -> list[str]:
    """report.md, report.html and, where matplotlib is installed, pictures beside the rows; returns all names.

    All are made aside first. Raises OutputError where they cannot be written; the rows are not touched.
    """
    directory = results.directory
    with writing(directory), tempfile.TemporaryDirectory(prefix=".report-", dir=directory) as aside:
        made = _make(results, Path(aside))
        for name in made:
            (Path(aside) / name).replace(directory / name)
    return ["report.md", "report.html", *(name for name in made if "report" not in name), ROWS]


def _make(results: Results, directory: Path) -> list[str]:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval.study.plots import draw_study

        pictures = draw_study(results.rows, results.source, directory)
    title = f"{results.record['identity']['model']}: methods, groups and training"
    runs = [run for run in results.record["runs"] if run["cells"]]
    commands = list(dict.fromkeys(one_line(run["command"], 4000) for run in runs))
    lead = f"{len(results.rows)} cells, measured in {sum(run['seconds'] for run in runs):,.0f} seconds."
    last = results.record["runs"][-1]
    versions = ", ".join(f"{name} {found}" for name, found in last["versions"].items())
    commit = f", commit {last['git']}" if last.get("git") else ""
    made = f"{last['created']}, {last['device']}, {last['threads']} threads; {versions}{commit}."
    feet, tables = [*filter(None, [remark]), made], list(_tables(results))
    pasted = [f"## {caption}\n\n![{caption}]({name}.svg)" for name, caption in pictures]
    first, *others = [table.markdown() for table in tables]
    indented = "\n".join(f"    {command}" for command in commands)
    write_text(
        directory / "report.md", "\n\n".join([f"# {title}", indented, lead, first, *pasted, *others, *feet]) + "\n"
    )
    figures = [{"caption": text, "data": _base64(directory / f"{name}.svg")} for name, text in pictures]
    html = page(title=title, commands=commands, lead=lead, tables=tables, figures=figures, foot=" ".join(feet))
    write_text(directory / "report.html", html)
    return sorted(path.name for path in directory.iterdir())


def _base64(path: Path) -> str:
    return b64encode(path.read_bytes()).decode()


def page(**given: Any) -> str:
    """A whole HTML document; page.html.jinja says of what. Text is escaped."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["kinds"] = _kinds
    return environment.get_template("page.html.jinja").render(given)


def _kinds(table: Table) -> list[str]:
    """Of its columns: numbers, of which a few may be words as `failed` is; words on one line; or longer words."""

    def kind(column: Sequence[str]) -> str:
        if 2 * sum(bool(re.search("[a-z]{3}", cell)) for cell in column) <= len(column):
            return "numbers"
        return "words" if max(map(len, column)) <= 30 else "long words"

    return [kind(column) for column in zip(*table.rows, strict=True)]
