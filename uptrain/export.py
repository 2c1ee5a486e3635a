"""A trained model as a checkpoint: weights from the model, everything else byte for byte from where it came."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gqa.convert.card import PROVENANCE, SOURCE_CARD, version
from gqa.convert.checkpoint import TORCH_DTYPES, WEIGHT_SUFFIXES, Checkpoint, holds_weights, read_checkpoint
from gqa.convert.errors import OutputError, RefusedError, listing
from gqa.convert.loading import load_model
from gqa.convert.writer import OutputDirectory, copy_file, umask, write_text

UPTRAINING = "gqa_uptraining.json"
_OWN = frozenset({"README.md", UPTRAINING, "config.json"})


def export(
    model: PreTrainedModel,
    weights: dict[str, Any],
    source: Checkpoint,
    out: Path,
    record: dict[str, Any],
    *,
    overwrite: bool = False,
    extra: dict[str, Path] | None = None,
) -> None:
    """Write `weights` (the model's state dict) in the dtype of `source`, verified by loading, under its name at once.

    config.json and tokenizer are the source's own bytes: transformers 5 writes what version 4 misreads. Its class
    decides the names of stored tensors, which may not be those of its parameters.
    """
    import torch

    assert source.directory is not None
    common = Counter(spec.dtype for spec in source.tensors.values()).most_common(1)[0][0]
    with OutputDirectory(out, source.directory, overwrite) as output:
        work = output.work
        stored = _cast(model, weights, getattr(torch, TORCH_DTYPES[common]))
        model.save_pretrained(work, state_dict=stored, max_shard_size="5GB")
        for path in list(work.iterdir()):
            if path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        for path in work.iterdir():
            path.chmod(0o666 & ~umask())  # safetensors 0.8 writes 0600
        for name in source.side_files:
            if name not in _OWN and not holds_weights(name):
                copy_file(source.path(name), work / name)
        for name, path in (extra or {}).items():
            copy_file(path, work / name)
        write_text(work / UPTRAINING, json.dumps(record, indent=2) + "\n")
        write_text(work / "README.md", card(source, out, record))
        copy_file(source.path("config.json"), work / "config.json")
        _verify(work, source)
        output.commit()


def _cast(model: PreTrainedModel, weights: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """In the stored dtype; tied weights stay one tensor under all their names, of which transformers writes one."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    first = {name: names[0] for names in groups.values() for name in names}
    cast: dict[str, Any] = {}
    for name, tensor in weights.items():
        same = first.get(name, name)
        if same not in cast:
            cast[same] = tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor
        cast[name] = cast[same]
    return cast


def _verify(work: Path, source: Checkpoint) -> None:
    written = read_checkpoint(work)
    wrong = {n for n, spec in written.tensors.items() if n in source.tensors and source.tensors[n].shape != spec.shape}
    wrong |= set(written.tensors) ^ set(source.tensors)
    if wrong:
        raise OutputError(f"the result does not verify: {listing(wrong)} is not as in {source.name}")
    try:
        load_model(str(work))
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None


def provenance(source: Checkpoint, words: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """How the result was trained, with the conversion's own provenance inside."""
    import importlib.metadata

    assert source.directory is not None
    conversion = source.directory / PROVENANCE
    try:
        before = json.loads(conversion.read_text())
    except (OSError, ValueError):
        before = None
    return {
        "tool": "gqa-uptrain",
        "version": version(),
        "command": shlex.join(["gqa-uptrain", *(Path(w).name if Path(w).is_absolute() else w for w in words)]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": source.hub_id or source.name,
        "revision": source.revision,
        **facts,
        "conversion": before,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")},
    }


def card(source: Checkpoint, out: Path, record: dict[str, Any]) -> str:
    """The model card: what was trained on how much, then the source's card."""
    assert source.directory is not None
    path = source.directory / "README.md"
    head, body = "", path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if body.startswith("---\n") and "\n---\n" in body[4:]:
        head, _, body = body[4:].partition("\n---\n")
        head = f"---\n{head}\n---\n\n"
    losses = record["losses"]
    heldout = ""
    if losses["heldout_before"] is not None:
        before, after = losses["heldout_before"], losses["heldout_after"]
        heldout = f"; held-out loss {before:.4f} before, {after:.4f} after (nats per token)"
    teacher = f", taught by `{Path(record['teacher']).name}`" if record["teacher"] else ""
    share = f" (alpha {record['alpha']:g})" if record["alpha"] else ""
    return (
        f"{head}# {out.name}\n\n`{source.hub_id or source.name}` trained further{teacher}: {record['tokens']:,} tokens"
        f"{share} of {', '.join(record['data'])} in {record['steps']:,} steps{heldout} "
        f"(gqa-uptrain {record['version']}).\n\n"
        f"```\n{record['command']}\n```\n\n{SOURCE_CARD}\n\n{body.strip()}\n"
    )
