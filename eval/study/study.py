"""The grid of conversions and trainings of a study, and the options that all of its cells share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import click

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import (
    COUNT,
    FROM_ZERO,
    SHARE,
    ByteSize,
    Number,
    Options,
    Tokens,
    flag,
    option,
    same_as,
)  # fmt: skip
from gqa.checkpoint.provenance import request
from gqa.convert.merge.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.methods import AUTOMATIC, MEASURING, METHODS
from gqa.convert.options import ConvertOptions, refuse_unused
from gqa.eval.options import CACHE_BITS
from gqa.uptrain.options import NO_TEACHER, Scope, TrainOptions
from gqa.uptrain.schedule import Schedule

UNMERGED = ("none", "repeat")  # methods of as many heads as the source has, and of more
TEACHERS = ("none", "source")
SCOPES: tuple[Scope, ...] = get_args(Scope)
AUTO = "auto"  # of them: what gqa-uptrain trains unless told otherwise; of methods: what gqa-convert takes


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
        """Label of the heads of all layers."""
        return f"{self.groups:g}" if self.budget is None else f"budget{self.budget:g}"

    @property
    def conversion(self) -> str:
        """Name of the conversion, which cells that differ in training share."""
        return f"{self.method}-g{self.heads}-s{self.seed}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: groups, method, training, alpha, then unquantised caches before fewer and fewer bits."""
        names = (*UNMERGED, *METHODS)
        return (
            self.groups, names.index(self.method), self.seed, SCOPES.index(self.train), TEACHERS.index(self.teacher),
            self.alpha, bool(self.bits), -(self.bits or 0), self.budget or 0,
        )  # fmt: skip

    @property
    def is_source(self) -> bool:
        """Whether this is the source, perhaps with a quantised cache."""
        return self.method == UNMERGED[0] and not self.alpha

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        return cls(**{name: row[name] for name in cls._fields})


@dataclass(frozen=True)
class Grid:
    """Every combination is a cell. `groups`: none until they are `settled`."""

    methods: Sequence[str]
    groups: Sequence[int] | None = None
    alphas: Sequence[float] = (0.0, 0.05)
    train: Sequence[str] = (AUTO,)
    teachers: Sequence[str] = ("source",)
    kv_budgets: Sequence[float] | None = None
    cache_bits: Sequence[int] | None = None
    seeds: int = 1

    def settled(self, heads: int) -> tuple[int, ...]:
        """The numbers of groups for a source with so many key/value heads: unless others are given, its two largest
        divisors below them (a half and a quarter) and 1; and where anything is trained on text alone its own number, as
        the control (one that learns its own predictions stays what it is).
        """
        divisors = [groups for groups in range(1, heads) if heads % groups == 0]
        control = [heads] if (any(self.alphas) and "none" in self.teachers) or not divisors else []
        return tuple(self.groups or sorted({*divisors[:1], *divisors[-2:], *control}))

    def cells(self, heads: int) -> list[Cell]:
        """Sorted cells for a source with so many KV heads; the source is first. Without merged heads all methods are
        one.
        """
        bits = self.cache_bits or ()
        scope = self.train[0] if self.train[0] != AUTO else "all"
        cells = {Cell(UNMERGED[0], heads, 0, scope, self.teachers[0], 0.0, width) for width in (None, *bits)}
        whole: list[tuple[float, float | None]] = [(groups, None) for groups in self.settled(heads)]
        for groups, budget in [*whole, *((share * heads, share) for share in self.kv_budgets or ())]:
            for method in self.methods if groups < heads else [UNMERGED[groups > heads]]:
                usual = "attention" if method in METHODS and METHODS[method].aligns else "all"
                trains = [usual if name == AUTO else name for name in self.train]
                variants = product(range(self.seeds), trains, self.teachers, self.alphas, (None, *bits))
                cells |= {Cell(method, groups, *variant, budget) for variant in variants}
        return sorted(cells, key=lambda cell: (not cell.is_source, cell.order))


