"""gqa-convert from Python."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.provenance import PROVENANCE

from .given import Model, called_from_python, read_options, stored
from .results import ConvertedModel

if TYPE_CHECKING:
    from gqa.convert.options import ConvertOptions


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
    from gqa.convert.merge.watcher import Bar
    from gqa.convert.options import ConvertOptions

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        given, directory = read_options(ConvertOptions, model, options, model=model), None
        if not isinstance(model, ConvertOptions):
            path, directory = stack.enter_context(stored(model, tokenizer))
            given = replace(given, model=path)
        given.check()
        with Bar(given.quiet) as bar:
            plan, _ = plan_for(given, bar)
        with Bar(given.quiet, plan.total_bytes) as bar:
            made = convert_as(given, plan, bar)
    return ConvertedModel(
        path=made.out, record=json.loads((made.out / PROVENANCE).read_text(encoding="utf-8")), warnings=made.warnings,
        layer_errors=bar.errors, _directory=directory,
    )  # fmt: skip
