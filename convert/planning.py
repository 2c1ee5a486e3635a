"""Make the plan of a conversion from config and headers, or refuse it, before anything is written.

The plan has name, shape, dtype and source of every output tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from gqa.checkpoint.files import shard_names
from gqa.checkpoint.model_config import culprit
from gqa.checkpoint.read import SAFETENSORS_OF_TORCH, TORCH_OF_SAFETENSORS, Checkpoint
from gqa.convert.check_loads import check_loads
from gqa.convert.heads.config import ModelConfig, read_config
from gqa.convert.heads.config_edits import edit_config, valid_kv_heads
from gqa.convert.heads.family import KVCounts
from gqa.convert.heads.kv_cache import kv_cache
from gqa.convert.heads.layouts import Rule
from gqa.convert.heads.modules import (
    AttentionModule,
    Change,
    attention_modules,
    cached_layers,
    module_changes,
)
from gqa.convert.methods.base import Method
from gqa.convert.methods.table import METHODS
from gqa.convert.methods.unmerged import Repeat, Unmerged
from gqa.convert.plan import OutputTensor, Plan, Shard, fewest_heads
from gqa.convert.recast.targets import RECAST_TYPES, recast
from gqa.core.errors import CorruptError, EntryError, RefusedError, alternatives, plural
from gqa.models.custom_code import MODEL_TYPES

# Groups are searched for up to this width of all keys, or of all values, of a layer (heads x head
# dimension): their second moments in float64 then take half a GiB each.
_WIDEST_SEARCH = 8192
# And up to so many heads of a layer, because the loss of each pair of them is computed.
_MOST_SEARCHED_HEADS = 128


def make_plan(
    checkpoint: Checkpoint,
    kv_heads: KVCounts,
    method: str,
    seed: int = 0,
    dtype: str | None = None,
) -> Plan:
    """Plan a conversion from config and headers alone.

    Args:
        checkpoint: The base model.
        kv_heads: Of the result, one number or one for each layer; if they are the same in all
            layers they become one number.
        method: The name of the method that merges heads.
        seed: Of random heads, and of text.
        dtype: Of `--dtype`; None if tensors keep theirs.

    Raises:
        RefusedError, CorruptError: The conversion is not possible.
    """

    def plan_with(config: dict[str, Any]) -> Plan:
        view = replace(checkpoint, config=config)
        return _plan_of(view, kv_heads, METHODS[method], seed, dtype)

    try:
        return plan_with(checkpoint.config)
    except EntryError:  # names the entry already
        raise
    except CorruptError as error:
        # The weights contradict config.json: say which entry of it, if one alone does.
        entry = culprit(checkpoint.config, plan_with)
        if not entry or entry in str(error):
            raise
        raise CorruptError(
            f"{error} (without {entry} in config.json, it would fit the weights: correct it, or "
            "download config.json again)"
        ) from error


def _plan_of(
    checkpoint: Checkpoint,
    requested: KVCounts,
    requested_method: Method,
    seed: int,
    dtype: str | None,
) -> Plan:
    """The plan of a conversion from its arguments; see `make_plan`.

    requested_method: The one to use if any heads are merged.
    """
    # 1. The model, in a class that can have so many heads.
    kv_heads = _one_number(requested)
    if isinstance(kv_heads, tuple) or checkpoint.config.get("model_type") in RECAST_TYPES:
        checkpoint = recast(checkpoint, kv_heads)
    config = read_config(checkpoint.config, checkpoint.name)
    check_kv_heads(config, requested, kv_heads, checkpoint.name)
    modules = attention_modules(checkpoint, config)

    # 2. The method.
    method = _method_for(kv_heads, config, requested_method)
    available: tuple[Method, ...] = ()
    if method.merges:
        _check_method(method, checkpoint, config, modules)
        available = _available_methods(checkpoint, config, modules)

    # 3. The tensors.
    changes = _changes(config, modules, kv_heads, method)
    if dtype and checkpoint.packed:
        raise RefusedError(
            f"--dtype cannot be used because {checkpoint.name} has quantized weights; remove "
            "--dtype"
        )
    stored_dtype = SAFETENSORS_OF_TORCH[dtype] if dtype else None
    outputs = _outputs(checkpoint, chain.from_iterable(changes.values()), stored_dtype)

    # 4. config.json, and the KV cache by both configs.
    is_packed = bool(checkpoint.packed)
    new_config, edits = edit_config(config, kv_heads, checkpoint.name, dtype, is_packed)
    cached = cached_layers(modules, config)
    kv_dtype = modules[0].kv_dtype(config)
    cache_before = kv_cache(config, cached, kv_dtype)
    cache_after = kv_cache(new_config, cached, stored_dtype or kv_dtype)

    # 5. transformers must load these tensors with this config.json.
    load_warnings = check_loads(new_config.raw, outputs, checkpoint)

    return Plan(
        checkpoint=checkpoint,
        config=config,
        kv_heads=kv_heads,
        method=method,
        available_methods=available,
        can_regroup=_can_regroup(config, kv_heads, method),
        seed=seed,
        modules=tuple(modules),
        changes=changes,
        shards=_shards(outputs, checkpoint.files),
        new_config=new_config.raw,
        config_edits=tuple(edits),
        cache_before=cache_before,
        cache_after=cache_after,
        dtype=stored_dtype,
        warnings=(*_warnings(checkpoint, config, kv_heads), *load_warnings),
    )


def _one_number(kv_heads: KVCounts) -> KVCounts:
    """One number if all layers have the same."""
    if isinstance(kv_heads, tuple) and len(set(kv_heads)) == 1:
        return kv_heads[0]
    return kv_heads


def _method_for(kv_heads: KVCounts, config: ModelConfig, requested: Method) -> Method:
    """What makes so many heads: the requested method only where heads are merged."""
    before = config.main_heads.kv
    after = fewest_heads(kv_heads)
    if after < before:
        return requested
    return Repeat() if after > before else Unmerged()


# -------------------------------------------------------------------------------- checks of options


def check_kv_heads(config: ModelConfig, requested: KVCounts, kv_heads: KVCounts, name: str) -> None:
    """Raise RefusedError for a number of KV heads that the model or a layer of it cannot have.

    Args:
        config: Of the base model.
        requested: The numbers as the user passed them.
        kv_heads: The same, but one number if all layers have the same.
        name: Of the base model.
    """
    main = config.main_heads
    allowed = valid_kv_heads(config)

    if isinstance(requested, tuple) and len(requested) != config.layers:
        raise RefusedError(
            f"--kv-heads has numbers for {len(requested)} layers, but {name} has {config.layers} "
            "layers; pass one number per layer, or one number for all"
        )
    if isinstance(kv_heads, tuple):
        base_counts = {config.heads(layer).kv for layer in range(config.layers)}
        if len(base_counts) > 1:
            raise RefusedError(
                f"--kv-heads by layer is not possible for {name}, whose layers already have "
                "different numbers of KV heads; convert the base model"
            )
        allowed = [count for count in allowed if count <= main.kv]

    counts = {kv_heads} if isinstance(kv_heads, int) else set(kv_heads)
    impossible = counts.difference(allowed)
    if not impossible:
        return

    worst = min(impossible)
    option = f"--kv-heads {worst}"
    suggested = [count for count in allowed if count != main.kv] or allowed
    if isinstance(kv_heads, tuple):
        option += f" of layer {kv_heads.index(worst)}"
        suggested = allowed
    why = f"is not possible for the {main.kv} KV heads and {main.query} query heads of {name}"
    if worst > main.query:
        why = f"is more than the {main.query} query heads of {name}"
    if worst < main.kv and main.kv % worst:
        why = f"does not divide the {main.kv} KV heads of {name}"
    note = f" ({config.family.note})" if config.family.note else ""
    raise RefusedError(f"{option} {why}{note}; pass {alternatives(suggested)}")


def _check_method(
    method: Method, checkpoint: Checkpoint, config: ModelConfig, modules: Sequence[AttentionModule]
) -> None:
    """Raise RefusedError if the method cannot merge the heads of the model.

    The error names the methods that can.
    """
    reason = method.obstacle(checkpoint, config, modules)
    if not reason:
        return

    # If config.json and the weights do not belong together, that is the reason to give:
    # `check_loads` raises it.
    unchanged = _outputs(checkpoint, (), None)
    check_loads(checkpoint.config, unchanged, checkpoint)

    available = _available_methods(checkpoint, config, modules)
    names = alternatives(other.name for other in available)
    raise RefusedError(f"{reason}; use --method {names}")


def _available_methods(
    checkpoint: Checkpoint, config: ModelConfig, modules: Sequence[AttentionModule]
) -> tuple[Method, ...]:
    """The methods that can merge the heads of a model, without controls, worst quality first."""
    return tuple(
        method
        for method in METHODS.values()
        if not method.is_control and not method.obstacle(checkpoint, config, modules)
    )


def _can_regroup(config: ModelConfig, kv_heads: KVCounts, method: Method) -> bool:
    """Whether groups can be searched for: maps can reorder heads, into more than one partition."""
    symmetry = config.symmetry
    if not method.computes_maps or isinstance(symmetry, str):
        return False
    if not symmetry.can_reorder_heads(config.text_config):
        return False

    heads = config.main_heads
    if heads.kv > _MOST_SEARCHED_HEADS:
        return False
    if heads.kv * max(heads.key_dim, heads.value_dim) > _WIDEST_SEARCH:
        return False

    # Into one group, or as many as heads, they can be divided in one way only.
    counts = [kv_heads] if isinstance(kv_heads, int) else kv_heads
    return any(1 < count < heads.kv for count in counts)


# -------------------------------------------------------------------------------------- the tensors


def _changes(
    config: ModelConfig,
    modules: Sequence[AttentionModule],
    kv_heads: KVCounts,
    method: Method,
) -> dict[str, tuple[Change, ...]]:
    """By path of an attention module, its tensors that change.

    Raises RefusedError and CorruptError as `module_changes`.
    """
    # Maps change queries and outputs too.
    extra: tuple[Rule, ...] = ()
    if method.computes_maps:
        extra = config.family.query_side_rules(config.text_config)

    changes = {}
    for module in modules:
        all_changes = module_changes(module, config, kv_heads, extra)
        changed = [change for change in all_changes if change.groups != change.heads.kv]
        if changed:
            changes[module.path] = tuple(changed)
    return changes


def _outputs(
    checkpoint: Checkpoint, changes: Iterable[Change], stored_dtype: str | None
) -> list[OutputTensor]:
    """All tensors of the result, in the order of the source."""
    by_name = {change.source.name: change for change in changes}
    outputs: list[OutputTensor] = []
    for name, spec in checkpoint.tensors.items():
        dtype = spec.dtype
        if stored_dtype and dtype in TORCH_OF_SAFETENSORS:
            dtype = stored_dtype
        change = by_name.get(name)
        shape = change.shape if change else spec.shape
        outputs.append(OutputTensor(name, dtype, shape, spec, change))
    return outputs


def _shards(outputs: Sequence[OutputTensor], files: Sequence[str]) -> tuple[Shard, ...]:
    """The outputs in the same shards as in the source."""
    by_file: dict[str, list[OutputTensor]] = {file: [] for file in files}
    for tensor in outputs:
        by_file[tensor.source.file].append(tensor)

    contents = [tuple(tensors) for tensors in by_file.values() if tensors]
    names = shard_names(len(contents))
    return tuple(Shard(name, tensors) for name, tensors in zip(names, contents, strict=True))


def _warnings(checkpoint: Checkpoint, config: ModelConfig, kv_heads: KVCounts) -> Iterable[str]:
    """What a user should know of the result and its files."""
    if kv_heads == config.main_heads.kv:
        yield (
            f"{checkpoint.name} has {plural(config.main_heads.kv, 'KV head')} already: no heads "
            "are merged, and the KV cache stays as large as it is"
        )

    if checkpoint.config.get("model_type") in MODEL_TYPES:
        yield (
            "the result brings custom modeling code: other programs load it with "
            "trust_remote_code=True"
        )
    elif "auto_map" in checkpoint.config:
        yield (
            "config.json names remote code (auto_map): it is copied, not run; check that it reads "
            "the KV-head count"
        )

    if checkpoint.left_out:
        yield (
            f"not copied, because they belong to the old weights: {', '.join(checkpoint.left_out)}"
        )

    yield from checkpoint.warnings
