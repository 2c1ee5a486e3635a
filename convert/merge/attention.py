"""Attention functions of our own, which transformers knows by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# (module, query, key, value, mask, options of transformers) -> (B, T, H, e)
Attend = Callable[..., Tensor]


def attend_sdpa(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
    """(B, H, T, d) queries, (B, G, T, d) keys and (B, G, T, e) values -> (B, T, H, e)."""
    output: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)[0]
    return output


def attend_eager(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
    """The same by the module's own eager function, which also applies its caps and sinks."""
    output: Tensor = sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, mask, **options)[0]
    return output


# By name in transformers: the function, and the function that makes its masks.
PLAIN: dict[str, tuple[Attend, Any]] = {"sdpa": (attend_sdpa, sdpa_mask), "eager": (attend_eager, eager_mask)}


def register(name: str, attend: Attend, mask: Callable[..., Any]) -> None:
    """Let models be built and run whose attention implementation has that name."""
    AttentionInterface.register(name, partial(_attention, attend))
    AttentionMaskInterface.register(name, mask)


def _attention(
    attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    return attend(module, query, key, value, attention_mask, **options), None


def _attend_recorded(
    attend: Attend, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> Tensor:
    """Call `module.gqa_record`, where there is one, with queries, keys, values, mask and options first."""
    if record := getattr(module, "gqa_record", None):
        record(q, k, v, mask, options)
    return attend(module, q, k, v, mask, **options)


def _mask_always(mask: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Always build a mask, even where transformers would skip it."""
    return mask(*args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


for _name, (_attend, _mask) in PLAIN.items():
    register(f"gqa_{_name}", partial(_attend_recorded, _attend), _mask)
    register(f"gqa_{_name}_masked", partial(_attend_recorded, _attend), partial(_mask_always, _mask))
