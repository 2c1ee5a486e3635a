"""The blocks that each step trains on: fixed by data, seed and length, whatever ranks and micro-batches share them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.self_samples import SampledBlocks, sampled_blocks
from gqa.convert.align.watcher import SILENT, Watcher
from gqa.corpus.alpha import StreamedBlocks, n_blocks_for, select
from gqa.corpus.repeats import mixed
from gqa.corpus.sources import Source, parse_self, parse_source, parse_sources
from gqa.corpus.tokens import Block, Blocks, TokenisedText, concatenate, tokenise
from gqa.uptrain.defaults import settle_steps
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.training_model import Batch

_ENDLESS = 2**62  # tokens of a stream


class Numbered:
    """The blocks of a stream by number. It is read forward, and again from its start for one eight before the last."""

    def __init__(self, stream: StreamedBlocks) -> None:
        self.size, self._stream = stream.size, stream
        self._recent: deque[tuple[int, Block]] = deque(maxlen=8)

    def __getitem__(self, index: int) -> Block:
        if not self._recent or index < self._recent[0][0]:
            self._blocks = enumerate(self._stream.blocks())
            self._recent.clear()
        while not self._recent or self._recent[-1][0] < index:
            self._recent.append(next(self._blocks))
        return dict(self._recent)[index]


@dataclass(frozen=True)
class Repeating:
    """Blocks of which half repeat themselves (`gqa.corpus.repeats`)."""

    plain: Blocks | Numbered
    seed: int

    @property
    def size(self) -> int:
        return self.plain.size

    def __getitem__(self, index: int) -> Block:
        found = mixed(lambda number: self.plain[number]["input_ids"], index, self.seed, 0)
        return {"input_ids": found.astype(np.int64)}


@dataclass(frozen=True)
class Dataloader:
    """Step s trains on blocks s * batch_size to (s + 1) * batch_size, in order, behind the `first` ones.

    `fingerprint`: equal where the data is. `summary`: what the data is, for people. `heldout`: what was held back.
    """

    blocks: Blocks | SampledBlocks | Repeating | Numbered
    batch_size: int
    steps: int
    fingerprint: str
    summary: str
    heldout: list[Block]
    first: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.blocks.size

    def batches(self, first_step: int, rank: int, ranks: int, micro: int) -> Iterator[list[Batch]]:
        """For each step from `first_step` on, the micro-batches of one rank, which has every `ranks`th block."""
        for step in range(first_step, self.steps):
            begin = self.first + step * self.batch_size
            own = [self.blocks[number] for number in range(begin + rank, begin + self.batch_size, ranks)]
            yield [stack(own[start : start + micro]) for start in range(0, len(own), micro)]


def stack(blocks: list[Block]) -> Batch:
    """B blocks of T tokens as tensors (B, T)."""
    return {name: torch.from_numpy(np.stack([block[name] for block in blocks])) for name in blocks[0]}


def open_dataloader(options: TrainOptions, tokenizer: Any, longest: int, ranks: int = 1) -> Dataloader:
    """Of blocks of `longest` tokens at most, as `settle_steps` decides. Raises RefusedError and CorpusError."""
    sources, back = parse_sources(options.data, **_how(options)), not heldout_sources(options)
    if not options.streaming:
        text, heldout = concatenate([tokenise(source, tokenizer) for source in sources]), list[Block]()
        options = settle_steps(options, int(text.lengths.sum()), longest, ranks)
        block_size, batch = options.block, options.blocks_per_step
        if back:
            text, heldout = _hold_back(text, options, block_size)
        weights = [source.weight or 1.0 for source in sources] if any(s.weight for s in sources) else None
        chosen = select(
            text, block_size=block_size, seed=options.seed, heldout_fraction=options.heldout_fraction, weights=weights,
            boundaries=options.mask_documents, **_length(options),
        )  # fmt: skip
        steps = _steps(chosen.blocks.n_blocks, options, block_size)
        own = Repeating(chosen.blocks, options.seed) if options.repeats else chosen.blocks
        return Dataloader(own, batch, steps, text.fingerprint, chosen.summary(), heldout)
    if options.alpha is not None and options.pretraining_tokens is None:
        raise RefusedError("the length of a stream is not known: give --pretraining-tokens that --alpha is a share of")
    options = settle_steps(options, _ENDLESS, longest, ranks)
    block_size, batch = options.block, options.blocks_per_step
    steps = _steps(n_blocks_for(_ENDLESS, block_size, **_length(options)), options, block_size)
    first = wanted_blocks(options, block_size) if back else 0
    blocks = StreamedBlocks(
        sources, tokenizer, block_size=block_size, n_blocks=first + steps * batch,
        heldout_fraction=options.heldout_fraction, boundaries=options.mask_documents,
    )  # fmt: skip
    told = f"a stream of {', '.join(source.spec for source in sources)}"
    heldout = list(islice(blocks.blocks(), first))
    read = Repeating(Numbered(blocks), options.seed) if options.repeats else Numbered(blocks)
    return Dataloader(read, batch, steps, f"{told} {blocks.encoder.identify()}", told, heldout, first)


def wanted_blocks(options: TrainOptions, block_size: int) -> int:
    """Held-out blocks, at most."""
    return max(1, options.heldout_tokens // block_size)


def _hold_back(text: TokenisedText, options: TrainOptions, block_size: int) -> tuple[TokenisedText, list[Block]]:
    """The text without a twentieth of it, or --heldout-tokens, and that in blocks; nothing of less than 20 blocks."""
    count = min(wanted_blocks(options, block_size), int(text.lengths.sum()) // (20 * block_size))
    if not count:
        return text, []
    rest, aside = text.set_aside(count * block_size)
    blocks = Blocks(aside, np.arange(len(aside)), block_size, boundaries=options.mask_documents)
    return rest, [blocks[number] for number in range(len(blocks))]


def open_sampled(
    options: TrainOptions, load: Callable[[str], PreTrainedModel], device: str, checkpoint: Checkpoint, longest: int,
    ranks: int = 1, watcher: Watcher = SILENT,
) -> Dataloader:  # fmt: skip
    """Blocks that the teacher, `checkpoint`, writes, as `open_dataloader` has them; `load` gives it in a dtype. Raises
    RefusedError.
    """
    own = parse_self(options.data[0])
    data_tokens = own.tokens or _ENDLESS
    options = settle_steps(options, data_tokens, longest, ranks)
    block_size, batch = options.block, options.blocks_per_step
    length = _length(options)
    if not options.lengths:  # all that is written
        length["tokens"] = data_tokens
    n_blocks = n_blocks_for(data_tokens, block_size, **length)
    if n_blocks * block_size > data_tokens:
        raise RefusedError(
            f"{n_blocks * block_size:,} tokens of training are more than --data {options.data[0]}; ask for more"
        )
    steps = _steps(n_blocks, options, block_size)
    count, first = steps * batch, 0 if options.heldout else wanted_blocks(options, block_size)
    blocks = sampled_blocks(load, device, checkpoint, block_size, first + count, options.seed, own.plain, watcher)
    told = f"{count:,} blocks of {block_size:,} that {checkpoint.name} writes"
    heldout = [blocks[number] for number in range(first)]
    return Dataloader(blocks, batch, steps, blocks.fingerprint, told, heldout, first)


def _length(options: TrainOptions) -> dict[str, Any]:
    """How long training is, as `n_blocks_for` takes it."""
    return {
        "alpha": options.alpha, "tokens": options.tokens, "steps": options.steps,
        "blocks_per_step": options.blocks_per_step, "pretraining_tokens": options.pretraining_tokens,
    }  # fmt: skip


def _steps(n_blocks: int, options: TrainOptions, block_size: int) -> int:
    if steps := n_blocks // options.blocks_per_step:
        return steps
    raise RefusedError(
        f"there are {n_blocks} blocks of {block_size} tokens to train on, less than one batch of "
        f"{options.batch_size}; give more, a smaller --batch-size or a smaller --context"
    )


def open_heldout(options: TrainOptions, tokenizer: Any) -> list[Block]:
    """Blocks spread over the text that is named to be held out; none where nothing is named.

    Raises RefusedError and CorpusError.
    """
    sources, block_size = heldout_sources(options), options.block
    wanted = wanted_blocks(options, block_size)
    if not sources:
        return []
    if any(source.streaming for source in sources):
        stream = StreamedBlocks(sources, tokenizer, block_size=block_size, boundaries=options.mask_documents)
        found = list(islice(stream.blocks(), wanted))
    else:
        text = concatenate([tokenise(source, tokenizer) for source in sources])
        blocks = Blocks(text, np.arange(len(text)), block_size, boundaries=options.mask_documents)
        spread = np.linspace(0, len(blocks) - 1, min(wanted, len(blocks)))
        found = [blocks[int(number)] for number in spread]
    if not found:
        raise RefusedError(f"the held-out text has less than one block of {block_size} tokens; give more")
    return found


def heldout_sources(options: TrainOptions) -> list[Source]:
    """What is named to be held out: by an option, or by the built-in text. Raises RefusedError and CorpusError."""
    if options.heldout:
        return [parse_source(options.heldout, field=options.field, separator=options.separator)]
    if not options.heldout_fraction:
        return [parse_source("stdlib:heldout")] if options.data == ("stdlib:train",) else []
    sources = parse_sources(options.data, **_how(options))
    parts = [source.part("heldout", options.heldout_fraction) for source in sources]
    if found := [part for part in parts if next(part.read(), None)]:
        return found
    raise RefusedError(
        f"--heldout-fraction {options.heldout_fraction:g} holds out no document of {', '.join(options.data)}; give "
        "more, or text of its own with --heldout"
    )


def _how(options: TrainOptions) -> dict[str, Any]:
    return {
        "field": options.field, "config": options.data_config, "split": options.split,
        "revision": options.data_revision, "streaming": options.streaming, "separator": options.separator,
    }  # fmt: skip
