"""Load a checkpoint's model and tokenizer with transformers, strictly.

What transformers only warns of is refused.
"""

from __future__ import annotations

import inspect
import json
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

from gqa.checkpoint.files import TOKENIZER_FILES
from gqa.checkpoint.model_config import check_numbers, culprit, has_run_flags, without_run_flags
from gqa.checkpoint.read import Checkpoint, read_json
from gqa.core.compat import reset_run_flags
from gqa.core.devices import out_of_memory
from gqa.core.errors import RefusedError, explain, listing
from gqa.models.custom_code import MODEL_TYPES, config_class, custom_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_SHARE = 7 / 8  # of an accelerator's free memory that weights may fill
_ADAPTED_WEIGHT = ".base_layer.weight"  # of a layer that peft has put an adapter on
# Auto classes that predict tokens have one of these in their names.
_PREDICTING = re.compile("CausalLM|Seq2SeqLM|LMHead|PreTraining|ImageTextToText|MultimodalLM")


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
            f"{directory} has an adapter beside its weights (adapter_config.json), which would be "
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
    try:
        with quiet_transformers(), _directory_without_flags(directory) as config_directory:
            config = read_auto_config(directory, trust_remote_code)
            cls = model_class(config, trust_remote_code)
            if not weights:
                return _empty_model(cls, config, dtype, options, trust_remote_code)

            if config_directory != directory:
                # Code of a checkpoint is found by the path of its config, so that gets the object.
                own_config = config if _is_auto(cls) else config_directory
                options = {**options, "config": own_config}
            model, info = cls.from_pretrained(
                directory,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # whatever a library raises about a checkpoint it cannot read
        if isinstance(error, RefusedError) or out_of_memory(error):
            raise
        raise _unreadable(directory, error) from error
    _check_keys(directory, info)
    return model.eval()


def _unreadable(directory: str, error: Exception) -> RefusedError:
    """What is raised for an error of transformers about a checkpoint."""
    return RefusedError(
        f"transformers cannot load {directory}: {explain(error)}; check that its files are "
        "complete and fit its config.json"
    )


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
        if _is_auto(cls):
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
                f"{directory} loads with {what}, so its weights do not belong to its config; "
                "download the checkpoint again"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the bars, tables and hints of transformers: our errors say what matters."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            transformers_logging.enable_progress_bar()


def read_auto_config(directory: str, trust_remote_code: bool = False) -> Any:
    """transformers' config object of the model in a directory.

    Its class may be ours. It lacks the entries that say how a model is run (`RUN_FLAGS`). Raises
    RefusedError.
    """
    raw = read_json(Path(directory), "config.json")
    check_numbers(raw, Path(directory).name)

    model_type = raw.get("model_type")
    known_class: Any = config_class(model_type) if isinstance(model_type, str) else None

    try:
        config = _load_config(directory, raw, known_class, trust_remote_code)
    except Exception as error:  # whatever a library, or code of a checkpoint, raises about a config
        entry = ""
        if known_class:
            entry = culprit(raw, lambda other: known_class.from_dict(without_run_flags(other)))
        cause = f" because of {entry}" if entry else ""
        raise RefusedError(
            f"transformers cannot read config.json of {directory}{cause}: {explain(error)}; "
            "correct it"
        ) from error
    config.name_or_path = directory
    return config


def _load_config(
    directory: str, raw: dict[str, Any], known_class: Any, trust_remote_code: bool
) -> Any:
    """transformers' config object of the model in a directory.

    Args:
        directory: The directory.
        raw: Its config.json.
        known_class: The config class, ours or transformers'; None if neither has one.
        trust_remote_code: Whether code of the checkpoint may run.
    """
    from transformers import AutoConfig

    code = raw.get("auto_map")
    has_code = isinstance(code, dict) and "AutoConfig" in code
    with quiet_transformers(), _directory_without_flags(directory) as config_directory:
        if raw.get("model_type") in MODEL_TYPES:
            return known_class.from_pretrained(config_directory)

        if trust_remote_code and has_code:
            # The code is next to the config itself, so flags are reset after that is read.
            has_flags = config_directory != directory
            options = {}
            if has_flags:
                # Some implementations of attention refuse output_attentions.
                options["output_attentions"] = False
            config = AutoConfig.from_pretrained(directory, trust_remote_code=True, **options)
            if has_flags:
                reset_run_flags(config)
            return config

        source = config_directory if known_class else directory
        return AutoConfig.from_pretrained(source)


@contextmanager
def _directory_without_flags(directory: str) -> Iterator[str]:
    """A directory with the config.json of a directory, but without `RUN_FLAGS`.

    It is a temporary one, or `directory` itself if its config has none.
    """
    raw = read_json(Path(directory), "config.json")
    if not has_run_flags(raw):
        yield directory
        return

    with tempfile.TemporaryDirectory(prefix="gqa-config-") as config_directory:
        text = json.dumps(without_run_flags(raw))
        Path(config_directory, "config.json").write_text(text, encoding="utf-8")
        yield config_directory


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class that a config names, else the one of its model type that predicts tokens.

    An Auto class if the class is code of the checkpoint, or transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    name = _first_architecture(config)
    ours = custom_class(name, config.model_type)
    if ours:
        return ours

    if trust_remote_code and getattr(config, "auto_map", None):
        return getattr(transformers, _auto_class_name(config.auto_map, name))

    cls = getattr(transformers, name, None)
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        return cls

    auto = transformers.AutoModelForCausalLM
    classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
        classes = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return classes.get(type(config), auto)


def _first_architecture(config: Any) -> str:
    """The first entry of `architectures`, the name of a class; empty if there is none."""
    names = config.architectures
    if not isinstance(names, list) or not names:
        return ""
    name = names[0]
    return name if isinstance(name, str) else ""


def _auto_class_name(auto_map: Any, architecture: str) -> str:
    """The Auto class of transformers that loads the class `architecture`, which is code of the
    checkpoint; if `auto_map` has none, one that predicts tokens, or else the first.
    """
    import transformers

    default = "AutoModelForCausalLM"
    if not isinstance(auto_map, dict):
        return default

    names: list[str] = [name for name in auto_map if name.startswith("AutoModelFor")]
    names = [name for name in names if hasattr(transformers, name)]
    for name in names:
        class_name = str(auto_map[name]).rpartition(".")[2]  # of `module.Class`
        if class_name == architecture:
            return name

    if default in names or not names:
        return default
    return names[0]


def _is_auto(cls: Any) -> bool:
    """Whether a class is one of transformers' Auto classes, which choose the class of a
    checkpoint.
    """
    return hasattr(cls, "from_config")


def predicts_tokens(config: Any, trust_remote_code: bool = False) -> bool:
    """Whether the class that a config names reads token ids and has a head that predicts them.

    Classifiers, reward models, base classes and models of sound do not.
    """
    from transformers import GenerationMixin

    cls = model_class(config, trust_remote_code)
    if _is_auto(cls):
        return bool(_PREDICTING.search(cls.__name__))
    return issubclass(cls, GenerationMixin) and cls.main_input_name == "input_ids"


def check_predicts_tokens(config: Any, name: str, trust_remote_code: bool = False) -> None:
    """Raise RefusedError for a model that can be neither evaluated nor decoded nor trained."""
    if not predicts_tokens(config, trust_remote_code):
        kind = model_class(config, trust_remote_code).__name__
        raise RefusedError(
            f"{name} is a {kind}, which does not predict the next token of a text; pass one with "
            "a language-model head (like ...ForCausalLM)"
        )


def positions(config: Any) -> int | None:
    """Maximum number of positions of a model; None if it has no limit.

    `config`: its config of transformers.
    """
    text_config = config.get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None) or None


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
    try:
        with ExitStack() as stack, quiet_transformers():
            slices = {}
            for path in files:
                file = stack.enter_context(safe_open(path, "pt", backend="pread"))
                for key in file.offset_keys():
                    slices[key] = file.get_slice(key)
            info = load_weights(model, slices, options)
    except Exception as error:  # whatever a library raises about a checkpoint it cannot read
        if isinstance(error, RefusedError) or out_of_memory(error):
            raise
        raise _unreadable(directory, error) from error

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


