"""`gqa-ablate`: a loop over cells that converts, trains and evaluates. A study is a directory; running it again
continues it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import OutputError, RefusedError, explain, one_line
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.identity import checkpoint_digest
from gqa.checkpoint.provenance import portable, without_place
from gqa.convert import convert_checkpoint
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.layout import Groups
from gqa.convert.merge.allot import heads_within, uneven
from gqa.convert.merge.cache_bits import quantised_attention
from gqa.convert.methods import AUTO, METHODS
from gqa.convert.plan import make_plan, searches
from gqa.corpus.sources import parse_sources, row_digest
from gqa.eval import evaluate
from gqa.eval.decode import decode_contexts
from gqa.eval.options import EvaluateOptions
from gqa.eval.report import recalled
from gqa.eval.study.directory import Row, Rows, UnwrittenError, check_directory, locked_work
from gqa.eval.study.report import CELL_COLUMNS
from gqa.eval.study.study import UNMERGED, AblateOptions, Cell, Grid
from gqa.eval.subjects import Subject, open_subjects, with_bits
from gqa.eval.tables import Table, table
from gqa.eval.text import MAX_CONTEXT, Text, check_ids, choose_context, make_pairs, make_spans, make_text
from gqa.uptrain.dataloader import heldout_sources, open_dataloader, open_heldout
from gqa.uptrain.loop import DivergedError, StoppedError
from gqa.uptrain.options import TrainOptions, differences
from gqa.uptrain.pairs import open_pairs
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import MAX_PAIR, find_block_size, prepare

ALL = 10**15  # tokens
STEPS, REPEATS = 32, 5  # of decoding


@dataclass(frozen=True)
class Study:
    """A study that has passed all checks; nothing is written yet.

    config: of the source; identity: options and hashes that all rows of the directory must share; left_out: methods
    that the model cannot have, with the reasons.
    """

    options: AblateOptions
    grid: Grid
    subject: Subject
    config: ModelConfig
    text: Text
    identity: Row
    left_out: dict[str, str]

    @property
    def cells(self) -> list[Cell]:
        return self.grid.cells(self.config.main.kv)

    @property
    def unmeasured(self) -> list[Cell]:
        """Cells without a row, or whose row has an error."""
        done = {Cell.of(row) for row in Rows(self.options.output) if not row["error"]}
        return [cell for cell in self.cells if cell not in done]


def open_study(options: AblateOptions) -> Study:
    """Check all options before anything is written. Raises RefusedError and CorpusError; default methods that the
    model cannot have are left out instead.
    """
    options.check()
    assert options.model
    grid = options.grid
    subject = open_subjects([options.model], options.trust_remote_code)[0]
    options = replace(options, model=subject.path)
    training = options.training
    evaluate.usable_device(options.device)  # or refused
    subject.check_predicts_tokens()
    if training.target_field and not subject.config.is_encoder_decoder:
        raise RefusedError(f"--target-field is for encoder-decoders, {subject.name} is none; leave it out")
    if not training.data:
        raise RefusedError("no data is named: give text to train and calibrate on with --data, like stdlib:train")
    if any(source.partition(":")[0] == "self" for source in training.data):
        raise RefusedError("--data self is no text that can be held out; name text (self can be had for --calibration)")
    with_bits([subject], grid.cache_bits)
    config, grid, left_out = _settle(subject, grid, options.grouping, options.given("methods"))
    if any(METHODS[method].reads_text for method in grid.methods):
        options.maps.text.check(subject.config, subject.name, "the context of calibration")
    text = _text(subject, options)
    for alpha in filter(None, grid.alphas):
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
    before = next((row["options"] for row in Rows(options.output)), identity)
    if not options.overwrite and (changed := differences(identity, before)):
        raise RefusedError(
            f"{options.output} holds another study: {'; '.join(changed)}; give another directory with -o, the same "
            "options, or start over with --overwrite"
        )
    return Study(options, grid, subject, config, text, identity, left_out)


def _settle(subject: Subject, grid: Grid, grouping: str, strict: bool) -> tuple[ModelConfig, Grid, dict[str, str]]:
    """The source's config; the grid with its numbers of groups and without methods that the model cannot have; these
    methods, with reasons.

    Raises RefusedError instead for methods that the user named (`strict`) and for numbers of groups that the model
    cannot have. `grouping` applies to methods that align; the others merge neighbours.
    """
    config, left_out = make_plan(subject.checkpoint, (grid.groups or (1,))[0], "mean").config, {}
    methods = list(grid.methods)
    if AUTO in methods:
        methods[methods.index(AUTO)] = make_plan(subject.checkpoint, (grid.groups or (1,))[0]).method
    grid = replace(grid, methods=methods, groups=grid.settled(config.main.kv))
    sizes: list[Groups] = [
        *(grid.groups or ()),
        *(uneven(subject.checkpoint, budget, option="--kv-budgets") for budget in grid.kv_budgets or ()),
    ]
    for method, groups in product(grid.methods, sizes):
        try:
            plan = make_plan(subject.checkpoint, groups, method)
            searches(plan, grouping if plan.merging.how.aligns else "contiguous")
        except RefusedError as error:
            if strict or not METHODS[method].aligns:
                raise
            left_out[method] = str(error)
    return config, replace(grid, methods=[method for method in methods if method not in left_out]), left_out


def _check_training(subject: Subject, training: TrainOptions) -> None:
    """Raise RefusedError or CorpusError if there is too little data for one step."""
    training.check(1)
    size = find_block_size(subject.config, subject.tokenizer, subject.checkpoint, training)
    if subject.encoder:
        open_pairs(training, subject.encoder, subject.tokenizer, size, 1, None)
    else:
        open_dataloader(training, subject.tokenizer, size)


def _text(subject: Subject, options: AblateOptions) -> Text:
    """Held-out documents or pairs, sorted by a hash of their text so that --eval-tokens takes a spread sample; span
    corruption for an encoder-decoder without --target-field.
    """
    training, encoder = options.training, subject.encoder
    if not (sources := heldout_sources(training)):
        raise RefusedError(
            "nothing is held out to measure on: give --heldout SOURCE, or --heldout-fraction of the data's documents"
        )
    spans = encoder is not None and not training.target_field
    context = choose_context([subject], options.context, most=MAX_PAIR if spans else MAX_CONTEXT)
    if encoder is None:
        texts = sorted((text for source in sources for text in source.texts()), key=row_digest)
        text = make_text(texts, subject.tokenizer, protocol="rolling", context=context, max_tokens=options.eval_tokens)
    elif spans:
        heldout_options = replace(training, context=context, heldout_tokens=options.eval_tokens or ALL)
        text = make_spans(open_heldout(heldout_options, subject.tokenizer), encoder, subject.tokenizer, context)
    else:
        pairs = sorted((pair for source in sources for pair in source.rows()), key=lambda pair: row_digest(*pair))
        text = make_pairs(pairs, encoder, context, options.eval_tokens)
    check_ids([subject], text)
    return text


def run_study(study: Study, *, argv: Sequence[str], report: Callable[[Row], None] = lambda row: None) -> Rows:
    """Measure every cell that has no row yet; `report` gets each row as it is written. `argv`: the command's arguments.

    Raises UnwrittenError if rows cannot be written, StoppedError after a signal: the same call continues.
    """
    with locked_work(study.options.output) as work, quantised_attention(study.grid.cache_bits or ()):
        rows, cells = Rows(study.options.output), study.unmeasured
        if cells:
            runner = _Runner(study, work, rows, argv, report)
            runner.measure_source([cell for cell in cells if cell.is_source])
            for converted in _groups([cell for cell in cells if not cell.is_source], lambda cell: cell.conversion):
                runner.measure_conversion(converted)
        if not study.unmeasured:
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
    return rows


def _groups(cells: Sequence[Cell], key: Callable[[Cell], Any]) -> list[list[Cell]]:
    """Cells of equal key together, in the order of the first of each."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())


