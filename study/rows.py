"""The rows of a study: one per cell, appended to results.jsonl as soon as the cell is measured.

`pandas.read_json("results.jsonl", lines=True)` reads it. A failed cell is measured again; its
latest row counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gqa.checkpoint.write import finite, system_errors
from gqa.core.errors import RefusedError
from gqa.core.json_text import parse_json
from gqa.eval.page import PAGE
from gqa.eval.report import recall_by_kind
from gqa.study.options import ADVICE, Cell

Row = dict[str, Any]

ROWS = "results.jsonl"
FILES = (PAGE, "alphas.svg", "tradeoff.svg", ROWS)


def columns_of(record: Row, cache: Any, base_cache: Any) -> Row:
    """Columns of a row from `Comparison.measure` of a model and the computed KV caches
    (`Subject.cache`).
    """
    quality, against = record["quality"], record.get("against_baseline", {"log_ratio": 0.0})
    row: Row = {
        "loss": quality["nats_per_token"],
        "loss_increase": against["log_ratio"],
        "loss_increase_error": against.get("log_ratio_error"),
        "perplexity": quality["token_perplexity"],
        **{
            f"perplexity_{name}": against.get(name) for name in ("ratio", "ratio_low", "ratio_high")
        },
        "bits_per_byte": quality["bits_per_byte"],
        "kl": against["kl"]["mean"] if "kl" in against else None,
        "top1_agreement": against.get("same_top"),
        "acceptance": against.get("acceptance"),
        "kv_bytes_per_token": cache.bytes_per_token,
        "kv_share": cache.bytes_per_token / base_cache.bytes_per_token,
    }
    if cross := cache.cross_bytes_per_token:
        row["cross_bytes_per_token"] = cross  # per source token
    if "recall" in record:
        row |= {
            f"recall_{kind.replace('-', '_')}": share
            for kind, share in recall_by_kind(record).items()
        }
        row |= {"greedy_tokens": record["greedy"]["tokens"], "recall_by_distance": record["recall"]}
    return row


def read_rows(directory: Path) -> dict[Cell, Row]:
    """The latest row of each cell, in the order of the grid.

    Raises RefusedError if the file has other contents.
    """
    path = directory / ROWS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        half = '{"method"'  # begins the last line of a killed run
        whole = [
            line
            for line in text.splitlines(True)
            if line[-1] == "\n" or not half.startswith(line[:9])
        ]
        rows = [parse_json(line, ROWS) for line in whole]
        latest = {
            Cell.of(row): {"error": row["error"], "options": row["options"], **row} for row in rows
        }
        return dict(sorted(latest.items(), key=lambda item: item[0].order))
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of a study; give another directory") from error


def append_row(directory: Path, row: Row) -> None:
    """Append a row and fsync; first cut off the half line of a killed run. Raises OutputError."""
    with (
        system_errors(f"{directory} cannot be written", ADVICE),
        (directory / ROWS).open("ab+") as stream,
    ):
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(json.dumps(finite(row)).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
