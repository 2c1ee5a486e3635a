"""Attention functions that transformers knows by name for a while, and modules whose attention is looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# (module, query, key, value, mask, options of transformers) -> (B, T, H, e)
Attend = Callable[..., Tensor]

# What computes the attention of single modules, of models made with `watchable` functions, while they are looked at.
WATCHED: dict[nn.Module, Attend] = {}


@contextmanager
def registered(attention: Mapping[str, Any], masks: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Meanwhile transformers finds these functions by their names; afterwards its registries are as they were."""
    # The tables of the classes: masks are looked up in no other.
    tables = (
        (ALL_ATTENTION_FUNCTIONS._global_mapping, attention),
        (ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, masks or {}),
    )
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
    """The same by the class' own function, which also knows its caps and sinks."""
    output: Tensor = sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, mask, **options)[0]
    return output


# By their names in transformers, and how these want their masks.
PLAIN: dict[str, tuple[Attend, Any]] = {"sdpa": (attend_sdpa, sdpa_mask), "eager": (attend_eager, eager_mask)}


def watchable(always_masked: bool = False) -> Any:
    """A context in which models may be made and run whose attention is called `gqa_sdpa` or `gqa_eager`;
    `always_masked`: with a mask also where it hides nothing that attention would see.
    """
    masks = {f"gqa_{name}": _unskipped(mask) if always_masked else mask for name, (_, mask) in PLAIN.items()}
    return registered({f"gqa_{name}": _unless_watched(attend) for name, (attend, _) in PLAIN.items()}, masks)


def _unskipped(mask: Callable[..., Any]) -> Callable[..., Any]:
    def always(*given: Any, **told: Any) -> Any:
        return mask(*given, **told | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    return always


def _unless_watched(plain: Attend) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        return WATCHED.get(module, plain)(module, query, key, value, attention_mask, **options), None

    return attention
