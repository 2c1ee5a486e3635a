"""The options of gqa-convert. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions, Refinement
from gqa.convert.methods.base import Method
from gqa.convert.methods.table import DEFAULT, MEASURES_LAYERS, METHODS
from gqa.core.errors import RefusedError, alternatives
from gqa.core.options import (
    COUNT,
    HARDWARE,
    MAIN,
    MODEL,
    OUTPUT,
    SEED,
    KVHeads,
    Number,
    OneOf,
    Options,
    Text,
    flag,
    option,
    tokens_type,
)
from gqa.corpus.specs import is_self, parse_self


@dataclass(frozen=True)
class ConvertOptions(Options):
    """See `gqa-convert --help`."""

    model: str = option(
        MISSING,
        argument="MODEL",
        missing="pass the model: a directory with config.json, or a hub id",
    )

    kv_heads: int | tuple[int, ...] | None = option(
        None,
        "Number of KV heads of the result: a divisor of the model's number, or a multiple of it, "
        "to repeat heads. For different numbers per layer, pass one number for each layer, like "
        "3,1,1,3.",
        KVHeads(),
        short="-g",
        alias="--groups",
        metavar="G",
        group=MAIN,
    )
    kv_budget: float | None = option(
        None,
        "Share of the KV cache to keep, like 0.5, instead of --kv-heads. The command then chooses "
        "the number of KV heads of each layer by the loss that each number causes.",
        Number(float, "above 0 below 1"),
        metavar="FRACTION",
        group=MAIN,
    )
    method: str = option(
        DEFAULT,
        "How to merge KV heads; see the table below.",
        OneOf((*METHODS,)),
        metavar="METHOD",
        group=MAIN,
    )
    output: Path | None = option(
        None,
        "Output directory.  [default: MODEL-gqa<G>-<METHOD> next to MODEL, MODEL-mqa-<METHOD> if G "
        "is 1, MODEL-gqa<G> if no heads are merged]",
        short="-o",
        metavar="DIR",
        group=MAIN,
    )
    dry_run: bool = option(
        False,
        "Print the plan, and write nothing. For a hub id, fetch only config and headers.",
        group=MAIN,
    )

    data: tuple[str, ...] = option(
        CalibrationText.sources,
        "Calibration text: self (sampled from MODEL), self:TOKENS (that many sampled tokens), "
        "self:plain (sampled, without repeated passages), general (short documents of many kinds), "
        "a file, a hub dataset, or stdlib:train (the source code of Python's standard library). "
        "Repeat the option, or separate sources by commas.",
        metavar="SOURCE[,...]",
        methods="text",
        group="Calibration text",
    )
    tokens: int = option(
        CalibrationText.tokens,
        "Tokens of text in all; up to 8,192 of them measure the quality. Sources share them "
        "equally; general beside others has a quarter, at most 12,288. The tokens of self:TOKENS "
        "are added to this number.",
        tokens_type(),
        metavar="COUNT",
        methods="text",
        group="Calibration text",
    )
    context: int = option(
        CalibrationText.length,
        "Tokens per calibration block.",
        tokens_type(2),
        metavar="COUNT",
        methods="text",
        group="Calibration text",
    )
    text_column: str = option(
        "text",
        "Column that holds the text, in JSON files, tables and hub datasets. For chats: messages "
        "or conversations.",
        metavar="NAME",
        methods="text",
        group="Calibration text",
    )
    separator: str | None = option(
        None,
        "Separator of the documents in a text file, like '<|endoftext|>' or '\\n\\n'.  [default: "
        "one document per file]",
        Text(blank=True),
        metavar="TEXT",
        methods="text",
        group="Calibration text",
    )
    target_column: str | None = option(
        None,
        "Encoder-decoders: the column of targets; --text-column names that of sources.  "
        "[default: mask spans of plain text]",
        metavar="NAME",
        methods="text",
        group="Calibration text",
    )

    grouping: Literal["auto", "contiguous"] = option(
        "auto",
        "Which KV heads to merge. auto: search for the groups with the least loss; contiguous: "
        "merge neighboring heads.",
        methods="maps",
        group="Merging",
    )
    refine_steps: int = option(
        Refinement.steps,
        "Training steps per layer (--method refined).",
        COUNT,
        methods="training",
        group="Merging",
    )
    seed: int = option(0, "Random seed.", SEED, methods="seed", group="Merging")

    device: str | None = option(
        None,
        "Device: cpu, cuda, cuda:1 or mps (not tried).  [default: a GPU if there is one]",
        metavar="NAME",
        methods="maps",
        group=HARDWARE,
    )
    precision: Literal["float32", "bfloat16", "float16"] = option(
        "float32",
        "Dtype of the computation; 16 bits are less accurate.",
        methods="text",
        group=HARDWARE,
    )

    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = option(
        None, "Dtype of the stored weights.  [default: unchanged]", group=MODEL
    )
    revision: str | None = option(
        None, "Branch, tag or commit of a hub id.", metavar="NAME", group=MODEL
    )
    trust_remote_code: bool = option(
        False,
        "Run the Python code in the checkpoint. It can do anything on this machine: read it first.",
        methods="text",
        group=MODEL,
    )

    check: bool = option(
        True,
        "Compare perplexity and recall with those of MODEL, on text that was not used for "
        "calibration.",
        group=OUTPUT,
    )
    overwrite: bool = option(
        False, "Replace the checkpoint at DIR once the new one is complete.", group=OUTPUT
    )
    json: bool = option(
        False, "One JSON object on stdout, everything else on stderr.", group=OUTPUT
    )
    verbose: bool = option(
        False, "List every changed tensor; show tracebacks.", short="-v", group=OUTPUT
    )
    quiet: bool = option(False, "Print errors and warnings only.", short="-q", group=OUTPUT)
    # For Python callers: whether half of the blocks repeat themselves.
    repeats: bool = option(True, methods="text", expert=True)

    @cached_property
    def maps_options(self) -> MapsOptions:
        """How maps are computed. Raises RefusedError for a device that cannot be used.

        Found once, since the device is looked for.
        """
        from gqa.core.devices import find_device

        text = CalibrationText(
            sources=self.data,
            tokens=self.tokens,
            length=self.context,
            seed=self.seed,
            text_column=self.text_column,
            target_column=self.target_column,
            repeats=self.repeats,
            trust_remote_code=self.trust_remote_code,
            separator=self.separator,
        )
        refinement = Refinement(self.refine_steps, seed=self.seed)
        return MapsOptions(
            text=text,
            grouping=self.grouping,
            refinement=refinement,
            dtype=self.precision,
            device=find_device(self.device),
            check=self.check,
        )

    def refuse_conflicts(self) -> None:
        """Raise RefusedError if options exclude each other, or the method does not use one."""
        if self.kv_heads is not None and self.kv_budget is not None:
            raise RefusedError(
                "--kv-heads and --kv-budget cannot be combined, because both determine the "
                "number of KV heads; remove one of them"
            )
        if self.kv_budget and self.dry_run:
            raise RefusedError(
                "--kv-budget and --dry-run cannot be combined, because --kv-budget has to run "
                "the model; remove one of them"
            )
        if self.is_set("tokens") and self._data_states_tokens():
            raise RefusedError(
                "--tokens and --data self:TOKENS cannot be combined, because both determine the "
                "number of tokens; remove --tokens, or pass --data self"
            )

        methods = [self.method]
        if self.kv_budget:
            methods.append(MEASURES_LAYERS)
        refuse_unused(self, methods, f"--method {self.method}")

    def _data_states_tokens(self) -> bool:
        """Whether each source of calibration text states its number of tokens (`self:TOKENS`)."""
        if not self.data:
            return False
        return all(is_self(source) and parse_self(source)[0] for source in self.data)


def options_of(method: Method) -> set[str]:
    """The options of gqa-convert that a method uses and other methods may not."""
    fields = ConvertOptions.__dataclass_fields__
    return {name for name, field in fields.items() if field.metadata["methods"] in method.settings}


def refuse_unused(options: Options, methods: Iterable[str], where: str) -> None:
    """Raise RefusedError for an option that is set and that none of `methods` uses; `where` names
    them.
    """
    used = set[str]()
    for name in methods:
        used |= METHODS[name].settings

    for name, field in type(options).__dataclass_fields__.items():
        setting = field.metadata["methods"]
        if setting and setting not in used and options.is_set(name):
            users = [user for user, method in METHODS.items() if setting in method.settings]
            raise RefusedError(
                f"{flag(name)} is not used by {where}; remove it, or use it with --method "
                f"{alternatives(users)}"
            )
