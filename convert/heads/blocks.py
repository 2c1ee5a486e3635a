"""What a layer holds beside attention, from the headers: whether what layers are given can be guessed from weights.

It can where every layer is attention and MLP, both added to the stream, with norms before them, after them or both, and
the stream begins as embeddings of tokens and, perhaps, positions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.files import TensorSpec
from gqa.checkpoint.read import Checkpoint, is_packed
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.modules import AttentionModule

# What the matrices of an MLP are called: gate (or none), up, down. The same name twice: the halves of one matrix.
_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "c_fc", "c_proj"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
)
# Norms of what attention and an MLP add, where both have one; under other names one of them is that before the MLP.
_AFTER = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")  # what configs call it
_ELSEWHERE = re.compile(r"lm_head|embed_out|output|\.\d+\.")  # what is no embedding, whatever its shape
_POSITIONS = re.compile(r"position|wpe")


@dataclass(frozen=True)
class MlpTensors:
    """`gate` (None where there is none; the same as `up`: its halves), `up` and `down`; `act` as configs name it; the
    `norm` before, None where it reads what attention reads or, with norms `after` attention and after it, the stream.
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
    """Of the layer of `module` in a stream of `width`, if that is all there is beside attention and norms; `config` is
    that of the text part.
    """
    from transformers.activations import ACT2FN

    prefix, inside = f"{module.layer_path}.", {spec.name for spec in module.tensors.values()}
    rest = {n.removeprefix(prefix): s for n, s in checkpoint.tensors.items() if n.startswith(prefix)}
    rest = {name: spec for name, spec in rest.items() if spec.name not in inside}
    matrices = {name.removesuffix(".weight").rpartition(".")[2]: s for name, s in rest.items() if len(s.shape) > 1}
    norms = {n.removesuffix(".weight"): s for n, s in rest.items() if s.shape == (width,) and n.endswith(".weight")}
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
    return MlpTensors(matrices[gate] if gate else None, matrices[up], matrices[down], act, norm, after)


def find_embeddings(checkpoint: Checkpoint, config: Any, width: int) -> list[TensorSpec]:
    """The table of the vocabulary and those of learned positions; nothing where it is not certain which it is."""
    stored = checkpoint.tensors
    tables = {n: s for n, s in stored.items() if s.shape[1:] == (width,) and not _ELSEWHERE.search(n)}
    rows = getattr(config, "vocab_size", None)
    tokens = [name for name, spec in tables.items() if spec.shape[0] == rows and not _POSITIONS.search(name)]
    if len(tokens) != 1 or config.is_encoder_decoder:
        return []
    return [tables[name] for name in (*tokens, *filter(_POSITIONS.search, tables))]


def can_guess_inputs(checkpoint: Checkpoint, config: ModelConfig, modules: Iterable[AttentionModule]) -> bool:
    """Whether what all of a model's layers are given can be guessed from its weights."""
    symmetry, text = config.symmetry, config.text
    width = int(getattr(text, "hidden_size", 0))
    if not isinstance(symmetry, Symmetry) or not find_embeddings(checkpoint, text, width):
        return False
    ordered = sorted((module for module in modules if module.layer < config.layers), key=lambda module: module.layer)
    if [module.layer for module in ordered] != list(range(config.layers)):
        return False
    return all(find_mlp(checkpoint, text, symmetry, module, width) for module in ordered)
