# ruff: noqa: RUF009 - what _option returns is a field, made once for each
"""Everything that decides a training run, as one value and as options of the command; what must be equal for a run to
be continued. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from gqa.checkpoint.console import SHARED, Choice, Count, Decorator, Precision, option
from gqa.checkpoint.errors import RefusedError
from gqa.corpus.sources import is_self, parse_self
from gqa.uptrain.schedule import Schedule

Scope = Literal["all", "attention", "kv", "lora"]
AUTO_TEACHER, NO_TEACHER = "auto", "none"


def _option(default: Any, help: str | None = None, /, *flags: str, free: bool = False, **how: Any) -> Any:
    """A field that is an option too: `flags` besides its own name, and `how` click takes it beyond what its type says.

    `free`: may change between a run and its continuation, as it is about where the run is kept and what is told of it.
    """
    how |= {"help": help} if help else {}
    return field(default=default, metadata={"flags": flags, "click": how, "free": free})


_ABOVE_ZERO, _FROM_ZERO, _SHARE = click.FloatRange(0, min_open=True), click.FloatRange(0), click.FloatRange(0, 1)
_FROM_ONE = click.IntRange(1)
_DIRECTORY: dict[str, Any] = {"type": click.Path(path_type=Path, file_okay=False), "metavar": "DIR"}


@dataclass(frozen=True)
class TrainOptions:
    """See `gqa-uptrain --help`. Batches are counted in blocks; at most one of alpha, tokens and steps is given.

    What is left open here `gqa.uptrain.defaults.settle` decides once the checkpoint is known: teacher `auto`, no data,
    no length, no scope.
    """

    model: str
    output: Path = _option(
        MISSING,
        "The trained checkpoint; DIR-state holds the run until it is done.  [default: MODEL-uptrained beside MODEL]",
        "-o", free=True, **_DIRECTORY,
    )  # fmt: skip
    data: tuple[str, ...] = _option(
        (),
        "A file, a directory or glob of them, a hub data set, stdlib:train, or self: what the teacher writes, "
        "self:TOKENS for so much of it; several times, or with commas, for a mixture (SOURCE@WEIGHT).  [default: self]",
    )
    field: str = _option("text")
    data_config: str | None = _option(None)
    split: str | None = _option(None, "The split of a hub data set.  [default: train]")
    data_revision: str | None = _option(None, "The branch, tag or commit of a hub data set.", metavar="REVISION")
    separator: str | None = _option(
        None, "What stands between the documents of a text file, like '<|endoftext|>'.", metavar="TEXT"
    )
    streaming: bool = _option(False, "Read a hub data set as it comes and keep nothing.")
    heldout: str | None = _option(
        None,
        "Text that says which state of the model is the best.  [default: what is held back from the data]",
        metavar="SOURCE",
    )
    heldout_fraction: float = _option(0.0, "Hold back this share of the documents.", type=_SHARE)
    heldout_tokens: int = _option(8192, "How much of it to hold back or to read, at most.", type=Count())
    alpha: float | None = _option(None, "Train on this fraction of the data (0.05 in the GQA paper).")
    tokens: int | None = _option(None, "Train on so many tokens, like 1B.  [default: 512K]")
    steps: int | None = _option(None, "Train for so many steps.", type=_FROM_ONE)
    pretraining_tokens: int | None = _option(None, "What alpha is a fraction of.  [default: the data's]", type=Count())
    block_size: int | None = _option(
        None,
        "Tokens of one block.  [default: the model's positions, 2048 at most]",
        "--context",
        aliases="--block-size",
        type=Count(2),
    )
    repeats: bool | None = _option(
        None,
        "Let half of the blocks repeat themselves, as those of self do, which keeps what finds things again.  "
        "[default: with a teacher]",
        "--repeats/--no-repeats",
        default=None, show_default=False,
    )  # fmt: skip
    mask_documents: bool = _option(False, "Keep attention inside documents.")
    batch_size: int = _option(8, "Blocks of one step, over all processes.", type=_FROM_ONE)
    micro_batch: int | None = _option(
        None, "Blocks of one forward pass on one process.  [default: its share of the batch]", type=_FROM_ONE, free=True
    )
    train: Scope | None = _option(
        None,
        "What trains. kv: projections to keys and values (where they are fused, to queries too); lora: these, "
        "and adapters elsewhere that are merged at the end.  [default: attention where the conversion aligned heads, "
        "else all]",
    )
    lora_rank: int = _option(16, "The rank of the adapters of --train lora.", type=_FROM_ONE)
    keep_adapter: bool = _option(False, "Keep the adapter of --train lora too, in DIR/adapter, for peft.", free=True)
    optimizer: Literal["adamw", "adafactor", "muon"] = _option(
        "adamw", "What updates the weights. muon: that for matrices, adamw for the rest."
    )
    learning_rate: float = _option(3e-4, "The learning rate at its highest.", aliases="--lr", type=_ABOVE_ZERO)
    schedule: Schedule = _option("linear", "How the learning rate goes on after the warm-up.")
    warmup: int | None = _option(
        None,
        "Steps in which the learning rate rises.  [default: none with constant, else 5 %, 100 at most]",
        type=click.IntRange(0),
    )
    decay: float = _option(0.2, "The share of the steps in which wsd decays.", type=_SHARE)
    weight_decay: float = _option(0.1, "The weight decay of the optimiser.", type=_FROM_ZERO)
    clip: float = _option(1.0, "The norm of the gradient, at most.", type=_ABOVE_ZERO)
    precision: Literal["no", "bf16", "fp16"] = _option(
        "no",
        "What is computed in; weights and optimiser stay in float32. As the launcher says, unless given.",
        type=Precision("float32", "bfloat16", "float16", accelerate=True),
        default="float32",
        envvar="ACCELERATE_MIXED_PRECISION",
    )
    checkpointing: bool = _option(False, "Compute activations twice instead of keeping them.", free=True)
    compile: bool = _option(False, "Compile the model with torch.compile.", free=True)
    attention: str = _option(
        "sdpa",
        "How transformers computes attention: sdpa, eager, flash_attention_2 ...",
        "--attn-implementation",
        free=True,
    )
    teacher: str = _option(
        "auto",
        "The checkpoint before conversion: learn its predictions. auto: the base model that the conversion's "
        "provenance names, where it is found; none: learn from text alone.",
        metavar="MODEL",
    )
    distill: float = _option(1.0, "The share of the teacher in the loss; the rest is cross-entropy.", type=_SHARE)
    temperature: float = _option(1.0, "The temperature of the predictions that are compared.", type=_ABOVE_ZERO)
    match: Literal["attention", "hidden"] | None = _option(
        None, "Also match the teacher's attention outputs, or the outputs of its layers."
    )
    match_weight: float = _option(1.0, "The weight of --match in the loss.", type=_FROM_ZERO)
    seed: int = _option(0, "The seed of the order of the data.")
    save_every: int | None = _option(
        None, "Save a state after so many steps.", type=_FROM_ONE, metavar="STEPS", free=True
    )
    save_minutes: float | None = _option(
        None, "Save a state after so many minutes.", type=_ABOVE_ZERO, metavar="MINUTES", free=True
    )
    keep_last: int = _option(2, "How many states to keep.", type=_FROM_ONE, free=True)
    keep_state: bool = _option(False, "Keep DIR-state after the end.", free=True)
    eval_every: int | None = _option(
        None,
        "Measure the held-out loss after so many steps.  [default: four times]",
        type=_FROM_ONE,
        metavar="STEPS",
        free=True,
    )
    patience: int = _option(10, "Give up after so many steps in a row that are not finite.", type=_FROM_ONE, free=True)
    report_to: tuple[str, ...] = _option(
        (),
        "Where figures go as well: tensorboard (in DIR-logs), wandb, trackio ...; several times for several.",
        free=True,
    )
    revision: str | None = _option(None)
    trust_remote_code: bool = _option(False)
    overwrite: bool = _option(False, "Replace the checkpoint at DIR once the new one is complete.", free=True)
    resume: bool = _option(False, "Continue from the last state in DIR-state.", free=True)

    def binding(self) -> dict[str, Any]:
        """What a continued run must have in common with the one before, JSON-ready."""
        bound = [field.name for field in fields(self) if not field.metadata.get("free")]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in bound}

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teacher where there is one."""
        return () if self.teacher == NO_TEACHER else (self.teacher,)

    def check(self, ranks: int) -> int:
        """Blocks of one forward pass on one of `ranks`; raises RefusedError where options do not go together."""
        self._check_length()
        self._check_teaching()
        self._check_data()
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RefusedError(f"--{name.replace('_', '-')} is {value}; give a finite number")
        if self.keep_adapter and self.train != "lora":
            raise RefusedError(f"--keep-adapter is of --train lora; --train {self.train or 'all'} has no adapter")
        if self.batch_size % ranks:
            raise RefusedError(
                f"--batch-size {self.batch_size} cannot be shared by {ranks} processes; give a multiple of {ranks}"
            )
        share = self.batch_size // ranks
        micro = self.micro_batch or share
        if share % micro:
            raise RefusedError(
                f"--micro-batch {micro} does not divide the {share} blocks that a process has in a batch"
            )
        return micro

    @property
    def lengths(self) -> list[str]:
        """Which of the three ways to say how long training is are used."""
        return [f"--{name}" for name in ("alpha", "tokens", "steps") if getattr(self, name) is not None]

    def _check_length(self) -> None:
        """Before any data is read; how much data there is decides the rest."""
        if len(given := self.lengths) > 1:
            raise RefusedError(
                f"the length is given by {' and '.join(given)}; give one of --alpha, --tokens and --steps"
            )
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise RefusedError(f"--alpha is {self.alpha:g}; it is a fraction of the data, above 0 and at most 1")
        if self.pretraining_tokens is not None and self.alpha is None:
            raise RefusedError("--pretraining-tokens is what --alpha is a fraction of; give both")

    def _check_data(self) -> None:
        if self.repeats and self.mask_documents:
            raise RefusedError("--repeats makes blocks without documents, which --mask-documents would keep apart")
        if not any(map(is_self, self.data)):
            return
        if self.repeats is not None:
            raise RefusedError("--repeats is for text of yours; --data self repeats itself, and self:plain does not")
        if len(self.data) > 1 or self.streaming or self.mask_documents or self.heldout_fraction:
            raise RefusedError("--data self:TOKENS stands alone: no other source, stream, documents or held-out share")
        if not self.teachers:
            raise RefusedError("--data self is what the --teacher writes; give the model before conversion")
        if parse_self(self.data[0]).tokens is None and self.alpha is not None:
            raise RefusedError("--alpha is a fraction of the data; say how much of --data self there is, like self:1M")

    def _check_teaching(self) -> None:
        if not self.teachers and (self.match or self.distill != 1.0):
            raise RefusedError("--distill and --match need --teacher, the model before conversion")
        if self.match and self.compile:
            raise RefusedError("--match reads outputs of modules, which a compiled model has none of; drop --compile")


