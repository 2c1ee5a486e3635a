"""Read the calibration text of a model, or have the model write it."""

from __future__ import annotations

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
from gqa.core.errors import RefusedError, plural
from gqa.corpus.specs import GENERAL, is_self, parse_self
from gqa.corpus.tokens import Ints
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer

# One in 6 generated blocks is held out, more than of other short text (one in 8): by default
# nothing else measures the quality.
_SELF_HELDOUT_ONE_IN = 6


@dataclass(frozen=True)
class _Share:
    """What calibration takes of one source.

    Attributes:
        source: As it was typed.
        tokens: Its tokens, at least one block.
        blocks: The whole blocks in them. Held-out ones of generated text are among them.
        measures: Whether its held-out text measures the quality: that of text which the user named
            or the model writes, that of `general` only if there is nothing else.
        seed: Of generated text: each has another.
    """

    source: str
    tokens: int
    blocks: int
    measures: bool
    seed: int


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
            RefusedError, TextError: The text cannot be used.
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
            the last blocks, at most a sixth. Of other text they are what calibration leaves; of
            short text an eighth, which calibration then lacks. None of `general` beside other text.

        Raises:
            RefusedError, TextError: The text cannot be used.
        """
        if self.text.target_column:
            raise RefusedError(
                "--target-column works only with encoder-decoders, but "
                f"{self.checkpoint.name} is not one; remove --target-column"
            )

        shares = self._shares()
        measuring_tokens = sum(share.tokens for share in shares if share.measures)
        parts = []
        heldout_parts = []
        for share in shares:
            heldout_count = 0
            if share.measures:  # in proportion to its tokens
                heldout_of_share = heldout_tokens * share.tokens // measuring_tokens
                heldout_count = heldout_of_share // self.text.length

            if is_self(share.source):
                blocks, heldout = self._generate(share, heldout_count)
            else:
                blocks, heldout = self._read(share, self.text.repeats, heldout_count)
                self._warn_of_short_text(share, len(blocks), len(heldout))
            parts.append(blocks)
            heldout_parts.append(heldout)

        # Text of one source may also be in another.
        all_blocks = np.concatenate(parts)
        for number, share in enumerate(shares):
            if not is_self(share.source):
                heldout_parts[number] = without_copies(
                    heldout_parts[number], all_blocks, share.source, self.watcher
                )
        return torch.from_numpy(all_blocks), torch.from_numpy(np.concatenate(heldout_parts))

    def _generate(self, share: _Share, heldout_count: int) -> tuple[Ints, Ints]:
        """The blocks that the model writes.

        Returns:
            Token ids (N, length) of the blocks of the share; and of its last ones, in which no
            passages are repeated, at most `heldout_count` and a sixth.
        """
        text = self.text
        load = partial(
            load_model,
            str(self.checkpoint.directory),
            device=self.device,
            trust_remote_code=text.trust_remote_code,
        )
        _, is_stated_plain = parse_self(share.source)
        blocks = sampled_blocks(
            load,
            self.device,
            self.checkpoint,
            block_size=text.length,
            n_blocks=share.blocks,
            seed=share.seed,
            plain=is_stated_plain or not text.repeats,
            watcher=self.watcher,
            trust_remote_code=text.trust_remote_code,
        )

        used = share.blocks - min(heldout_count, share.blocks // _SELF_HELDOUT_ONE_IN)
        plain_blocks = replace(blocks, plain=True)
        rows = [blocks[i]["input_ids"] for i in range(used)]
        rows += [plain_blocks[i]["input_ids"] for i in range(used, share.blocks)]
        stacked = np.stack(rows)
        return stacked[:used], stacked[used:]

    def _read(self, share: _Share, repeats: bool, heldout_count: int = 0) -> tuple[Ints, Ints]:
        """The blocks that are read, and at most `heldout_count` others (`read_blocks`)."""
        return read_blocks(
            self.checkpoint,
            self.text.without_excluded(share.source),
            tokens=share.tokens,
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
        for share in self._shares():
            if is_self(share.source):
                self.watcher.stage(f"{self.checkpoint.name} writes", 2 * share.blocks * text.length)
                pairs += maker.write(share.blocks, share.seed)
            elif text.target_column:
                pairs += maker.read(text.without_excluded(share.source), share.blocks)
            else:
                blocks, _ = self._read(share, repeats=False)
                pairs += maker.corrupt(blocks)
        return maker.inputs(pairs)

    def _warn_of_short_text(self, share: _Share, found: int, heldout: int) -> None:
        """Warn if a source that was named has fewer blocks than calibration asks it for.

        `heldout`: How many more it has, which measure the quality.
        """
        if share.measures and found < share.blocks:
            besides = ""
            if heldout:
                besides = f", besides {plural(heldout, 'block')} that measure the quality"
            self.watcher.warn(
                f"{share.source} has only {found:,} of the {share.blocks:,} blocks of "
                f"{self.text.length} tokens that calibration asks for{besides}; pass more text "
                "with --data"
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

    def _shares(self) -> list[_Share]:
        """What is taken of each source; by default without `general` if the model cannot read it.

        Raises RefusedError and TextError.
        """
        text = self.text
        if text.is_default:  # else no tokenizer is read for it
            text = text.readable(self._accepts_plain_text())

        tokens_by_source = text.tokens_by_source()
        has_only_general = all(source == GENERAL for source, _ in tokens_by_source)
        shares = list[_Share]()
        generated = 0
        for source, tokens in tokens_by_source:
            seed = text.seed
            if is_self(source):
                if generated:
                    seed = derive_seed(text.seed, f"self {generated}")
                generated += 1
            measures = source != GENERAL or has_only_general
            shares.append(_Share(source, tokens, tokens // text.length, measures, seed))
        return shares

    def _accepts_plain_text(self) -> bool:
        """Whether the model can be calibrated on plain text: it is a decoder with a tokenizer."""
        if transformers_config(self.checkpoint.config).is_encoder_decoder:
            return False
        try:
            load_tokenizer(self.checkpoint, self.text.trust_remote_code)
        except RefusedError:
            return False
        return True
