"""What gqa-eval is asked for, as one value and as options of the command. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from gqa.checkpoint.console import ByteSize, Count, Precision, Several
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import OptionsOf, option_field

Protocol = Literal["rolling", "strided", "llama.cpp"]


_POSITIVE = click.IntRange(min=1)
_DIRECTORY: dict[str, Any] = {"type": click.Path(path_type=Path, file_okay=False), "metavar": "DIR"}


@dataclass(frozen=True)
class EvaluateOptions:
    """See `gqa-eval --help`: the text, what is measured, how models are run, and what is told of it."""

    # fmt: off
    data: str | None = option_field(
        None, "The text to measure on: a file (txt, jsonl, csv, parquet, arrow), a directory or glob of them, "
        "stdlib:heldout, or a hub data set.", metavar="SOURCE", callback=None)
    field: str = option_field("text")
    target_field: str | None = option_field(
        None, "The column to predict from --field, of encoder-decoders.", metavar="NAME")
    data_config: str | None = option_field(None)
    split: str | None = option_field(None, "The split of a hub data set.  [default: test]", metavar="NAME")
    protocol: Protocol | None = option_field(
        None, "How text is cut into windows: as lm-evaluation-harness does, overlapping (needs --stride), or as "
        "llama-perplexity does.  [default: rolling, strided with --stride]")
    context: int | None = option_field(
        None, "Tokens of a window.  [default: the model's positions, 2048 at most; 512 at most for llama.cpp]",
        type=Count(4))
    stride: int | None = option_field(None, "Tokens from one window to the next.", type=Count())
    tokens: int | None = option_field(
        None, "Stop after the document that reaches so many tokens.")
    beyond_positions: bool = option_field(False, "Allow a context longer than the model's.")
    kl: bool = option_field(
        False, "Compare next-token distributions with the baseline's, in lockstep.")
    recall: bool | None = option_field(
        None, "Ask for what stands in the context: second copies of text, of samples and of random tokens, values by "
        "their keys, passkeys.  [default: with -o]", "--recall/--no-recall")
    cache_bits: Sequence[int] | None = option_field(
        None, "Also measure every checkpoint with a KV cache of so many bits, like 8,4,2.",
        type=Several(click.IntRange(2, 8)))
    decode: bool = option_field(False, "Time prefill and decoding.")
    decode_batches: Sequence[int] = option_field(
        (1, 8), "How many sequences --decode times at once.", type=Several(_POSITIVE),
        default="1,8")
    decode_contexts: Sequence[int] | None = option_field(
        None, "How long the prompts of --decode are.  [default: a half, all of the positions, 4096 at most]",
        type=Several(Count()))
    decode_steps: int = option_field(32, "How many tokens --decode writes.", type=_POSITIVE)
    decode_repeats: int = option_field(5, "How often --decode times each.", type=_POSITIVE)
    memory: int | None = option_field(
        None, "Say what fits into so much memory of a device.", type=ByteSize(), metavar="SIZE")
    tensor_parallel: int = option_field(
        1, "How many devices share a model, of --memory.")
    batch_size: int = option_field(8, "How many windows are scored at a time.", type=_POSITIVE)
    precision: str = option_field(
        "auto", "What is computed in; auto: as stored.",
        type=Precision("auto", "float32", "bfloat16", "float16"))
    device: str | None = option_field(
        None, "Where models run: cpu, cuda, cuda:1, mps, or auto: on all devices, then in the host's memory and on "
        "its disk.  [default: a GPU where there is one]")
    host_memory: int | None = option_field(
        None, "How much of the host's memory a model may take with --device auto; the rest is read from disk.  "
        "[default: what is free]", type=ByteSize(), metavar="SIZE")
    attn_implementation: str | None = option_field(None)
    compile: bool = option_field(False, "Score text with models compiled by torch.compile.")
    revision: str | None = option_field(None, "The branch, tag or commit of hub ids.")
    trust_remote_code: bool = option_field(False)
    output: Path | None = option_field(None, "Write results.json, report.html and pictures here.", "-o", **_DIRECTORY)
    overwrite: bool = option_field(False, "Replace the report at DIR.")
    json: bool = option_field(False)
    verbose: bool = option_field(False, "Show every table, and where an unexpected error comes from.")
    quiet: bool = option_field(False, "Show no progress and no tables.")
    # fmt: on

    @property
    def asks_recall(self) -> bool:
        """Whether recall is measured, which reports have by themselves where it can be."""
        return bool(self.output) if self.recall is None else self.recall

    def settled(self, given: Collection[str], others: int) -> EvaluateOptions:
        """With the protocol that is meant. Raises RefusedError where options do not go together: `given` are those that
        somebody said, `others` the number of models beside the baseline.
        """
        if not any((self.data, self.recall, self.decode, self.memory)):
            raise RefusedError("nothing to measure: give text with --data, or --recall, --decode or --memory")
        said = replace(self, recall=self.asks_recall)
        for leaders, followers in _NEEDS.items():
            alone = [name for name in followers if name in given]
            if alone and not any(getattr(said, leader) for leader in leaders):
                give = "both" if len(leaders) == 1 else "one of them"
                without = " or ".join(map(_flag, leaders))
                raise RefusedError(f"{_flag(alone[0])} means nothing without {without}: give {give} or none")
        if self.host_memory and self.device != "auto":
            raise RefusedError("--host-memory means nothing without --device auto: give both or none")
        if self.cache_bits and self.decode:
            raise RefusedError("--cache-bits is about quality and bytes: leave it out, or --decode")
        if self.kl and not (others or self.cache_bits):
            raise RefusedError("--kl compares checkpoints: give at least two")
        if self.stride and self.protocol not in (None, "strided"):
            raise RefusedError(f"--stride does not go with --protocol {self.protocol}, whose windows are fixed")
        if self.protocol == "strided" and not self.stride:
            raise RefusedError("--protocol strided needs --stride")
        if self.target_field and (self.protocol or self.stride):
            raise RefusedError(
                "--target-field gives pairs of texts, which are not cut into windows: leave --protocol out"
            )
        return replace(self, protocol=self.protocol or ("strided" if self.stride else "rolling"))


# Options that mean nothing without one of others.
_NEEDS = {
    ("data",): ("kl", "field", "target_field", "data_config", "split", "protocol", "stride", "tokens"),
    ("decode",): ("decode_batches", "decode_contexts", "decode_steps", "decode_repeats"),
    ("memory",): ("tensor_parallel",),
    ("output",): ("overwrite",),
    ("context",): ("beyond_positions",),
    ("data", "recall"): ("compile", "batch_size"),
    ("data", "recall", "memory"): ("context",),
    ("data", "recall", "decode"): ("device", "attn_implementation"),
}  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


EVALUATION = OptionsOf(EvaluateOptions)
