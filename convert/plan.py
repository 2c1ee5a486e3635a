"""Checkpoint + family + options -> Plan: every output tensor and byte, every reason to refuse,
before any writing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gqa.checkpoint.files import TensorSpec, byte_size, shard_names
from gqa.checkpoint.model_config import culprit
from gqa.checkpoint.read import STORED_DTYPES, TORCH_DTYPES, Checkpoint
from gqa.convert.heads.config import (
    KVCache,
    ModelConfig,
    edit_config,
    kv_cache,
    read_config,
    transformers_config,
    valid_groups,
    without_quantization,
)
from gqa.convert.heads.family import Groups, Layout, Rule, Symmetry
from gqa.convert.heads.modules import (
    AttentionModule,
    Change,
    attention_modules,
    cached_layers,
    can_guess_inputs,
    module_changes,
)
from gqa.convert.methods import METHODS, Merging, Method
from gqa.convert.recast.targets import RECAST_TYPES, recast
from gqa.core.errors import CorruptError, EntryError, RefusedError, alternatives, explain, listing
from gqa.models.custom_code import MODEL_TYPES
from gqa.models.loading import model_class, quiet_transformers

_LISTED = 3  # names in a message
# Possible groups of one size: all partitions into them are tried (135,135 of 14 heads in pairs)
_MOST_GROUPS = 90


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result: its source, copied or cast, or changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorSpec
    change: Change | None = None

    @property
    def nbytes(self) -> int:
        return byte_size(self.dtype, self.shape)

    @property
    def copied(self) -> bool:
        """Whether the bytes are the source's own."""
        return self.change is None and self.source.dtype == self.dtype


