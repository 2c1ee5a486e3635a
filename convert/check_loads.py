"""Check that transformers loads a result, from its config.json and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.read import TORCH_OF_SAFETENSORS, Checkpoint
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.config_edits import without_quantization
from gqa.convert.plan import OutputTensor
from gqa.core.console import quiet_transformers
from gqa.core.errors import CorruptError, explain, listing
from gqa.models.classes import model_class

if TYPE_CHECKING:
    from torch import Tensor

_LISTED = 3  # names in a message


def check_loads(
    raw: dict[str, Any], outputs: Sequence[OutputTensor], checkpoint: Checkpoint
) -> list[str]:
    """Load the tensors of a result into the class of its config.json, without weights.

    Args:
        raw: The config.json.
        outputs: The tensors. Packed ones are left out, as their class has others in their place.
        checkpoint: The base model.

    Returns:
        Warnings: tensors that transformers does not read, or why this could not be checked.

    Raises:
        CorruptError: A parameter has another shape, or is missing, which transformers would
            initialize at random.
    """
    import transformers

    config = transformers_config(without_quantization(raw))
    cls = model_class(config)
    if not issubclass(cls, transformers.PreTrainedModel):
        return [
            "could not check that the result loads: transformers has no class of "
            f"{raw['model_type']} with a head"
        ]

    tensors = _empty_tensors(outputs, checkpoint)
    try:
        info = _load_empty(cls, config, tensors)
    except ImportError as error:  # a part of the model needs a library that is not installed
        return [f"could not check that the result loads: {explain(error)}"]
    except Exception as error:  # any error of a class means that the config is wrong
        raise CorruptError(
            f"{checkpoint.name}: transformers cannot build {cls.__name__} from config.json: "
            f"{explain(error)}; correct it"
        ) from error

    # Packed tensors were left out above, so a model with some always lacks parameters.
    missing = set() if checkpoint.packed else set(info["missing_keys"])
    unexpected = set(info["unexpected_keys"])
    problem = _problem(cls.__name__, missing, unexpected, info["mismatched_keys"])
    if problem and _is_class_of(checkpoint, cls, raw):
        raise CorruptError(f"{checkpoint.name}: {problem}")
    if problem:
        return [
            f"transformers' {cls.__name__} does not load the result (other classes were not "
            f"tried): {problem}"
        ]

    if unexpected:
        return [
            f"transformers' {cls.__name__} does not read these copied tensors: "
            f"{listing(unexpected, _LISTED)}"
        ]
    return []


def _load_empty(cls: Any, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Load tensors on the meta device into a class.

    Returns transformers' report: missing, unexpected and mismatched keys.
    """
    import transformers

    with quiet_transformers():
        # Not the class's own from_pretrained, which may fetch more files from the hub.
        _, info = transformers.PreTrainedModel.from_pretrained.__func__(
            cls,
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    report: dict[str, Any] = info
    return report


def _is_class_of(checkpoint: Checkpoint, cls: type, raw: Mapping[str, Any]) -> bool:
    """Whether a result with this config.json is sure to be loaded into the class.

    It is if the class is one of ours. A class of transformers is if the config has no remote code,
    and names this class or none.
    """
    if cls.__module__.startswith("gqa."):
        return True
    named = checkpoint.classes[-1].architecture
    return named in (cls.__name__, None) and "auto_map" not in raw


def _empty_tensors(outputs: Sequence[OutputTensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a result on the meta device by name, without modules that have packed ones."""
    import torch

    packed = {name.rpartition(".")[0] for name in checkpoint.packed}
    tensors = {}
    for tensor in outputs:
        module = tensor.name.rpartition(".")[0]
        if module in packed:
            continue
        dtype = getattr(torch, TORCH_OF_SAFETENSORS.get(tensor.dtype, "uint8"))
        tensors[tensor.name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensors


def _problem(
    class_name: str, missing: set[str], unexpected: set[str], mismatched: set[tuple[str, Any, Any]]
) -> str | None:
    """Why a class does not load tensors, and what to do; None if it loads them.

    Args:
        class_name: The class.
        missing: Names of parameters that are not stored.
        unexpected: Names of stored tensors that are no parameters.
        mismatched: (name, stored shape, expected shape) of parameters of another shape.
    """
    if mismatched:
        key, stored, expected = min(mismatched, key=lambda entry: entry[0])
        others = len(mismatched) - 1
        more = f" (and {others} more)" if others else ""
        return (
            f"{key} is stored as {list(stored)}, but config.json implies {list(expected)}{more}; "
            "correct config.json, or pass the checkpoint that it belongs to"
        )

    if missing:
        verb = "is" if len(missing) == 1 else "are"
        rest = f" (but {listing(unexpected, _LISTED)})" if unexpected else ""
        return (
            f"{listing(missing, _LISTED)} {verb} not stored{rest}, and {class_name} would "
            "initialize them at random; correct config.json, or pass a checkpoint of the whole "
            "model with the names of transformers"
        )
    return None
