"""Measure checkpoints against the first, the baseline: for `gqa-eval` and for the cells of `gqa-ablate`."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from gqa.checkpoint.compat import attention_name
from gqa.checkpoint.console import progress_bar, say_device
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import find_device, load_model, out_of_memory, ranks
from gqa.checkpoint.provenance import request, versions
from gqa.convert.merge.self_samples import derive_seed, sampled_blocks
from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.cache_bits import layers_with_cache, quantise_cache
from gqa.eval.decode import REPEATS, decode_contexts, measure_decode
from gqa.eval.greedy import PROMPTS, agreement, as_text, continued, prompts
from gqa.eval.memory import fit
from gqa.eval.options import EvaluateOptions
from gqa.eval.recall import DISTANCES, Questions, make_questions, recall
from gqa.eval.scoring import Scores, Window, score
from gqa.eval.statistics import Floats, kl_statistics, paired_ratio
from gqa.eval.subjects import Subject, open_subjects, with_bits
from gqa.eval.text import Text, choose_context, perplexity, read_text

SCHEMA = 2
SAMPLE, SAMPLES = 256, 64  # tokens of a self-generated text, and number of texts
SHOWN = 4  # greedy texts of each model in a report
Record = dict[str, Any]


def measure(options: EvaluateOptions, argv: Sequence[str]) -> Record:
    """Run every measurement of `options`; a JSON-ready record on rank 0, empty on the other ranks.

    Refusals that need no model come first. If recall, greedy texts or decoding cannot be measured and something else
    can, results[part]["refused"] is the reason.
    """
    transformers.utils.logging.set_verbosity_error()
    device = run_device(options)
    say_device(device, options.quiet or not ranks().is_main_process)
    subjects = with_bits(open_subjects(options.models, options.trust_remote_code, options.revision), options.cache_bits)
    for subject in subjects if options.data or options.decode else ():
        subject.check_predicts_tokens()
    records = [subject.record() for subject in subjects]
    results: Record = {**request(options, argv), **environment(device), "models": records}
    contexts = decode_contexts(subjects, options.decode_contexts, options.decode_steps) if options.decode else ()
    asks_recall = options.recall or (options.measures_recall and not subjects[0].config.is_encoder_decoder)
    context = choose_context(subjects, options.context) if asks_recall or options.memory else 0
    if options.recall:
        check_recall(subjects, context)
    if options.memory:
        results["memory"] = fit(subjects, records, options, context)
    text = read_text(subjects, options) if options.data else None
    comparison = Comparison(subjects[0], text, options)
    if text:
        results["text"] = {"data": options.data, **text.record()}
    if asks_recall:
        results["recall"] = {"context": context}
        comparison.prepare_recall(subjects, context)
    if text or comparison.questions:
        comparison.measure_all(subjects, records)
    if not ranks().is_main_process:  # decoding is not split
        return {}
    if options.decode:
        with comparison.optional("decode"):
            time_decoding(subjects, records, options, contexts)
    measured = {key for record in records for key in record} & {"quality", "recall", "decode"}
    if comparison.refused and not (measured or options.memory):
        raise RefusedError("; ".join(comparison.refused.values()))
    for part, reason in comparison.refused.items():
        results.setdefault(part, {})["refused"] = reason
    return results


class Comparison:
    """Measures models one after the other, each loaded once: the base model first, then the models compared with it.

    refused: why a part (`recall`, `decode`) could not be measured.
    questions: about the context, if recall is measured.
    """

    def __init__(self, baseline: Subject, text: Text | None, options: EvaluateOptions) -> None:
        self.refused = dict[str, str]()
        self.questions: Sequence[Questions] = ()
        self._baseline, self._text, self._options = baseline, text, options
        self._baseline_head: ChunkedHead | None = None  # the base model, kept loaded with --kl
        self._nats: Floats | None = None  # of the base model on the text, (tokens,)
        self._texts: Sequence[Window] = ()  # greedy texts of the base model

    @property
    def live(self) -> PreTrainedModel | None:
        """The base model, if it stays in memory."""
        return self._baseline_head.model if self._baseline_head else None

    @contextmanager
    def optional(self, part: str) -> Iterator[None]:
        """Store a refusal of the block in `refused` instead of raising it."""
        try:
            yield
        except RefusedError as error:
            self.refused[part] = str(error)

    def prepare_recall(self, subjects: Sequence[Subject], context: int) -> None:
        """Make questions about up to `context` tokens of the text and of self-generated text of the base model."""
        with self.optional("recall"):
            check_recall(subjects, context)
            first, tokenizer = self._baseline, self._baseline.tokenizer
            prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            if prefix is None:
                raise RefusedError(f"the tokenizer of {first.name} has neither BOS nor EOS to start with")
            samples = _samples(first, min(SAMPLE, context), self._options)
            self._prompts = prompts(tokenizer, samples[: len(PROMPTS)])
            windows = self._text.windows if self._text else ()
            streams = {"text": [window.ids[-window.scored :] for window in windows], "samples": samples}
            plain = {kind: np.concatenate(parts) for kind, parts in streams.items() if len(parts)}
            plain = {kind: ids[~np.isin(ids, tokenizer.all_special_ids)] for kind, ids in plain.items()}
            self.questions = make_questions(plain, tokenizer, first.vocabulary, context, prefix)

    def measure_all(self, subjects: Sequence[Subject], records: Sequence[Record]) -> None:
        """Add the measurements of each model to its record, without a part that is refused for one of them.

        Raises RefusedError if quality cannot be measured.
        """
        for subject, record in zip(subjects, records, strict=True):
            record |= self.measure(subject)
        if self._text and self._nats is not None:
            records[0]["quality"] = perplexity(self._nats, self._text)
        for record in records if self.refused else ():
            for key in ("recall", "greedy", "samples"):
                record.pop(key, None)

    def measure(self, subject: Subject, alone: bool = False) -> Record:
        """Measurements of a model by their keys in its record; a refusal of recall is stored in `refused`. With
        `options.kl` the base model stays loaded: its quality comes from the models that are scored beside it, or is
        measured here if it is measured `alone`.

        Raises RefusedError if quality cannot be measured.
        """
        is_baseline = subject is self._baseline
        model = load(subject, self._options)
        head = ChunkedHead(model)
        record: Record = {
            "dtype": str(model.dtype).removeprefix("torch."), "attention": attention_name(model)
        }  # fmt: skip
        if self._text and (alone or not (is_baseline and self._options.kl)):
            record |= self._measure_quality(subject, head, self._text)
        if self.questions and "recall" not in self.refused:
            with self.optional("recall"):
                record |= self._measure_recall(subject, head)
        if is_baseline and self._options.kl:
            self._baseline_head = head
        return record

    def _measure_quality(self, subject: Subject, head: ChunkedHead, text: Text) -> Record:
        """Perplexity; of a converted model also its comparison with the base model."""
        scores = self._score(subject, head, text.windows, baseline=self._baseline_head)
        quality = {"quality": perplexity(scores.nats, text)}
        if subject is self._baseline:
            self._nats = scores.nats
            return quality
        if self._nats is None:
            self._nats = scores.baseline_nats
        assert self._nats is not None
        compared: Record = paired_ratio(scores.nats, self._nats, text.clusters)
        if scores.kl is not None and scores.same_top is not None and scores.acceptance is not None:
            compared |= kl_statistics(scores.kl, scores.same_top, scores.acceptance)
        return quality | {"against_baseline": compared}

    def _measure_recall(self, subject: Subject, head: ChunkedHead) -> Record:
        """Recall, and agreement with the base model's greedy texts."""
        is_baseline = subject is self._baseline
        with explain_memory(subject.name, self._options, "greedy texts"):
            if is_baseline:
                self._texts = continued(head.model, self._prompts)
            samples = self._texts[:SHOWN]
            if not is_baseline:
                samples = continued(head.model, [window.ids[: -window.scored] for window in samples])
        windows = [*(window for question in self.questions for window in question.windows), *self._texts]
        scores = self._score(subject, head, windows)
        return {
            "recall": recall(self.questions, scores),
            "greedy": agreement(scores.hits[-sum(window.scored for window in self._texts) :], self._texts),
            "samples": as_text(self._baseline.tokenizer, samples),
        }

    def _score(self, subject: Subject, head: ChunkedHead, windows: Sequence[Window], **baseline: Any) -> Scores:
        options = self._options
        tokens = sum(window.scored for window in windows) // ranks().num_processes
        longest = max(len(window.ids) for window in windows) - 1
        with (
            explain_memory(subject.name, options, f"a batch of {options.batch_size} windows of {longest:,} tokens"),
            _bar(tokens, "tok", subject.name, options) as bar,
        ):
            return score(head, windows, batch_size=options.batch_size, progress=bar.update, **baseline)


