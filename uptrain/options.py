"""The options of gqa-uptrain, which must be equal for a run to be continued. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from gqa.convert.methods.table import METHODS
from gqa.convert.options import ConvertOptions
from gqa.core.errors import RefusedError
from gqa.core.options import (
    COUNT,
    FROM_ZERO,
    HARDWARE,
    LARGEST,
    MAIN,
    MODEL,
    OUTPUT,
    POSITIVE,
    SEED,
    Number,
    Options,
    option,
    same_as,
    tokens_type,
)
from gqa.corpus.specs import check_text_options, is_self, parse_self
from gqa.uptrain.schedule import Schedule

Scope = Literal["all", "attention", "kv", "lora"]
AUTO_TEACHER = "auto"
# Methods after which attention fits the rest of the model, and is all that trains by default.
_FITTED = [method.name for method in METHODS.values() if method.reads != "nothing"]
NO_TEACHER = "none"


class Rate(click.ParamType[float | str]):
    """A learning rate: a number, or a share of the size of each weight (`0.3%`, a string)."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        share = str(value).removesuffix("%")
        is_share = share != str(value)
        try:
            number = float(share)
        except ValueError:
            number = -1.0
        largest = 100 if is_share else 1
        if isinstance(value, bool) or not 0 < number <= largest:
            self.fail(
                f"{value!r} is not a learning rate; pass a share of each weight like 0.3%, or a "
                "number like 1e-4, above 0 and at most 1",
                param,
                ctx,
            )
        return f"{share}%" if is_share else number


