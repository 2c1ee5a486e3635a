"""Measure checkpoints against the first, the baseline: for `gqa-eval` and for the cells of
`gqa-ablate`.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from gqa.checkpoint.base_model import is_base_model
from gqa.checkpoint.provenance import PROVENANCE, describe_request, read_record, versions
from gqa.core.console import Watcher
from gqa.core.devices import on_main, out_of_memory, ranks
from gqa.core.errors import NoMemoryError, alternatives, explain
from gqa.eval import recall
from gqa.eval.decode import decode_contexts, time_decoding
from gqa.eval.metrics import arrays_read, measure_text
from gqa.eval.options import EvaluateOptions
from gqa.eval.scoring import BASELINE, Scores, Window, score
from gqa.eval.subjects import Subject, input_device, numerics, open_subjects
from gqa.eval.text import (
    Text,
    check_models_agree,
    choose_context,
    prefix_token,
    read_text,
)
from gqa.models.chunked_head import ChunkedHead
from gqa.models.classes import check_predicts_tokens

SCHEMA = 5
SHOWN = 4  # greedy texts of each model in a report
Record = dict[str, Any]


def measure(options: EvaluateOptions, argv: Sequence[str], results: Record | None = None) -> Record:
    """Run every measurement of `options`.

    Refusals that need no model come first, then decoding, which needs the most memory: so no
    measurement is lost.

    Args:
        options: The models, the first is the baseline, and what to measure of them.
        argv: The command's arguments, for the record.
        results: The empty record to fill: it has what was measured before an error or an
            interruption.

    Returns:
        A JSON-ready record on rank 0, empty on the other ranks.

    Raises:
        RefusedError: A model cannot be measured so.
        NoMemoryError: A device or the host has too little memory.
        TextError: The text cannot be used.
    """
    transformers.utils.logging.set_verbosity_error()
    state = ranks()
    device = input_device(options.device)
    subjects = open_subjects(
        options.models, options.trust_remote_code, options.revision, options.simulate_cache or ()
    )
    if state.is_main_process:
        _warn_if_swapped(subjects, options)
    context = choose_context(subjects, options.context)
    models = [subject.record(context, options.memory) for subject in subjects]
    measures_recall = _measures_recall(options, subjects[0])

    # What was chosen where an option was left open is in the record.
    chosen = replace(
        options, context=context, recall=measures_recall, device=options.device or device
    )
    results = {} if results is None else results
    results |= {
        **describe_request(chosen, argv),
        "argv": [*argv],
        **environment(device),
        "models": models,
    }

    # Refusals, and the text.
    if options.data or options.decode or measures_recall:
        for subject in subjects:
            check_predicts_tokens(subject.config, subject.name, subject.trust_remote_code)

    if measures_recall:
        check_models_agree(subjects, "text")
        recall.check_recall(subjects[0], context)
        results["recall"] = {"context": context}

    contexts: tuple[int, ...] = ()
    if options.decode:
        contexts = decode_contexts(subjects, options.decode_contexts, options.decode_steps)
        results["options"]["decode_contexts"] = [*contexts]

    if options.memory:
        results["memory"] = {"bytes": options.memory, "context": context}

    text = None
    if options.data:
        text = read_text(subjects, options, context)
        results["text"] = {"data": ", ".join(options.data), **text.record()}

    if state.is_main_process:
        _warn_if_unrelated(subjects, options)
        _warn_if_same(subjects, options)

    if options.decode:
        # One process measures: other ranks would disturb it.
        with _memory_advice("lower --decode-batches or --decode-contexts"):
            on_main(lambda: time_decoding(subjects, models, options, contexts))

    if text or measures_recall:
        recall_context = context if measures_recall else None
        with _memory_advice(_what_needs_less(options, context, device)):
            _compare(subjects, models, text, options, recall_context)
    return results if state.is_main_process else {}


@contextmanager
def _memory_advice(advice: str) -> Iterator[None]:
    """Say in the error of a device or host that runs out of memory in the block what to do.

    Raises NoMemoryError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise NoMemoryError(f"out of memory: {explain(error)}; {advice}") from error


def _what_needs_less(options: EvaluateOptions, context: int, device: str) -> str:
    """The options that make scoring need less memory, of those that are left."""
    lower = f"--context (now {context})"
    if options.batch_size > 1:
        lower = f"--batch-size (now {options.batch_size}) or {lower}"
    advice = [f"lower {lower}"]
    if options.kl:
        advice.append("remove --kl")
    is_spread = options.device == "auto" or ranks().num_processes > 1
    if not is_spread and not device.startswith("cpu"):
        advice.append("pass --device auto")
    return alternatives(advice)


