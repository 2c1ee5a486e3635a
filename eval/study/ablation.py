"""The grid from end to end: what `gqa-ablate` runs. A study is a directory; running it again continues it."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.identity import checkpoint_digest
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.provenance import portable, without_place
from gqa.convert.align.allot import heads_within, uneven
from gqa.convert.estimate import TRAINING, operations
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.layout import Groups
from gqa.convert.methods import AUTO, METHODS
from gqa.convert.plan import make_plan, searches
from gqa.corpus.likelihood import ChunkedHead
from gqa.corpus.pairs import pair_digest, read_pairs
from gqa.corpus.sources import hash_threshold, is_below, parse_sources, text_digest
from gqa.corpus.windows import tokens_read as windows_read
from gqa.eval import evaluate
from gqa.eval.options import EvaluateOptions
from gqa.eval.recall import tokens_read
from gqa.eval.scoring import score
from gqa.eval.study.cells import Bench, measure_conversion, measure_speeds
from gqa.eval.study.directory import RECORD, SCHEMA, Row, Rows, held, is_foreign, read_record, read_speeds, write_json
from gqa.eval.study.report import CELL
from gqa.eval.study.study import Cell, Grid, StudyOptions
from gqa.eval.subjects import Subject, open_subjects
from gqa.eval.tables import Table, filled, table
from gqa.eval.text import MAX_CONTEXT, Text, check_ids, choose_context, make_pairs, make_spans, make_text
from gqa.uptrain.dataloader import heldout_sources, open_dataloader, open_heldout
from gqa.uptrain.options import TrainOptions, differences
from gqa.uptrain.pairs import open_pairs
from gqa.uptrain.setup import MAX_PAIR, find_block_size

ALL = 2**62  # tokens
TEACHING = 1.0  # forward passes for each token that is trained on


@dataclass(frozen=True)
class Study:
    """A study that can run: everything that can be refused has been checked, and nothing is written.

    config: of the source; tokens: to train on, and steps: of every alpha above 0;
    identity: what a directory's study must have in common with this one; left_out: methods that the model cannot have,
    and why.
    """

    options: StudyOptions
    grid: Grid
    subject: Subject
    config: ModelConfig
    text: Text
    steps: dict[float, int]
    tokens: dict[float, int]
    identity: Row
    left_out: dict[str, str]

    @property
    def heads(self) -> int:
        return self.config.main.kv

    @property
    def cells(self) -> list[Cell]:
        return self.grid.cells(self.heads)

    @property
    def left(self) -> list[Cell]:
        """Those that are to be measured: the others have a row without an error."""
        done = {Cell.of(row) for row in Rows(self.options.output) if not row["error"]}
        return [cell for cell in self.cells if cell not in done]


def open_study(options: StudyOptions, grid: Grid, strict: bool = True, anew: bool = False) -> Study:
    """Check everything. Raises RefusedError and CorpusError, before anything is written; unless `strict`, methods that
    this model cannot have are left out instead. `anew`: whatever study is there is not continued.
    """
    subject = open_subjects([options.model], options.training.trust_remote_code)[0]
    training = replace(options.training, model=subject.path)
    options = replace(options, training=training)
    evaluate.usable_device(options.device)  # or refused
    subject.check_predicts_tokens()
    if training.target_field and not subject.config.is_encoder_decoder:
        raise RefusedError(f"--target-field is for encoder-decoders, {subject.name} is none; leave it out")
    if not training.data:
        raise RefusedError("no data is named: give text to train and calibrate on with --data, like stdlib:train")
    if any(source.partition(":")[0] == "self" for source in training.data):
        raise RefusedError("--data self is no text that can be held out; name text (self can be had for --calibration)")
    evaluate.with_bits([subject], grid.cache_bits or ())
    config, grid, left_out = _settle(subject, grid, options.maps.grouping, strict)
    if any(METHODS[method].reads_text for method in grid.methods):
        options.maps.text.check(subject.config, subject.name, "--calibration-context")
    text = _text(subject, options)
    if options.recall:
        evaluate.check_recall([subject], text.context)
    steps, tokens = {}, {}
    for alpha in filter(None, grid.alphas):
        one = replace(training, alpha=alpha)
        one.check(1)
        size = find_block_size(subject.config, subject.tokenizer, subject.checkpoint, one)
        if encoder := subject.encoder:
            dataloader = open_pairs(one, encoder, subject.tokenizer, size, 1, None)
        else:
            dataloader = open_dataloader(one, subject.tokenizer, size)
        steps[alpha], tokens[alpha] = dataloader.steps, dataloader.steps * dataloader.tokens_per_step
    columns = filter(None, (training.field, training.target_field))
    sources = [source for column in columns for source in parse_sources(training.data, field=column)]
    identity = {
        "model": without_place(subject.checkpoint.hub_id or subject.name),
        "fingerprint": checkpoint_digest(subject.checkpoint),
        **options.binding(),
        "content of the data": text_digest(" ".join(source.identify() for source in sources)).hex(),
        "content of the held-out text": text_digest(
            repr([window.source + window.ids for window in text.windows])
        ).hex(),
    }
    identity, record = json.loads(json.dumps(identity)), read_record(options.output)
    if record is None and not anew and is_foreign(options.output):
        raise RefusedError(f"{options.output} exists and holds no study; give another directory with -o")
    if record and not anew and (changed := differences(identity, record["identity"])):
        raise RefusedError(
            f"{options.output} holds another study: {'; '.join(changed)}; give another directory with -o, the same "
            "options, or start over with --overwrite"
        )
    return Study(options, grid, subject, config, text, steps, tokens, identity, left_out)


def _settle(subject: Subject, grid: Grid, grouping: str, strict: bool) -> tuple[ModelConfig, Grid, dict[str, str]]:
    """The source's config, the grid with its numbers of groups and without the methods that are left out, and these.
    Raises RefusedError for a method or a number of groups that this model cannot have.

    Other methods than those that align merge neighbours whatever `grouping` says.
    """
    config, left_out = make_plan(subject.checkpoint, (grid.groups or (1,))[0], "mean").config, {}
    methods = list(grid.methods)
    if AUTO in methods:
        methods[methods.index(AUTO)] = make_plan(subject.checkpoint, (grid.groups or (1,))[0]).method
    grid = replace(grid, methods=methods, groups=grid.settled(config.main.kv))
    sizes: list[Groups] = [
        *(grid.groups or ()),
        *(uneven(subject.checkpoint, one, option="--kv-budgets") for one in grid.kv_budgets or ()),
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


def _text(subject: Subject, options: StudyOptions) -> Text:
    """Held-out documents or pairs, whole, in the order of a hash of their text, which spreads a part of them over all;
    for an encoder-decoder without a column of targets, blocks of which spans are left out.
    """
    training, encoder = options.training, subject.encoder
    if not (sources := heldout_sources(training)):
        raise RefusedError(
            "nothing is held out to measure on: give --heldout SOURCE, or --heldout-fraction of the data's documents"
        )
    spans = encoder is not None and not training.target_field
    context = choose_context([subject], options.context, beyond=False, most=MAX_PAIR if spans else MAX_CONTEXT)
    if encoder is None:
        texts = sorted((found.text for source in sources for found in source.documents()), key=text_digest)
        text = make_text(texts, subject.tokenizer, protocol="rolling", context=context, max_tokens=options.eval_tokens)
    elif spans:
        wanted = replace(training, block_size=context, heldout_tokens=options.eval_tokens or ALL)
        text = make_spans(open_heldout(wanted, subject.tokenizer), encoder, subject.tokenizer, context)
    else:
        text = make_pairs(_heldout_pairs(training), encoder, context, options.eval_tokens)
    check_ids([subject], text)
    return text


def _heldout_pairs(training: TrainOptions) -> list[tuple[str, str]]:
    """Those that are named to be held out, or the share of the data's that gqa-uptrain holds back, in the order of
    their hash. Raises RefusedError and CorpusError.
    """
    data = [training.heldout] if training.heldout else training.data
    columns = [parse_sources(data, field=field) for field in (training.field, training.target_field or "")]
    threshold = hash_threshold(1.0 if training.heldout else training.heldout_fraction)
    found: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for source, target in zip(*columns, strict=True):
        for one, answer in read_pairs(source, target):
            found[pair_digest(one.text, answer)].append((one.text, answer))
    return [pair for digest in sorted(found) if is_below(digest, threshold) for pair in found[digest]]


def run_study(study: Study, *, argv: Sequence[str], told: Callable[[Row], None] = lambda row: None) -> Rows:
    """Measure all cells that are not measured yet; `told` gets each row as it is written; `argv` are the
    arguments of the command.

    Raises OutputError where rows cannot be kept, StoppedError where a signal came while something was trained: the
    same call continues.
    """
    start, options, heads = time.perf_counter(), study.options, str(study.heads)
    with held(options.output) as work:
        record = read_record(options.output) or {"schema": SCHEMA, "identity": study.identity, "runs": []}
        rows, speeds = Rows(options.output), read_speeds(options.output)
        left = study.left
        caches = {heads: (heads, None)} | {cell.cache: (cell.heads, cell.bits) for cell in study.cells}
        timed = {name: cache for name, cache in caches.items() if name not in speeds}
        if not left and not timed:
            return rows
        this: Row = {
            "argv": portable(argv),
            **evaluate.environment(options.run_device),
            "cells": 0,
        }
        record["runs"].append(this)
        constant = {name: value for name, value in study.identity.items() if not name.startswith("content")}
        versions = {f"version_{name.replace('-', '_')}": number for name, number in this["versions"].items()}
        constant |= {"device": this["device"], **versions}

        def save() -> None:
            this["seconds"] = time.perf_counter() - start
            write_json(options.output, RECORD, record)

        def keep(row: Row) -> None:
            rows.add(row | speeds[Cell.of(row).cache] | constant)
            this["cells"] += 1
            save()
            told(row)

        save()
        of_layers = {heads: study.heads} | _heads(study, speeds)
        sizes = {name: (of_layers[kept], bits) for name, (kept, bits) in timed.items()}
        speeds |= measure_speeds(study.subject, options, sizes, work)
        rows.keep_speeds(speeds)
        if left:
            bench, record["source"] = _measure_source(study, work, of_layers)
            record["source"] |= speeds[heads]
            save()
            for _, cells in groupby(left, key=lambda cell: cell.conversion):
                measure_conversion(bench, list(cells), keep)
            rows.rewrite(speeds)
        record["source"] |= speeds[heads]
        save()
        if not study.left:
            shutil.rmtree(work, ignore_errors=True)
    return rows


def _heads(study: Study, speeds: Mapping[str, Row]) -> dict[str, Groups]:
    """The heads of all layers, by `Cell.heads`. For budgets that `speeds` does not know yet each layer is measured."""
    found: dict[str, Groups] = {cell.heads: int(cell.groups) for cell in study.cells if not cell.budget}
    budgets = {cell.heads: cell.budget for cell in study.cells if cell.budget}
    found |= {name: tuple(speeds[name]["kv_heads"]) for name in budgets if name in speeds}
    if new := {name: share for name, share in budgets.items() if name not in speeds}:
        options = study.options.maps_of(study.cells[0])
        found |= zip(new, heads_within(study.subject.checkpoint, [*new.values()], options)[0], strict=True)
    return found


def _measure_source(study: Study, work: Path, of_layers: Mapping[str, Groups]) -> tuple[Bench, Row]:
    """What cells are measured with, and the source's numbers."""
    subject, options, start = study.subject, study.options, time.perf_counter()
    how = EvaluateOptions(
        batch_size=options.eval_batch, precision=options.dtype, device=options.run_device, quiet=True,
    )  # fmt: skip
    nats = evaluate.measure_quality([subject], study.text, how)
    quality = subject.record["quality"]
    layers = len(subject.cache.layers) if subject.cache else 0
    bench, told = Bench(options, work, study.text, np.asarray(nats), study.steps, of_layers, layers), {}
    for bits in study.grid.cache_bits or ():  # refused before anything is converted and trained
        with bench.cache_of(bench.load(subject.path, options.dtype), bits):
            pass
    if options.recall is not False:
        try:
            bench.probe = evaluate.make_probe(subject, study.text, study.text.context, how)
            head = ChunkedHead(bench.load(subject.path, options.dtype))
            told = bench.recall(head) | bench.first_reading(head) | {"samples": bench.probe.written_by()}
        except RefusedError as error:  # what is measured by itself does not cost what was asked for
            if options.recall:
                raise
            told = {"recall_refused": str(error)}
    return bench, {
        "groups": study.heads,
        "query_heads": study.config.main.query,
        "loss": quality["nats_per_token"],
        "perplexity": quality["token_perplexity"],
        "bits_per_byte": quality["bits_per_byte"],
        "text": study.text.record(),
        **told,
        "seconds": time.perf_counter() - start,
    }


