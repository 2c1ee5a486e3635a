"""The text that a model is calibrated on: where it comes from, and its share of each source. Blocks
of text that is read are made in calibration_blocks.py. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from gqa.convert.merge.calibration_blocks import read_blocks, without_copies
from gqa.core.console import Watcher
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
    from torch import Tensor

    from gqa.checkpoint.read import Checkpoint
    from gqa.corpus.tokens import Ints

# Blocks of self-generated text of which one is held out. They are more than of other text, since
# the default holds out no other.
_SELF_HELDOUT_ONE_IN = 6
# Beside other sources `general` is one token in so many, and no more than every tokenizer makes of
# its documents.
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

    # ------------------------------------------------------------------------- what a model reads

    def inputs(
        self, checkpoint: Checkpoint, device: str, watcher: Watcher, heldout_tokens: int = 0
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Read, or have the model write, the text.

        Returns:
            The inputs of the model's forward by name, and held-out text (M, length) of at most
            `heldout_tokens`; None for an encoder-decoder.

        Raises:
            RefusedError, CorpusError: The text cannot be used.
        """
        from gqa.convert.heads.config import transformers_config

        config = transformers_config(checkpoint.config)
        if config.is_encoder_decoder:
            self._check_length(checkpoint, config)
            inputs = self._pairs(checkpoint, device, watcher)
            self._warn_of_few_pairs(len(inputs["input_ids"]), watcher)
            return inputs, None

        blocks, heldout_blocks = self.blocks_and_heldout(
            checkpoint, device, watcher, heldout_tokens
        )
        return {"input_ids": blocks}, heldout_blocks

    def blocks_and_heldout(
        self, checkpoint: Checkpoint, device: str, watcher: Watcher, heldout_tokens: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The text of a decoder, and held-out text.

        Returns:
            Token ids (N, length), from each source its share; and (M, length) other blocks of the
            same sources, at most `heldout_tokens`, without repeats. Of self-generated text they are
            the last blocks, at most a sixth; of other text what is left of it; none of `general`
            beside other text.

        Raises:
            RefusedError, CorpusError: The text cannot be used.
        """
        import numpy as np
        import torch

        if self.target_column:
            raise RefusedError(
                f"--target-column works only with encoder-decoders, but {checkpoint.name} is not "
                "one; remove --target-column"
            )

        shares = self._shares_of(checkpoint)
        # What measures the quality is text of the kind that the user named, or that the model
        # writes. `general` does so only if there is nothing else.
        measured = {source for source, _ in shares if source != GENERAL} or {GENERAL}
        measured_tokens = sum(tokens for source, tokens in shares if source in measured)
        parts = []
        heldout_parts = []
        for number, (source, tokens) in enumerate(shares):
            heldout_count = 0
            if source in measured:
                heldout_count = heldout_tokens * tokens // measured_tokens // self.length
            if is_self(source):
                seed = self._seed(shares, number)
                blocks, heldout_blocks = self._generated(
                    checkpoint, device, watcher, source, tokens, heldout_count, seed
                )
            else:
                text = self._without_excluded(source)
                blocks, heldout_blocks = self._read(
                    checkpoint, text, tokens, self.repeats, heldout_count
                )
                if source in measured:
                    found = len(blocks) + len(heldout_blocks)
                    self._warn_of_short_text(source, found, tokens // self.length, watcher)
            parts.append(blocks)
            heldout_parts.append(heldout_blocks)

        # Text of one source may also be in another.
        all_blocks = np.concatenate(parts)
        for number, (source, _) in enumerate(shares):
            if not is_self(source):
                heldout_parts[number] = without_copies(
                    heldout_parts[number], all_blocks, source, watcher
                )
        return torch.from_numpy(all_blocks), torch.from_numpy(np.concatenate(heldout_parts))

    def _generated(
        self,
        checkpoint: Checkpoint,
        device: str,
        watcher: Watcher,
        source: str,
        tokens: int,
        heldout_count: int,
        seed: int,
    ) -> tuple[Ints, Ints]:
        """The blocks that the model writes for a source.

        Returns:
            Token ids (N, length); and (M, length) of the last blocks, at most `heldout_count`, in
            which no passages are repeated.
        """
        import numpy as np

        from gqa.convert.merge.self_samples import sampled_blocks
        from gqa.models.loading import load_model

        load = partial(
            load_model,
            str(checkpoint.directory),
            device=device,
            trust_remote_code=self.trust_remote_code,
        )
        _, is_stated_plain = parse_self(source)
        count = math.ceil(tokens / self.length)
        blocks = sampled_blocks(
            load,
            device,
            checkpoint,
            size=self.length,
            n_blocks=count,
            seed=seed,
            plain=is_stated_plain or not self.repeats,
            watcher=watcher,
            trust_remote_code=self.trust_remote_code,
        )

        used = count - min(heldout_count, count // _SELF_HELDOUT_ONE_IN)
        plain_blocks = replace(blocks, plain=True)
        rows = [blocks[i]["input_ids"] for i in range(used)]
        rows += [plain_blocks[i]["input_ids"] for i in range(used, count)]
        stacked = np.stack(rows)
        return stacked[:used], stacked[used:]

    def _read(
        self,
        checkpoint: Checkpoint,
        text: Source,
        tokens: int,
        repeats: bool,
        heldout_count: int = 0,
    ) -> tuple[Ints, Ints]:
        """The blocks of a source, and at most `heldout_count` others (`read_blocks`)."""
        return read_blocks(
            checkpoint,
            text,
            tokens=tokens,
            length=self.length,
            seed=self.seed,
            repeats=repeats,
            trust_remote_code=self.trust_remote_code,
            heldout_count=heldout_count,
        )

    def _pairs(self, checkpoint: Checkpoint, device: str, watcher: Watcher) -> dict[str, Tensor]:
        """The inputs of an encoder-decoder: pairs that it writes, that a table has, or that are
        made of text by masking spans.
        """
        from gqa.convert.merge.text_pairs import PairMaker

        if self.target_column and not self._data_specs():
            raise RefusedError(
                "--target-column is a column of --data, but self has no columns; pass other data, "
                "or remove --target-column"
            )

        maker = PairMaker(
            checkpoint, device, self.length, self.seed, watcher, self.trust_remote_code
        )
        pairs = []
        shares = self._shares_of(checkpoint)
        for number, (source, tokens) in enumerate(shares):
            count = tokens // self.length
            if is_self(source):
                watcher.stage(f"{checkpoint.name} writes", 2 * count * self.length)
                pairs += maker.write(count, self._seed(shares, number))
            elif self.target_column:
                pairs += maker.read(self._without_excluded(source), count)
            else:
                blocks, _ = self._read(
                    checkpoint, self._without_excluded(source), tokens, repeats=False
                )
                pairs += maker.corrupt(blocks)
        return maker.inputs(pairs)

    def _warn_of_short_text(self, source: str, found: int, wanted: int, watcher: Watcher) -> None:
        """Warn if a source has fewer blocks than calibration asks it for."""
        if found < wanted:
            watcher.warn(
                f"{source} has only {found:,} of the {wanted:,} blocks of {self.length} tokens "
                "that calibration asks for; pass more text with --data"
            )

    def _warn_of_few_pairs(self, found: int, watcher: Watcher) -> None:
        """Warn if the sources have fewer pairs than calibration asks for."""
        wanted = max(1, self.total_tokens // self.length)
        # The pairs of each source are rounded, so up to one a source may be missing.
        if found + len(self.sources) > wanted:
            return

        has = "has" if len(self.sources) == 1 else "have"
        watcher.warn(
            f"{', '.join(self.sources)} {has} only {found:,} of the {wanted:,} pairs of "
            f"{self.length} tokens that calibration asks for; pass more text with --data"
        )

    # ------------------------------------------------------------------------------------- checks

    def check_sources(self, checkpoint: Checkpoint, tokens_option: str = "--tokens") -> None:
        """Raise RefusedError or CorpusError for text that cannot be used.

        Of local files the beginning is read; others are not fetched yet. `tokens_option` is what
        the command calls `tokens`.
        """
        from gqa.corpus.encoders import check_template
        from gqa.models.loading import load_tokenizer

        self._check_chosen_length(checkpoint)
        self.shares(tokens_option)  # raises if a source has less than one block
        data_specs = self._data_specs()
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
            if any(source.chats for source in local):
                check_template(tokenizer, checkpoint.name)

    def _check_chosen_length(self, checkpoint: Checkpoint) -> None:
        """Raise RefusedError if --context is more than the model's positions.

        Up to its default it is not refused: decoders with rotary positions accept it, others say
        themselves that it is too long.
        """
        from gqa.convert.heads.config import transformers_config

        if self.length > CalibrationText.length:
            self._check_length(checkpoint, transformers_config(checkpoint.config))

    def _check_length(self, checkpoint: Checkpoint, config: object) -> None:
        """Raise RefusedError for blocks that are longer than the model's positions."""
        from gqa.models.loading import positions

        longest = positions(config)
        if longest and self.length > longest:
            raise RefusedError(
                f"--context {self.length} is more than the {longest} positions of "
                f"{checkpoint.name}; pass at most {longest}"
            )

    # ------------------------------------------------------------------------------------ sources

    def identify(self) -> list[str]:
        """Hashes of the content of each source and of `excluded`; names of self-generated text.

        Raises CorpusError.
        """
        identities = []
        for spec in (*self.sources, *filter(None, [self.excluded])):
            if is_self(spec):
                identities.append(spec)
            else:
                identities.append(self._whole_source(spec).identify())
        return identities

    @property
    def total_tokens(self) -> int:
        """Tokens of all sources. Raises RefusedError and CorpusError."""
        return sum(tokens for _, tokens in self.shares())

    def shares(self, tokens_option: str = "--tokens") -> Sequence[tuple[str, int]]:
        """The sources with their numbers of tokens.

        `self:TOKENS` states it, `general` beside others has a quarter of `tokens` at most, and the
        others share the rest equally. Raises RefusedError, which names `tokens_option`, and
        CorpusError.
        """
        others = [source for source in self.sources if source != GENERAL] or [GENERAL]
        stated = [_stated_tokens(source) for source in others]
        sharing = stated.count(0)
        general = self._general_tokens(sharing)

        shares = []
        for source, stated_tokens in zip(others, stated, strict=True):
            tokens = stated_tokens or (self.tokens - general) // sharing
            if tokens < self.length:
                block = f"less than one block of {self.length} tokens"
                if stated_tokens:
                    raise RefusedError(f"{source} is {block}; pass more")
                if sharing > 1:
                    block += f" for each of {sharing} sources"
                raise RefusedError(
                    f"{tokens_option} {self.tokens} is {block}; pass at least "
                    f"{self.length * sharing}"
                )
            shares.append((source, tokens))
        if general:
            shares.append((GENERAL, general))
        return shares

    def _general_tokens(self, sharing: int) -> int:
        """Tokens of `general` beside `sharing` sources that share the rest.

        0 if it is not among the sources, or if it or one of them would have less than one block.
        """
        if GENERAL not in self.sources or set(self.sources) == {GENERAL}:
            return 0

        tokens = min(self.tokens // _GENERAL_ONE_IN, _MOST_GENERAL)
        rest = self.tokens - tokens
        if tokens < self.length or rest < sharing * self.length:
            return 0
        return tokens

    def _shares_of(self, checkpoint: Checkpoint) -> Sequence[tuple[str, int]]:
        """`shares`, by default without `general` if the model cannot read it."""
        if self._is_default and not _reads_general(checkpoint, self.trust_remote_code):
            return [("self", self.tokens)]
        return self.shares()

    @property
    def _is_default(self) -> bool:
        return self.sources == CalibrationText.sources

    def _data_specs(self) -> list[str]:
        """The sources that were named, but for generated text; none of the default, whose general
        text is not the user's.
        """
        if self._is_default:
            return []
        return [source for source in self.sources if not is_self(source)]

    def _whole_source(self, spec: str) -> Source:
        """The source of a spec, with the documents that are left out."""
        # By default `general` is read by decoders alone, which have no targets
        target_column = None if self._is_default else self.target_column
        return parse_source(
            spec,
            text_column=self.text_column,
            target_column=target_column,
            separator=self.separator,
        )

    def _without_excluded(self, spec: str) -> Source:
        """The source of a spec without what is excluded: documents, by a hash of their text, and
        passages of them in other documents.
        """
        from gqa.corpus.passages import Passages

        is_excluded: Callable[[bytes], bool]
        source = self._whole_source(spec)
        if self.excluded_fraction:
            # Not `_data_specs`: by default `general` is read too.
            read = [other for other in self.sources if not is_self(other)]
            parts = [self._whole_source(other).part(self.excluded_fraction) for other in read]
            is_excluded = partial(in_lowest_fraction, fraction=self.excluded_fraction)
        elif self.excluded:
            parts = [self._whole_source(self.excluded)]
            digests = {row_digest(*row) for row in parts[0].rows()}
            is_excluded = digests.__contains__
        else:
            return source

        # A small source may have no document in the fraction.
        rows = chain.from_iterable(part.rows_if_any() for part in parts)
        passages = Passages.of(map(searched_text, rows))
        return source.without(is_excluded).excluding(Exclusion(passages))

    def _seed(self, shares: Sequence[tuple[str, int]], number: int) -> int:
        """The seed of self-generated text for the share of that number: each text has another."""
        from gqa.convert.merge.self_samples import derive_seed

        earlier_texts = sum(is_self(source) for source, _ in shares[:number])
        if earlier_texts == 0:
            return self.seed
        return derive_seed(self.seed, f"self {earlier_texts}")


def _reads_general(checkpoint: Checkpoint, trust_remote_code: bool) -> bool:
    """Whether a model can be calibrated on plain text: it is a decoder with a tokenizer."""
    from gqa.convert.heads.config import transformers_config
    from gqa.models.loading import load_tokenizer

    if transformers_config(checkpoint.config).is_encoder_decoder:
        return False
    try:
        load_tokenizer(checkpoint, trust_remote_code)
    except RefusedError:
        return False
    return True


def _stated_tokens(source: str) -> int:
    """The number of tokens that a source states; 0 if it states none."""
    if not is_self(source):
        return 0
    return parse_self(source)[0] or 0
