"""Measuring from Python: what gqa-eval and gqa-ablate do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError
from gqa.eval.options import EVALUATION, EvaluateOptions

from .given import Model, asked, in_memory, name_of, stored, undisturbed
from .results import Evaluation, Study

_OF_STUDIES = ("output", "quiet", "verbose", "dry_run", "recommend")
_OF_TERMINALS = ("output", "quiet", "verbose", "json")


def evaluate(
    baseline: Model,
    *models: Model,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    tokenizer: Any = None,
    options: EvaluateOptions | None = None,
    **named: Any,
) -> Evaluation:
    """Compare models on the same text: quality, memory and speed side by side.

    Args:
        baseline: What the others are compared with: a directory, a hub id, a result of another function, or a loaded
            model.
        models: The others.
        data: Text: a file, a directory or glob of them, `stdlib:heldout`, or a hub data set.
        out: Directory for a report; `overwrite=True` replaces an earlier one.
        progress: Show bars.
        tokenizer: Of the models that are loaded.
        options: All that is asked for as `EvaluateOptions`, and nothing beside it but `progress` and `tokenizer`.
        named: Or the options of gqa-eval by name (`kl=True`, `context=512`, `decode=True` ...), those of
            `EvaluateOptions`; numbers of tokens and sizes also as the command reads them (`64k`, `80GB`).

    Raises:
        RefusedError: A model, the text or an option cannot be used, or two models do not compare.
        TypeError: An option has a name that there is none of.
        OutputError: The report cannot be written.
    """
    from gqa.eval.cli import command
    from gqa.eval.evaluate import measure
    from gqa.eval.report import reserved, write_report

    if options is not None:
        if named or data is not None or out is not None:
            raise TypeError("EvaluateOptions say everything: leave out what stands beside them, or change it in them")
        said = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
        shown = progress and not said.pop("quiet", False)
        return evaluate(
            baseline, *models, out=said.pop("output", None), progress=shown, tokenizer=tokenizer, **said
        )  # fmt: skip
    given = {name: value for name, value in {"data": data, **named}.items() if value is not None}
    path = None if out is None else Path(out)
    if tokenizer is not None and not any(map(in_memory, (baseline, *models))):
        raise RefusedError("tokenizer is for models in memory, and all of these bring their own; leave it out")
    with ExitStack() as stack:
        stack.enter_context(undisturbed(progress))
        names = {"baseline": name_of(baseline), "models": [name_of(model) for model in models]}
        context = asked(command, names, given, _OF_TERMINALS)
        read = EVALUATION.read(context.params, output=path, quiet=not progress).settled(given, len(models))
        stack.enter_context(reserved(path, read.overwrite))
        places = [
            stack.enter_context(stored(model, tokenizer if in_memory(model) else None)) for model in (baseline, *models)
        ]
        results = measure(places, read, ())
        if results and path is not None:
            write_report(results, path)
    return Evaluation(results=results, path=path)


def ablate(
    model: str | os.PathLike[str],
    data: str | Sequence[str],
    out: str | os.PathLike[str],
    progress: bool = True,
    **options: Any,
) -> Study:
    """Measure every combination of methods, numbers of heads and further training, and write a report to `out`.

    Args:
        model: A directory, a hub id or a result of another function.
        data: Text to train on; several in a list.
        out: Directory of the study. The same call continues one that was stopped.
        progress: Show how it goes.
        options: The options of gqa-ablate by name (`methods=["mean", "aligned"]`, `groups=[1, 2]`, `alphas=[0, 0.05]`
            ...), read as it reads them.

    Raises:
        RefusedError: The model, the text or an option cannot be used.
        TypeError: An option has a name that there is none of.
        StoppedError: A signal asked for the end.
    """
    from gqa.eval.study.ablation import open_study
    from gqa.eval.study.cli import command, measure, read_bounds, read_study
    from gqa.eval.study.directory import forget
    from gqa.eval.study.report import open_results, write_study_report

    place = os.fspath(model)
    context = asked(command, {"model": place}, {"data": data, **options}, _OF_STUDIES, output=os.fspath(out))
    read = {name: value for name, value in context.params.items() if name not in ("model", "output", "quiet")}
    with undisturbed(progress), context.scope():
        bounds = read_bounds(read)
        how = {"strict": options.get("methods") is not None, "anew": read["overwrite"]}
        study = open_study(*read_study(place, Path(out), read), **how)
        if read["overwrite"]:
            forget(Path(out))
        measure(study, not progress, ())
    results = open_results(Path(out))
    write_study_report(results, bounds)
    return Study(path=Path(out), rows=results.rows)
