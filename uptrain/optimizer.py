"""The optimisers: AdamW and Adafactor."""

from __future__ import annotations

import torch

from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import parameter_groups
from gqa.uptrain.training_model import TrainingModel


def make_optimizer(model: TrainingModel, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused if the device supports it), or Adafactor with an external learning rate (arXiv 1804.04235, section
    3.1). There is no empty parameter group, which torch's distributed state dicts cannot hold.
    """
    groups = [group for group in parameter_groups(model, options.weight_decay) if group["params"]]
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        adafactor: torch.optim.Optimizer = Adafactor(
            groups, lr=options.learning_rate, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return adafactor
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)