def _warn_if_swapped(subjects: Sequence[Subject], options: EvaluateOptions) -> None:
    """Warn if the baseline is a conversion of a model that is compared with it."""
    baseline, *others = subjects
    record = read_record(baseline.checkpoint, PROVENANCE)
    source = record.get("source") if isinstance(record, dict) else None
    if not isinstance(source, dict):
        return
    for other in others:
        if is_base_model(other.checkpoint, baseline.checkpoint, source):
            Watcher(options.quiet).warn(
                f"{other.name} is the base model of {baseline.name}, and is compared with it as "
                f"if it were the converted model; pass the base model {other.name} first"
            )
            return


def _warn_if_unrelated(subjects: Sequence[Subject], options: EvaluateOptions) -> None:
    """Warn of models that cannot be conversions of the first: layers of another number or width."""
    baseline = subjects[0]
    for subject in subjects[1:]:
        if _shape(subject) != _shape(baseline):
            Watcher(options.quiet).warn(
                f"{subject.name} has {_shape(subject)}, {baseline.name} {_shape(baseline)}: it is "
                "another model, not a conversion of it"
            )


def _warn_if_same(subjects: Sequence[Subject], options: EvaluateOptions) -> None:
    """Warn of models that are the baseline itself, unless their caches differ."""
    baseline = subjects[0]
    for subject in subjects[1:]:
        is_same = subject.checkpoint.directory == baseline.checkpoint.directory
        if is_same and subject.cache_format == baseline.cache_format:
            Watcher(options.quiet).warn(
                f"{subject.name} is the same model as {baseline.name}: their quality cannot differ"
            )


def _shape(subject: Subject) -> str:
    """The number and the width of a model's layers, in words."""
    config = subject.config.get_text_config(decoder=True)
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"


def _measures_recall(options: EvaluateOptions, baseline: Subject) -> bool:
    """Whether recall is measured. It is left out by default for encoder-decoders; asked for, they
    are refused later.
    """
    if options.recall:
        return True
    return options.asks_for_recall and not baseline.config.is_encoder_decoder


def _compare(
    subjects: Sequence[Subject],
    models: Sequence[Record],
    text: Text | None,
    options: EvaluateOptions,
    recall_context: int | None,
) -> None:
    """Add metrics and recall to the records of models, one subject after the other.

    recall_context: Tokens of a question about the context at most; None without recall.
    """
    vocabulary = min(subject.vocabulary for subject in subjects)
    comparison = Comparison(subjects[0], text, options, vocabulary)
    if recall_context:
        comparison.prepare_recall(recall_context)

    for subject, model in zip(subjects, models, strict=True):
        comparison.measure(subject, model)
        # With --kl that of the base model is there only after the first converted model
        if comparison.baseline_quality:
            models[0].setdefault("quality", comparison.baseline_quality)


