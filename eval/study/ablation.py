"""The grid from end to end: what `gqa-ablate` runs. A study is a directory; running it again continues it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.provenance import without_place
from gqa.checkpoint.write import replacing
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps_file import fingerprint
from gqa.convert.methods import ALIGNING
from gqa.convert.plan import Plan, check_grouping, make_plan
from gqa.corpus.sources import parse_sources, text_digest
from gqa.eval import evaluate
from gqa.eval.perplexity import Text, make_text
from gqa.eval.study.cells import Bench, Row, Shared, measure_conversion
from gqa.eval.study.jobs import measure_side_by_side
from gqa.eval.study.rows import Rows, no_place
from gqa.eval.study.speeds import measure_speeds
from gqa.eval.study.study import Cell, Grid, StudyOptions
from gqa.eval.subjects import Subject, open_subjects
from gqa.uptrain.feed import heldout_sources, open_feed
from gqa.uptrain.options import differences
from gqa.uptrain.run import find_block_size

SCHEMA = 1
RECORD, SPEEDS, WORK = "study.json", "speeds.json", ".work"
Told = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """A study that can run: everything that can be refused has been checked, and nothing is written.

    plans: of every method and number of groups; steps: of every alpha above 0; identity: what a directory's study must
    have in common with this one.
    """

    options: StudyOptions
    grid: Grid
    subject: Subject
    plans: dict[tuple[str, int], Plan]
    text: Text
    steps: dict[float, int]
    tokens_per_step: int
    identity: Row

    @property
    def heads(self) -> int:
        return next(iter(self.plans.values())).config.main.kv

    @property
    def cells(self) -> list[Cell]:
        return self.grid.cells(self.heads)

    @property
    def timed(self) -> list[int]:
        """Numbers of heads whose memory and speed the rows need."""
        return sorted({*self.grid.groups, self.heads})

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
    options = replace(options, devices=tuple(map(_usable, options.devices or (None,))))
    subject = open_subjects([options.model])[0]
    options = replace(options, model=subject.path)
    if subject.config.is_encoder_decoder:
        raise RefusedError(f"{subject.name} is an encoder-decoder; studies are of decoders")
    _check_data(options, grid)
    plans = _plans(subject, grid, options.maps.grouping)
    training = [a for a in grid.alphas if a]
    some = Cell("mean", 1, 0, grid.train[0], "none", 0)
    asked = [options.training(Path(subject.path), some, alpha) for alpha in training or [1.0]]
    text = _text(subject, options, heldout_sources(asked[0]))
    steps, tokens_per_step = {}, 0
    if training:
        size = find_block_size(subject.config, subject.tokenizer, subject.checkpoint, asked[0])
        for one in asked:
            one.check(1)
            feed = open_feed(one, subject.tokenizer, size)
            assert one.alpha is not None
            steps[one.alpha], tokens_per_step = feed.steps, feed.tokens_per_step
    plan = next(iter(plans.values()))
    identity = {
        "model": without_place(subject.checkpoint.hub_id or subject.name),
        "fingerprint": fingerprint(subject.checkpoint, attention_modules(subject.checkpoint, plan.config)),
        **options.binding(),
        "content of the data": _identify(options),
        "content of the held-out text": hashlib.sha256(repr([w.ids for w in text.windows]).encode()).hexdigest(),
    }
    study = Study(options, grid, subject, plans, text, steps, tokens_per_step, json.loads(json.dumps(identity)))
    _check_directory(study)
    return study


def _usable(device: str | None) -> str:
    found = evaluate.usable_device(device)
    return "cpu" if found.startswith("cpu") else found


def _check_data(options: StudyOptions, grid: Grid) -> None:
    if not options.data:
        raise RefusedError("no data is named: give text to train and calibrate on with --data, like stdlib:train")
    if any(source.partition(":")[0] == "self" for source in options.data):
        raise RefusedError("--data self is no text that can be held out; name text (self can be had for --calibration)")


def _plans(subject: Subject, grid: Grid, grouping: str) -> dict[tuple[str, int], Plan]:
    """Raises RefusedError for a method or a number of groups that this model cannot have. Other methods than those that
    align merge neighbours whatever `grouping` says.
    """
    plans = {
        (method, groups): make_plan(subject.checkpoint, groups, method)
        for groups in grid.groups
        for method in grid.methods
    }
    for (method, _), plan in plans.items():
        check_grouping(plan, grouping if method in ALIGNING else "contiguous")
    return plans


def _text(subject: Subject, options: StudyOptions, sources: Sequence[Any]) -> Text:
    """Held-out documents, whole, in the order of a hash of their text, which spreads a part of them over all."""
    if not sources:
        raise RefusedError(
            "nothing is held out to measure on: give --heldout SOURCE, or --heldout-fraction of the data's documents"
        )
    texts = sorted((found.text for source in sources for found in source.documents()), key=text_digest)
    context = evaluate.choose_context([subject], options.context, beyond=False)
    text = make_text(texts, subject.tokenizer, protocol="rolling", context=context, max_tokens=options.eval_tokens)
    evaluate.check_ids([subject], text)
    return text


def _identify(options: StudyOptions) -> str:
    sources = parse_sources(options.data, field=options.field)
    return hashlib.sha256(" ".join(source.identify() for source in sources).encode()).hexdigest()


def _check_directory(study: Study) -> None:
    """Raises RefusedError where there is something else than this study, OutputError where nothing can be written."""
    directory = study.directory
    record = read_record(directory)
    if record is None:
        if directory.exists() and _foreign(directory):
            raise RefusedError(f"{directory} exists and holds no study; give another directory with -o")
        return
    if changed := differences(study.identity, record["identity"]):
        raise RefusedError(
            f"{directory} holds another study: {'; '.join(changed)}; give another directory with -o, the same options, "
            "or start over with --overwrite"
        )


def read_record(directory: Path) -> Row | None:
    """study.json; None where there is none. Raises RefusedError where it is none of a study's."""
    path = directory / RECORD
    if not path.exists():
        return None
    try:
        record: Row = json.loads(path.read_text())
        known = record["schema"] == SCHEMA and {"identity", "runs"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RefusedError(f"{path} is no record of a study that this version can continue; give another directory")
    return record


def forget(directory: Path) -> None:
    """Remove a study. Raises RefusedError where the directory holds something else."""
    if not directory.exists():
        return
    if read_record(directory) is None and _foreign(directory):
        raise RefusedError(f"{directory} holds no study: --overwrite will not remove it; give another with -o")
    shutil.rmtree(directory)


def _foreign(directory: Path) -> bool:
    """Whether there is something that no study has left before its record was written."""
    return not directory.is_dir() or any(path.name != WORK for path in directory.iterdir())


def run_study(study: Study, *, command: str, told: Callable[[Row], None] = lambda row: None) -> Rows:
    """Measure all cells that are not measured yet; `told` gets each row as it is written.

    Raises OutputError where rows cannot be kept, StoppedError where a signal came while something was trained: the
    same call continues.
    """
    start, directory = time.perf_counter(), study.directory
    with _held(directory):
        record = read_record(directory) or {"schema": SCHEMA, "identity": study.identity, "runs": []}
        rows = Rows(directory)
        done = rows.done()
        left = [cell for cell in study.cells if cell not in done]
        known = _known_speeds(directory)
        if not left and not set(map(str, study.timed)) - known.keys():
            return rows
        environment = evaluate.environment(study.options.devices[0])
        this: Row = {"command": command, **environment, **git(), "cells": 0, "seconds": 0.0}
        record["runs"].append(this)

        def keep(row: Row) -> None:
            rows.add(row)
            this.update(cells=this["cells"] + 1, seconds=time.perf_counter() - start)
            _write(directory, RECORD, record)
            told(row)

        _write(directory, RECORD, record)
        speeds = measure_speeds(study.subject, study.options, study.timed, known, directory / WORK)
        by_groups = {int(groups): columns for groups, columns in speeds.items()}
        rows.update(by_groups)  # before they are known: a run that is killed between times them again
        _write(directory, SPEEDS, speeds)
        if left:
            shared = _share(study, record, by_groups)
            _write(directory, RECORD, record)
            _measure(study, shared, left, keep)
        else:
            record["source"].update(by_groups[study.heads])
        rows.finish()
        this["seconds"] = time.perf_counter() - start
        _write(directory, RECORD, record)
        if not set(study.cells) - rows.done():
            shutil.rmtree(directory / WORK, ignore_errors=True)
    return rows


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Raises RefusedError where another process runs the same study, OutputError where nothing can be written."""
    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / WORK / "lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise RefusedError(f"another run is working on {directory}; wait for it or give another -o") from None
    except OSError as error:
        raise OutputError(f"no study can be kept in {directory}: {error.strerror}; give another -o") from None
    try:
        yield
    finally:
        lock.release()
        if (directory / WORK).exists() and [p.name for p in (directory / WORK).iterdir()] == ["lock"]:
            shutil.rmtree(directory / WORK)


def _write(directory: Path, name: str, record: Row) -> None:
    try:
        with replacing(directory / name) as fresh:
            fresh.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise no_place(directory, error) from None


def _known_speeds(directory: Path) -> dict[str, Row]:
    path = directory / SPEEDS
    known: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _share(study: Study, record: Row, speeds: dict[int, Row]) -> Shared:
    """The source's evaluation, which is added to the record too."""
    subject, options = study.subject, study.options
    start = time.perf_counter()
    source = evaluate.measure_quality([subject], study.text, study.evaluation)[0]
    assert source.scores is not None
    quality = source.record["quality"]
    lost = None
    if options.kl:
        recording = json.loads((study.directory / WORK / "baseline" / "baseline.json").read_text())
        lost = recording["kl_lost_mean"]
    record["source"] = {
        "groups": study.heads,
        "query_heads": next(iter(study.plans.values())).config.main.query,
        "loss": quality["nats_per_token"],
        "perplexity": quality["token_perplexity"],
        "bits_per_byte": quality["bits_per_byte"],
        "kl_lost_to_rounding": lost,
        "text": study.text.record(),
        "seconds": time.perf_counter() - start,
        **speeds[study.heads],
    }
    identity = {k: v for k, v in study.identity.items() if not k.startswith("content")}
    environment = evaluate.environment(options.devices[0])
    versions = {f"version_{name.replace('-', '_')}": number for name, number in environment["versions"].items()}
    constant = {**identity, "device": environment["device"], **versions, **git()}
    key = evaluate.baseline_key(subject, study.text, study.evaluation)[1]
    cache = study.evaluation.baseline_cache
    return Shared(
        options, study.directory / WORK, study.text, np.asarray(source.scores.nats), (cache, key) if cache else None,
        study.steps, speeds, constant,
    )  # fmt: skip


def git() -> Row:
    """The commit of this program where it runs from a repository."""
    place = Path(__file__).parent
    words = ["git", "-C", str(place), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
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
