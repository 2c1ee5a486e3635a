"""Everything that decides a training run, as one value; what must be equal for a run to be continued."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gqa.checkpoint.errors import RefusedError
from gqa.corpus.sources import is_self, self_tokens
from gqa.uptrain.schedule import Schedule
from gqa.uptrain.scope import Scope

Precision = Literal["no", "bf16", "fp16"]
# Where a run is kept and what is told of it may change between a run and its continuation.
_FREE = frozenset(
    {"output", "save_every", "save_minutes", "keep_last", "keep_state", "eval_every", "report_to", "overwrite",
     "micro_batch", "checkpointing", "compile", "attention", "patience", "keep_adapter"}
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """See `gqa-uptrain --help`. Batches are counted in blocks; exactly one of alpha, tokens and steps is given."""

    model: str
    output: Path
    data: tuple[str, ...] = ("stdlib:train",)
    field: str = "text"
    data_config: str | None = None
    split: str | None = None
    separator: str | None = None
    streaming: bool = False
    heldout: str | None = None
    heldout_fraction: float = 0.0
    heldout_tokens: int = 65_536
    alpha: float | None = None
    tokens: int | None = None
    steps: int | None = None
    pretraining_tokens: int | None = None
    block_size: int | None = None
    mask_documents: bool = False
    batch_size: int = 8
    micro_batch: int | None = None
    train: Scope = "all"
    lora_rank: int = 16
    keep_adapter: bool = False
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Schedule = "constant"
    warmup: int | None = None
    decay: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Precision = "no"
    checkpointing: bool = False
    compile: bool = False
    attention: str = "sdpa"
    teacher: str | None = None
    distill: float = 1.0
    temperature: float = 1.0
    match: Literal["attention", "hidden"] | None = None
    match_weight: float = 1.0
    seed: int = 0
    save_every: int | None = None
    save_minutes: float | None = None
    keep_last: int = 2
    keep_state: bool = False
    eval_every: int | None = None
    patience: int = 10
    report_to: tuple[str, ...] = ()
    revision: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    def binding(self) -> dict[str, Any]:
        """What a continued run must have in common with the one before, JSON-ready."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in _FREE}

    def check(self, ranks: int) -> int:
        """Blocks of one forward pass on one of `ranks`; raises RefusedError where options do not go together."""
        self._check_length()
        self._check_teaching()
        self._check_data()
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RefusedError(f"--{name.replace('_', '-')} is {value}; give a finite number")
        if self.keep_adapter and self.train != "lora":
            raise RefusedError(f"--keep-adapter is of --train lora; --train {self.train} has no adapter")
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

    def _check_length(self) -> None:
        """Before any data is read; how much data there is decides the rest."""
        given = [f"--{name}" for name in ("alpha", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1 and not (not given and any(map(is_self, self.data))):
            raise RefusedError(
                f"the length is given by {' and '.join(given) or 'nothing'}; give one of --alpha, --tokens and --steps"
            )
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise RefusedError(f"--alpha is {self.alpha:g}; it is a fraction of the data, above 0 and at most 1")
        if self.pretraining_tokens is not None and self.alpha is None:
            raise RefusedError("--pretraining-tokens is what --alpha is a fraction of; give both")

    def _check_data(self) -> None:
        if not any(map(is_self, self.data)):
            return
        if len(self.data) > 1 or self.streaming or self.mask_documents or self.heldout_fraction:
            raise RefusedError("--data self:TOKENS stands alone: no other source, stream, documents or held-out share")
        if self.teacher is None:
            raise RefusedError("--data self:TOKENS is what the --teacher writes; give the model before conversion")
        if self_tokens(self.data[0]) is None:
            raise RefusedError("--data self: say how many tokens the model is to write, like self:1M")

    def _check_teaching(self) -> None:
        if self.teacher is None and (self.match or self.distill != 1.0):
            raise RefusedError("--distill and --match need --teacher, the model before conversion")
        if self.match and self.compile:
            raise RefusedError("--match reads outputs of modules, which a compiled model has none of; drop --compile")


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """`name: before -> now` for everything that is not equal."""
    return [f"{k}: {before.get(k)} -> {now.get(k)}" for k in sorted({*now, *before}) if now.get(k) != before.get(k)]
