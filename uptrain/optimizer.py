"""What turns gradients into steps: AdamW, also with a state of 8 bits or weights in bfloat16, Adafactor, or Muon for
matrices with AdamW for the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from gqa.checkpoint.errors import RefusedError
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.scope import decay_groups
from gqa.uptrain.training_model import TrainingModel

_BETAS = (0.9, 0.95)


def make_optimizer(model: TrainingModel, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused, or torchao's), Adafactor with the rate that is given, as in the paper (section 3.1), or Muon. No
    group of it is empty: states have none such.
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
    if options.of_torchao:
        optim, at_random = torchao_optim(options.of_torchao), options.weights == "bfloat16"
        kind = optim.AdamW8bit if options.optimizer == "adamw-8bit" else optim._AdamW
        made: torch.optim.Optimizer = kind(groups, lr=rate, betas=_BETAS, bf16_stochastic_round=at_random)
        return made
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS, fused=fused)


def torchao_optim(wanted: str) -> Any:
    """torchao's optimisers. Raises RefusedError where an option wants them that are not installed."""
    try:
        from torchao import optim
    except ImportError:
        raise RefusedError(f"{wanted} needs torchao; install it with: pip install torchao") from None
    return optim


def set_rate(optimizer: Any, rate: float) -> None:
    """The rate of the next step. torchao compiles its steps, for which it is a tensor."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate


def _quantised(value: Any) -> bool:
    """Whether it is a tensor of torchao's, or shards that are."""
    return isinstance(value, Tensor) and type(_local(value)).__module__.startswith("torchao.")


def _local(value: Tensor) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _plain(value: Tensor) -> Tensor:
    """The same tensor; of one of 8 bits float32 in the memory of the host, where there is room for all of them."""
    if not _quantised(value):
        return value
    whole: Tensor = _local(value).dequantize(torch.float32)
    if isinstance(value, DTensor):
        place: dict[str, Any] = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        whole = DTensor.from_local(whole, value.device_mesh, value.placements, **place)
    return whole.cpu()


def plain_moments(moments: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state dict with float32 for numbers of 8 bits: what any number of shards can read."""
    found: dict[str, Any] = tree_map_only(Tensor, _plain, moments)
    return found


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of state dicts that training does not change, of an optimiser's as `plain_moments`."""

    def copied(value: Tensor) -> Tensor:
        found = _plain(value)
        return found.to("cpu", copy=found is value)

    found: dict[str, Any] = tree_map_only(Tensor, copied, state)
    return found


def restored_moments(moments: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """What was `plain_moments(moments)` and has been read since, rounded to 8 bits again."""
    for name, own in moments["state"].items():
        for key, value in own.items():
            if _quantised(value):
                local = _local(value)
                local.copy_(_local(read["state"][name][key]).to(local.device))
                read["state"][name][key] = value
    return read


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
