"""What turns gradients into steps: AdamW, Adafactor, or Muon for matrices with AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import decay_groups
from gqa.uptrain.training_model import TrainingModel

_BETAS = (0.9, 0.95)


def make_optimizer(model: TrainingModel, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused), Adafactor with the rate that is given, as in the paper (section 3.1), or Muon. No group of it is
    empty: states have none such.
    """
    every, rate = decay_groups(model, options.weight_decay), options.learning_rate
    groups = [group for group in every if group["params"]]
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        found: torch.optim.Optimizer = Adafactor(
            groups, lr=rate, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return found
    if options.optimizer == "muon":
        tables = (model.model.get_input_embeddings(), model.model.get_output_embeddings())
        return MuonAdamW(every, rate, {id(p) for table in tables if table is not None for p in table.parameters()})
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS, fused=fused)


class MuonAdamW(torch.optim.Optimizer):
    """One optimiser of two: Muon (Jordan et al., 2024) for matrices, in steps of AdamW's size (arXiv 2502.16982,
    section 2.2) so that a rate means the same, and AdamW for all else and for the parameters in `tables`, by id.

    The groups and the state are its own, and those of the two are the same objects.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float, tables: set[int]) -> None:
        def muon(parameter: nn.Parameter) -> bool:
            return parameter.ndim == 2 and id(parameter) not in tables

        decayed, others = groups
        matrices = [p for p in decayed["params"] if muon(p)]
        rest = [decayed | {"params": [p for p in decayed["params"] if not muon(p)]}, others]
        rest = [group for group in rest if group["params"]]
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=rate, betas=_BETAS)] if rest else []
        if matrices:
            how: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": decayed["weight_decay"]}
            self._parts.append(torch.optim.Muon(matrices, lr=rate, **how))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Its own state becomes another object, and the two follow."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of both."""
        for part in self._parts:
            part.step()
