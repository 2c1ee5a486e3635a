"""The options of gqa-convert. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import click

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.options import COUNT, SEED, KVHeads, Number, Options, Text, flag, option, tokens_type
from gqa.convert.merge.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.methods import DEFAULT, GROUPINGS, METHODS


@dataclass(frozen=True)
class ConvertOptions(Options):
    """See `gqa-convert --help`."""

    # fmt: off
    model: str = option(MISSING, argument="MODEL")
    kv_heads: int | tuple[int, ...] | None = option(
        None, "Key/value heads of the result: a divisor of the model's own, or a multiple to expand; or one number for "
        "each layer, 3,1,1,3.", KVHeads(), short="-g", metavar="G")
    kv_budget: float | None = option(
        None, "Instead of --groups: the share of the KV cache that is left, like 0.5. Each layer keeps as many heads "
        "as it needs, which is measured on text that the model writes.", Number(float, "above 0 below 1"),
        metavar="SHARE")
    output: Path | None = option(
        None, "The directory to make.  [default: MODEL-gqa<G>-<METHOD> beside MODEL, MODEL-mqa-<METHOD> for 1]",
        short="-o", metavar="DIR")
    method: str = option(
        DEFAULT, "How the heads of a group become one: see below.", click.Choice((*METHODS,)), metavar="METHOD")
    data: tuple[str, ...] = option(
        CalibrationText.sources, "Text for calibrated and refined: self (sampled from the model), self:TOKENS, "
        "self:plain, a file, a hub data set, stdlib:train; several times, or with commas.",
        metavar="SOURCE[,...]", methods="reads_text")
    tokens: int = option(
        CalibrationText.tokens, "Tokens of text in all, equally of each source.", tokens_type(),
        metavar="COUNT", methods="reads_text")
    context: int = option(
        CalibrationText.length, "Tokens of one block of text.", tokens_type(2), metavar="COUNT", methods="reads_text")
    field: str = option(
        "text", "The column that holds the text, in jsonl, csv, parquet and data sets.", metavar="NAME",
        methods="reads_text")
    separator: str | None = option(
        None, "What separates the documents of a text file, like '<|endoftext|>' or '\\n\\n'.  [default: a file is one "
        "document]", Text(blank=True), metavar="TEXT", methods="reads_text")
    target_field: str | None = option(
        None, "The column of targets for sources in --field, of encoder-decoders.  "
        "[default: plain text, of which spans are left out]", metavar="NAME", methods="reads_text")
    grouping: str = option(
        "auto", "Which heads share: neighbours, or those that lose least by it. auto: search among few heads (8, or 12 "
        "in pairs).", click.Choice(GROUPINGS), methods="aligns")
    refine_steps: int = option(Refinement.steps, "Training steps of each layer.", COUNT, methods="refines")
    precision: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "What layers are run in; 16 bits blur what the converted layers lack.", methods="reads_text")
    device: str | None = option(
        None, "Where models run: cpu, cuda, cuda:1, mps.  [default: a GPU where there is one]",
        metavar="NAME", methods="aligns")
    seed: int = option(0, "The seed of random draws and samples.", SEED, methods="draws")
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = option(
        None, "Store all weights so.  [default: as they are]")
    revision: str | None = option(None, "The branch, tag or commit of a hub id.", metavar="NAME")
    trust_remote_code: bool = option(False, "Run code that a checkpoint brings (dangerous).", methods="reads_text")
    check: bool = option(
        True, "Measure what the result loses beside MODEL, where text is read: on text that nothing is fitted to.")
    dry_run: bool = option(False, "Print the plan and write nothing; of a hub id only headers are fetched.")
    json: bool = option(False, "One JSON object on stdout, everything else on stderr.")
    overwrite: bool = option(False, "Replace the checkpoint at DIR once the new one is complete.")
    tensor_parallel: int = option(
        1, "Tensor-parallel ranks that share the result: heads by layer are multiples of it.", COUNT,
        needs=("kv_budget",))
    verbose: bool = option(False, "List every changed tensor, and show where an error comes from.", short="-v")
    quiet: bool = option(False, "Print errors and warnings only.", short="-q")
    # For Python callers.
    repeats: bool = option(True, methods="reads_text", expert=True)  # half of the blocks repeat themselves
    # fmt: on

    def maps(self) -> MapsOptions:
        """How maps are found. Raises RefusedError for a device that cannot be used."""
        from gqa.checkpoint.loading import find_device

        text = CalibrationText(
            self.data, self.tokens, self.context, self.seed, self.field, self.target_field, self.repeats,
            self.trust_remote_code, separator=self.separator,
        )  # fmt: skip
        refinement = Refinement(self.refine_steps, seed=self.seed)
        return MapsOptions(
            text=text, grouping=self.grouping, refinement=refinement, dtype=self.precision,
            device=find_device(self.device), check=self.check,
        )  # fmt: skip

    def refuse_conflicts(self) -> None:
        """Raises RefusedError where options do not go together, or the method does not use one."""
        self.check_needs()
        if (self.kv_heads is None) == (self.kv_budget is None):
            raise RefusedError("give --groups G, or --kv-budget SHARE for a share of the KV cache; one of them")
        if self.kv_budget and self.dry_run:
            raise RefusedError("--kv-budget measures the layers of a model, --dry-run runs none; leave one of them out")
        refuse_unused(self, (self.method, DEFAULT) if self.kv_budget else (self.method,), f"--method {self.method}")


def refuse_unused(options: Options, methods: Iterable[str], where: str) -> None:
    """Raises RefusedError for an option that is given and that none of `methods` uses; `where` names them."""
    known = [METHODS[name] for name in methods]
    for name, field in type(options).__dataclass_fields__.items():
        uses = field.metadata["methods"]
        if uses and options.is_set(name) and not any(getattr(method, uses) for method in known):
            users = ", ".join(other for other, method in METHODS.items() if getattr(method, uses))
            raise RefusedError(f"{flag(name)} is not used by {where}; it goes with --method {users}")
