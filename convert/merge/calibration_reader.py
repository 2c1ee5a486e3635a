"""Read the calibration text of a model, or have the model write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.generate.self_samples import derive_seed, sampled_blocks
from gqa.convert.generate.text_pairs import PairMaker
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.calibration_blocks import read_blocks, without_copies
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.console import Watcher
from gqa.core.errors import RefusedError
from gqa.corpus.specs import GENERAL, is_self, parse_self
from gqa.corpus.tokens import Ints
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer

# Blocks of generated text of which one is held out. They are more than of other text, since
# the default holds out no other.
_SELF_HELDOUT_ONE_IN = 6


@dataclass(frozen=True)
class CalibrationReader:
    """Makes blocks, or pairs for an encoder-decoder, of calibration text.

    Attributes:
        text: Where the text comes from, and how much of it.
        checkpoint: The model that reads it.
        device: Where the model writes its own text.
        watcher: Shows the progress.
    """

    text: CalibrationText
    checkpoint: Checkpoint
    device: str
    watcher: Watcher

    def inputs(self, heldout_tokens: int = 0) -> tuple[dict[str, Tensor], Tensor | None]:
        """Read, or have the model write, the text.

        Returns:
            The inputs of the model's forward by name, and held-out text (M, length) of at most
            `heldout_tokens`; None for an encoder-decoder.

        Raises:
            RefusedError, CorpusError: The text cannot be used.
        """
        config = transformers_config(self.checkpoint.config)
        if config.is_encoder_decoder:
            self.text.check_length(self.checkpoint, config)
            inputs = self._make_pairs()
            self._warn_of_few_pairs(len(inputs["input_ids"]))
            return inputs, None

        blocks, heldout_blocks = self.blocks_and_heldout(heldout_tokens)
        return {"input_ids": blocks}, heldout_blocks

    def blocks_and_heldout(self, heldout_tokens: int = 0) -> tuple[Tensor, Tensor]:
        """The text of a decoder, and held-out text.

        Returns:
            Token ids (N, length), from each source its share; and (M, length) other blocks of the
            same sources, at most `heldout_tokens`, without repeats. Of generated text they are
            the last blocks, at most a sixth; of other text what is left of it; none of `general`
            beside other text.

        Raises:
            RefusedError, CorpusError: The text cannot be used.
        """
        length = self.text.length
        if self.text.target_column:
            raise RefusedError(
                "--target-column works only with encoder-decoders, but "
                f"{self.checkpoint.name} is not one; remove --target-column"
            )

        shares = self._readable_shares()
        heldout_counts = self._heldout_counts(shares, heldout_tokens)
        parts = []
        heldout_parts = []
        for number, (source, tokens) in enumerate(shares):
            heldout_count = heldout_counts[number]
            if is_self(source):
                seed = self._seed(shares, number)
                blocks, heldout_blocks = self._generate(source, tokens, heldout_count, seed)
            else:
                blocks, heldout_blocks = self._read(
                    source, tokens, self.text.repeats, heldout_count
                )
                if source in _measuring_sources(shares):
                    found = len(blocks) + len(heldout_blocks)
                    self._warn_of_short_text(source, found, tokens // length)
            parts.append(blocks)
            heldout_parts.append(heldout_blocks)

        # Text of one source may also be in another.
        all_blocks = np.concatenate(parts)
        for number, (source, _) in enumerate(shares):
            if not is_self(source):
                heldout_parts[number] = without_copies(
                    heldout_parts[number], all_blocks, source, self.watcher
                )
        return torch.from_numpy(all_blocks), torch.from_numpy(np.concatenate(heldout_parts))

    def _heldout_counts(self, shares: Sequence[tuple[str, int]], heldout_tokens: int) -> list[int]:
        """The most blocks of each share that may be held out, in proportion to its tokens.

        Quality is measured on text that the user named or the model writes; on `general` only if
        there is nothing else. A sixth of generated text at most, an eighth of short read text
        (`read_blocks`).
        """
        measuring_sources = _measuring_sources(shares)
        measuring_tokens = sum(tokens for source, tokens in shares if source in measuring_sources)
        counts = []
        for source, tokens in shares:
            count = 0
            if source in measuring_sources:
                count = heldout_tokens * tokens // measuring_tokens // self.text.length
            if is_self(source):
                n_blocks = tokens // self.text.length
                count = min(count, n_blocks // _SELF_HELDOUT_ONE_IN)
            counts.append(count)
        return counts

    def _generate(
        self, source: str, tokens: int, heldout_count: int, seed: int
    ) -> tuple[Ints, Ints]:
        """The blocks that the model writes for a source.

        Returns:
            Token ids (N, length), of together at most `tokens` tokens; and (heldout_count, length)
            of the last blocks, in which no passages are repeated.
        """
        text = self.text
        load = partial(
            load_model,
            str(self.checkpoint.directory),
            device=self.device,
            trust_remote_code=text.trust_remote_code,
        )
        _, is_stated_plain = parse_self(source)
        count = tokens // text.length  # at least 1, for which `tokens_by_source` sees
        blocks = sampled_blocks(
            load,
            self.device,
            self.checkpoint,
            block_size=text.length,
            n_blocks=count,
            seed=seed,
            plain=is_stated_plain or not text.repeats,
            watcher=self.watcher,
            trust_remote_code=text.trust_remote_code,
        )

        used = count - heldout_count
        plain_blocks = replace(blocks, plain=True)
        rows = [blocks[i]["input_ids"] for i in range(used)]
        rows += [plain_blocks[i]["input_ids"] for i in range(used, count)]
        stacked = np.stack(rows)
        return stacked[:used], stacked[used:]

    def _read(
        self, source: str, tokens: int, repeats: bool, heldout_count: int = 0
    ) -> tuple[Ints, Ints]:
        """The blocks of a source, and at most `heldout_count` others (`read_blocks`)."""
        return read_blocks(
            self.checkpoint,
            self.text.without_excluded(source),
            tokens=tokens,
            length=self.text.length,
            seed=self.text.seed,
            repeats=repeats,
            trust_remote_code=self.text.trust_remote_code,
            heldout_count=heldout_count,
        )

    def _make_pairs(self) -> dict[str, Tensor]:
        """The inputs of an encoder-decoder: pairs that it writes, that a table has, or that are
        made of text by masking spans.
        """
        text = self.text
        if text.target_column and not text.data_specs():
            raise RefusedError(
                "--target-column is a column of --data, but self has no columns; pass other data, "
                "or remove --target-column"
            )

        maker = PairMaker(
            self.checkpoint,
            self.device,
            text.length,
            text.seed,
            self.watcher,
            text.trust_remote_code,
        )
        pairs = []
        shares = self._readable_shares()
        for number, (source, tokens) in enumerate(shares):
            count = tokens // text.length
            if is_self(source):
                self.watcher.stage(f"{self.checkpoint.name} writes", 2 * count * text.length)
                pairs += maker.write(count, self._seed(shares, number))
            elif text.target_column:
                pairs += maker.read(text.without_excluded(source), count)
            else:
                blocks, _ = self._read(source, tokens, repeats=False)
                pairs += maker.corrupt(blocks)
        return maker.inputs(pairs)

    def _warn_of_short_text(self, source: str, found: int, wanted: int) -> None:
        """Warn if a source has fewer blocks than calibration asks it for."""
        if found < wanted:
            self.watcher.warn(
                f"{source} has only {found:,} of the {wanted:,} blocks of {self.text.length} "
                "tokens that calibration asks for; pass more text with --data"
            )

    def _warn_of_few_pairs(self, found: int) -> None:
        """Warn if the sources have fewer pairs than calibration asks for."""
        text = self.text
        wanted = max(1, text.total_tokens // text.length)
        # The pairs of each source are rounded, so up to one a source may be missing.
        if found + len(text.sources) > wanted:
            return

        has = "has" if len(text.sources) == 1 else "have"
        self.watcher.warn(
            f"{', '.join(text.sources)} {has} only {found:,} of the {wanted:,} pairs of "
            f"{text.length} tokens that calibration asks for; pass more text with --data"
        )

    def _readable_shares(self) -> Sequence[tuple[str, int]]:
        """`tokens_by_source`, by default without `general` if the model cannot read it.

        Raises RefusedError and CorpusError.
        """
        text = self.text
        if text.is_default and not self._accepts_plain_text():
            text = replace(text, sources=("self",))
        return text.tokens_by_source()

    def _accepts_plain_text(self) -> bool:
        """Whether the model can be calibrated on plain text: it is a decoder with a tokenizer."""
        if transformers_config(self.checkpoint.config).is_encoder_decoder:
            return False
        try:
            load_tokenizer(self.checkpoint, self.text.trust_remote_code)
        except RefusedError:
            return False
        return True

    def _seed(self, shares: Sequence[tuple[str, int]], number: int) -> int:
        """The seed of generated text for the share of that number: each text has another."""
        earlier_texts = sum(is_self(source) for source, _ in shares[:number])
        if earlier_texts == 0:
            return self.text.seed
        return derive_seed(self.text.seed, f"self {earlier_texts}")


def _measuring_sources(shares: Sequence[tuple[str, int]]) -> set[str]:
    """The sources whose held-out text measures the quality."""
    return {source for source, _ in shares if source != GENERAL} or {GENERAL}
