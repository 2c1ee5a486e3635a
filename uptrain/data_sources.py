"""The sources that a run trains on, and those of its validation text."""

from __future__ import annotations

from dataclasses import replace

from gqa.core.errors import RefusedError
from gqa.corpus.sources import Source
from gqa.corpus.specs import heldout_of_built_in, parse_source, parse_sources
from gqa.uptrain.options import UptrainOptions


def data_sources(options: UptrainOptions) -> tuple[Source, ...]:
    """The sources of --data. Raises TextError."""
    return parse_sources(
        options.data,
        text_column=options.text_column,
        target_column=options.target_column,
        streaming=options.streaming,
        separator=options.separator,
    )


def named_sources(options: UptrainOptions) -> list[Source]:
    """The sources that --data and --validation name, of which nothing is read or fetched yet.

    Raises TextError if one of them does not exist.
    """
    sources = list[Source]()
    if not options.is_generated:
        sources += data_sources(options)
    if options.validation:
        sources += validation_sources(options)
    return sources


def validation_sources(options: UptrainOptions) -> list[Source]:
    """The sources of validation text: of --validation, --validation-fraction, or the built-in text.

    Raises RefusedError and TextError.
    """
    if options.validation:
        return [*data_sources(replace(options, data=(options.validation,), streaming=False))]

    if not options.validation_fraction:
        spec = heldout_of_built_in(options.data)
        return [parse_source(spec)] if spec else []

    parts = [source.heldout_part(options.validation_fraction) for source in data_sources(options)]
    parts_with_text = [part for part in parts if next(part.rows_if_any(), None)]
    if not parts_with_text:
        raise RefusedError(
            f"--validation-fraction {options.validation_fraction:g} holds out no document; "
            "raise it, or pass more data"
        )
    return parts_with_text
