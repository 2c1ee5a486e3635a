"""How maps are computed. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from gqa.convert.merge.calibration_text import CalibrationText

TOKENS_AT_ONCE = 8192  # tokens that go through a layer together, unless one block has more


@dataclass(frozen=True)
class Refinement:
    """Training of `refined`.

    Attributes:
        steps: Steps for each attention module.
        blocks_per_step: The most blocks of a step.
        tokens_per_step: The most tokens of a step, unless one block has more. With blocks of 1,024
            tokens, 8 of them instead of 4 take much longer and gain little (docs/tried.md).
        learning_rate: Relative to the size of each tensor; it falls linearly to zero.
        validation: The share of the blocks that is not trained on; their error selects the best
            step.
        autocast: Whether to multiply in bfloat16; None: if the device does so natively.
        seed: Of the choice of blocks.
    """

    steps: int = 200
    blocks_per_step: int = 8
    tokens_per_step: int = 4096
    learning_rate: float = 0.01
    validation: float = 1 / 16
    autocast: bool | None = None
    seed: int = 0

    def blocks_of_step(self, length: int) -> int:
        """Blocks of a step, of so many tokens each."""
        return max(1, min(self.blocks_per_step, self.tokens_per_step // length))


@dataclass(frozen=True)
class MapsOptions:
    """How maps are computed; methods that read weights alone use `grouping` and `device` only.

    Attributes:
        text: The calibration text.
        grouping: `contiguous`; `auto` searches for the groups with the least loss.
        ridge: How many tokens of text the base model's W_O counts as in the refit of W_O.
        refinement: The training of `refined`.
        precision: The dtype in which layers run.
        device: On which they run.
        most_blocks: The most blocks that go through a layer at a time.
        check: Whether to compare both models on held-out text.
    """

    text: CalibrationText = field(default_factory=CalibrationText)
    grouping: str = "auto"
    ridge: float = 2_000.0
    refinement: Refinement = field(default_factory=Refinement)
    precision: str = "float32"
    device: str = "cpu"
    most_blocks: int = 8
    check: bool = False

    @property
    def blocks_at_once(self) -> int:
        """Blocks that go through a layer at a time: together at most TOKENS_AT_ONCE tokens."""
        return max(1, min(self.most_blocks, TOKENS_AT_ONCE // self.text.length))
