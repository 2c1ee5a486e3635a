"""Train, save the trained weights, and write the result from there."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gqa.checkpoint.hub import error_chain
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import from_main, on_main, out_of_memory
from gqa.core.errors import (
    NoMemoryError,
    OutputError,
    RefusedError,
    UnfinishedError,
    alternatives,
    explain,
)
from gqa.uptrain.export import (
    ReadTensor,
    changed_tensors,
    result_card,
    result_tensors,
    save_changed_tensors,
    saved_tensors_of,
    write_result,
)
from gqa.uptrain.loop import mixes_dtypes, train
from gqa.uptrain.record import adapted_record, move_base_path, record_of
from gqa.uptrain.setup import Run, Setup
from gqa.uptrain.sharding import gather
from gqa.uptrain.state_files import TrainingProgress, state_record
from gqa.uptrain.stored_weights import affected_bytes, affected_tensors, weights_of_affected


def uptrain(run: Run, watcher: Watcher = SILENT) -> tuple[TrainingProgress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; return the progress and the record in it.

    The trained weights are saved before the checkpoint is written: whatever fails then, the same
    options continue there. Raises what `train` raises, OutputError, and UnfinishedError if work was
    done that the same options continue.
    """
    with run.states.lock():
        run = _look_again(run)
        state = run.continues_from
        if state is None:
            on_main(run.states.clear)

        if state and state.is_trained:
            record = adapted_record(run, state.record["result"])
            on_main(lambda: _finish(run, record, saved_tensors_of(run.checkpoint, state)))
            return TrainingProgress.of(state.record), record

        assert isinstance(run, Setup)
        return _train_and_write(run, watcher)


def _look_again(run: Run) -> Run:
    """The run with the state from which it continues now that no other run can change it: another
    run of the same command may have saved one, or ended, since it was prepared. Raises
    RefusedError.
    """
    state = from_main(lambda: run.states.state_to_continue(run.description))
    on_main(run.open_output)  # checks it: the other run may have written it
    is_gone = state is None and run.continues_from is not None
    must_train = state is None or not state.is_trained
    # A run that found trained weights has loaded nothing, so it cannot train
    if is_gone or (must_train and not isinstance(run, Setup)):
        raise RefusedError(
            "another run of the same command ended while this one was prepared; repeat the command"
        )

    batch_size = state and state.record["batch_size"]
    if state and not state.is_trained and batch_size != run.options.batch_size:
        raise RefusedError(
            f"another run of the same command saved step {state.record['step']:,} with "
            f"{batch_size} blocks a step "
            "while this one was prepared; repeat the command to continue from there"
        )
    return replace(run, continues_from=state)


def _train_and_write(setup: Setup, watcher: Watcher) -> tuple[TrainingProgress, dict[str, Any]]:
    """The run from its first step, or from the state from which it continues."""
    on_main(lambda: _check_result(setup))
    try:
        progress, weights = train(setup, watcher)
    except (RuntimeError, MemoryError) as error:
        refusal = _refusal_of(setup, error)
        if refusal is None:
            raise
        raise refusal from error

    record = record_of(setup, progress)
    whole = gather(weights_of_affected(setup.model, weights))
    on_main(lambda: _save_and_write(setup, whole, progress, record))
    return progress, record


def _check_result(setup: Setup) -> None:
    """Make everything of the result but its weights, as it will be made after training, and check
    the space for it, so that what is wrong is refused before the first step. Raises RefusedError
    and OutputError.
    """
    source = setup.checkpoint
    try:
        record = record_of(setup, TrainingProgress())
        json.dumps(record)
        result_card(setup, setup.out.name, record)
        move_base_path(setup, record)
    except OSError:
        raise
    except Exception as error:  # of a library that writes cards, or ours
        raise RefusedError(
            f"the record or the model card of {source.name} cannot be carried into the result "
            f"({explain(error)}); "
            f"remove {PROVENANCE}, {UPTRAINING} or README.md from {source.directory}"
        ) from error

    for name in ("config.json", *source.side_files):
        with source.path(name).open("rb") as stream:
            stream.read(1)
    setup.states.check_space(affected_bytes(setup.model, source), source.nbytes)


