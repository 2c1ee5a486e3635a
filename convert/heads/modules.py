"""Find the stored tensors of attention: the modules of the text stack, the rule of each tensor, and
its change.

An unknown tensor of attention is an error that names it; everything outside attention is copied.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import TORCH_OF_SAFETENSORS, Checkpoint, is_packed
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.config_edits import target_heads
from gqa.convert.heads.family import KVCounts, Symmetry
from gqa.convert.heads.layouts import LayerHeads, Layout, Part, Role, Rule
from gqa.core.errors import CorruptError, RefusedError, listing
from gqa.models.custom_code import listed_as

if TYPE_CHECKING:
    from torch import Tensor

# Tensors of an attention module, besides W_Q and W_O (`Family.query_side`), that do not change with
# the number of KV heads: each query head has its own part, or all heads share one.
_OF_QUERY_HEADS = (
    "q_norm",
    "query_layernorm",
    "q_layernorm",
    "sinks",
    "gate_proj",
    "gate_bias",
    "g_proj",
)
# One vector of the head dimension, shared by all heads; `_check_unchanged` checks that it is that.
_SHARED_KEY_SIDE = ("k_norm", "key_layernorm", "k_layernorm", "v_norm")
# Buffers that old versions of transformers stored and nothing reads.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "bias",
    "masked_bias",
)
# Names of lists of layers. Those of the last three predict tokens after the next one (multi-token
# prediction).
_LAYERS = "layers|blocks?|h|mtp_layers|mtp_block|mtp"
# Parts of multimodal and speech models outside the text stack, whose heads do not change.
_TOWER_NAMES = (
    r"vision\w*",
    "visual",
    r"audio\w*",
    r"speech\w*",
    "encoder",
    r"\w+_encoder",
    r"\w+_tower",
    "qformer",
    r"perceiver\w*",
    "resampler",
    "vit",
    r"vq\w*",
    "qwen2_model",
    r"codec\w*",
    "talker",
    "code2wav",
    "token2wav",
    "depth_decoder",
    r"sam\w*",
    "dit",
    "patcher",
    "projector",
    r"\w+_projector",
    "connector",
    "adaptor",
    "local_decoder",
    r"diffusion\w*",
)
_TOWERS = re.compile(rf"(?:^|\.)(?:{'|'.join(_TOWER_NAMES)})\.")


ModuleKind = Literal["decoder-self", "cross"]


@dataclass(frozen=True)
class Change:
    """A stored tensor whose heads are merged or repeated; its name stays.

    rule: How heads are stored in it.
    source: The tensor of the base model.
    heads: The heads of the base model's layer.
    groups: G, the KV heads of the result's layer.
    module: The path of its attention module.
    """

    rule: Rule
    source: TensorSpec
    heads: LayerHeads
    groups: int
    module: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the result."""
        return self.rule.layout.shape(self.source.shape, self.heads, self.groups)

    def split(self, tensor: Tensor) -> dict[Part, Tensor]:
        """The heads in the source. Raises CorruptError if the config says another number."""
        try:
            return self.rule.layout.split(tensor, self.heads)
        except CorruptError as error:
            raise CorruptError(
                f"{self.source.name} {list(self.source.shape)} {error}; check that it belongs to "
                "this model"
            ) from error

    def mapped(self, tensor: Tensor, merge: Callable[[Role, Tensor], Tensor]) -> Tensor:
        """The new tensor: the heads of each role through `merge`.

        A tensor without heads is unchanged.
        """
        merged: dict[Part, Tensor] = {}
        for part, heads in self.split(tensor).items():
            merged[part] = heads if part == "whole" else merge(part, heads)
        return self.rule.layout.join(merged, self.heads)

    def repeated(self, tensor: Tensor) -> Tensor:
        """A converted tensor in the source's shape: each key and value head repeated in place of
        those it replaces.
        """
        times = self.heads.kv // self.groups
        parts = self.rule.layout.split(tensor, replace(self.heads, kv=self.groups))
        for part in ("key", "value"):
            if part in parts:
                parts[part] = parts[part].repeat_interleave(times, 0)
        return self.rule.layout.join(parts, self.heads)


