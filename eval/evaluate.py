"""Compare checkpoints: the first is the baseline. What `gqa-eval` runs and the ablation grid calls."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gqa.checkpoint.console import progress_bar, say_device
from gqa.checkpoint.devices import find_device, out_of_memory
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.loading import load_model, ranks
from gqa.checkpoint.provenance import portable, versions
from gqa.convert.align.cache_bits import layers_with_cache, quantise_cache, quantised_attention
from gqa.convert.align.self_samples import sampled_blocks, seed_apart
from gqa.corpus.likelihood import ChunkedHead
from gqa.corpus.windows import Window
from gqa.eval.decode import decode_contexts, in_dtype, measure_decode, measured_cache_bytes
from gqa.eval.greedy import PROMPTS, agreement, as_text, continued, prompts, sources_of, write
from gqa.eval.options import EvaluateOptions
from gqa.eval.positions import by_context, long_windows, runs
from gqa.eval.recall import DISTANCES, Questions, make_questions, recall
from gqa.eval.scoring import Scores, score
from gqa.eval.statistics import kl_statistics, paired_ratio, tokens_per_round
from gqa.eval.subjects import Subject, fit, open_subjects
from gqa.eval.text import Text, choose_context, perplexity, read_text

SCHEMA = 2
SAMPLE, SAMPLES = 256, 64  # tokens of each, and how many are asked about
SHOWN = 4  # greedy texts of each model in a report


def measure(names: Sequence[str], options: EvaluateOptions, argv: Sequence[str]) -> dict[str, Any]:
    """Everything that was asked for, as one JSON-ready object; empty on all ranks but the first.

    `argv` are the arguments of the command. What can be refused without running a model is refused first.
    """
    transformers.utils.logging.set_verbosity_error()
    quiet = options.quiet or not ranks().is_main_process
    device = run_device(options)
    say_device(device, quiet)
    subjects = with_bits(open_subjects(names, options.trust_remote_code, options.revision), options.cache_bits or ())
    for subject in subjects if options.data or options.decode else ():
        subject.check_predicts_tokens()
    results: dict[str, Any] = {
        "argv": portable(argv),
        **environment(device),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "models": [subject.record for subject in subjects],
    }
    recall_context = find_recall_context(subjects, options)
    contexts = decode_contexts(subjects, options.decode_contexts, options.decode_steps) if options.decode else ()
    if options.memory:
        context = choose_context(subjects, options.context, options.beyond_positions)
        results["memory"] = fit(subjects, options.memory, options.tensor_parallel, context, options.precision)
    with quantised_attention(options.cache_bits or ()):
        text = None
        if options.data:
            text = read_text(subjects, options)
            results["text"] = {"data": options.data, **text.record()}
            measure_quality(subjects, text, options)
            if text.protocol == "pairs" and (options.kl or options.output):
                with _kept(results, "written", spared=True):
                    measure_written(subjects, text, options)
        measured = bool(options.memory or text)
        if recall_context:
            with _kept(results, "recall", spared=measured or not options.recall, context=recall_context):
                measure_recall(subjects, text, recall_context, options)
            measured = measured or "refused" not in results["recall"]
        if not ranks().is_main_process:  # the rest is not split
            return {}
        if options.decode:
            with _kept(results, "decode", spared=measured):
                time_decoding(subjects, options, contexts)
    return results


@contextmanager
def _kept(results: dict[str, Any], part: str, spared: bool, **about: Any) -> Iterator[None]:
    """`results` are told `about` a part that is measured now, and what keeps it from that where the rest is `spared`:
    it does not cost what was measured before.
    """
    try:
        yield
    except RefusedError as error:
        if not spared:
            raise
        about["refused"] = str(error)
    if about:
        results[part] = about


def with_bits(subjects: list[Subject], bits: Sequence[int]) -> list[Subject]:
    """These and, of each number of `bits`, all of them with a KV cache of it. Raises RefusedError for other caches."""
    for subject in subjects if bits else ():
        layers_with_cache(subject.checkpoint)  # refuses
    return [*subjects, *(subject.quantised(each) for each in bits for subject in subjects)]


def find_recall_context(subjects: Sequence[Subject], options: EvaluateOptions) -> int | None:
    """Tokens in which recall is measured: where it is asked for, and in reports where it can be and is not declined."""
    if not options.asks_recall:
        return None
    context = choose_context(subjects, options.context, options.beyond_positions)
    try:
        check_recall(subjects, context)
    except RefusedError as error:
        if options.recall:
            raise
        if options.context and not (options.data or options.memory):
            told = f"--context {options.context} means nothing without --data or --memory: {error}"
            raise RefusedError(told) from None
        return None
    return context


def usable_device(asked: str | None) -> str:
    """The device to run on: this rank's, unless another is asked for. Raises RefusedError where it cannot be used."""
    own = ranks().device
    return str(own) if asked is None or asked == own.type else find_device(asked)


