"""README.md of a result: a model card that can be published on the Hugging Face hub as it is.

Nothing in a card comes from a checkpoint unescaped (`gqa.core.escape`), except the card of
the base model, which stands at the end as the document that it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.provenance import version
from gqa.core.errors import one_line
from gqa.core.escape import code_block, code_span, markdown, python_string, shell_line, visible
from gqa.models.custom_code import MODEL_TYPES, auto_map

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint

CARD = "README.md"
TAG = "gqa"  # tag of models on the Hugging Face hub
BASE_CARD = "## The base model's card"
# Ends our own part of a card, so that a card made from it does not contain it again.
_END = "<!-- end of the card of gqa -->"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n.*?^---[ \t]*$", re.DOTALL | re.MULTILINE)
_INHERITED = (
    "license",
    "license_name",
    "license_link",
    "language",
    "datasets",
    "pipeline_tag",
    "tags",
)
# End of the class's name -> the task at the hub.
_PIPELINES = {
    "CausalLM": "text-generation",
    "MaskedLM": "fill-mask",
}

# Headings in Markdown: `# title`, `<h1>`, and a line under a title. And where a block of code ends.
_HEADING = re.compile(r" {0,3}(#{1,6})(?=\s|$)")
_HTML_HEADING = re.compile(r"(?i)</?h([1-6])(?=[\s>])")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# A line that can be a title: not that of a heading, quote, table, tag or list.
_TITLE = re.compile(r" {0,3}[^\s#>|*+<-]")


@dataclass(frozen=True)
class SourceCard:
    """The card of the checkpoint from which a result is made.

    Attributes:
        metadata: What a result inherits: license, language, data sets, pipeline, tags, each of them
            words.
        base_models: Hub ids of the models from which the checkpoint itself was made.
        text: The Markdown of its author. If gqa wrote the card, that of the model from which the
            checkpoint was made.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    base_models: tuple[str, ...] = ()
    text: str = ""


def source_card(checkpoint: Checkpoint) -> SourceCard:
    """Read a checkpoint's README.md. Metadata that cannot be read are left out."""
    from huggingface_hub import ModelCard

    from gqa.checkpoint.hub import quiet

    if CARD not in checkpoint.side_files:
        return SourceCard()

    text = checkpoint.path(CARD).read_text(encoding="utf-8", errors="replace")
    fields: dict[str, Any] = {}
    with suppress(Exception), quiet("huggingface_hub"):  # libraries of YAML raise many kinds
        fields = dict(ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    metadata: dict[str, Any] = {}
    for name in _INHERITED:
        words = _words(fields.get(name))
        if words:
            metadata[name] = words
    base_models = _as_list(_words(fields.get("base_model")))

    text = _FRONT_MATTER.sub("", text)
    if _END in text:
        _, _, after_ours = text.partition(_END)
        text = after_ours.strip().removeprefix(BASE_CARD)
    return SourceCard(metadata, tuple(filter(is_hub_id, base_models)), text.strip())


def _words(value: Any) -> str | list[str]:
    """A value of metadata without anything but text: a string, or the strings of a list.

    Empty for other values.
    """
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, list):
        return [one_line(entry) for entry in value if isinstance(entry, str)]
    return ""


def _as_list(words: str | list[str]) -> list[str]:
    """The strings of a value of metadata, which may be one or several."""
    return [words] if isinstance(words, str) else words


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a repository on the hub."""
    return bool(_HUB_ID.fullmatch(name)) and len(name) <= 100


def hub_metadata(
    source: SourceCard,
    base_models: Sequence[str],
    model_class: Any,
    tags: Iterable[str],
    side_files: Iterable[str],
) -> dict[str, Any]:
    """Metadata of a result's card.

    Args:
        source: The card of the checkpoint from which it is made.
        base_models: Hub ids of the models from which it is made, if they have any.
        model_class: Its class.
        tags: Further tags.
        side_files: Files that are copied from the source; a license among them is linked in the
            result itself.
    """
    metadata = dict(source.metadata)

    link = metadata.get("license_link")
    if isinstance(link, str) and "://" not in link and link not in side_files and base_models:
        metadata["license_link"] = f"https://huggingface.co/{base_models[0]}/blob/main/{link}"

    for ending, task in _PIPELINES.items():
        if model_class.__name__.endswith(ending):
            metadata.setdefault("pipeline_tag", task)

    if base_models:
        metadata["base_model"] = base_models[0] if len(base_models) == 1 else list(base_models)
        metadata["base_model_relation"] = "finetune"

    all_tags = [*_as_list(metadata.get("tags", [])), *tags, TAG]
    metadata["tags"] = list(dict.fromkeys(all_tags))  # each once, in this order
    return metadata | {"library_name": "transformers"}


def format_card(metadata: Mapping[str, Any], name: str, parts: Sequence[str], original: str) -> str:
    """Text of README.md.

    Args:
        metadata: Its front matter.
        name: The title.
        parts: Markdown of its parts.
        original: The base model's card, which stands below them.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base_card = [BASE_CARD, demote_headings(visible(original))] if original else []
    text = "\n\n".join([f"# {markdown(name)}", *parts, _END, *base_card])
    front_matter = ModelCardData(**metadata).to_yaml()
    return str(ModelCard(f"---\n{front_matter}\n---\n\n{text}\n"))


