"""Measure checkpoints against the first, the baseline: for `gqa-eval` and for the cells of `gqa-ablate`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gqa.checkpoint.console import progress_bar, say_device
from gqa.checkpoint.devices import find_device, out_of_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model, ranks
from gqa.checkpoint.provenance import request, versions
from gqa.convert.merge.cache_bits import layers_with_cache, quantise_cache, quantised_attention
from gqa.convert.merge.self_samples import derive_seed, sampled_blocks
from gqa.corpus.likelihood import ChunkedHead
from gqa.corpus.windows import Window
from gqa.eval.decode import decode_contexts, measure_decode
from gqa.eval.greedy import PROMPTS, agreement, as_text, continued, prompts, sources_of, write
from gqa.eval.options import EvaluateOptions
from gqa.eval.recall import DISTANCES, Questions, make_questions, recall
from gqa.eval.scoring import Scores, score
from gqa.eval.statistics import kl_statistics, paired_ratio
from gqa.eval.subjects import Subject, fit, open_subjects
from gqa.eval.text import Text, choose_context, perplexity, read_text

SCHEMA = 2
SAMPLE, SAMPLES = 256, 64  # tokens of a self-generated text, and number of texts
SHOWN = 4  # greedy texts of each model in a report
Nats = NDArray[np.float32]


def measure(names: Sequence[str], options: EvaluateOptions, argv: Sequence[str]) -> dict[str, Any]:
    """Run every measurement of `options`; a JSON-ready record on rank 0, empty on the other ranks.

    Refusals that need no model come first. If recall, greedy texts or decoding cannot be measured and something else
    can, results[part]["refused"] is the reason.
    """
    transformers.utils.logging.set_verbosity_error()
    device = run_device(options)
    say_device(device, options.quiet or not ranks().is_main_process)
    subjects = with_bits(open_subjects(names, options.trust_remote_code, options.revision), options.cache_bits or ())
    for subject in subjects if options.data or options.decode else ():
        subject.check_predicts_tokens()
    results: dict[str, Any] = {
        **request(options, argv),
        **environment(device),
        "models": [subject.record for subject in subjects],
    }
    recall_context = find_recall_context(subjects, options)
    contexts = decode_contexts(subjects, options.decode_contexts, options.decode_steps) if options.decode else ()
    if options.memory:
        context = choose_context(subjects, options.context)
        results["memory"] = fit(subjects, options.memory, options.tensor_parallel, context, options.precision)
    text = read_text(subjects, options) if options.data else None
    if text:
        results["text"] = {"data": options.data, **text.record()}
    comparison = Comparison(subjects, text, recall_context, options, bool(options.kl or options.output))
    if text or recall_context:
        with quantised_attention(options.cache_bits or ()):
            measure_models(subjects, comparison)
    if recall_context:
        results["recall"] = {"context": recall_context}
    for part, reason in comparison.refused.items():
        results.setdefault(part, {})["refused"] = reason
    if not ranks().is_main_process:  # decoding is not split
        return {}
    if options.decode:
        try:
            time_decoding(subjects, options, contexts)
        except RefusedError as error:
            if not (text or options.memory or (recall_context and "recall" not in comparison.refused)):
                raise
            results["decode"] = {"refused": str(error)}
    return results


def measure_models(subjects: Sequence[Subject], comparison: Comparison) -> None:
    """Add the parts of `comparison` to each record; a part that is refused for one model is left out of all."""
    results = [comparison.measure(subject) for subject in subjects]
    if comparison.text:
        results[0]["quality"] = comparison.baseline_quality()
    for subject, parts in zip(subjects, results, strict=True):
        for part, values in parts.items():
            if part not in comparison.refused:
                subject.record.update(values)


class Comparison:
    """Measures models one after the other, each loaded once: the base model first, then the models compared with it.

    refused: why a part (`written`, `recall`) could not be measured.

    Args:
        text: Its tokens are scored.
        context: Tokens of a recall window; None to leave recall out.
        writes: Encoder-decoders write texts for sources.
    """

    def __init__(
        self, subjects: Sequence[Subject], text: Text | None, context: int | None, options: EvaluateOptions,
        writes: bool = False,
    ) -> None:  # fmt: skip
        self.text, self.refused = text, dict[str, str]()
        self.first_copy_accuracy: float | None = None  # accuracy of the base model on first copies of text
        self._baseline, self._context, self._options = subjects[0], context, options
        self._has_pairs = bool(writes and text and text.protocol == "pairs")
        self._baseline_head: ChunkedHead | None = None  # the base model, kept loaded with --kl
        self._nats: Nats | None = None  # of the base model on the text
        self._texts: Sequence[Window] = ()  # greedy texts of the base model
        self._questions: Sequence[Questions] = ()

    def measure(self, subject: Subject, alone: bool = False) -> dict[str, dict[str, Any]]:
        """Parts of a model's record by name: `quality`, `written`, `recall`. With `options.kl` the base model is scored
        in lockstep with the second model (`baseline_quality`), unless it is measured `alone`.

        Raises RefusedError if quality cannot be measured, or recall if nothing else is.
        """
        is_baseline, options, parts = subject is self._baseline, self._options, dict[str, dict[str, Any]]()
        if is_baseline and self._context:
            self._attempt("recall", self._prepare_questions)
        if not self.text and "recall" in self.refused:
            return {}
        head = _head(subject, options)
        if self.text and (alone or not (is_baseline and options.kl)):
            parts["quality"] = self._measure_quality(subject, head, self.text)
        optional = (("written", self._has_pairs, self._measure_greedy), ("recall", self._context, self._measure_recall))
        for part, enabled, function in optional:
            if enabled and (values := self._attempt(part, function, subject, head)) is not None:
                parts[part] = values
        if alone and "recall" in parts:
            self.first_copy_accuracy = first_copy_accuracy(head, self._questions, options.batch_size)
        if is_baseline and options.kl:
            self._baseline_head = head
        return parts

    def _attempt(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run one optional measurement; store a refusal, or raise it if nothing else is measured."""
        if part in self.refused:
            return None
        try:
            return function(*args)
        except RefusedError as error:
            if part == "recall" and self._options.recall and not (self.text or self._options.memory):
                raise
            self.refused[part] = str(error)
            return None

    def _measure_quality(self, subject: Subject, head: ChunkedHead, text: Text) -> dict[str, Any]:
        scores = _score(subject, head, text, self._options, baseline=self._baseline_head)
        if subject is self._baseline:
            self._nats = scores.nats
            return self.baseline_quality()
        if self._nats is None and self._baseline_head and scores.baseline_nats is not None:
            self._nats = scores.baseline_nats
            if not np.isfinite(self._nats).all():
                _score(self._baseline, self._baseline_head, text, self._options)  # refuses, and says where
        assert self._nats is not None
        return compare_quality(scores, text, self._nats)

    @property
    def live(self) -> PreTrainedModel | None:
        """The base model, if it stays in memory."""
        return self._baseline_head.model if self._baseline_head else None

    def baseline_quality(self) -> dict[str, Any]:
        """The base model's perplexity on the text."""
        assert self.text is not None
        assert self._nats is not None
        return {"quality": perplexity(self._nats, self.text)}

    def _measure_greedy(self, subject: Subject, head: ChunkedHead) -> dict[str, Any]:
        """Agreement of an encoder-decoder with the greedy texts that the base model writes for the sources."""
        assert self.text is not None
        size, pairs = self._options.batch_size, sources_of(self.text.windows)
        with _explain_memory(subject.name, self._options, "greedy texts", "give a smaller --batch-size or --context"):
            texts = write(head.model, pairs if subject is self._baseline else pairs[:SHOWN], size)
            self._texts = self._texts or texts
            hits = score(head, self._texts, batch_size=size).hits
        return {"greedy": agreement(hits, self._texts), "samples": as_text(subject.tokenizer, texts[:SHOWN])}

    def _prepare_questions(self) -> None:
        """Make questions about up to `context` tokens of the text and of self-generated text of the base model."""
        first, options, context = self._baseline, self._options, self._context or 0
        check_recall([first], context)
        tokenizer, windows = first.tokenizer, self.text.windows if self.text else ()
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise RefusedError(f"the tokenizer of {first.name} has neither BOS nor EOS to start with; give --no-recall")
        samples = _samples(first, min(SAMPLE, context), options)
        self._prompts = prompts(tokenizer, samples[: len(PROMPTS)])
        streams = {"text": [window.ids[-window.scored :] for window in windows], "samples": samples}
        plain = {kind: np.concatenate(parts) for kind, parts in streams.items() if len(parts)}
        plain = {kind: ids[~np.isin(ids, tokenizer.all_special_ids)] for kind, ids in plain.items()}
        self._questions = make_questions(plain, tokenizer, first.vocabulary, context, prefix)

    def _measure_recall(self, subject: Subject, head: ChunkedHead) -> dict[str, Any]:
        """Recall, and agreement with the base model's greedy texts."""
        is_baseline, options, questions = subject is self._baseline, self._options, self._questions
        if is_baseline:
            with _explain_memory(subject.name, options, "greedy texts", "give --no-recall"):
                self._texts = continued(head.model, self._prompts)
        windows = [*(window for one in questions for window in one.windows), *self._texts]
        size = f"a batch of {options.batch_size} sequences of {self._context:,} tokens"
        share = sum(window.scored for window in windows) // ranks().num_processes
        with (
            _explain_memory(subject.name, options, size, "give a smaller --batch-size or --context, or --no-recall"),
            _bar(share, "tok", f"{subject.name}, recall", options) as bar,
        ):
            scores = score(head, windows, batch_size=options.batch_size, progress=bar.update)
            samples = self._texts[:SHOWN]
            if not is_baseline:
                samples = continued(head.model, [window.ids[: -window.scored] for window in samples])
            return {
                "recall": recall(questions, scores),
                "greedy": agreement(scores.hits[-sum(window.scored for window in self._texts) :], self._texts),
                "samples": as_text(self._baseline.tokenizer, samples),
            }


