"""Load a checkpoint's model with transformers, strictly.

What transformers only warns of is refused.
"""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gqa.core.console import quiet_transformers
from gqa.core.devices import out_of_memory
from gqa.core.errors import RefusedError, explain, listing
from gqa.models.classes import directory_without_flags, is_auto, model_class, read_auto_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_SHARE = 7 / 8  # of an accelerator's free memory that weights may fill
_ADAPTED_WEIGHT = ".base_layer.weight"  # the end of its name, in a layer that has an adapter


def load_model(
    directory: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attention: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> PreTrainedModel:
    """The model in a directory, in the class that its config names, in evaluation mode.

    Args:
        directory: The directory.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: A device, or `auto`: accelerate's device_map, which fills each accelerator to
            `WEIGHTS_SHARE`, then memory, then disk.
        attention: transformers' attention implementation: `sdpa`, `eager`, `flash_attention_2` ...
        trust_remote_code: Whether code of the checkpoint may run.
        weights: Whether to load any; if not, parameters are on `meta` and nothing stored is
            checked.

    Raises:
        RefusedError: It cannot be loaded, loads with keys missing, unexpected or of another shape,
            or there is an adapter next to its weights.
        RuntimeError, MemoryError: There is no memory left for it (`out_of_memory`).
    """
    _refuse_adapter(directory)

    options: dict[str, Any] = {}
    if attention:
        options["attn_implementation"] = attention
    if not weights:
        return _load(directory, dtype, trust_remote_code, options, weights=False)
    if device != "auto":
        return _load(directory, dtype, trust_remote_code, options).to(device)

    with ExitStack() as cleanup:
        offload_folder = tempfile.mkdtemp(prefix="gqa-offload-")
        cleanup.callback(shutil.rmtree, offload_folder, ignore_errors=True)
        options |= _spread_options(offload_folder)
        model = _load(directory, dtype, trust_remote_code, options)
        if model.device.type == "meta":  # inputs go where the embedding is
            raise RefusedError(
                f"the embedding of {directory} does not fit into the memory of this machine; use a "
                "machine with more memory"
            )

        # The folder has the part of the model that is on the disk, so it stays as long as that.
        weakref.finalize(model, cleanup.pop_all().close)
    return model


def _refuse_adapter(directory: str) -> None:
    """Raise RefusedError if there is an adapter next to the weights.

    transformers would apply it to weights that may contain it already.
    """
    if (Path(directory) / "adapter_config.json").exists():
        raise RefusedError(
            f"{directory} has an adapter next to its weights (adapter_config.json), which would be "
            "applied to them: remove the adapter's files if it is merged already, else merge it "
            "first (peft: merge_and_unload)"
        )


def _load(
    directory: str,
    dtype: str,
    trust_remote_code: bool,
    options: dict[str, Any],
    weights: bool = True,
) -> PreTrainedModel:
    """The model that transformers loads, in evaluation mode.

    Args:
        directory: The directory.
        dtype: As in `load_model`.
        trust_remote_code: Whether code of the checkpoint may run.
        options: Further arguments of from_pretrained, or of from_config without weights.
        weights: Whether to load any; if not, parameters are on `meta`.

    Raises:
        RefusedError, RuntimeError, MemoryError: As `load_model`.
    """
    with (
        _library_errors_refused(directory),
        quiet_transformers(),
        directory_without_flags(directory) as config_directory,
    ):
        config = read_auto_config(directory, trust_remote_code)
        cls = model_class(config, trust_remote_code)
        if not weights:
            return _empty_model(cls, config, dtype, options, trust_remote_code)

        if config_directory != directory:
            # An Auto class finds the checkpoint's code by the path in its config, so it gets the
            # object; another class gets the directory without flags.
            own_config = config if is_auto(cls) else config_directory
            options = {**options, "config": own_config}
        model, info = cls.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )

    _check_keys(directory, info)
    return model.eval()