def _refusal_of(setup: Setup, error: RuntimeError | MemoryError) -> Exception | None:
    """An error of `train` as one that says what the user can do about it; None if nothing."""
    if out_of_memory(error):
        return _no_memory(setup)
    if mixes_dtypes(setup.accelerator, error):
        return RefusedError(
            f"{type(setup.model).__name__} does not compute in bfloat16 ({explain(error)}); pass "
            "--precision float32"
        )
    if setup.options.compile and _is_of_compiler(error):
        return RefusedError(
            f"training with --compile failed ({explain(error, 200)}); remove --compile"
        )
    return None


def _no_memory(setup: Setup) -> Exception:
    """The error of a run whose device has too little memory: which options are left that need
    less, and what is saved.
    """
    options = setup.options
    to_lower = ["--context"]
    to_pass = []
    if setup.micro_batch > 1:
        to_lower.insert(0, "--micro-batch")
    if not options.gradient_checkpointing:
        to_pass.append("--gradient-checkpointing")
    if options.optimizer != "adafactor" and not setup.accelerator.is_fsdp2:
        to_pass.append("--optimizer adafactor")
    if options.scope != "kv":
        to_pass.append("--train kv")

    advice = f"lower {alternatives(to_lower)}"
    if to_pass:
        advice = f"pass {alternatives(to_pass)}, or {advice}"
    error = (
        f"out of memory while training on {setup.accelerator.device} (--micro-batch "
        f"{setup.micro_batch}, --context {options.block_size}); {advice}"
    )
    if setup.states.step_directories():
        return UnfinishedError(
            f"{error}. {setup.states.what_is_left()}, also with another --micro-batch and "
            "--gradient-checkpointing; other options need --overwrite and start over"
        )
    return NoMemoryError(error)


def _is_of_compiler(error: BaseException) -> bool:
    """Whether an error is one of torch.compile, not of what it has compiled."""
    modules = {type(cause).__module__ for cause in error_chain(error)}
    return any(name.startswith(("torch._dynamo", "torch._inductor")) for name in modules)


def _save_and_write(
    setup: Setup, whole: dict[str, Tensor], progress: TrainingProgress, record: dict[str, Any]
) -> None:
    """Save the trained weights (`whole`; none if no step improved the model), then write the result
    from there.
    """
    source = setup.checkpoint
    states = setup.states
    trained = result_tensors(setup.model, whole, source)
    changed = changed_tensors(source, trained, affected_tensors(setup.model)) if whole else []
    of_run = state_record(progress, setup.description, setup.options.blocks_per_step)

    try:
        state = states.save_trained(
            partial(save_changed_tensors, tensor_of=trained, changed=changed),
            {**of_run, "result": record},
            size=sum(spec.nbytes for spec in changed),
            result_size=source.nbytes,
        )
    except OutputError:  # the result itself may still fit
        _finish(setup, record, trained)
        return

    if not setup.options.keep_state:
        states.remove_steps()
    _finish(setup, record, saved_tensors_of(source, state))


def _finish(run: Run, record: dict[str, Any], tensor_of: ReadTensor) -> None:
    """Write the result, then remove the training states.

    Raises UnfinishedError, whatever goes wrong.
    """
    try:
        write_result(run, record, tensor_of)
    # A full disk, a name that is taken, a mistake of ours: the weights must not be lost.
    except Exception as error:
        reason = explain(error)
        if isinstance(error, OutputError | RefusedError):
            reason = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            reason = f"{error.filename}: {error.strerror}"
        raise UnfinishedError(
            f"the result could not be written: {reason}. But {run.states.what_is_left()}"
        ) from error

    with suppress(OSError):  # the result is complete: what stays of the states is no reason to fail
        run.states.finish(run.options.keep_state)