@dataclass(frozen=True)
class TrainOptions(Options):
    """See `gqa-uptrain --help`.

    Batches are counted in blocks; at most one of alpha, tokens and steps is given.

    `settle` and `settle_steps` fill in the defaults that depend on the checkpoint (teacher, data,
    length, scope) and on the data (context, batch).
    """

    model: str = option(
        MISSING,
        argument="MODEL",
        missing="pass the model: a directory with config.json, or a hub id",
    )

    output: Path | None = option(
        None,
        "Output directory. DIR-state holds the saved states until the run ends.  "
        "[default: MODEL-uptrained next to MODEL]",
        short="-o",
        metavar="DIR",
        free=True,
        group=MAIN,
    )
    data: tuple[str, ...] = option(
        (),
        "Training text: a file, a directory, a glob, a hub dataset, stdlib:train (the source code "
        "of Python's standard library), self (sampled from the teacher; not with other "
        "sources), self:TOKENS (that many sampled tokens) or general (short documents that come "
        "with gqa). Repeat the option, or separate sources by commas.  [default: self]",
        metavar="SOURCE[,...]",
        group=MAIN,
    )
    tokens: int | None = option(
        None,
        "Tokens to train on in all, like 1B. Blocks that repeat passages count. Shorter data is "
        "read several times.  [default: 512000, unless --alpha, --steps or --data self:TOKENS is "
        "passed]",
        tokens_type(),
        metavar="COUNT",
        group=MAIN,
    )
    train: Scope | None = option(
        None,
        "Which weights train. kv: key and value projections (and queries if fused); lora: kv, plus "
        "adapters on the other linear layers, merged at the end.  [default: attention after "
        f"{', '.join(_FITTED[:-1])} and {_FITTED[-1]}, else all]",
        group=MAIN,
    )
    teacher: str = option(
        "auto",
        "Model to distill from. auto: the base model recorded in gqa_conversion.json, if it is "
        "still there; none: train on text alone.",
        metavar="MODEL",
        group=MAIN,
    )
    dry_run: bool = option(
        False,
        "Print which weights would train, in how many steps, and the memory and disk space that "
        "this needs; read no weights and write nothing.",
        free=True,
        group=MAIN,
    )

    text_column: str = same_as(ConvertOptions, "text_column", methods="", group="Training text")
    separator: str | None = same_as(ConvertOptions, "separator", methods="", group="Training text")
    target_column: str | None = option(
        None,
        "Encoder-decoders: the column of targets; --text-column names that of sources.  [default: "
        "mask spans of plain text]",
        metavar="NAME",
        group="Training text",
    )
    assistant_only_loss: bool = option(
        False,
        "For chats: train only on what the assistant writes.  [default: on all tokens]",
        group="Training text",
    )
    streaming: bool = option(False, "Stream a hub dataset; store nothing.", group="Training text")

    heldout: str | None = option(
        None,
        "Held-out text. The weights with the lowest loss on it are written. The loss is the KL "
        "divergence from the teacher, or the cross-entropy without a teacher.  [default: a part of "
        "the data; none of a stream]",
        metavar="SOURCE",
        group="Held-out text",
    )
    heldout_fraction: float | None = option(
        None,
        "Share of the documents to hold out.  [default: 5% of the data, at most "
        "--heldout-tokens tokens]",
        Number(float, "above 0 to 1"),
        metavar="FRACTION",
        group="Held-out text",
    )
    heldout_tokens: int = option(
        8192,
        "Maximum number of held-out tokens.",
        tokens_type(),
        metavar="COUNT",
        group="Held-out text",
    )

    alpha: float | None = option(
        None,
        "Train on this fraction of the tokens of --data, each token once. The GQA paper's alpha is "
        "something else, a fraction of the pre-training steps: use --tokens for that.",
        Number(float, "above 0 to 1"),
        metavar="FRACTION",
        group="Length and batches",
    )
    steps: int | None = option(None, "Number of training steps.", COUNT, group="Length and batches")
    context: int | None = option(
        None,
        "Tokens per block.  [default: the model's context, at most 2048; less if there are fewer "
        "than 250 blocks]",
        tokens_type(),
        metavar="COUNT",
        group="Length and batches",
    )
    batch_size: int | None = option(
        None,
        "Blocks per step, over all processes.  [default: 8; less if the run would otherwise "
        "have fewer than 250 steps]",
        COUNT,
        group="Length and batches",
    )
    micro_batch: int | None = option(
        None,
        "Blocks that one process runs at once. If --batch-size is set, this affects only memory "
        "and speed. Otherwise the batch size is rounded to a multiple of processes x micro-batch.  "
        "[default: batch size / processes]",
        COUNT,
        free=True,
        group="Length and batches",
    )

    optimizer: Literal["adamw", "adafactor"] = option(
        "adamw", "AdamW, or Adafactor, which needs less memory.", group="Optimizer"
    )
    learning_rate: float | str = option(
        "0.3%",
        "Peak learning rate: a share of the root mean square of each weight, like 0.3%, or one "
        "number for all weights, like 1e-4.",
        Rate(),
        metavar="RATE",
        group="Optimizer",
    )
    schedule: Schedule = option("linear", "Learning rate after the warm-up.", group="Optimizer")
    warmup: int | None = option(
        None,
        "Warm-up steps.  [default: 0 with constant, else 5% of the steps, at most 100]",
        Number(int, f"from 0 to {LARGEST}"),
        group="Optimizer",
    )
    seed: int = option(0, "Random seed of data order and sampling.", SEED, group="Optimizer")

    device: str | None = same_as(ConvertOptions, "device", methods="", free=True, group=HARDWARE)
    precision: Literal["float32", "bfloat16"] | None = option(
        None,
        "Dtype of the computation; weights stay in float32.  [default: that of the launcher, else "
        "bfloat16 where the device has instructions for it, else float32]",
        group=HARDWARE,
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass to save memory.",
        free=True,
        group=HARDWARE,
    )
    compile: bool = option(
        False, "Compile the model with torch.compile.", free=True, group=HARDWARE
    )

    attn_implementation: str | None = option(
        None,
        "Attention implementation of transformers, like sdpa, eager or flash_attention_2.  "
        "[default: sdpa, or eager if the model's class has no sdpa]",
        metavar="NAME",
        free=True,
        group=MODEL,
    )
    trust_remote_code: bool = same_as(ConvertOptions, "trust_remote_code", methods="", group=MODEL)

    save_every: int | None = option(
        None,
        "Save a state every STEPS steps.  [default: every ten minutes, or less often if saving "
        "takes long]",
        COUNT,
        metavar="STEPS",
        free=True,
        group=OUTPUT,
    )
    keep_state: bool = option(False, "Keep DIR-state after the end.", free=True, group=OUTPUT)
    overwrite: bool = option(
        False,
        "Start over, and replace the checkpoint at DIR once the new one is complete.",
        free=True,
        group=OUTPUT,
    )
    json: bool = same_as(ConvertOptions, "json", free=True, group=OUTPUT)
    verbose: bool = option(False, "Show tracebacks.", short="-v", free=True, group=OUTPUT)
    quiet: bool = same_as(ConvertOptions, "quiet", free=True, group=OUTPUT)

    # The rest are for Python callers.
    # Rank of the adapters of train="lora".
    lora_rank: int = option(16, "", COUNT, expert=True)
    weight_decay: float = option(0.1, "", FROM_ZERO, expert=True)
    # Whether half of the blocks repeat themselves; None: if there is a teacher.
    repeats: bool | None = option(None, expert=True)
    # The greatest norm of the gradient.
    clip: float = option(1.0, "", POSITIVE, expert=True)
    # Steps between evaluations on held-out text; None: four evaluations.
    eval_every: int | None = option(None, "", COUNT, free=True, expert=True)
    # Of a hub id: a branch, tag or commit.
    revision: str | None = option(None, expert=True)

    @property
    def distills(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher != NO_TEACHER

    @property
    def lengths(self) -> list[str]:
        """Which of the three options for the length are given."""
        return [
            f"--{name}" for name in ("alpha", "tokens", "steps") if getattr(self, name) is not None
        ]

    @property
    def block(self) -> int:
        """Tokens of a block, once decided."""
        assert self.context is not None
        return self.context

    @property
    def blocks_per_step(self) -> int:
        """Blocks of a batch, once decided."""
        assert self.batch_size is not None
        return self.batch_size

    def check(self, ranks: int) -> None:
        """Raise RefusedError and CorpusError if options contradict each other, or do not fit the
        number of processes.
        """
        for applies, message in self._conflicts(ranks):
            if applies:
                raise RefusedError(message)
        texts = [*self.data, *filter(None, [self.heldout])]
        check_text_options(texts, self.text_column, self.separator)

    def _conflicts(self, ranks: int) -> Iterator[tuple[bool, str]]:
        """Whether a conflict applies, and what to do."""
        yield from self._length_conflicts()
        yield from self._source_conflicts()
        yield from self._expert_conflicts()
        if any(map(is_self, self.data)):
            yield from self._self_conflicts()
        if self.batch_size is not None:  # else `settle_steps` decides it
            yield from self._batch_conflicts(self.batch_size, ranks)

    def _length_conflicts(self) -> Iterator[tuple[bool, str]]:
        """Conflicts among the options for the length."""
        lengths = " and ".join(self.lengths)
        yield (
            len(self.lengths) > 1,
            f"{lengths} cannot be combined, because each sets the length; pass one of --alpha, "
            "--tokens and --steps",
        )

    def _source_conflicts(self) -> Iterator[tuple[bool, str]]:
        """Conflicts among the options for data and held-out text."""
        has_fraction = self.heldout_fraction is not None
        yield (
            has_fraction and self.heldout is not None,
            "--heldout and --heldout-fraction cannot be combined, because both determine the "
            "held-out text; remove one of them",
        )
        yield (
            has_fraction and self.streaming,
            "--heldout-fraction cannot be used with a stream; pass other text with --heldout",
        )
        yield (
            self.streaming and len(self.data) > 1,
            "--streaming reads only one source; pass all files as one directory or pattern",
        )
        yield (
            self.alpha is not None and self.streaming,
            "--alpha needs data of known length, not a stream; pass --tokens or --steps instead",
        )

    def _expert_conflicts(self) -> Iterator[tuple[bool, str]]:
        """Options for Python callers, and that of chats, without what they need."""
        yield (
            self.is_set("lora_rank") and self.train != "lora",
            "lora_rank needs --train lora; pass both, or remove lora_rank",
        )
        yield (
            self.is_set("assistant_only_loss") and any(map(is_self, self.data)),
            "--assistant-only-loss needs chats of your own, but --data self is text without "
            "roles; pass chats with --data, or remove --assistant-only-loss",
        )
        yield (
            self.is_set("repeats") and any(map(is_self, self.data)),
            "repeats needs text of your own, because self always has repeats and self:plain has "
            "none; pass text with --data, or remove repeats",
        )

    def _self_conflicts(self) -> Iterator[tuple[bool, str]]:
        """Conflicts with `--data self`."""
        has_fraction = self.heldout_fraction is not None
        stands_alone = len(self.data) == 1 and not self.streaming and not has_fraction
        yield (
            not stands_alone,
            "--data self cannot be combined with other sources, --streaming or "
            "--heldout-fraction; remove them, or replace self",
        )
        yield (
            not self.distills,
            "--data self is generated by the teacher, but --teacher is none; pass the base model "
            "with --teacher, or text with --data",
        )
        is_endless = parse_self(self.data[0])[0] is None
        yield (
            self.alpha is not None and is_endless,
            "--alpha needs data of known length, which --data self does not have; pass --tokens "
            "instead, or --data self:1M",
        )

    def _batch_conflicts(self, batch_size: int, ranks: int) -> Iterator[tuple[bool, str]]:
        """Blocks that cannot be shared among processes and forward passes."""
        share, rest = divmod(batch_size, ranks)
        yield (
            rest > 0,
            f"--batch-size {batch_size} is not a multiple of the {ranks} processes; pass one that "
            "is",
        )
        if self.micro_batch and share:
            fitting = math.gcd(share, self.micro_batch)
            yield (
                fitting != self.micro_batch,
                f"--micro-batch {self.micro_batch} does not divide the {share} blocks that each "
                f"process has in a step; pass a divisor, like {fitting}",
            )
