"""The blocks that each step trains on: fixed by data, seed and length, whatever ranks and micro-batches share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from gqa.convert.errors import RefusedError
from gqa.corpus.alpha import Selection, StreamedBlocks, select
from gqa.corpus.sources import Source, parse_source, parse_sources
from gqa.corpus.tokens import Block, Blocks, concatenate, tokenise
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.training_model import Batch


@dataclass(frozen=True)
class Feed:
    """Step s trains on blocks s * batch_size to (s + 1) * batch_size, in order."""

    blocks: Blocks | StreamedBlocks
    batch_size: int
    steps: int
    fingerprint: str
    summary: str

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.blocks.size

    def batches(self, first_step: int, rank: int, ranks: int, micro: int) -> Iterator[list[Batch]]:
        """For each step from `first_step` on, the micro-batches of one rank."""
        for blocks in self._steps(first_step):
            own = blocks[rank::ranks]
            yield [_stack(own[start : start + micro]) for start in range(0, len(own), micro)]

    def _steps(self, first: int) -> Iterator[list[Block]]:
        if isinstance(self.blocks, Blocks):
            for step in range(first, self.steps):
                yield [self.blocks[step * self.batch_size + i] for i in range(self.batch_size)]
            return
        stream = self.blocks.blocks(first * self.batch_size)
        for _ in range(first, self.steps):
            blocks = list(islice(stream, self.batch_size))
            if len(blocks) < self.batch_size:
                return
            yield blocks


def _stack(blocks: list[Block]) -> Batch:
    return {name: torch.from_numpy(np.stack([block[name] for block in blocks])) for name in blocks[0]}


def open_feed(options: TrainOptions, tokenizer: Any, block_size: int) -> Feed:
    """Raises RefusedError and CorpusError."""
    how = {
        "field": options.field, "config": options.data_config, "split": options.split,
        "streaming": options.streaming, "separator": options.separator,
    }  # fmt: skip
    sources = parse_sources(options.data, **how)
    if options.streaming:
        return _open_stream(options, sources, tokenizer, block_size)
    text = concatenate([tokenise(source, tokenizer) for source in sources])
    weights = [source.weight or 1.0 for source in sources] if any(s.weight for s in sources) else None
    chosen: Selection = select(
        text, block_size=block_size, seed=options.seed, alpha=options.alpha, tokens=options.tokens, steps=options.steps,
        blocks_per_step=options.batch_size, pretraining_tokens=options.pretraining_tokens,
        heldout_fraction=options.heldout_fraction, weights=weights, boundaries=options.mask_documents,
    )  # fmt: skip
    steps = chosen.blocks.n_blocks // options.batch_size
    if not steps:
        raise RefusedError(
            f"the data gives {chosen.blocks.n_blocks} blocks of {block_size} tokens, less than one batch of "
            f"{options.batch_size}; give more data, a smaller --batch-size or a smaller --block-size"
        )
    return Feed(chosen.blocks, options.batch_size, steps, text.fingerprint, chosen.summary())


def _open_stream(options: TrainOptions, sources: tuple[Source, ...], tokenizer: Any, block_size: int) -> Feed:
    """A stream's length is not known: --alpha needs the pre-training tokens to become a number of steps."""
    if options.steps:
        steps = options.steps
    else:
        tokens = options.tokens
        if options.alpha and options.pretraining_tokens:
            tokens = int(options.alpha * options.pretraining_tokens)
        if not tokens:
            raise RefusedError(
                "the length of a stream is not known: give --tokens or --steps, or --alpha with --pretraining-tokens"
            )
        steps = tokens // (block_size * options.batch_size)
    if steps < 1:
        raise RefusedError(f"less than one step of {options.batch_size} blocks of {block_size} tokens; give more")
    blocks = StreamedBlocks(
        sources, tokenizer, block_size=block_size, seed=options.seed, n_blocks=steps * options.batch_size,
        heldout_fraction=options.heldout_fraction, boundaries=options.mask_documents,
    )  # fmt: skip
    names = ", ".join(source.spec for source in sources)
    return Feed(blocks, options.batch_size, steps, f"stream of {names}", f"a stream of {names}")


def open_heldout(options: TrainOptions, tokenizer: Any, block_size: int) -> list[Block]:
    """Blocks that no step trains on; none where nothing says what is held out."""
    if options.heldout:
        source = parse_source(options.heldout, field=options.field, separator=options.separator)
    elif options.data == ("stdlib:train",):
        source = parse_source("stdlib:heldout")
    elif options.heldout_fraction and not options.streaming:
        parts = parse_sources(options.data, field=options.field, config=options.data_config, split=options.split)
        source = parts[0].part("heldout", options.heldout_fraction)
    else:
        return []
    text = tokenise(source, tokenizer)
    blocks = Blocks(text, np.arange(len(text)), block_size)
    wanted = max(1, min(len(blocks), options.heldout_tokens // block_size))
    if not len(blocks):
        raise RefusedError(f"the held-out text has less than one block of {block_size} tokens; give more")
    return [blocks[int(i)] for i in np.linspace(0, len(blocks) - 1, wanted)]
