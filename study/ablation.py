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

from gqa.checkpoint.hub import error_chain
from gqa.checkpoint.write import write_text
from gqa.convert.api import convert_checkpoint
from gqa.convert.planning import make_plan
from gqa.core.console import SILENT, Watcher, is_interactive
from gqa.core.devices import out_of_memory
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
from gqa.uptrain.data_sources import validation_sources
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import prepare

if TYPE_CHECKING:
    from gqa.convert.plan import Plan


# What the row of a failed cell advises
_WITHOUT_MEMORY = "stop other programs on the device, and repeat the command without --overwrite"
_IN_ANOTHER_STUDY = "in another study (another directory with -o)"


class Ablation:
    """A study: checks all options when constructed, measures its cells in `run`.

    Nothing is written before `run`.

    Attributes:
        options: With the path of the base model.
        commands: Function from a cell to the commands that make its model, with the base model as
            the caller named it.
        base: The base model.
        cells: All cells, the base model's first.
        text: The validation text, on which all cells are measured.
        identity: What all rows of the study have in common, JSON-ready.
        directory: Where the study is.
    """

    def __init__(self, options: AblateOptions) -> None:
        """Raises RefusedError and TextError."""
        options.refuse_conflicts()
        if not options.model:
            raise RefusedError("no model was passed; pass a directory or a model id")
        self.commands = options.commands
        self.base = open_subjects([options.model], options.trust_remote_code)[0]
        self.options = options = replace(options, model=self.base.path)
        self.directory = StudyDirectory(options.output)
        check_predicts_tokens(self.base.config, self.base.name, options.trust_remote_code)
        check_target_column(self.base, options.target_column)

        plans = self._plan_conversions()
        self.cells = options.cells(plans[0].config.main_heads.kv)
        self.text = self._read_validation_text()
        if any(plan.method.reads == "text" for plan in plans):
            options.maps_options.text.check_sources(
                self.base.checkpoint, flag("calibration_tokens")
            )
        self._check_training()

        identity = {
            **options.identity(self.base.checkpoint, self.base.name),
            "content of the data": self._data_digest(),
            "content of the validation text": self._validation_digest(),
        }
        self.identity: rows.Row = json.loads(json.dumps(identity))  # as it is read back
        self.directory.check(self.identity, options.overwrite)

    def _plan_conversions(self) -> list[Plan]:
        """The plan of each method and number of KV heads, or of 1 where no number is given.

        Raises RefusedError if the base model cannot be converted by a method, or to a number of
        heads, of the study.
        """
        counts = self.options.kv_heads or (1,)
        plans = [
            make_plan(self.base.checkpoint, groups, method)
            for method, groups in product(self.options.methods, counts)
        ]

        heads = plans[0].config.main_heads.kv
        if max(counts) > heads:
            raise RefusedError(
                f"--kv-heads {max(counts)} is more than the {heads} KV heads of "
                f"{self.base.name}; pass divisors of {heads}"
            )
        return plans

    def _check_training(self) -> None:
        """Raise RefusedError if the data is less than a step of any training needs."""
        base = self.base
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

    def _validation_digest(self) -> str:
        """A hash of the tokens of the validation text."""
        windows = [window.source + window.ids for window in self.text.windows]
        return row_digest(repr(windows)).hex()

    def _read_validation_text(self) -> Text:
        """Documents or pairs, of which --eval-tokens takes a random sample: they are in the order
        of a hash of their text.

        Raises RefusedError if there are none, and TextError.
        """
        options = self.options
        training = options.training(None, Path(self.base.path), options.output)
        training.check(1)
        sources = validation_sources(training)
        if not sources:
            raise RefusedError(
                "there is no validation text; pass --validation SOURCE, or hold out documents of "
                "the data with --validation-fraction"
            )
        context = choose_context([self.base], options.context)
        documents = list[tuple[str, ...]]()
        for source in sources:
            documents += source.rows()
        documents.sort(key=lambda row: row_digest(*row))
        return cut_text(
            [self.base], documents, context, options.eval_tokens, limit_option="--eval-tokens"
        )

    def run(self, argv: Sequence[str] = ()) -> None:
        """Measure every cell that has no row yet; `argv`: the command's arguments.

        Raises OutputError if rows cannot be written, StoppedError after a signal: the same call
        continues.
        """
        options = self.options
        evaluation = options.evaluation  # refuses a device before anything is removed
        # Before anything of ours is in the directory: another study may have been made in it since
        # it was checked.
        self.directory.check(self.identity, options.overwrite)
        with self.directory.held():
            self.directory.check(self.identity, options.overwrite)
            if options.overwrite or not rows.read_rows(options.output):
                self.directory.start_over()

            rows_before = rows.read_rows(options.output)
            measured = [cell for cell, row in rows_before.items() if not row["error"]]
            cells = [cell for cell in self.cells if cell not in measured]
            kept: set[str] = set()
            if cells:
                # In a log there is a line of each cell
                with Watcher(options.quiet or not is_interactive()) as watcher:
                    measurement = _Measurement(self, evaluation, argv, watcher)
                    measurement.measure(cells)
                kept = measurement.kept
            self.directory.remove_work(kept)


