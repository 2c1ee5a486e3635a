"""What a trained checkpoint says about itself: a model card for people and a provenance file for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from gqa.checkpoint.provenance import PROVENANCE, format_card, source_card, stamp, versions, without_place
from gqa.checkpoint.read import Checkpoint

UPTRAINING = "gqa_uptraining.json"


def provenance(source: Checkpoint, words: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
    """How the result was trained, with the provenance of what it was trained from inside."""
    return {
        **stamp("gqa-uptrain", shlex.join(["gqa-uptrain", *map(without_place, words)])),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        **facts,
        "conversion": _read_json(source, PROVENANCE),
        "trained_before": _read_json(source, UPTRAINING),
        "versions": versions("torch", "transformers", "accelerate"),
    }


def _read_json(source: Checkpoint, name: str) -> Any:
    try:
        return json.loads(source.path(name).read_text())
    except (OSError, ValueError):  # also where there is none
        return None


def card(source: Checkpoint, name: str, record: dict[str, Any]) -> str:
    """README.md: the source card's metadata kept, what was trained on how much, and the source's card below it."""
    metadata, text = source_card(source, whole=UPTRAINING not in source.side_files)
    metadata.pop("model-index", None)  # results of other weights
    tagged = {**metadata, "tags": [*metadata.get("tags", []), "gqa-uptrain"]}
    return format_card(tagged, [f"# {name}", "", _told(source, record)], record["command"], text)


def _told(source: Checkpoint, record: dict[str, Any]) -> str:
    losses, heldout = record["losses"], ""
    if losses["heldout_before"] is not None:
        before, after = losses["heldout_before"], losses["heldout_after"]
        heldout = f"; held-out loss {before:.4f} before, {after:.4f} after (nats per token)"
    teacher = f", taught by `{record['teacher']}`" if record["teacher"] else ""
    share = f" (alpha {record['alpha']:g})" if record["alpha"] else ""
    return (
        f"`{source.hub_id or source.name}` trained further{teacher}: {record['tokens']:,} tokens{share} of "
        f"{', '.join(record['data'])} in {record['steps']:,} steps{heldout} (gqa-uptrain {record['version']}; more in "
        f"`{UPTRAINING}`)."
    )
