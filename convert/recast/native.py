"""View a checkpoint as one of another transformers class that computes the same and can have fewer
key/value heads.

Its tensors are renamed, rearranged and folded when they are read. Nothing is stored in between:
code that plans, merges, calibrates, writes or verifies a checkpoint takes a view just the same.

Each entry is exact: with as many heads as before the target gives the source's logits (to rounding,
where LayerNorms are folded). `tests/test_native.py` compares every entry with both classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.files import TensorSpec, byte_size
from gqa.checkpoint.read import TORCH_OF_SAFETENSORS, Checkpoint
from gqa.convert.heads.layouts import Fused, LayerHeads, Role
from gqa.core.errors import CorruptError, RefusedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """How to compute one tensor of a view from stored ones.

    Attributes:
        sources: Stored tensors, possibly of several files; the first determines dtype and order.
        compute: Sources -> tensor; None for the first source unchanged. It computes in float32
            (float64 for F64), which is rounded only when it is written, so that merging does not
            round twice.
    """

    sources: tuple[TensorSpec, ...]
    compute: Callable[[Sequence[Tensor]], Tensor] | None = None

    def spec(self, name: str) -> TensorSpec:
        """Name, dtype and shape of the tensor in the view.

        Raises:
            RefusedError: The first source is quantized or packed.
            CorruptError: The shapes of the sources do not match.
        """
        import torch

        first = self.sources[0]
        if self.compute is None:
            return replace(first, name=name)
        if first.dtype not in TORCH_OF_SAFETENSORS:
            raise RefusedError(
                f"{first.name} is stored as {first.dtype}: quantized or packed weights cannot be "
                "converted; convert the unquantized checkpoint and quantize the result"
            )

        inputs = [torch.empty(source.shape, device="meta") for source in self.sources]
        try:
            shape = tuple(self.compute(inputs).shape)
        except (CorruptError, RuntimeError, IndexError, ValueError) as error:
            shapes = " and ".join(f"{source.name} {list(source.shape)}" for source in self.sources)
            why = f": {error}" if isinstance(error, CorruptError) else ""
            raise CorruptError(
                f"{shapes} cannot become {name}{why}; check that the weights belong to this model"
            ) from error

        nbytes = byte_size(first.dtype, shape)
        return TensorSpec(name, first.dtype, shape, first.file, 0, nbytes)


@dataclass(frozen=True)
class View(Checkpoint):
    """A checkpoint as one of another class.

    Attributes:
        stored: The stored checkpoint.
        recipes: How to compute each tensor of the view, by name.
    """

    stored: Checkpoint = field(kw_only=True)
    recipes: Mapping[str, Recipe] = field(kw_only=True)

    def read(self, spec: TensorSpec, buffer: NDArray[np.uint8] | None = None) -> Tensor:
        """One tensor.

        A computed one is float32 (float64 for F64) and rounded when it is written.
        """
        import torch

        recipe = self.recipes[spec.name]
        if recipe.compute is None:
            stored_spec = replace(spec, name=recipe.sources[0].name)
            return self.stored.read(stored_spec, buffer)

        precise = torch.float64 if spec.dtype == "F64" else torch.float32
        inputs = [self.stored.read(source).to(precise) for source in recipe.sources]
        return recipe.compute(inputs)

    def has_range(self, spec: TensorSpec) -> bool:
        recipe = self.recipes[spec.name]
        return recipe.compute is None and self.stored.has_range(recipe.sources[0])

    @property
    def parameters(self) -> int:
        """Number of source parameters in use, without stored masks and zeros that the target
        adds.
        """
        used = set[TensorSpec]()
        for recipe in self.recipes.values():
            used.update(recipe.sources)
        return sum(spec.numel for spec in used)


Stored = Mapping[str, TensorSpec]  # the source's tensors by name without the base model's prefix
Recipes = Iterator[tuple[str, Recipe]]  # names of the target's tensors, and how to compute them
Rows = Callable[["Tensor"], "Tensor"]  # selects and orders the rows of a weight or bias


@dataclass(frozen=True)
class Recasting:
    """From the model type `source` to the model type `target`.

    A target with an `architecture` is a class of transformers. One without is our counterpart of
    the source's class, custom modeling code: config.json then gets the new keys only, tensors are
    unchanged, and the attributes below `architecture` are not used.

    Attributes:
        source: The model type of checkpoints that are recast.
        target: The model type of the result.
        note: What a user should know, in words.
        architecture: The target's class; None for custom modeling code.
        config: transformers' config of the source -> config.json of the target, with as many KV
            heads as query heads. It lacks what is set for all: `architectures`, `model_type`, token
            ids, `tie_word_embeddings` and dtype. Raises RefusedError with the reason for a config
            that cannot be expressed.
        tensors: (stored tensors, config of the source) -> every tensor of the target.
        prefix: The base model's prefix of tensor names in the source; a checkpoint may lack it.
    """

    source: str
    target: str
    note: str = ""
    architecture: str | None = None
    config: Callable[[Any], dict[str, Any]] = lambda config: {}
    tensors: Callable[[Stored, Any], Recipes] = lambda stored, config: iter(())
    prefix: str = ""


# ------------------------------------------------------------------------------ recipes of a module
#
# In the functions of recipes, t has the tensors of the sources, in their order.


def _linear(
    target: str,
    stored: Stored,
    source: str,
    rows: Rows | None = None,
    norm: str | None = None,
    always_bias: bool = False,
    tied: str | None = None,
) -> Recipes:
    """Weight W (out, in) and bias b (out,), if any, of a module, unchanged or rearranged.

    If a LayerNorm n(x) * w + c precedes the module, it can be folded into it:
    W (n(x) * w + c) + b = W diag(w) n(x) + (b + W c).

    Args:
        target: The module in the target.
        stored: The source's tensors.
        source: The module in the source.
        rows: Selects and orders the rows of W and b.
        norm: The LayerNorm that is folded into the module; None if there is none.
        always_bias: Whether to add a zero bias if the source has none.
        tied: The embedding that the target ties to this module, if no weight is stored: then none
            is written, and only the bias depends on it.
    """
    order = rows or _unchanged
    bias = stored.get(f"{source}.bias")
    shift = stored.get(f"{norm}.bias") if norm else None

    if tied and f"{source}.weight" not in stored:
        weight = _need(stored, f"{tied}.weight")
    else:
        weight = _need(stored, f"{source}.weight")
        yield f"{target}.weight", _weight(stored, weight, rows, norm)

    if shift:
        yield f"{target}.bias", _shifted_bias(weight, shift, bias, order)
    elif bias:
        yield f"{target}.bias", Recipe((bias,), _rearranged(rows))
    elif always_bias:
        yield f"{target}.bias", Recipe((weight,), lambda t: t[0].new_zeros(len(order(t[0]))))


def _weight(stored: Stored, weight: TensorSpec, rows: Rows | None, norm: str | None) -> Recipe:
    """W diag(w) if a LayerNorm is folded, else W, with its rows in order."""
    if not norm:
        return Recipe((weight,), _rearranged(rows))

    order = rows or _unchanged
    gain = _need(stored, f"{norm}.weight")
    return Recipe((weight, gain), lambda t: order(t[0]) * t[1])


def _shifted_bias(
    weight: TensorSpec, shift: TensorSpec, bias: TensorSpec | None, order: Rows
) -> Recipe:
    """b + W c, or W c without a bias, with its rows in order."""
    if bias is None:
        return Recipe((weight, shift), lambda t: order(t[0]) @ t[1])
    return Recipe((weight, shift, bias), lambda t: order(t[0]) @ t[1] + order(t[2]))


def _rearranged(rows: Rows | None) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """What a recipe computes of one source: its rows in order, or None if it is unchanged."""
    if rows is None:
        return None
    return lambda t: rows(t[0])


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _need(stored: Stored, name: str) -> TensorSpec:
    """The stored tensor of this name. Raises CorruptError if there is none."""
    if name not in stored:
        raise CorruptError(f"the checkpoint has no {name}; pass a checkpoint of the whole model")
    return stored[name]


def _heads(config: Any) -> LayerHeads:
    """The heads of each layer of a source: all have as many KV heads as query heads."""
    query = config.num_attention_heads
    dim = config.hidden_size // config.num_attention_heads
    return LayerHeads(query, query, dim, dim)


# ---------------------------------------------------------------------------------- GPT-NeoX as Phi


def _phi_tensors(stored: Stored, config: Any) -> Recipes:
    """GPT-NeoX as Phi, which has one LayerNorm per layer: both are folded into the linear layers,
    Phi's is neutral.
    """
    yield from _linear("model.embed_tokens", stored, "embed_in")
    for layer in range(config.num_hidden_layers):
        yield from _phi_layer(stored, config, layer)
    yield from _linear("model.final_layernorm", stored, "final_layer_norm")

    head = "lm_head" if "lm_head.weight" in stored else "embed_out"
    tied = "embed_in" if config.tie_word_embeddings else None
    yield from _linear("lm_head", stored, head, always_bias=True, tied=tied)


def _phi_layer(stored: Stored, config: Any, layer: int) -> Recipes:
    """The tensors of one layer of Phi."""
    heads = _heads(config)
    old = f"layers.{layer}"
    new = f"model.layers.{layer}"
    norm = f"{old}.input_layernorm"

    qkv = f"{old}.attention.query_key_value"
    projections: tuple[tuple[str, Role], ...] = (
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
    )
    for name, role in projections:
        rows = partial(_rows_of_role, role, heads)
        yield from _linear(f"{new}.self_attn.{name}", stored, qkv, rows, norm, always_bias=True)
    yield from _linear(f"{new}.self_attn.dense", stored, f"{old}.attention.dense", always_bias=True)

    mlp_norm = f"{old}.post_attention_layernorm"
    yield from _linear(f"{new}.mlp.fc1", stored, f"{old}.mlp.dense_h_to_4h", norm=mlp_norm)
    yield from _linear(f"{new}.mlp.fc2", stored, f"{old}.mlp.dense_4h_to_h")

    # Phi's own LayerNorm is neutral.
    gain = (stored[f"{norm}.weight"],)
    yield f"{new}.input_layernorm.weight", Recipe(gain, lambda t: t[0].new_ones(len(t[0])))
    yield f"{new}.input_layernorm.bias", Recipe(gain, lambda t: t[0].new_zeros(len(t[0])))


def _rows_of_role(role: Role, heads: LayerHeads, tensor: Tensor) -> Tensor:
    """Select one of [q, k, v] of every head: (3 * H * d, *rest) -> (H * d, *rest)."""
    return Fused("grouped").split(tensor, heads)[role].flatten(0, 1)


# ------------------------------------------------------------------------------ GPT-2 as GPTBigCode


def _bigcode_tensors(stored: Stored, config: Any) -> Recipes:
    """GPT-2 as GPTBigCode, which stores [q, k, v] per head.

    A score scale of 1 / (layer + 1) is folded into Q.
    """
    heads = _heads(config)
    for layer in range(config.n_layer):
        scale = 1 / (layer + 1) if config.scale_attn_by_inverse_layer_idx else 1
        rows = partial(_grouped_by_head, heads, scale)
        attention = f"h.{layer}.attn.c_attn"
        yield from _linear(f"transformer.{attention}", stored, attention, rows)
        for tail in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            name = f"h.{layer}.{tail}"
            yield from _linear(f"transformer.{name}", stored, name, _transposed)
        for tail in ("ln_1", "ln_2"):
            name = f"h.{layer}.{tail}"
            yield from _linear(f"transformer.{name}", stored, name)

    for name in ("wte", "wpe", "ln_f"):
        yield from _linear(f"transformer.{name}", stored, name)
    tied = "wte" if config.tie_word_embeddings else None
    yield from _linear("lm_head", stored, "lm_head", tied=tied)


def _grouped_by_head(heads: LayerHeads, scale: float, tensor: Tensor) -> Tensor:
    """GPT-2's Q, K and V, one after the other -> GPTBigCode's, head by head, with scaled Q.

    The weight (D, 3 * H * d) becomes (3 * H * d, D); the bias is (3 * H * d,).
    """
    parts = Fused("stacked").split(_transposed(tensor), heads)
    scaled = {**parts, "query": parts["query"] * scale}
    return Fused("grouped").join(scaled, heads)


def _transposed(tensor: Tensor) -> Tensor:
    """A weight of GPT-2 (in, out) as (out, in); a bias as it is."""
    return tensor.T if tensor.ndim == 2 else tensor


# --------------------------------------------------------------------------- configs of the targets


def _copied(config: Any, *names: str) -> dict[str, Any]:
    """Attributes of a config by name."""
    return {name: getattr(config, name) for name in names}


def _phi_config(config: Any) -> dict[str, Any]:
    """The config of Phi for a GPT-NeoX.

    `rope_theta` and the like are written where transformers 4 and 5 and serving engines all read
    them.
    """
    if not config.use_parallel_residual:
        raise RefusedError(
            "transformers has no class with fewer KV heads for its layers (use_parallel_residual: "
            "false); "
            "use a related model with grouped-query attention"
        )

    fields = _copied(
        config,
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "attention_dropout",
        "use_cache",
        "layer_norm_eps",
    )
    fields["num_key_value_heads"] = config.num_attention_heads

    rope = dict(config.rope_parameters)
    share = rope.pop("partial_rotary_factor")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["partial_rotary_factor"] = share
    fields["resid_pdrop"] = config.hidden_dropout
    fields["embd_pdrop"] = config.hidden_dropout
    if rope.get("rope_type") != "default":
        fields["rope_scaling"] = rope
    return fields


def _bigcode_config(config: Any) -> dict[str, Any]:
    """The config of GPTBigCode for a GPT-2."""
    fields = _copied(
        config,
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "activation_function",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "layer_norm_epsilon",
        "initializer_range",
        "scale_attn_weights",
        "use_cache",
    )
    fields["multi_query"] = False  # as many KV heads as query heads
    return fields


NATIVE: tuple[Recasting, ...] = (
    Recasting(
        source="gpt_neox",
        target="phi",
        note="Pythia, GPT-NeoX-20B, Dolly; both LayerNorms are folded into the linear layers that "
        "read them",
        architecture="PhiForCausalLM",
        config=_phi_config,
        tensors=_phi_tensors,
        prefix="gpt_neox.",
    ),
    Recasting(
        source="gpt2",
        target="gpt_bigcode",
        note="Cerebras-GPT, DialoGPT, distilgpt2; G = 1 or H",
        architecture="GPTBigCodeForCausalLM",
        config=_bigcode_config,
        tensors=_bigcode_tensors,
        prefix="transformer.",
    ),
)
