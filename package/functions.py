"""The four commands as functions, and their results. The docstring of `gqa` lists the errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.convert.options import ConvertOptions
from gqa.eval.options import EvaluateOptions
from gqa.study.options import AblateOptions
from gqa.uptrain.options import UptrainOptions

from .calls import Model, options_of_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gqa.convert.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Result:
    """A checkpoint written by `convert_model` or `uptrain_model`.

    Every function accepts it as a model.

    Attributes:
        path: Its directory.
        record: The JSON file next to its weights.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    # Keeps temporary directories alive: its own, and that of the result from which it was made, in
    # which it may lie.
    _directories: Any = field(default=None, compare=False, repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def load(self, dtype: str = "auto", device: str = "cpu") -> PreTrainedModel:
        """The model, in evaluation mode. `dtype`: auto (as stored), float32, bfloat16 or float16.

        Raises RefusedError if transformers cannot load it, or the device cannot be used.
        """
        from gqa.core.devices import find_device
        from gqa.models.loading import load_model

        if device != "auto":
            device = find_device(device)
        return load_model(str(self.path), dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of `evaluate_models`. `str` returns the verdicts and tables that gqa-eval prints.

    Attributes:
        path: The directory of the report, if any.
        record: results.json of gqa-eval.
    """

    path: Path | None = None
    record: Mapping[str, Any] = field(repr=False)

    def __str__(self) -> str:
        from gqa.eval.report import as_text

        return as_text(dict(self.record))


@dataclass(frozen=True, kw_only=True)
class Study:
    """Results of `ablate_model`. `str` returns the table that gqa-ablate prints.

    Attributes:
        path: The directory of the report.
        rows: Those of results.jsonl, one per combination.
        recommendation: The recommendation that gqa-ablate prints.
    """

    path: Path
    rows: list[dict[str, Any]] = field(repr=False)
    recommendation: str

    def __str__(self) -> str:
        from gqa.study.report import short_table

        return short_table(self.rows).text()


def convert_model(
    model: Model | ConvertOptions, *, tokenizer: Any = None, **options: Any
) -> Result:
    """Convert a checkpoint to one with fewer (or more) key/value heads.

    Args:
        model: A directory, a model id, a result of another function, or a loaded model, which is
            not changed: a copy is written to a temporary directory. Or all options as
            `ConvertOptions`.
        tokenizer: Of a loaded model; it is saved with the result.
        options: The fields of `ConvertOptions` (`kv_heads=2`, `method="refined"`, `data="self"`
            ...). Without `output` the result of a loaded model is in a temporary directory that
            exists as long as the result object.
    """
    from gqa.convert.api import convert, prepare
    from gqa.core.console import Watcher

    call = options_of_call(ConvertOptions, options, tokenizer, model=model)
    with call as (settings, directories), Watcher(settings.quiet) as watcher:
        done = convert(prepare(settings, watcher), settings, watcher)
        for warning in done.warnings:
            watcher.warn(warning)
    return Result(path=done.out, record=done.record, _directories=directories)


def plan_conversion(
    model: str | os.PathLike[str], kv_heads: int | tuple[int, ...], **options: Any
) -> Plan:
    """What `convert_model` would do, like `gqa-convert --dry-run`; no weights are read.

    Args:
        model: A directory, or a model id, of which only config and headers are fetched.
        kv_heads: KV heads of each layer, or one number for each layer.
        options: The fields of `ConvertOptions`.
    """
    from gqa.convert import api

    return api.plan_conversion(model, kv_heads, **options)


def uptrain_model(
    model: Model | UptrainOptions, *, teacher: Model = "auto", tokenizer: Any = None, **options: Any
) -> Result:
    """Train a converted checkpoint further, in one process, and write the result as a checkpoint.

    Args:
        model: A directory, a model id, a result of another function, or a loaded model with its
            `tokenizer`. Or all options as `UptrainOptions`.
        teacher: The model before conversion, whose predictions are distilled; may be a loaded
            model.
        options: The fields of `UptrainOptions` (`data="corpus.jsonl"`, `tokens="1M"`,
            `learning_rate=1e-4` ...). Without `output` a loaded model is written to a temporary
            directory that exists as long as the result.
    """
    from gqa.core.compat import fresh_accelerator
    from gqa.core.console import Watcher
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    call = options_of_call(UptrainOptions, options, tokenizer, model=model, teacher=teacher)
    with call as (settings, directories), fresh_accelerator(), Watcher(settings.quiet) as watcher:
        run = prepare(settings, watcher=watcher)
        _, record = uptrain(run, watcher)
    assert run.options.output  # `prepare` decides it
    return Result(path=run.options.output, record=record, _directories=directories)


def evaluate_models(
    *models: Model | EvaluateOptions, tokenizer: Any = None, **options: Any
) -> Evaluation:
    """Compare models on the same text: quality, memory and speed side by side.

    Args:
        models: Directories, model ids, results of other functions, or loaded models; the first is
            the baseline. Or all options as one `EvaluateOptions`.
        tokenizer: Of the loaded models.
        options: The fields of `EvaluateOptions` (`data="text.txt"`, `kl=True`, `memory="80GB"`
            ...). Without `output` no report is written.
    """
    from gqa.eval.evaluate import measure
    from gqa.eval.report import open_report, write_report

    compared: Any = models
    if len(models) == 1 and isinstance(models[0], EvaluateOptions):
        compared = models[0]  # all options, the models among them

    with options_of_call(EvaluateOptions, options, tokenizer, models=compared) as (settings, _):
        settings.refuse_conflicts()
        with open_report(settings) as report:
            record = measure(settings, ())
            if report:
                write_report(record, report)
    return Evaluation(record=record, path=settings.output)


def ablate_model(model: Model | AblateOptions, *, tokenizer: Any = None, **options: Any) -> Study:
    """Measure every combination of methods, numbers of heads and further training, and write a
    report to `output`. The same call continues a study that was stopped.

    Args:
        model: The base model, as in `convert_model`. Or all options as `AblateOptions`.
        tokenizer: Of a loaded model.
        options: The fields of `AblateOptions` (`data="corpus.jsonl"`, `output="study"`,
            `methods=["mean", "aligned"]`, `kv_heads=[1, 2]`, `alphas=[0, 0.05]` ...).
    """
    from gqa.study.ablation import Ablation
    from gqa.study.report import write_study_report

    with options_of_call(AblateOptions, options, tokenizer, model=model) as (settings, _):
        Ablation(settings).run()
        rows, recommendation, _ = write_study_report(settings.output, settings.max_loss_increase)
    recommendation = recommendation.replace("--max-loss-increase", "max_loss_increase")
    return Study(path=settings.output, rows=rows, recommendation=recommendation)
