"""Attention functions that transformers knows by name while a context is open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa.checkpoint.compat import attention_tables

# (module, query, key, value, mask, options of transformers) -> (B, T, H, e)
Attend = Callable[..., Tensor]


@contextmanager
def registered(attention: Mapping[str, Any], masks: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Register functions with transformers by name while the context is open; restore its registries afterwards."""
    tables = tuple(zip(attention_tables(), (attention, masks or {}), strict=True))
    before = [{name: table[name] for name in functions if name in table} for table, functions in tables]
    try:
        for table, functions in tables:
            table.update(functions)
        yield
    finally:
        for (table, functions), known in zip(tables, before, strict=True):
            for name in functions:
                del table[name]
            table.update(known)


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


def layer_attention(record: Callable[..., None] | None = None, always_masked: bool = False) -> Any:
    """A context in which models may be built and run whose attention is named `gqa_sdpa` or `gqa_eager`.

    record: Called before attention is computed, with (module, queries, keys, values, mask, options).
    always_masked: Make masks also where `is_causal` or no mask at all would do.
    """
    functions, masks = {}, {}
    for name, (attend, mask) in PLAIN.items():
        functions[f"gqa_{name}"] = partial(_attend_recorded, attend, record)
        masks[f"gqa_{name}"] = partial(_mask_always, mask) if always_masked else mask
    return registered(functions, masks)


def _mask_always(mask: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return mask(*args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _attend_recorded(
    attend: Attend, record: Callable[..., None] | None, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if record:
        record(module, query, key, value, attention_mask, options)
    return attend(module, query, key, value, attention_mask, **options), None
