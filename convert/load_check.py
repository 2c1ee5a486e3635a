"""Whether transformers loads what a conversion is going to write: its own loading code, run on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import CorruptError, RefusedError, explain, listing
from gqa.checkpoint.loading import concrete_class, quiet_transformers
from gqa.checkpoint.read import TORCH_DTYPES
from gqa.convert.heads.config import transformers_config, without_quantisation
from gqa.convert.heads.modules import ZERO_3

if TYPE_CHECKING:
    from torch import Tensor

_LISTED = 3  # names listed in a message


def check_loads(
    raw: dict[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], packed: Collection[str], name: str
) -> Iterator[str]:
    """Load tensors, name -> (dtype, shape), into the class of a config.json, without any weights. Yields warnings: what
    transformers does not read, or why this could not be checked.

    Modules with `packed` tensors are left out. Raises RefusedError where transformers would initialise parameters at
    random, or where a shape is another.
    """
    import transformers

    config = transformers_config(without_quantisation(raw))
    model_class, class_name = concrete_class(config)
    if model_class is None:
        yield f"not checked that transformers loads the result: it has no class {class_name or raw['model_type']}"
        return
    transformers.utils.logging.disable_progress_bar()
    try:
        with quiet_transformers():
            # Not what a class has in its place, which may ask the hub for more files.
            _, info = transformers.PreTrainedModel.from_pretrained.__func__(
                model_class, None, config=config, state_dict=_meta_tensors(tensors, packed), device_map="meta",
                attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except ImportError as error:  # a part of the model needs a library that is not installed
        yield f"not checked that transformers loads the result: {explain(error)}"
        return
    except Exception as error:  # whatever a class raises on nonsense is the config's fault
        raise CorruptError(
            f"{name}: transformers cannot build {model_class.__name__} from config.json: {explain(error)}; correct it"
        ) from error
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    if problem := _problem(model_class.__name__, set() if packed else missing, unexpected, info["mismatched_keys"]):
        if (class_name == model_class.__name__ and "auto_map" not in raw) or model_class.__module__.startswith("gqa."):
            raise RefusedError(f"{name}: {problem}")
        yield f"transformers' {model_class.__name__} does not load the result, other classes were not tried: {problem}"
    elif unexpected:
        yield f"transformers' {model_class.__name__} does not read what is copied as {listing(unexpected, _LISTED)}"


def _meta_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]], packed: Collection[str]) -> dict[str, Tensor]:
    import torch

    modules = {name.rpartition(".")[0] for name in packed}
    return {
        name: torch.empty(shape, dtype=getattr(torch, TORCH_DTYPES.get(dtype, "uint8")), device="meta")
        for name, (dtype, shape) in tensors.items()
        if name.rpartition(".")[0] not in modules
    }


def _problem(
    class_name: str, missing: set[str], unexpected: set[str], mismatched: set[tuple[str, Any, Any]]
) -> str | None:
    """Why a class does not load tensors, and what to do; None where it does."""
    for name in sorted(unexpected):
        if known := next((known for known in sorted(missing) if name.endswith(f".{known}")), None):
            prefix = name.removesuffix(known)
            return f"transformers knows {known}, which is stored as {name}; rename its tensors without {prefix!r}"
    if mismatched:
        key, stored, expected = min(mismatched, key=lambda one: one[0])
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        advice = ZERO_3 if 0 in stored else "correct config.json, or give the checkpoint that it belongs to"
        return f"{key} is stored as {list(stored)}, by config.json it is {list(expected)}{more}; {advice}"
    if missing:
        return (
            f"{listing(missing, _LISTED)} {'is' if len(missing) == 1 else 'are'} not stored, and {class_name} would "
            "initialise what is missing at random; correct config.json, or give a checkpoint of the whole model"
        )
    return None
