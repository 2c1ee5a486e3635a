"""The options of gqa-ablate and the cells of its grid. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gqa.checkpoint.hub import default_output
from gqa.checkpoint.provenance import checkpoint_digest, portable
from gqa.convert.heads.family import heads_suffix
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions, Refinement
from gqa.convert.methods.table import METHODS
from gqa.convert.methods.unmerged import Unmerged
from gqa.convert.options import READING_TEXT, ConvertOptions, options_of, refuse_unused
from gqa.core.console import operand
from gqa.core.errors import RefusedError
from gqa.core.escape import shell_line
from gqa.core.option_types import COUNT, FROM_ZERO, SHARE, OneOf, tokens_type
from gqa.core.options import HARDWARE, MAIN, OUTPUT, Options, flag, option, same_as
from gqa.corpus.specs import BUILT_IN, is_self
from gqa.eval.options import EvaluateOptions
from gqa.uptrain.options import NO_TEACHER, Scope, UptrainOptions

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint

UNMERGED = Unmerged.name  # the method of cells with as many KV heads as the base model
BASE = "base model"  # what reports call it
ADVICE = "measured rows are kept; repeat the command without --overwrite to continue"
ELSEWHERE = "choose another directory with -o"

# Built-in text whose validation text comes with it
_NOT_REQUIRED = " and ".join(
    f"with --data {spec}, for which {text.heldout} is used"
    for spec, text in BUILT_IN.items()
    if text.heldout
)

# What an error calls the entries of a study's identity that are not options.
_NAMES_OF_ENTRIES = {
    "model": "MODEL",
    "fingerprint": "content of MODEL",
    "content of the data": "content of --data",
}

# Options that have an effect without MODEL: then only the report is written.
_OF_REPORTS = ("output", "max_loss_increase", "verbose", "quiet")


class Cell(NamedTuple):
    """One combination of a study: a conversion to `groups` KV heads, trained on a share `alpha` of
    the data.
    """

    method: str
    groups: int
    alpha: float

    @property
    def conversion(self) -> str:
        """Name of the conversion, which cells of different alphas share."""
        return f"{self.method}-g{self.groups}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the base model first, then by groups, method and alpha."""
        names = (UNMERGED, *METHODS, self.method)  # of another version perhaps
        return not self.is_base_model, self.groups, names.index(self.method), self.alpha

    @property
    def is_base_model(self) -> bool:
        """Whether it is the base model as it is."""
        return self.method == UNMERGED and not self.alpha

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cell:
        """The cell that a row is of. Raises KeyError if it is none of a study."""
        return cls(**{name: row[name] for name in cls._fields})


def names_of_identity() -> dict[str, str]:
    """What users call the entries of `AblateOptions.identity`: options by their flags."""
    options = {
        one.name: flag(one.name) for one in fields(AblateOptions) if not one.metadata["expert"]
    }
    return options | _NAMES_OF_ENTRIES


