"""The accelerator of a run: its launcher, device and precision."""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    parse_flag_from_env,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from gqa.core.devices import default_device, find_device, native_bfloat16, ranks
from gqa.core.errors import RefusedError, explain
from gqa.uptrain.options import UptrainOptions

Precision = Literal["float32", "bfloat16"]
# Our names of precisions by those of accelerate, and the reverse.
_OUR_NAME: dict[str, Precision] = {"no": "float32", "bf16": "bfloat16"}
_ACCELERATE_NAME = {ours: theirs for theirs, ours in _OUR_NAME.items()}


def make_accelerator(options: UptrainOptions) -> Accelerator:
    """The accelerator of a run. Raises RefusedError if it cannot start with these options."""
    _refuse_other_launchers()
    precision = mixed_precision(options)
    processes = ranks().num_processes
    if options.device and processes > 1:
        raise RefusedError(
            f"--device {options.device} works with one process only; remove it: the launcher "
            "gives each process its own device"
        )

    device = find_device(options.device) if options.device else None
    if processes == 1:
        # Another run may have left its own there, which accelerate would take for a contradiction.
        ranks().device = _process_device()
    try:
        accelerator = Accelerator(
            mixed_precision=precision,
            # A plain number would be overridden by the launcher's environment.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1, sync_with_dataloader=False
            ),
            # Else it takes several processes on CPUs for unrelated ones
            cpu=not torch.accelerator.is_available(),
            # Text does not reach the towers of a multimodal model, and custom code may drop layers
            # at random.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
    except (ValueError, ImportError) as error:
        raise RefusedError(
            f"accelerate cannot start with these options ({explain(error)}); correct them, or "
            "those of the launcher"
        ) from error

    if device:
        # accelerate copies the device of the process into this state whenever it makes an object.
        ranks().device = torch.device(device)
        accelerator.state.device = torch.device(device)
    if accelerator.is_fsdp2:
        _prepare_for_fsdp2(accelerator, options)
    return accelerator


@cache
def _process_device() -> torch.device:
    """The device that accelerate chose for this process, before a run changed it."""
    device: torch.device = ranks().device
    return device


def mixed_precision(options: UptrainOptions) -> str:
    """--precision, or that of the launcher, or what is fast on the device, by accelerate's names:
    `bf16`, or `no` for float32. Raises RefusedError if the launcher sets another one.
    """
    if options.precision:
        return _ACCELERATE_NAME[options.precision]

    of_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if of_launcher is not None:
        if of_launcher not in _OUR_NAME:
            raise RefusedError(
                f"the launcher sets {of_launcher}, which cannot be used; pass --precision bfloat16 "
                "or float32"
            )
        return of_launcher

    # Not None, which accelerate takes for the precision of an earlier run in this process.
    return "bf16" if native_bfloat16(options.device or default_device()) else "no"


def precision_name(options: UptrainOptions) -> Precision:
    """`mixed_precision` as --precision names it."""
    return _OUR_NAME[mixed_precision(options)]


def _refuse_other_launchers() -> None:
    """Raise RefusedError if processes were started for FSDP1 or DeepSpeed."""
    is_fsdp = parse_flag_from_env("ACCELERATE_USE_FSDP")
    is_fsdp1 = is_fsdp and os.environ.get("FSDP_VERSION", "1") == "1"
    if is_fsdp1 or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        other = "FSDP1" if is_fsdp1 else "DeepSpeed"
        raise RefusedError(
            f"gqa-uptrain does not run with {other}; use examples/accelerate/fsdp2.yaml"
        )


def _prepare_for_fsdp2(accelerator: Accelerator, options: UptrainOptions) -> None:
    """Set what accelerate sets otherwise. Raises RefusedError for an optimizer that cannot shard
    its state.
    """
    # transformers' own keeps its state in whole tensors
    if options.optimizer == "adafactor":
        raise RefusedError(
            "--optimizer adafactor does not work with FSDP2, which shards weights; use adamw"
        )

    # With it transformers loads every model on the first process alone, also those that are never
    # sharded.
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    # Without it each process holds unsharded gradients between micro-batches.
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    # Weights are gathered in 16 bits, but gradients added and sums returned in float32; accelerate
    # rounds both.
    if accelerator.mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