@dataclass(frozen=True)
class AblateOptions(Options):
    """See `gqa-ablate --help`. Which cells there are may change between the parts of a study, and how fast they are
    measured; what is not `free` may not.
    """

    # fmt: off
    output: Path = option(
        MISSING, "The study; the same command continues one that was stopped.", short="-o", heading="Basic",
        metavar="DIR", free=True)
    model: str | None = option(None, argument="[MODEL]", free=True)
    methods: tuple[str, ...] = option(
        ("mean", "first", "aligned", "calibrated", "refined"), "How heads are merged: those of the default as far as "
        "MODEL can have them, or any; random is a control, auto what gqa-convert takes.",
        click.Choice((AUTO, *METHODS)), heading="Basic", metavar="METHOD[,...]", free=True, needs=("model",))
    groups: tuple[int, ...] | None = option(
        None, "How many key/value heads are kept.  [default: a half, a quarter and one of MODEL's; all, as the "
        "control, with --teachers none]", COUNT, short="-g", heading="Basic", metavar="G[,...]", free=True,
        needs=("model",))
    alphas: tuple[float, ...] = option(
        (0.0, 0.05), "Shares of the data to train on; 0: none.", SHARE, heading="Basic", metavar="SHARE[,...]",
        free=True, needs=("model",))
    train: tuple[Literal["auto", "all", "attention", "kv", "lora"], ...] = option(
        (AUTO,), "Which weights train: all, attention, kv, lora; auto: attention where the method aligns heads, else "
        "all.", heading="Basic", metavar="NAME[,...]", free=True, needs=("model",))
    teachers: tuple[Literal["none", "source"], ...] = option(
        ("source",), "source: learn MODEL's predictions; none: learn from text alone.", heading="Basic",
        metavar="NAME[,...]", free=True, needs=("model",))
    kv_budgets: tuple[float, ...] | None = option(
        None, "Also layers with heads of their own, such that this share of the KV cache is left, as gqa-convert "
        "--kv-budget finds them.", Number(float, above=0, below=1), heading="Basic", metavar="SHARE[,...]", free=True,
        needs=("model",))
    cache_bits: tuple[int, ...] | None = option(
        None, "Also measure every cell, and MODEL, with a KV cache of so many bits, like 8,4,2.", CACHE_BITS,
        heading="Basic", free=True, needs=("model",))
    seeds: int = option(
        1, "How many seeds of random and calibrated heads, and of the order of the data: 0 to N - 1.", COUNT,
        heading="Quality", free=True, needs=("model",))
    data: tuple[str, ...] = option(
        (), "Text to train on, as for gqa-uptrain; several times, or with commas, for several.", heading="Data",
        metavar="SOURCE[,...]", needs=("model",))
    field: str = same_as(TrainOptions, "field", needs=("model",))
    target_field: str | None = same_as(TrainOptions, "target_field", needs=("model",))
    heldout: str | None = option(
        None, "Text to measure on, and that says which state of a training is the best.", heading="Data",
        metavar="SOURCE", needs=("model",))
    heldout_fraction: float = same_as(TrainOptions, "heldout_fraction", needs=("model",))
    context: int | None = option(
        None, "Tokens of a block in training and of a window in measuring.  [default: the model's positions, 2048 at "
        "most]", Tokens(4), heading="Data", metavar="COUNT", needs=("model",))
    batch_size: int | None = same_as(TrainOptions, "batch_size", needs=("model",))
    learning_rate: float = same_as(TrainOptions, "learning_rate", needs=("model",))
    precision: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "What training and measuring compute in.  [default: float32 for training, as stored for measuring]",
        heading="Quality", needs=("model",))
    calibration: tuple[str, ...] = option(
        (), "Text for calibrated and refined, as gqa-convert's --data.  [default: the data]", heading="Data",
        metavar="SOURCE[,...]", needs=("model",), methods="reads_text")
    calibration_tokens: int = same_as(ConvertOptions, "tokens", needs=("model",))
    refine_steps: int = same_as(ConvertOptions, "refine_steps", needs=("model",))
    eval_tokens: int | None = option(
        None, "Held-out tokens to measure on: whole documents, until they are so many.  [default: all]", Tokens(),
        heading="Data", metavar="COUNT", needs=("model",))
    skip: tuple[Literal["kl", "recall", "decode"], ...] = option(
        (), "Do not compare predictions with MODEL's (kl), ask for what stands in the context (recall), or time "
        "decoding (decode).", heading="Quality", metavar="NAME[,...]", needs=("model",))
    device: str | None = same_as(TrainOptions, "device", needs=("model",))
    kv_bytes: int | None = option(
        None, "Recommend what loses least with at most so much KV cache a token.", ByteSize(), heading="Quality",
        metavar="SIZE", free=True)
    max_loss_increase: float = option(
        0.1, "Recommend the smallest KV cache within so many nats per token above MODEL's.", FROM_ZERO,
        heading="Quality", free=True)
    dry_run: bool = option(False, "List the cells, and stop.", heading="Basic", free=True, needs=("model",))
    overwrite: bool = option(
        False, "Remove the study at DIR first.", heading="Output", free=True, needs=("model",))
    verbose: bool = same_as(TrainOptions, "verbose")
    quiet: bool = same_as(TrainOptions, "quiet")
    # For Python callers.
    schedule: Schedule = same_as(TrainOptions, "schedule", expert=True)
    grouping: str = same_as(ConvertOptions, "grouping", expert=True)
    calibration_context: int = same_as(ConvertOptions, "context", expert=True)
    micro_batch: int | None = same_as(TrainOptions, "micro_batch", expert=True)
    eval_batch: int = option(8, "", COUNT, free=True, expert=True)  # windows that are scored at a time
    decode_batch: int = option(8, "", COUNT, expert=True)  # sequences
    decode_context: int | None = option(None, "", Tokens(), expert=True)
    max_recall_loss: float = option(5.0, "", FROM_ZERO, free=True, expert=True)  # points of second copies found
    trust_remote_code: bool = same_as(TrainOptions, "trust_remote_code", free=True, expert=True)
    # fmt: on

    @property
    def grid(self) -> Grid:
        return Grid(
            self.methods, self.groups, self.alphas, self.train, self.teachers, self.kv_budgets, self.cache_bits,
            self.seeds,
        )  # fmt: skip

    @property
    def training(self) -> TrainOptions:
        """Training options that all cells share."""
        names = TrainOptions.__dataclass_fields__.keys() & type(self).__dataclass_fields__.keys() - {"train", "dry_run"}
        options = {name: getattr(self, name) for name in names}
        return TrainOptions(**options | {"precision": self.precision or "float32"})

    @property
    def maps(self) -> MapsOptions:
        """Calibration options, without seed and device."""
        text = CalibrationText(
            self.calibration or self.data or ("self",), self.calibration_tokens, self.calibration_context,
            field=self.field, target_field=self.target_field, trust_remote_code=self.trust_remote_code,
            heldout=self.heldout, heldout_fraction=self.heldout_fraction,
        )  # fmt: skip
        return MapsOptions(text=text, grouping=self.grouping, refinement=Refinement(self.refine_steps))

    def check(self) -> None:
        """Raise RefusedError for options that conflict or that no method uses."""
        self.check_needs()
        bounds = [name for name in ("max_loss_increase", "max_recall_loss") if self.given(name)]
        if self.kv_bytes and bounds:
            raise RefusedError(
                f"--kv-bytes asks for what loses least within it, {flag(bounds[0])} for the smallest cache: give one"
            )
        methods = {*self.methods} - {AUTO} | ({*AUTOMATIC} if AUTO in self.methods else set())
        methods |= {MEASURING} if self.kv_budgets else set()
        refuse_unused(self, methods, f"--methods {','.join(self.methods)}")

    @property
    def run_device(self) -> str:
        """Raises RefusedError if the device cannot be used."""
        from gqa.eval.evaluate import usable_device  # here: `--help` loads this file

        return usable_device(self.device)

    def identity(self) -> dict[str, Any]:
        """Options that all cells of a study share."""
        options, bound = request(self, ())["options"], self.binding()
        return {name: value for name, value in options.items() if name in bound}

    def training_of(self, cell: Cell, directory: Path) -> TrainOptions:
        """Training options of a cell, with the result in `directory`."""
        return replace(
            self.training, output=directory / f"{cell.train}-{cell.teacher}-{cell.alpha:g}", alpha=cell.alpha,
            train=cast(Scope, cell.train),
            teacher=self.model if self.model and cell.teacher == "source" else NO_TEACHER,
            seed=cell.seed,
        )  # fmt: skip

    def maps_of(self, cell: Cell) -> MapsOptions:
        """Calibration options of a cell's conversion."""
        maps, seed = replace(self.maps, device=self.run_device), cell.seed
        return replace(maps, text=replace(maps.text, seed=seed), refinement=replace(maps.refinement, seed=seed))
