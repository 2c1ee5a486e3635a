"""gqa-uptrain from Python, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .given import Model, called_from_python, in_memory, read_options, stored
from .results import TrainedModel

if TYPE_CHECKING:
    from gqa.uptrain.options import TrainOptions


def uptrain_model(
    model: Model | TrainOptions, *, teacher: Model = "auto", tokenizer: Any = None, **options: Any
) -> TrainedModel:
    """Train a converted checkpoint further and write the result as a checkpoint.

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
    from gqa.convert.merge.watcher import Bar
    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    with called_from_python(bool(options.get("quiet"))), ExitStack() as stack:
        given = read_options(TrainOptions, model, options, model=model, teacher=teacher)
        directory = None
        if not isinstance(model, TrainOptions):
            path, directory = stack.enter_context(stored(model, tokenizer))
            given = replace(given, model=path)
            if in_memory(teacher):
                given = replace(given, teacher=stack.enter_context(stored(teacher, tokenizer))[0])
        stack.enter_context(_accelerator_of_this_run())
        with Bar(given.quiet) as bar:
            setup = prepare(given, watcher=bar)
        _, record = uptrain(setup, quiet=given.quiet)
    assert setup.options.output
    return TrainedModel(path=setup.options.output, record=record, _directory=directory)


@contextmanager
def _accelerator_of_this_run() -> Iterator[None]:
    """accelerate remembers the first precision of a process: that of the caller is as it was when the block ends."""
    from accelerate.state import AcceleratorState, GradientState

    states = (AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    try:
        for state in states:
            state._shared_state.clear()
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state._shared_state.clear()
            state._shared_state.update(values)
