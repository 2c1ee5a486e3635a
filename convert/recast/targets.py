"""Recast models whose class cannot have fewer key/value heads as models of a class that can.

A class without a number of KV heads would not load a checkpoint with fewer (or load it and compute
something else), so the whole checkpoint is written for another class that computes the same.
`recast` finds that class and returns a view of the checkpoint in it, with as many KV heads as
before, which is then converted like any other model.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from gqa.checkpoint.read import CAUSAL_MASK, Checkpoint, read_json
from gqa.convert.heads.config import read_config, read_outer_config, transformers_config
from gqa.convert.heads.config_edits import valid_kv_heads
from gqa.convert.heads.families import custom
from gqa.convert.heads.family import KVCounts, query_heads
from gqa.convert.heads.kv_cache import KVCache, kv_cache
from gqa.convert.heads.modules import attention_modules, cached_layers
from gqa.convert.recast.native import NATIVE, Recasting, Recipe, View
from gqa.core.errors import CorruptError, RefusedError, explain, listing
from gqa.models.custom_code import (
    BY_LAYER,
    PREFIX,
    auto_map,
    file_of,
    loads_as_decilm,
    our_architecture,
)
from gqa.models.tokenizer import load_tokenizer


def _custom_recastings() -> Iterator[Recasting]:
    """Our own classes allow any G; with all KV heads they reproduce the source's logits
    (tests/test_custom_code.py).
    """
    for family in custom.FAMILIES:
        for target in family.symmetries:
            yield Recasting(target.removeprefix(PREFIX), target, family.note)


# By source, in the order in which they are tried.
RECASTINGS: tuple[Recasting, ...] = (*NATIVE, *_custom_recastings())
RECAST_TYPES = tuple(entry.source for entry in RECASTINGS)
# For numbers of heads that differ between layers, which no class of transformers supports.
_BY_LAYER = tuple(Recasting(source, f"{PREFIX}{source}") for source in BY_LAYER)
# llama.cpp's converter needs these keys in config.json, as it does not know the defaults of our
# class.
_EXPLICIT_KEYS = ("max_position_embeddings", "rms_norm_eps")
# Masks and frequencies in old checkpoints, which current classes do not load.
_BUFFERS = re.compile(rf"{CAUSAL_MASK.pattern}|.*\.rotary_emb\.inv_freq")


def recast(checkpoint: Checkpoint, kv_heads: KVCounts) -> Checkpoint:
    """The checkpoint itself, or a view of it in the first class that supports `kv_heads` KV heads.

    Raises RefusedError if no class can express the config.
    """
    name = checkpoint.name
    model_type = checkpoint.config.get("model_type")
    differs_by_layer = isinstance(kv_heads, tuple)
    recastings = _BY_LAYER if differs_by_layer else RECASTINGS
    entries = [entry for entry in recastings if entry.source == model_type]
    if not entries and differs_by_layer and not _allows_layers_to_differ(model_type):
        raise RefusedError(
            f"{name} ({model_type}) must have the same number of KV heads in all layers, which "
            f"can differ only in models of type {listing(BY_LAYER, 40)}; pass one number"
        )

    if not entries:
        return checkpoint

    config = read_outer_config(checkpoint.config, name)
    for entry in entries[:-1]:
        try:
            raw = _target_config(checkpoint, entry, config)
            if kv_heads in valid_kv_heads(read_config(raw, name)):
                return _view(checkpoint, entry, config, raw)
        except CorruptError:
            raise
        except RefusedError:  # the next class may express the config
            continue

    # If the last class does not support `kv_heads` either, the plan refuses them.
    last = entries[-1]
    raw = _target_config(checkpoint, last, config)
    return _view(checkpoint, last, config, raw)


def _allows_layers_to_differ(model_type: Any) -> bool:
    """Whether the class of a model type has a number of KV heads for each layer."""
    return model_type in [entry.target for entry in _BY_LAYER]


def recast_as_is(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in a class whose KV heads can be read, with as many as it has.

    That is the number of query heads in all classes that must be recast. Raises RefusedError.
    """
    if checkpoint.config.get("model_type") not in RECAST_TYPES:
        return checkpoint
    return recast(checkpoint, query_heads(read_outer_config(checkpoint.config, checkpoint.name)))


