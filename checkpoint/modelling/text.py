"""The file of custom modelling code beside the weights: one text for each model type, made of the files of this folder.

A file here holds what is a model's own, below what it takes from the file that it is like: each definition of that one,
with the names of the model in place of the other's, unless there is one of the same name here. What is imported from
another file of this folder is taken in that way too, so none of them is run; and nothing is written that is not used.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HEAD = '''# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""{words} with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads{where}.

{doc}
"""

'''
_CHOSEN = ", in the attention modules that `grouped_attention` names"


@dataclass(frozen=True)
class Names:
    """What a model is called in words and in classes, and the model type that its file is like."""

    words: str
    classes: str
    like: str = ""


# Model types whose class in transformers has no number of key/value heads.
MODELS = {
    "gpt2": Names("GPT-2", "GPT2"),
    "opt": Names("OPT", "OPT", "gpt2"),
    "bart": Names("BART", "Bart", "gpt2"),
    "mbart": Names("mBART", "MBart", "bart"),
    "marian": Names("Marian", "Marian", "bart"),
    "pegasus": Names("Pegasus", "Pegasus", "bart"),
    "m2m_100": Names("M2M-100", "M2M100", "bart"),
    "t5": Names("T5", "T5", "bart"),
    "mt5": Names("mT5", "MT5", "t5"),
}
# Those whose class has one, but one for all layers: `attention(config, layer)` is all that their layers make of it.
BY_LAYER = {
    "llama": Names("Llama", "Llama"),
    "cohere": Names("Cohere", "Cohere", "llama"),
    "cohere2": Names("Cohere 2", "Cohere2", "llama"),
    "gemma": Names("Gemma", "Gemma", "llama"),
    "gemma2": Names("Gemma 2", "Gemma2", "llama"),
    "glm": Names("GLM", "Glm", "llama"),
    "glm4": Names("GLM 4", "Glm4", "llama"),
    "granite": Names("Granite", "Granite", "llama"),
    "mistral": Names("Mistral", "Mistral", "llama"),
    "olmo": Names("OLMo", "Olmo", "llama"),
    "olmo2": Names("OLMo 2", "Olmo2", "llama"),
    "phi": Names("Phi", "Phi", "llama"),
    "phi3": Names("Phi-3", "Phi3", "llama"),
    "qwen2": Names("Qwen2", "Qwen2", "llama"),
    "qwen3": Names("Qwen3", "Qwen3", "llama"),
    "smollm3": Names("SmolLM3", "SmolLM3", "llama"),
    "stablelm": Names("StableLM", "StableLm", "llama"),
    "starcoder2": Names("Starcoder2", "Starcoder2", "llama"),
}
NAMES = MODELS | BY_LAYER
# Of them, those that vLLM and llama.cpp load too. They know such a model by the name of its class.
DECILM = ("llama",)


def _texts(name: str) -> list[str]:
    """The file that a type is like, which may be like another, with its own names; then its own, where it has one."""
    like, path = NAMES[name].like, Path(__file__).parent / f"{name}.py"
    own = [path.read_text(encoding="utf-8")] if path.is_file() else []
    return [_renamed(text, like, name) for text in _texts(like)] + own if like else own


def _renamed(text: str, old: str, new: str) -> str:
    words, classes = NAMES[old].words, NAMES[old].classes
    text = re.sub(rf"(?<![a-zA-Z]){words}(?![A-Za-z])", NAMES[new].words, text)
    text = re.sub(rf"(?<![a-z]){classes}(?=[A-Z])", NAMES[new].classes, text)
    return re.sub(rf"(?<=[._]){old}\b", new, text)


def _below(definitions: dict[str, str], imports: dict[str, str], text: str) -> dict[str, str]:
    """Definitions with those of a file in place of others; what is new stands before what follows it in the file.

    Its imports ("Tensor": "from torch import Tensor") are added.
    """
    lines, body = text.splitlines(keepends=True), ast.parse(text).body
    own, end = {}, body[0].end_lineno or 0
    for node in body[1:]:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names if not str(node.module).startswith("gqa.") else ():
                imports[alias.asname or alias.name] = f"from {node.module} import {ast.unparse(alias)}"
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            own[node.name] = "".join(lines[end : node.end_lineno])
        end = node.end_lineno or 0
    order, following = list(definitions), ""
    for key in reversed(own):
        if key not in order:
            order.insert(order.index(following) if following else len(order), key)
        following = key
    return {key: own.get(key) or definitions[key] for key in order}


# Of Llama-like models these classes build the model below their head by AutoModel, which does not know ours.
_BUILT_BY_AUTO_MODEL = re.compile(r"AutoModelFor(SequenceClassification|TokenClassification|QuestionAnswering)")


@cache
def auto_classes(model_type: str) -> dict[str, str]:
    """Names of transformers' Auto classes that know a model type of its own, and of the class that each has for it."""
    from transformers.models.auto import modeling_auto

    found, own = {}, NAMES[model_type].classes  # some also know a class of another model's module
    for name, auto in inspect.getmembers(modeling_auto, inspect.isclass):
        known = getattr(getattr(auto, "_model_mapping", None), "_model_mapping", {})
        if model_type in BY_LAYER and _BUILT_BY_AUTO_MODEL.fullmatch(name):
            continue
        if name.startswith("AutoModel") and str(known.get(model_type, "")).startswith(own):
            found[name] = str(known[model_type])
    return found


def class_of(name: str, model: str) -> str:
    """What the file for a model type calls the class that is `model` in transformers."""
    return "DeciLMForCausalLM" if name in DECILM and model.endswith("ForCausalLM") else f"GQA{model}"


@cache
def text_of(name: str) -> str:
    """The file for a model type of transformers (without `gqa_`), with a class for each that transformers has of it."""
    definitions: dict[str, str] = {}
    imports: dict[str, str] = {}
    for file in _texts(name):
        definitions = _below(definitions, imports, file)
    text = ""
    for model in dict.fromkeys(auto_classes(name).values()):
        text += f"\n\nclass {class_of(name, model)}(Grouped, source.{model}):\n    pass\n"
    if name in DECILM:
        text += f"\n\nGQA{NAMES[name].classes}Config.block_configs = property(block_configs)\n"
    for key, definition in reversed(definitions.items()):
        if re.search(rf"\b{key}\b", text):
            text = f"\n\n{definition.strip()}\n{text}"
    sections: tuple[dict[str, list[str]], ...] = ({}, {})  # of Python's own, and of others
    for key, line in imports.items():
        if re.search(rf"\b{key}\b", text):
            module, _, imported = line.partition(" import ")
            sections[module.removeprefix("from ") not in sys.stdlib_module_names].setdefault(module, []).append(
                imported
            )
    written = (
        "".join(f"{module} import {', '.join(sorted(names))}\n" for module, names in sorted(section.items()))
        for section in sections
    )
    doc, where = ast.get_docstring(ast.parse(file)), _CHOSEN if "grouped_attention" in text else ""
    return _HEAD.format(words=NAMES[name].words, where=where, doc=doc) + "\n".join(written) + text