class _Runner:
    """Measures cells. The source is measured first; with --kl it stays in memory for comparison."""

    def __init__(
        self, study: Study, work: Path, rows: Rows, argv: Sequence[str], report: Callable[[Row], None]
    ) -> None:  # fmt: skip
        self._study, self._work, self._rows, self._report = study, work, rows, report
        options, subject = study.options, study.subject
        self._options = EvaluateOptions(
            batch_size=options.eval_batch, precision=options.precision or "auto", device=options.run_device, quiet=True,
            kl="kl" not in options.skip, context=study.text.context, decode_batches=(options.decode_batch,),
            decode_steps=STEPS, decode_repeats=REPEATS, recall=False if "recall" in options.skip else None,
        )  # fmt: skip
        self._comparison = evaluate.Comparison(subject, study.text, self._options)
        self._contexts: tuple[int, ...] = ()
        if "decode" not in options.skip:
            context_option = (options.decode_context,) if options.decode_context else None
            self._contexts = decode_contexts([subject], context_option, STEPS)[-1:]
        environment = {"argv": portable(argv), **evaluate.environment(options.run_device)}
        self._constant = {"options": study.identity, "environment": environment}
        self._heads = self._heads_of_budgets()

    def _heads_of_budgets(self) -> Mapping[float, tuple[int, ...]]:
        """KV heads of each layer by budget: from a row that has them, else from measuring each layer."""
        heads = {row["budget"]: tuple(row["kv_heads"]) for row in self._rows if row.get("kv_heads")}
        cells = [cell for cell in self._study.cells if cell.budget]
        if new := list(dict.fromkeys(cell.budget for cell in cells if cell.budget and cell.budget not in heads)):
            maps = self._study.options.maps_of(cells[0])
            heads |= zip(new, heads_within(self._study.subject.checkpoint, new, maps)[0], strict=True)
        return heads

    def _add_row(self, cell: Cell, error: str | None = None, **columns: Any) -> None:
        row = {**cell._asdict(), "error": error, **columns, **self._constant}
        self._rows.add(row)
        self._report(row)

    def measure_source(self, cells: Sequence[Cell]) -> None:
        """Measure the source and add a row for each of `cells`: the source itself and its quantised caches."""
        subject, comparison = self._study.subject, self._comparison
        start, text = time.perf_counter(), self._study.text
        if "recall" not in self._study.options.skip:
            comparison.prepare_recall([subject], text.context)
        record = comparison.measure(subject, alone=True)
        row = self._columns(subject, record) | {"text": text.record(), "train_tokens": 0}
        if "recall" in comparison.refused:
            row["recall_refused"] = comparison.refused["recall"]
        elif record.get("recall_first_reading") is not None:
            row["recall_first_reading"] = record["recall_first_reading"]
        row["query_heads"] = self._study.config.main.query
        row["seconds_evaluating"] = time.perf_counter() - start
        for cell in cells:
            if cell.bits is None:
                self._add_row(cell, **row, **self._speed(cell, subject))
            else:
                self._add_row(cell, **self._measure(cell, subject), train_tokens=0)

    def measure_conversion(self, cells: Sequence[Cell]) -> None:
        """Convert once, train and measure `cells`; a failure is a row of each cell that needs what failed.

        Raises StoppedError after a signal during training, and UnwrittenError.
        """
        directory, complete = self._work / cells[0].conversion, True
        directory.mkdir(exist_ok=True)
        conversion = self._attempt(cells, self._convert, cells[0], directory)
        trainings = _groups(cells, lambda cell: (cell.train, cell.teacher, cell.alpha) if cell.alpha else ())
        for training in trainings if conversion else ():
            result = self._attempt(training, self._train, training[0], *conversion)
            for cell in training if result else ():
                row = self._attempt([cell], self._measure, cell, result[0])
                if row:
                    self._add_row(cell, **row, **result[1])
                complete &= bool(row)
            complete &= bool(result)
            if result and complete and training[0].alpha:
                shutil.rmtree(result[0].path)
        if conversion and complete:  # otherwise the next attempt uses the files
            shutil.rmtree(directory)

    def _attempt(self, cells: Sequence[Cell], function: Callable[..., Any], *args: Any) -> Any:
        """Result of the function; None if it fails, with the error in a row for each of `cells`."""
        try:
            return function(*args)
        except (StoppedError, UnwrittenError):
            raise
        except Exception as error:  # whatever a conversion, a training or a library raises
            for cell in cells:
                self._add_row(cell, _reason(error))
            return None

    def _convert(self, cell: Cell, directory: Path) -> tuple[Path, float]:
        """Path of the converted checkpoint, and seconds. The conversion of an unfinished run is reused; a cell that
        merges no heads is the source itself.
        """
        options, out, start = self._study.options, directory / "converted", time.perf_counter()
        groups: Groups = self._heads[cell.budget] if cell.budget else int(cell.groups)
        if groups == self._study.config.main.kv:
            return Path(str(options.model)), 0.0
        if not out.exists():
            method = "mean" if cell.method in UNMERGED else cell.method
            plan = make_plan(open_model(str(options.model)), groups, method, cell.seed)
            calibration = options.maps_of(cell) if plan.needs_maps else None
            convert_checkpoint(str(options.model), groups, out, method=method, seed=cell.seed, calibration=calibration)
        return out, time.perf_counter() - start

    def _train(self, cell: Cell, converted: Path, seconds: float) -> tuple[Subject, Row]:
        """The model of a cell, and the columns of its conversion and training."""
        path = converted
        columns: Row = {"seconds_converting": seconds, "train_tokens": 0, "seconds_training": 0.0}
        if cell.alpha:
            start, options = time.perf_counter(), self._study.options.training_of(cell, self._work / cell.conversion)
            assert options.output
            path = options.output
            resume = any(path.with_name(f"{path.name}-state").glob("step-*"))
            options = replace(options, model=str(converted), resume=resume, overwrite=True)
            shares_teacher = cell.teacher == "source" and self._options.precision == "auto"
            progress, _ = uptrain(prepare(options, self._comparison.live if shares_teacher else None))
            columns |= {
                "train_tokens": progress.tokens, "train_loss": progress.loss,
                "seconds_training": time.perf_counter() - start,
            }  # fmt: skip
        if cell.budget:
            columns["kv_heads"] = list(self._heads[cell.budget])
        return open_subjects([str(path)], self._study.options.trust_remote_code)[0], columns

    def _measure(self, cell: Cell, subject: Subject) -> Row:
        """Measured columns of a cell. Raises RefusedError if its recall cannot be measured and the source's can."""
        start, comparison = time.perf_counter(), self._comparison
        variant = subject.quantised(cell.bits) if cell.bits else subject
        has_recall = "recall" not in comparison.refused
        record = comparison.measure(variant)
        if has_recall and (reason := comparison.refused.pop("recall", "")):
            raise RefusedError(reason)
        row = self._columns(variant, record) | {"seconds_evaluating": time.perf_counter() - start}
        return row if cell.bits else row | self._speed(cell, subject)

    def _columns(self, subject: Subject, record: Row) -> Row:
        """Measurements of a model as columns."""
        quality, against = record["quality"], record.get("against_baseline", {"log_ratio": 0.0})
        cache, source = subject.cache, self._study.subject.cache
        assert cache
        assert source
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
            "kv_share": cache.bytes_per_token / source.bytes_per_token,
        }
        if cross := cache.cross_bytes_per_token:
            row["cross_bytes_per_token"] = cross  # of each token of the source
        if "recall" in record:
            row |= {f"recall_{kind.replace('-', '_')}": share for kind, share in recalled(record).items()}
            row |= {"greedy_tokens": record["greedy"]["tokens"], "recall_by_distance": record["recall"]}
            row["samples"] = record["samples"]
        return row

    def _speed(self, cell: Cell, subject: Subject) -> Row:
        """Decode timing, which depends on the heads of a cell and not on its method or weights: measured once for each
        number of heads, interleaved with the source.
        """
        if not self._contexts:
            return {}
        names = ("seconds_per_token", "fastest", "slowest", "tokens_per_second")
        columns = (*(f"decode_{name}" for name in names), "decode_tokens_before", "decode_ratio")
        for row in self._rows:
            if Cell.of(row).heads == cell.heads and row.get("decode_ratio"):
                return {name: row[name] for name in columns}
        models = [replace(self._study.subject, name="base model")]
        models += [] if cell.is_source else [replace(subject, name="conversion")]
        records: list[Row] = [{} for _ in models]
        evaluate.time_decoding(models, records, self._options, self._contexts)
        points = [record["decode"]["points"][0] for record in records]
        ratio = points[0]["seconds_per_token"] / points[-1]["seconds_per_token"]
        values = (*(points[-1][name] for name in names), self._contexts[0], ratio)
        return dict(zip(columns, values, strict=True))


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
    columns = [*CELL_COLUMNS, ("", lambda r: str(r["state"]))]
    note = f"{len(unmeasured)} of {len(cells)} cells to measure"
    return table(f"Study of {study.subject.name}", columns, records, note, filled=True)
