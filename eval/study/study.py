"""What a study asks: a grid of conversions and lengths of training, and what all of its cells have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import click

from gqa.checkpoint.console import Count, FloatRange, Precision, Several
from gqa.checkpoint.options import OptionsOf, option_field
from gqa.checkpoint.provenance import without_place
from gqa.convert.align.options import MapsOptions
from gqa.convert.methods import METHODS
from gqa.uptrain.options import NO_TEACHER, Scope, TrainOptions

_POSITIVE = click.IntRange(min=1)
UNMERGED = ("none", "repeat")  # methods of as many heads as the source has, and of more
TEACHERS = ("none", "source")
SCOPES: tuple[Scope, ...] = get_args(Scope)
AUTO = "auto"  # of them: what gqa-uptrain trains unless told otherwise; of methods: what gqa-convert takes
# Of gqa-uptrain's options, those that decide a training whatever the cell; they mean the same here.
TRAINING = ("data", "field", "target_field", "heldout", "heldout_fraction", "pretraining_tokens", "learning_rate",
            "schedule", "batch_size", "block_size", "precision")  # fmt: skip
# Of StudyOptions, those that decide what is measured. How fast it is may change between the parts of a study.
_MEASURING = ("eval_tokens", "context", "eval_batch", "dtype", "kl", "decode", "decode_batch", "decode_context")


class Cell(NamedTuple):
    """One measurement: a conversion, trained on a share `alpha` of the data. `train`: which weights; `teacher`: none or
    source. The seed is that of the method and of the order of the data. `bits`: of a number in the KV cache, where it
    is quantised. `budget`: the share of the KV cache that is left, where layers have heads of their own; `groups` are
    then those of a layer on average, at most.
    """

    method: str
    groups: float
    seed: int
    train: str
    teacher: str
    alpha: float
    bits: int | None = None
    budget: float | None = None

    @property
    def heads(self) -> str:
        """Cells with the same one have the same heads in all layers."""
        return f"{self.groups:g}" if self.budget is None else f"budget{self.budget:g}"

    @property
    def conversion(self) -> str:
        """Cells that differ in training alone share one."""
        return f"{self.method}-g{self.heads}-s{self.seed}"

    @property
    def order(self) -> tuple[Any, ...]:
        """By groups, methods from the plainest on, alpha, and whole caches before those of fewer and fewer bits: the
        same whatever was measured first.
        """
        names = (*UNMERGED, *METHODS)
        return (
            self.groups, names.index(self.method), self.seed, SCOPES.index(self.train), TEACHERS.index(self.teacher),
            self.alpha, bool(self.bits), -(self.bits or 0), self.budget or 0,
        )  # fmt: skip

    @property
    def is_source(self) -> bool:
        """Whether it is the model itself, perhaps with a quantised cache."""
        return self.method == UNMERGED[0] and not self.alpha

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        return cls(**{name: row[name] for name in cls._fields})


@dataclass(frozen=True)
class Grid:
    """Every combination is a cell. `groups`: none until they are `settled`."""

    methods: Sequence[str] = option_field(
        MISSING,
        "How heads are merged: those of the default as far as MODEL can have them, or any; random is a control, auto "
        "what gqa-convert takes.", type=Several(click.Choice((AUTO, *METHODS))), metavar="METHOD[,...]", multiple=False,
        default="mean,first,aligned,calibrated,refined",
    )  # fmt: skip
    groups: Sequence[int] | None = option_field(
        None,
        "How many key/value heads are kept.  [default: a half, a quarter and one of MODEL's; all, as the control, with "
        "--teachers none]",
        type=Several(_POSITIVE), metavar="G[,...]", required=False,
    )  # fmt: skip
    alphas: Sequence[float] = option_field(
        (0.0, 0.05),
        "Shares of the data to train on; 0: none.",
        type=Several(FloatRange(0, 1)), metavar="SHARE[,...]", default="0,0.05",
    )  # fmt: skip
    train: Sequence[str] = option_field(
        (AUTO,),
        "Which weights train: all, attention, kv, lora; auto: attention where the method aligns heads, else all.",
        type=Several(click.Choice((AUTO, *SCOPES))), metavar="NAME[,...]", default=AUTO,
    )  # fmt: skip
    teachers: Sequence[str] = option_field(
        ("source",),
        "source: learn MODEL's predictions; none: learn from text alone.",
        type=Several(click.Choice(TEACHERS)), metavar="NAME[,...]", default="source",
    )  # fmt: skip
    kv_budgets: Sequence[float] | None = option_field(
        None,
        "Also layers with heads of their own, such that this share of the KV cache is left, as gqa-convert --kv-budget "
        "finds them.",
        type=Several(FloatRange(0, 1, min_open=True, max_open=True)),
        metavar="SHARE[,...]",
    )  # fmt: skip
    cache_bits: Sequence[int] | None = option_field(
        None,
        "Also measure every cell, and MODEL, with a KV cache of so many bits, like 8,4,2.",
        type=Several(click.IntRange(2, 8)),
    )
    seeds: int = option_field(
        1,
        "How many seeds of random and calibrated heads, and of the order of the data: 0 to N - 1.",
        type=_POSITIVE,
    )  # fmt: skip

    def settled(self, heads: int) -> tuple[int, ...]:
        """The numbers of groups for a source with so many key/value heads: unless others are given, its two largest
        divisors below them (a half and a quarter) and 1; and where anything is trained on text alone its own number, as
        the control (one that learns its own predictions stays what it is).
        """
        divisors = [groups for groups in range(1, heads) if heads % groups == 0]
        control = [heads] if (any(self.alphas) and "none" in self.teachers) or not divisors else []
        return tuple(self.groups or sorted({*divisors[:1], *divisors[-2:], *control}))

    def cells(self, heads: int) -> list[Cell]:
        """In order, for a source with so many key/value heads, which is the first. Where none is merged all methods are
        the same one.
        """
        bits = self.cache_bits or ()
        scope = self.train[0] if self.train[0] != AUTO else "all"
        found = {Cell(UNMERGED[0], heads, 0, scope, self.teachers[0], 0.0, each) for each in (None, *bits)}
        whole: list[tuple[float, float | None]] = [(groups, None) for groups in self.settled(heads)]
        for groups, budget in [*whole, *((share * heads, share) for share in self.kv_budgets or ())]:
            for method in self.methods if groups < heads else [UNMERGED[groups > heads]]:
                usual = "attention" if method in METHODS and METHODS[method].aligns else "all"
                trains = [usual if name == AUTO else name for name in self.train]
                variants = product(range(self.seeds), trains, self.teachers, self.alphas, (None, *bits))
                found |= {Cell(method, groups, *variant, budget) for variant in variants}
        return sorted(found, key=lambda cell: (not cell.is_source, cell.order))


@dataclass(frozen=True)
class StudyOptions:
    """What is the same in all cells. See `gqa-ablate --help`.

    training: of every cell, but for what the cell itself says; its model is the source, its output the study.
    maps: how heads are calibrated, but for the seed and the device.
    """

    training: TrainOptions
    maps: MapsOptions
    eval_tokens: int | None = option_field(
        None, "Held-out tokens to measure on: whole documents, until they are so many.  [default: all]",
        type=Count(), metavar="COUNT",
    )  # fmt: skip
    context: int | None = option_field(
        None, "Tokens of a window.  [default: the model's positions, 2048 at most]", type=Count(4)
    )
    eval_batch: int = option_field(8, "How many windows are scored at a time.", type=_POSITIVE)
    dtype: str = option_field(
        "auto", "What is measured in; auto: as stored.", "--eval-precision",
        type=Precision("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    kl: bool = option_field(
        True, "Compare predictions with MODEL's, which stays in memory meanwhile.", "--kl/--no-kl",
    )  # fmt: skip
    recall: bool | None = option_field(
        None, "Ask for what stands in the context, as gqa-eval does.  [default: where the model can be asked]",
        "--recall/--no-recall",
    )  # fmt: skip
    decode: bool = option_field(True, "Time decoding.", "--decode/--no-decode")
    decode_batch: int = option_field(8, "How many sequences --decode times at once.", type=_POSITIVE)
    decode_context: int | None = option_field(
        None, "How long the prompts of --decode are.  [default: the model's positions, 4096 at most]",
        type=Count(), metavar="COUNT",
    )  # fmt: skip
    device: str | None = option_field(None)

    @property
    def model(self) -> str:
        return self.training.model

    @property
    def output(self) -> Path:
        return self.training.output

    @property
    def run_device(self) -> str:
        """Raises RefusedError where the device that is asked for cannot be used."""
        from gqa.eval.evaluate import usable_device  # here: `--help` loads this file

        return usable_device(self.device)

    def identity(self) -> dict[str, Any]:
        """What all cells of a study have in common."""
        training, maps = self.training, asdict(self.maps)
        del maps["device"]
        nested = {"calibration": maps.pop("text"), "refine": maps.pop("refinement")}
        return {
            **{name: getattr(training, name) for name in TRAINING},
            **{name: getattr(self, name) for name in _MEASURING},
            "data": ",".join(map(without_place, training.data)),
            "heldout": training.heldout and without_place(training.heldout),
            "recall": self.recall is not False,
            **{f"{part}_{name}": value for part, values in nested.items() for name, value in values.items()},
            **{f"calibration_{name}": value for name, value in maps.items()},
            "calibration_sources": ",".join(map(without_place, self.maps.text.sources)),
        }

    def training_of(self, cell: Cell, place: Path) -> TrainOptions:
        """Of a conversion, up to the alpha of `cell`, with its result in `place`."""
        return replace(
            self.training, output=place / f"{cell.train}-{cell.teacher}-{cell.alpha:g}", alpha=cell.alpha,
            train=cast(Scope, cell.train), teacher=self.model if cell.teacher == "source" else NO_TEACHER,
            seed=cell.seed, device=self.device,
        )  # fmt: skip

    def maps_of(self, cell: Cell) -> MapsOptions:
        """How the heads of its conversion are calibrated."""
        maps, seed = replace(self.maps, device=self.run_device), cell.seed
        return replace(maps, text=replace(maps.text, seed=seed), refinement=replace(maps.refinement, seed=seed))


GRID, STUDY = OptionsOf(Grid), OptionsOf(StudyOptions)
