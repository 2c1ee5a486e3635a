"""What goes wrong in a run on purpose: signals at a certain step, full disks, names that are taken,
losses that are given.

`Runs` takes these functions as `before`, and calls them in the child before its command:

    runs.run(*words, before=[shard, partial(kill_at, 3)])

They replace functions of gqa for as long as the child lives. There is no public way to have a disk
fill, a signal arrive or a loss rise just after a certain step, and nothing else in the child knows.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.processes import die_at


def note(file: str, text: object) -> None:
    """Write a line to a file of this process alone."""
    with Path(f"{file}-{os.environ.get('RANK', '0')}").open("a") as stream:
        stream.write(f"{text}\n")


def after(owner: Any, name: str, action: Callable[..., object]) -> None:
    """Call `action` with the arguments of each call of a function, once that has returned."""
    function = getattr(owner, name)

    def call_both(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        action(*arguments)
        return result

    setattr(owner, name, call_both)


def kill_at(step: int, number: int = signal.SIGKILL) -> None:
    """Send a signal as soon as `step` is recorded, before its state is saved; those before are
    there.
    """
    from gqa.uptrain.log import Log

    after(
        Log,
        "step",
        lambda log, progress, *numbers: progress.step == step and os.kill(os.getpid(), number),
    )


def make_file_after(step: int, path: str) -> None:
    """Somebody else makes a file as soon as `step` is recorded."""
    from gqa.uptrain.log import Log

    after(
        Log,
        "step",
        lambda log, progress, *numbers: progress.step == step and Path(path).write_text("mine"),
    )


def copy_after(step: int, source: str, path: str) -> None:
    """Another result is written at `path` as soon as `step` is recorded."""
    from gqa.uptrain.log import Log

    def copy(log: Any, progress: Any, *numbers: Any) -> None:
        if progress.step == step:
            shutil.copytree(source, path)

    after(Log, "step", copy)


def fill_disk_after(step: int, directory: str) -> None:
    """Somebody else fills the disk of a directory as soon as `step` is recorded."""
    from gqa.uptrain.log import Log

    def fill(log: Any, progress: Any, *numbers: Any) -> None:
        if progress.step == step:
            with suppress(OSError), Path(directory, "other").open("wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(4096))

    after(Log, "step", fill)


def train_nothing() -> None:
    """A run that trains fails."""
    import gqa.uptrain.run as module

    def fail(*given: Any) -> None:
        raise AssertionError("it trains")

    module.train = fail  # type: ignore[assignment]


def save_at_every_step() -> None:
    """States are saved by time, and it is always time."""
    import gqa.uptrain.saver as module

    module.STATE_SECONDS = module.STATE_SHARE = 0


def kill_save_after(step: int, change: int) -> None:
    """SIGKILL just before the nth change of names on disk after `step` is recorded: its state is
    being saved.
    """
    from gqa.uptrain.log import Log

    after(Log, "step", lambda log, progress, *numbers: progress.step == step and die_at(change))


def shard(load_once: bool = False) -> None:
    """FSDP2 on CPUs, which accelerate does not offer: its state is told so right after it is made.

    `load_once`: only the first rank reads the weights, as accelerate's own option says to
    transformers.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    import gqa.uptrain.accelerator as module

    def make(**options: Any) -> Accelerator:
        accelerator = Accelerator(**options)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=load_once,
        )
        if accelerator.mixed_precision != "no":  # as Accelerator does
            accelerator.state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
        if load_once:
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        return accelerator

    module.Accelerator = make  # type: ignore[assignment,misc]


def set_losses(*losses: float) -> None:
    """The held-out loss at the start and after each step, whatever the model is."""
    import gqa.uptrain.evaluation as module
    import gqa.uptrain.loop

    measure = module.measure_and_keep

    def measure_so(setup: Any, model: Any, progress: Any, best: Any) -> dict[str, float]:
        module.validation_losses = lambda *given: dict.fromkeys(
            ("kl", "cross_entropy"), losses[progress.step]
        )
        return measure(setup, model, progress, best)

    gqa.uptrain.loop.measure_and_keep = measure_so


