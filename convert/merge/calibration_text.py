"""The text that a model is calibrated on: where it comes from, and its share of each source.
calibration_reader.py reads it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from gqa.core.errors import RefusedError
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.rows import in_lowest_fraction, row_digest, searched_text
from gqa.corpus.sources import Source
from gqa.corpus.specs import (
    GENERAL,
    check_text_options,
    is_self,
    parse_self,
    parse_source,
    parse_sources,
)

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint

# Beside other sources `general` gets a quarter of `tokens`, at most 12,288 (every tokenizer makes
# as many of its documents); nothing, if it or another source would get less than a block. What
# `self:TOKENS` states is no part of `tokens`.
_GENERAL_ONE_IN = 4
_MOST_GENERAL = 12_288


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text in blocks; for an encoder-decoder, in pairs.

    Attributes:
        sources: Arguments of `parse_sources`, or `self[:plain][:TOKENS]`. The default leaves out
            `general` where it cannot be read: of encoder-decoders, and without a tokenizer.
        tokens: Tokens of all sources together, except those that state their number.
        length: Tokens of a block; of a pair, the most on each side.
        seed: Of the generated text, and of the choice among documents.
        text_column: The column of text in tables.
        target_column: The column of an encoder-decoder's targets.
        repeats: Whether half of the blocks repeat themselves (`with_repeats` in corpus/blocks.py),
            except for `self:plain` and pairs.
        trust_remote_code: Whether code of the checkpoint may run.
        excluded: A source whose documents are left out.
        excluded_fraction: The share of the documents, by hash, that is left out.
        separator: What separates documents in text files.
    """

    sources: tuple[str, ...] = ("self", GENERAL)
    tokens: int = 65_536
    length: int = 256
    seed: int = 0
    text_column: str = "text"
    target_column: str | None = None
    repeats: bool = True
    trust_remote_code: bool = False
    excluded: str | None = None
    excluded_fraction: float = 0.0
    separator: str | None = None

    # ------------------------------------------------------------------------------------- checks

    def check_sources(self, checkpoint: Checkpoint, tokens_option: str = "--tokens") -> None:
        """Raise RefusedError or TextError for text that cannot be used.

        Of local files the beginning is read; others are not fetched yet. `tokens_option` is what
        the command calls `tokens`.
        """
        from gqa.corpus.encoders import check_template
        from gqa.models.tokenizer import load_tokenizer

        self._check_chosen_length(checkpoint)
        self.tokens_by_source(tokens_option)  # raises if a source has less than one block
        data_specs = self.data_specs()
        specs = (*data_specs, *filter(None, [self.excluded]))
        check_text_options(specs, self.text_column, self.separator)
        if not data_specs:
            return

        sources = parse_sources(
            data_specs,
            text_column=self.text_column,
            target_column=self.target_column,
            separator=self.separator,
        )
        local = [source for source in sources if source.files]
        for source in local:
            next(source.texts())  # raises for a file that has no text

        if not checkpoint.hub_id:
            tokenizer = load_tokenizer(checkpoint, self.trust_remote_code, instead="use self")
            if any(source.has_chats for source in local):
                check_template(tokenizer, checkpoint.name)

    def _check_chosen_length(self, checkpoint: Checkpoint) -> None:
        """Raise RefusedError if --context is more than the model's positions.

        Up to its default it is not refused: decoders with rotary positions accept it, others say
        themselves that it is too long.
        """
        from gqa.convert.heads.config import transformers_config

        if self.length > CalibrationText.length:
            self.check_length(checkpoint, transformers_config(checkpoint.config))

    def check_length(self, checkpoint: Checkpoint, config: object) -> None:
        """Raise RefusedError for blocks that are longer than the model's positions.

        config: That of transformers.
        """
        from gqa.models.classes import positions

        longest = positions(config)
        if longest and self.length > longest:
            raise RefusedError(
                f"--context {self.length} is more than the {longest} positions of "
                f"{checkpoint.name}; pass at most {longest}"
            )

    # ------------------------------------------------------------------------------------ sources

    def identify(self) -> list[str]:
        """Hashes of the content of each source and of `excluded`; names of generated text.

        Raises TextError.
        """
        identities = []
        for spec in (*self.sources, *filter(None, [self.excluded])):
            if is_self(spec):
                identities.append(spec)
            else:
                identities.append(self._parse(spec).identify())
        return identities

    @property
    def total_tokens(self) -> int:
        """Tokens of all sources. Raises RefusedError and TextError."""
        return sum(tokens for _, tokens in self.tokens_by_source())

    def tokens_by_source(self, tokens_option: str = "--tokens") -> Sequence[tuple[str, int]]:
        """The sources with their numbers of tokens, each at least one block.

        `self:TOKENS` states it, `general` beside others has a quarter of `tokens`, at most 12,288,
        and the others share the rest equally. By default (`self,general`, 65,536 tokens, blocks of
        256) these are 53,248 and 12,288. Of the 208 generated blocks 32 are kept for the quality
        check (`CHECKED_TOKENS`), so maps are fitted to 224 blocks, 57,344 tokens.

        Raises RefusedError, which names `tokens_option`, and TextError.
        """
        others = [source for source in self.sources if source != GENERAL] or [GENERAL]
        sharing = [source for source in others if _stated_tokens(source) is None]
        general_tokens = self._general_tokens(len(sharing))
        each = 0
        if sharing:
            each = self._tokens_each(len(sharing), general_tokens, tokens_option)

        shares = []
        for source in others:
            stated_tokens = _stated_tokens(source)
            if stated_tokens is None:
                shares.append((source, each))
                continue
            if stated_tokens < self.length:
                name = "self:plain" if parse_self(source)[1] else "self"
                raise RefusedError(
                    f"{source} is less than one block of {self.length} tokens; pass "
                    f"{name}:{self.length} or more"
                )
            shares.append((source, stated_tokens))

        if general_tokens:
            shares.append((GENERAL, general_tokens))
        return shares

    def _tokens_each(self, n_sharing: int, general_tokens: int, tokens_option: str) -> int:
        """Tokens of each of `n_sharing` sources. Raises RefusedError if they are less than a
        block.
        """
        tokens = (self.tokens - general_tokens) // n_sharing
        if tokens >= self.length:
            return tokens

        block = f"one block of {self.length} tokens"
        if n_sharing > 1:
            block += f" for each of {n_sharing} sources"
        raise RefusedError(
            f"{tokens_option} {self.tokens} is less than {block}; pass at least "
            f"{self.length * n_sharing}"
        )

    def _general_tokens(self, n_sharing: int) -> int:
        """Tokens of `general` beside `n_sharing` sources that share the rest.

        0 if it is not among the sources, or if it or one of them would have less than one block.
        """
        if GENERAL not in self.sources or set(self.sources) == {GENERAL}:
            return 0

        tokens = min(self.tokens // _GENERAL_ONE_IN, _MOST_GENERAL)
        rest = self.tokens - tokens
        if tokens < self.length or rest < n_sharing * self.length:
            return 0
        return tokens

    def readable(self, accepts_plain_text: bool) -> CalibrationText:
        """This text, by default without `general` for a model that cannot be calibrated on plain
        text: an encoder-decoder, or one without a tokenizer.
        """
        if self.is_default and not accepts_plain_text:
            return replace(self, sources=("self",))
        return self

    @property
    def is_default(self) -> bool:
        """Whether the sources are those of the default, also if they were typed."""
        return self.sources == CalibrationText.sources

    def data_specs(self) -> list[str]:
        """The sources that were named, but for generated text; none of the default, whose general
        text is not the user's.
        """
        if self.is_default:
            return []
        return [source for source in self.sources if not is_self(source)]

    def _parse(self, spec: str) -> Source:
        """The source of a spec, before anything is left out."""
        # By default `general` is read by decoders alone, which have no targets
        target_column = None if self.is_default else self.target_column
        return parse_source(
            spec,
            text_column=self.text_column,
            target_column=target_column,
            separator=self.separator,
        )

    def without_excluded(self, spec: str) -> Source:
        """The source of a spec without what is excluded: documents, by a hash of their text, and
        passages of them in other documents.
        """
        from gqa.corpus.passages import Passages

        is_excluded: Callable[[bytes], bool]
        source = self._parse(spec)
        if self.excluded_fraction:
            # Not `data_specs`: by default `general` is read too.
            read = [other for other in self.sources if not is_self(other)]
            parts = [self._parse(other).heldout_part(self.excluded_fraction) for other in read]
            is_excluded = partial(in_lowest_fraction, fraction=self.excluded_fraction)
        elif self.excluded:
            parts = [self._parse(self.excluded)]
            digests = {row_digest(*row) for row in parts[0].rows()}
            is_excluded = digests.__contains__
        else:
            return source

        # A small source may have no document in the fraction.
        rows = chain.from_iterable(part.rows_if_any() for part in parts)
        passages = Passages.of(map(searched_text, rows))
        return source.without_documents(is_excluded).excluding(Exclusion(passages))


def _stated_tokens(source: str) -> int | None:
    """The number of tokens that a source states; None if it states none."""
    if not is_self(source):
        return None
    tokens, _ = parse_self(source)
    return tokens
