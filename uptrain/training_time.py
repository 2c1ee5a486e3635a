"""How long a run takes, within a factor of 2 on an idle machine: operations, counted from configs,
and how fast the device multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqa.checkpoint.read import Checkpoint
from gqa.convert.estimate import measure_flops, workload_seconds
from gqa.convert.heads.config import read_config
from gqa.convert.merge.workload import generation_workload
from gqa.convert.recast.targets import checkpoint_cache, recast_as_is

# A step takes so many times as long as its matrix products would at the speed of large ones: on a
# GPU in the dtype of the run; on a CPU in float32, where only large products gain from bfloat16.
_GPU_OVERHEAD = 2.0
_CPU_OVERHEAD = {"float32": 2.0, "bfloat16": 1.3}


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of a run.

    Attributes:
        device: Where it runs.
        generating: Of generating the text; 0 if it is read. Text that is in the cache takes none.
        training: Of all steps.
    """

    device: str
    generating: float
    training: float

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.generating + self.training


def training_seconds(
    tokens: int,
    *,
    parameters: int,
    trained: int,
    teacher_parameters: int,
    checkpointing: bool,
    device: str,
    hidden_size: int,
    dtype: str,
) -> float:
    """Seconds of training on so many tokens in one process.

    The first call for a device times it for a fifth of a second.

    Args:
        tokens: Of all steps.
        parameters: Number of parameters of the model.
        trained: Number of those that train.
        teacher_parameters: Number of parameters of the teacher; 0 without one.
        checkpointing: Whether activations are computed twice.
        device: That of the process.
        hidden_size: Of the model: narrow matrices are multiplied less fast.
        dtype: In which matrices are multiplied.
    """
    forward = 2 * parameters if checkpointing else parameters
    backward = parameters + trained  # gradients of activations, and of weights
    # Each parameter multiplies and adds once.
    operations = 2 * tokens * (forward + backward + teacher_parameters)
    if device.startswith("cpu"):
        return _CPU_OVERHEAD[dtype] * operations / measure_flops(device, hidden_size)
    return _GPU_OVERHEAD * operations / measure_flops(device, hidden_size, dtype)


def generating_seconds(teacher: Checkpoint, sequences: int, length: int, device: str) -> float:
    """Seconds until a model has generated so many sequences of `length` tokens on a device."""
    source = recast_as_is(teacher)
    config = read_config(source.config, source.name)
    workload = generation_workload(
        parameters=source.parameters,
        layers=config.layers,
        vocabulary=int(config.text_config.vocab_size),
        cache_bytes_per_token=checkpoint_cache(source).bytes_per_token,
        sequences=sequences,
        length=length,
        device=device,
    )
    return workload_seconds(workload, device, int(config.text_config.hidden_size))
