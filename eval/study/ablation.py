"""`gqa-ablate`: a loop over cells that converts, trains and evaluates. A study is a directory; running it again
continues it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click

from gqa.checkpoint.console import progress_bar
from gqa.checkpoint.errors import DivergedError, OutputError, RefusedError, StoppedError, explain, one_line
from gqa.checkpoint.loading import out_of_memory
from gqa.checkpoint.provenance import checkpoint_digest, portable, without_place
from gqa.convert import convert_checkpoint
from gqa.convert.methods import METHODS
from gqa.convert.plan import make_plan
from gqa.corpus.sources import parse_sources, row_digest
from gqa.eval import evaluate
from gqa.eval.options import EvaluateOptions
from gqa.eval.report import recalled
from gqa.eval.study.directory import Row, append_row, check_directory, clear, locked_work, read_rows
from gqa.eval.study.options import UNMERGED, AblateOptions, Cell
from gqa.eval.study.report import CELL_COLUMNS
from gqa.eval.subjects import Subject, open_subjects
from gqa.eval.tables import Table, table
from gqa.eval.text import Text, check_ids, check_target_field, choose_context, make_pairs, make_text
from gqa.uptrain.dataloader import heldout_sources, open_dataloader, open_pairs
from gqa.uptrain.options import TrainOptions, differences
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import find_block_size, prepare
from gqa.uptrain.state import States


@dataclass(frozen=True)
class Study:
    """A study that has passed all checks; nothing is written yet.

    subject: the base model; identity: options and hashes that all rows of the directory must share; left_out: default
    methods that the model cannot have, with the reasons.
    """

    options: AblateOptions
    subject: Subject
    cells: list[Cell]
    text: Text
    identity: Row
    left_out: dict[str, str]

    @property
    def unmeasured(self) -> list[Cell]:
        """Cells without a row, or whose row has an error."""
        rows = read_rows(self.options.output)
        return [cell for cell in self.cells if cell not in rows or rows[cell]["error"]]


def open_study(options: AblateOptions) -> Study:
    """Check all options before anything is written. Raises RefusedError and CorpusError."""
    options.check()
    if not options.model:
        raise RefusedError("no model is named; give a directory or a hub id")
    subject = open_subjects([options.model], options.trust_remote_code)[0]
    options = replace(options, model=subject.path)
    training, maps = options.training, options.maps
    subject.check_predicts_tokens()
    check_target_field(subject, training.target_field)
    if not training.data:
        raise RefusedError("no data is named: give text to train and calibrate on with --data, like stdlib:train")
    if any(source.partition(":")[0] == "self" for source in training.data):
        raise RefusedError("--data self is no text that can be held out; name text (self can be had for --calibration)")
    cells, left_out = _choose_cells(subject, options)
    if any(cell.method != UNMERGED and METHODS[cell.method].reads_text for cell in cells):
        maps.text.check(subject.config, subject.name, "the context of calibration")
    text = _heldout_text(subject, options)
    for alpha in filter(None, options.alphas):
        _check_training(subject, replace(training, alpha=alpha))
    sources = parse_sources(training.data, field=training.field, target_field=training.target_field)
    identity = json.loads(json.dumps({
        "model": without_place(subject.checkpoint.hub_id or subject.name),
        "fingerprint": checkpoint_digest(subject.checkpoint),
        **options.identity(),
        "content of the data": row_digest(" ".join(source.identify() for source in sources)).hex(),
        "content of the held-out text": row_digest(
            repr([window.source + window.ids for window in text.windows])
        ).hex(),
    }))  # fmt: skip
    check_directory(options.output)
    before = next((row["options"] for row in read_rows(options.output).values()), identity)
    if not options.overwrite and (changed := differences(identity, before)):
        raise RefusedError(
            f"{options.output} holds another study: {'; '.join(changed)}; give another directory with -o, the same "
            "options, or start over with --overwrite"
        )
    return Study(options, subject, cells, text, identity, left_out)


def _choose_cells(subject: Subject, options: AblateOptions) -> tuple[list[Cell], dict[str, str]]:
    """The cells that the model can have, and the default methods that it cannot, with reasons.

    Raises RefusedError for methods that the user named and for numbers of groups that the model cannot have.
    """
    heads = make_plan(subject.checkpoint, (options.groups or (1,))[0], "mean").config.main.kv
    if options.groups and max(options.groups) > heads:
        raise RefusedError(f"--groups {max(options.groups)} is more than the {heads} key/value heads of {subject.name}")
    left_out = dict[str, str]()
    for method, groups in product(options.methods, options.groups or (1,)):
        try:
            make_plan(subject.checkpoint, groups, method)
        except RefusedError as error:
            if options.is_set("methods") or not METHODS[method].aligns:
                raise
            left_out[method] = str(error)
    return options.cells(heads, [method for method in options.methods if method not in left_out]), left_out


def _check_training(subject: Subject, training: TrainOptions) -> None:
    """Raise RefusedError or CorpusError if there is too little data for one step."""
    training.check(1)
    size = find_block_size(subject.config, subject.tokenizer, subject.checkpoint, training)
    if subject.encoder:
        open_pairs(training, subject.encoder, subject.tokenizer, size, 1, None)
    else:
        open_dataloader(training, subject.tokenizer, size)


def _heldout_text(subject: Subject, options: AblateOptions) -> Text:
    """Held-out documents or pairs, sorted by a hash of their text so that --eval-tokens takes a spread sample."""
    if not (sources := heldout_sources(options.training)):
        raise RefusedError(
            "nothing is held out to measure on: give --heldout SOURCE, or --heldout-fraction of the data's documents"
        )
    context, limit = choose_context([subject], options.context), options.eval_tokens
    documents = sorted((row for source in sources for row in source.rows()), key=lambda row: row_digest(*row))
    if subject.encoder:
        text = make_pairs(documents, subject.encoder, context, limit)
    else:
        texts = (text for (text,) in documents)
        text = make_text(texts, subject.tokenizer, context, limit)
    check_ids([subject], text)
    return text


def run_study(study: Study, argv: Sequence[str] = ()) -> list[Row]:
    """Measure every cell that has no row yet; return all rows. `argv`: the command's arguments.

    Raises OutputError if rows cannot be written, StoppedError after a signal: the same call continues.
    """
    options = study.options
    with locked_work(options.output) as work:
        if cells := study.unmeasured:
            with progress_bar(len(cells), "cell", study.subject.name, options.quiet) as bar:
                runner = _Runner(study, work, argv, bar)
                runner.measure_base_model(cells[0] if cells[0].is_base_model else None)
                for _, converted in groupby((c for c in cells if not c.is_base_model), lambda cell: cell.conversion):
                    runner.measure_conversion([*converted])
        if not study.unmeasured:
            clear(work)
    return [*read_rows(options.output).values()]


class _Runner:
    """Measures cells. The base model is measured first; with --kl it stays in memory for comparison."""

    def __init__(self, study: Study, work: Path, argv: Sequence[str], bar: Any) -> None:
        self._study, self._work, self._bar = study, work, bar
        options, device = study.options, evaluate.usable_device(study.options.device)
        self._precision = options.precision or "auto"
        evaluation = EvaluateOptions(
            batch_size=options.eval_batch, precision=self._precision, device=device, quiet=True,
            kl="kl" not in options.skip,
        )  # fmt: skip
        self._comparison = evaluate.Comparison(study.subject, study.text, evaluation)
        environment = {"argv": portable(argv), **evaluate.environment(device)}
        self._constant = {"options": study.identity, "environment": environment}

    def _add_row(self, cell: Cell, error: str | None = None, **columns: Any) -> None:
        options = self._study.options
        shared = {"seed": options.seed, "train": None, "teacher": options.teacher}
        append_row(options.output, {**cell._asdict(), **shared, "error": error, **columns, **self._constant})
        line = f"{cell.method}, {cell.groups} heads, alpha {cell.alpha:g}: {error or format(columns['loss'], '.4f')}"
        self._bar.update()
        self._bar.set_postfix_str(line)
        if not options.quiet and self._bar.disable:
            click.echo(line, err=True)

    def measure_base_model(self, cell: Cell | None) -> None:
        """Measure the base model, with which others are compared; add its row for a `cell`."""
        subject, text, comparison = self._study.subject, self._study.text, self._comparison
        start = time.perf_counter()
        if "recall" not in self._study.options.skip:
            comparison.prepare_recall([subject], text.context)
        row = self._columns(subject, comparison.measure(subject, alone=True))
        row |= {"text": text.record(), "train_tokens": 0}
        if "recall" in comparison.refused:
            row["recall_refused"] = comparison.refused["recall"]
        if cell:
            self._add_row(cell, **row, seconds_evaluating=time.perf_counter() - start)

    def measure_conversion(self, cells: Sequence[Cell]) -> None:
        """Convert once, train and measure `cells`; a failure is a row of each cell that needs what failed.

        Raises StoppedError after a signal during training, and OutputError.
        """
        directory = self._work / cells[0].conversion
        directory.mkdir(exist_ok=True)
        conversion = self._attempt(cells, self._convert, cells[0], directory)
        complete = bool(conversion)
        for cell in cells if conversion else ():
            row = self._attempt([cell], self._measure_cell, cell, *conversion)
            complete &= bool(row)
            if row:
                self._add_row(cell, **row)
        if complete:  # otherwise the next attempt uses the conversion
            shutil.rmtree(directory)

    def _attempt(self, cells: Sequence[Cell], function: Callable[..., Any], *args: Any) -> Any:
        """Result of the function; None if it fails, with the error in a row for each of `cells`."""
        try:
            return function(*args)
        except StoppedError:
            raise
        except Exception as error:  # whatever a conversion, a training or a library raises
            for cell in cells:
                self._add_row(cell, _reason(error))
            return None

    def _convert(self, cell: Cell, directory: Path) -> tuple[Path, float]:
        """Path of the converted checkpoint, and seconds. The conversion of an unfinished run is reused; a cell that
        merges no heads is the base model itself.
        """
        options, out, start = self._study.options, directory / "converted", time.perf_counter()
        assert options.model
        if cell.method == UNMERGED:
            return Path(options.model), 0.0
        if not out.exists():
            convert_checkpoint(
                options.model, cell.groups, out, method=cell.method, seed=options.seed, calibration=options.maps
            )
        return out, time.perf_counter() - start

    def _measure_cell(self, cell: Cell, converted: Path, seconds: float) -> Row:
        """Train a cell and measure it: its columns. Raises RefusedError if its recall cannot be measured and the base
        model's can.
        """
        options, comparison = self._study.options, self._comparison
        row: Row = {"seconds_converting": seconds, "train_tokens": 0, "seconds_training": 0.0}
        path, start = converted, time.perf_counter()
        if cell.alpha:
            training = options.training_of(cell, converted, self._work / cell.conversion)
            path = training.output or converted
            training = replace(training, resume=bool(States(path.with_name(f"{path.name}-state")).complete()))
            shares_teacher = options.teacher == "source" and self._precision == "auto"
            setup = prepare(training, self._comparison.live if shares_teacher else None)
            progress, _ = uptrain(setup)
            row |= {"train": setup.options.train, "train_tokens": progress.tokens, "train_loss": progress.loss}
            row["seconds_training"] = time.perf_counter() - start
        subject, start = open_subjects([str(path)], options.trust_remote_code)[0], time.perf_counter()
        has_recall = "recall" not in comparison.refused
        row |= self._columns(subject, comparison.measure(subject))
        if has_recall and (reason := comparison.refused.pop("recall", "")):
            raise RefusedError(reason)
        if cell.alpha:
            shutil.rmtree(path)
        return row | {"seconds_evaluating": time.perf_counter() - start}

    def _columns(self, subject: Subject, record: Row) -> Row:
        """Measurements of a model as columns."""
        quality, against = record["quality"], record.get("against_baseline", {"log_ratio": 0.0})
        cache, base = subject.cache, self._study.subject.cache
        assert cache
        assert base
        row: Row = {
            "loss": quality["nats_per_token"],
            "loss_increase": against["log_ratio"],
            "loss_increase_error": against.get("log_ratio_error"),
            "perplexity": quality["token_perplexity"],
            **{f"perplexity_{name}": against.get(name) for name in ("ratio", "ratio_low", "ratio_high")},
            "bits_per_byte": quality["bits_per_byte"],
            "kl": against["kl"]["mean"] if "kl" in against else None,
            "top1_agreement": against.get("same_top"),
            "acceptance": against.get("acceptance"),
            "kv_bytes_per_token": cache.bytes_per_token,
            "kv_share": cache.bytes_per_token / base.bytes_per_token,
        }
        if cross := cache.cross_bytes_per_token:
            row["cross_bytes_per_token"] = cross  # of each token of the source
        if "recall" in record:
            row |= {f"recall_{kind.replace('-', '_')}": share for kind, share in recalled(record).items()}
            row |= {"greedy_tokens": record["greedy"]["tokens"], "recall_by_distance": record["recall"]}
        return row


def _reason(error: Exception) -> str:
    """Why a cell failed, in one line."""
    if isinstance(error, RefusedError | OutputError | DivergedError):
        return one_line(str(error))
    if out_of_memory(error):
        return "the memory of the device is too small; give a smaller --batch-size or --precision bfloat16"
    return one_line(f"{type(error).__name__}: {explain(error)}")


def plan_table(study: Study) -> Table:
    """The cells, and which of them are measured."""
    unmeasured, cells = {*study.unmeasured}, study.cells
    records = [cell._asdict() | {"state": "" if cell in unmeasured else "done"} for cell in cells]
    note = f"{len(unmeasured)} of {len(cells)} cells to measure"
    columns = [*CELL_COLUMNS, ("", lambda r: str(r["state"]))]
    return table(f"Study of {study.subject.name}", columns, records, note)
