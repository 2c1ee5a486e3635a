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
from gqa.uptrain.setup import OpenedRun, ReadyRun
from gqa.uptrain.sharding import gather
from gqa.uptrain.state_files import TrainingProgress, state_record
from gqa.uptrain.stored_weights import affected_bytes, affected_tensors, weights_of_affected


def uptrain(run: OpenedRun, watcher: Watcher = SILENT) -> tuple[TrainingProgress, dict[str, Any]]:
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

        assert isinstance(run, ReadyRun)
        return _train_and_write(run, watcher)


def _look_again(run: OpenedRun) -> OpenedRun:
    """The run with the state from which it continues now that no other run can change it: another
    run of the same command may have saved one, or ended, since it was prepared. Raises
    RefusedError.
    """
    state = from_main(lambda: run.states.state_to_continue(run.description))
    on_main(run.open_output)  # checks it: the other run may have written it

    # We prepared for a state that has since been finished and removed, or only for writing trained
    # weights, with nothing loaded, while training is needed.
    is_gone = state is None and run.continues_from is not None
    must_train = state is None or not state.is_trained
    if is_gone or (must_train and not isinstance(run, ReadyRun)):
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


def _train_and_write(run: ReadyRun, watcher: Watcher) -> tuple[TrainingProgress, dict[str, Any]]:
    """The run from its first step, or from the state from which it continues."""
    on_main(lambda: _check_result(run))
    try:
        progress, weights = train(run, watcher)
    except (RuntimeError, MemoryError) as error:
        refusal = _refusal_of(run, error)
        if refusal is None:
            raise
        raise refusal from error

    record = record_of(run, progress)
    whole = gather(weights_of_affected(run.model, weights))
    on_main(lambda: _save_and_write(run, whole, progress, record))
    return progress, record


def _check_result(run: ReadyRun) -> None:
    """Make everything of the result but its weights, as it will be made after training, and check
    the space for it, so that what is wrong is refused before the first step. Raises RefusedError
    and OutputError.
    """
    source = run.checkpoint
    try:
        record = record_of(run, TrainingProgress())
        json.dumps(record)
        result_card(run, run.out.name, record)
        move_base_path(run, record)
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
    run.states.check_space(affected_bytes(run.model, source), source.nbytes)


def _refusal_of(run: ReadyRun, error: RuntimeError | MemoryError) -> Exception | None:
    """An error of `train` as one that says what the user can do about it; None if nothing."""
    if out_of_memory(error):
        return _no_memory(run)
    if mixes_dtypes(run.accelerator, error):
        return RefusedError(
            f"{type(run.model).__name__} does not compute in bfloat16 ({explain(error)}); pass "
            "--precision float32"
        )
    if run.options.compile and _is_of_compiler(error):
        return RefusedError(
            f"training with --compile failed ({explain(error, 200)}); remove --compile"
        )
    return None


def _no_memory(run: ReadyRun) -> Exception:
    """The error of a run whose device has too little memory: which options are left that need
    less, and what is saved.
    """
    options = run.options
    to_lower = ["--context"]
    to_pass = []
    if run.micro_batch > 1:
        to_lower.insert(0, "--micro-batch")
    if not options.gradient_checkpointing:
        to_pass.append("--gradient-checkpointing")
    if options.optimizer != "adafactor" and not run.accelerator.is_fsdp2:
        to_pass.append("--optimizer adafactor")
    if options.scope != "kv":
        to_pass.append("--train kv")

    advice = f"lower {alternatives(to_lower)}"
    if to_pass:
        advice = f"pass {alternatives(to_pass)}, or {advice}"
    error = (
        f"out of memory while training on {run.accelerator.device} (--micro-batch "
        f"{run.micro_batch}, --context {options.block_size}); {advice}"
    )
    if run.states.step_directories():
        return UnfinishedError(
            f"{error}. {run.states.what_is_left()}, also with another --micro-batch and "
            "--gradient-checkpointing; other options need --overwrite and start over"
        )
    return NoMemoryError(error)


def _is_of_compiler(error: BaseException) -> bool:
    """Whether an error is one of torch.compile, not of what it has compiled."""
    modules = {type(cause).__module__ for cause in error_chain(error)}
    return any(name.startswith(("torch._dynamo", "torch._inductor")) for name in modules)


def _save_and_write(
    run: ReadyRun, whole: dict[str, Tensor], progress: TrainingProgress, record: dict[str, Any]
) -> None:
    """Save the trained weights (`whole`; none if no step improved the model), then write the result
    from there.
    """
    source = run.checkpoint
    states = run.states
    trained = result_tensors(run.model, whole, source)
    changed = changed_tensors(source, trained, affected_tensors(run.model)) if whole else []
    of_run = state_record(progress, run.description, run.options.blocks_per_step)

    try:
        state = states.save_trained(
            partial(save_changed_tensors, tensor_of=trained, changed=changed),
            {**of_run, "result": record},
            size=sum(spec.nbytes for spec in changed),
            result_size=source.nbytes,
        )
    except OutputError:  # the result itself may still fit
        _finish(run, record, trained)
        return

    if not run.options.keep_state:
        states.remove_steps()
    _finish(run, record, saved_tensors_of(source, state))


def _finish(run: OpenedRun, record: dict[str, Any], tensor_of: ReadTensor) -> None:
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