def first_copy_accuracy(head: ChunkedHead, questions: Sequence[Questions], batch_size: int) -> float | None:
    """Top-1 accuracy on the tokens of second copies of text without the first copy before them; None without text."""
    copies = [window for question in questions if question.kind == "text" for window in question.windows]
    firsts = [Window(copy.ids[: copy.scored + 2], copy.scored) for copy in copies]
    return float(score(head, firsts, batch_size=batch_size).hits.mean()) if firsts else None


def with_bits(subjects: list[Subject], bits: Sequence[int]) -> list[Subject]:
    """`subjects`, and each once more per cache width of `bits`. Raises RefusedError for unsupported caches."""
    for subject in subjects if bits else ():
        layers_with_cache(subject.checkpoint)  # refuses
    return [*subjects, *(subject.quantised(width) for width in bits for subject in subjects)]


def find_recall_context(subjects: Sequence[Subject], options: EvaluateOptions) -> int | None:
    """Tokens of a recall window; None without recall: it is off, or only the report's default and not possible."""
    if not options.measures_recall:
        return None
    context = choose_context(subjects, options.context)
    try:
        check_recall(subjects, context)
    except RefusedError as error:
        if options.recall:
            raise
        if options.context and not (options.data or options.memory):
            raise RefusedError(
                f"--context {options.context} means nothing without --data or --memory: {error}"
            ) from error
        return None
    return context


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
    advice = "choose another --precision, --device auto or fewer checkpoints to --decode"
    with _explain_memory(subject.name, options, "its weights", advice):
        model = load_model(
            subject.path, dtype=options.precision, device="auto" if options.device == "auto" else run_device(options),
            attention=options.attn_implementation, trust_remote_code=subject.trust_remote_code,
        )  # fmt: skip
        if subject.cache_bits:
            quantise_cache(model, subject.cache_bits, layers_with_cache(subject.checkpoint), subject.name)
        return model


