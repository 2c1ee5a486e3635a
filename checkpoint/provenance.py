"""Records and model cards that say how a checkpoint was made; hashes of checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.custom_code import MODEL_TYPES, auto_map
from gqa.checkpoint.write import DEFAULT_JOBS

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint

PROVENANCE = "gqa_conversion.json"
UPTRAINING = "gqa_uptraining.json"
METRICS = "gqa_uptraining.jsonl"
MAX_DEPTH = 100  # of a record that is carried into the next one: each training adds a level to ours
TAG = "gqa"  # tag of models on the Hugging Face hub
SOURCE_CARD = "# The source model's card"
_CODE_TOKENIZER = re.compile(r"\.py$|\.model$|\.tiktoken$|^(tokenizer|vocab|merges|special_tokens|added_tokens)[^/]*$")


@cache
def version(package: str = "gqa") -> str:
    """Installed version of this tool, or of another `package`."""
    return importlib.metadata.version(package)


def stamp(tool: str, argv: Sequence[str]) -> dict[str, Any]:
    """First entries of every record. `argv`: the command's arguments; empty for a call from Python."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"tool": tool, "version": version(), "argv": portable(argv), "created": created}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package."""
    return {name: version(name) for name in packages}


def portable(value: Any) -> Any:
    """Arguments or options, JSON-ready. Of absolute paths, also after `--option=`, `-o` or a comma, only names stay."""
    if isinstance(value, list | tuple):
        return [portable(part) for part in value]
    if not isinstance(value, str | Path):
        return value
    option, path = re.fullmatch(r"(--[\w-]+=|-\w(?=/))?(.*)", str(value), re.DOTALL).groups(default="")  # type: ignore[union-attr]
    return option + ",".join(Path(part).name if Path(part).is_absolute() else part for part in re.split(",(?=/)", path))


def request(options: Any, argv: Sequence[str]) -> dict[str, Any]:
    """Arguments and options of a command for its record, without absolute paths, JSON-ready."""
    return {"argv": portable(argv), "options": {name: portable(value) for name, value in asdict(options).items()}}


def relative_path(directory: Path, out: Path) -> str | None:
    """The path of a directory from `out`; None if the user's name is in it, or if it is no path on this system."""
    try:
        path = Path(os.path.relpath(directory.resolve(), out.resolve()))
    except (OSError, ValueError):  # too long, or with characters that no path can have
        return None
    user = _home_name()
    return None if user in path.parts and user != "root" else path.as_posix()


def _home_name() -> str | None:
    """The last part of the home directory, usually the user's name. None for a user without one (in a container)."""
    try:
        return Path.home().name or None
    except RuntimeError:
        return None


def path_of_record(value: object) -> str | None:
    """A path that a record names; None if it cannot be one on this system: users edit records."""
    if not isinstance(value, str) or not value or "\0" in value:
        return None
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return value


def read_record(checkpoint: Checkpoint, name: str) -> Any:
    """The record `name` that a conversion or a training wrote next to the weights; None if it cannot be read, or is so
    deeply nested that it could not be written again into the record of the next step.
    """
    try:
        record = json.loads(checkpoint.path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if _depth_within(record, MAX_DEPTH) else None


def _depth_within(value: Any, limit: int) -> bool:
    """Whether lists and dictionaries are nested at most `limit` deep, without recursion."""
    level = [value]
    for _ in range(limit + 1):
        containers = [one for one in level if isinstance(one, dict | list)]
        if not containers:
            return True
        level = [part for one in containers for part in (one.values() if isinstance(one, dict) else one)]
    return False


def source_card(source: Checkpoint, whole: bool = False) -> tuple[dict[str, Any], str]:
    """Metadata and text of a checkpoint's README.md. If this tool wrote it, return only the original model's card in it
    (unless `whole`), so that cards do not grow with every step.
    """
    from huggingface_hub import ModelCard

    from gqa.checkpoint.hub import quiet

    if "README.md" not in source.side_files:
        return {}, ""
    text = source.path("README.md").read_text(encoding="utf-8", errors="replace")
    metadata: dict[str, Any] = {}
    # A card that cannot be parsed or written again is copied without its metadata being read.
    with suppress(Exception), quiet("huggingface_hub"):
        loaded = ModelCard(text, ignore_metadata_errors=True)
        fields = dict(loaded.data.to_dict())
        fields["tags"] = [tag for tag in fields.get("tags") or [] if isinstance(tag, str)]
        format_card(fields)
        metadata, text = fields, loaded.text
    card, mark, original = text.partition(SOURCE_CARD)
    return metadata, (text if whole else original if mark else card).strip()


def format_card(metadata: Mapping[str, Any], *parts: str, original: str = "") -> str:
    """Text of README.md: `parts` of Markdown, then the `original` model's card. Adds the tag `gqa`."""
    from huggingface_hub import ModelCard, ModelCardData

    text = "\n\n".join([*parts, *([SOURCE_CARD, original] if original else [])])
    data = ModelCardData(**{**metadata, "tags": list(dict.fromkeys([*metadata["tags"], TAG]))})
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n"))


def loading_code(model_class: Any, name: str, side_files: Iterable[str]) -> str:
    """Markdown: how transformers loads the checkpoint `name`; with the code in it only where the class is ours."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes, arguments = [model_class.__name__], f'"{name}"'
    model_type = getattr(getattr(model_class, "config_class", None), "model_type", None)  # none of an Auto class
    if model_type in MODEL_TYPES:
        auto_of = {reference.rpartition(".")[2]: auto for auto, reference in auto_map(model_type).items()}
        classes, arguments = [auto_of[model_class.__name__]], f"{arguments}, trust_remote_code=True"
    elif classes[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        classes = ["AutoModelForCausalLM"]
    lines = [f"model = {classes[0]}.from_pretrained({arguments})"]
    if any(file.startswith("tokenizer") for file in side_files):
        classes.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({arguments})")
    return "\n".join(["```python", f"from transformers import {', '.join(sorted(classes))}", "", *lines, "```"])


def request_text(tool: str, argv: Sequence[str], options: Mapping[str, Any]) -> str:
    """Markdown: the options that have a value, and the command, if any."""
    values = {name: value for name, value in options.items() if value is not False and value not in (None, [])}
    named = ", ".join(f"`{name}={value!r}`" for name, value in values.items())
    return f"Options: {named}." + (f"\n\n```\n{shlex.join([tool, *argv])}\n```" if argv else "")


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the config and of the contents of all weight, code and tokenizer files."""
    origin = checkpoint.source or checkpoint
    files = [*origin.files, *filter(_CODE_TOKENIZER.search, origin.side_files)]
    config = hashlib.sha256(json.dumps(origin.config, sort_keys=True).encode()).hexdigest()
    return hashlib.sha256("\n".join([config, *file_digests(map(origin.path, files))]).encode()).hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of the contents of each file."""
    with ThreadPoolExecutor(max_workers=DEFAULT_JOBS) as pool:
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
