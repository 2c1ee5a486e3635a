"""The four commands as functions, and what they return."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import PROVENANCE
from gqa.convert.options import ConvertOptions
from gqa.eval.options import EvaluateOptions
from gqa.eval.study.options import AblateOptions
from gqa.uptrain.options import TrainOptions

from .models import Model, called_from_python, in_memory, name_of, saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A checkpoint that `convert_model` or `uptrain_model` wrote, which every function takes as a model; `record` is
    the JSON file beside its weights.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    # A temporary directory, which exists as long as this object.
    _directory: Any = field(default=None, compare=False, repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def load(
        self, *, dtype: str = "auto", device: str = "cpu", attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> PreTrainedModel:  # fmt: skip
        """The model, in evaluation mode. `dtype`: auto (as stored), float32, bfloat16 or float16.

        Raises RefusedError if transformers cannot load it.
        """
        from gqa.checkpoint.loading import load_model

        with called_from_python():
            return load_model(
                str(self.path), dtype=dtype, device=device, attention=attn_implementation,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` measured: `record` is results.json of gqa-eval, `path` the directory of the report, if any."""

    path: Path | None = None
    record: Mapping[str, Any] = field(repr=False)

    @property
    def models(self) -> list[dict[str, Any]]:
        """The record of each model, the baseline first."""
        return list(self.record["models"])

    def __str__(self) -> str:
        """The verdicts and tables that gqa-eval prints."""
        from gqa.eval.report import as_text

        return as_text(dict(self.record))


