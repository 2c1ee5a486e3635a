"""Compare checkpoints: the first is the baseline. What `gqa-eval` runs and the ablation grid calls."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gqa.convert.errors import RefusedError
from gqa.convert.loading import load_model
from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.attention_error import attention_errors
from gqa.eval.perplexity import Text, clusters, perplexity
from gqa.eval.scoring import LiveBaseline, Progress, Scores, score
from gqa.eval.statistics import by_context, kl_statistics, paired_ratio
from gqa.eval.stored_baseline import Recorder, StoredBaseline, fingerprint
from gqa.eval.subjects import Subject

SCHEMA = 1
MAX_CONTEXT = 2048  # longer only when asked for: a model of 128k positions would be scored in windows of 128k
LAYER_WINDOWS = 8


@dataclass(frozen=True)
class Options:
    """How models are run. See `gqa-eval --help`."""

    batch_size: int = 8
    dtype: str = "auto"
    device: str = "cpu"
    attention: str | None = "sdpa"
    compile: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    compare: bool = False  # distributions and attention outputs against the baseline
    baseline_cache: Path | None = None


@dataclass
class Row:
    """One checkpoint with everything that was measured of it."""

    subject: Subject
    scores: Scores | None = None
    record: dict[str, Any] = field(default_factory=dict)


def load(subject: Subject, options: Options) -> PreTrainedModel:
    return load_model(
        subject.path,
        dtype=options.dtype,
        device=options.device,
        attention=options.attention,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def measure_quality(
    subjects: Sequence[Subject],
    text: Text,
    options: Options,
    progress: Callable[[str], Progress] = lambda name: lambda tokens: None,
) -> list[Row]:
    """Perplexity of every checkpoint on the same windows and, with `options.compare`, how it differs from the first.

    One model is in memory at a time, two while they are compared in lockstep. `progress(name)` gives the function that
    is called with numbers of tokens while that model is scored.
    """
    rows = [Row(subject) for subject in subjects]
    baseline = load(subjects[0], options)
    head = ChunkedHead(baseline, options.compile)
    reference: LiveBaseline | StoredBaseline = LiveBaseline(head)
    if options.compare and options.baseline_cache:
        reference = _stored_baseline(subjects[0], head, text, options, progress)
        rows[0].scores = Scores.of(text.windows, reference.nats)
    elif not options.compare or len(rows) == 1:
        rows[0].scores = score(head, text.windows, batch_size=options.batch_size, progress=progress(subjects[0].name))
    if not options.compare:
        del baseline, head
    for row in rows[1:]:
        model = load(row.subject, options)
        row.scores = score(
            ChunkedHead(model, options.compile),
            text.windows,
            batch_size=options.batch_size,
            baseline=reference if options.compare else None,
            progress=progress(row.subject.name),
        )
        if rows[0].scores is None:
            assert row.scores.baseline_nats is not None
            rows[0].scores = Scores.of(text.windows, row.scores.baseline_nats)
        if options.compare:
            row.record["attention_error"] = [asdict(e) for e in attention_errors(baseline, model, _some(text))]
    for row in rows:
        _summarise(row, rows[0], text)
        if isinstance(reference, StoredBaseline) and row is not rows[0]:
            row.record["against_baseline"]["stored_baseline"] = reference.record
    return rows


def _stored_baseline(
    subject: Subject, head: ChunkedHead, text: Text, options: Options, progress: Callable[[str], Progress]
) -> StoredBaseline:
    assert options.baseline_cache is not None
    key = fingerprint(subject.path, text.windows, str(head.model.dtype))
    found = StoredBaseline.open(options.baseline_cache, key)
    if found is None:
        recorder = Recorder(options.baseline_cache, key, text.tokens, head.vocabulary)
        scores = score(
            head, text.windows, batch_size=options.batch_size, record=recorder, progress=progress(subject.name)
        )
        recorder.finish(scores.nats)
        found = StoredBaseline.open(options.baseline_cache, key)
        assert found is not None
    return found


def _some(text: Text) -> list[Any]:
    """Windows spread evenly over the text."""
    picks = np.linspace(0, len(text.windows) - 1, min(LAYER_WINDOWS, len(text.windows))).astype(int)
    return [text.windows[i] for i in picks]


def _summarise(row: Row, baseline: Row, text: Text) -> None:
    assert row.scores is not None
    assert baseline.scores is not None
    row.record["quality"] = perplexity(row.scores, text).record()
    row.record["by_context"] = by_context(row.scores.nats, row.scores.context)
    if row is baseline:
        return
    compared: dict[str, Any] = paired_ratio(
        row.scores.nats, baseline.scores.nats, np.array(clusters(row.scores, text.windows))
    )
    if row.scores.kl is not None:
        assert row.scores.same_top is not None
        compared |= kl_statistics(row.scores.kl, row.scores.same_top, row.scores.nats, baseline.scores.nats)
    row.record["against_baseline"] = compared


def check_models_agree(subjects: Sequence[Subject], sample: str) -> None:
    """Raise RefusedError where two checkpoints do not read text as the same tokens: their losses would not compare."""
    first = subjects[0]
    vocabulary, ids = first.tokenizer.get_vocab(), first.tokenizer(sample, verbose=False)["input_ids"]
    for other in subjects[1:]:
        theirs = other.tokenizer.get_vocab()
        if theirs != vocabulary or other.tokenizer(sample, verbose=False)["input_ids"] != ids:
            raise RefusedError(
                f"{first.name} ({len(vocabulary):,} tokens) and {other.name} ({len(theirs):,}) have different "
                "tokenizers, so their losses per token do not compare; evaluate each alone and compare bits per byte"
            )
        if other.vocabulary != first.vocabulary:
            raise RefusedError(
                f"{first.name} predicts {first.vocabulary:,} tokens and {other.name} {other.vocabulary:,}; "
                "give conversions of the same checkpoint"
            )


def choose_context(subjects: Sequence[Subject], asked: int | None, beyond: bool) -> int:
    """Tokens of a window: what is asked for, or the models' positions up to MAX_CONTEXT. Raises RefusedError."""
    limits = [subject.positions for subject in subjects if subject.positions]
    if asked is None:
        return min([*limits, MAX_CONTEXT])
    if limits and asked > min(limits) and not beyond:
        raise RefusedError(
            f"--context {asked} is more than the {min(limits)} positions that the model was made for; give at most "
            f"{min(limits)}, or --beyond-positions to see what happens"
        )
    return asked


def environment(device: str) -> dict[str, Any]:
    """What the numbers were measured with."""
    names = ("gqa-convert", "torch", "transformers", "accelerate", "datasets", "numpy")
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
    }
