"""The numbers in a row of a study, and the columns of its table.

What is measured on text comes from the list of metrics in `gqa.eval.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from gqa.convert.heads.kv_cache import KVCache
from gqa.eval.metrics import METRICS, RECALL_KINDS, recall_by_kind, recall_key
from gqa.eval.page import Column
from gqa.study.options import BASE, UNMERGED
from gqa.study.rows import Row


def row_numbers(
    record: Mapping[str, Any], cache: KVCache | None, base_cache: KVCache | None
) -> Row:
    """The numbers in the row of a model.

    Args:
        record: What `Comparison.measure` measured of the model. A record without
            `against_baseline` is that of the base model.
        cache: The KV cache of the model.
        base_cache: The KV cache of the base model.
    """
    # `Subject.cache` is None only for models that cannot be converted.
    assert cache is not None
    assert base_cache is not None

    # Compared with itself, the base model loses nothing.
    compared = {"against_baseline": {"log_ratio": 0.0}, **record}
    numbers: Row = {}
    for metric in METRICS:
        for number in metric.row:
            numbers[number.key] = _look_up(compared, number.path)

    numbers["kv_bytes_per_token"] = cache.bytes_per_token
    numbers["kv_share"] = cache.bytes_per_token / base_cache.bytes_per_token
    if cache.cross_bytes_per_token:
        numbers["cross_bytes_per_token"] = cache.cross_bytes_per_token  # per source token

    if "recall" in record:
        for kind, share in recall_by_kind(record).items():
            numbers[recall_key(kind)] = share
        numbers["greedy_tokens"] = record["greedy"]["tokens"]
        numbers["recall_by_distance"] = record["recall"]
    return numbers


def _look_up(record: Mapping[str, Any], path: str) -> Any:
    """The value at a path like `quality.nats_per_token`, or None."""
    value: Any = record
    for key in path.split("."):
        if key not in value:
            return None
        value = value[key]
    return value


def _method(row: Mapping[str, Any]) -> str:
    return BASE if row["method"] == UNMERGED else str(row["method"])


METHOD = Column("method", _method)
KV_HEADS = Column("KV heads", "{groups}")
CACHE = Column("KV bytes/token", "{kv_bytes_per_token:,.0f}")

# The table of all configurations; `row["level"]` is the level of the verdict.
COLUMNS = [
    METHOD,
    KV_HEADS,
    Column("alpha", "{alpha:g}"),
    Column("error", lambda row: row["error"] or ""),
    Column("verdict", lambda row: row["level"] or ""),
    Column("trains", lambda row: row["train"] or ""),
    Column("train tokens", "{train_tokens:,}"),
    *chain.from_iterable(metric.study_columns for metric in METRICS),
    *(Column(kind.study_title or kind.name, f"{{{kind.row_key}:.1%}}") for kind in RECALL_KINDS),
    Column("greedy tokens", "{greedy_tokens:.1f}"),
    CACHE,
    Column("s converting", "{seconds_converting:,.1f}"),
    Column("s training", "{seconds_training:,.1f}"),
    Column("s measuring", "{seconds_evaluating:,.1f}"),
]
