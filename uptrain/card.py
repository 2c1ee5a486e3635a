"""What a trained checkpoint says about itself: a model card for people and a provenance file for programs."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gqa.checkpoint.provenance import PROVENANCE, SOURCE_CARD, source_card, version, without_place
from gqa.checkpoint.read import Checkpoint

UPTRAINING = "gqa_uptraining.json"
_TAG = "gqa-uptrain"


def provenance(source: Checkpoint, words: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
    """How the result was trained, with the provenance of what it was trained from inside."""
    packages = ("torch", "transformers", "accelerate")
    return {
        "tool": "gqa-uptrain",
        "version": version(),
        "command": shlex.join(["gqa-uptrain", *map(without_place, words)]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        **facts,
        "conversion": _read_json(source, PROVENANCE),
        "trained_before": _read_json(source, UPTRAINING),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _read_json(source: Checkpoint, name: str) -> Any:
    try:
        return json.loads(source.path(name).read_text())
    except (OSError, ValueError):  # also where there is none
        return None


def card(source: Checkpoint, name: str, record: dict[str, Any]) -> str:
    """README.md: the source card's metadata kept, what was trained on how much, and the source's card below it."""
    from huggingface_hub import ModelCard, ModelCardData

    metadata, text = source_card(source, whole=UPTRAINING not in source.side_files)
    metadata.pop("model-index", None)  # results of other weights
    data = ModelCardData(**{**metadata, "tags": list(dict.fromkeys([*metadata.get("tags", []), _TAG]))})
    lines = [f"# {name}", "", _told(source, record), "", "```", record["command"], "```"]
    if text:
        lines += ["", SOURCE_CARD, "", text]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"))


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
