"""The file of custom modelling code beside the weights: one text for each model type, made of the files of this folder.

A file here holds what is a model's own, below what it takes from the file that it is like: each definition of that one,
with the names of the model in place of the other's, unless there is one of the same name here. What is imported from
another file of this folder is taken in that way too, so none of them is run; and nothing is written that is not used.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LICENCE = "# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0)."


@dataclass(frozen=True)
class Names:
    """What a model is called in words and in classes, and the model type that its file is like."""

    words: str
    classes: str
    like: str = ""


MODELS = {
    "gpt2": Names("GPT-2", "GPT2"),
    "opt": Names("OPT", "OPT", "gpt2"),
    "mpt": Names("MPT", "Mpt", "gpt2"),
    "bloom": Names("BLOOM", "Bloom", "gpt2"),
    "gpt_neo": Names("GPT-Neo", "GPTNeo", "bloom"),
    "bart": Names("BART", "Bart", "gpt2"),
    "mbart": Names("mBART", "MBart", "bart"),
    "marian": Names("Marian", "Marian", "bart"),
    "pegasus": Names("Pegasus", "Pegasus", "bart"),
    "m2m_100": Names("M2M-100", "M2M100", "bart"),
    "whisper": Names("Whisper", "Whisper", "bart"),
    "t5": Names("T5", "T5", "bart"),
    "mt5": Names("mT5", "MT5", "t5"),
    "umt5": Names("UMT5", "UMT5", "t5"),
}


@dataclass(frozen=True)
class _Parts:
    """Of a file: its docstring, what it imports ("Tensor": "from torch import Tensor") and what it defines, by name."""

    doc: str
    imports: dict[str, str]
    definitions: dict[str, str]

    def renamed(self, old: str, new: str) -> _Parts:
        """The same for another model type."""

        def rename(text: str) -> str:
            text = re.sub(rf"(?<![a-zA-Z]){MODELS[old].words}(?![A-Za-z])", MODELS[new].words, text)
            classes = MODELS[old].classes
            text = re.sub(rf"(?<![a-z]){classes}(?=[A-Z])", MODELS[new].classes, text)
            return re.sub(rf"(?<=[._]){old}\b", new, text)

        imports, definitions = (
            {rename(name): rename(text) for name, text in kind.items()} for kind in (self.imports, self.definitions)
        )
        return _Parts(rename(self.doc), imports, definitions)


@cache
def _parts(name: str) -> _Parts:
    like, path = MODELS[name].like, Path(__file__).parent / f"{name}.py"
    made = _parts(like).renamed(like, name) if like else _Parts("", {}, {})
    return _below(made, path.read_text(encoding="utf-8")) if path.is_file() else made


def _below(parts: _Parts, text: str) -> _Parts:
    """What a file has of its own in place of what it takes; what is new stands before what follows it in the file."""
    lines, body = text.splitlines(keepends=True), ast.parse(text).body
    imports, own, end = dict(parts.imports), {}, body[0].end_lineno or 0
    for node in body[1:]:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names if not str(node.module).startswith("gqa.") else ():
                imports[alias.asname or alias.name] = f"from {node.module} import {ast.unparse(alias)}"
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            own[node.name] = "".join(lines[end : node.end_lineno])
        end = node.end_lineno or 0
    order, following = list(parts.definitions), ""
    for key in reversed(own):
        if key not in order:
            order.insert(order.index(following) if following else len(order), key)
        following = key
    definitions = {key: own.get(key) or parts.definitions[key] for key in order}
    return _Parts("".join(lines[: body[0].end_lineno]), imports, definitions)


def auto_classes(model_type: str) -> dict[str, str]:
    """Names of transformers' Auto classes that know a model type of its own, and of the class that each has for it."""
    from transformers.models.auto import modeling_auto

    found = {}
    for name, auto in inspect.getmembers(modeling_auto, inspect.isclass):
        known = getattr(getattr(auto, "_model_mapping", None), "_model_mapping", {})
        if name.startswith("AutoModel") and model_type in known:
            found[name] = str(known[model_type])
    return found


def text_of(name: str) -> str:
    """The file for a model type of transformers (without `gqa_`), with a class for each that transformers has of it."""
    parts, text = _parts(name), ""
    for model in dict.fromkeys(auto_classes(name).values()):
        text += f"\n\nclass GQA{model}(Grouped, source.{model}):\n    pass\n"
    for key, definition in reversed(parts.definitions.items()):
        if re.search(rf"\b{key}\b", text):
            text = f"\n\n{definition.strip()}\n{text}"
    sections: tuple[dict[str, list[str]], ...] = ({}, {})  # of Python's own, and of others
    for key, line in parts.imports.items():
        if re.search(rf"\b{key}\b", text):
            module, _, imported = line.partition(" import ")
            sections[module not in ("from types", "from typing")].setdefault(module, []).append(imported)
    written = (
        "".join(f"{module} import {', '.join(sorted(names))}\n" for module, names in sorted(section.items()))
        for section in sections
    )
    return f"{_LICENCE}\n{parts.doc}\n" + "\n".join(written) + text
