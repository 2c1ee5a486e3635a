"""One way in which models of one class are written for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gqa.convert.parts import Part


@dataclass(frozen=True)
class Recasting:
    """From the model type `source` to the model type `target`.

    source, target: Model types; `which` of the source's are meant, in words, and `when`, of their config.
    architecture: The target's class.
    config: transformers' config of the source -> config.json of the target with `kv = query` heads, without
        `architectures`, `model_type`, token ids, `tie_word_embeddings` and the dtype, which all have.
    prefix: Of the base model's tensors in the source, left out in `parts`; a checkpoint may lack it.
    parts: What the target's modules are made of; None where all tensors stay as they are.
    groups: Which G the target holds, in words (its family's `allows` decides).
    refusal: Why a config cannot be expressed, or None.
    dropped: Patterns of stored tensors that are no parameters (masks).
    way: `native`, a class of transformers; or `remote code`, which travels with the checkpoint in `files`.
    """

    source: str
    target: str
    architecture: str
    config: Callable[[Any], dict[str, Any]]
    prefix: str = ""
    parts: tuple[Part, ...] | None = None
    which: str = ""
    when: Callable[[Any], bool] = lambda config: True
    groups: str = "any"
    note: str = ""
    refusal: Callable[[Any], str | None] = lambda config: None
    dropped: tuple[str, ...] = ()
    way: str = "native"
    files: Callable[[], Mapping[str, str]] = dict