def checkpoint_cache(checkpoint: Checkpoint) -> KVCache:
    """The KV cache of a checkpoint in its stored dtype, computed from config and headers.

    Raises RefusedError if it is unknown which tensors are keys and values.
    """
    checkpoint = recast_as_is(checkpoint)
    config = read_config(checkpoint.config, checkpoint.name)
    modules = attention_modules(checkpoint, config)
    return kv_cache(config, cached_layers(modules, config), modules[0].kv_dtype(config))


def _target_config(checkpoint: Checkpoint, recasting: Recasting, config: Any) -> dict[str, Any]:
    """config.json of the target class with as many KV heads as before.

    Raises RefusedError with the reason if the target cannot compute what the source does.
    """
    target = recasting.target
    make_config = _native_config if recasting.architecture else _custom_config
    try:
        new = make_config(checkpoint.config, recasting, config)
        transformers_config(new)
    except RefusedError as error:
        raise RefusedError(
            f"{checkpoint.name} ({recasting.source}) cannot be converted: {error}"
        ) from error
    except Exception as error:  # any error of a config class means that the config is wrong
        raise CorruptError(
            f"{checkpoint.name}: its config.json, of {recasting.source}, cannot be turned into "
            f"one of {target}: {explain(error)}; correct it"
        ) from error
    return new


def _native_config(raw: dict[str, Any], recasting: Recasting, config: Any) -> dict[str, Any]:
    """config.json of a class of transformers.

    Keys that every class has are taken from the source's config.
    """
    new: dict[str, Any] = {
        "architectures": [recasting.architecture],
        "model_type": recasting.target,
    }
    new |= recasting.config(config)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        new[key] = getattr(config, key, None)
    new["tie_word_embeddings"] = bool(config.tie_word_embeddings)
    for key in ("torch_dtype", "dtype"):
        if isinstance(raw.get(key), str):
            new[key] = raw[key]
    return new


def _custom_config(raw: dict[str, Any], recasting: Recasting, config: Any) -> dict[str, Any]:
    """config.json of a class of ours: that of the source with a few other keys."""
    target = recasting.target
    new = {**raw, "model_type": target, "auto_map": auto_map(target)}
    if recasting not in _BY_LAYER:
        new["num_key_value_heads"] = query_heads(config)
    new["architectures"] = [our_architecture(config.architectures, target)]

    if loads_as_decilm(target):
        for key in _EXPLICIT_KEYS:
            if key not in raw:
                new[key] = getattr(config, key)
    return new


def _recipes(checkpoint: Checkpoint, recasting: Recasting, config: Any) -> dict[str, Recipe]:
    """How to make every tensor of the target, by name. Raises RefusedError and CorruptError."""
    parameters = {
        name: spec for name, spec in checkpoint.tensors.items() if not _BUFFERS.fullmatch(name)
    }
    if not recasting.architecture:
        return {name: Recipe((spec,)) for name, spec in parameters.items()}

    stored = {name.removeprefix(recasting.prefix): spec for name, spec in parameters.items()}
    if len(stored) < len(parameters):
        raise CorruptError(
            f"{checkpoint.name} has tensors with and without {recasting.prefix!r} before their "
            "names; download the checkpoint again"
        )

    recipes = dict(recasting.tensors(stored, config))
    used = set[str]()
    for recipe in recipes.values():
        used.update(spec.name for spec in recipe.sources)
    unknown = [name for name, spec in stored.items() if spec.name not in used]
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        raise RefusedError(
            f"{listing(unknown)} {verb} not part of a language model of type {recasting.source}, "
            f"and only such a model can become {recasting.target}; pass a checkpoint of the "
            "language model alone"
        )
    return recipes