def passes(study: Study, cells: Sequence[Cell]) -> dict[Cell, float]:
    """Tokens of forward passes that each of `cells`, in their order, takes. The first cell of a conversion pays for the
    conversion, and each cell of a training for the tokens since the one before.
    """
    checkpoint = study.subject.checkpoint
    asked = study.options.recall is not False and not study.subject.config.is_encoder_decoder
    measuring = windows_read(study.text.windows) + (tokens_read(study.text.context) if asked else 0)
    found = {}
    for _, some in groupby(cells, key=lambda cell: cell.conversion):
        first, converting = (group := list(some))[0], 0.0
        if first.method in METHODS:  # else nothing is merged
            groups = uneven(checkpoint, first.budget) if first.budget else int(first.groups)
            plan = make_plan(checkpoint, groups, first.method)
            counted = operations(plan, METHODS[first.method], study.options.maps)  # as gqa-convert --dry-run does it
            converting = counted / (2 * checkpoint.parameters)
        for run in study.options.runs(group):
            before = 0
            for cell in run:
                tokens, of_each = study.tokens.get(cell.alpha, 0), TRAINING + TEACHING * (cell.teacher != "none")
                found[cell] = converting + (tokens - before) * of_each + measuring
                converting, before = 0.0, tokens
    return found