def load_tokenizer(
    checkpoint: Checkpoint, trust_remote_code: bool = False, instead: str = ""
) -> Any:
    """The checkpoint's tokenizer.

    Args:
        checkpoint: The checkpoint.
        trust_remote_code: Whether code of the checkpoint may run.
        instead: Further advice in errors.

    Raises:
        RefusedError: There is none that transformers can load. Without files, or with those of the
            special tokens alone, some classes make an empty one.
    """
    directory = checkpoint.directory
    advice = f", or {instead}" if instead else ""
    no_tokenizer = RefusedError(
        f"{checkpoint.name} has no tokenizer; copy its base model's tokenizer files into "
        f"{directory}{advice}"
    )
    has_files = any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)
    if not has_files:
        raise no_tokenizer

    try:
        tokenizer = _read_tokenizer(directory, trust_remote_code)
        words = set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens)
    except Exception as error:  # whatever a library raises about files that it cannot read
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise RefusedError(
                f"the tokenizer of {checkpoint.name} is Python code in the checkpoint; read it, "
                f"then pass --trust-remote-code to run it{advice}"
            ) from error
        raise RefusedError(
            f"transformers cannot load the tokenizer of {checkpoint.name}: {explain(error)}; "
            f"repair its files{advice}"
        ) from error

    if len(words) < 2:
        raise no_tokenizer
    return tokenizer


def _read_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """The tokenizer that transformers loads from a directory."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {}
    raw = read_json(directory, "config.json")  # a view's config is another
    # transformers would read the file itself, with a class that is ours and with run flags.
    if raw.get("model_type") in MODEL_TYPES or has_run_flags(raw):
        options["config"] = read_auto_config(str(directory), trust_remote_code)
    return AutoTokenizer.from_pretrained(
        str(directory), trust_remote_code=trust_remote_code, **options
    )
