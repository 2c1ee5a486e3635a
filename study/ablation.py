"""`gqa-ablate`: convert, train and evaluate each cell of a study, a directory; running it again
continues it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.write import write_text
from gqa.convert.api import convert_checkpoint
from gqa.convert.planning import make_plan
from gqa.core.console import SILENT, Watcher, is_interactive
from gqa.core.errors import (
    DivergedError,
    NoMemoryError,
    OutputError,
    RefusedError,
    StoppedError,
    explain,
    one_line,
    plural,
)
from gqa.core.options import flag
from gqa.corpus.rows import row_digest
from gqa.corpus.specs import parse_sources
from gqa.eval.evaluate import Comparison, environment
from gqa.eval.options import EvaluateOptions
from gqa.eval.subjects import open_subjects
from gqa.eval.text import Text, check_target_column, choose_context, cut_text
from gqa.models.classes import check_predicts_tokens
from gqa.study import rows
from gqa.study.columns import row_numbers
from gqa.study.directory import StudyDirectory
from gqa.study.options import UNMERGED, AblateOptions, Cell
from gqa.uptrain.build_data import build_data
from gqa.uptrain.data_sources import heldout_sources
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import prepare

if TYPE_CHECKING:
    from gqa.convert.plan import Plan


class Ablation:
    """A study: checks all options when constructed, measures its cells in `run`.

    Nothing is written before `run`.
    """

    def __init__(self, options: AblateOptions) -> None:
        """Raises RefusedError and CorpusError."""
        options.refuse_conflicts()
        if not options.model:
            raise RefusedError("no model was passed; pass a directory or a hub id")
        self.subject = open_subjects([options.model], options.trust_remote_code)[0]
        # Conversions of cells that failed, and that the next run can continue
        self._kept = set[str]()
        self._commands = options.commands  # with the model as the caller named it
        self.options = options = replace(options, model=self.subject.path)
        self._directory = StudyDirectory(options.output)
        check_predicts_tokens(self.subject.config, self.subject.name, options.trust_remote_code)
        check_target_column(self.subject, options.target_column)

        plans = self._plan_conversions()
        self.cells = options.cells(plans[0].config.main_heads.kv)
        self._text = self._read_heldout()
        if any(plan.method.reads == "text" for plan in plans):
            options.maps_options.text.check_sources(
                self.subject.checkpoint, flag("calibration_tokens")
            )
        self._check_training()
        self._identity: rows.Row = json.loads(
            json.dumps(
                {
                    **options.identity(self.subject.checkpoint, self.subject.name),
                    "content of the data": self._data_digest(),
                    "content of the held-out text": self._heldout_digest(),
                }
            )
        )
        self._directory.check(self._identity, options.overwrite)

    def _plan_conversions(self) -> list[Plan]:
        """The plan of each method and number of KV heads, or of 1 where no number is given.

        Raises RefusedError if the base model cannot be converted by a method, or to a number of
        heads, of the study.
        """
        counts = self.options.kv_heads or (1,)
        plans = [
            make_plan(self.subject.checkpoint, groups, method)
            for method, groups in product(self.options.methods, counts)
        ]

        heads = plans[0].config.main_heads.kv
        if max(counts) > heads:
            raise RefusedError(
                f"--kv-heads {max(counts)} is more than the {heads} KV heads of "
                f"{self.subject.name}; pass divisors of {heads}"
            )
        return plans

    def _check_training(self) -> None:
        """Raise RefusedError if the data is less than a step of any training needs."""
        base = self.subject
        for alpha in self.options.alphas:
            if not alpha:
                continue
            training = self.options.training(alpha, Path(base.path), self.options.output)
            # As `decide_defaults` decides it
            repeats = training.distills and not base.config.is_encoder_decoder
            training = replace(training, repeats=repeats)
            build_data(training, base.checkpoint, None, base.config, base.tokenizer, "cpu", SILENT)

    def _data_digest(self) -> str:
        """A hash of the content of the data."""
        options = self.options
        sources = parse_sources(
            options.data,
            text_column=options.text_column,
            target_column=options.target_column,
            separator=options.separator,
        )
        return row_digest(" ".join(source.identify() for source in sources)).hex()

    def _heldout_digest(self) -> str:
        """A hash of the tokens of the held-out text."""
        windows = [window.source + window.ids for window in self._text.windows]
        return row_digest(repr(windows)).hex()

    def _read_heldout(self) -> Text:
        """Held-out documents or pairs, in the order of a hash of their text, so --eval-tokens takes
        a random sample.

        Raises RefusedError if there are none, and CorpusError.
        """
        subject = self.subject
        options = self.options
        training = options.training(None, Path(subject.path), options.output)
        training.check(1)
        sources = heldout_sources(training)
        if not sources:
            raise RefusedError(
                "there is no held-out text; pass --heldout SOURCE, or --heldout-fraction to hold "
                "out documents of the data"
            )
        context = choose_context([subject], options.context)
        documents = list[tuple[str, ...]]()
        for source in sources:
            documents += source.rows()
        documents.sort(key=lambda row: row_digest(*row))
        return cut_text([subject], documents, context, options.eval_tokens)

    def run(self, argv: Sequence[str] = ()) -> None:
        """Measure every cell that has no row yet; `argv`: the command's arguments.

        Raises OutputError if rows cannot be written, StoppedError after a signal: the same call
        continues.
        """
        options = self.options
        evaluation = options.evaluation  # refuses a device before anything is removed
        # Before anything of ours is in the directory: another study may have been made in it since
        # it was checked.
        self._directory.check(self._identity, options.overwrite)
        with self._directory.held():
            self._directory.check(self._identity, options.overwrite)
            if options.overwrite or not rows.read_rows(options.output):
                self._directory.start_over()

            rows_before = rows.read_rows(options.output)
            measured = [cell for cell, row in rows_before.items() if not row["error"]]
            cells = [cell for cell in self.cells if cell not in measured]
            if cells:
                self._measure(cells, evaluation, argv)
            self._directory.remove_work(self._kept)

    def _measure(
        self, cells: Sequence[Cell], evaluation: EvaluateOptions, argv: Sequence[str]
    ) -> None:
        """Measure these cells, the base model's first, if it is among them."""
        self._comparison = Comparison(self.subject, self._text, evaluation)
        self._environment = {"argv": argv, **environment(str(evaluation.device))}
        # In a log there is a line of each cell
        quiet = self.options.quiet or not is_interactive()
        with Watcher(quiet) as self._watcher:
            self._watcher.stage(self.subject.name, len(cells), "combination")
            self._measure_base_model(cells[0])
            converted = (cell for cell in cells if not cell.is_base_model)
            for _, group in groupby(converted, lambda cell: cell.conversion):
                self._measure_conversion([*group])

    def _add_row(self, cell: Cell, error: str | None = None, **columns: Any) -> None:
        """Append the row of a cell, and print its loss or the error."""
        options = self.options
        commands = [] if cell.method == UNMERGED else self._commands(cell)
        row: rows.Row = {
            **cell._asdict(),
            "seed": options.seed,
            "train": None,
            "teacher": options.teacher,
            "commands": commands,
            "error": error,
            **columns,
            "options": self._identity,
            "environment": self._environment,
        }
        rows.append_row(options.output, row)

        self._watcher.update()
        if not options.quiet:
            result = error or format(columns["loss"], ".4f")
            heads = plural(cell.groups, "KV head")
            self._watcher.say(f"{cell.method}, {heads}, alpha {cell.alpha:g}: {result}")

    @contextmanager
    def _add_errors(self, cells: Sequence[Cell]) -> Iterator[None]:
        """Turn any error of the block, except StoppedError, into a row of each cell with that
        error.

        What was done for these cells is kept, unless they would fail in the same way again.
        """
        try:
            yield
        except StoppedError:
            raise
        except Exception as error:
            is_refused = isinstance(error, RefusedError | DivergedError)
            has_no_memory = isinstance(error, NoMemoryError)  # of which there may be more next time
            fails_again = is_refused and not has_no_memory
            if not fails_again:
                self._kept |= {cell.conversion for cell in cells}
            for cell in cells:
                self._add_row(cell, _reason(error))

    def _measure_base_model(self, first: Cell) -> None:
        """Measure the base model as the baseline; add its row if it is the `first` cell."""
        subject = self.subject
        start = time.perf_counter()
        row: rows.Row = {"text": self._text.record(), "train_tokens": 0}
        if "recall" not in self.options.skip:
            try:
                self._comparison.prepare_recall(self._text.context)
            except RefusedError as error:
                row["recall_refused"] = str(error)

        record = self._comparison.measure(subject, {}, alone=True)
        row |= row_numbers(record, subject.cache, subject.cache)
        if first.is_base_model:
            self._add_row(first, **row, seconds_evaluating=time.perf_counter() - start)

    def _measure_conversion(self, cells: Sequence[Cell]) -> None:
        """Convert once, then train and measure `cells`; an error becomes a row of each cell that it
        affects.

        Raises StoppedError after a signal during training, and OutputError.
        """
        conversion = self._directory.conversion(cells[0].conversion)
        conversion.claim()
        converted = None
        start = time.perf_counter()
        with self._add_errors(cells):
            converted = self._convert(cells[0], conversion.path)
        seconds = time.perf_counter() - start

        if converted:
            for cell in cells:
                self._measure_converted(cell, converted, seconds)

        if conversion.path.name not in self._kept:
            conversion.remove()

    def _measure_converted(self, cell: Cell, converted: Path, seconds: float) -> None:
        """Train a cell and add its row; `seconds`: of the conversion."""
        row: rows.Row = {}
        with self._add_errors([cell]):
            row = self._measure_cell(cell, converted)
        if row:
            self._add_row(cell, seconds_converting=seconds, **row)
            # Only now: if the row cannot be written, they are still there
            for trained in self._trained(cell):
                shutil.rmtree(trained, ignore_errors=True)

    def _trained(self, cell: Cell) -> list[Path]:
        """Where the checkpoint that is trained for a cell is written, and the states of its
        training.
        """
        path = self._directory.work / cell.conversion / f"alpha-{cell.alpha:g}"
        return [path, path.with_name(f"{path.name}-state")]

    def _convert(self, cell: Cell, directory: Path) -> Path:
        """Path of the converted checkpoint, or of the base model for a cell that merges no heads.

        The conversion of an interrupted run is reused.
        """
        if cell.method == UNMERGED:
            return Path(self.subject.path)

        out = directory / "converted"
        if not out.exists():
            convert_checkpoint(
                self.subject.path,
                cell.groups,
                out,
                method=cell.method,
                seed=self.options.seed,
                maps_options=self.options.maps_options,
            )
        return out

    def _measure_cell(self, cell: Cell, converted: Path) -> rows.Row:
        """Train a cell and measure it; return its columns."""
        row: rows.Row = {"train_tokens": 0, "seconds_training": 0.0}
        path = converted
        if cell.alpha:
            path = self._trained(cell)[0]
            row |= self._train(cell, converted, path)

        start = time.perf_counter()
        subject = open_subjects([str(path)], self.options.trust_remote_code)[0]
        record = self._comparison.measure(subject, {})
        row |= row_numbers(record, subject.cache, self.subject.cache)
        return row | {"seconds_evaluating": time.perf_counter() - start}

    def _train(self, cell: Cell, converted: Path, path: Path) -> rows.Row:
        """Train a cell to the checkpoint `path` and return its columns.

        A checkpoint that an interrupted run has trained but not measured is used as it is: its
        columns are stored next to it.
        """
        columns = path.with_name(f"{path.name}.json")
        if path.is_dir() and columns.is_file():
            return dict(json.loads(columns.read_text()))

        start = time.perf_counter()
        setup = prepare(self.options.training(cell.alpha, converted, path), shares_states=False)
        progress, record = uptrain(setup)
        row = {
            "train": record["options"]["train"],
            "train_tokens": progress.tokens,
            "train_loss": progress.training_cross_entropy,
            "seconds_training": time.perf_counter() - start,
        }
        write_text(columns, json.dumps(row) + "\n")
        return row


def _reason(error: Exception) -> str:
    """What the row of a failed cell says of an error, in one line."""
    if isinstance(error, RefusedError | OutputError | DivergedError):
        return one_line(str(error))
    return one_line(f"{type(error).__name__}: {explain(error)}")
