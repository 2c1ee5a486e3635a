# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""GPT-2 with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads.

Everything is transformers' own GPT-2 but the size of the fused projection [Q | K | V] and where it is split.
"""

from types import FunctionType
from typing import Any

from torch import Tensor
from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as source
from transformers.pytorch_utils import Conv1D


class GQAGPT2Config(GPT2Config):
    """GPT-2's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_gpt2"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """GPT-2's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**vars(source), "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]


class GQAGPT2Attention(source.GPT2Attention):
    """GPT-2's attention with G key/value heads, which is also what it caches."""

    # GPT-2's own. What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    forward = FunctionType(
        source.GPT2Attention.forward.__code__,
        SEEN,
        "forward",
        source.GPT2Attention.forward.__defaults__,
    )

    def __init__(self, config: GQAGPT2Config, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx=layer_idx)
        groups = config.num_key_value_heads
        if self.num_heads % groups:
            raise ValueError(f"num_key_value_heads {groups} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // groups
        self.split_size = [self.embed_dim, groups * self.head_dim, groups * self.head_dim]
        self.c_attn = Conv1D(sum(self.split_size), self.embed_dim)

    def _upcast_and_reordered_attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        key, value = (heads.repeat_interleave(self.num_key_value_groups, dim=1) for heads in (key, value))
        return super()._upcast_and_reordered_attn(query, key, value, attention_mask)


class Grouped(source.GPT2PreTrainedModel):
    """What makes any of GPT-2's models grouped-query ones: their self-attention is replaced."""

    config_class = GQAGPT2Config

    def __init__(self, config: GQAGPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for index, block in enumerate(self.base_model.h):
            block.attn = GQAGPT2Attention(config, layer_idx=index)
        self.post_init()


class GQAGPT2Model(Grouped, source.GPT2Model):
    pass


class GQAGPT2LMHeadModel(Grouped, source.GPT2LMHeadModel):
    pass


class GQAGPT2ForSequenceClassification(Grouped, source.GPT2ForSequenceClassification):
    pass


class GQAGPT2ForTokenClassification(Grouped, source.GPT2ForTokenClassification):
    pass


class GQAGPT2ForQuestionAnswering(Grouped, source.GPT2ForQuestionAnswering):
    pass
