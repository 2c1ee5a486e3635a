"""The numbers of a row, and the columns of the tables that show them.

Those that are measured on text come from the lists of `gqa.eval.metrics`.
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
    """The numbers in the row of a cell.

    Args:
        record: Measurements of the cell's model, by `Comparison.measure`. Without
            `against_baseline` they are those of the base model.
        cache: KV cache of the cell's model.
        base_cache: KV cache of the base model.
    """
    assert cache, "a study converts only models whose KV heads are known"
    assert base_cache, "a study converts only models whose KV heads are known"
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
    """What stands at a path like `quality.nats_per_token`; None if nothing does."""
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

# Of the table of all cells. `level` is that of the verdict.
COLUMNS = [
    METHOD,
    KV_HEADS,
    Column("alpha", "{alpha:g}"),
    Column("error", lambda row: row["error"] or ""),
    Column("verdict", lambda row: row["level"] or ""),
    Column("trains", lambda row: row["train"] or ""),
    Column("train tokens", "{train_tokens:,}"),
    *chain.from_iterable(metric.study_columns for metric in METRICS),
    *(Column(kind.study_title, f"{{{kind.row_key}:.1%}}") for kind in RECALL_KINDS),
    Column("greedy tokens", "{greedy_tokens:.1f}"),
    CACHE,
    Column("s converting", "{seconds_converting:,.1f}"),
    Column("s training", "{seconds_training:,.1f}"),
    Column("s measuring", "{seconds_evaluating:,.1f}"),
]