def run_device(options: EvaluateOptions) -> str:
    """The device of inputs. Raises RefusedError where it cannot be used, or several processes would each use all."""
    if options.device == "auto" and (processes := ranks().num_processes) > 1:
        raise RefusedError(f"--device auto is for one process, and there are {processes}; start it without a launcher")
    return usable_device(None if options.device == "auto" else options.device)


def load(subject: Subject, options: EvaluateOptions) -> PreTrainedModel:
    spread = "less --host-memory" if options.device == "auto" else "--device auto"
    advice = f"choose another --precision, {spread} or fewer checkpoints to --decode"
    with _explained(subject.name, options, "its weights", advice):
        model = load_model(
            subject.path, dtype=options.precision, device="auto" if options.device == "auto" else run_device(options),
            attention=options.attn_implementation, trust_remote_code=subject.trust_remote_code,
            host_memory=options.host_memory,
        )  # fmt: skip
        if subject.cache_bits:
            quantise_cache(model, subject.cache_bits, layers_with_cache(subject.checkpoint), subject.name)
        return model


@contextmanager
def _explained(name: str, options: EvaluateOptions, tried: str, advice: str) -> Iterator[None]:
    """What options cause while a model is loaded or runs is told as such: `tried` is what may not fit into memory."""
    try:
        yield
    except IndexError:
        raise RefusedError(
            f"{name} has a table of positions that ends before the context: --beyond-positions needs positions that "
            "are computed, as rotary ones are"
        ) from None
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            told = f"{name}: the memory of {run_device(options)} is too small for {tried}; {advice}"
            raise RefusedError(told) from None
        if not options.compile:
            raise
        line = (str(error).strip() or explain(error)).splitlines()[0].strip()
        raise RefusedError(f"{name} cannot be compiled: {line}; leave --compile out") from None


def measure_quality(subjects: Sequence[Subject], text: Text, options: EvaluateOptions) -> NDArray[np.float32]:
    """Add to each record the perplexity on the same windows and, with `options.kl`, how it differs from the
    first's, whose nats per token are returned.

    One model is in memory at a time; two while they are compared in lockstep.
    """
    first, *others = subjects
    live = own = None
    if options.kl and others:
        live = _head(first, options)
    else:
        own = _score(first, _head(first, options), text, options).nats
    for subject in others:
        head = _head(subject, options)
        scores = _score(subject, head, text, options, baseline=live)
        if live and scores.baseline_nats is not None:
            own = scores.baseline_nats  # found in lockstep
            if not np.isfinite(own).all():
                _score(first, live, text, options)  # refuses, and says where
        assert own is not None
        subject.record.update(summary(scores, text, own))
        del head  # before the next one is loaded
    assert own is not None
    first.record.update({"quality": perplexity(own, text), "by_context": by_context(own, text.windows)})
    return own


def _head(subject: Subject, options: EvaluateOptions) -> ChunkedHead:
    model = load(subject, options)
    subject.record.update(
        {"dtype": str(model.dtype).removeprefix("torch."), "attention": model.config._attn_implementation}
    )
    return ChunkedHead(model, options.compile)


