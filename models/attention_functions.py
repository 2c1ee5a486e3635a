"""Attention functions of our own, which transformers knows by name.

A model that is built with `attn_implementation="gqa_sdpa"` or `"gqa_eager"` computes attention as
transformers does by `sdpa` or `eager`. Whoever sets the attribute OBSERVER of one of its attention
modules is called with that module's queries, keys and values first. No architecture has to be known
for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# (module, query, key, value, mask, **options of transformers) -> (B, T, H, e)
Attend = Callable[..., Tensor]


def attend_sdpa(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> Tensor:
    """Queries (B, H, T, d), keys (B, G, S, d) and values (B, G, S, e) -> outputs (B, T, H, e)."""
    output: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)[0]
    return output


def attend_eager(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> Tensor:
    """The same by the module's own eager function, which also applies its caps and sinks."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output: Tensor = eager(module, q, k, v, mask, **options)[0]
    return output


OBSERVER = "gqa_observer"  # an attribute of attention modules
# By transformers' name: the function, and the function that makes its masks.
PLAIN: dict[str, tuple[Attend, Any]] = {
    "sdpa": (attend_sdpa, sdpa_mask),
    "eager": (attend_eager, eager_mask),
}


def register(name: str, attend: Attend, mask: Callable[..., Any]) -> None:
    """Let models be built with the attention implementation `name`."""
    AttentionInterface.register(name, partial(_observed_attention, attend))
    AttentionMaskInterface.register(name, mask)


def _observed_attention(
    attend: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    observer = getattr(module, OBSERVER, None)
    if observer is not None:
        observer(query, key, value, attention_mask, options)

    return attend(module, query, key, value, attention_mask, **options), None


for _name, (_attend, _mask) in PLAIN.items():
    register(f"gqa_{_name}", _attend, _mask)