@contextmanager
def _library_errors_refused(directory: str) -> Iterator[None]:
    """Raise RefusedError for whatever a library raises about a checkpoint that it cannot read.

    Refusals of ours and a lack of memory pass as they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RefusedError) or out_of_memory(error):
            raise
        if isinstance(error, ImportError):  # a package that the model or its attention needs
            reason = explain(error).rstrip(".")
            raise RefusedError(f"{directory} needs a package: {reason}; install it") from error
        raise RefusedError(
            f"transformers cannot load {directory}: {explain(error)}; check that its files are "
            "complete and fit its config.json"
        ) from error


def _empty_model(
    cls: Any, config: Any, dtype: str, options: dict[str, Any], trust_remote_code: bool
) -> PreTrainedModel:
    """A model of a class whose parameters are on `meta`, in evaluation mode.

    Args:
        cls: The class, which may be an Auto class.
        config: Its config.
        dtype: As in `load_model`.
        options: Further arguments of `from_config`.
        trust_remote_code: Whether code of the checkpoint may run; only an Auto class runs any.
    """
    from gqa.core.compat import build_model

    torch_dtype = getattr(torch, dtype, None)  # None for `auto`
    if torch_dtype is None:
        torch_dtype = config.dtype or torch.float32
    options = {**options, "dtype": torch_dtype}

    with torch.device("meta"):
        if is_auto(cls):
            model = cls.from_config(config, trust_remote_code=trust_remote_code, **options)
        else:
            model = build_model(cls, config, **options)
        return model.eval()


def _spread_options(offload_folder: str) -> dict[str, Any]:
    """Options of from_pretrained that spread a model over accelerators, memory and disk.

    `offload_folder`: where the part that is on the disk goes.
    """
    from accelerate.utils import get_max_memory

    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of offloading

    limits = get_max_memory()
    for device, size in limits.items():
        is_accelerator = isinstance(device, int)  # others are `cpu` and `disk`
        if is_accelerator:
            limits[device] = int(size * WEIGHTS_SHARE)
    return {
        "device_map": "auto",
        "max_memory": limits,
        "offload_folder": offload_folder,
    }


def _check_keys(directory: str, info: dict[str, Any]) -> None:
    """Raise RefusedError if stored tensors are not those of the class, by transformers' report."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = info.get(kind)
        if keys:
            what = f"{kind.replace('_', ' ')}: {listing(keys)}"
            raise RefusedError(
                f"the weights of {directory} do not fit its config.json ({what}); download both "
                "again, from one repository"
            )


def cache_name(model: PreTrainedModel) -> str:
    """Name of the KV cache among the arguments and outputs of a model.

    transformers 5.24 has renamed it.
    """
    arguments = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in arguments else "past_key_values"


def read_shards(model: PreTrainedModel, directory: str, files: Sequence[str], device: str) -> None:
    """Read weights into an empty model whose parameters are shards (DTensors on `meta`), with
    transformers' own loading; each process reads only its rows.

    Parameters that are not empty, such as adapters, are not touched. Raises the errors of
    `load_model`.

    Args:
        model: The empty model.
        directory: The checkpoint's directory.
        files: Paths of its weight files.
        device: The device of this process.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    from gqa.core.compat import load_weights, set_weight_conversions, weight_conversions
    from gqa.models.names import follow_prefix

    renamings = _adapter_renamings(model)
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=directory,
        ignore_mismatched_sizes=True,
        device_map={"": device},
        dtype=model.dtype,
        weight_mapping=[*get_model_conversion_mapping(model), *renamings],
    )
    slices = {}
    with _library_errors_refused(directory), quiet_transformers(), ExitStack() as open_files:
        for path in files:
            file = open_files.enter_context(safe_open(path, "pt", backend="pread"))
            for key in file.offset_keys():
                slices[key] = file.get_slice(key)
        info = load_weights(model, slices, options)

    # The model is stored without its adapters: it keeps only the conversions of its class.
    conversions = weight_conversions(model) or []
    own_conversions = [entry for entry in conversions if entry not in renamings]
    set_weight_conversions(model, own_conversions)
    follow_prefix(model, slices)
    _check_keys(directory, info.to_dict())


def _adapter_renamings(model: PreTrainedModel) -> list[Any]:
    """Conversions of stored names into those of layers that peft has put an adapter on."""
    from transformers.core_model_loading import WeightRenaming

    layers = [
        re.escape(key.removesuffix(_ADAPTED_WEIGHT))
        for key in model.state_dict()
        if key.endswith(_ADAPTED_WEIGHT)
    ]
    if not layers:
        return []
    return [
        WeightRenaming(rf"^({'|'.join(layers)})\.{tail}$", rf"\1.base_layer.{tail}")
        for tail in ("weight", "bias")
    ]