def _view(
    checkpoint: Checkpoint, recasting: Recasting, config: Any, raw: dict[str, Any]
) -> Checkpoint:
    """The checkpoint as one of the target class.

    Its tensors have the order of their source tensors.

    Args:
        checkpoint: The stored checkpoint.
        recasting: The classes.
        config: transformers' config of the source.
        raw: config.json of the target.
    """
    recipes = _recipes(checkpoint, recasting, config)
    position = {name: index for index, name in enumerate(checkpoint.tensors)}
    ordered = sorted(recipes, key=lambda name: position[recipes[name].sources[0].name])

    edits, files = _tokenizer_edits(checkpoint, recasting.source, recasting.target)
    view_kind = "native"
    if not recasting.architecture:
        view_kind = "custom modeling code"
        name, text = file_of(recasting.target)
        files[name] = text

    tensors = {name: recipes[name].spec(name) for name in ordered}
    fields = vars(checkpoint) | {
        "config": raw | edits,
        "tensors": tensors,
        "stored": checkpoint,
        "view_kind": view_kind,
        "extra_files": files,
    }
    return View(**fields, recipes=recipes)


# ------------------------------------------------------------------------------------ the tokenizer

# Any of these makes a tokenizer.
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
}
# Classes of tokenizers without special tokens, which cannot read vocab and merges files.
_GENERIC_TOKENIZERS = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "PythonBackend",
)
_SETTINGS = "tokenizer_config.json"


def _tokenizer_edits(
    checkpoint: Checkpoint, source: str, target: str
) -> tuple[dict[str, str], dict[str, str]]:
    """What keeps the tokenizer the same under the new model type, by which transformers chooses the
    tokenizer's class.

    The tokenizer's files are copied. If only the old model type determined the class, the new
    config.json names it. If transformers has a generic class for the new type, `_explicit_files`
    are added.

    Returns:
        Keys of config.json, and additional files: contents by name.

    Raises:
        CorruptError: transformers cannot load the tokenizer.
        RefusedError: The target cannot have it.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    present = set(checkpoint.side_files)
    if not present & _TOKENIZER_FILES:
        return {}, {}

    settings = {}
    if _SETTINGS in present:
        settings = read_json(checkpoint.directory, _SETTINGS)
    if TOKENIZER_MAPPING_NAMES.get(target) in _GENERIC_TOKENIZERS:
        return {}, _explicit_files(checkpoint, target, settings)

    class_name = checkpoint.config.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(source)
    if class_name and not settings.get("tokenizer_class"):
        return {"tokenizer_class": class_name}, {}
    return {}, {}


def _explicit_files(
    checkpoint: Checkpoint, target: str, settings: dict[str, Any]
) -> dict[str, str]:
    """Files that say everything about a tokenizer to a generic class: contents by name.

    `settings`: those of the tokenizer, in tokenizer_config.json. Raises CorruptError and
    RefusedError as `_tokenizer_edits`.
    """
    is_whole = "tokenizer.json" in checkpoint.side_files
    needed = {"tokenizer_class", "bos_token", "eos_token", "unk_token"}
    if is_whole and settings.keys() >= needed:
        return {}

    try:
        tokenizer = load_tokenizer(checkpoint)
    except RefusedError as error:  # no other target could load it, either
        raise CorruptError(str(error)) from error

    files = {}
    if not is_whole:
        # After a refusal `recast` goes on to custom modeling code, which keeps the class.
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise RefusedError(
                f"{type(tokenizer).__name__} has no tokenizer.json, which {target} needs; save "
                "the tokenizer as a fast tokenizer of transformers"
            )
        files["tokenizer.json"] = tokenizer.backend_tokenizer.to_str(pretty=True)

    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    settings = {"tokenizer_class": type(tokenizer).__name__} | special | settings
    files[_SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return files
