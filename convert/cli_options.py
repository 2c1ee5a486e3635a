"""Options of gqa-convert, and of gqa-ablate by other names: how maps are found, and for which class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.console import option
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import OptionsOf
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.method_option import OF_MAPS

if TYPE_CHECKING:
    from gqa.convert.recast.targets import Target


class MapsWords:
    """How maps are found, as options of a command. One whose --tokens, --context ... are of something else gives them a
    `prefix`, and says itself on which text and where.
    """

    def __init__(self, prefix: str = "") -> None:
        own = {"sources": "data", "tokens": "tokens", "length": "context", "dtype": "precision"}
        flags = {name: f"--{prefix}{word}" for name, word in own.items()}
        flags |= {"repeats": f"--{prefix}repeats/--no-{prefix}repeats", "autocast": "--refine-precision"}
        flags |= {name: f"--refine-{name.replace('_', '-')}" for name in ("steps", "batch", "learning_rate")}
        steps = ("steps", "batch", "learning_rate", "autocast")
        self._text, self._refinement = OptionsOf(CalibrationText, **flags), OptionsOf(Refinement, steps, **flags)
        self._how = OptionsOf(MapsOptions, **flags)
        self.decorators = [
            *OptionsOf(CalibrationText, ("tokens", "length", "repeats") if prefix else (), **flags).decorators(),
            *OptionsOf(MapsOptions, ("grouping", "ridge"), **flags).decorators(),
            *self._refinement.decorators(),
            *OptionsOf(MapsOptions, ("dtype",), **flags).decorators(),
            *([] if prefix else [option("--device", **OF_MAPS)]),
        ]

    def read(self, words: Mapping[str, Any], seed: int, device: str | None, **text: Any) -> MapsOptions:
        """What the options of the command say; `text` that they do not."""
        from gqa.checkpoint.devices import find_device

        precision = words["refine_precision"]
        autocast = None if precision is None else precision == "bfloat16"
        refinement = self._refinement.read(words, seed=seed, autocast=autocast)
        found = self._text.read({"field": "text", "target_field": None, **words}, seed=seed, **text)
        return self._how.read(words, text=found, refinement=refinement, device=find_device(device))


MAPS = MapsWords()
TARGET = [  # about the class that a model is written for
    option("--remote-code/--no-remote-code", default=None, help="Whether a model whose class cannot have fewer heads "
           "gets custom modelling code.  [default: where no class of transformers will do]"),
    option("--attention", metavar="KIND[,...]", help="Whose heads become fewer, in an encoder-decoder that gets such a "
           "class: decoder-self, cross, encoder.  [default: decoder-self,cross]"),
]  # fmt: skip


def read_maps(options: Mapping[str, Any]) -> MapsOptions:
    """What the options of gqa-convert say."""
    return MAPS.read(options, options["seed"], options["device"])


def read_target(options: Mapping[str, Any]) -> Target:
    """What the options say. Raises RefusedError for a kind of attention that does not exist."""
    from gqa.convert.heads.family import KINDS
    from gqa.convert.recast.targets import Target

    named = tuple(kind.strip() for kind in (options["attention"] or "").split(",") if kind.strip())
    if options["attention"] is not None and not (named and set(named) <= set(KINDS)):
        raise RefusedError(f"--attention {options['attention']!r} is not known; choose {', '.join(KINDS)}")
    return Target(options["remote_code"], tuple(kind for kind in KINDS if kind in named) or None)