@dataclass(frozen=True)
class Shard:
    file: str
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class Plan:
    """Everything about a conversion that can be known from config and headers."""

    checkpoint: Checkpoint
    config: ModelConfig
    groups: Groups
    merging: Merging
    shards: tuple[Shard, ...]
    new_config: dict[str, Any]
    config_edits: tuple[dict[str, Any], ...]
    cache_before: KVCache
    cache_after: KVCache
    dtype: str | None = None
    warnings: tuple[str, ...] = ()
    # With a KV budget, by layer: heads -> loss (nats per token)
    losses: Sequence[Mapping[int, float]] = ()

    @property
    def fewest(self) -> int:
        """G of the layer that has the fewest."""
        return self.groups if isinstance(self.groups, int) else min(self.groups)

    @property
    def tensors(self) -> Iterable[OutputTensor]:
        return (t for shard in self.shards for t in shard.tensors)

    @property
    def changed(self) -> list[OutputTensor]:
        return [t for t in self.tensors if t.change is not None]

    def changes_of(self, module: AttentionModule) -> list[Change]:
        """Changes of one attention module; none if its number of heads stays."""
        return [t.change for t in self.tensors if t.change and t.change.module == module.path]

    def available_methods(self) -> list[Method]:
        """The methods that can merge the heads of the model, without controls,
        worst quality first.
        """
        return available_methods(
            self.checkpoint, self.config, attention_modules(self.checkpoint, self.config)
        )

    @property
    def total_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters_after(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def needs_maps(self) -> bool:
        """Whether maps must be computed from weights or text first."""
        return self.merging.traits.aligns and self.fewest < self.config.main.kv

    @property
    def method(self) -> str:
        """The method's name; `repeat` if the result has more heads, `none` if it has as many."""
        before = self.config.main.kv
        return (
            self.merging.method
            if self.fewest < before
            else "repeat"
            if self.fewest > before
            else "none"
        )


def make_plan(
    checkpoint: Checkpoint, groups: Groups, method: str, seed: int = 0, dtype: str | None = None
) -> Plan:
    """Plan a conversion from headers alone. Raises RefusedError or CorruptError with one line.

    `groups` that are the same in all layers become one number.
    """

    def plan(config: dict[str, Any]) -> Plan:
        return _plan(replace(checkpoint, config=config), groups, method, seed, dtype)

    try:
        return plan(checkpoint.config)
    except EntryError:
        raise
    except (
        CorruptError
    ) as error:  # the weights contradict config.json: say which entry of it, if one alone does
        entry = culprit(checkpoint.config, plan)
        if not entry or entry in str(error):
            raise
        raise CorruptError(f"{error} (without {entry} in config.json it would fit)") from error


def _plan(
    checkpoint: Checkpoint, groups: Groups, method: str, seed: int, dtype: str | None
) -> Plan:
    requested, groups = (
        groups,
        groups[0] if isinstance(groups, tuple) and len(set(groups)) == 1 else groups,
    )
    if isinstance(groups, tuple) or checkpoint.config.get("model_type") in RECAST_TYPES:
        checkpoint = recast(checkpoint, groups)
    config = read_config(checkpoint.config, checkpoint.name)
    check_groups(config, requested, checkpoint.name)
    modules = attention_modules(checkpoint, config)
    merges = (groups if isinstance(groups, int) else min(groups)) < config.main.kv
    if merges and (reason := obstacle(METHODS[method], checkpoint, config, modules)):
        _check_source(checkpoint)  # the reason may be that config.json belongs to other weights
        usable = (one.name for one in available_methods(checkpoint, config, modules))
        raise RefusedError(f"{reason}; use --method {alternatives(usable)}")
    extra: tuple[Rule, ...] = ()  # of the tensors that the method changes beside keys and values
    if merges and METHODS[method].aligns:
        unaligned = tuple(
            Rule(tensor, Layout()) for tensor in ("q_proj", "o_proj", "out_proj", "dense")
        )
        extra = config.symmetry.rules if isinstance(config.symmetry, Symmetry) else unaligned
    every_change = (
        change for module in modules for change in module_changes(module, config, groups, extra)
    )
    changes = [change for change in every_change if change.groups != change.heads.kv]
    spread = getattr(config.text, "initializer_range", None)
    merging = Merging(
        method, seed, spread if isinstance(spread, int | float) and spread > 0 else 0.02
    )
    if dtype and checkpoint.packed:
        raise RefusedError(
            f"--dtype does not go with quantized weights, which {checkpoint.name} has; leave it out"
        )
    stored = STORED_DTYPES[dtype] if dtype else None
    outputs = _outputs(checkpoint, changes, merging, stored)
    new, edits = edit_config(config, groups, checkpoint.name, dtype, bool(checkpoint.packed))
    unread = check_loads(new.raw, outputs, checkpoint)
    cached, kv_dtype = cached_layers(modules, config), modules[0].kv_dtype(config)
    return Plan(
        checkpoint=checkpoint,
        config=config,
        groups=groups,
        merging=merging,
        shards=_shards(outputs, checkpoint.files),
        new_config=new.raw,
        config_edits=tuple(edits),
        cache_before=kv_cache(config, cached, kv_dtype),
        cache_after=kv_cache(new, cached, stored or kv_dtype),
        dtype=stored,
        warnings=(*_warnings(checkpoint), *unread),
    )


def _check_source(checkpoint: Checkpoint) -> None:
    """Raise CorruptError if the weights do not belong to config.json, as far as `check_loads`
    knows.
    """
    list(check_loads(checkpoint.config, _outputs(checkpoint, (), Merging(), None), checkpoint))


def obstacle(
    method: Method, checkpoint: Checkpoint, config: ModelConfig, modules: Sequence[AttentionModule]
) -> str:
    """Why a method cannot merge the heads of a model; empty if it can."""
    symmetry, name = config.symmetry, f"{checkpoint.name} ({config.text.model_type})"
    not_layerwise = config.not_layerwise or (
        "its other weights are quantized" if checkpoint.packed else ""
    )
    if method.reads_text and not_layerwise:
        return f"{name} cannot be run layer by layer: {not_layerwise}"
    if method.aligns and not method.refines and isinstance(symmetry, str):
        return f"--method {method.name} cannot align the heads of {name}: {symmetry}"
    if method.guesses and not can_guess_inputs(checkpoint, config, modules):
        return (
            f"--method {method.name} needs layers of attention and one MLP; {name} has other layers"
        )
    return ""


def available_methods(
    checkpoint: Checkpoint, config: ModelConfig, modules: Sequence[AttentionModule]
) -> list[Method]:
    """The methods that can merge the heads of a model, without controls, worst quality first."""
    methods = (method for method in METHODS.values() if not method.redraws)
    return [method for method in methods if not obstacle(method, checkpoint, config, modules)]


def searches(plan: Plan, grouping: str) -> bool:
    """Whether to search for the groups with the least loss: by default if heads can be reordered
    into few possible groups (of 8 heads, of 12 in pairs).
    """
    heads, symmetry = plan.config.main.kv, plan.config.symmetry
    groups = [plan.groups] if isinstance(plan.groups, int) else plan.groups
    ways = max((math.comb(heads, heads // count) for count in groups if count < heads), default=0)
    regroups = isinstance(symmetry, Symmetry) and symmetry.regroups(plan.config.text)
    return (
        grouping == "auto" and plan.merging.traits.aligns and regroups and 1 < ways <= _MOST_GROUPS
    )


def check_groups(config: ModelConfig, groups: Groups, name: str) -> None:
    """Raise RefusedError for a number of groups that the model, or one of its layers,
    cannot have.
    """
    allowed, main, requested = (
        valid_groups(config),
        config.main,
        [groups] if isinstance(groups, int) else groups,
    )
    if isinstance(groups, tuple):
        if len(groups) != config.layers:
            raise RefusedError(
                f"--groups names {len(groups)} layers, {name} has {config.layers}; give one number "
                "for each, or one"
            )
        if len({config.heads(layer).kv for layer in range(config.layers)}) > 1:
            raise RefusedError(
                f"--groups by layer is not possible for {name}, whose layers already have "
                "different numbers of key/value heads; convert the base model"
            )
        allowed = [count for count in allowed if count <= main.kv]
    for count in sorted(set(requested) - set(allowed)):
        note = f" ({config.family.note})" if config.family.note else ""
        raise RefusedError(
            f"--groups {count} is not possible for the {main.kv} key/value heads and {main.query} "
            f"query heads of {name}{note}; choose {alternatives(allowed)}"
        )


def _outputs(
    checkpoint: Checkpoint, changes: Sequence[Change], merging: Merging, stored: str | None
) -> list[OutputTensor]:
    """All tensors of the result, in the order of the source."""
    import torch

    by_name = {change.source.name: change for change in changes}
    outputs: list[OutputTensor] = []
    for name, spec in checkpoint.tensors.items():
        dtype = stored if stored and spec.dtype in TORCH_DTYPES else spec.dtype
        change, shape = by_name.get(name), spec.shape
        if change:
            shape = tuple(merging.apply(change, torch.empty(spec.shape, device="meta")).shape)
        outputs.append(OutputTensor(name, dtype, shape, spec, change))
    return outputs


def _shards(outputs: Sequence[OutputTensor], files: Sequence[str]) -> tuple[Shard, ...]:
    """The outputs in the same shards as in the source."""
    parts: dict[str, list[OutputTensor]] = {file: [] for file in files}
    for tensor in outputs:
        parts[tensor.source.file].append(tensor)
    shards = [tuple(part) for part in parts.values() if part]
    return tuple(map(Shard, shard_names(len(shards)), shards))


def _warnings(checkpoint: Checkpoint) -> Iterable[str]:
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


def check_loads(
    raw: dict[str, Any], outputs: Sequence[OutputTensor], checkpoint: Checkpoint
) -> Iterator[str]:
    """Load the tensors of a result into the class of its config.json on the meta device, without
    weights or packed tensors. Yield warnings: tensors that transformers does not read, or why this
    could not be checked.

    Raises CorruptError if a parameter is missing, which transformers would initialize at random, or
    has another shape.
    """
    import torch
    import transformers

    config = transformers_config(without_quantization(raw))
    cls = model_class(config)
    if not issubclass(cls, transformers.PreTrainedModel):
        yield (
            "could not check that the result loads: transformers has no class of "
            f"{raw['model_type']} with a head"
        )
        return
    packed = {name.rpartition(".")[0] for name in checkpoint.packed}
    tensors = {
        tensor.name: torch.empty(
            tensor.shape,
            dtype=getattr(torch, TORCH_DTYPES.get(tensor.dtype, "uint8")),
            device="meta",
        )
        for tensor in outputs
        if tensor.name.rpartition(".")[0] not in packed
    }
    try:
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
    except ImportError as error:  # a part of the model needs a library that is not installed
        yield f"could not check that the result loads: {explain(error)}"
        return
    except Exception as error:  # any error of a class means that the config is wrong
        raise CorruptError(
            f"{checkpoint.name}: transformers cannot build {cls.__name__} from config.json: "
            f"{explain(error)}; correct it"
        ) from error
    missing, unexpected = (
        set() if packed else set(info["missing_keys"]),
        set(info["unexpected_keys"]),
    )
    if problem := _problem(cls.__name__, missing, unexpected, info["mismatched_keys"]):
        named = checkpoint.classes[-1].architecture in (cls.__name__, None)
        if (named and "auto_map" not in raw) or cls.__module__.startswith("gqa."):
            raise CorruptError(f"{checkpoint.name}: {problem}")
        yield (
            f"transformers' {cls.__name__} does not load the result (other classes were not "
            f"tried): {problem}"
        )
    elif unexpected:
        yield (
            f"transformers' {cls.__name__} does not read these copied tensors: "
            f"{listing(unexpected, _LISTED)}"
        )


def _problem(
    class_name: str, missing: set[str], unexpected: set[str], mismatched: set[tuple[str, Any, Any]]
) -> str | None:
    """Why a class does not load tensors, and what to do; None if it loads them."""
    if mismatched:
        key, stored, expected = min(mismatched, key=lambda one: one[0])
        more = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        return (
            f"{key} is stored as {list(stored)}, config.json implies {list(expected)}{more}; "
            "correct config.json, or give the checkpoint that it belongs to"
        )
    if missing:
        rest = f" (but {listing(unexpected, _LISTED)})" if unexpected else ""
        return (
            f"{listing(missing, _LISTED)} {'is' if len(missing) == 1 else 'are'} not stored{rest}, "
            f"and {class_name} would initialize them at random; correct config.json, or give a "
            "checkpoint of the whole model with the names of transformers"
        )
    return None
