"""What training a model needs in memory, counted (docs/scale.md). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT32 = 4  # bytes
_BFLOAT16 = 2
_ADAMW = 2 * _FLOAT32  # two moments of each trained parameter; Adafactor has next to none

# Most tokens of a block, unless --context says otherwise.
MAX_BLOCK = 2048
# Numbers that the backward pass of a transformer layer needs, for each token and unit of the hidden
# size: 34 bytes at 16 bits, without the scores of attention (arXiv 2205.05198, equation 2).
_LAYER_NUMBERS = 17


@dataclass(frozen=True)
class TrainingMemory:
    """What a run on one GPU keeps, in bytes, besides activations.

    Attributes:
        weights: The model, in float32; frozen linear layers in bfloat16 under autocast.
        copies: Of the trained parameters in bfloat16, which autocast keeps until the backward pass
            has ended.
        gradients: Of the trained parameters, in float32.
        optimizer: State of the optimizer.
        teacher: What the teacher does not share with the model, in its stored dtype, as on a GPU; 0
            without one.
    """

    weights: int
    copies: int
    gradients: int
    optimizer: int
    teacher: int

    @property
    def memory(self) -> int:
        """Bytes on the GPU, without activations."""
        return self.weights + self.copies + self.gradients + self.optimizer + self.teacher

    @property
    def state(self) -> int:
        """Disk space of a saved state: the weights that train, now and when they were best, and the
        optimizer.
        """
        trained_weights = self.gradients  # as many numbers, in float32 too
        return 2 * trained_weights + self.optimizer


def training_memory(
    parameters: int,
    trained: int,
    teacher: int,
    optimizer: str = "adamw",
    *,
    autocast: bool = False,
    rounded: int = 0,
    shared: int = 0,
) -> TrainingMemory:
    """Memory of a run.

    Args:
        parameters: Number of parameters of the model.
        trained: Number of those that train.
        teacher: Bytes of the teacher.
        optimizer: adamw or adafactor.
        autocast: Whether the run computes in bfloat16.
        rounded: Number of frozen parameters that are stored in bfloat16.
        shared: Bytes of the teacher that are weights of the model too.
    """
    copies = _BFLOAT16 * trained if autocast else 0
    moments = _ADAMW * trained if optimizer == "adamw" else 0
    return TrainingMemory(
        weights=_FLOAT32 * (parameters - rounded) + _BFLOAT16 * rounded,
        copies=copies,
        gradients=_FLOAT32 * trained,
        optimizer=moments,
        teacher=teacher - shared,
    )


def activation_memory(
    hidden_size: int,
    layers: int,
    tokens: int,
    number_bytes: int = _FLOAT32,
    checkpointing: bool = False,
) -> int:
    """Bytes of activations of one forward pass over so many tokens, roughly.

    Args:
        hidden_size: D.
        layers: Number of layers.
        tokens: Those of a forward pass: micro-batch x context.
        number_bytes: Bytes of a number of the computation.
        checkpointing: Whether layers keep their inputs only, as hidden states in float32, and one
            layer at a time recomputes the rest.
    """
    layer = number_bytes * _LAYER_NUMBERS * hidden_size * tokens
    if not checkpointing:
        return layers * layer
    hidden_states = _FLOAT32 * hidden_size * tokens
    return layers * hidden_states + layer