@dataclass(frozen=True)
class AttentionModule:
    """One attention module that is stored.

    path: Its path in the model ("model.layers.0.self_attn").
    layer: The index of its layer; beyond the last for one that predicts further tokens.
    tensors: Its stored tensors, by their names below it.
    kind: Whether it attends to the tokens that are written, so that its cache grows with them, or
        to the source of an encoder-decoder.
    """

    path: str
    layer: int
    tensors: Mapping[str, TensorSpec]
    kind: ModuleKind = "decoder-self"

    @property
    def layer_path(self) -> str:
        """Common prefix of the names of all tensors of its layer."""
        # Not by `layer`: all layers that predict further tokens have the same one
        match = re.match(rf"(?:.*\.)?(?:{_LAYERS})\.\d+(?=\.)", self.path, re.DOTALL)
        assert match is not None
        return match[0]

    def kv_dtype(self, config: ModelConfig) -> str:
        """Storage dtype of the keys and values, which is that of their cache."""
        for tail, spec in self.tensors.items():
            rule = rule_of(tail, config)
            if rule and rule.projection:  # a norm may be stored wider
                return spec.dtype
        raise CorruptError(f"{self.path} has no keys and values; download the checkpoint again")


def attention_modules(checkpoint: Checkpoint, config: ModelConfig) -> list[AttentionModule]:
    """The modules of the text stack that hold keys and values.

    Raises RefusedError if they cannot be identified.
    """
    family = config.family
    modules = []
    stacks = set()
    for (path, stack, layer), tensors in _tensors_by_module(checkpoint, config).items():
        _check_unpacked(tensors)
        if any(rule_of(tail, config) for tail in tensors):
            is_cross = path.endswith(family.cross_attention)
            kind: ModuleKind = "cross" if is_cross else "decoder-self"
            modules.append(AttentionModule(path, layer, tensors, kind))
            if layer < config.layers:
                stacks.add(stack)
        elif "q_proj.weight" in tensors and not config.shares_kv(layer):
            raise CorruptError(
                f"{path} has queries but no keys and values; download the checkpoint again"
            )

    if not modules:
        raise CorruptError(
            f"{checkpoint.name} has no tensor like "
            f"layers.0.{family.attention[0]}.{family.rules[0].tensor}.weight; its config says "
            f"{config.text_config.model_type}; pass a checkpoint of the whole model"
        )
    named_stacks = stacks - {""}
    if len(named_stacks) > 1:
        raise RefusedError(
            f"{checkpoint.name} has several stacks of {config.text_config.model_type} layers "
            f"({listing(named_stacks)}) and it is not known which of them the config counts; "
            "nothing was written, please report this model"
        )
    return modules


def _tensors_by_module(
    checkpoint: Checkpoint, config: ModelConfig
) -> dict[tuple[str, str, int], dict[str, TensorSpec]]:
    """The tensors below attention modules of the text stack, by their names there.

    The keys are the module's path, its stack (the path of the model that has the list of layers)
    and its layer.

    Raises RefusedError for what looks like keys or values outside these layers.
    """
    family = config.family
    names = "|".join(re.escape(name) for name in (*family.attention, *family.cross_attention))
    module = rf"(?P<stack>(?:.*\.)?)(?P<list>{_LAYERS})\.(?P<layer>\d{{1,9}})\.(?:{names})"
    in_layers = re.compile(rf"(?P<path>{module})\.(?P<tail>.+)", re.DOTALL)
    anywhere = re.compile(rf"(?:.*\.)?(?:{names})\.(?P<tail>.+)", re.DOTALL)

    by_module: dict[tuple[str, str, int], dict[str, TensorSpec]] = defaultdict(dict)
    for name, spec in checkpoint.tensors.items():
        if _TOWERS.search(name):
            continue

        if match := in_layers.fullmatch(name):
            layer = int(match["layer"])
            if "mtp" in match["list"] or "mtp" in match["stack"].split("."):
                layer = config.layers  # all layers of multi-token prediction count as this one
            by_module[match["path"], match["stack"], layer][match["tail"]] = spec
            continue

        match = anywhere.fullmatch(name)
        if match and rule_of(match["tail"], config):
            model_type = config.text_config.model_type
            raise RefusedError(
                f"{name} {list(spec.shape)} looks like keys or values of {model_type} "
                "but is not in one of its layers; nothing was written, please report this model"
            )
    return by_module


