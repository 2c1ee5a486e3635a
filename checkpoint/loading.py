"""Load a checkpoint with transformers, strictly: what transformers only warns of is refused here."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.custom_code import MODEL_TYPES, config_class, custom_class
from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError, explain, listing

FILLED = 7 / 8  # of an accelerator's free memory, by weights alone
_ADAPTED = ".base_layer.weight"  # of a layer that peft has put an adapter on

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedModel


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attention: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> PreTrainedModel:
    """The model in the directory `name` in the class that its config names, in evaluation mode.

    Args:
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: A device; `meta`: checks names and shapes; `auto`: accelerate's device_map, each accelerator filled to
            `FILLED`, then memory, then disk.
        weights: Whether to load any; if not, parameters are on `meta` and nothing stored is checked.
        attention: transformers' attention implementation: `sdpa`, `eager`, `flash_attention_2` ...

    Raises:
        RefusedError: It cannot be loaded, loads with keys missing, unexpected or of another shape, or an adapter lies
            beside its weights.
        RuntimeError, MemoryError: There is no memory left for it (`devices.out_of_memory`).
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if (Path(name) / "adapter_config.json").exists():  # transformers would apply it to weights that may have it already
        raise RefusedError(
            f"{name} has an adapter beside its weights (adapter_config.json), which would be applied to them: remove "
            "the adapter's files if it is merged already, else merge it first (peft: merge_and_unload)"
        )
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    try:
        with quiet_transformers():
            config = read_auto_config(name, trust_remote_code)
            cls = model_class(config, trust_remote_code)
            if not weights:
                return _empty(cls, config, dtype, options | {"trust_remote_code": trust_remote_code})
            if device == "auto":
                options |= _spread()
            elif device == "meta":
                options["device_map"] = device
            model, info = cls.from_pretrained(
                name, dtype=dtype, trust_remote_code=trust_remote_code, ignore_mismatched_sizes=True,
                output_loading_info=True, **options,
            )  # fmt: skip
    except RefusedError:
        raise
    except Exception as error:  # whatever a library raises about a checkpoint it cannot read
        if out_of_memory(error):
            raise
        raise RefusedError(f"transformers cannot load {name}: {explain(error)}") from error
    _check_keys(name, info)
    if device != "auto":
        return model.to(device).eval()
    weakref.finalize(model, shutil.rmtree, options["offload_folder"], ignore_errors=True)
    if model.device.type == "meta":  # inputs go where the embedding is
        raise RefusedError(f"the embedding of {name} fits into no memory of this machine")
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the tables and hints that transformers logs while it loads: what matters of them is in our errors."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _spread() -> dict[str, Any]:
    """from_pretrained options for offloading."""
    from accelerate.utils import get_max_memory

    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of offloading
    limits = {place: int(size * FILLED) if isinstance(place, int) else size for place, size in get_max_memory().items()}
    return {"device_map": "auto", "max_memory": limits, "offload_folder": tempfile.mkdtemp(prefix="gqa-offload-")}


