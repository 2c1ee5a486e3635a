"""Which method merges the heads of a model where none is named: the best that needs nothing but its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.blocks import can_guess_inputs
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.methods import METHODS, best


@dataclass(frozen=True)
class Choice:
    """A method, and `why` it is the best of those that look at weights alone, in words."""

    method: str
    why: str

    @property
    def needs_training(self) -> bool:
        """Whether it is the last resort: what it makes is of little use as it is."""
        return not METHODS[self.method].aligns


def choose(checkpoint: Checkpoint, config: ModelConfig, modules: Iterable[AttentionModule]) -> Choice:
    """By what is known of the attention of a model type, and by what its layers hold beside it."""
    if isinstance(config.symmetry, str):
        return Choice(next(iter(METHODS)), f"heads of {config.text.model_type} cannot be aligned: {config.symmetry}")
    known = can_guess_inputs(checkpoint, config, modules)
    (found,) = best(lambda method: method.needs == "weights" and (known or not method.guesses))
    return Choice(found, f"what its layers are given can{'' if known else 'not'} be guessed from the weights")
