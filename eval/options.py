"""The options of gqa-eval. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from gqa.checkpoint.hub import require_model
from gqa.convert.options import ConvertOptions
from gqa.core.errors import RefusedError, alternatives
from gqa.core.escape import shell_line
from gqa.core.option_types import BYTES, COUNT, Number, tokens_type
from gqa.core.options import HARDWARE, MAIN, MODEL, OUTPUT, Options, option, same_as
from gqa.eval.cache_formats import CACHE_FORMATS, CacheFormatName

_BITS = Number(int, "from 2 to 8")
_NAMED_FORMATS = [bits for bits in CACHE_FORMATS if isinstance(bits, str)]


class _CacheFormatType(click.ParamType[CacheFormatName]):
    """A key of `CACHE_FORMATS`: a number of bits, or a name."""

    name = "cache bits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> CacheFormatName:
        """The key. Raises BadParameter for what is none."""
        if isinstance(value, str) and value in _NAMED_FORMATS:
            return value
        if value == "auto":  # what vLLM calls its default
            self.fail("'auto' is the cache as it is; leave out --simulate-cache", param, ctx)
        try:
            bits: int = _BITS.convert(value, param, ctx)
        except click.BadParameter as error:
            message = f"{error.message}, nor {alternatives(_NAMED_FORMATS)}"
            raise click.BadParameter(message, ctx, param) from error
        return bits


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """See `gqa-eval --help`: the text, what is measured, how models are run, and what is printed.

    The first of `models` is the baseline.
    """

    models: tuple[str, ...] = option((), argument_metavar="BASELINE [MODEL]...")

    data: tuple[str, ...] | None = option(
        None,
        "Text to evaluate on: a file (txt, jsonl, csv, parquet, arrow), a directory, a glob, "
        "a hub dataset, or stdlib:heldout (modules of Python's standard library that "
        "stdlib:train leaves out). Repeat the option, or separate sources by commas.",
        metavar="SOURCE[,...]",
        group=MAIN,
    )
    kl: bool = option(
        False,
        "Measure KL divergence, top-1 agreement and acceptance: how far next-token predictions "
        "differ from the baseline's.  [default: off]",
        needs=("data",),
        group=MAIN,
    )
    recall: bool | None = option(
        None,
        "Measure recall: how many tokens a model predicts correctly because its context contains "
        "them. Kinds: repeated passages of the text, of generated text and of random tokens; "
        "values looked up by their keys; passkeys hidden in a text.  [default: on for decoders if "
        "-o and --data are given]",
        group=MAIN,
    )
    simulate_cache: tuple[CacheFormatName, ...] | None = option(
        None,
        "Also evaluate with simulated quantized KV caches, like fp8,8,4. Names: fp8 (not "
        "calibrated), int8_per_token_head and int4_per_token_head, rounded as in vLLM. Numbers: 2 "
        "to 8, integers of that many bits, in blocks of values. No engine is run.",
        _CacheFormatType(),
        metavar="FORMAT[,...]",
        needs=("data", "recall", "memory"),
        group=MAIN,
        alias="--cache-bits",
    )
    memory: int | None = option(
        None,
        "Show how many sequences of --context tokens fit into this memory next to the weights, "
        "like 71GiB (90% of the 79 GiB of an 80 GB GPU).",
        BYTES,
        metavar="SIZE",
        group=MAIN,
    )
    output: Path | None = option(
        None,
        "Write results.json and report.html to DIR.  [default: print tables only]",
        short="-o",
        metavar="DIR",
        group=MAIN,
    )

    text_column: str = same_as(ConvertOptions, "text_column", needs=("data",), group="Text")
    separator: str | None = same_as(ConvertOptions, "separator", needs=("data",), group="Text")
    target_column: str | None = option(
        None,
        "Encoder-decoders: column of targets; --text-column names that of sources.",
        metavar="NAME",
        needs=("data",),
        group="Text",
    )
    context: int | None = option(
        None,
        "Tokens per window, and per sequence in the memory table.  [default: the model's context, "
        "at most 2048]",
        tokens_type(4),
        metavar="COUNT",
        needs=("data", "recall", "memory"),
        group="Text",
    )
    tokens: int | None = option(
        None,
        "Score only the first COUNT tokens. For encoder-decoders: as many whole pairs as fit.  "
        "[default: all]",
        tokens_type(),
        metavar="COUNT",
        needs=("data",),
        group="Text",
    )

    decode: bool = option(False, "Time prefill and decoding.", group="Decoding speed")
    decode_batches: tuple[int, ...] = option(
        (1, 8), "Batch sizes of --decode.", COUNT, needs=("decode",), group="Decoding speed"
    )
    decode_contexts: tuple[int, ...] | None = option(
        None,
        "Prompt lengths of --decode, in tokens.  [default: half and all of the model's context, at "
        "most 4096]",
        tokens_type(),
        metavar="N[,...]",
        needs=("decode",),
        group="Decoding speed",
    )
    decode_steps: int = option(
        32, "Tokens to generate with --decode.", COUNT, needs=("decode",), group="Decoding speed"
    )

    device: str | None = option(
        None,
        "Device: cpu, cuda, cuda:1, mps (not tried), or auto: spread over all GPUs, then host "
        "memory, then disk.  [default: a GPU if there is one]",
        metavar="NAME",
        needs=("data", "recall", "decode"),
        group=HARDWARE,
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Dtype of the computation; auto: as stored, but float32 on a CPU that emulates 16 bits.",
        needs=("data", "recall", "decode"),
        group=HARDWARE,
    )
    batch_size: int = option(
        8, "Windows per forward pass.", COUNT, needs=("data", "recall"), group=HARDWARE
    )

    revision: str | None = same_as(ConvertOptions, "revision", group=MODEL)
    trust_remote_code: bool = same_as(ConvertOptions, "trust_remote_code", group=MODEL)

    overwrite: bool = option(False, "Replace the report at DIR.", needs=("output",), group=OUTPUT)
    json: bool = same_as(ConvertOptions, "json", group=OUTPUT)
    verbose: bool = option(False, "Show tracebacks.", short="-v", group=OUTPUT)
    quiet: bool = option(False, "Print only results.", short="-q", group=OUTPUT)

    @property
    def asks_for_recall(self) -> bool:
        """Whether recall is measured: --recall, or by default with a report on text."""
        return bool(self.output and self.data) if self.recall is None else self.recall

    def refuse_conflicts(self) -> None:
        """Raise RefusedError for options that conflict."""
        if not self.models:
            raise RefusedError(
                "no model was passed; pass one checkpoint or more, the baseline first"
            )
        for model in self.models:
            if self.json and model.endswith(".json") and not Path(model).exists():
                raise RefusedError(
                    f"--json takes no file name, but {model!r} was passed; to write the results "
                    f"there, end the command with > {shell_line([model])}"
                )
        if self.simulate_cache and self.decode:
            raise RefusedError(
                "--simulate-cache and --decode cannot be combined; remove one of them"
            )
        # Options that need others say which: that is more than that there is nothing to measure
        replace(self, recall=self.asks_for_recall).check_needs()
        if not any((self.data, self.recall, self.decode, self.memory)):
            for model in self.models:  # a name that is mistyped matters more
                require_model(model, self.revision)
            raise RefusedError(
                "there is nothing to measure; pass text with --data, or pass --recall, --decode "
                "or --memory"
            )
        if self.kl and not (len(self.models) > 1 or self.simulate_cache):
            raise RefusedError(
                "--kl compares checkpoints, but only one was passed; pass a second one, or "
                "--simulate-cache"
            )