class _Measurement:
    """One run of a study: measures cells and appends their rows.

    Attributes:
        kept: Conversions of cells that failed, and that the next run can continue.
    """

    def __init__(
        self, study: Ablation, evaluation: EvaluateOptions, argv: Sequence[str], watcher: Watcher
    ) -> None:
        self._study = study
        self._options = study.options
        self._comparison = Comparison(study.base, study.text, evaluation)
        self._environment = {"argv": argv, **environment(str(evaluation.device))}
        self._watcher = watcher
        self.kept = set[str]()

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure these cells, the base model's first, if it is among them.

        Raises StoppedError after a signal, and OutputError if a row cannot be written.
        """
        self._watcher.stage(self._study.base.name, len(cells), "combination")
        self._measure_base_model(cells[0])
        converted = (cell for cell in cells if not cell.is_base_model)
        for _, group in groupby(converted, lambda cell: cell.conversion):
            self._measure_cells_of_conversion([*group])

    # ------------------------------------------------------------------------------------ rows

    def _add_row(self, cell: Cell, error: str | None = None, **columns: Any) -> None:
        """Append the row of a cell, and print its loss or the error."""
        study = self._study
        commands = [] if cell.method == UNMERGED else study.commands(cell)
        row: rows.Row = {
            **cell._asdict(),
            "seed": self._options.seed,
            "train": None,
            "teacher": self._options.teacher,
            "commands": commands,
            "error": error,
            **columns,
            "options": study.identity,
            "environment": self._environment,
        }
        rows.append_row(self._options.output, row)

        self._watcher.update()
        if not self._options.quiet:
            result = error or format(columns["loss"], ".4f")
            heads = plural(cell.groups, "KV head")
            self._watcher.say(f"{cell.method}, {heads}, alpha {cell.alpha:g}: {result}")

    @contextmanager
    def _add_errors(
        self, cells: Sequence[Cell], without_memory: str = _WITHOUT_MEMORY
    ) -> Iterator[None]:
        """Turn any error of the block, except StoppedError, into a row of each cell with that
        error.

        What was done for these cells is kept, unless they would fail in the same way again.

        Args:
            cells: All that the block is done for.
            without_memory: What to do if it runs out of memory.
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
                self.kept |= {cell.conversion for cell in cells}
            for cell in cells:
                self._add_row(cell, _reason(error, without_memory))

    # ----------------------------------------------------------------------------------- cells

    def _measure_base_model(self, first: Cell) -> None:
        """Measure the base model as the baseline; add its row if it is the `first` cell."""
        base = self._study.base
        text = self._study.text
        start = time.perf_counter()
        columns: rows.Row = {"text": text.record(), "train_tokens": 0}
        if "recall" not in self._options.skip:
            try:
                self._comparison.prepare_recall(text.context)
            except RefusedError as error:
                columns["recall_refused"] = str(error)

        record = self._comparison.measure(base, {}, alone=True)
        columns |= row_numbers(record, base.cache, base.cache)
        if first.is_base_model:
            self._add_row(first, **columns, seconds_evaluating=time.perf_counter() - start)

    def _measure_cells_of_conversion(self, cells: Sequence[Cell]) -> None:
        """Convert once, then train and measure `cells`, which differ in alpha alone; an error
        becomes a row of each cell that it affects.

        Raises StoppedError after a signal during training, and OutputError.
        """
        name = cells[0].conversion
        workplace = self._study.directory.conversion(name)
        workplace.claim()

        converted: Path | None = None
        start = time.perf_counter()
        with self._add_errors(cells):
            converted = self._convert(cells[0], workplace.path / "converted")
        seconds = time.perf_counter() - start

        if converted:
            for cell in cells:
                self._measure_cell(cell, converted, workplace.path, seconds)
        if name not in self.kept:
            workplace.remove()

    def _convert(self, cell: Cell, out: Path) -> Path:
        """Path of the checkpoint that a cell starts from: `out`, or the base model's for a cell
        that merges no heads.

        The conversion of an interrupted run is reused.
        """
        if cell.method == UNMERGED:
            return Path(self._study.base.path)

        if not out.exists():
            convert_checkpoint(
                self._study.base.path,
                cell.groups,
                out,
                method=cell.method,
                seed=self._options.seed,
                maps_options=self._options.maps_options,
            )
        return out

    def _measure_cell(
        self, cell: Cell, converted: Path, workplace: Path, seconds_converting: float
    ) -> None:
        """Train the checkpoint `converted` in the directory `workplace`, if the cell says so,
        measure the result, and add its row.
        """
        trained = workplace / f"alpha-{cell.alpha:g}"
        columns: rows.Row = {}
        less_memory = f"{_WITHOUT_MEMORY}, or lower --batch-size or --context {_IN_ANOTHER_STUDY}"
        with self._add_errors([cell], less_memory):
            columns = self._train_and_measure(cell, converted, trained)
        if not columns:
            return

        self._add_row(cell, seconds_converting=seconds_converting, **columns)
        # Only now: if the row cannot be written, they are still there
        states_of_training = trained.with_name(f"{trained.name}-state")
        for path in (trained, states_of_training):
            shutil.rmtree(path, ignore_errors=True)

    def _train_and_measure(self, cell: Cell, converted: Path, trained: Path) -> rows.Row:
        """The columns of a cell, whose checkpoint is `trained` if it trains, else `converted`."""
        columns: rows.Row = {"train_tokens": 0, "seconds_training": 0.0}
        result = converted
        if cell.alpha:
            columns |= self._train(cell, converted, trained)
            result = trained

        start = time.perf_counter()
        subject = open_subjects([str(result)], self._options.trust_remote_code)[0]
        record = self._comparison.measure(subject, {})
        columns |= row_numbers(record, subject.cache, self._study.base.cache)
        return columns | {"seconds_evaluating": time.perf_counter() - start}

    def _train(self, cell: Cell, converted: Path, out: Path) -> rows.Row:
        """Train the checkpoint `converted` to `out`, and return the columns of the training.

        A checkpoint that an interrupted run has trained but not measured is used as it is: its
        columns are stored next to it.
        """
        stored_columns = out.with_name(f"{out.name}.json")
        if out.is_dir() and stored_columns.is_file():
            return dict(json.loads(stored_columns.read_text()))

        start = time.perf_counter()
        setup = prepare(self._options.training(cell.alpha, converted, out), shares_states=False)
        progress, record = uptrain(setup)
        columns = {
            "train": record["options"]["train"],
            "train_tokens": progress.tokens,
            "train_loss": progress.training_cross_entropy,
            "seconds_training": time.perf_counter() - start,
        }
        write_text(stored_columns, json.dumps(columns) + "\n")
        return columns


def _reason(error: Exception, without_memory: str) -> str:
    """What the row of a failed cell says of an error, in one line: the problem, and what to do.

    Errors of conversion and training end with advice for their own commands, after a semicolon. It
    is left out: it names options that gqa-ablate does not have, and --overwrite, which removes the
    whole study here.
    """
    if isinstance(error, RefusedError | OutputError | DivergedError):
        problem, _, _ = str(error).partition("; ")
    else:
        problem = f"{type(error).__name__}: {explain(error)}"

    has_no_memory = isinstance(error, NoMemoryError) or any(map(out_of_memory, error_chain(error)))
    is_of_training = isinstance(error, DivergedError | OutputError)
    if has_no_memory:
        problem += f"; {without_memory}"
    elif is_of_training and "not finite" in problem:
        problem += f"; lower --learning-rate {_IN_ANOTHER_STUDY}"
    return one_line(problem)
