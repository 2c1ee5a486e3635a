"""The four commands as functions."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import PROVENANCE

from .models import Model, called_from_python, in_memory, name_of, saved
from .results import ConvertedModel, Evaluation, Study, TrainedModel

if TYPE_CHECKING:
    from gqa.convert.options import ConvertOptions
    from gqa.eval.options import EvaluateOptions
    from gqa.eval.study.options import AblateOptions
    from gqa.uptrain.options import TrainOptions

T = TypeVar("T")


def convert_model(model: Model | ConvertOptions, *, tokenizer: Any = None, **options: Any) -> ConvertedModel:
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
    from gqa.convert.api import convert_as, plan_for
    from gqa.convert.merge.watcher import Watcher
    from gqa.convert.options import ConvertOptions

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        settings, directory = _build(ConvertOptions, model, options, model=model), None
        if not isinstance(model, ConvertOptions):
            path, directory = stack.enter_context(saved(model, tokenizer))
            settings = replace(settings, model=path)
        settings.check()
        with Watcher(settings.quiet) as bar:
            plan = plan_for(settings, bar)
        with Watcher(settings.quiet, plan.total_bytes) as bar:
            conversion = convert_as(settings, plan, bar)
    return ConvertedModel(
        path=conversion.out, record=json.loads((conversion.out / PROVENANCE).read_text(encoding="utf-8")),
        warnings=conversion.warnings, layer_errors=bar.errors, _directory=directory,
    )  # fmt: skip


def uptrain_model(
    model: Model | TrainOptions, *, teacher: Model = "auto", tokenizer: Any = None, **options: Any
) -> TrainedModel:
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
    from gqa.convert.merge.watcher import Watcher
    from gqa.uptrain.options import TrainOptions
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
    return TrainedModel(path=setup.options.output, record=record, _directory=directory)


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
    from gqa.eval.options import EvaluateOptions
    from gqa.eval.report import reserved, write_report

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        settings = _build(EvaluateOptions, models[0] if models else None, options, models=models)
        settings.check()
        stack.enter_context(reserved(settings.output, settings.overwrite))
        if not isinstance(models[0], EvaluateOptions):
            loaded = [in_memory(model) for model in models]
            if tokenizer is not None and not any(loaded):
                raise RefusedError("tokenizer is for models in memory, and all of these bring their own; leave it out")
            copies = [saved(model, tokenizer if memory else None) for model, memory in zip(models, loaded, strict=True)]
            settings = replace(settings, models=tuple(stack.enter_context(copy)[0] for copy in copies))
        record = measure(settings, ())
        if record and settings.output:
            write_report(record, settings.output)
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
    from gqa.eval.study.ablation import open_study, run_study
    from gqa.eval.study.directory import remove_study
    from gqa.eval.study.options import AblateOptions
    from gqa.eval.study.report import write_study_report

    with called_from_python(bool(options.get("quiet"))):
        settings = _build(AblateOptions, model, options, model=model)
        study = open_study(settings)
        if settings.overwrite:
            remove_study(settings.output)
        run_study(study)
        rows, _ = write_study_report(settings.output, settings.max_loss_increase)
    return Study(path=settings.output, rows=rows)


def _build(kind: type[T], first: Any, fields: dict[str, Any], **models: Any) -> T:
    """The options of a call: `first` if it is a `kind`, else one of `fields` and the names of `models`. Raises
    TypeError if both are given.
    """
    if not isinstance(first, kind):
        names = {name: tuple(map(name_of, m)) if isinstance(m, tuple) else name_of(m) for name, m in models.items()}
        return kind(**names, **fields)
    if fields:
        raise TypeError(f"{kind.__name__} holds all options: change it instead of giving {', '.join(fields)} too")
    return first