def read_shards(model: PreTrainedModel, name: str, files: Sequence[str], device: str) -> None:
    """Read weights from the `files` of the checkpoint `name` into an empty model whose parameters are shards (DTensors
    on `meta`): of each only the rows that this process has, by transformers' own loading. What is not empty, as
    adapters are, stays as it is. Raises what `load_model` does.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.modeling_utils import LoadStateDictConfig

    from gqa.checkpoint.compat import load_weights, set_weight_conversions, weight_conversions
    from gqa.checkpoint.names import follow_prefix

    adapted = [re.escape(key.removesuffix(_ADAPTED)) for key in model.state_dict() if key.endswith(_ADAPTED)]
    mapping = [*get_model_conversion_mapping(model)]
    more = [
        WeightRenaming(rf"^({'|'.join(adapted)})\.{tail}$", rf"\1.base_layer.{tail}") for tail in ("weight", "bias")
    ]
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=name, ignore_mismatched_sizes=True, device_map={"": device},
        dtype=model.dtype, weight_mapping=[*mapping, *(more if adapted else ())],
    )  # fmt: skip
    try:
        with ExitStack() as opened, quiet_transformers():
            stored = [opened.enter_context(safe_open(file, "pt", backend="pread")) for file in files]
            slices = {key: file.get_slice(key) for file in stored for key in file.offset_keys()}
            info = load_weights(model, slices, options)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise RefusedError(f"transformers cannot load {name}: {explain(error)}") from error
    loaded = weight_conversions(model) or []
    set_weight_conversions(model, [conversion for conversion in loaded if conversion not in more])
    follow_prefix(model, slices)
    _check_keys(name, info.to_dict())


def _check_keys(name: str, info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := info.get(kind):
            what = f"{kind.replace('_', ' ')}: {listing(keys)}"
            raise RefusedError(f"{name} loads with {what}; its weights do not belong to its config")


def _empty(cls: Any, config: Any, dtype: str, options: dict[str, Any]) -> PreTrainedModel:
    import torch

    from gqa.checkpoint.compat import build_model

    options["dtype"] = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    with torch.device("meta"):
        if hasattr(cls, "from_config"):  # an Auto class
            return cls.from_config(config, **options).eval()
        del options["trust_remote_code"]
        return build_model(cls, config, **options).eval()


def read_auto_config(name: str, trust_remote_code: bool = False) -> Any:
    """transformers' config object of the model at `name`, whose classes may be ours. Raises what transformers does."""
    import transformers

    raw, _ = transformers.PreTrainedConfig.get_config_dict(name)
    if raw.get("model_type") in MODEL_TYPES:
        return config_class(raw["model_type"]).from_pretrained(name)
    return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def _named_class(config: Any) -> str:
    """The first name in `architectures`, where that is a list of names; else nothing."""
    names = config.architectures
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class that a config names."""
    import transformers

    name = _named_class(config)
    if ours := custom_class(name, config.model_type):
        return ours
    if trust_remote_code and getattr(config, "auto_map", None):
        autos = [auto for auto in config.auto_map if auto.startswith("AutoModelFor")]
        return getattr(transformers, autos[0] if autos else "AutoModelForCausalLM")
    default = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return getattr(transformers, name, None) or default


_PREDICTING = re.compile("CausalLM|Seq2SeqLM|LMHead|PreTraining|ImageTextToText|MultimodalLM")


def predicts_tokens(config: Any, trust_remote_code: bool = False) -> bool:
    """Whether the class that a config names reads token ids and has a head that predicts them: no classifier, reward
    model, base class or model of sound.
    """
    from transformers import GenerationMixin, PreTrainedModel

    cls = model_class(config, trust_remote_code)
    if not issubclass(cls, PreTrainedModel):  # an Auto class
        return bool(_PREDICTING.search(cls.__name__))
    return issubclass(cls, GenerationMixin) and cls.main_input_name == "input_ids"


def check_predicts_tokens(config: Any, name: str, trust_remote_code: bool = False) -> None:
    """Raise RefusedError for a model that can be neither evaluated nor decoded nor trained."""
    if not predicts_tokens(config, trust_remote_code):
        kind = model_class(config, trust_remote_code).__name__
        raise RefusedError(
            f"{name} is a {kind}, which does not predict the next token of a text; give one with a language-model head "
            "(like ...ForCausalLM)"
        )


def concrete_class(config: Any) -> tuple[Any, str]:
    """The class that loads a config without remote code, or None if transformers has no language-model class of its
    model type; and the class name in the config, which may differ.
    """
    from transformers.models.auto import modeling_auto

    cls, name = model_class(config), _named_class(config)
    if hasattr(cls, "from_config"):  # an Auto class
        seq2seq = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        mapping = seq2seq if config.is_encoder_decoder else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        cls = mapping.get(type(config), None)
    return cls, name or getattr(cls, "__name__", "")


def positions(config: Any) -> int | None:
    """Positions that the model of transformers' `config` was made for; None where it states none."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or None


def cache_name(model: PreTrainedModel) -> str:
    """What `model` calls the key/value cache that it takes and returns: transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def ranks() -> PartialState:
    """accelerate's view of the processes that work together; one where nothing launched several.

    Without cpu=True accelerate treats CPU processes as independent. They wait up to 6 hours for what one of them does
    alone, such as tokenising or writing the result.
    """
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(hours=6))
