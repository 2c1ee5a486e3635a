"""Measuring from Python: what gqa-eval does."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import without_place

from .given import Model, asked, in_memory, name_of, stored, undisturbed
from .results import Evaluation

_OF_TERMINALS = ("output", "quiet", "verbose", "json", "fail_above")


def evaluate(
    baseline: Model,
    *models: Model,
    data: str | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    tokenizer: Any = None,
    **options: Any,
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
        options: The options of gqa-eval by name (`kl=True`, `context=512`, `decode=True` ...), read as it reads them.

    Raises:
        RefusedError: A model, the text or an option cannot be used, or two models do not compare.
        TypeError: An option has a name that there is none of.
        OutputError: The report cannot be written.
    """
    from gqa.eval.cli import check, command, measure
    from gqa.eval.report import check_output, write_report

    given = {name: value for name, value in {"data": data, **options}.items() if value is not None}
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        names = [name_of(model) if in_memory(model) else os.fspath(model) for model in (baseline, *models)]
        read, words = asked(command, names, given, _OF_TERMINALS)
        read |= {"output": out, "quiet": not progress}
        check(read, set(given), len(models))
        if out is not None:
            check_output(Path(out), read["overwrite"])
        places = [
            stack.enter_context(stored(model, tokenizer if in_memory(model) else None)) for model in (baseline, *models)
        ]
        results = measure(tuple(places), read, shlex.join(["gqa-eval", *map(without_place, words)]))
    if results and out is not None:
        write_report(results, Path(out))
    return Evaluation(results=results, path=None if out is None else Path(out))
