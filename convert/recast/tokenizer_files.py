"""A tokenizer that stays what it was when the model type, by which transformers chooses tokenizers, becomes another.

Its files are carried along. Where the class is told by the model type alone, the new config.json names it. Where
transformers has one general class for the new model type, which knows no special tokens of its own and reads no vocab
and merges, what the old class knew is written down.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gqa.checkpoint.read import Checkpoint, read_json
from gqa.checkpoint.tokenizers import load_tokenizer

_FILES = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}
_CONFIG, _WHOLE = "tokenizer_config.json", "tokenizer.json"
# transformers takes these for whatever a checkpoint names.
_GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend")


def tokenizer_edits(checkpoint: Checkpoint, source: str, target: str) -> tuple[dict[str, str], dict[str, str]]:
    """What the result needs besides the tokenizer's files where a model type becomes another: keys of config.json, and
    files. Of a checkpoint without its files (a dry run's) nothing is known.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    present = set(checkpoint.side_files)
    if checkpoint.directory is None or not present & _FILES:
        return {}, {}
    told = read_json(checkpoint.directory, _CONFIG) if _CONFIG in present else {}
    if TOKENIZER_MAPPING_NAMES.get(target) in _GENERAL:
        complete = _WHOLE in present and told.keys() >= {"tokenizer_class", "bos_token", "eos_token", "unk_token"}
        return {}, {} if complete else _written_down(checkpoint, told, _WHOLE in present)
    name = checkpoint.config.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(source)
    return {"tokenizer_class": name} if isinstance(name, str) and not told.get("tokenizer_class") else {}, {}


def _written_down(checkpoint: Checkpoint, told: Mapping[str, Any], whole: bool) -> dict[str, str]:
    """tokenizer_config.json with the special tokens that the class knew, and tokenizer.json where there is none.

    A tokenizer that cannot be loaded is carried along as it is.
    """
    try:
        tokenizer = load_tokenizer(checkpoint)
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        files = {} if whole else {_WHOLE: tokenizer.backend_tokenizer.to_str(pretty=True)}
    except Exception:  # whatever a library raises about files that it cannot read
        return {}
    made = {"tokenizer_class": type(tokenizer).__name__} | special | dict(told)
    return files | {_CONFIG: json.dumps(made, indent=2, ensure_ascii=False) + "\n"}
