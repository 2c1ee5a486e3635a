"""What a study asks: a grid of conversions and lengths of training, and what all of its cells have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import without_place
from gqa.convert.align.find_maps import MapsOptions
from gqa.convert.methods import METHODS
from gqa.uptrain.options import Precision, TrainOptions
from gqa.uptrain.scope import Scope

UNMERGED = ("none", "repeat")  # methods of as many heads as the source has, and of more
TEACHERS = ("none", "source")
SCOPES = ("all", "attention", "kv", "lora")
# Where a study is kept and how fast it is made may change between its parts.
_FREE = ("model", "output", "maps", "jobs", "devices", "save_minutes", "micro_batch")


class Conversion(NamedTuple):
    """What cells that differ in training alone share."""

    method: str
    groups: int
    seed: int

    def __str__(self) -> str:
        return f"{self.method}-g{self.groups}-s{self.seed}"


class Cell(NamedTuple):
    """One measurement: a conversion, trained on a share `alpha` of the data. `train`: which weights; `teacher`: none or
    source. The seed is that of the method and of the order of the data.
    """

    method: str
    groups: int
    seed: int
    train: str
    teacher: str
    alpha: float

    @property
    def conversion(self) -> Conversion:
        return Conversion(*self[:3])

    @property
    def run(self) -> str:
        """Cells of one conversion with the same run are points of the same training."""
        return f"{self.train}-{self.teacher}"

    @property
    def order(self) -> tuple[Any, ...]:
        """By groups, methods from the plainest on, and alpha last: the same whatever was measured first."""
        names = (*UNMERGED, *METHODS)
        return (
            self.groups, names.index(self.method), self.seed, SCOPES.index(self.train), TEACHERS.index(self.teacher),
            self.alpha,
        )  # fmt: skip

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        return cls(*(row[name] for name in cls._fields))


@dataclass(frozen=True)
class Grid:
    """Every combination is a cell. `methods`: how many seeds each has."""

    methods: Mapping[str, int]
    groups: tuple[int, ...]
    alphas: tuple[float, ...]
    train: tuple[str, ...] = ("all",)
    teachers: tuple[str, ...] = ("none",)
    seeds: int = 1

    def check(self) -> None:
        """Raises RefusedError for what no model can have."""
        for name, allowed, given in (
            ("methods", METHODS, self.methods), ("train", SCOPES, self.train), ("teachers", TEACHERS, self.teachers),
        ):  # fmt: skip
            if unknown := [value for value in given if value not in allowed]:
                raise RefusedError(f"--{name} {unknown[0]} is unknown; choose {', '.join(allowed)}")
        for option, values in vars(self).items():
            if not isinstance(values, int) and not values:
                raise RefusedError(f"--{option} is empty; name at least one")
        if wrong := [alpha for alpha in self.alphas if not 0 <= alpha <= 1]:
            raise RefusedError(f"--alphas {wrong[0]:g}: a share of the data is between 0 (no training) and 1")

    def cells(self, heads: int) -> list[Cell]:
        """In order, for a source with so many key/value heads. Where none is merged all methods are the same one."""
        found = set()
        for groups in self.groups:
            merged = groups < heads
            methods = self.methods if merged else {UNMERGED[groups > heads]: self.seeds}
            for method, seeds in methods.items():
                variants = product(range(seeds), self.train, self.teachers, self.alphas)
                found |= {Cell(method, groups, *variant) for variant in variants}
        return sorted(found, key=lambda cell: cell.order)


@dataclass(frozen=True)
class StudyOptions:
    """What is the same in all cells. See `gqa-ablate --help`."""

    model: str
    output: Path
    maps: MapsOptions
    data: tuple[str, ...] = ()
    field: str = "text"
    heldout: str | None = None
    heldout_fraction: float = 0.0
    pretraining_tokens: int | None = None
    learning_rate: float = 3e-4
    warmup: int | None = None
    batch_size: int = 8
    micro_batch: int | None = None
    block_size: int | None = None
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    weight_decay: float = 0.1
    precision: Precision = "no"
    eval_tokens: int | None = None
    context: int | None = None
    eval_batch: int = 8
    dtype: str = "auto"
    kl: bool = True
    decode: bool = True
    decode_batch: int = 8
    decode_context: int | None = None
    jobs: int = 1
    devices: tuple[str, ...] = ()
    save_minutes: float | None = None

    def binding(self) -> dict[str, Any]:
        """What all cells of a study have in common, as columns of a table."""
        told = {name: value for name, value in asdict(self).items() if name not in _FREE}
        told["data"] = ",".join(map(without_place, self.data))
        told["heldout"] = self.heldout and without_place(self.heldout)
        told |= {"measure_kl": told.pop("kl"), "measure_decode": told.pop("decode")}
        text, refinement = self.maps.text, self.maps.refinement
        return told | {
            "calibration": ",".join(map(without_place, text.sources)),
            "calibration_tokens": text.tokens,
            "calibration_length": text.length,
            "calibration_dtype": self.maps.dtype,
            "grouping": self.maps.grouping,
            "ridge": self.maps.ridge,
            "refine_steps": refinement.steps,
            "refine_batch": refinement.batch,
            "refine_learning_rate": refinement.learning_rate,
            "refine_precision": "bf16" if self.maps.training.autocast else "no",
        }

    def training(self, directory: Path, cell: Cell, alpha: float) -> TrainOptions:
        """The run of `cell` up to `alpha`; at a constant rate, so that every smaller alpha is a point of it."""
        return TrainOptions(
            model=str(directory), output=directory.with_name(f"{directory.name}-{cell.run}-{alpha:g}"),
            data=self.data, field=self.field, heldout=self.heldout, heldout_fraction=self.heldout_fraction, alpha=alpha,
            pretraining_tokens=self.pretraining_tokens, block_size=self.block_size, batch_size=self.batch_size,
            micro_batch=self.micro_batch, train=cast(Scope, cell.train), optimizer=self.optimizer, schedule="constant",
            learning_rate=self.learning_rate, warmup=self.warmup, weight_decay=self.weight_decay,
            precision=self.precision, teacher=None if cell.teacher == "none" else self.model, seed=cell.seed,
            save_minutes=self.save_minutes, keep_state=True,
        )  # fmt: skip

    def maps_for(self, conversion: Conversion, device: str) -> MapsOptions:
        """How the heads of one conversion are calibrated."""
        maps, seed = self.maps, conversion.seed
        return replace(
            maps, text=replace(maps.text, seed=seed), refinement=replace(maps.refinement, seed=seed), device=device
        )


def calibration_sources(asked: str | None, data: Iterable[str]) -> tuple[str, ...]:
    """The text that heads are calibrated on: what is asked for, or else the data of the training."""
    if asked is None:
        return tuple(data)
    return tuple(source.strip() for source in asked.split(",") if source.strip())
