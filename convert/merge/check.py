"""Compare the converted model with its base model on text that nothing is fitted to.

The text goes through each layer of both models while that layer is calibrated, so that no model is loaded for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa.convert.merge.pair import Pair
from gqa.corpus.likelihood import nats
from gqa.corpus.statistics import paired_ratio

TOKENS = 8192  # that are scored
_COPIES = 16  # blocks whose beginnings are read twice, for recall
_SHORTEST = 16  # tokens of a block that shows recall


class Check:
    """Hidden states of held-out text in both models: `streams`, which `Calibrator.run` takes through each layer."""

    def __init__(self, pair: Pair, blocks: Tensor, state: Mapping[str, Tensor]) -> None:
        """`blocks` (M, T) are token ids; `state`: of an earlier check of the same text, after some layers."""
        self._pair, half = pair, blocks.shape[1] // 2
        lead = int((blocks[:, 0] == blocks[0, 0]).all())  # BOS, which is not repeated
        self._texts = {"text": blocks}
        if blocks.shape[1] >= _SHORTEST:
            self._texts["copies"] = torch.cat([blocks[:_COPIES, :half], blocks[:_COPIES, lead:half]], 1)
        self._first = {"text": 1, "copies": half + 1}  # token that is scored
        self.streams = {name: pair.start({"input_ids": ids}) for name, ids in self._texts.items()}
        for name, states in self.state().items() if state else ():
            states.copy_(state[name])

    def state(self) -> dict[str, Tensor]:
        """Tensors with which another check continues after the last layer."""
        models = ("source", "converted")
        return {
            f"{name} {model}": getattr(both, model).hidden for name, both in self.streams.items() for model in models
        }

    def result(self) -> dict[str, Any]:
        """Perplexity of both models and their ratio with its interval, and recall: the share of tokens of a second copy
        that are the most probable token. After the last layer.
        """
        base, converted = (self._scores("text", model)[0] for model in ("source", "converted"))
        result: dict[str, Any] = {
            "tokens": base.size,
            "perplexity": {"base": float(np.exp(base.mean())), "converted": float(np.exp(converted.mean()))},
            **paired_ratio(converted.ravel(), base.ravel(), np.repeat(np.arange(len(base)), base.shape[1])),
        }
        if "copies" in self._texts:
            hits = {model: self._scores("copies", model)[1] for model in ("source", "converted")}
            result["recall"] = {"base": float(hits["source"].mean()), "converted": float(hits["converted"].mean())}
        return result

    def _scores(self, name: str, model: str) -> tuple[np.ndarray, np.ndarray]:
        """(M, n) nats of the scored tokens of a text, and whether each is the most probable one."""
        ids, first = self._texts[name], self._first[name]
        hidden, losses, hits = getattr(self.streams[name], model).hidden, [], []
        for row, block in enumerate(ids):  # logits of one block at a time
            logits, targets = self._pair.source.logits(hidden[row : row + 1])[0, first - 1 : -1], block[first:]
            losses.append(nats(logits, targets.to(logits.device)).cpu())
            hits.append(logits.argmax(-1).cpu() == targets)
        return torch.stack(losses).double().numpy(), torch.stack(hits).numpy()
