"""The sources that a run trains on, and those of its held-out text."""

from __future__ import annotations

from dataclasses import replace

from gqa.core.errors import RefusedError
from gqa.corpus.sources import Source
from gqa.corpus.specs import parse_source, parse_sources
from gqa.uptrain.options import TrainOptions


def data_sources(options: TrainOptions) -> tuple[Source, ...]:
    """The sources of --data. Raises CorpusError."""
    return parse_sources(
        options.data,
        text_column=options.text_column,
        target_column=options.target_column,
        streaming=options.streaming,
        separator=options.separator,
    )


def heldout_sources(options: TrainOptions) -> list[Source]:
    """Held-out sources: those of --heldout and --heldout-fraction, and of the built-in text.

    Raises RefusedError and CorpusError.
    """
    if options.heldout:
        return [*data_sources(replace(options, data=(options.heldout,), streaming=False))]

    if not options.heldout_fraction:
        if options.data == ("stdlib:train",):
            return [parse_source("stdlib:heldout")]
        return []

    parts = [source.heldout_part(options.heldout_fraction) for source in data_sources(options)]
    parts_with_text = [part for part in parts if next(part.rows_if_any(), None)]
    if not parts_with_text:
        raise RefusedError(
            f"--heldout-fraction {options.heldout_fraction:g} holds out no document; pass a "
            "larger fraction, or more data"
        )
    return parts_with_text
