# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""GPT-2, OPT, T5, BART and their like (mT5, mBART, Marian, Pegasus, M2M-100) with grouped-query
attention (arXiv 2305.13245): `num_key_value_heads` key/value heads, each read by a group of query
heads. Of encoder-decoders the decoder's self- and cross-attention have them.

Everything is transformers' own but the size of the key and value projections. Relative positions
are those of the query heads. Each class is named `GQA` and the name of the class of transformers
that it extends, as GQAT5ForConditionalGeneration; `__getattr__` makes it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Attention
from transformers.models.marian.modeling_marian import MarianAttention
from transformers.models.mbart.modeling_mbart import MBartAttention
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.opt import modeling_opt as opt
from transformers.models.pegasus.modeling_pegasus import PegasusAttention
from transformers.models.t5 import modeling_t5 as t5
from transformers.pytorch_utils import Conv1D


class GroupedConfig(PreTrainedConfig):
    """Mixin for configs: the number of key/value heads of the decoder (by default H)."""

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        query_heads = getattr(self, "decoder_attention_heads", self.num_attention_heads)
        self.num_key_value_heads = self.num_key_value_heads or query_heads


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The source's function of this name, with key/value heads (B, G, S, d) repeated for the query
    heads (B, H, T, d). The other attention functions of transformers repeat them.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    return module.source_eager(module, query, key, value, *args, **kwargs)


