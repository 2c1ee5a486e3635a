"""Short calibrations of tiny models, and their plans."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gqa.convert.api import Plan, plan_conversion
from gqa.convert.merge.options import Refinement

SHORT = Refinement(steps=8, blocks_per_step=8, learning_rate=0.02, validation=0.25)


def plan_of(source: Path, method: str = "calibrated", groups: int = 2) -> Plan:
    return plan_conversion(source, groups, method=method)


def pairs(high: int, padding: int = 0) -> dict[str, Tensor]:
    """32 sources of 24 tokens and targets of 16; behind them,
    `padding` other ones that are none.
    """
    generator = torch.Generator().manual_seed(0)
    made, real = dict[str, Tensor](), {24: "attention_mask", 16: "decoder_attention_mask"}
    for length, name in ((24, "input_ids"), (16, "decoder_input_ids")):
        ids = torch.randint(10, high, (32, length), generator=generator)
        mask = torch.ones(32, length + padding, dtype=torch.long)
        mask[:, length:] = 0
        made |= {name: torch.cat([ids, ids[:, :padding].flip(1)], 1), real[length]: mask}
    return made
