"""A study as report.md, report.html and pictures, from study.json and the rows alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.write import write_text
from gqa.eval.report import Table, no_pictures, number
from gqa.eval.study.checks import checks
from gqa.eval.study.directory import RECORD, ROWS, Rows, read_record, writing
from gqa.eval.study.page import page
from gqa.eval.study.study import Cell
from gqa.eval.study.tradeoff import Point, points, recommend

BUDGETS = (0.01, 0.03, 0.1, 0.3, 1.0)  # nats per token


@dataclass(frozen=True)
class Results:
    """What a directory holds."""

    directory: Path
    record: dict[str, Any]
    rows: list[dict[str, Any]]

    @cached_property
    def points(self) -> list[Point]:
        return points(self.rows)

    @property
    def source(self) -> dict[str, Any]:
        found: dict[str, Any] = self.record["source"]
        return found


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
    alphas = sorted({point.alpha for point in results.points})
    found: dict[tuple[int, str], dict[float, Point]] = {}
    for point in results.points:
        found.setdefault((point.groups, point.series), {})[point.alpha] = point
    source = results.source
    rows = []
    if not any(series == "source" for _, series in found):
        rows.append(
            ("source", f"{source['groups']}", *_costs(source), f"{source['loss']:.4f}", *[""] * (len(alphas) - 1))
        )
    for (groups, series), at in found.items():
        costs = _costs(next(iter(at.values())).rows[0])
        rows.append((series, f"{groups}", *costs, *(_loss(at.get(alpha)) for alpha in alphas)))
    header = ("method", "KV heads", "KV bytes/token", "tokens/s", *(f"alpha {alpha:g}" for alpha in alphas))
    note = "nats per token on held-out text, means over seeds ± half of their range" + _failures(results)
    return Table(f"Study of {results.record['identity']['model']}", header, tuple(rows), note)


def _costs(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['kv_bytes_per_token']:,}", _number(row.get("decode_tokens_per_second"), ",.0f")


def _loss(point: Point | None) -> str:
    if point is None:
        return ""
    spread = f" ± {(max(point.losses) - min(point.losses)) / 2:.3f}" if len(point.losses) > 1 else ""
    return f"{point.loss:.4f}{spread}"


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _failures(results: Results) -> str:
    failed = sum(bool(row["error"]) for row in results.rows)
    return f"; {failed} of {len(results.rows)} cells failed, as the report says" if failed else ""


def _all_rows(results: Results) -> Table:
    """One line a cell."""
    header = ("method", "KV heads", "seed", "trains", "teacher", "alpha", "train tokens", "nats/token", "above source",
              "95 % of the ratio", "perplexity", "bits/byte", "KL", "same top", "KV bytes/token", "tokens/s",
              "s converting", "s training", "s measuring")  # fmt: skip
    rows = []
    for row in results.rows:
        cell = Cell.of(row)
        start = (cell.method, f"{cell.groups}", f"{cell.seed}", cell.train, cell.teacher, f"{cell.alpha:g}")
        if row["error"]:
            rows.append((*start, "", "failed", *[""] * (len(header) - len(start) - 2)))
            continue
        ratio = f"{row['perplexity_ratio_low']:.4g} - {row['perplexity_ratio_high']:.4g}"
        rows.append(
            (
                *start, f"{row['train_tokens']:,}", f"{row['loss']:.4f}", f"{row['loss_increase']:+.4f}",
                ratio if row.get("perplexity_ratio_low") else "", number(row["perplexity"]),
                _number(row["bits_per_byte"], ".4f"), _number(row["kl"], ".4f"), _number(row["top1_agreement"], ".1%"),
                f"{row['kv_bytes_per_token']:,}", _number(row.get("decode_tokens_per_second"), ",.0f"),
                *(_number(row.get(f"seconds_{what}"), ",.1f") for what in ("converting", "training", "evaluating")),
            )
        )  # fmt: skip
    text, source = results.source["text"], results.source
    note = (
        f"source: {source['loss']:.4f} nats per token; {text['tokens']:,} held-out tokens in {text['documents']:,} "
        f"documents, rolling windows of {text['context']:,}; KL in nats and same top token against the source"
    )
    if lost := source.get("kl_lost_to_rounding"):
        note += f" (rounding its predictions alone is a KL of {lost:.1g})"
    if "decode_tokens_before" in source:
        batch = results.record["identity"]["decode_batch"]
        note += f"; tokens/s: decoding {batch} sequences after {source['decode_tokens_before']:,} tokens"
    return Table("Cells", header, tuple(rows), note)


def _paper(results: Results) -> Iterable[Table]:
    found = checks(results.points)
    if found:
        rows = tuple((c.claim, c.where, "agrees" if c.agrees else "does not", c.detail) for c in found)
        agreeing = sum(check.agrees for check in found)
        note = f"{agreeing} of {len(found)} agree; numbers are nats per token, of means over seeds"
        header = ("claim of the GQA paper", "where", "this study", "numbers")
        yield Table("Where this agrees with the paper", header, rows, note)


def _budgets(results: Results) -> Table:
    rows = []
    for budget in BUDGETS:
        chosen = recommend(results.points, results.source["kv_bytes_per_token"], budget).chosen
        if chosen is None:
            rows.append((f"{budget:g}", "nothing smaller than the source", "", "", "", "", ""))
            continue
        share = chosen.kv_bytes / results.source["kv_bytes_per_token"]
        rows.append(
            (f"{budget:g}", chosen.series, f"{chosen.groups}", f"{chosen.alpha:g}", f"{chosen.kv_bytes:,}",
             f"{share:.0%}", f"{max(chosen.increases):+.4f}")
        )  # fmt: skip
    header = ("nats above source, at most", "method", "KV heads", "alpha", "KV bytes/token", "of the source", "above")
    return Table("The smallest cache within a budget", header, tuple(rows), "of the worst seed")


def _errors(results: Results) -> Iterable[Table]:
    rows = tuple(
        (row["method"], f"{row['groups']}", f"{row['seed']}", row["train"], row["teacher"], f"{row['alpha']:g}",
         row["error"])
        for row in results.rows if row["error"]
    )  # fmt: skip
    if rows:
        header = ("method", "KV heads", "seed", "trains", "teacher", "alpha", "why")
        yield Table("Cells that failed", header, rows, "the same command tries them again")


def _lead(results: Results) -> str:
    runs = [run for run in results.record["runs"] if run["cells"]]
    seconds = sum(run["seconds"] for run in runs)
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(one_line(run["command"], 4000) for run in runs))
    return f"{commands}\n\n{len(results.rows)} cells, measured in {seconds:,.0f} seconds."


def _foot(results: Results) -> str:
    run = results.record["runs"][-1]
    versions = ", ".join(f"{name} {found}" for name, found in run["versions"].items())
    commit = f", commit {run['git']}" if run.get("git") else ""
    return f"{run['created']}, {run['device']}, {run['threads']} threads; {versions}{commit}."


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

        pictures = draw_study(results.points, results.source, directory)
    title = f"{results.record['identity']['model']}: methods, groups and training"
    tables = [short_table(results), *_paper(results), _budgets(results), *_errors(results), _all_rows(results)]
    lead, foot = _lead(results), _foot(results)
    shown = [f"## {caption}\n\n![{caption}]({name}.svg)" for name, caption in pictures]
    first, *others = [table.markdown() for table in tables]
    markdown = [f"# {title}", lead, first, *shown, *others, *filter(None, [remark]), foot]
    write_text(directory / "report.md", "\n\n".join(markdown) + "\n")
    files = [(directory / f"{name}.svg", caption) for name, caption in pictures]
    write_text(directory / "report.html", page(title, lead, tables, files, " ".join(filter(None, [remark, foot]))))
    return sorted(path.name for path in directory.iterdir())