def forward_rate(study: Study) -> float:
    """Tokens a second of the source: the fastest of three passes over some windows, after a first one."""
    options = study.options
    head = ChunkedHead(load_model(study.subject.path, dtype=options.dtype, device=options.run_device))
    windows, seconds = study.text.windows[: options.eval_batch], []
    for _ in range(4):
        start = time.perf_counter()
        score(head, windows, batch_size=options.eval_batch)
        seconds.append(time.perf_counter() - start)
    return windows_read(windows) / min(seconds[1:])


def cost_table(study: Study) -> Table:
    rate, left = forward_rate(study), passes(study, study.left)
    records = [
        cell._asdict() | {
            "tokens": study.tokens.get(cell.alpha, 0),
            "seconds": left[cell] / rate if cell in left else "done",
        }
        for cell in study.cells
    ]  # fmt: skip
    note = (
        f"{len(left)} of {len(records)} cells to measure, about "
        f"{sum(left.values()) / rate / 60:.1f} minutes and the base model's evaluation"
        f"{', and what --kv-budgets measures of its layers' if study.grid.kv_budgets else ''}; from "
        f"{rate:,.0f} tokens/s of a forward pass timed now: training counts {TRAINING:g} passes (a teacher "
        f"{TEACHING:g} more), measuring 1, converting as gqa-convert --dry-run says"
    )
    columns = CELL | {"train tokens": "{tokens:,}", "seconds": "{seconds:,.0f}"}
    return table(f"Study of {study.subject.name}", filled(columns, records), records, note)
