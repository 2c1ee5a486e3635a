"""gqa-eval and gqa-ablate from Python."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import RefusedError

from .given import Model, called_from_python, in_memory, read_options, stored
from .results import Evaluation, Study

if TYPE_CHECKING:
    from gqa.eval.options import EvaluateOptions
    from gqa.eval.study.study import AblateOptions


def evaluate(*models: Model | EvaluateOptions, tokenizer: Any = None, **options: Any) -> Evaluation:
    """Compare models on the same text: quality, memory and speed side by side.

    Args:
        models: Directories, hub ids, results of other functions, or loaded models; the first is what the others are
            compared with. Or all options as one `EvaluateOptions`.
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

    with ExitStack() as stack:
        stack.enter_context(called_from_python(bool(options.get("quiet", False))))
        given = read_options(EvaluateOptions, models[0] if models else None, options, models=models).settled()
        stack.enter_context(reserved(given.output, given.overwrite))
        if not isinstance(models[0], EvaluateOptions):
            loaded = [in_memory(model) for model in models]
            if tokenizer is not None and not any(loaded):
                raise RefusedError("tokenizer is for models in memory, and all of these bring their own; leave it out")
            paths = [stored(model, tokenizer if own else None) for model, own in zip(models, loaded, strict=True)]
            given = replace(given, models=tuple(stack.enter_context(path)[0] for path in paths))
        record = measure(given.models, given, ())
        if record and given.output:
            write_report(record, given.output)
    return Evaluation(record=record, path=given.output)


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
    from gqa.eval.study.ablation import open_study
    from gqa.eval.study.cli import measure
    from gqa.eval.study.directory import forget
    from gqa.eval.study.report import open_results, write_study_report
    from gqa.eval.study.study import AblateOptions
    from gqa.eval.study.tradeoff import Bounds

    with called_from_python(bool(options.get("quiet"))):
        given = read_options(AblateOptions, model, options, model=model)
        study = open_study(given)
        if given.overwrite:
            forget(given.output)
        measure(study, given.quiet, ())
        results = open_results(given.output)
        write_study_report(results, Bounds(given.max_loss_increase, given.max_recall_loss, given.kv_bytes))
    return Study(path=given.output, rows=results.rows)