class GroupedAttention(nn.Module):
    """Mixin for attention modules: G key/value heads. The cache holds G heads too."""

    # BART's is the same without position bias
    source_eager = staticmethod(t5.eager_attention_forward)

    def set_kv_heads(self: Any, kv_heads: int) -> None:
        """Replace the key and value projections by new ones of `kv_heads` heads."""
        if self.num_heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads {kv_heads} does not divide the {self.num_heads} attention "
                "heads"
            )
        self.num_key_value_groups = self.num_heads // kv_heads
        for name, full in list(self.named_children()):
            if name in ("k", "v", "k_proj", "v_proj"):
                size = full.out_features // self.num_key_value_groups
                setattr(self, name, nn.Linear(full.in_features, size, bias=full.bias is not None))

    def split_heads(self: Any, states: Tensor) -> Tensor:
        """(B, T, heads * d) -> (B, heads, T, d)."""
        heads: Tensor = states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def keys_and_values(
        self: Any, project: Callable[[], tuple[Tensor, Tensor]], cache: Any, cross: bool
    ) -> Any:
        """Keys and values (B, G, S, d): as `project` computes them, (B, S, G * d), and those that
        the cache holds.
        """
        filled = None  # by layer, whether the cache holds the encoder's keys and values
        if isinstance(cache, EncoderDecoderCache):
            filled = cache.is_updated if cross else None
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache

        if filled and filled.get(self.layer_idx):
            layer = cache.layers[self.layer_idx]
            return layer.keys, layer.values

        heads = [self.split_heads(part) for part in project()]
        if filled is not None:
            filled[self.layer_idx] = True
        return heads if cache is None else cache.update(*heads, self.layer_idx)

    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        """Output (B, T, H * d), and the weights (B, H, T, S) where the attention function returns
        them.
        """
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.dropout if self.training else 0.0
        scaling = self.scaling
        output, weights = attention(
            self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output.flatten(2), weights


# transformers finds attention modules by its own classes, whose forward passes are the same.
class GroupedBartAttention(
    GroupedAttention,
    BartAttention,
    M2M100Attention,
    MarianAttention,
    MBartAttention,
    PegasusAttention,
):
    def forward(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,  # the name of past_key_values since transformers 5.24
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D), and for cross-attention the encoder's (B, S, D) -> (B, T, D) and the weights
        (B, H, T, S).
        """
        cache = past_key_values if cache is None else cache
        cross = key_value_states is not None
        states = key_value_states if cross else hidden_states
        key, value = self.keys_and_values(
            lambda: (self.k_proj(states), self.v_proj(states)), cache, cross
        )
        query = self.split_heads(self.q_proj(hidden_states))
        output, weights = self.attend(query, key, value, attention_mask, **kwargs)
        return self.out_proj(output), weights


class GroupedOPTAttention(GroupedBartAttention, opt.OPTAttention):
    source_eager = staticmethod(opt.eager_attention_forward)


class GroupedGPT2Attention(GroupedAttention, gpt2.GPT2Attention):
    source_eager = staticmethod(gpt2.eager_attention_forward)

    @property
    def dropout(self: Any) -> float:
        return float(self.attn_dropout.p)

    def set_kv_heads(self: Any, kv_heads: int) -> None:
        """Replace the fused projection [Q | K | V]."""
        super().set_kv_heads(kv_heads)
        self.split_size = [self.embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.c_attn = Conv1D(sum(self.split_size), self.embed_dim)

    def forward(
        self: Any,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the weights (B, H, T, S) where the attention function returns
        them.
        """
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        cache = past_key_values if cache is None else cache
        key, value = self.keys_and_values(lambda: (key, value), cache, cross=False)
        output, weights = self.attend(self.split_heads(query), key, value, attention_mask, **kwargs)
        return self.resid_dropout(self.c_proj(output)), weights


class GroupedT5Attention(GroupedAttention, t5.T5Attention, MT5Attention):
    @property
    def head_dim(self: Any) -> int:
        return int(self.key_value_proj_dim)

    @property
    def num_heads(self: Any) -> int:
        return int(self.n_heads)

    def forward(
        self: Any,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, with the bias (1, H, T, S) of relative positions between output and weights."""
        query = self.split_heads(self.q(hidden_states))
        cache = past_key_values if cache is None else cache
        cross = key_value_states is not None
        past: Any = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        # A static cache adds to it in place
        past = past.clone() if isinstance(past, Tensor) else past
        states = key_value_states if cross else hidden_states
        key, value = self.keys_and_values(lambda: (self.k(states), self.v(states)), cache, cross)

        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.compute_bias(
                query.shape[2], key.shape[2], device=query.device, past_seen_tokens=past
            )
        elif position_bias is None:
            shape = 1, self.n_heads, query.shape[2], key.shape[2]
            position_bias = torch.zeros(shape, device=query.device, dtype=query.dtype)
            if self.gradient_checkpointing and self.training:
                position_bias.requires_grad = True

        output, weights = self.attend(
            query, key, value, mask, position_bias=position_bias, **kwargs
        )
        return self.o(output), position_bias, weights


CLASSES = (GroupedBartAttention, GroupedOPTAttention, GroupedGPT2Attention, GroupedT5Attention)


class Grouped(PreTrainedModel):
    """Mixin for models: gives the decoder's attention modules fewer key/value heads."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            grouped = next((cls for cls in CLASSES if issubclass(cls, type(module))), None)
            is_of_decoder = getattr(module, "is_decoder", True)
            is_cross_of_gpt2 = name.endswith("crossattention")
            if grouped and is_of_decoder and not is_cross_of_gpt2:
                module.__class__ = grouped
                module.set_kv_heads(config.num_key_value_heads)
        self.post_init()


# modeling_gqa_by_layer.py has nearly the same function: each file is copied beside weights alone,
# and must not import the other.
def __getattr__(name: str) -> Any:
    """The config or model `GQA...` of the class of transformers that is named after `GQA`."""
    if not name.startswith("GQA"):
        raise AttributeError(f"{__name__} has no {name}")

    source = getattr(transformers, name.removeprefix("GQA"))
    members = {"__module__": __name__}
    if issubclass(source, PreTrainedConfig):
        # In this order: a mixin before the class would replace its defaults.
        bases = (source, GroupedConfig)
        members["model_type"] = f"gqa_{source.model_type}"
    else:
        config = f"GQA{source.config_class.__name__}"
        bases = (Grouped, source)
        members["config_class"] = globals().get(config) or __getattr__(config)

    globals()[name] = type(name, bases, members)
    return globals()[name]
