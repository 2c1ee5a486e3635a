"""The text that heads are calibrated on: sources of `gqa.corpus`, and `self`, what the model itself writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.heads.config import read_config
from gqa.corpus.alpha import permutation
from gqa.corpus.repeats import mixed
from gqa.corpus.sources import Source, is_self, parse_self, parse_sources, split_weight, text_digest
from gqa.corpus.tokens import Encoder, Ints

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHARACTERS = 256  # of text that are looked at for every token that is taken, which is some four of them


@dataclass(frozen=True)
class CalibrationText:
    """`sources` as `parse_sources` reads them, or `self[:plain][:TOKENS][@WEIGHT]`; `tokens` in all, in blocks of
    `length`. `field` is the column of text of files and data sets. `repeats`: half of the blocks repeat themselves
    (`gqa.corpus.repeats`), but those of `self:plain`.
    """

    sources: tuple[str, ...] = ("self",)
    tokens: int = 65_536
    length: int = 256
    seed: int = 0
    field: str = "text"
    repeats: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.length < 2:
            raise RefusedError(
                f"{self.tokens} tokens in blocks of {self.length}: give at least 1 token, and 2 in a block"
            )

    def blocks(self, checkpoint: Checkpoint, device: str, progress: Callable[[int], None]) -> Tensor:
        """(N, length) token ids. Raises RefusedError and CorpusError."""
        parts = []
        for source, tokens in self._shares():
            if is_self(source):
                parts.append(self._sampled(checkpoint, source, tokens, device, progress))
            else:
                parts.append(self._repeated(self._read(checkpoint, source, tokens)))
                progress(parts[-1].numel())
        return torch.cat(parts)

    def identify(self) -> list[str]:
        """What the content of each source is, as a hash; of what the model writes its name. Raises CorpusError."""
        return [s if is_self(s) else self._parse(s).identify() for s in self.sources]

    def _shares(self) -> Sequence[tuple[str, int]]:
        """Tokens of each source: what `self:TOKENS` says, and of the rest the share of its weight."""
        fixed = [(parse_self(source).tokens or 0) if is_self(source) else 0 for source in self.sources]
        weights = [0.0 if f else split_weight(s)[1] or 1.0 for f, s in zip(fixed, self.sources, strict=True)]
        total = sum(weights) or 1.0
        counts = [f or int(self.tokens * weight / total) for f, weight in zip(fixed, weights, strict=True)]
        shares = list(zip(self.sources, counts, strict=True))
        if short := [source for source, tokens in shares if tokens < self.length]:
            raise RefusedError(
                f"{short[0]} gives less than a block of {self.length} tokens; give more calibration tokens (--tokens)"
            )
        return shares

    def _parse(self, source: str) -> Source:
        return parse_sources((source,), field=self.field)[0]

    def _read(self, checkpoint: Checkpoint, source: str, tokens: int) -> Tensor:
        """Pieces of many documents, which say more than a few whole ones. No more is tokenised than they come from:
        documents in an order that hashes of their texts and the seed decide, as many as hold _CHARACTERS a token.
        """
        encoder, found = Encoder(load_tokenizer(checkpoint, instead="use self")), self._parse(source)
        digests, characters = zip(*((text_digest(one.text), len(one.text)) for one in found.documents()), strict=True)
        order = permutation(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32), self.seed)
        reached, wanted = np.cumsum(np.array(characters)[order]), _CHARACTERS * tokens
        stream = _encoded(found, order[: int(np.searchsorted(reached, wanted)) + 1], encoder)
        if len(stream) < tokens:  # long words
            stream = _encoded(found, order, encoder)
        if len(stream) < self.length:
            raise RefusedError(
                f"{source} has {len(stream)} tokens, fewer than one block of {self.length}; give more text"
            )
        pieces = stream[: len(stream) // self.length * self.length].reshape(-1, self.length)
        spread = np.linspace(0, len(pieces) - 1, min(tokens // self.length, len(pieces))).astype(int)
        blocks = torch.from_numpy(pieces[spread])
        vocabulary = read_config(checkpoint.config, checkpoint.name).text.vocab_size
        if int(blocks.max()) >= vocabulary:
            raise RefusedError(
                f"the tokenizer of {checkpoint.name} gives token {int(blocks.max())}, its embedding has {vocabulary}; "
                "they do not belong together"
            )
        return blocks

    def _repeated(self, blocks: Tensor) -> Tensor:
        """A part of them repeating itself, in the shares of what a model writes."""
        if not self.repeats:
            return blocks
        plain = blocks.numpy()
        lead = int((plain[:, 0] == plain[0, 0]).all())
        return torch.from_numpy(
            np.stack([mixed(lambda n: plain[n], index, self.seed, lead) for index in range(len(plain))])
        )

    def _sampled(
        self, checkpoint: Checkpoint, source: str, tokens: int, device: str, progress: Callable[[int], None]
    ) -> Tensor:
        from gqa.checkpoint.loading import load_model
        from gqa.convert.align.self_samples import sampled_blocks

        def load(dtype: str) -> PreTrainedModel:
            return load_model(str(checkpoint.directory), dtype=dtype, device=device)

        n_blocks, plain = -(-tokens // self.length), parse_self(source).plain or not self.repeats
        found = sampled_blocks(load, device, checkpoint, self.length, n_blocks, self.seed, plain, progress)
        return torch.stack([torch.from_numpy(found[index]["input_ids"]) for index in range(len(found))])


def _encoded(source: Source, chosen: Ints, encoder: Encoder) -> Ints:
    """The tokens of the documents of these numbers, one after the other in their order."""
    numbers = set(chosen.tolist())
    read = (found for number, found in enumerate(source.documents()) if number in numbers)
    parts = dict(zip(sorted(numbers), (np.array(tokens, np.int64) for _, tokens in encoder.encode(read)), strict=True))
    return np.concatenate([parts[number] for number in chosen.tolist()])