def click_options() -> list[Decorator]:
    """The options of TrainOptions for a command."""
    kinds = get_type_hints(TrainOptions)
    return [_click_option(found, kinds[found.name]) for found in fields(TrainOptions) if found.metadata]


def _click_option(found: Field[Any], kind: Any) -> Decorator:
    """What the field does not say is said by its type, or by what options of that name have in common."""
    how, (plain, *_) = dict(found.metadata["click"]), (*get_args(kind), kind)
    flags, own = found.metadata["flags"], f"--{found.name.replace('_', '-')}"
    flags = flags if any(flag.startswith("--") for flag in flags) else (*flags, own)
    if plain is bool:
        how["is_flag"] = True
    elif Literal in (get_origin(kind), get_origin(plain)):
        how.setdefault("type", Choice(get_args(plain) or get_args(kind)))
    elif "type" not in SHARED.get(own, {}):
        how |= {"type": how.get("type", plain), "multiple": get_origin(kind) is tuple}
    if found.default not in (None, (), MISSING):
        how.setdefault("default", found.default)
    return option(*flags, found.name, **how)


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """`name: before -> now` for everything that is not equal."""
    return [f"{k}: {before.get(k)} -> {now.get(k)}" for k in sorted({*now, *before}) if now.get(k) != before.get(k)]