@dataclass(frozen=True, kw_only=True)
class Study:
    """What `ablate` measured: `rows` are those of results.jsonl, one a cell; `path` is the directory of the report."""

    path: Path
    rows: list[dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        """The table that gqa-ablate prints."""
        from gqa.eval.study.report import short_table

        return short_table(self.rows).text()

    def recommend(self, max_loss_increase: float = 0.1) -> str:
        """The smallest KV cache within so many nats per token above the base model, and why."""
        from gqa.eval.study.report import recommend

        return recommend(self.rows, max_loss_increase)[1]


def convert_model(model: Model | ConvertOptions, *, tokenizer: Any = None, **options: Any) -> Result:
    """Convert a checkpoint to one with fewer (or more) key/value heads.

    Args:
        model: A directory, a hub id, a result of another function, or a loaded model, which stays as it is and of which
            a copy is written to a temporary directory. Or all options as `ConvertOptions`.
        tokenizer: Of a loaded model; it is written beside the result.
        options: The fields of `ConvertOptions` (`groups=2`, `method="refined"`, `data="self"` ...). Without `output`
            the result of a loaded model is in a temporary directory that exists as long as the result object.

    Raises:
        RefusedError: The model or an option cannot be used; before anything is written.
        TypeError: There is no option of that name.
        OutputError: The result could not be written or did not verify; nothing is left at `output`.
    """
    from gqa.checkpoint.console import Watcher
    from gqa.convert.api import convert, prepare

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        settings, directory = _build(ConvertOptions, model, options, model=model), None
        if not isinstance(model, ConvertOptions):
            path, directory = stack.enter_context(saved(model, tokenizer))
            settings = replace(settings, model=path)
        settings.check()
        with Watcher(settings.quiet) as bar:
            out = convert(prepare(settings, bar), settings, bar).out
    return Result(path=out, record=json.loads((out / PROVENANCE).read_text(encoding="utf-8")), _directory=directory)


def uptrain_model(
    model: Model | TrainOptions, *, teacher: Model = "auto", tokenizer: Any = None, **options: Any
) -> Result:
    """Train a converted checkpoint further, in one process, and write the result as a checkpoint.

    Args:
        model: A directory, a hub id, a result of another function, or a loaded model with its `tokenizer`. Or all
            options as `TrainOptions`.
        teacher: The model before conversion, whose predictions are learnt; it may be loaded, too.
        options: The fields of `TrainOptions` (`data="corpus.jsonl"`, `tokens="1M"`, `learning_rate=1e-4` ...). Without
            `output` a loaded model is written to a temporary directory that exists as long as the result.

    Raises:
        RefusedError: The model, the text or an option cannot be used; before anything is written.
        TypeError: There is no option of that name.
        DivergedError: The loss was not finite too often in a row.
        StoppedError: A signal (an interrupt of the kernel) asked for the end; with `resume=True` the run goes on.
        OutputError: The result could not be written or did not verify.
    """
    from gqa.checkpoint.compat import fresh_accelerator
    from gqa.checkpoint.console import Watcher
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        settings, directory = _build(TrainOptions, model, options, model=model, teacher=teacher), None
        if not isinstance(model, TrainOptions):
            path, directory = stack.enter_context(saved(model, tokenizer))
            settings = replace(settings, model=path)
            if in_memory(teacher):
                settings = replace(settings, teacher=stack.enter_context(saved(teacher, tokenizer))[0])
        stack.enter_context(fresh_accelerator())
        with Watcher(settings.quiet) as bar:
            setup = prepare(settings, watcher=bar)
        _, record = uptrain(setup, quiet=settings.quiet)
    assert setup.options.output
    return Result(path=setup.options.output, record=record, _directory=directory)


def evaluate(*models: Model | EvaluateOptions, tokenizer: Any = None, **options: Any) -> Evaluation:
    """Compare models on the same text: quality, memory and speed side by side.

    Args:
        models: Directories, hub ids, results of other functions, or loaded models; the first is the baseline. Or all
            options as one `EvaluateOptions`.
        tokenizer: Of the models that are loaded.
        options: The fields of `EvaluateOptions` (`data="text.txt"`, `kl=True`, `memory="80GB"` ...). Without `output`
            no report is written.

    Raises:
        RefusedError: A model, the text or an option cannot be used, or two models do not compare.
        TypeError: There is no option of that name.
        OutputError: The report cannot be written.
    """
    from gqa.eval.evaluate import measure
    from gqa.eval.report import open_report, write_report

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        settings = _build(EvaluateOptions, models[0] if models else None, options, models=models)
        settings.check()
        report = stack.enter_context(open_report(settings))
        if not isinstance(models[0], EvaluateOptions):
            alone = not any(map(in_memory, models))  # then the tokenizer is refused
            copies = [saved(model, tokenizer if in_memory(model) or alone else None) for model in models]
            settings = replace(settings, models=tuple(stack.enter_context(copy)[0] for copy in copies))
        record = measure(settings, ())
        if report:
            write_report(record, report)
    return Evaluation(record=record, path=settings.output)


def ablate(model: str | os.PathLike[str] | AblateOptions, **options: Any) -> Study:
    """Measure every combination of methods, numbers of heads and further training, and write a report to `output`.
    The same call continues a study that was stopped.

    Args:
        model: A directory, a hub id or a result of another function. Or all options as `AblateOptions`.
        options: The fields of `AblateOptions` (`data="corpus.jsonl"`, `output="study"`, `methods=["mean", "aligned"]`,
            `groups=[1, 2]`, `alphas=[0, 0.05]` ...).

    Raises:
        RefusedError: The model, the text or an option cannot be used.
        TypeError: There is no option of that name.
        StoppedError: A signal asked for the end.
    """
    from gqa.eval.study.ablation import Ablation
    from gqa.eval.study.report import write_study_report

    with called_from_python(bool(options.get("quiet"))):
        settings = _build(AblateOptions, model, options, model=model)
        Ablation(settings).run()
        rows, _ = write_study_report(settings.output, settings.max_loss_increase)
    return Study(path=settings.output, rows=rows)


def _build(kind: type[T], first: Any, fields: dict[str, Any], **models: Any) -> T:
    """The options of a call: `first` if it is a `kind`, else one of `fields` and the names of `models`. Raises
    TypeError if both are given, RefusedError for a dry run, which returns nothing.
    """
    if getattr(first, "dry_run", False) or fields.get("dry_run"):
        raise RefusedError("dry_run is for the commands; leave it out")
    if not isinstance(first, kind):
        names = {name: tuple(map(name_of, m)) if isinstance(m, tuple) else name_of(m) for name, m in models.items()}
        return kind(**names, **fields)
    if fields:
        raise TypeError(f"{kind.__name__} holds all options: change it instead of giving {', '.join(fields)} too")
    return first
