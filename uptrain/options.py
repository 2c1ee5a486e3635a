"""The options of gqa-uptrain, which must be equal for a run to be continued. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from gqa.convert.options import ConvertOptions
from gqa.core.errors import RefusedError
from gqa.core.options import (
    COUNT,
    FROM_ZERO,
    LARGEST,
    POSITIVE,
    SEED,
    SHARE,
    Number,
    Options,
    flag,
    option,
    same_as,
    tokens_type,
)
from gqa.corpus.sources import check_text_options, is_self, parse_self

Schedule = Literal["constant", "linear", "cosine"]
Scope = Literal["all", "attention", "kv", "lora"]
AUTO_TEACHER = "auto"
NO_TEACHER = "none"


@dataclass(frozen=True)
class TrainOptions(Options):
    """See `gqa-uptrain --help`.

    Batches are counted in blocks; at most one of alpha, tokens and steps is given.

    `settle` and `settle_steps` fill in the defaults that depend on the checkpoint (teacher, data,
    length, scope) and on the data (context, batch).
    """

    model: str = option(MISSING, argument="MODEL")
    output: Path | None = option(
        None,
        "Output directory; DIR-state stores the run until it ends.  [default: MODEL-uptrained "
        "beside MODEL]",
        short="-o",
        metavar="DIR",
        free=True,
    )
    data: tuple[str, ...] = option(
        (),
        "Training text: a file, a directory, a glob, a hub data set, stdlib:train, "
        "self (sampled from the teacher) "
        "or self:TOKENS. Repeat it or use commas for several.  [default: self]",
        metavar="SOURCE[,...]",
    )
    field: str = same_as(ConvertOptions, "field", methods="")
    separator: str | None = same_as(ConvertOptions, "separator", methods="")
    target_field: str | None = option(
        None,
        "Encoder-decoders: the column of targets; --field names that of sources.  [default: mask "
        "spans of plain text]",
        metavar="NAME",
    )
    assistant_only_loss: bool = option(
        False, "Chats: train on what the assistant writes alone.  [default: on all tokens]"
    )
    streaming: bool = option(False, "Stream a hub data set; store nothing.")
    heldout: str | None = option(
        None,
        "Held-out text: the step with the lowest loss on it is written (with a teacher the KL "
        "divergence from "
        "it, else the cross-entropy).  [default: a part of the data; none of a stream]",
        metavar="SOURCE",
    )
    heldout_fraction: float = option(0.0, "Share of the documents to hold out.", SHARE)
    heldout_tokens: int = option(
        8192, "Maximum number of held-out tokens.", tokens_type(), metavar="COUNT"
    )
    alpha: float | None = option(
        None,
        "Train on this fraction of the tokens of --data, each once. The GQA paper's alpha is a "
        "fraction of the pre-training steps: use --tokens for that.",
        Number(float, "above 0 to 1"),
    )
    tokens: int | None = option(
        None,
        "Number of tokens to train on in all, like 1B: with repeats, and shorter data is read "
        "again.  [default: 512K]",
        tokens_type(),
        metavar="COUNT",
    )
    steps: int | None = option(None, "Number of training steps.", COUNT)
    context: int | None = option(
        None,
        "Tokens per block.  [default: the model's context, at most 2048; less if there are fewer "
        "than 250 blocks]",
        tokens_type(),
        metavar="COUNT",
    )
    batch_size: int | None = option(
        None,
        "Blocks per step, over all processes.  [default: 8; less if the run has fewer than 250 "
        "steps]",
        COUNT,
    )
    micro_batch: int | None = option(
        None,
        "Blocks per forward pass and process.  [default: batch size / processes]",
        COUNT,
        free=True,
    )
    train: Scope | None = option(
        None,
        "Which weights train. kv: key and value projections (and queries if fused); lora: kv, plus "
        "adapters on the other layers, merged at the end.  [default: attention after procrustes, "
        "aligned, calibrated and refined, else all]",
    )
    optimizer: Literal["adamw", "adafactor"] = option("adamw", "Optimizer.")
    learning_rate: float = option(3e-4, "Peak learning rate.", POSITIVE)
    schedule: Schedule = option("linear", "Learning rate after the warm-up.")
    warmup: int | None = option(
        None,
        "Warm-up steps.  [default: 0 with constant, else 5% of the steps, at most 100]",
        Number(int, f"from 0 to {LARGEST}"),
    )
    precision: Literal["float32", "bfloat16"] | None = option(
        None,
        "Dtype of the computation; weights stay in float32.  [default: that of the launcher, else "
        "float32]",
    )
    device: str | None = same_as(ConvertOptions, "device", methods="", free=True)
    checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory.", free=True
    )
    compile: bool = option(False, "Compile the model with torch.compile.", free=True)
    attn_implementation: str = option(
        "sdpa",
        "Attention implementation: sdpa, eager, flash_attention_2 ...",
        metavar="NAME",
        free=True,
    )
    teacher: str = option(
        "auto",
        "Model to distill from. auto: the base model recorded in gqa_conversion.json, if it is "
        "still there; none: train on text alone.",
        metavar="MODEL",
    )
    seed: int = option(0, "Random seed of data order and sampling.", SEED)
    save_every: int | None = option(
        None,
        "Save a state every STEPS steps.  [default: every ten minutes, or less often if saving "
        "takes long]",
        COUNT,
        metavar="STEPS",
        free=True,
    )
    keep_state: bool = option(False, "Keep DIR-state after the end.", free=True)
    trust_remote_code: bool = same_as(ConvertOptions, "trust_remote_code", methods="")
    overwrite: bool = option(
        False,
        "Start over, and replace the checkpoint at DIR once the new one is complete.",
        free=True,
    )
    json: bool = same_as(ConvertOptions, "json", free=True)
    verbose: bool = option(False, "Show tracebacks.", short="-v", free=True)
    quiet: bool = same_as(ConvertOptions, "quiet", free=True)
    # For Python callers.
    lora_rank: int = option(16, "", COUNT, expert=True)  # of the adapters of train="lora"
    weight_decay: float = option(0.1, "", FROM_ZERO, expert=True)
    # Half of the blocks repeat themselves; None: with a teacher
    repeats: bool | None = option(None, expert=True)
    clip: float = option(1.0, "", POSITIVE, expert=True)  # the norm of the gradient, at most
    # Steps; None: four times
    eval_every: int | None = option(None, "", COUNT, free=True, expert=True)
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
        """Raise RefusedError and CorpusError if options contradict each other."""
        for applies, message in self._conflicts(ranks):
            if applies:
                raise RefusedError(message)
        check_text_options([*self.data, *filter(None, [self.heldout])], self.field, self.separator)

    def _conflicts(self, ranks: int) -> Iterator[tuple[bool, str]]:
        """Whether a conflict applies, and what to do."""
        given = " and ".join(self.lengths)
        sampled = any(map(is_self, self.data))
        part = self.heldout_fraction > 0
        has_alpha = self.alpha is not None
        stands_alone = len(self.data) == 1 and not self.streaming and not part
        yield (
            len(self.lengths) > 1,
            f"the length is given by {given}; give one of --alpha, --tokens and --steps",
        )
        yield (
            part and self.heldout is not None,
            "--heldout and --heldout-fraction both name held-out text; give one",
        )
        yield (
            part and self.streaming,
            "--heldout-fraction cannot be used with a stream; name other text with --heldout",
        )
        several = self.streaming and len(self.data) > 1
        yield several, "--streaming reads one source; give all files as one directory or pattern"
        yield (
            has_alpha and self.streaming,
            "--alpha needs data of known length, not a stream; give --tokens or --steps",
        )
        for name, applies, needed in (
            ("lora_rank", self.train == "lora", "--train lora"),
            (
                "assistant_only_loss",
                not sampled,
                "chats of your own (--data self is text without roles)",
            ),
            ("repeats", not sampled, "your own text (self has repeats, self:plain has none)"),
        ):
            shown = flag(name) if name == "assistant_only_loss" else name
            yield (
                self.is_set(name) and not applies,
                f"{shown} needs {needed}; give both or leave it out",
            )
        if sampled:
            yield (
                not stands_alone,
                "--data self excludes other sources, --streaming and --heldout-fraction",
            )
            yield (
                not self.distills,
                "--data self is generated by the --teacher; give the model before conversion",
            )
            endless = parse_self(self.data[0])[0] is None
            yield (
                has_alpha and endless,
                "--alpha needs data of known length; give --data self:1M or the like",
            )
        if self.batch_size is not None:  # else `settle_steps` decides it
            share, rest = divmod(self.batch_size, ranks)
            multiple = (
                f"--batch-size {self.batch_size} is not a multiple of the {ranks} processes; give "
                "one that is"
            )
            yield rest > 0, multiple
            divisor = (
                f"--micro-batch {self.micro_batch} does not divide the {share} blocks of a "
                "process in a batch"
            )
            yield share % (self.micro_batch or share) > 0, divisor
