"""What a measured loss of quality means, in three levels.

Every command and every report takes its verdict from here.

Why these thresholds:

- x1.05: what weights of 3 bits cost, which many people run (llama.cpp's Q3_K_M: Llama 2 70B
  x1.047).
- x1.5: more than a model of a third to a tenth of the parameters costs (Qwen2 on WikiText-2, 0.5B
  against 1.5B: x1.45, 1.5B against 7B: x1.32, 7B against 72B: x1.42). A smaller base model is then
  the better way to save memory.
- 2 points of recall: about two standard errors of a share of the 2,000 tokens that a conversion
  scores, so a smaller loss may be chance.
- 10 points of recall: of passages of seven tokens, a name or a number, half are copied with an
  error that the base model does not make (0.9 ** 7 = 0.48).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "trade-off", "damaged"]

GOOD_RATIO = 1.05
DAMAGED_RATIO = 1.5
GOOD_RECALL_LOSS = 0.02
DAMAGED_RECALL_LOSS = 0.10

LEGEND = (
    f"good: the interval ends at x{GOOD_RATIO} or below, and recall falls by at most "
    f"{100 * GOOD_RECALL_LOSS:.0f} points; damaged: the ratio is above x{DAMAGED_RATIO}, or recall "
    f"falls by more than {100 * DAMAGED_RECALL_LOSS:.0f} points; trade-off: between them"
)

MEANINGS: dict[Level, str] = {
    "good": "hardly worse than the base model",
    "trade-off": "quality was lost; training recovers a part of it",
    "damaged": "not usable as it is",
}


@dataclass(frozen=True)
class Loss:
    """Quality that a model has lost against its base model. What was not measured is None.

    ratio: Perplexity of the model / perplexity of the base model; NaN if one of them is not finite.
    ratio_high: Upper bound of the 95% interval of the ratio.
    recall_loss: Recall of the base model - recall of the model, as shares of 1.
    """

    ratio: float | None
    ratio_high: float | None = None
    recall_loss: float | None = None

    @property
    def level(self) -> Level | None:
        """The worst level of what was measured; None if nothing was.

        A model is only called good if the interval allows no other level. It is called damaged by
        the ratio itself: an interval is wide where little text was scored, which is no reason to
        warn.
        """
        if self.ratio is None and self.recall_loss is None:
            return None
        if self._is_damaged():
            return "damaged"
        return "good" if self._is_good() else "trade-off"

    def _is_damaged(self) -> bool:
        # `not <=` also holds for NaN.
        damaged_ratio = self.ratio is not None and not self.ratio <= DAMAGED_RATIO
        damaged_recall = (
            self.recall_loss is not None and not self.recall_loss <= DAMAGED_RECALL_LOSS
        )
        return damaged_ratio or damaged_recall

    def _is_good(self) -> bool:
        highest = self.ratio if self.ratio_high is None else self.ratio_high
        good_ratio = highest is None or highest <= GOOD_RATIO
        good_recall = self.recall_loss is None or self.recall_loss <= GOOD_RECALL_LOSS
        return good_ratio and good_recall
