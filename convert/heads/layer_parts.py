"""The parts of a layer beside attention: its MLP, and the embeddings that the first layer reads.

With them the inputs of layers can be estimated from the weights: if every layer is attention and
one MLP, both added to the residual stream, with norms before or after them, and the stream starts
as embeddings of tokens (and positions).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import Checkpoint, is_packed
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.modules import AttentionModule

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
# Names of the norms after attention and after the MLP. If only the first name is stored, it is the
# norm before the MLP (Llama).
_NORMS_AFTER = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # names in configs
# In names of tensors that are no embeddings, whatever their shape.
_NO_EMBEDDINGS = re.compile(r"lm_head|embed_out|output|\.\d+\.")
# In names of embeddings of positions.
_POSITIONS = re.compile(r"position|wpe")


@dataclass(frozen=True)
class MlpTensors:
    """Stored tensors of an MLP: down (act(gate x) * up x), or without a gate down act(up x).

    Attributes:
        gate: None without one; the same as `up` if both are halves of one matrix.
        up, down: The other matrices.
        act: The activation's name.
        norm: The norm before; None if the MLP reads attention's input or, with norms `after`
            attention and MLP, the residual stream.
        after: The norms after attention and after the MLP; empty without them.
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
    """The MLP of a layer; None if the layer has other parts beside attention, MLP and norms.

    Args:
        checkpoint: The model.
        config: Of the text part.
        symmetry: Of the model; it names the norm before attention.
        module: The attention module of the layer.
        width: The hidden size.
    """
    # 1. What the layer has outside attention: matrices by the last part of their names, and norms.
    outside = _outside_attention(checkpoint, module)
    matrices: dict[str, TensorSpec] = {}
    norms: dict[str, TensorSpec] = {}
    for name, spec in outside.items():
        base_name = name.removesuffix(".weight")
        if len(spec.shape) > 1:
            matrices[base_name.rpartition(".")[2]] = spec
        elif spec.shape == (width,) and name.endswith(".weight"):
            norms[base_name] = spec
    if any(len(spec.shape) != 2 or is_packed(spec) for spec in matrices.values()):
        return None

    # 2. The norms beside that before attention: those after attention and MLP, if both are there,
    #    and at most one more, before the MLP.
    norms = {name: spec for name, spec in norms.items() if name not in symmetry.norms}
    after = tuple(norms.pop(name) for name in _names_of_norms_after(norms))
    if len(norms) > 1:
        return None
    norm = next(iter(norms.values()), None)

    # 3. The MLP.
    names = _mlp_names(matrices)
    act = _activation(config)
    if names is None or act is None:
        return None
    gate_name, up_name, down_name = names
    gate = matrices[gate_name] if gate_name else None
    return MlpTensors(gate, matrices[up_name], matrices[down_name], act, norm, after)


def _outside_attention(checkpoint: Checkpoint, module: AttentionModule) -> dict[str, TensorSpec]:
    """The tensors of a module's layer that are not in the module, by their names in the layer."""
    prefix = f"{module.layer_path}."
    inside = {spec.name for spec in module.tensors.values()}
    return {
        name.removeprefix(prefix): spec
        for name, spec in checkpoint.tensors.items()
        if name.startswith(prefix) and name not in inside
    }


def _names_of_norms_after(stored: Collection[str]) -> tuple[str, ...]:
    """The entry of `_NORMS_AFTER` of which both norms are stored; empty if there is none."""
    for names in _NORMS_AFTER:
        if set(names) <= set(stored):
            return names
    return ()


def _mlp_names(stored: Collection[str]) -> tuple[str | None, str, str] | None:
    """The entry of `_MLPS` whose matrices are all that is stored; None if there is none."""
    for names in _MLPS:
        needed = set(names) - {None}  # some have no gate
        if needed == set(stored):
            return names
    return None


def _activation(config: Any) -> str | None:
    """The name of the activation of a config.

    None if transformers has none of that name, if layers differ in it, or if it has parameters
    (xIELU of Apertus).
    """
    from transformers.activations import ACT2FN

    for field in _ACTIVATIONS:
        try:
            name = getattr(config, field, None)
        except RuntimeError:  # transformers': `per_layer_config` has several values
            return None
        if isinstance(name, str) and name in ACT2FN:
            has_parameters = any(True for _ in ACT2FN[name].parameters())
            return None if has_parameters else name
    return None


def find_embeddings(checkpoint: Checkpoint, config: Any, width: int) -> list[TensorSpec]:
    """The embedding table of tokens, then those of learned positions.

    Empty if the table of tokens cannot be identified.
    """
    vocabulary = getattr(config, "vocab_size", None)
    tokens = []
    positions = []
    for name, spec in checkpoint.tensors.items():
        is_table = spec.shape[1:] == (width,)
        if not is_table or _NO_EMBEDDINGS.search(name):
            continue
        if _POSITIONS.search(name):
            positions.append(spec)
        elif spec.shape[0] == vocabulary:
            tokens.append(spec)

    if len(tokens) != 1 or config.is_encoder_decoder:
        return []
    return [*tokens, *positions]


def can_estimate_inputs(
    checkpoint: Checkpoint, config: ModelConfig, modules: Iterable[AttentionModule]
) -> bool:
    """Whether the inputs of all layers can be estimated from the weights.

    Each layer then has one of the attention `modules`, and one MLP.
    """
    symmetry = config.symmetry
    text_config = config.text_config
    width = int(getattr(text_config, "hidden_size", 0))
    if not isinstance(symmetry, Symmetry) or not find_embeddings(checkpoint, text_config, width):
        return False

    in_layers = [module for module in modules if module.layer < config.layers]
    ordered = sorted(in_layers, key=lambda module: module.layer)
    has_one_in_each_layer = [module.layer for module in ordered] == list(range(config.layers))
    if not has_one_in_each_layer:
        return False
    return all(find_mlp(checkpoint, text_config, symmetry, module, width) for module in ordered)