def cached_layers(modules: Iterable[AttentionModule], config: ModelConfig) -> set[int]:
    """Layers whose cache grows with the generated tokens, except layers that predict further
    tokens.
    """
    return {
        module.layer
        for module in modules
        if module.kind == "decoder-self" and module.layer < config.layers
    }


def rule_of(tail: str, config: ModelConfig, extra: Sequence[Rule] = ()) -> Rule | None:
    """The rule, of the family or `extra`, for a tensor by its name below its module.

    None if there is none.
    """
    for rule in (*config.family.rules, *extra):
        if rule.matches(tail, config.text_config):
            return rule
    return None


def module_changes(
    module: AttentionModule, config: ModelConfig, kv_heads: KVCounts, extra: Sequence[Rule] = ()
) -> list[Change]:
    """Changes of one attention module, all of whose tensors must be known.

    kv_heads: Of the result.
    extra: Rules of tensors beside keys and values that change with them.

    Raises RefusedError for an unknown tensor, CorruptError for one that is missing or has another
    shape.
    """
    import torch

    heads = config.heads(module.layer)
    groups = target_heads(config, module.layer, kv_heads).kv
    changes = []
    for tail, spec in module.tensors.items():
        rule = rule_of(tail, config, extra)
        if rule:
            changes.append(Change(rule, spec, heads, groups, module.path))
        else:
            _check_unchanged(tail, spec, heads, config)
    _check_projections(module, (*config.family.rules, *extra), changes, heads)

    # Splitting checks the shape, also if there are as many heads as before: a written result is
    # verified by planning it once more.
    for change in changes:
        change.split(torch.empty(change.source.shape, device="meta"))
    return changes


def _check_unchanged(tail: str, spec: TensorSpec, heads: LayerHeads, config: ModelConfig) -> None:
    """Raise RefusedError for a tensor without a rule that is not known to stay as it is."""
    if tail in _BUFFERS:
        return

    name = re.sub(r"\.(weight|bias)$", "", tail)
    family = config.family
    if name in family.query_side or name in _OF_QUERY_HEADS:
        return
    if any(fnmatchcase(name, pattern) for pattern in family.unchanged_patterns):
        return

    # Tensors that change with maps are known, too, where a method uses none.
    entry = family.symmetries[listed_as(config.text_config.model_type)]
    if isinstance(entry, Symmetry) and rule_of(tail, config, entry.query_side_rules):
        return

    is_one_vector = spec.shape in ((heads.key_dim,), (heads.value_dim,))
    if name in _SHARED_KEY_SIDE and is_one_vector:
        return
    raise RefusedError(
        f"{spec.name} {list(spec.shape)} {spec.dtype} is not a known tensor of an attention "
        f"module of {config.text_config.model_type}; nothing was written, please report this model"
    )


def _check_unpacked(tensors: Mapping[str, TensorSpec]) -> None:
    """Raise RefusedError if a tensor of an attention module holds quantized weights, or their
    scales.
    """
    for tail, spec in tensors.items():
        if tail not in _BUFFERS and (is_packed(spec) or spec.dtype not in TORCH_OF_SAFETENSORS):
            raise RefusedError(
                f"the attention weights are quantized or packed ({spec.name} is stored as "
                f"{spec.dtype}); convert the original checkpoint and quantize the result, or "
                "dequantize this one first"
            )


def _check_projections(
    module: AttentionModule, rules: Sequence[Rule], changes: Sequence[Change], heads: LayerHeads
) -> None:
    """Raise CorruptError if a projection that a rule names is missing."""
    stored = {
        change.rule.tensor
        for change in changes
        if change.rule.projection and change.source.name.endswith("weight")
    }
    # A rule with the plain `Layout` is for tensors that need not be there.
    expected = {
        rule.tensor for rule in rules if rule.projection and type(rule.layout) is not Layout
    }
    if heads.keys_only:
        expected = {name for name in expected if not name.startswith("v_")}

    missing = expected - stored
    if missing:
        names = ", ".join(sorted(stored)) or "nothing"
        raise CorruptError(
            f"{module.path} has {names} but no {', '.join(sorted(missing))}; download it again"
        )