def _score(subject: Subject, head: ChunkedHead, text: Text, options: EvaluateOptions, **more: Any) -> Scores:
    tried = f"a batch of {options.batch_size} windows of {text.context:,} tokens"
    with (
        _explained(subject.name, options, tried, "give a smaller --batch-size or --context"),
        _bar(text.tokens // ranks().num_processes, "tok", subject.name, options) as bar,
    ):
        return score(head, text.windows, batch_size=options.batch_size, progress=bar.update, **more)


def _bar(total: int, unit: str, name: str, options: EvaluateOptions) -> Any:
    return progress_bar(total, unit, name, options.quiet or not ranks().is_main_process)


def summary(scores: Scores, text: Text, baseline: NDArray[np.float32]) -> dict[str, Any]:
    """What scores say, alone and against the baseline's nats, JSON-ready."""
    nats, clusters = scores.nats, text.clusters
    compared: dict[str, Any] = paired_ratio(nats, baseline, clusters)
    if scores.kl is not None and scores.same_top is not None and scores.acceptance is not None:
        compared |= kl_statistics(scores.kl, scores.same_top, scores.acceptance)
        compared["tokens_per_round"] = tokens_per_round(scores.acceptance, clusters)
    read = by_context(nats, text.windows, baseline, clusters)
    return {"quality": perplexity(nats, text), "by_context": read, "against_baseline": compared}


def time_decoding(subjects: Sequence[Subject], options: EvaluateOptions, contexts: Sequence[int]) -> None:
    """Add to each record how fast its model decodes after prompts of `contexts`, and its cache as it is measured; all
    models are in memory at once, since they take turns.
    """
    models = {subject.name: load(subject, options) for subject in subjects}
    batches, steps, repeats = options.decode_batches, options.decode_steps, options.decode_repeats
    tried = f"batches of {max(batches)} sequences of {max(contexts):,} tokens"
    advice = "give smaller --decode-batches or --decode-contexts, or fewer checkpoints"
    with (
        _explained(", ".join(models), options, tried, advice),
        _bar(len(models) * len(batches) * len(contexts) * repeats, "run", "decoding", options) as bar,
    ):
        points = measure_decode(models, batches, contexts, steps, repeats, bar.update)
        held = {name: measured_cache_bytes(model, contexts[0], 1) for name, model in models.items()}
    for subject in subjects:
        name = subject.name
        assert subject.cache
        subject.record["decode"] = {"steps": steps, "repeats": repeats, "points": points[name]}
        subject.record["kv_cache"]["measured"] = {
            "tokens": contexts[0],
            "bytes": sum(held[name]),
            "formula": in_dtype(subject.cache, models[name]).bytes_at(contexts[0]),
            "cross_bytes": sum(held[name][1:]),
        }


@dataclass(frozen=True)
class Probe:
    """What models are asked about their context, and the texts that the first of them writes by itself.

    stream: Token ids of the text that is evaluated; prefix: what a sequence begins with; tokenizer: of the first.
    """

    asked: Sequence[Questions]
    texts: Sequence[Window]
    stream: NDArray[np.integer[Any]]
    prefix: int
    tokenizer: Any

    @property
    def windows(self) -> list[Window]:
        return [*(window for one in self.asked for window in one.windows), *self.texts]

    def measured(self, scores: Scores) -> dict[str, Any]:
        """What `scores` of the windows say of a model, for its record."""
        written = scores.hits[-sum(window.scored for window in self.texts) :]
        return {"recall": recall(self.asked, scores), "greedy": agreement(written, self.texts)}

    def written_by(self, model: PreTrainedModel | None = None) -> list[dict[str, str]]:
        """Some of the prompts, and what a model writes after them, the first unless one is given, as a report shows
        them. Raises RefusedError.
        """
        shown = self.texts[:SHOWN]
        if model is not None:
            shown = continued(model, [window.ids[: -window.scored] for window in shown])
        return as_text(self.tokenizer, shown)


def check_recall(subjects: Sequence[Subject], context: int) -> None:
    """Raises RefusedError where a model cannot be asked about `context` tokens."""
    first, least = subjects[0], 2 * DISTANCES[0]
    for subject in subjects:
        subject.check_predicts_tokens()
    if first.config.is_encoder_decoder:
        raise RefusedError(f"--recall is for decoders, and {first.name} is an encoder-decoder")
    if context < least:
        raise RefusedError(f"--recall needs a context of at least {least} tokens, and --context is {context}")


def make_probe(first: Subject, text: Text | None, context: int, options: EvaluateOptions) -> Probe:
    """Questions about up to `context` tokens of `text`, where there is one, and of what the first model writes itself.

    Raises RefusedError.
    """
    check_recall([first], context)
    tokenizer, windows = first.tokenizer, text.windows if text else ()
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if prefix is None:
        raise RefusedError(f"the tokenizer of {first.name} has neither BOS nor EOS to start with; give --no-recall")
    samples = _samples(first, min(SAMPLE, context), options)
    streams = {"text": [window.ids[-window.scored :] for window in windows], "samples": samples}
    plain = {kind: np.concatenate(parts) for kind, parts in streams.items() if len(parts)}
    plain = {kind: ids[~np.isin(ids, tokenizer.all_special_ids)] for kind, ids in plain.items()}
    asked = make_questions(plain, tokenizer, first.vocabulary, context, prefix)
    model = load(first, options)
    with _explained(first.name, options, "greedy texts", "give --no-recall"):
        texts = continued(model, prompts(tokenizer, samples[: len(PROMPTS)]))
    return Probe(asked, texts, plain.get("text", np.array([], int)), prefix, tokenizer)


def measure_recall(subjects: Sequence[Subject], text: Text | None, context: int, options: EvaluateOptions) -> None:
    """Add to each record what the model finds again in `context` tokens, and how long it says what the first says.

    Where no context is asked for the loss by position becomes that of windows as long as the models' positions, where
    the text is enough. Raises RefusedError.
    """
    probe = make_probe(subjects[0], text, context, options)
    windows, found = probe.windows, list[dict[str, Any]]()
    limit = min((subject.positions for subject in subjects if subject.positions), default=None)
    far = [] if options.context else long_windows(probe.stream, limit, context, probe.prefix)
    nats: list[NDArray[np.float32]] = []
    tried = f"a batch of {options.batch_size} sequences of {context:,} tokens"
    share = sum(window.scored for window in [*windows, *far]) // ranks().num_processes
    for subject in subjects:
        head = _head(subject, options)
        with (
            _explained(subject.name, options, tried, "give a smaller --batch-size or --context, or --no-recall"),
            _bar(share, "tok", f"{subject.name}, recall", options) as bar,
        ):
            found.append(probe.measured(score(head, windows, batch_size=options.batch_size, progress=bar.update)))
            found[-1]["samples"] = probe.written_by(None if subject is subjects[0] else head.model)
            if far:
                nats.append(score(head, far, batch_size=1, progress=bar.update).nats)
                base = nats[0] if nats[1:] else None
                found[-1]["by_context"] = by_context(nats[-1], far, base, runs(far))
        del head  # before the next one is loaded
    for subject, record in zip(subjects, found, strict=True):  # of all or of none
        subject.record.update(record)


def measure_written(subjects: Sequence[Subject], text: Text, options: EvaluateOptions) -> None:
    """Add to each record how long an encoder-decoder writes what the first one writes for the sources. Raises
    RefusedError.
    """
    pairs, texts, found = sources_of(text.windows), list[Window](), list[dict[str, Any]]()
    for subject in subjects:
        head = _head(subject, options)
        with _explained(subject.name, options, "greedy texts", "give a smaller --batch-size or --context"):
            own = write(head.model, pairs if subject is subjects[0] else pairs[:SHOWN], options.batch_size)
            texts = texts or own
            hits = score(head, texts, batch_size=options.batch_size).hits
        found.append({"greedy": agreement(hits, texts), "samples": as_text(subject.tokenizer, own[:SHOWN])})
        del head  # before the next one is loaded
    for subject, record in zip(subjects, found, strict=True):  # of all or of none
        subject.record.update(record)


def _samples(subject: Subject, length: int, options: EvaluateOptions) -> list[Any]:
    """Blocks that the model writes, that none is calibrated or trained on."""

    def write(dtype: str, device: str | None = options.device) -> PreTrainedModel:
        return load(subject, replace(options, precision=dtype, device=device))

    seed = seed_apart(0, "evaluation")
    trusted = subject.trust_remote_code
    how = (run_device(options), subject.checkpoint, length, SAMPLES, seed)
    found = sampled_blocks(write, *how, plain=True, trust_remote_code=trusted)
    return [found[index]["input_ids"] for index in range(len(found))]


def environment(device: str) -> dict[str, Any]:
    """What the numbers were measured with."""
    names = ("gqa", "torch", "transformers", "accelerate", "datasets", "numpy")
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions(*names)},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "ranks": ranks().num_processes,
    }