class Comparison:
    """Measures models one after the other, each loaded once: the base model first, then the models
    compared with it.

    When the base model is scored on the text:

        without --kl         alone, before the others: one model is in memory at a time
        with --kl            side by side with each converted model, so it stays in memory. Its own
                             numbers come from the first of these passes, which saves one
        with --kl, `alone`   side by side too, but its own numbers come from a pass of its own,
                             before the others: for callers that need them then

    Attributes:
        questions: About the context, if recall is measured.
        baseline_quality: Metrics of the base model on the text; empty until it is scored.
    """

    def __init__(
        self,
        baseline: Subject,
        text: Text | None,
        options: EvaluateOptions,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: the number of token ids that all models know, by default those of the base
        model.
        """
        self._baseline = baseline
        self._text = text
        self._options = options
        self._vocabulary = baseline.vocabulary if vocabulary is None else vocabulary
        self._prompts: list[list[int]] = []  # of greedy texts
        self._texts: Sequence[Window] = ()  # greedy texts of the base model
        self._baseline_head: ChunkedHead | None = None  # if the base model stays in memory
        self._baseline_scores: Scores = {}  # arrays (tokens,) of the text, without BASELINE
        self.questions: Sequence[recall.Questions] = ()
        self.baseline_quality: Record = {}

    def prepare_recall(self, context: int) -> None:
        """Make questions about up to `context` tokens of the text and of generated text of the
        base model.

        Raises RefusedError.
        """
        recall.check_recall(self._baseline, context)
        tokenizer = self._baseline.tokenizer
        prefix = prefix_token(tokenizer)

        length = min(recall.SAMPLE, context)
        samples = recall.self_samples(
            self._baseline, length, self._options.device, self._vocabulary
        )
        self._prompts = [sample[: recall.OPENING].tolist() for sample in samples[: recall.PROMPTS]]

        passages = {"generated": _without_special_tokens(samples, tokenizer)}
        if self._text:
            scored = [window.ids[-window.scored :] for window in self._text.windows]
            # Text comes first: its tokens also surround passkeys.
            passages = {"text": _without_special_tokens(scored, tokenizer), **passages}
        self.questions = recall.make_questions(
            passages, tokenizer, self._vocabulary, context, prefix
        )

    def measure(self, subject: Subject, record: Record, alone: bool = False) -> Record:
        """Add the measurements of a model to its record; first recall, which not every model
        allows.

        alone: Score the base model at once, also with --kl.
        """
        model = subject.load(self._options.precision, self._options.device)
        head = ChunkedHead(model)
        record |= numerics(model)
        if self.questions:
            record |= self._measure_recall(subject, head)

        if subject is not self._baseline:
            if self._text:
                record |= self._measure_quality(subject, head, self._text)
            return record

        if self._text and (alone or not self._options.kl):
            scores = self._score(subject, head, self._text.windows, "perplexity", arrays_read())
            self._keep_baseline(scores, self._text)
            record["quality"] = self.baseline_quality
        if self._options.kl:
            self._baseline_head = head
        return record

    def _measure_quality(self, subject: Subject, head: ChunkedHead, text: Text) -> Record:
        """Metrics of a converted model, and those that compare it with the base model."""
        scores = self._score(
            subject, head, text.windows, "perplexity", arrays_read(), self._baseline_head
        )
        if not self._baseline_scores:
            of_baseline = {
                name.removeprefix(BASELINE): array
                for name, array in scores.items()
                if name.startswith(BASELINE)
            }
            self._keep_baseline(of_baseline, text)

        scores |= {BASELINE + name: array for name, array in self._baseline_scores.items()}
        return {
            "quality": measure_text(scores, text, compares=False),
            "against_baseline": measure_text(scores, text, compares=True),
        }

    def _keep_baseline(self, scores: Scores, text: Text) -> None:
        """Keep the base model's arrays (tokens,), with which the others are compared."""
        self._baseline_scores = scores
        self.baseline_quality = measure_text(scores, text, compares=False)

    def _measure_recall(self, subject: Subject, head: ChunkedHead) -> Record:
        """Recall, and agreement with the base model's greedy texts."""
        if subject is self._baseline:
            self._texts = recall.greedy_texts(
                head.model, self._prompts, vocabulary=self._vocabulary
            )
            samples = self._texts[:SHOWN]
        else:
            openings = [window.ids[: -window.scored] for window in self._texts[:SHOWN]]
            samples = recall.greedy_texts(head.model, openings)

        windows = list[Window]()
        for question in self.questions:
            windows += question.windows
        scores = self._score(subject, head, [*windows, *self._texts], "recall", ["hits"])
        answered = sum(window.scored for window in windows)
        return {
            "recall": recall.summarize(self.questions, scores["hits"][:answered]),
            "greedy": recall.agreement(scores["hits"][answered:], self._texts),
            "samples": recall.decode_windows(self._baseline.tokenizer, samples),
        }

    def _score(
        self,
        subject: Subject,
        head: ChunkedHead,
        windows: Sequence[Window],
        measure: str,
        arrays: Collection[str],
        baseline: ChunkedHead | None = None,
    ) -> Scores:
        """`score`, with a progress bar that names the model and the measure."""
        state = ranks()
        tokens_of_rank = sum(window.scored for window in windows) // state.num_processes
        with Watcher(self._options.quiet or not state.is_main_process) as watcher:
            watcher.stage(f"{subject.name}, {measure}", tokens_of_rank)
            return score(
                head,
                windows,
                batch_size=self._options.batch_size,
                arrays=arrays,
                baseline=baseline,
                progress=watcher.update,
            )


def _without_special_tokens(texts: Sequence[Sequence[int]], tokenizer: Any) -> NDArray[Any]:
    """Token ids of all texts, one after the other, without special tokens."""
    ids = np.concatenate(texts)
    plain: NDArray[Any] = ids[~np.isin(ids, tokenizer.all_special_ids)]
    return plain


def environment(device: str) -> dict[str, Any]:
    """Time, versions and hardware of the measurements."""
    names = ("gqa", "torch", "transformers", "accelerate", "datasets", "numpy")
    hardware = platform.machine()
    if device.startswith("cuda"):
        hardware = torch.cuda.get_device_name(device)
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*names)},
        "device": hardware,
        "threads": torch.get_num_threads(),
        "ranks": ranks().num_processes,
    }
