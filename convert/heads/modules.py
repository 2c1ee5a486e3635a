"""Find the stored tensors of attention: the modules of the text stack, the rule of each tensor, and
its change.

An unknown tensor of attention is an error that names it; everything outside attention is copied. At
the end: whether the inputs of layers can be estimated from weights. They can if every layer is
attention and one MLP, both added to the residual stream, with norms before or after them, and the
stream starts as embeddings of tokens (and positions).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint, is_packed
from gqa.convert.heads.config import ModelConfig, target_heads
from gqa.convert.heads.family import Groups, LayerHeads, Layout, Part, Role, Rule, Symmetry
from gqa.core.errors import CorruptError, RefusedError, listing
from gqa.models.custom_code import listed_as

if TYPE_CHECKING:
    from torch import Tensor

# Below an attention module, whatever the number of KV heads: per query head, or shared by all
# heads.
_QUERY_SIDE = (
    "q_proj",
    "o_proj",
    "out_proj",
    "dense",
    "q_norm",
    "query_layernorm",
    "q_layernorm",
    "sinks",
    "gate_proj",
    "gate_bias",
    "g_proj",
)
# One vector of the head dimension, shared by all heads; the plan checks that it is that.
_SHARED_KEY_SIDE = ("k_norm", "key_layernorm", "k_layernorm", "v_norm")
# Buffers that old versions of transformers stored and nothing reads.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "bias",
    "masked_bias",
)
# Names of lists of layers; the last three have layers that predict further tokens and count as one
# more.
_LAYERS = "layers|blocks?|h|mtp_layers|mtp_block|mtp"
# Parts of multimodal and speech models outside the text stack, whose heads are not changed.
_TOWERS = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|audio\w*|speech\w*|encoder|\w+_encoder|\w+_tower|qformer|perceiver\w*|resampler|"
    r"vit|vq\w*|qwen2_model|codec\w*|talker|code2wav|token2wav|depth_decoder|sam\w*|dit|patcher|projector|\w+_projector|connector|"
    r"adaptor|local_decoder|diffusion\w*)\."
)
# Names of an MLP's matrices: gate (or none), up, down. The same name twice: the halves of one
# matrix.
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "c_fc", "c_proj"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
)
# Norms after attention and after the MLP, where there are both; alone, the first name is the norm
# before the MLP.
_AFTER = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # names in configs
_ELSEWHERE = re.compile(r"lm_head|embed_out|output|\.\d+\.")  # no embeddings, whatever their shape
_POSITIONS = re.compile(r"position|wpe")


@dataclass(frozen=True)
class Change:
    """A stored tensor whose heads are merged or repeated; its name stays."""

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
                f"{self.source.name} {list(self.source.shape)} {error}; is it of another model?"
            ) from error

    def mapped(self, tensor: Tensor, merge: Callable[[Role, Tensor], Tensor]) -> Tensor:
        """The new tensor: the heads of each role through `merge`.

        A tensor without heads is unchanged.
        """
        parts = self.split(tensor).items()
        merged = {part: heads if part == "whole" else merge(part, heads) for part, heads in parts}
        return self.rule.layout.join(merged, self.heads)

    def repeated(self, tensor: Tensor) -> Tensor:
        """A converted tensor in the source's shape: each key and value head repeated in place of
        those it replaces.
        """
        parts = self.rule.layout.split(tensor, replace(self.heads, kv=self.groups))
        times = self.heads.kv // self.groups
        shared = ("key", "value")
        repeated = {
            k: t.repeat_interleave(times, 0) if k in shared else t for k, t in parts.items()
        }
        return self.rule.layout.join(repeated, self.heads)


@dataclass(frozen=True)
class AttentionModule:
    """The stored tensors of one attention module, by their name below it."""

    path: str
    layer: int
    tensors: Mapping[str, TensorSpec]
    # Only this one's cache grows with the tokens written
    kind: Literal["decoder-self", "cross"] = "decoder-self"

    @property
    def layer_path(self) -> str:
        """Common prefix of the names of all tensors of its layer."""
        return f"{self.path.split(f'.{self.layer}.')[0]}.{self.layer}"

    def kv_dtype(self, config: ModelConfig) -> str:
        """Storage dtype of the keys and values, which is that of their cache."""
        rules = ((rule_of(tail, config), spec) for tail, spec in self.tensors.items())
        # A norm may be stored wider
        return next(spec.dtype for rule, spec in rules if rule and rule.projection)


def attention_modules(checkpoint: Checkpoint, config: ModelConfig) -> list[AttentionModule]:
    """The modules of the text stack that hold keys and values.

    Raises RefusedError if they cannot be identified.
    """
    family = config.family
    names = "|".join(re.escape(name) for name in (*family.attention, *family.cross_attention))
    module = rf"(?P<stack>(?:.*\.)?)(?P<list>{_LAYERS})\.(?P<layer>\d+)\.(?:{names})"
    pattern = re.compile(rf"({module})\.(?P<tail>.+)", re.DOTALL)
    elsewhere = re.compile(rf"(?:.*\.)?(?:{names})\.(?P<tail>.+)", re.DOTALL)
    by_module: dict[tuple[str, str, int], dict[str, TensorSpec]] = defaultdict(dict)
    for name, spec in checkpoint.tensors.items():
        if _TOWERS.search(name):
            continue
        if match := pattern.fullmatch(name):
            # Layers beyond the last
            predicts = "mtp" in match["list"] or "mtp" in match["stack"].split(".")
            layer = config.layers if predicts else int(match["layer"])
            by_module[match[1], match["stack"], layer][match["tail"]] = spec
        elif (match := elsewhere.fullmatch(name)) and rule_of(match["tail"], config):
            raise RefusedError(
                f"{name} {list(spec.shape)} looks like keys or values of {config.text.model_type} "
                "but is not in one of its layers; nothing was written"
            )
    modules = []
    stacks = set()
    for (path, stack, layer), tensors in by_module.items():
        _check_unpacked(tensors)
        if any(rule_of(tail, config) for tail in tensors):
            cross = path.endswith(family.cross_attention)
            modules.append(
                AttentionModule(path, layer, tensors, "cross" if cross else "decoder-self")
            )
            stacks.add(stack if layer < config.layers else "")
        elif "q_proj.weight" in tensors and not config.shares_kv(layer):
            raise CorruptError(f"{path} has queries but no keys and values; download it again")
    if not modules:
        raise CorruptError(
            f"{checkpoint.name} has no tensor like "
            f"layers.0.{family.attention[0]}.{family.rules[0].tensor}.weight; "
            f"its config says {config.text.model_type}; give a checkpoint of the whole model"
        )
    if len(several := stacks - {""}) > 1:
        raise RefusedError(
            f"{checkpoint.name} has several stacks of {config.text.model_type} layers "
            f"({listing(several)}) and it is "
            "not known which of them the config counts; nothing was written"
        )
    return modules


def cached_layers(modules: Iterable[AttentionModule], config: ModelConfig) -> set[int]:
    """Layers whose cache grows with the generated tokens, except layers that predict further
    tokens.
    """
    return {m.layer for m in modules if m.kind == "decoder-self" and m.layer < config.layers}


def rule_of(tail: str, config: ModelConfig, extra: Sequence[Rule] = ()) -> Rule | None:
    """The rule, of the family or `extra`, for a tensor by its name below its module.

    None if there is none.
    """
    return next(
        (rule for rule in (*config.family.rules, *extra) if rule.matches(tail, config.text)), None
    )


def module_changes(
    module: AttentionModule, config: ModelConfig, groups: Groups, extra: Sequence[Rule] = ()
) -> list[Change]:
    """Changes of one attention module, all of whose tensors must be known.

    `extra`: rules of tensors beside keys and values that change with them.
    """
    import torch

    heads = config.heads(module.layer)
    target = target_heads(config, module.layer, groups).kv
    changes = []
    for tail, spec in module.tensors.items():
        if rule := rule_of(tail, config, extra):
            changes.append(Change(rule, spec, heads, target, module.path))
        else:
            _check_unchanged(tail, spec, heads, config)
    _check_projections(module, (*config.family.rules, *extra), changes, heads)
    # Checks shapes, also if nothing changes: `verify` plans the output once more
    for change in changes:
        change.split(torch.empty(change.source.shape, device="meta"))
    return changes


def _check_unchanged(tail: str, spec: TensorSpec, heads: LayerHeads, config: ModelConfig) -> None:
    """Raise RefusedError for a tensor without a rule that is not known to stay as it is."""
    name = re.sub(r"\.(weight|bias)$", "", tail)
    family = config.family
    if (
        tail in _BUFFERS
        or name in _QUERY_SIDE
        or any(fnmatchcase(name, pattern) for pattern in family.unchanged)
    ):
        return
    entry = family.symmetries[listed_as(config.text.model_type)]
    if rule_of(tail, config, entry.rules if isinstance(entry, Symmetry) else ()):
        return
    if name in _SHARED_KEY_SIDE and spec.shape in ((heads.key_dim,), (heads.value_dim,)):
        return
    raise RefusedError(
        f"{spec.name} {list(spec.shape)} {spec.dtype} is not a known tensor of an attention module "
        f"of {config.text.model_type}; nothing was written"
    )


def _check_unpacked(tensors: Mapping[str, TensorSpec]) -> None:
    """Raise RefusedError if a tensor of an attention module holds quantized weights, or their
    scales.
    """
    for tail, spec in tensors.items():
        if tail not in _BUFFERS and (is_packed(spec) or spec.dtype not in TORCH_DTYPES):
            raise RefusedError(
                f"{spec.name} is stored as {spec.dtype}: heads that are quantized or packed cannot "
                "be averaged; convert the original and quantize the result, or dequantize first"
            )


def _check_projections(
    module: AttentionModule, rules: Sequence[Rule], changes: Sequence[Change], heads: LayerHeads
) -> None:
    """Raise CorruptError if a projection that a rule names is missing."""
    parts = {
        c.rule.tensor for c in changes if c.rule.projection and c.source.name.endswith("weight")
    }
    expected = {
        rule.tensor for rule in rules if rule.projection and type(rule.layout) is not Layout
    }
    if heads.keys_only:
        expected = {name for name in expected if not name.startswith("v_")}
    if missing := expected - parts:
        stored = ", ".join(sorted(parts)) or "nothing"
        raise CorruptError(
            f"{module.path} has {stored} but no {', '.join(sorted(missing))}; download it again"
        )


@dataclass(frozen=True)
class MlpTensors:
    """Stored tensors of an MLP.

    `gate`: None without one; the same as `up` if both are halves of one matrix. `act`: the
    activation's name. `norm`: the norm before; None if it reads attention's input or, with norms
    `after` attention and MLP, the residual stream.
    """

    gate: TensorSpec | None
    up: TensorSpec
    down: TensorSpec
    act: str
    norm: TensorSpec | None
    after: tuple[TensorSpec, ...] = ()


def find_mlp(
    checkpoint: Checkpoint, config: Any, symmetry: Symmetry, module: AttentionModule, width: int
) -> MlpTensors | None:
    """The MLP of the layer of `module`; None if the layer has other parts beside attention and
    norms. `config`: of the text part; `width`: the hidden size.
    """
    from transformers.activations import ACT2FN

    prefix = f"{module.layer_path}."
    inside = {spec.name for spec in module.tensors.values()}
    rest = {
        n.removeprefix(prefix): s for n, s in checkpoint.tensors.items() if n.startswith(prefix)
    }
    rest = {name: spec for name, spec in rest.items() if spec.name not in inside}
    matrices = {
        name.removesuffix(".weight").rpartition(".")[2]: s
        for name, s in rest.items()
        if len(s.shape) > 1
    }
    norms = {
        n.removesuffix(".weight"): s
        for n, s in rest.items()
        if s.shape == (width,) and n.endswith(".weight")
    }
    norms = {name: spec for name, spec in norms.items() if name not in symmetry.norms}
    both = next((names for names in _AFTER if norms.keys() >= {*names}), ())
    after = tuple(norms.pop(name) for name in both)
    names = next((names for names in _MLPS if set(names) - {None} == matrices.keys()), None)
    acts = [getattr(config, field, None) for field in _ACTIVATIONS]
    act = next((act for act in acts if isinstance(act, str) and act in ACT2FN), None)
    if (
        names is None
        or act is None
        or len(norms) > 1
        or any(len(spec.shape) != 2 or is_packed(spec) for spec in matrices.values())
    ):
        return None
    gate, up, down = names
    norm = next(iter(norms.values()), None)
    return MlpTensors(
        matrices[gate] if gate else None, matrices[up], matrices[down], act, norm, after
    )


def find_embeddings(checkpoint: Checkpoint, config: Any, width: int) -> list[TensorSpec]:
    """Embedding tables of tokens and learned positions.

    Empty if the table of tokens cannot be identified.
    """
    stored = checkpoint.tensors
    tables = {
        n: s for n, s in stored.items() if s.shape[1:] == (width,) and not _ELSEWHERE.search(n)
    }
    rows = getattr(config, "vocab_size", None)
    tokens = [
        name
        for name, spec in tables.items()
        if spec.shape[0] == rows and not _POSITIONS.search(name)
    ]
    if len(tokens) != 1 or config.is_encoder_decoder:
        return []
    return [tables[name] for name in (*tokens, *filter(_POSITIONS.search, tables))]


def can_guess_inputs(
    checkpoint: Checkpoint, config: ModelConfig, modules: Iterable[AttentionModule]
) -> bool:
    """Whether the inputs of all layers can be estimated from the weights."""
    symmetry = config.symmetry
    text = config.text
    width = int(getattr(text, "hidden_size", 0))
    if not isinstance(symmetry, Symmetry) or not find_embeddings(checkpoint, text, width):
        return False
    ordered = sorted(
        (module for module in modules if module.layer < config.layers),
        key=lambda module: module.layer,
    )
    if [module.layer for module in ordered] != list(range(config.layers)):
        return False
    return all(find_mlp(checkpoint, text, symmetry, module, width) for module in ordered)
