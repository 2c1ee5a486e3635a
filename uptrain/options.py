"""Everything that decides a training run, as one value and as options of the command; what must be equal for a run to
be continued. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import click

from gqa.checkpoint.console import Count, FloatRange, Precision
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import OptionsOf, option_field
from gqa.corpus.sources import is_self, parse_self
from gqa.uptrain.schedule import Schedule

Scope = Literal["all", "attention", "kv", "lora"]
AUTO_TEACHER, NO_TEACHER = "auto", "none"


_ABOVE_ZERO, _FROM_ZERO, _SHARE = FloatRange(0, min_open=True), FloatRange(0), FloatRange(0, 1)
_FROM_ONE = click.IntRange(1)
_DIRECTORY: dict[str, Any] = {"type": click.Path(path_type=Path, file_okay=False), "metavar": "DIR"}


@dataclass(frozen=True)
class TrainOptions:
    """See `gqa-uptrain --help`. Batches are counted in blocks; at most one of alpha, tokens and steps is given.

    What is left open here `gqa.uptrain.defaults` decides once the checkpoint is known (teacher `auto`, no data, no
    length, no scope) and once the data is (no block, no batch).
    """

    model: str
    output: Path = option_field(
        MISSING,
        "The trained checkpoint; DIR-state holds the run until it is done.  [default: MODEL-uptrained beside MODEL]",
        "-o", free=True, **_DIRECTORY,
    )  # fmt: skip
    data: tuple[str, ...] = option_field(
        (),
        "A file, a directory or glob of them, a hub data set, stdlib:train, or self: what the teacher writes, "
        "self:TOKENS for so much of it; several times, or with commas, for a mixture (SOURCE@WEIGHT).  "
        "[default: self]",
    )
    field: str = option_field("text")
    target_field: str | None = option_field(
        None,
        "The column of targets for sources in --field, of encoder-decoders.  [default: plain text, of which spans are "
        "left out]",
        metavar="NAME",
    )
    data_config: str | None = option_field(None)
    split: str | None = option_field(None, "The split of a hub data set.  [default: train]")
    data_revision: str | None = option_field(None, "The branch, tag or commit of a hub data set.", metavar="REVISION")
    separator: str | None = option_field(
        None, "What stands between the documents of a text file, like '<|endoftext|>'.", metavar="TEXT"
    )
    streaming: bool = option_field(False, "Read a hub data set as it comes and keep nothing.")
    heldout: str | None = option_field(
        None,
        "Text that says which state of the model is the best.  [default: what is held back from the data]",
        metavar="SOURCE",
    )
    heldout_fraction: float = option_field(0.0, "Hold back this share of the documents.", type=_SHARE)
    heldout_tokens: int = option_field(8192, "How much of it to hold back or to read, at most.", type=Count())
    alpha: float | None = option_field(
        None, "Train on this fraction of the data (0.05 in the GQA paper).", type=FloatRange(0, 1, min_open=True)
    )
    tokens: int | None = option_field(None, "Train on so many tokens, like 1B.  [default: 512K]")
    steps: int | None = option_field(None, "Train for so many steps.", type=_FROM_ONE)
    pretraining_tokens: int | None = option_field(
        None, "What alpha is a fraction of.  [default: the data's]", type=Count()
    )
    block_size: int | None = option_field(
        None,
        "Tokens of one block.  [default: the model's positions, 2048 at most, less where there are less than 250 "
        "blocks]",
        "--context",
        type=Count(2),
    )
    repeats: bool | None = option_field(
        None,
        "Let half of the blocks repeat themselves, as those of self do, which keeps what finds things again.  "
        "[default: with a teacher]",
        "--repeats/--no-repeats",
    )
    mask_documents: bool = option_field(False, "Keep attention inside documents.")
    batch_size: int | None = option_field(
        None, "Blocks of one step, over all processes.  [default: 8, less in a run of less than 250 such steps]",
        type=_FROM_ONE,
    )  # fmt: skip
    micro_batch: int | None = option_field(
        None, "Blocks of one forward pass on one process.  [default: its share of the batch]", type=_FROM_ONE, free=True
    )
    train: Scope | None = option_field(
        None,
        "What trains. kv: projections to keys and values (where they are fused, to queries too); lora: these, "
        "and adapters elsewhere that are merged at the end.  [default: attention where the conversion aligned heads, "
        "else all]",
    )
    lora_rank: int = option_field(16, "The rank of the adapters of --train lora.", type=_FROM_ONE)
    optimizer: Literal["adamw", "adafactor"] = option_field("adamw", "What updates the weights.")
    learning_rate: float = option_field(3e-4, "The learning rate at its highest.", type=_ABOVE_ZERO)
    schedule: Schedule = option_field("linear", "How the learning rate goes on after the warm-up.")
    warmup: int | None = option_field(
        None,
        "Steps in which the learning rate rises.  [default: none with constant, else 5 %, 100 at most]",
        type=click.IntRange(0),
    )
    decay: float = option_field(0.2, "The share of the steps in which wsd decays.", type=_SHARE)
    weight_decay: float = option_field(0.1, "The weight decay of the optimiser.", type=_FROM_ZERO)
    clip: float = option_field(1.0, "The norm of the gradient, at most.", type=_ABOVE_ZERO)
    precision: Literal["no", "bf16", "fp16"] = option_field(
        "no",
        "What is computed in; weights are kept in float32. As the launcher says, unless given.",
        type=Precision("float32", "bfloat16", "float16", accelerate=True),
        default="float32",
        envvar="ACCELERATE_MIXED_PRECISION",
    )
    device: str | None = option_field(None, free=True)
    checkpointing: bool = option_field(False, "Compute activations twice instead of keeping them.", free=True)
    compile: bool = option_field(False, "Compile the model with torch.compile.", free=True)
    attention: str = option_field(
        "sdpa",
        "How transformers computes attention: sdpa, eager, flash_attention_2 ...",
        "--attn-implementation",
        free=True,
    )
    teacher: str = option_field(
        "auto",
        "The checkpoint before conversion: learn its predictions. auto: the base model that the conversion's "
        "provenance names, where it is found; none: learn from text alone.",
        metavar="MODEL",
    )
    distill: float = option_field(1.0, "The share of the teacher in the loss; the rest is cross-entropy.", type=_SHARE)
    temperature: float = option_field(1.0, "The temperature of the predictions that are compared.", type=_ABOVE_ZERO)
    seed: int = option_field(0, "The seed of the order of the data, and of what the teacher writes.")
    save_every: int | None = option_field(
        None, "Save a state after so many steps.", type=_FROM_ONE, metavar="STEPS", free=True
    )
    save_minutes: float | None = option_field(
        None, "Save a state after so many minutes.", type=_ABOVE_ZERO, metavar="MINUTES", free=True
    )
    keep_last: int = option_field(2, "How many states to keep.", type=_FROM_ONE, free=True)
    keep_state: bool = option_field(False, "Keep DIR-state after the end.", free=True)
    eval_every: int | None = option_field(
        None, "Measure the held-out loss after so many steps.  [default: four times]", type=_FROM_ONE, metavar="STEPS",
        free=True,
    )  # fmt: skip
    patience: int = option_field(
        10, "Give up after so many steps in a row that are not finite.", type=_FROM_ONE, free=True
    )
    report_to: tuple[str, ...] = option_field(
        (),
        "Where figures go as well: tensorboard (in DIR-logs), wandb, trackio ...; several times for several.",
        free=True,
    )
    revision: str | None = option_field(None)
    trust_remote_code: bool = option_field(False)
    overwrite: bool = option_field(False, "Replace the checkpoint at DIR once the new one is complete.", free=True)
    resume: bool = option_field(False, "Continue from the last state in DIR-state.", free=True)

    def binding(self) -> dict[str, Any]:
        """What a continued run must have in common with the one before, JSON-ready."""
        bound = [field.name for field in fields(self) if not field.metadata.get("free")]
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in bound}

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teacher where there is one."""
        return () if self.teacher == NO_TEACHER else (self.teacher,)

    @property
    def lengths(self) -> list[str]:
        """Which of the three ways to say how long training is are used."""
        return [f"--{name}" for name in ("alpha", "tokens", "steps") if getattr(self, name) is not None]

    @property
    def block(self) -> int:
        """Tokens of a block, once that is decided."""
        assert self.block_size is not None
        return self.block_size

    @property
    def blocks_per_step(self) -> int:
        """The batch, once it is decided."""
        assert self.batch_size is not None
        return self.batch_size

    def check(self, ranks: int) -> None:
        """Raises RefusedError where options do not go together."""
        for told in chain(self._conflicts(), self._data_conflicts(), self._batch_conflicts(ranks)):
            raise RefusedError(told)

    def _conflicts(self) -> Iterator[str]:
        """What is refused before any data is read; how much data there is decides the rest."""
        if len(given := self.lengths) > 1:
            yield f"the length is given by {' and '.join(given)}; give one of --alpha, --tokens and --steps"
        if self.pretraining_tokens is not None and self.alpha is None:
            yield "--pretraining-tokens is what --alpha is a fraction of; give both"
        if self.heldout and self.heldout_fraction:
            yield "held-out text is given by --heldout and --heldout-fraction; give one"
        before = "--teacher, the model before conversion"
        for name, there, needed in (
            ("distill", self.teachers, before), ("temperature", self.teachers, before),
            ("lora_rank", self.train == "lora", "--train lora"), ("decay", self.schedule == "wsd", "--schedule wsd"),
        ):  # fmt: skip
            if not there and getattr(self, name) != getattr(TrainOptions, name):
                yield f"--{name.replace('_', '-')} needs {needed}; give both or leave it out"
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"--{name.replace('_', '-')} is {value}; give a finite number"

    def _data_conflicts(self) -> Iterator[str]:
        if self.repeats and self.mask_documents:
            yield "--repeats makes blocks without documents, which --mask-documents would keep apart"
        if not any(map(is_self, self.data)):
            return
        if self.repeats is not None:
            yield "--repeats is for text of yours; --data self repeats itself, and self:plain does not"
        if len(self.data) > 1 or self.streaming or self.mask_documents or self.heldout_fraction:
            yield "--data self:TOKENS stands alone: no other source, stream, documents or held-out share"
        if self.data_config or self.data_revision or (self.separator and not self.heldout):
            yield "--data-config, --data-revision and --separator are for text that is read, and --data self is written"
        if not self.teachers:
            yield "--data self is what the --teacher writes; give the model before conversion"
        if parse_self(self.data[0]).tokens is None and self.alpha is not None:
            yield "--alpha is a fraction of the data; say how much of --data self there is, like self:1M"

    def _batch_conflicts(self, ranks: int) -> Iterator[str]:
        if self.batch_size is None:  # it will be one that goes
            return
        share = self.batch_size // ranks
        if self.batch_size % ranks:
            yield f"--batch-size {self.batch_size} cannot be shared by {ranks} processes; give a multiple of {ranks}"
        elif share % (self.micro_batch or share):
            yield f"--micro-batch {self.micro_batch} does not divide the {share} blocks that a process has in a batch"


TRAINING = OptionsOf(TrainOptions)


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """`name: before -> now` for everything that is not equal."""
    return [f"{k}: {before.get(k)} -> {now.get(k)}" for k in sorted({*now, *before}) if now.get(k) != before.get(k)]
