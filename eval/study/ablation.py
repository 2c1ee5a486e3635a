"""The grid from end to end: what `gqa-ablate` runs. A study is a directory; running it again continues it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import without_place
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps_file import fingerprint
from gqa.convert.methods import ALIGNING
from gqa.convert.plan import Plan, check_grouping, make_plan
from gqa.corpus.sources import parse_sources, text_digest
from gqa.eval import evaluate
from gqa.eval.perplexity import Text, make_text
from gqa.eval.study.cells import Bench, Shared, measure_conversion
from gqa.eval.study.directory import (
    RECORD,
    SCHEMA,
    SPEEDS,
    WORK,
    Row,
    Rows,
    held,
    is_foreign,
    read_record,
    write_json,
)
from gqa.eval.study.jobs import measure_side_by_side
from gqa.eval.study.speeds import measure_speeds
from gqa.eval.study.study import Cell, Grid, StudyOptions
from gqa.eval.subjects import Subject, open_subjects
from gqa.eval.text import check_ids, choose_context
from gqa.uptrain.dataloader import heldout_sources, open_dataloader
from gqa.uptrain.options import differences
from gqa.uptrain.setup import find_block_size


@dataclass(frozen=True)
class Study:
    """A study that can run: everything that can be refused has been checked, and nothing is written.

    plan: of the first method and number of groups; tokens: to train on, and steps: of every alpha above 0; identity:
    what a directory's study must have in common with this one.
    """

    options: StudyOptions
    grid: Grid
    subject: Subject
    plan: Plan
    text: Text
    steps: dict[float, int]
    tokens: dict[float, int]
    identity: Row

    @property
    def heads(self) -> int:
        return self.plan.config.main.kv

    @property
    def cells(self) -> list[Cell]:
        return self.grid.cells(self.heads)

    @property
    def directory(self) -> Path:
        return self.options.output

    @property
    def evaluation(self) -> evaluate.Options:
        kl, cache = self.options.kl, self.directory / WORK / "baseline"
        return evaluate.Options(
            batch_size=self.options.eval_batch, dtype=self.options.dtype, device=self.options.devices[0], compare=kl,
            baseline_cache=cache if kl else None,
        )  # fmt: skip


def open_study(options: StudyOptions, grid: Grid) -> Study:
    """Check everything. Raises RefusedError and CorpusError, before anything is written."""
    grid.check()
    subject = open_subjects([options.model])[0]
    devices = tuple(map(_usable, options.devices or (None,)))
    training = replace(options.training, model=subject.path)
    options = replace(options, training=training, devices=devices)
    if subject.config.is_encoder_decoder:
        raise RefusedError(f"{subject.name} is an encoder-decoder; studies are of decoders")
    if not training.data:
        raise RefusedError("no data is named: give text to train and calibrate on with --data, like stdlib:train")
    if any(source.partition(":")[0] == "self" for source in training.data):
        raise RefusedError("--data self is no text that can be held out; name text (self can be had for --calibration)")
    plan = _check_plans(subject, grid, options.maps.grouping)
    text = _text(subject, options, heldout_sources(training))
    alphas = [alpha for alpha in grid.alphas if alpha]
    asked = {alpha: replace(training, alpha=alpha) for alpha in alphas}
    dataloaders = {}
    for alpha, one in asked.items():
        one.check(1)
        size = find_block_size(subject.config, subject.tokenizer, subject.checkpoint, one)
        dataloaders[alpha] = open_dataloader(one, subject.tokenizer, size)
    sources = parse_sources(training.data, field=training.field)
    identity = {
        "model": without_place(subject.checkpoint.hub_id or subject.name),
        "fingerprint": fingerprint(subject.checkpoint, attention_modules(subject.checkpoint, plan.config)),
        **options.binding(),
        "content of the data": _digest(" ".join(source.identify() for source in sources)),
        "content of the held-out text": _digest(repr([window.ids for window in text.windows])),
    }
    steps = {alpha: loader.steps for alpha, loader in dataloaders.items()}
    tokens = {alpha: loader.steps * loader.tokens_per_step for alpha, loader in dataloaders.items()}
    study = Study(options, grid, subject, plan, text, steps, tokens, json.loads(json.dumps(identity)))
    _check_directory(study)
    return study


def _usable(device: str | None) -> str:
    found = evaluate.usable_device(device)
    return "cpu" if found.startswith("cpu") else found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_plans(subject: Subject, grid: Grid, grouping: str) -> Plan:
    """The first of them. Raises RefusedError for a method or a number of groups that this model cannot have.

    Other methods than those that align merge neighbours whatever `grouping` says.
    """
    plans = [make_plan(subject.checkpoint, groups, method) for groups in grid.groups for method in grid.methods]
    for plan in plans:
        check_grouping(plan, grouping if plan.merging.method in ALIGNING else "contiguous")
    return plans[0]


def _text(subject: Subject, options: StudyOptions, sources: Sequence[Any]) -> Text:
    """Held-out documents, whole, in the order of a hash of their text, which spreads a part of them over all."""
    if not sources:
        raise RefusedError(
            "nothing is held out to measure on: give --heldout SOURCE, or --heldout-fraction of the data's documents"
        )
    texts = sorted((found.text for source in sources for found in source.documents()), key=text_digest)
    context = choose_context([subject], options.context, beyond=False)
    text = make_text(texts, subject.tokenizer, protocol="rolling", context=context, max_tokens=options.eval_tokens)
    check_ids([subject], text)
    return text


def _check_directory(study: Study) -> None:
    """Raises RefusedError where there is something else than this study."""
    directory = study.directory
    record = read_record(directory)
    if record is None and is_foreign(directory):
        raise RefusedError(f"{directory} exists and holds no study; give another directory with -o")
    if record and (changed := differences(study.identity, record["identity"])):
        raise RefusedError(
            f"{directory} holds another study: {'; '.join(changed)}; give another directory with -o, the same options, "
            "or start over with --overwrite"
        )


def run_study(study: Study, *, command: str, told: Callable[[Row], None] = lambda row: None) -> Rows:
    """Measure all cells that are not measured yet; `told` gets each row as it is written.

    Raises OutputError where rows cannot be kept, StoppedError where a signal came while something was trained: the
    same call continues.
    """
    start, directory = time.perf_counter(), study.directory
    with held(directory) as work:
        record = read_record(directory) or {"schema": SCHEMA, "identity": study.identity, "runs": []}
        rows, speeds = Rows(directory), _read_speeds(directory)
        done = rows.done()
        left = [cell for cell in study.cells if cell not in done]
        timed = [groups for groups in sorted({*study.grid.groups, study.heads}) if str(groups) not in speeds]
        if not left and not timed:
            return rows
        environment = evaluate.environment(study.options.devices[0])
        this: Row = {"command": command, **environment, **git(), "cells": 0}
        record["runs"].append(this)

        def save() -> None:
            this["seconds"] = time.perf_counter() - start
            write_json(directory, RECORD, record)

        def keep(row: Row) -> None:
            rows.add(row)
            this["cells"] += 1
            save()
            told(row)

        save()
        speeds |= measure_speeds(study.subject, study.options, timed, work)
        by_groups = {int(groups): columns for groups, columns in speeds.items()}
        rows.rewrite(by_groups)  # before they are known: a run that is killed between times them again
        write_json(directory, SPEEDS, speeds)
        if left:
            shared = _share(study, record, by_groups)
            save()
            _measure(study, shared, left, keep)
            rows.rewrite(by_groups)
        else:
            record["source"].update(by_groups[study.heads])
        save()
        if not set(study.cells) - rows.done():
            shutil.rmtree(work, ignore_errors=True)
    return rows


def _read_speeds(directory: Path) -> dict[str, Row]:
    path = directory / SPEEDS
    known: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _share(study: Study, record: Row, speeds: dict[int, Row]) -> Shared:
    """The source's evaluation, which is added to the record too."""
    subject, options, evaluation = study.subject, study.options, study.evaluation
    start = time.perf_counter()
    scores = evaluate.measure_quality([subject], study.text, evaluation)
    quality, cache = subject.record["quality"], evaluation.baseline_cache
    record["source"] = {
        "groups": study.heads,
        "query_heads": study.plan.config.main.query,
        "loss": quality["nats_per_token"],
        "perplexity": quality["token_perplexity"],
        "bits_per_byte": quality["bits_per_byte"],
        "kl_lost_to_rounding": json.loads((cache / "baseline.json").read_text())["kl_lost_mean"] if cache else None,
        "text": study.text.record(),
        "seconds": time.perf_counter() - start,
        **speeds[study.heads],
    }
    identity = {name: value for name, value in study.identity.items() if not name.startswith("content")}
    environment = evaluate.environment(options.devices[0])
    versions = {f"version_{name.replace('-', '_')}": number for name, number in environment["versions"].items()}
    key = evaluate.baseline_key(subject, study.text, evaluation)[1]
    return Shared(
        options, study.directory / WORK, study.text, np.asarray(scores.nats), (cache, key) if cache else None,
        study.steps, speeds, {**identity, "device": environment["device"], **versions, **git()},
    )  # fmt: skip


def git() -> Row:
    """The commit of this program where it runs from a repository."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = None
    return {"git": found}


def _measure(study: Study, shared: Shared, left: list[Cell], keep: Callable[[Row], None]) -> None:
    units = [list(cells) for _, cells in groupby(left, key=lambda cell: cell.conversion)]
    options = study.options
    if options.jobs > 1 or options.devices != (_usable(None),):  # processes of their own see one device each
        measure_side_by_side(shared, units, max(options.jobs, len(options.devices)), options.devices, keep)
        return
    bench = Bench(shared, options.devices[0])
    for cells in units:
        measure_conversion(bench, cells, keep)
