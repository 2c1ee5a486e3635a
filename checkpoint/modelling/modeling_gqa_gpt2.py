# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""GPT-2 with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` key/value heads, each read by a group of
query heads.

Everything is transformers' GPT-2 but the size of the fused projection [Q | K | V] and where it is split.
"""

from typing import Any

from torch import Tensor
from transformers import GPT2Config
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.pytorch_utils import Conv1D


class GQAGPT2Config(GPT2Config):
    """GPT-2's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_gpt2"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


def repeat_heads(heads: Tensor, times: int) -> Tensor:
    """(B, G, S, d) -> (B, G * times, S, d): each key/value head for every query head of its group."""
    return heads.repeat_interleave(times, dim=1)


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """GPT-2's function of this name, on repeated heads. The other attention functions of transformers repeat them."""
    key, value = (repeat_heads(heads, module.num_key_value_groups) for heads in (key, value))
    return gpt2.eager_attention_forward(module, query, key, value, *args, **kwargs)


class GQAGPT2Attention(gpt2.GPT2Attention):
    """Self-attention with G key/value heads. The cache holds G heads too."""

    def __init__(self, config: GQAGPT2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        kv_heads = int(config.num_key_value_heads or self.num_heads)
        if self.num_heads % kv_heads:
            raise ValueError(f"num_key_value_heads {kv_heads} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // kv_heads
        self.split_size = [self.embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.c_attn = Conv1D(sum(self.split_size), self.embed_dim)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the weights (B, H, T, S) where the attention function returns them."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.c_attn(hidden_states).split(self.split_size, dim=2)
        )
        cache = past_key_values if cache is None else cache  # transformers 5.24 renames the argument
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        if implementation == "eager" and self.reorder_and_upcast_attn:
            key, value = (repeat_heads(heads, self.num_key_value_groups) for heads in (key, value))
            output, weights = self._upcast_and_reordered_attn(query, key, value, attention_mask)
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
            dropout, scaling = self.attn_dropout.p if self.training else 0.0, self.scaling
            output, weights = attend(
                self, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return self.resid_dropout(self.c_proj(output.flatten(2))), weights


class Grouped(gpt2.GPT2PreTrainedModel):
    """Mixin for GPT-2's models: replaces their self-attention modules."""

    config_class = GQAGPT2Config

    def __init__(self, config: GQAGPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for index, block in enumerate(self.base_model.h):
            block.attn = GQAGPT2Attention(config, index)
        self.post_init()


class GQAGPT2Model(Grouped, gpt2.GPT2Model):
    pass


class GQAGPT2LMHeadModel(Grouped, gpt2.GPT2LMHeadModel):
    pass


class GQAGPT2ForQuestionAnswering(Grouped, gpt2.GPT2ForQuestionAnswering):
    pass


class GQAGPT2ForSequenceClassification(Grouped, gpt2.GPT2ForSequenceClassification):
    pass


class GQAGPT2ForTokenClassification(Grouped, gpt2.GPT2ForTokenClassification):
    pass
