# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""GPT-Neo with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads.

Everything is transformers' own GPT-Neo but the size of the key and value projections, how they are cut into heads, and
that heads come out of the cache repeated.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GPTNeoConfig
from transformers.models.gpt_neo import modeling_gpt_neo as source


class GQAGPTNeoConfig(GPTNeoConfig):
    """GPT-Neo's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_gpt_neo"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


class RepeatedHeads:
    """A cache of G heads (or none) as GPT-Neo's attention asks it: keys and values (B, G, T, d) -> (B, H, S, d)."""

    def __init__(self, cache: Any, repeats: int) -> None:
        self.cache, self.repeats = cache, repeats

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            key, value = self.cache.update(key, value, layer_idx)
        return key.repeat_interleave(self.repeats, dim=1), value.repeat_interleave(self.repeats, dim=1)


class GQAGPTNeoSelfAttention(source.GPTNeoSelfAttention):
    """GPT-Neo's attention with G key/value heads, which is also what it caches."""

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been GPT-Neo's own, `heads` key/value heads in new projections."""
        if self.num_heads % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // heads
        self.k_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=False)

    def _split_heads(self, tensor: Tensor, num_heads: int, attn_head_size: int) -> Any:
        """(B, T, n * d) -> (B, n, T, d), whatever n."""
        return super()._split_heads(tensor, tensor.shape[-1] // attn_head_size, attn_head_size)

    def forward(self, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, layer_past=RepeatedHeads(layer_past, self.num_key_value_groups), **kwargs)


class GQAGPTNeoFlashAttention2(GQAGPTNeoSelfAttention, source.GPTNeoFlashAttention2):
    pass


class Grouped(source.GPTNeoPreTrainedModel):
    """What makes any of GPT-Neo's models grouped-query ones: their attention modules become such."""

    config_class = GQAGPTNeoConfig

    def __init__(self, config: GQAGPTNeoConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for block in self.base_model.h:
            attention = block.attn.attention
            flash = isinstance(attention, source.GPTNeoFlashAttention2)
            attention.__class__ = GQAGPTNeoFlashAttention2 if flash else GQAGPTNeoSelfAttention
            attention.group(config.num_key_value_heads)
        self.post_init()


class GQAGPTNeoModel(Grouped, source.GPTNeoModel):
    pass


class GQAGPTNeoForCausalLM(Grouped, source.GPTNeoForCausalLM):
    pass


class GQAGPTNeoForSequenceClassification(Grouped, source.GPTNeoForSequenceClassification):
    pass


class GQAGPTNeoForTokenClassification(Grouped, source.GPTNeoForTokenClassification):
    pass


class GQAGPTNeoForQuestionAnswering(Grouped, source.GPTNeoForQuestionAnswering):
    pass
