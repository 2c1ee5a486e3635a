"""Models whose class cannot have fewer key/value heads, seen as models of a class that can.

A class without a number of KV heads would not load a checkpoint with fewer (or load it and compute something else), so
the whole checkpoint is written for another class that computes the same. `recast` finds it and gives a view of the
checkpoint as one of that class, with as many KV heads as before; everything after that is what happens to any model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.custom_code import BY_LAYER, MODEL_TYPES, PREFIX, auto_map, file_of, loads_as_decilm, stand_in
from gqa.checkpoint.errors import CorruptError, RefusedError, alternatives, explain, listing
from gqa.checkpoint.read import Checkpoint, read_json
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.heads.config import read_config, read_top, transformers_config, valid_groups
from gqa.convert.heads.families import custom
from gqa.convert.heads.family import DEFAULT_KINDS, Kind, query_heads
from gqa.convert.heads.kv_cache import KVCache, cached_layers, kv_cache
from gqa.convert.heads.layout import Groups
from gqa.convert.heads.modules import attention_modules
from gqa.convert.recast.native import NATIVE
from gqa.convert.recast.parts import CUSTOM_CODE, Recasting, UnknownTensorError, View


@dataclass(frozen=True)
class Target:
    """What is asked of the class that a model is written for, where its own cannot have fewer heads.

    remote_code: Whether it is custom modelling code; None for only where no class of transformers will do.
    attention: The kinds of attention whose heads become fewer, of an encoder-decoder; None for those of its decoder.
    """

    remote_code: bool | None = None
    attention: tuple[Kind, ...] | None = None


ANY = Target()

_WHICH = {
    "gqa_gpt2": "GPT-2, Cerebras-GPT, DialoGPT, distilgpt2",
    "gqa_m2m_100": "M2M-100, NLLB",
    "gqa_t5": "T5, Flan-T5",
}
# Masks that GPT-2 once stored, of which no class knows any more.
_MASKS = ("*.attn.bias", "*.attn.masked_bias")
# Exact for any G: with as many heads as before our classes give the source's logits (tests/test_custom_code.py).
_CUSTOM = tuple(
    Recasting(made.removeprefix(PREFIX), made, which=_WHICH.get(made, ""), note=family.note, dropped=_MASKS)
    for family in custom.FAMILIES
    for made in family.model_types
)
RECASTINGS: tuple[Recasting, ...] = (*NATIVE, *_CUSTOM)
# Where layers shall have different numbers of heads, which no class of transformers builds.
_BY_LAYER = tuple(Recasting(source, f"{PREFIX}{source}") for source in BY_LAYER)
# What llama.cpp's converter must find in config.json, as it knows no defaults of our class.
_READ_FROM_THE_FILE = ("max_position_embeddings", "rms_norm_eps")
ENCODER_DECODERS = frozenset(
    model_type.removeprefix(PREFIX) for f in custom.FAMILIES if f.cross_attention for model_type in f.model_types
)


def recast(checkpoint: Checkpoint, groups: Groups, target: Target) -> Checkpoint:
    """The checkpoint itself, or a view of it as one of a class that holds `groups` KV heads; of several the first.

    Raises RefusedError where no class does, where none expresses what the config says, or none is as asked for.
    """
    by_layer = isinstance(groups, tuple)
    found = _candidates(checkpoint, target, by_layer)
    if not found:
        return checkpoint
    config = read_top(checkpoint.config, checkpoint.name)
    names: list[str] = []
    reasons: list[str] = []
    allowed: set[int] = set()
    for recasting in found:
        try:
            raw = _target_config(checkpoint, recasting, config, target)
        except CorruptError:
            raise
        except RefusedError as error:  # another entry may do
            names.append(recasting.target)
            reasons.append(str(error))
            continue
        if raw is None:
            continue
        possible = valid_groups(read_config(raw, checkpoint.name))
        names.append(recasting.target)
        if not by_layer and groups not in possible:
            allowed.update(possible)
            continue
        try:
            return _view(checkpoint, recasting, config, raw)
        except UnknownTensorError as error:  # which another class may have
            reasons.append(str(error))
    if not allowed:
        raise RefusedError(f"{checkpoint.name} ({found[0].source}) cannot be converted: {'; '.join(reasons)}")
    why = "; ".join([f"as {' or '.join(names)}", *reasons])
    raise RefusedError(
        f"--groups {groups} is not possible for the {query_heads(config)} heads of {checkpoint.name} ({why}); "
        f"choose {alternatives(allowed)}"
    )


def _candidates(checkpoint: Checkpoint, target: Target, by_layer: bool) -> list[Recasting]:
    """The entries for a model type that are as asked for; none where it needs none."""
    name, model_type = checkpoint.name, checkpoint.config.get("model_type")
    if not isinstance(model_type, str):  # refused where its config is read
        return []
    every = [r for r in (_BY_LAYER if by_layer else RECASTINGS) if r.source == model_type]
    if by_layer and not every and model_type not in {r.target for r in _BY_LAYER}:
        raise RefusedError(
            f"{name} ({model_type}) must have as many key/value heads in all layers; they can differ in models of type "
            f"{listing(BY_LAYER, 40)}: give one number"
        )
    found = [r for r in every if target.remote_code is None or (r.way == CUSTOM_CODE) == target.remote_code]
    if target.remote_code is False and not found and (every or model_type in MODEL_TYPES):
        raise RefusedError(
            f"{name} ({model_type}) can only be converted to custom modelling code; leave out --no-remote-code"
        )
    if target.remote_code and not found and model_type not in MODEL_TYPES:
        raise RefusedError(f"{name} ({model_type}) has no custom modelling code; leave out --remote-code")
    if target.attention and model_type not in ENCODER_DECODERS:
        raise RefusedError(
            f"the kinds of attention of {name} ({model_type}) cannot be chosen: its class says which they are; "
            f"leave out --attention (it is for {listing(ENCODER_DECODERS, 20)})"
        )
    if target.attention and "decoder-self" not in target.attention:
        raise RefusedError(
            f"--attention {','.join(target.attention)} leaves out decoder-self, whose heads the cache holds; add it"
        )
    return found


def as_it_is(checkpoint: Checkpoint) -> Checkpoint:
    """The same for as many KV heads as the model has: what tells them of any model. Raises RefusedError."""
    if not any(r.source == checkpoint.config.get("model_type") for r in RECASTINGS):
        return checkpoint
    return recast(checkpoint, query_heads(read_top(checkpoint.config, checkpoint.name)), ANY)


def checkpoint_cache(checkpoint: Checkpoint) -> KVCache:
    """The KV cache of a checkpoint as it is, from config and headers, in its stored dtype.

    Raises RefusedError where it is not known which tensors are keys and values.
    """
    checkpoint = as_it_is(checkpoint)
    config = read_config(checkpoint.config, checkpoint.name)
    modules = attention_modules(checkpoint, config)
    return kv_cache(config, cached_layers(modules, config), modules[0].kv_dtype(config))


def _target_config(checkpoint: Checkpoint, recasting: Recasting, config: Any, target: Target) -> dict[str, Any] | None:
    """config.json of the target with as many KV heads as before; None where the entry is not for this config.

    Raises RefusedError, which says why, where the target cannot compute what the source does.
    """
    from transformers.activations import ACT2FN

    try:
        if not recasting.when(config):
            return None
        activation = getattr(config, "activation_function", None) or getattr(config, "hidden_act", None)
        if activation is not None and activation not in ACT2FN:
            raise RefusedError(f"transformers has no activation {activation!r}; it has {listing(ACT2FN, 40)}")
        made = _made_config(checkpoint.config, recasting, config, target)
        json.dumps(made)
        read = transformers_config(made)
    except RefusedError:
        raise
    except Exception as error:  # whatever a config class raises on nonsense is the config's fault
        raise CorruptError(
            f"{checkpoint.name}: the {recasting.source} config.json makes no sense as {recasting.target}: "
            f"{explain(error)}; correct it"
        ) from error
    before, after = (getattr(c, "rope_parameters", None) for c in (config, read))
    if isinstance(before, dict) and recasting.architecture and _rope(before) != _rope(after or {}):
        raise RefusedError(f"{recasting.target} reads its rope_parameters {before} as {after}")
    return made


def _made_config(raw: dict[str, Any], recasting: Recasting, config: Any, target: Target) -> dict[str, Any]:
    """Of another class of transformers, where what every class has comes from the source's config; of one that extends
    the source's, the source's config.json with what is new.
    """
    if recasting.architecture:
        made = {"architectures": [recasting.architecture], "model_type": recasting.target} | recasting.config(config)
        made |= {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        made["tie_word_embeddings"] = bool(config.tie_word_embeddings)
        return made | {key: raw[key] for key in ("torch_dtype", "dtype") if isinstance(raw.get(key), str)}
    made = {**raw, "model_type": recasting.target}
    made |= {"auto_map": auto_map(recasting.target)}
    made |= {} if recasting in _BY_LAYER else {"num_key_value_heads": query_heads(config)}
    made["architectures"] = [stand_in(config.architectures, recasting.target)]
    if loads_as_decilm(recasting.target):
        made |= {key: getattr(config, key) for key in _READ_FROM_THE_FILE if key not in raw}
    if recasting.source in ENCODER_DECODERS:
        made["grouped_attention"] = list(target.attention or DEFAULT_KINDS)
    return made


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"partial_rotary_factor": 1.0} | {k: v for k, v in parameters.items() if v is not None}


def _view(checkpoint: Checkpoint, recasting: Recasting, config: Any, raw: dict[str, Any]) -> Checkpoint:
    """The checkpoint as one of the target, its tensors in the order of the bytes that they are made of."""
    recipes = recasting.recipes(checkpoint, config)
    told, files, warnings = _tokenizer_edits(checkpoint, recasting.source, recasting.target)
    files |= [file_of(recasting.target)] if recasting.way == CUSTOM_CODE else []
    place = {name: index for index, name in enumerate(checkpoint.tensors)}
    ordered = sorted(recipes, key=lambda name: place[recipes[name].sources[0].name])
    tensors = {name: recipes[name].spec(name) for name in ordered}
    seen = {"config": raw | told, "tensors": tensors, "source": checkpoint, "way": recasting.way, "added": files}
    return View(**vars(checkpoint) | seen, recipes=recipes, warnings=warnings)


# A tokenizer stays what it was when the model type, by which transformers chooses tokenizers, becomes another. Its
# files are carried along. Where the class is told by the model type alone, the new config.json names it. Where
# transformers has one general class for the new type, which knows no special tokens of its own and reads no vocab and
# merges, what the old class knew is written down.
_FILES = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}
_CONFIG, _WHOLE = "tokenizer_config.json", "tokenizer.json"
# transformers takes these for whatever a checkpoint names.
_GENERAL = ("TokenizersBackend", "PreTrainedTokenizerFast", "PythonBackend")


_Edits = tuple[dict[str, str], dict[str, str], tuple[str, ...]]  # keys of config.json, files, warnings


def _tokenizer_edits(checkpoint: Checkpoint, source: str, target: str) -> _Edits:
    """What the result needs besides the tokenizer's files where a model type becomes another."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    present = set(checkpoint.side_files)
    if not present & _FILES:
        return {}, {}, ()
    told = read_json(checkpoint.directory, _CONFIG) if _CONFIG in present else {}
    if TOKENIZER_MAPPING_NAMES.get(target) in _GENERAL:
        complete = _WHOLE in present and told.keys() >= {"tokenizer_class", "bos_token", "eos_token", "unk_token"}
        return ({}, {}, ()) if complete else _written_down(checkpoint, told, _WHOLE in present)
    name = checkpoint.config.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(source)
    return {"tokenizer_class": name} if isinstance(name, str) and not told.get("tokenizer_class") else {}, {}, ()


def _written_down(checkpoint: Checkpoint, told: Mapping[str, Any], whole: bool) -> _Edits:
    """tokenizer_config.json with the special tokens that the class knew, and tokenizer.json where there is none. A
    tokenizer that cannot be loaded is copied as it is, with a warning.
    """
    try:
        tokenizer = load_tokenizer(checkpoint)
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        files = {} if whole else {_WHOLE: tokenizer.backend_tokenizer.to_str(pretty=True)}
    except Exception as error:  # whatever a library raises about files that it cannot read
        return {}, {}, (f"the tokenizer is copied as it is, its special tokens are not known: {explain(error)}",)
    made = {"tokenizer_class": type(tokenizer).__name__} | special | dict(told)
    return {}, files | {_CONFIG: json.dumps(made, indent=2, ensure_ascii=False) + "\n"}, ()
