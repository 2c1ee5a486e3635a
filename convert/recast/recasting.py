"""One way in which models of one class are written for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gqa.convert.heads.family import Kind
from gqa.convert.recast.parts import Module
from gqa.convert.recast.view import way_to


@dataclass(frozen=True)
class Target:
    """What is asked of the class that a model is written for, where its own cannot have fewer heads.

    remote_code: Whether it travels with the checkpoint; None for only where no class of transformers does.
    attention: The kinds of attention whose heads become fewer, of an encoder-decoder; None for those of its decoder.
    """

    remote_code: bool | None = None
    attention: tuple[Kind, ...] | None = None


ANY = Target()


@dataclass(frozen=True)
class Recasting:
    """From the model type `source` to the model type `target`.

    source, target: Model types; `which` of the source's are meant, in words, and `when`, of their config.
    architecture: The target's class; None for custom modelling code, where the class is the one that stands in for the
        source's, config.json stays the source's with what is new, and all tensors stay as they are.
    config: transformers' config of the source -> config.json of the target with `kv = query` heads, without
        `architectures`, `model_type`, token ids, `tie_word_embeddings` and the dtype, which all have.
    prefix: Of the base model's tensors in the source, left out in `parts`; a checkpoint may lack it.
    parts: What the target's modules are made of.
    groups: Which G the target holds, in words (its family's `allows` decides), of the H heads of the source.
    refusal: Why a config cannot be expressed, or None.
    dropped: Patterns of stored tensors that are no parameters (masks).
    """

    source: str
    target: str
    architecture: str | None = None
    config: Callable[[Any], dict[str, Any]] = lambda config: {}
    prefix: str = ""
    parts: tuple[Module, ...] = ()
    which: str = ""
    when: Callable[[Any], bool] = lambda config: True
    groups: str = "any divisor of H"
    note: str = ""
    refusal: Callable[[Any], str | None] = lambda config: None
    dropped: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        return way_to(self.target)