@dataclass(frozen=True)
class AblateOptions(Options):
    """See `gqa-ablate --help`.

    Options with `may_change` may change between the runs of a study: which cells there are, and how
    fast they are measured. All others are part of its identity, also those of a training that no
    cell of this run needs: a later run may add one (`--alphas`).
    """

    output: Path = option(
        MISSING,
        "Directory of the study; the same command continues it.",
        missing="pass the directory of the study with -o DIR",
        short="-o",
        metavar="DIR",
        may_change=True,
        group=MAIN,
    )
    model: str | None = option(None, argument_metavar="[MODEL]", may_change=True)
    data: tuple[str, ...] = option(
        (),
        "Text to calibrate and train on (required with MODEL): a file, a directory, a glob, a hub "
        "dataset, stdlib:train, or general (short documents of many kinds). Repeat the "
        "option, or separate sources by commas.",
        metavar="SOURCE[,...]",
        group=MAIN,
    )
    validation: str | None = option(
        None,
        "Text to evaluate on. It chooses the weights of each training, too, so its figures are "
        "slightly optimistic: measure the model that you choose on other text.",
        alias="--heldout",
        metavar="SOURCE",
        group=MAIN,
    )
    methods: tuple[str, ...] = option(
        ("mean", "first", "aligned", "calibrated", "refined"),
        "Methods to compare; random is a control.",
        OneOf([*reversed(METHODS)]),
        metavar="METHOD[,...]",
        may_change=True,
        group=MAIN,
    )
    kv_heads: tuple[int, ...] | None = option(
        None,
        "Numbers of KV heads.  [default: the two largest divisors below MODEL's number, and 1. For "
        "8 KV heads: 4,2,1. With --teacher none, MODEL's number is added as a control: 8,4,2,1]",
        COUNT,
        short="-g",
        alias="--groups",
        metavar="G[,...]",
        may_change=True,
        group=MAIN,
    )
    alphas: tuple[float, ...] = option(
        (0.0, 0.05),
        "Fractions of the data to train on; 0: no training.",
        SHARE,
        metavar="FRACTION[,...]",
        may_change=True,
        group=MAIN,
    )

    text_column: str = same_as(UptrainOptions, "text_column", group="Text")
    separator: str | None = same_as(UptrainOptions, "separator", group="Text")
    target_column: str | None = same_as(UptrainOptions, "target_column", group="Text")
    validation_fraction: float | None = same_as(
        UptrainOptions,
        "validation_fraction",
        help="Share of the documents to hold out and evaluate on, instead of --validation. One of "
        f"the two is required, except {_NOT_REQUIRED}.",
        group="Text",
    )
    context: int | None = option(
        None,
        "Tokens per training block and per evaluation window.  [default: the model's context, at "
        "most 2048; in training less if there are fewer than 250 blocks]",
        tokens_type(4),
        metavar="COUNT",
        group="Text",
    )

    calibration_tokens: int = same_as(
        ConvertOptions,
        "tokens",
        help=f"Calibration tokens (--methods {' and '.join(READING_TEXT)}). Sources of --data "
        "share them equally; general next to others gets a quarter, at most 12,288.",
        group="Conversion",
    )
    refine_steps: int = same_as(ConvertOptions, "refine_steps", group="Conversion")

    train: Scope | None = same_as(UptrainOptions, "train", group="Training")
    teacher: Literal["auto", "none"] = option(
        "auto",
        "auto: train on what MODEL predicts; none: train on text alone.",
        group="Training",
    )
    batch_size: int | None = same_as(UptrainOptions, "batch_size", group="Training")
    learning_rate: float | str = same_as(UptrainOptions, "learning_rate", group="Training")
    seed: int = same_as(
        UptrainOptions,
        "seed",
        help="Random seed of conversions, data order and sampling.",
        group="Training",
    )

    eval_tokens: int | None = option(
        None,
        "Tokens of the validation text to evaluate on.  [default: all]",
        tokens_type(),
        metavar="COUNT",
        group="Evaluation",
    )
    skip: tuple[Literal["kl", "recall"], ...] = option(
        (),
        "Measurements to skip: kl (how far predictions differ from MODEL's) or recall (how many "
        "tokens are predicted correctly because the context contains them).",
        metavar="NAME[,...]",
        group="Evaluation",
    )
    max_loss_increase: float = option(
        0.1,
        "Recommend the smallest KV cache whose loss is at most NATS per token above MODEL's.",
        FROM_ZERO,
        metavar="NATS",
        may_change=True,
        group="Evaluation",
    )

    device: str | None = same_as(UptrainOptions, "device", group=HARDWARE)
    precision: Literal["float32", "bfloat16"] | None = option(
        None,
        "Dtype of the computation.  [default: float32 for training; for evaluation as stored, but "
        "float32 on a CPU that emulates 16 bits]",
        group=HARDWARE,
    )

    overwrite: bool = option(False, "Remove the study at DIR first.", may_change=True, group=OUTPUT)
    verbose: bool = same_as(UptrainOptions, "verbose", group=OUTPUT)
    quiet: bool = same_as(EvaluateOptions, "quiet", may_change=True, group=OUTPUT)
    # For Python callers.
    calibration_context: int = same_as(ConvertOptions, "context", expert=True)
    trust_remote_code: bool = same_as(
        UptrainOptions, "trust_remote_code", may_change=True, expert=True
    )

    def cells(self, heads: int) -> list[Cell]:
        """The grid for a base model of `heads` KV heads: the base model, then every combination of
        methods, groups and alphas. As many heads as the base model's are one conversion, whatever
        the method.
        """
        cells = {Cell(UNMERGED, heads, 0.0)}
        for groups in self.kv_heads or self._default_groups(heads):
            methods = self.methods if groups < heads else (UNMERGED,)
            for method, alpha in product(methods, self.alphas):
                cells.add(Cell(method, groups, alpha))
        return sorted(cells, key=lambda cell: cell.order)

    def _default_groups(self, heads: int) -> set[int]:
        """1 and the two largest divisors of `heads` below it.

        If anything is trained on text alone, also `heads`, as a control. With a teacher there is no
        such control: a base model that learns its own predictions stays as it is.
        """
        divisors = [groups for groups in range(1, heads) if heads % groups == 0]
        counts = {*divisors[:1], *divisors[-2:]}
        trains_on_text_alone = any(self.alphas) and self.teacher == "none"
        if trains_on_text_alone or not divisors:
            counts.add(heads)
        return counts

    def refuse_conflicts(self) -> None:
        """Raise RefusedError for options that conflict or that no method uses."""
        if not self.model:
            for name in vars(self):
                if self.is_set(name) and name not in _OF_REPORTS:
                    raise RefusedError(
                        f"{flag(name)} has no effect without MODEL; pass both, or remove "
                        f"{flag(name)}"
                    )
        if self.model and not self.data:
            raise RefusedError(
                "no data was passed; pass text to train and calibrate on with --data, like "
                "stdlib:train"
            )
        if any(map(is_self, self.data)):
            raise RefusedError(
                "--data self cannot be used here: generated text has no documents to hold out for "
                "validation; pass a file, a dataset or stdlib:train"
            )
        refuse_unused(self, self.methods, f"--methods {','.join(self.methods)}")

    def identity(self, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
        """The base model and the options that all cells of a study share, JSON-ready."""
        bound = {name: portable(value) for name, value in self.identity_values().items()}
        return {
            "model": checkpoint.hub_id or name,
            "fingerprint": checkpoint_digest(checkpoint),
            **bound,
        }

    @property
    def maps_options(self) -> MapsOptions:
        """How maps are computed. Raises RefusedError if the device cannot be used."""
        from gqa.core.devices import find_device  # here: `--help` loads this file

        text = CalibrationText(
            sources=self.data or ("self",),
            tokens=self.calibration_tokens,
            length=self.calibration_context,
            seed=self.seed,
            text_column=self.text_column,
            target_column=self.target_column,
            trust_remote_code=self.trust_remote_code,
            excluded=self.validation,
            excluded_fraction=self.validation_fraction or 0.0,
            separator=self.separator,
        )
        refinement = Refinement(self.refine_steps, seed=self.seed)
        return MapsOptions(text=text, refinement=refinement, device=find_device(self.device))

    def commands(self, cell: Cell) -> list[str]:
        """Commands that make the model of a cell whose heads are merged."""
        assert self.model
        out = str(default_output(self.model, f"{heads_suffix(cell.groups)}-{cell.method}"))
        method = METHODS[cell.method]
        convert = ["gqa-convert", operand(self.model), "--kv-heads", str(cell.groups)]
        convert += ["--method", cell.method, "-o", out]
        if method.reads == "text":
            convert += ["--tokens", str(self.calibration_tokens)]
            if self.is_set("calibration_context"):
                convert += ["--context", str(self.calibration_context)]
        convert += self._words(options_of(method) - {"precision", "context"})
        if not cell.alpha:
            return [shell_line(convert)]

        teacher = self.model if self.teacher == "auto" else NO_TEACHER
        uptrain = ["gqa-uptrain", operand(out), "--alpha", f"{cell.alpha:g}"]
        uptrain += ["--teacher", teacher, "-o", f"{out}-uptrained"]
        uptrain += ["--precision", self._training_precision]
        uptrain += self._words(
            UptrainOptions.__dataclass_fields__.keys() - {"teacher", "precision"}
        )
        return [shell_line(convert), shell_line(uptrain)]

    def _words(self, names: Collection[str]) -> list[str]:
        """Arguments for the options of these names that all cells share and that are not at their
        defaults.
        """
        words = list[str]()
        for name in self.identity_values():
            if name not in names or not self.is_set(name):
                continue
            value = getattr(self, name)
            parts = value if isinstance(value, tuple) else (value,)
            for part in parts:
                words += [flag(name), str(part)]
        return words

    def training(self, alpha: float | None, model: Path, output: Path) -> UptrainOptions:
        """Training options of a cell: from the conversion `model` to `output`, continued if it was
        interrupted.
        """
        names = UptrainOptions.__dataclass_fields__.keys() & type(self).__dataclass_fields__.keys()
        teacher = NO_TEACHER
        if self.model and self.teacher == "auto":
            teacher = self.model
        changes = {
            "model": str(model),
            "output": output,
            "alpha": alpha,
            "overwrite": True,  # replaces a half-made output; a run saved with it is continued
            "precision": self._training_precision,
            "teacher": teacher,
        }
        return UptrainOptions(**{name: getattr(self, name) for name in names} | changes)

    @property
    def _training_precision(self) -> str:
        """Of all trainings of the study. The default is float32 even where bfloat16 is faster,
        since rows of two machines are compared.
        """
        return self.precision or "float32"

    @property
    def evaluation(self) -> EvaluateOptions:
        """Options of measuring. Raises RefusedError if the device cannot be used."""
        return EvaluateOptions(
            precision=self.precision or "auto",
            device=self.maps_options.device,
            quiet=True,
            kl="kl" not in self.skip,
        )