def check_recall(subjects: Sequence[Subject], context: int) -> None:
    """Raise RefusedError if recall cannot be measured in windows of `context` tokens."""
    first, least = subjects[0], 2 * DISTANCES[0]
    for subject in subjects:
        subject.check_predicts_tokens()
    if first.config.is_encoder_decoder:
        raise RefusedError(f"--recall is for decoders, and {first.name} is an encoder-decoder")
    if context < least:
        raise RefusedError(f"--recall needs a context of at least {least} tokens, and --context is {context}")


def usable_device(name: str | None) -> str:
    """`name`, or without one this rank's device. Raises RefusedError if it cannot be used."""
    default = ranks().device
    return str(default) if name is None or name == default.type else find_device(name)


def run_device(options: EvaluateOptions) -> str:
    """Device of the inputs. Raises RefusedError if it cannot be used, or if several processes would each use all."""
    if options.device == "auto" and (processes := ranks().num_processes) > 1:
        raise RefusedError(f"--device auto is for one process, and there are {processes}; start it without a launcher")
    return usable_device(None if options.device == "auto" else options.device)


def load(subject: Subject, options: EvaluateOptions) -> PreTrainedModel:
    """The model, with a quantised cache if the subject has one. Raises RefusedError."""
    advice = "choose another --precision, --device auto or fewer checkpoints to --decode"
    with explain_memory(subject.name, options, "its weights", advice):
        model = load_model(
            subject.path, dtype=options.precision, device="auto" if options.device == "auto" else run_device(options),
            trust_remote_code=subject.trust_remote_code,
        )  # fmt: skip
        if subject.cache_bits:
            quantise_cache(model, subject.cache_bits, layers_with_cache(subject.checkpoint), subject.name)
        return model


