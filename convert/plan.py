"""Checkpoint + family + options -> Plan: every output tensor and byte, every reason to refuse, before any writing."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gqa.convert.checkpoint import SINGLE, TORCH_DTYPES, Checkpoint
from gqa.convert.errors import CorruptError, RefusedError, alternatives
from gqa.convert.families import BUFFERS, QUERY_SIDE, SHARED_KEY_SIDE, Family, Rule
from gqa.convert.kv_cache import KVCache, kv_cache
from gqa.convert.layout import LayerHeads, Merge, Numbered
from gqa.convert.methods import METHODS, Merging
from gqa.convert.model_config import ConfigEdit, ModelConfig, edit_config, read_config, target_heads, valid_groups
from gqa.convert.safetensors_header import TensorSpec, byte_size

if TYPE_CHECKING:
    from torch import Tensor

# Parts of multimodal and speech models that are not the text stack: they have heads of their own, left alone.
_TOWERS = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|audio\w*|speech\w*|encoder|\w+_encoder|\w+_tower|qformer|perceiver\w*|resampler|"
    r"vit|vq\w*|codec\w*|talker|code2wav|token2wav|depth_decoder|sam\w*|dit|patcher|projector|\w+_projector|connector|"
    r"adaptor|local_decoder|diffusion\w*)\."
)
_STORED = {name: stored for stored, name in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Change:
    """Stored tensors whose heads are merged together, and what they become."""

    rule: Rule
    sources: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    heads: LayerHeads
    groups: int

    def compute(
        self, tensors: Sequence[Tensor], merging: Merging, around: Callable[[Merge], Merge] = lambda merge: merge
    ) -> list[Tensor]:
        """The outputs from the sources. On meta tensors: their shapes. `around` wraps the merge of one role."""
        import torch

        merge = around(merging.merge_for(self.outputs[0], self.heads.kv, self.groups, self.rule.projection))
        try:
            if isinstance(self.rule.layout, Numbered):
                return list(self.rule.layout.regroup(torch.stack(list(tensors)), self.heads, merge).unbind())
            return [self.rule.layout.regroup(tensors[0], self.heads, merge)]
        except CorruptError as error:
            raise CorruptError(
                f"{self.sources[0].name} {list(self.sources[0].shape)} {error}; is it of another model?"
            ) from None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result: copied from `source`, or output number `index` of `change`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorSpec | None = None
    change: Change | None = None
    index: int = 0

    @property
    def nbytes(self) -> int:
        return byte_size(self.dtype, self.shape)

    @property
    def copied(self) -> bool:
        """Whether the bytes are the source's own."""
        return self.source is not None and self.source.dtype == self.dtype


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
    groups: int
    merging: Merging
    shards: tuple[Shard, ...]
    new_config: dict[str, Any]
    config_edits: tuple[ConfigEdit, ...]
    cache_before: KVCache
    cache_after: KVCache
    dtype: str | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def tensors(self) -> Iterable[OutputTensor]:
        return (t for shard in self.shards for t in shard.tensors)

    @property
    def changed(self) -> list[OutputTensor]:
        return [t for t in self.tensors if t.change is not None]

    @property
    def total_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters_before(self) -> int:
        return sum(spec.numel for spec in self.checkpoint.tensors.values())

    @property
    def parameters_after(self) -> int:
        return sum(byte_size("U8", t.shape) for t in self.tensors)

    @property
    def is_identity(self) -> bool:
        return self.groups == self.config.main.kv