def demote_headings(text: str) -> str:
    """Markdown whose highest heading is of level 3, so that it can stand under one of level 2."""
    lines = _plain_headings(text.split("\n"))
    levels = [3]  # no heading is raised
    for line, is_code in lines:
        if not is_code:
            levels += _heading_levels(line)
    shift = 3 - min(levels)

    def deeper(match: re.Match[str]) -> str:
        level = min(6, int(match[1]) + shift)
        return match[0].replace(match[1], str(level))

    demoted = []
    for line, is_code in lines:
        if not is_code:
            if match := _HEADING.match(line):
                level = min(6, len(match[1]) + shift)
                line = "#" * level + line[match.end(1) :]
            line = _HTML_HEADING.sub(deeper, line)
        demoted.append(line)
    return "\n".join(demoted)


def _heading_levels(line: str) -> list[int]:
    """The levels of the headings in a line."""
    levels = [int(level) for level in _HTML_HEADING.findall(line)]
    if match := _HEADING.match(line):
        levels.append(len(match[1]))
    return levels


def _plain_headings(lines: Sequence[str]) -> list[tuple[str, bool]]:
    """Lines, and whether they are in a block of code; underlined headings are written with `#`."""
    result: list[tuple[str, bool]] = []
    fence = ""  # what has opened the block of code
    for line in lines:
        opening = _FENCE.match(line)
        if fence:
            result.append((line, True))
            has_nothing_else = not line.strip().strip(fence[0])
            if opening and opening[1].startswith(fence) and has_nothing_else:
                fence = ""
            continue

        if opening:
            fence = opening[1]
            result.append((line, True))
            continue

        before, is_code = result[-1] if result else ("", True)
        underline = _UNDERLINE.fullmatch(line)
        if underline and not is_code and _TITLE.match(before):
            level = 1 if underline[1].startswith("=") else 2
            result[-1] = (f"{'#' * level} {before.strip()}", False)
        else:
            result.append((line, False))
    return result


def model_name(name: str, is_on_hub: bool) -> str:
    """Markdown for a model: its model id as a link, or the name of its directory."""
    if is_on_hub and is_hub_id(name):
        return f"[{markdown(name)}](https://huggingface.co/{name})"
    return code_span(name)


def loading_code(model_class: Any, name: str, side_files: Iterable[str]) -> str:
    """Markdown: how transformers loads the checkpoint `name`, wherever it is.

    With the code in it only where the class is ours.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    class_name = model_class.__name__
    arguments = python_string(name)
    config_class = getattr(model_class, "config_class", None)  # Auto classes have none
    model_type = getattr(config_class, "model_type", None)
    if model_type in MODEL_TYPES:
        for auto, reference in auto_map(model_type).items():
            if reference.rpartition(".")[2] == model_class.__name__:
                class_name = auto
        arguments = f"{arguments}, trust_remote_code=True"
    elif class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        class_name = "AutoModelForCausalLM"

    classes = [class_name]
    lines = [f"model = {class_name}.from_pretrained({arguments})"]
    if any(file.startswith("tokenizer") for file in side_files):
        classes.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({arguments})")

    imports = f"from transformers import {', '.join(sorted(classes))}"
    code = code_block([imports, "", *lines], "python")
    return (
        f"{code_span(name)} stands for the directory of this checkpoint, or for its id on the "
        f"Hugging Face hub:\n\n{code}"
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Markdown: rows of cells that are numbers and words of ours; the first row is the header."""
    header, *body = rows
    line = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, line, *body))


def making_of(tool: str, argv: Sequence[str], options: Mapping[str, Any], record: str) -> list[str]:
    """Parts of Markdown: the command if there is any, the options that have a value, and the
    versions.

    Args:
        tool: The command.
        argv: Its arguments; none of a call from Python.
        options: Its options by name; those that are None or empty are left out.
        record: Name of the file that has them all.
    """
    set_options = {name: value for name, value in options.items() if value not in (None, [], ())}
    shown = ", ".join(code_span(f"{name}={value!r}") for name, value in set_options.items())
    packages = ", ".join(f"{name} {version(name)}" for name in ("gqa", "torch", "transformers"))

    command = [code_block([shell_line([tool, *argv])])] if argv else []
    return [
        *command,
        f"Options: {shown}.",
        f"Made with {packages}; `{record}` has all options and versions.",
    ]
