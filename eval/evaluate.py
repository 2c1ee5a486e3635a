"""Measure checkpoints against the first, the baseline: for `gqa-eval` and for the cells of
`gqa-ablate`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import transformers

from gqa.checkpoint.provenance import request, versions
from gqa.core.console import Watcher
from gqa.core.devices import on_main, ranks
from gqa.corpus.likelihood import Floats, kl_statistics, paired_ratio
from gqa.eval import recall
from gqa.eval.decode import decode_contexts, time_decoding
from gqa.eval.options import EvaluateOptions
from gqa.eval.scoring import Scores, Window, score
from gqa.eval.subjects import Subject, input_device, numerics, open_subjects
from gqa.eval.text import (
    Text,
    check_models_agree,
    choose_context,
    perplexity,
    prefix_token,
    read_text,
)
from gqa.models.chunked_head import ChunkedHead
from gqa.models.loading import check_predicts_tokens

SCHEMA = 4
SHOWN = 4  # greedy texts of each model in a report
Record = dict[str, Any]


def measure(options: EvaluateOptions, argv: Sequence[str]) -> Record:
    """Run every measurement of `options`; a JSON-ready record on rank 0, empty on the other ranks.

    Refusals that need no model come first, then decoding, which needs the most memory: so no
    measurement is lost.
    """
    transformers.utils.logging.set_verbosity_error()
    state, device = ranks(), input_device(options.device)
    subjects = open_subjects(
        options.models, options.trust_remote_code, options.revision, options.cache_bits or ()
    )
    context = choose_context(subjects, options.context)
    records = [subject.record(context, options.memory) for subject in subjects]
    measures_recall = options.recall or (
        options.measures_recall and not subjects[0].config.is_encoder_decoder
    )
    # Recorded with what was chosen where an option was left open.
    used = replace(
        options, context=context, recall=measures_recall, device=options.device or device
    )
    results: Record = {
        **request(used, argv),
        "argv": [*argv],
        **environment(device),
        "models": records,
    }
    if options.data or options.decode or measures_recall:
        for subject in subjects:
            check_predicts_tokens(subject.config, subject.name, subject.trust_remote_code)
    if measures_recall:
        check_models_agree(subjects, "text")
        recall.check_recall(subjects[0], context)
        results["recall"] = {"context": context}
    contexts = (
        decode_contexts(subjects, options.decode_contexts, options.decode_steps)
        if options.decode
        else ()
    )
    if contexts:
        results["options"]["decode_contexts"] = [*contexts]
    if options.memory:
        results["memory"] = {"bytes": options.memory, "context": context}
    text = read_text(subjects, options, context) if options.data else None
    if text:
        results["text"] = {"data": ", ".join(options.data or ()), **text.record()}
    if options.decode:
        on_main(lambda: time_decoding(subjects, records, options, contexts))  # is not split
    vocabulary = min(subject.vocabulary for subject in subjects)
    comparison = Comparison(subjects[0], text, options, vocabulary)
    if measures_recall:
        comparison.prepare_recall(context)
    for subject, record in zip(subjects, records, strict=True) if text or measures_recall else ():
        comparison.measure(subject, record)
    if text and comparison.nats is not None:
        records[0]["quality"] = perplexity(comparison.nats, text)
    return results if state.is_main_process else {}


class Comparison:
    """Measures models one after the other, each loaded once: the base model first, then the models
    compared with it.

    questions: about the context, if recall is measured; baseline_head: the base model, if it stays
    in memory; nats: of the base model on the text, (tokens,).
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
        self._vocabulary = baseline.vocabulary if vocabulary is None else vocabulary
        self.questions: Sequence[recall.Questions] = ()
        self._baseline, self._text, self._options = baseline, text, options
        self.baseline_head: ChunkedHead | None = None  # with --kl
        self.nats: Floats | None = None
        self._texts: Sequence[Window] = ()  # greedy texts of the base model

    def prepare_recall(self, context: int) -> None:
        """Make questions about up to `context` tokens of the text and of self-generated text of the
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
        windows = self._text.windows if self._text else ()
        streams = {"text": [window.ids[-window.scored :] for window in windows], "samples": samples}
        plain = {kind: np.concatenate(parts) for kind, parts in streams.items() if len(parts)}
        plain = {kind: ids[~np.isin(ids, tokenizer.all_special_ids)] for kind, ids in plain.items()}
        self.questions = recall.make_questions(plain, tokenizer, self._vocabulary, context, prefix)

    def measure(self, subject: Subject, record: Record, alone: bool = False) -> Record:
        """Add the measurements of a model to its record; first recall, which not every model
        allows. With `options.kl` the base model is scored in lockstep with the second model, unless
        it is measured `alone`.
        """
        is_baseline = subject is self._baseline
        model = subject.load(self._options.precision, self._options.device)
        head = ChunkedHead(model)
        record |= numerics(model)
        if self.questions:
            record |= self._measure_recall(subject, head)
        if self._text and (alone or not (is_baseline and self._options.kl)):
            record |= self._measure_quality(subject, head, self._text)
        if is_baseline and self._options.kl:
            self.baseline_head = head
        return record

    def _measure_quality(self, subject: Subject, head: ChunkedHead, text: Text) -> Record:
        """Perplexity; of a converted model also its comparison with the base model."""
        scores = self._score(subject, head, text.windows, baseline=self.baseline_head)
        quality = {"quality": perplexity(scores["nats"], text)}
        if subject is self._baseline:
            self.nats = scores["nats"]
            return quality
        if self.nats is None:
            self.nats = scores["baseline_nats"]
        compared: Record = paired_ratio(scores["nats"], self.nats, text.clusters)
        if "kl" in scores:
            compared |= kl_statistics(scores["kl"], scores["same_top"], scores["acceptance"])
        return quality | {"against_baseline": compared}

    def _measure_recall(self, subject: Subject, head: ChunkedHead) -> Record:
        """Recall, and agreement with the base model's greedy texts."""
        if subject is self._baseline:
            self._texts = recall.greedy_texts(
                head.model, self._prompts, vocabulary=self._vocabulary
            )
            samples = self._texts[:SHOWN]
        else:
            samples = recall.greedy_texts(
                head.model, [window.ids[: -window.scored] for window in self._texts[:SHOWN]]
            )
        windows = [
            *(window for question in self.questions for window in question.windows),
            *self._texts,
        ]
        scores = self._score(subject, head, windows)
        return {
            "recall": recall.summarize(self.questions, scores),
            "greedy": recall.agreement(
                scores["hits"][-sum(window.scored for window in self._texts) :], self._texts
            ),
            "samples": recall.decode_windows(self._baseline.tokenizer, samples),
        }

    def _score(
        self, subject: Subject, head: ChunkedHead, windows: Sequence[Window], **baseline: Any
    ) -> Scores:
        options, state = self._options, ranks()
        tokens = sum(window.scored for window in windows) // state.num_processes
        with Watcher(options.quiet or not state.is_main_process) as watcher:
            watcher.stage(subject.name, tokens)
            return score(
                head, windows, batch_size=options.batch_size, progress=watcher.update, **baseline
            )


def environment(device: str) -> dict[str, Any]:
    """Time, versions and hardware of the measurements."""
    names = ("gqa", "torch", "transformers", "accelerate", "datasets", "numpy")
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*names)},
        "device": torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else platform.machine(),
        "threads": torch.get_num_threads(),
        "ranks": ranks().num_processes,
    }