def make_plan(
    checkpoint: Checkpoint,
    groups: int,
    method: str = "mean",
    seed: int = 0,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Plan:
    """Plan a conversion from headers alone. Raises RefusedError or CorruptError with one line."""
    if method not in METHODS:
        raise RefusedError(f"unknown method {method!r}; choose {', '.join(METHODS)}")
    config = read_config(checkpoint.config, checkpoint.name)
    check_groups(config, groups, checkpoint.name)
    modules = attention_modules(checkpoint, config)
    changes = [change for module in modules for change in module_changes(module, config, groups)]
    merging = Merging(method, seed, float(getattr(config.text, "initializer_range", None) or 0.02))
    stored = _STORED[dtype] if dtype else None
    outputs = _outputs(checkpoint, changes, merging, stored)
    new_config, edits = edit_config(config, groups, checkpoint.name, dtype)
    cached = {m.layer for m in modules if not m.cross and m.layer < config.layers}
    kv_dtype = modules[0].kv_dtype(config)
    return Plan(
        checkpoint=checkpoint,
        config=config,
        groups=groups,
        merging=merging,
        shards=_shards(outputs, checkpoint, max_shard_bytes),
        new_config=new_config,
        config_edits=tuple(edits),
        cache_before=kv_cache(config, cached, kv_dtype),
        cache_after=kv_cache(read_config(new_config, checkpoint.name), cached, stored or kv_dtype),
        dtype=stored,
        warnings=tuple(_warnings(checkpoint)),
    )


def check_groups(config: ModelConfig, groups: int, name: str) -> None:
    """Refuse a number of groups that the model cannot have, listing those it can."""
    allowed = valid_groups(config)
    if groups not in allowed:
        main = config.main
        note = f" ({config.family.note})" if config.family.note else ""
        raise RefusedError(
            f"--groups {groups} is not possible for the {main.kv} key/value heads and {main.query} query heads of "
            f"{name}{note}; choose {alternatives(allowed)}"
        )


@dataclass(frozen=True)
class AttentionModule:
    """The stored tensors of one attention module, by their name below it."""

    path: str
    layer: int
    tensors: Mapping[str, TensorSpec]
    cross: bool = False  # reads another sequence: its cache does not grow with the tokens written

    def kv_dtype(self, config: ModelConfig) -> str:
        """Storage dtype of the keys and values, which is that of their cache."""
        return next(spec.dtype for tail, spec in self.tensors.items() if _rule_for(tail, config.family, config.text))


def attention_modules(checkpoint: Checkpoint, config: ModelConfig) -> list[AttentionModule]:
    """The modules of the text stack that hold keys and values."""
    family = config.family
    names = "|".join(re.escape(name) for name in (*family.attention, *family.cross_attention))
    pattern = re.compile(rf"((?:^|.*\.)(?:layers|blocks|h)\.(\d+)\.(?:{names}))\.(.+)", re.DOTALL)
    found: dict[tuple[str, int], dict[str, TensorSpec]] = defaultdict(dict)
    for name, spec in checkpoint.tensors.items():
        if (match := pattern.fullmatch(name)) and not _TOWERS.search(name):
            mtp = config.layers if "mtp" in name.split(".") else int(match[2])
            found[match[1], mtp][match[3]] = spec
    modules = [
        AttentionModule(path, layer, tensors, path.endswith(family.cross_attention))
        for (path, layer), tensors in found.items()
    ]
    modules = [m for m in modules if any(_rule_for(tail, family, config.text) for tail in m.tensors)]
    if not modules:
        raise CorruptError(
            f"{checkpoint.name} has no tensor like layers.0.{family.attention[0]}.{family.rules[0].tensor}.weight; "
            f"its config says {config.text.model_type}; give a checkpoint of the whole model"
        )
    return modules


def _rule_for(tail: str, family: Family, text: Any) -> Rule | None:
    for rule in family.rules:
        name = re.escape(rule.tensor).replace(r"\{head\}", r"\d+")
        holds = rule.when is None or getattr(text, rule.when[0], None) == rule.when[1]
        if holds and re.fullmatch(rf"{name}(?:\.weight|\.bias)?", tail):
            return rule
    return None


def module_changes(module: AttentionModule, config: ModelConfig, groups: int) -> list[Change]:
    """What happens to one attention module; every tensor of it must be known."""
    import torch

    heads = config.heads(module.layer)
    target = target_heads(config, module.layer, groups).kv
    plain: list[Change] = []
    numbered: dict[str, list[tuple[str, TensorSpec]]] = defaultdict(list)
    for tail, spec in module.tensors.items():
        rule = _rule_for(tail, config.family, config.text)
        if rule is None:
            _check_unchanged(module, tail, spec, heads, config)
        elif isinstance(rule.layout, Numbered):
            numbered[re.sub(r"\d+", "{head}", tail)].append((tail, spec))
        else:
            plain.append(Change(rule, (spec,), (spec.name,), heads, target))
    for template, members in numbered.items():
        members.sort(key=lambda member: int(re.findall(r"\d+", member[0])[-1]))
        names = tuple(f"{module.path}.{template.replace('{head}', str(j))}" for j in range(target))
        rule = _rule_for(members[0][0], config.family, config.text)
        assert rule is not None
        plain.append(Change(rule, tuple(spec for _, spec in members), names, heads, target))
    _check_keys_and_values(module, plain, config)
    for change in plain:  # shapes are checked also where nothing changes: a verified output is planned once more
        change.compute([torch.empty(spec.shape, device="meta") for spec in change.sources], Merging())
    return [change for change in plain if target != heads.kv]


def _check_unchanged(
    module: AttentionModule, tail: str, spec: TensorSpec, heads: LayerHeads, config: ModelConfig
) -> None:
    name = re.sub(r"\.(weight|bias)$", "", tail)
    if tail in BUFFERS or name in QUERY_SIDE or any(fnmatchcase(name, p) for p in config.family.unchanged):
        return
    if name in SHARED_KEY_SIDE and spec.shape in ((heads.key_dim,), (heads.value_dim,)):
        return
    known = [*QUERY_SIDE, *config.family.unchanged, *SHARED_KEY_SIDE, *(r.tensor for r in config.family.rules)]
    near = difflib.get_close_matches(name, known, 1) or known[:1]
    raise RefusedError(
        f"{spec.name} {list(spec.shape)} {spec.dtype} is not a known tensor of an attention module of "
        f"{config.text.model_type} (nearest: {near[0]}); nothing was written"
    )


def _check_keys_and_values(module: AttentionModule, changes: Sequence[Change], config: ModelConfig) -> None:
    parts = {c.rule.tensor: c.sources[0] for c in changes if c.rule.projection and c.outputs[0].endswith("weight")}
    wanted = {rule.tensor for rule in config.family.rules if rule.projection}
    if config.family.keys_only(config.text, module.layer):
        wanted = {name for name in wanted if not name.startswith("v_")}
    if missing := wanted - set(parts):
        have = ", ".join(sorted(parts)) or "nothing"
        raise CorruptError(f"{module.path} has {have} but no {', '.join(sorted(missing))}; download it again")
    for spec in (s for c in changes for s in c.sources):
        if spec.dtype not in TORCH_DTYPES:
            raise RefusedError(
                f"{spec.name} is stored as {spec.dtype}: quantised or packed heads cannot be averaged; "
                "convert the original and quantise the result"
            )
    if len({spec.dtype for spec in parts.values()}) > 1:
        pairs = ", ".join(f"{name} {spec.dtype}" for name, spec in parts.items())
        raise CorruptError(
            f"keys and values of {module.path} have different dtypes ({pairs}); save both in one dtype first"
        )


def _outputs(
    checkpoint: Checkpoint, changes: Sequence[Change], merging: Merging, stored: str | None
) -> list[OutputTensor]:
    """All tensors of the result in the order of the source's bytes."""
    import torch

    starts = {change.sources[0].name: change for change in changes}
    consumed = {spec.name for change in changes for spec in change.sources}
    outputs: list[OutputTensor] = []
    for name, spec in checkpoint.tensors.items():
        dtype = stored if stored and spec.dtype in TORCH_DTYPES else spec.dtype
        if change := starts.get(name):
            metas = [torch.empty(s.shape, device="meta") for s in change.sources]
            for index, meta in enumerate(change.compute(metas, merging)):
                outputs.append(OutputTensor(change.outputs[index], dtype, tuple(meta.shape), None, change, index))
        elif name not in consumed:
            outputs.append(OutputTensor(name, dtype, spec.shape, spec))
    return outputs


def _shards(outputs: Sequence[OutputTensor], checkpoint: Checkpoint, max_bytes: int | None) -> tuple[Shard, ...]:
    """The source's partition, or consecutive tensors of at most `max_bytes` (one larger tensor is a shard)."""
    parts: list[list[OutputTensor]] = []
    if max_bytes is None:
        by_file: dict[str, list[OutputTensor]] = {file: [] for file in checkpoint.files}
        for tensor in outputs:
            source = tensor.source or (tensor.change.sources[0] if tensor.change else None)
            assert source is not None
            by_file[source.file].append(tensor)
        parts = [part for part in by_file.values() if part]
    else:
        size = 0
        for tensor in outputs:
            if not parts or size + tensor.nbytes > max_bytes:
                parts.append([])
                size = 0
            parts[-1].append(tensor)
            size += tensor.nbytes
    if len(parts) == 1:
        return (Shard(SINGLE, tuple(parts[0])),)
    return tuple(
        Shard(f"model-{i:05d}-of-{len(parts):05d}.safetensors", tuple(part)) for i, part in enumerate(parts, 1)
    )


def _warnings(checkpoint: Checkpoint) -> Iterable[str]:
    if "auto_map" in checkpoint.config:
        yield "config.json names remote code (auto_map): it is copied, not run; check that it reads the KV-head count"
    if checkpoint.left_out:
        yield f"left out, as they hold the old weights: {', '.join(checkpoint.left_out)}"