def infinite_gradient(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """An Inf in the gradient of these steps (from 1)."""
    from accelerate import Accelerator

    clip, done = Accelerator.clip_grad_norm_, [0]

    def spoil(accelerator: Any, parameters: list[Any], limit: float) -> Any:
        done[0] += 1
        if done[0] in steps:
            next(p for p in parameters if p.grad is not None).grad.view(-1)[0] = float("inf")
        return clip(accelerator, parameters, limit)

    # No tiny model overflows on demand
    patch.setattr(Accelerator, "clip_grad_norm_", spoil)


def note_memory(file: str) -> None:
    """How many bytes more than before it opened any model a process has held when a run is ready,
    which then ends.
    """
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    import gqa.uptrain.setup as module

    before = resident()
    after(
        module,
        "load_unless_trained",
        lambda *given: (note(file, resident("VmHWM") - before), sys.exit()),
    )


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory that this process has, from which on `VmHWM` is the most that it has had."""
    if key == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def stop_while_sampling(number: int) -> None:
    """A signal arrives while a model writes text."""
    import gqa.convert.generate.self_samples as module

    module.sample_sequences = lambda *given, **options: os.kill(os.getpid(), number)  # type: ignore[assignment]


def kill_rank_at(rank: int, step: int, number: int) -> None:
    """`kill_at` in one process of several; without a launcher in the only one."""
    if int(os.environ.get("RANK", rank)) == rank:
        kill_at(step, number)


def note_seeks(file: str) -> None:
    """Note how many blocks a stream was moved by, each time that it is."""
    from gqa.corpus.streamed import StreamedBlocks

    after(StreamedBlocks, "seek", lambda blocks, positions: note(file, len(positions)))


def load_no_tokenizer() -> None:
    """A run that goes so far as to load its tokenizer fails: nothing heavy is done before."""
    import gqa.uptrain.setup as module

    module.load_tokenizer = None  # type: ignore[assignment]


def no_space_for_the_result() -> None:
    """The disk is full as soon as the result is written."""
    import gqa.checkpoint.writer as module

    def full(*given: Any) -> NoReturn:
        raise OSError(28, "full")

    module.write_bytes = full


def no_space_for_the_state_of(step: int) -> None:
    """The disk is full while the state of a step is written, half of which is there."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write = FileSystemWriter.write_data

    def full(writer: Any, *given: Any) -> Any:
        if f"step-{step:08d}" not in str(writer.path):
            return write(writer, *given)
        Path(writer.path, "__0_0.distcp").write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")

    FileSystemWriter.write_data = full  # type: ignore[method-assign]


def no_space_for_the_random_states_of(rank: int, step: int) -> None:
    """The disk is full when one process of several writes its own file of the state of a step."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    import gqa.uptrain.state_files as module

    save = module.save_accelerator_state

    def full(directory: str, *given: Any) -> Any:
        if f"step-{step:08d}" in directory:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
        return save(directory, *given)

    module.save_accelerator_state = full


def states_cannot_be_removed() -> None:
    """As files of a network file system that somebody reads, or of another user."""
    import gqa.uptrain.state as module

    def refuse(path: Path) -> None:
        if path.name.startswith("step-") and path.exists():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    module.remove_state = refuse


def kill_conversion_after_a_layer(number: int = signal.SIGKILL) -> None:
    """Send a signal once the first layer of a conversion is saved."""
    from gqa.convert.merge import finished_layers
    from gqa.convert.merge.calibrate import Calibrator

    # Each layer is saved as soon as it is done
    finished_layers._INTERVAL = 0
    run = Calibrator.run

    def stop_after_first(calibrator: Any, layer: int, *rest: Any) -> Any:
        if layer:
            return os.kill(os.getpid(), number)
        return run(calibrator, layer, *rest)

    Calibrator.run = stop_after_first  # type: ignore[method-assign]


def tear_the_next_row(torn: str) -> None:
    """Each row of a study is followed by the beginning of the next one."""
    from gqa.study import rows

    def append_torn(directory: Path, row: Any) -> None:
        with (directory / "results.jsonl").open("a") as stream:
            stream.write(torn)

    after(rows, "append_row", append_torn)
