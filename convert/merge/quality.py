"""Compare the converted with the base model on held-out text while layers are calibrated.

The text advances with every layer of both models, so no model is loaded for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa.convert.merge.layer import Stream
from gqa.convert.merge.pair import ModelPair, StreamPair
from gqa.corpus.likelihood import nats
from gqa.corpus.statistics import paired_ratio

CHECKED_TOKENS = 8192  # tokens of the comparison with the base model, at most
_RECALL_BLOCKS = 16  # whose beginnings are read twice
_SHORTEST_RECALL_BLOCK = 16  # tokens of a block that shows recall


@dataclass(frozen=True)
class _Scored:
    """A text that both models read: token ids (M, T), of which those from `first` on are scored."""

    ids: Tensor
    first: int
    states: StreamPair


class QualityCheck:
    """Held-out text in both models, scored after the last layer."""

    def __init__(self, pair: ModelPair, blocks: Tensor) -> None:
        """Add the text to those that advance with every layer. blocks: (M, T) token ids."""
        self._pair = pair
        self._text = self._add(blocks, first=1)

        self._copies: _Scored | None = None
        if blocks.shape[1] >= _SHORTEST_RECALL_BLOCK:
            half = blocks.shape[1] // 2
            has_bos = int((blocks[:, 0] == blocks[0, 0]).all())  # which is not repeated
            original = blocks[:_RECALL_BLOCKS, :half]
            copy = blocks[:_RECALL_BLOCKS, has_bos:half]
            self._copies = self._add(torch.cat([original, copy], 1), first=half + 1)

    def _add(self, ids: Tensor, first: int) -> _Scored:
        return _Scored(ids, first, self._pair.add_text({"input_ids": ids}))

    def result(self) -> dict[str, Any]:
        """Perplexity of both models and their ratio with its interval, and recall.

        Recall is the share of the tokens of a second copy that are the most probable token.
        """
        base, _ = self._scores(self._text, self._text.states.base)
        converted, _ = self._scores(self._text, self._text.states.converted)
        blocks, tokens = base.shape
        result: dict[str, Any] = {
            "tokens": base.size,
            "context": self._text.ids.shape[1],
            "perplexity": {
                "base": float(np.exp(base.mean())),
                "converted": float(np.exp(converted.mean())),
            },
            **paired_ratio(converted.ravel(), base.ravel(), np.repeat(np.arange(blocks), tokens)),
        }

        if self._copies:
            _, base_hits = self._scores(self._copies, self._copies.states.base)
            _, converted_hits = self._scores(self._copies, self._copies.states.converted)
            result["recall"] = {
                "base": float(base_hits.mean()),
                "converted": float(converted_hits.mean()),
            }
        return result

    def _scores(self, text: _Scored, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """(M, n) nats of the scored tokens, and whether each is the most probable one."""
        losses = []
        hits = []
        for row, block in enumerate(text.ids):  # logits of one block at a time
            hidden = stream.hidden[row : row + 1, text.first - 1 : -1]
            logits = self._pair.base_model.logits(hidden)[0]
            targets = block[text.first :]
            losses.append(nats(logits, targets.to(logits.device)).cpu())
            hits.append(logits.argmax(-1).cpu() == targets)
        return torch.stack(losses).double().numpy(), torch.stack(hits).numpy()