@contextmanager
def _explain_memory(name: str, options: EvaluateOptions, size: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into a RefusedError; `size` is what does not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise RefusedError(
                f"{name}: the memory of {run_device(options)} is too small for {size}; {advice}"
            ) from error
        raise


def _head(subject: Subject, options: EvaluateOptions) -> ChunkedHead:
    model = load(subject, options)
    subject.record.update(
        {"dtype": str(model.dtype).removeprefix("torch."), "attention": model.config._attn_implementation}
    )
    return ChunkedHead(model)


def _score(subject: Subject, head: ChunkedHead, text: Text, options: EvaluateOptions, **arguments: Any) -> Scores:
    size = f"a batch of {options.batch_size} windows of {text.context:,} tokens"
    with (
        _explain_memory(subject.name, options, size, "give a smaller --batch-size or --context"),
        _bar(text.tokens // ranks().num_processes, "tok", subject.name, options) as bar,
    ):
        return score(head, text.windows, batch_size=options.batch_size, progress=bar.update, **arguments)


def _bar(total: int, unit: str, name: str, options: EvaluateOptions) -> Any:
    return progress_bar(total, unit, name, options.quiet or not ranks().is_main_process)


def compare_quality(scores: Scores, text: Text, baseline: Nats) -> dict[str, Any]:
    """Perplexity, and the comparison with the baseline's nats, JSON-ready."""
    nats = scores.nats
    compared: dict[str, Any] = paired_ratio(nats, baseline, text.clusters)
    if scores.kl is not None and scores.same_top is not None and scores.acceptance is not None:
        compared |= kl_statistics(scores.kl, scores.same_top, scores.acceptance)
    return {"quality": perplexity(nats, text), "against_baseline": compared}


def time_decoding(subjects: Sequence[Subject], options: EvaluateOptions, contexts: Sequence[int]) -> None:
    """Add decode timing after prompts of `contexts` to each record. All models are in memory at once: their runs are
    interleaved.
    """
    models = {subject.name: load(subject, options) for subject in subjects}
    batches, steps, repeats = options.decode_batches, options.decode_steps, options.decode_repeats
    size = f"batches of {max(batches)} sequences of {max(contexts):,} tokens"
    advice = "give smaller --decode-batches or --decode-contexts, or fewer checkpoints"
    with (
        _explain_memory(", ".join(models), options, size, advice),
        _bar(len(models) * len(batches) * len(contexts) * repeats, "run", "decoding", options) as bar,
    ):
        points = measure_decode(models, batches, contexts, steps, repeats, bar.update)
    for subject in subjects:
        subject.record["decode"] = {"steps": steps, "repeats": repeats, "points": points[subject.name]}


def check_recall(subjects: Sequence[Subject], context: int) -> None:
    """Raise RefusedError if recall cannot be measured in windows of `context` tokens."""
    first, least = subjects[0], 2 * DISTANCES[0]
    for subject in subjects:
        subject.check_predicts_tokens()
    if first.config.is_encoder_decoder:
        raise RefusedError(f"--recall is for decoders, and {first.name} is an encoder-decoder")
    if context < least:
        raise RefusedError(f"--recall needs a context of at least {least} tokens, and --context is {context}")


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
