"""gqa-calibrate, and the options that it shares with gqa-convert: what maps are found on and how."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint import console
from gqa.checkpoint.console import CONTEXT_SETTINGS, Command, option, version_option, with_options
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import OptionsOf
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.align.watcher import Bar
from gqa.convert.method_option import OF_DRAWS, OF_MAPS, refuse_unused
from gqa.convert.methods import ALIGNING, LAYERWISE

if TYPE_CHECKING:
    from gqa.convert.heads.layout import Groups
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
    """What the options of gqa-convert and gqa-calibrate say."""
    return MAPS.read(options, options["seed"], options["device"])


def read_target(options: Mapping[str, Any]) -> Target:
    """What the options say. Raises RefusedError for a kind of attention that does not exist."""
    from gqa.convert.heads.family import KINDS
    from gqa.convert.recast.targets import Target

    named = tuple(kind.strip() for kind in (options["attention"] or "").split(",") if kind.strip())
    if options["attention"] is not None and not (named and set(named) <= set(KINDS)):
        raise RefusedError(f"--attention {options['attention']!r} is not known; choose {', '.join(KINDS)}")
    return Target(options["remote_code"], tuple(kind for kind in KINDS if kind in named) or None)


_EPILOG = """\b
Examples:
  gqa-calibrate ./Llama-2-7b-hf --groups 8 -o maps.safetensors
  gqa-convert ./Llama-2-7b-hf --groups 8 --maps maps.safetensors
  torchrun --nproc_per_node 8 -m gqa.convert.calibrate_cli ./Llama-2-7b-hf --groups 8 -o maps.safetensors
"""


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@option("--groups", help="How many key/value heads to keep.")
@option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE",
        help="The file to write.")  # fmt: skip
@option("--method", type=click.Choice(ALIGNING), default="calibrated", help="How the heads of a group become one.")
@with_options(MAPS.decorators, TARGET)
@option("--seed", help="The seed of random draws and samples.", **OF_DRAWS)
@option("--revision")
@option("--overwrite", help="Replace FILE, and forget an unfinished run of other options.")
@option("--verbose")
@option("--quiet")
@version_option
def command(model: str, groups: Groups, output: Path, **options: Any) -> None:
    """Find out how the heads of MODEL are best merged into G, and write that as maps that gqa-convert applies.

    Finished layers are kept: the same command continues a run that was stopped.
    """
    from gqa.checkpoint.processes import share_work
    from gqa.convert.align.find_maps import find_maps
    from gqa.convert.api import plan_maps

    share_work(options) if options["method"] in LAYERWISE else console.check_alone()
    refuse_unused([options["method"]], f"--method {options['method']}")
    how = read_maps(options)
    plan = plan_maps(
        model, groups, output, overwrite=options["overwrite"], method=options["method"], seed=options["seed"],
        revision=options["revision"], target=read_target(options), grouping=how.grouping,
    )  # fmt: skip
    start = time.monotonic()
    console.say_device(how.device, options["quiet"])
    with Bar(options["quiet"]) as bar:
        find_maps(plan, output, how, bar, overwrite=options["overwrite"])
    if not options["quiet"]:
        click.echo(bar.table() or "from the weights alone")
        click.echo(f"written     {output} in {time.monotonic() - start:.1f} s")


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    console.run(command, "gqa-calibrate", "the same command continues after the last finished layer")


if __name__ == "__main__":
    main()
