"""Training from Python: what gqa-uptrain does, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .given import Model, asked, in_memory, name_of, scratch, stored, undisturbed
from .results import TrainedModel

if TYPE_CHECKING:
    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.setup import Setup

_OF_TERMINALS = ("output", "quiet", "verbose", "as_json", "dry_run")


def uptrain_model(
    model: Model | TrainOptions,
    data: str | Sequence[str] | None = None,
    teacher: Model | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    *,
    tokenizer: Any = None,
    **options: Any,
) -> TrainedModel:
    """Train a converted checkpoint further and write the result as a checkpoint.

    Args:
        model: A directory, a hub id, a result of another function, or a loaded model with its `tokenizer`. Or all that
            decides the run as `TrainOptions`, and nothing beside it but `progress`.
        data: Text: `stdlib:train`, files, hub data sets, `self:TOKENS` (the teacher writes it); several in a list.
        teacher: The model before conversion, whose predictions are learnt; also in memory, as `model`.
        out: Directory to make. None: `MODEL-uptrained`, and for a loaded model a temporary directory that is there as
            long as the result.
        progress: Show how it goes.
        options: The fields of `TrainOptions` by name (`tokens=2_000_000`, `learning_rate=1e-4` ...), which are the
            options of gqa-uptrain and are read as it reads them.

    Raises:
        RefusedError: The model, the text or an option cannot be used; before anything is written.
        TypeError: An option has a name that there is none of.
        DivergedError: The loss was not finite too often in a row.
        StoppedError: A signal (an interrupt of the kernel) asked for the end; with `resume=True` the run goes on.
        OutputError: The result could not be written or did not verify.
    """
    from gqa.checkpoint.hub import beside
    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.run import uptrain

    if isinstance(model, TrainOptions):
        if options or any(given is not None for given in (data, teacher, out, tokenizer)):
            raise TypeError("TrainOptions say everything: leave out what stands beside them, or change it in them")
        said = {f.name: getattr(model, f.name) for f in fields(TrainOptions) if getattr(model, f.name) != f.default}
        return uptrain_model(out=said.pop("output"), progress=progress, **said)
    with undisturbed(progress):
        kept = scratch() if out is None and in_memory(model) else None
        name = name_of(model)
        goal = Path(out) if out else Path(kept.name, f"{name}-uptrained") if kept else beside(name, "-uptrained")
        with _prepared(model, teacher, goal, progress, tokenizer, {"data": data, **options}) as setup:
            _, record = uptrain(setup, quiet=not progress)
    return TrainedModel(path=goal, record=record, _kept=kept)


@contextmanager
def _prepared(
    model: Model, teacher: Model | None, goal: Path, progress: bool, tokenizer: Any, options: Mapping[str, Any]
) -> Iterator[Setup]:
    """A run that is ready to start."""
    from gqa.convert.align.watcher import Bar
    from gqa.uptrain.cli import command
    from gqa.uptrain.options import TRAINING
    from gqa.uptrain.setup import prepare

    with ExitStack() as stack:
        given = {**options, "teacher": None if teacher is None else name_of(teacher)}
        context = asked(command, {"model": name_of(model)}, given, _OF_TERMINALS, output=goal)
        places = {"model": stack.enter_context(stored(model, tokenizer))}
        if teacher is not None and in_memory(teacher):
            places["teacher"] = stack.enter_context(stored(teacher, tokenizer))
        stack.enter_context(_own_accelerator())
        with Bar(not progress) as bar:
            setup = prepare(TRAINING.read(context.params, output=goal, **places), watcher=bar)
        yield setup


@contextmanager
def _own_accelerator() -> Iterator[None]:
    """accelerate remembers the first precision of a process: that of the caller is as it was when the block ends."""
    from accelerate.state import AcceleratorState, GradientState

    states = (AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    try:
        for state in states:
            state._shared_state.clear()
        yield
    finally:
        for state, kept in zip(states, before, strict=True):
            state._shared_state.clear()
            state._shared_state.update(kept)