@contextmanager
def explain_memory(
    name: str, options: EvaluateOptions, size: str, advice: str = "give a smaller --batch-size or --context"
) -> Iterator[None]:
    """Turn an out-of-memory error into a RefusedError; `size` is what does not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise RefusedError(
                f"{name}: the memory of {run_device(options)} is too small for {size}; {advice}"
            ) from error
        raise


def _bar(total: int, unit: str, name: str, options: EvaluateOptions) -> Any:
    return progress_bar(total, unit, name, options.quiet or not ranks().is_main_process)


def time_decoding(
    subjects: Sequence[Subject], records: Sequence[Record], options: EvaluateOptions, contexts: Sequence[int]
) -> None:
    """Add decode timing after prompts of `contexts` to each record. All models are in memory at once: their runs are
    interleaved.
    """
    models = {subject.name: load(subject, options) for subject in subjects}
    batches, steps, repeats = options.decode_batches, options.decode_steps, REPEATS
    size = f"batches of {max(batches)} sequences of {max(contexts):,} tokens"
    advice = "give smaller --decode-batches or --decode-contexts, or fewer checkpoints"
    with (
        explain_memory(", ".join(models), options, size, advice),
        _bar(len(models) * len(batches) * len(contexts) * repeats, "run", "decoding", options) as bar,
    ):
        points = measure_decode(models, batches, contexts, steps, repeats, bar.update)
    for record, model_points in zip(records, points.values(), strict=True):
        record["decode"] = {"steps": steps, "repeats": repeats, "points": model_points}


def _samples(subject: Subject, length: int, options: EvaluateOptions) -> list[Any]:
    """Self-generated blocks; the seed differs from those of calibration and training."""

    def load_as(dtype: Any, device: str | None = options.device) -> PreTrainedModel:
        return load(subject, replace(options, precision=dtype, device=device))

    blocks = sampled_blocks(
        load_as, run_device(options), subject.checkpoint, length, SAMPLES, derive_seed(0, "evaluation"), plain=True,
        trust_remote_code=subject.trust_remote_code,
    )  # fmt: skip
    return [blocks[index]["input_ids"] for index in range(len(blocks))]


def environment(device: str) -> dict[str, Any]:
    """Time, versions and hardware of the measurements."""
    names = ("gqa", "torch", "transformers", "accelerate", "datasets", "numpy")
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*names)},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "ranks": ranks().num_processes,
    }
