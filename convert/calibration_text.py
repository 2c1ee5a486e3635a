"""The text that heads are calibrated on: sources of `gqa.corpus`, and `self`, what the model itself writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa.convert.checkpoint import Checkpoint
from gqa.convert.errors import RefusedError, explain
from gqa.corpus.alpha import select
from gqa.corpus.document import CorpusError
from gqa.corpus.sources import parse_sources
from gqa.corpus.tokens import tokenise

_SELF = re.compile(r"self(?::(\d+)([KkMm]?))?(?:@([\d.]+))?")
_COUNTS = {"": 1, "k": 1000, "m": 1_000_000}


@dataclass(frozen=True)
class CalibrationText:
    """`sources` as `parse_sources` reads them, or `self[:TOKENS][@WEIGHT]`; `tokens` in all, in blocks of `length`."""

    sources: tuple[str, ...] = ("self",)
    tokens: int = 65_536
    length: int = 256
    seed: int = 0

    def blocks(self, checkpoint: Checkpoint, device: str, progress: Callable[[int], None]) -> Tensor:
        """(N, length) token ids. Raises RefusedError and CorpusError."""
        shares = self._shares()
        parts = []
        for source, tokens in shares:
            if _SELF.fullmatch(source):
                parts.append(self._sampled(checkpoint, tokens, device, progress))
            else:
                parts.append(self._read(checkpoint, source, tokens))
                progress(parts[-1].numel())
        return torch.cat(parts)

    def _shares(self) -> Sequence[tuple[str, int]]:
        """Tokens of each source: what `self:TOKENS` says, and of the rest the share of its weight."""
        fixed: dict[int, int] = {}
        weights: dict[int, float] = {}
        for index, source in enumerate(self.sources):
            match = _SELF.fullmatch(source)
            if match and match[1]:
                fixed[index] = int(match[1]) * _COUNTS[match[2].lower()]
            else:
                weights[index] = float(source.rpartition("@")[2]) if "@" in source else 1.0
        total = sum(weights.values())
        counts = fixed | {index: int(self.tokens * weight / total) for index, weight in weights.items()}
        if short := [self.sources[index] for index, count in counts.items() if count < self.length]:
            raise RefusedError(
                f"{short[0]} gives fewer tokens than one block of {self.length}; give more --calibration-tokens"
            )
        return [(source, counts[index]) for index, source in enumerate(self.sources)]

    def _read(self, checkpoint: Checkpoint, source: str, tokens: int) -> Tensor:
        tokenizer = load_tokenizer(checkpoint)
        found = parse_sources((source.rpartition("@")[0] or source,))[0]
        text = tokenise(found, tokenizer)
        if int(text.lengths.sum()) < self.length:
            raise RefusedError(
                f"{source} has {int(text.lengths.sum())} tokens, fewer than one block of {self.length}; give more text"
            )
        count = min(tokens, int(text.lengths.sum()))
        chosen = select(text, block_size=self.length, seed=self.seed, tokens=count // self.length * self.length)
        vocabulary = checkpoint_vocabulary(checkpoint)
        blocks = torch.stack([torch.from_numpy(chosen.blocks[i]["input_ids"]) for i in range(len(chosen.blocks))])
        if int(blocks.max()) >= vocabulary:
            raise RefusedError(
                f"the tokenizer of {checkpoint.name} gives token {int(blocks.max())}, its embedding has {vocabulary}; "
                "they do not belong together"
            )
        return blocks

    def _sampled(self, checkpoint: Checkpoint, tokens: int, device: str, progress: Callable[[int], None]) -> Tensor:
        from gqa.convert.loading import load_model
        from gqa.convert.sampling import sample_blocks

        model = load_model(str(checkpoint.directory), dtype="float32" if device == "cpu" else "auto", device=device)
        return sample_blocks(model, tokens, self.length, seed=self.seed, progress=progress)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer. Raises RefusedError where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint.directory))
    except Exception as error:  # whatever a library raises about files that it cannot read
        raise RefusedError(
            f"the tokenizer of {checkpoint.name} cannot be loaded ({explain(error)}); add its files, or use self"
        ) from None


def checkpoint_vocabulary(checkpoint: Checkpoint) -> int:
    from gqa.convert.model_config import read_config

    return int(read_config(checkpoint.config, checkpoint.name).text.vocab_size)


__all__ = ["CalibrationText", "CorpusError", "load_tokenizer"]
