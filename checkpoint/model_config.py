"""What every command does with a config.json before transformers reads it.

Numbers that size something are compared with the headers and with sane bounds, as transformers
builds whatever they say: a module for each layer, a list for each rotated dimension, a table for
each position. And entries that say how a model is run, not what it computes, are set aside:
fine-tuning leaves them behind, and some name code to be fetched.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from typing import Any

from gqa.core.errors import EntryError

MAX_COUNT = 20_000  # layers, heads, blocks, experts
MAX_POSITIONS = 10**8  # of positions and tokens; ten times those of the longest published models
# Positions of encoder-decoders, some of which compute a table of sinusoids in Python; published
# ones have up to 16,384.
MAX_COMPUTED_POSITIONS = 100_000
# Names of keys that count modules: large values would exhaust time and memory.
_COUNTS = re.compile(
    r"(\w+_)?(layers?|heads?|blocks|depth|codebooks|quantizers|labels|experts|stages)"
)
# Those that count layers with tensors of their own.
_LAYERS = re.compile(r"(num_hidden|num|n|encoder|decoder|num_encoder|num_decoder)_layers?|depth")
# Those that are a dimension of some stored tensor.
_SIZES = re.compile(
    r"(\w+_)?(hidden|intermediate)_size|d_model|d_ff|n_embd|(\w+_)?ffn_dim|(\w+_)?head_dim|rotary_dim"
)
_MOST_PACKED = 8  # numbers of a quantized model in one stored number
# Rows of tables that need not be stored: positions may be computed, and the vocabulary of an outer
# config may be stale.
_POSITIONS = re.compile(
    r"max_position_embeddings|max_(source|target)_positions|n_positions|n_ctx|max_seq_len\w*"
    r"|(\w+_)?vocab_size"
)
# Shares of a head's dimensions.
_SHARES = re.compile(r"partial_rotary_factor|rotary_pct|rope_pct|rotary_percent\w*")

# How a model is run: what it returns, which implementation computes it, what it keeps for the next
# token. transformers writes some of them into config.json. An implementation may name a repository
# of kernels at the hub, and transformers then fetches and runs these. Every command runs models in
# its own way.
RUN_FLAGS = frozenset(
    (
        "return_dict",
        "use_return_dict",
        "torchscript",
        "use_cache",
        "gradient_checkpointing",
        "chunk_size_feed_forward",
        "output_attentions",
        "_output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
    )
)
_SEARCH_SECONDS = 3.0  # of computing, for the key that makes a config unreadable
_searching: ContextVar[bool] = ContextVar("searching", default=False)


def parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and every config, or other object, inside it."""
    yield raw
    for value in raw.values():
        if isinstance(value, dict):
            yield from parts(value)


def has_run_flags(raw: dict[str, Any]) -> bool:
    """Whether `without_run_flags` leaves something out."""
    return any(RUN_FLAGS & part.keys() for part in parts(raw))


def without_keys(raw: dict[str, Any], keys: AbstractSet[str]) -> dict[str, Any]:
    """A copy of a config, and of every config inside it, without some keys."""
    copied = copy.deepcopy(raw)
    for part in parts(copied):
        for key in keys & part.keys():
            del part[key]
    return copied


def without_run_flags(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config, and of every config inside it, without `RUN_FLAGS`."""
    return without_keys(raw, RUN_FLAGS)


def check_numbers(raw: dict[str, Any], name: str) -> None:
    """Raise EntryError for numbers of modules, positions and rotated dimensions that no model
    has.
    """
    for part in parts(raw):
        for key, value in part.items():
            if _COUNTS.fullmatch(key) and _exceeds(value, MAX_COUNT):
                raise wrong(name, key, value, f"at most {MAX_COUNT} are allowed")

            most = _most_positions(part, key)
            if _POSITIONS.fullmatch(key) and _exceeds(value, most):
                raise wrong(name, key, value, f"at most {most} are allowed")

            if _SHARES.fullmatch(key) and value is not None and not _is_share(value):
                raise wrong(name, key, value, "a number from 0 to 1 is allowed")


def _most_positions(part: dict[str, Any], key: str) -> int:
    """The greatest allowed value of a key that counts positions or tokens, in this config."""
    has_decoder = not part.keys().isdisjoint(("decoder_layers", "num_decoder_layers"))
    if has_decoder and not key.endswith("vocab_size"):
        return MAX_COMPUTED_POSITIONS
    return MAX_POSITIONS


def check_against_headers(raw: dict[str, Any], name: str, tensors: int, largest: int) -> None:
    """Compare a config with the headers of the weights.

    Args:
        raw: config.json.
        name: The checkpoint's name, for the error.
        tensors: Number of stored tensors; each layer has one at least.
        largest: Count of numbers in the largest of them.

    Raises:
        EntryError: The config has more layers than `tensors`, or a dimension greater than
            `largest`.
    """
    for part in parts(raw):
        for key, value in part.items():
            if _LAYERS.fullmatch(key) and _exceeds(value, tensors):
                contradiction = f"its weights are {tensors} tensors, at least one for each layer"
                raise wrong(name, key, value, contradiction)
            if _SIZES.fullmatch(key) and _exceeds(value, _MOST_PACKED * largest):
                raise wrong(name, key, value, f"its largest tensor has {largest:,} numbers")


def _exceeds(value: Any, limit: int) -> bool:
    return is_number(value) and value > limit


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def wrong(name: str, key: str, value: Any, allowed: str) -> EntryError:
    """The error for a value of config.json.

    Args:
        name: The checkpoint's name.
        key: The key in config.json.
        value: Its value.
        allowed: What would be allowed, or what the value contradicts.
    """
    return EntryError(f"{name}: config.json says {key}: {shown(value)}, but {allowed}; correct it")


def shown(value: Any, limit: int = 80) -> str:
    """A value as config.json has it, cut to so many characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]} ..."


def culprit(raw: dict[str, Any], read: Callable[[dict[str, Any]], object]) -> str:
    """`KEY: VALUE`, the entry without which `read` takes a config that it refuses.

    Empty if no entry is the only cause, or if `read` is too slow to find it. `read` may call this
    function, too: the inner call finds nothing, as the outer one is searching already.
    """
    if _searching.get():
        return ""

    token = _searching.set(True)
    try:
        return _search(raw, read)
    finally:
        _searching.reset(token)


def _search(raw: dict[str, Any], read: Callable[[dict[str, Any]], object]) -> str:
    """`culprit`, by reading the config without one entry after the other."""
    end = time.thread_time() + _SEARCH_SECONDS
    if _takes(read, raw):
        return ""

    for path in _paths(raw):
        if time.thread_time() > end:
            break
        shortened = copy.deepcopy(raw)
        value = _remove(shortened, path)
        if _takes(read, shortened):
            return f"{'.'.join(path)}: {shown(value)}"
    return ""


def _takes(read: Callable[[dict[str, Any]], object], raw: dict[str, Any]) -> bool:
    """Whether `read` accepts a config."""
    try:
        read(raw)
    except Exception:  # whatever transformers raises about a config
        return False
    return True


def _paths(raw: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each entry, inner ones first, without those that name a model type."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))
        if key != "model_type":
            yield (*above, key)


def _remove(raw: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Remove the entry at a path and return its value."""
    *above, key = path
    for step in above:
        raw = raw[step]
    return raw.pop(key)
