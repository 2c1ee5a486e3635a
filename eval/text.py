"""Which text is scored, in which windows, and whether all checkpoints can be compared on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gqa.checkpoint.errors import RefusedError
from gqa.corpus.document import Document
from gqa.corpus.sources import parse_source
from gqa.eval.perplexity import Text, make_pairs, make_text
from gqa.eval.subjects import Subject

MAX_CONTEXT = 2048  # longer only when asked for: a model of 128k positions would be scored in windows of 128k


def read_text(subjects: Sequence[Subject], options: Mapping[str, Any]) -> Text:
    """The text that gqa-eval's options name, as tokens of the first checkpoint. Raises RefusedError."""

    def documents(field: str) -> Iterator[Document]:
        split, config = options["split"] or "test", options["data_config"]
        return parse_source(options["data"], field=field, config=config, split=split).documents()

    first, target = subjects[0], options["target_field"]
    if first.config.is_encoder_decoder != bool(target):
        raise RefusedError(
            f"{first.name} is an encoder-decoder: name the text to predict with --target-field"
            if first.config.is_encoder_decoder
            else f"--target-field is for encoder-decoders, {first.name} is none"
        )
    most = 512 if options["protocol"] == "llama.cpp" else MAX_CONTEXT
    context = choose_context(subjects, options["context"], options["beyond_positions"], most)
    sample = next(documents(options["field"]))
    check_models_agree(subjects, sample.text[:2000])
    if target:
        targets = {found.name: found.text for found in documents(target)}
        if targets.get(sample.name) == sample.text:
            raise RefusedError(f"--field and --target-field of {options['data']} are the same text; name two fields")
        pairs = ((d.text, targets[d.name]) for d in documents(options["field"]) if d.name in targets)
        text = make_pairs(pairs, first.tokenizer, first.decoder_start, context, options["tokens"])
    else:
        text = make_text(
            (found.text for found in documents(options["field"])), first.tokenizer, protocol=options["protocol"],
            context=context, stride=options["stride"], max_tokens=options["tokens"],
        )  # fmt: skip
    check_ids(subjects, text)
    return text


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
        if other.config.is_encoder_decoder != first.config.is_encoder_decoder:
            raise RefusedError(f"of {first.name} and {other.name} only one is an encoder-decoder: they do not compare")
        if other.vocabulary != first.vocabulary:
            raise RefusedError(
                f"{first.name} predicts {first.vocabulary:,} tokens and {other.name} {other.vocabulary:,}; "
                "give conversions of the same checkpoint"
            )


def check_ids(subjects: Sequence[Subject], text: Text) -> None:
    """Raise RefusedError where the text has tokens that a model does not know: its tokenizer is another's."""
    largest = max(max(*window.ids, *window.source) for window in text.windows)
    for subject in subjects:
        if largest >= subject.vocabulary:
            raise RefusedError(
                f"the tokenizer of {subject.name} gives token {largest:,} and its model knows {subject.vocabulary:,}: "
                "they do not belong together"
            )


def choose_context(subjects: Sequence[Subject], asked: int | None, beyond: bool, most: int = MAX_CONTEXT) -> int:
    """Tokens of a window: what is asked for, or the models' positions but `most` at most. Raises RefusedError."""
    limits = [subject.positions for subject in subjects if subject.positions]
    if asked is None:
        return min([*limits, most])
    if limits and asked > min(limits) and not beyond:
        raise RefusedError(
            f"--context {asked} is more than the {min(limits)} positions that the model was made for; give at most "
            f"{min(limits)}, or --beyond-positions to see what happens"
        )
    return asked
