# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""BLOOM with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads.

Everything is transformers' own BLOOM but the size of the fused projection, how it is cut into heads, and that heads
come out of the cache repeated. Its rows are, for each key/value head, those of its queries, its key and its value. The
slopes of ALiBi are those of the query heads.
"""

from typing import Any

from torch import Tensor, nn
from transformers import BloomConfig
from transformers.models.bloom import modeling_bloom as source


class GQABloomConfig(BloomConfig):
    """BLOOM's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_bloom"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


class RepeatedHeads:
    """A cache of G heads (or none) as BLOOM's attention asks it: keys and values (B, G, T, d) -> (B, H, S, d)."""

    def __init__(self, cache: Any, repeats: int) -> None:
        self.cache, self.repeats = cache, repeats

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            key, value = self.cache.update(key, value, layer_idx)
        return key.repeat_interleave(self.repeats, dim=1), value.repeat_interleave(self.repeats, dim=1)


class GQABloomAttention(source.BloomAttention):
    """BLOOM's attention with G key/value heads, which is also what it caches."""

    def __init__(self, config: GQABloomConfig, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_heads = config.num_key_value_heads
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide the {self.num_heads} attention heads"
            )
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        rows = self.num_key_value_heads * (self.num_key_value_groups + 2) * self.head_dim
        self.query_key_value = nn.Linear(self.hidden_size, rows, bias=True)

    def _reshape(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2 G) * d) -> (B, H, T, d), (B, G, T, d), (B, G, T, d)."""
        per_group = fused_qkv.unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))
        query, key, value = per_group.split([self.num_key_value_groups, 1, 1], dim=3)
        return query.flatten(2, 3).transpose(1, 2), key.squeeze(3).transpose(1, 2), value.squeeze(3).transpose(1, 2)

    def forward(self, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, layer_past=RepeatedHeads(layer_past, self.num_key_value_groups), **kwargs)


class Grouped(source.BloomPreTrainedModel):
    """What makes any of BLOOM's models grouped-query ones: their attention is replaced."""

    config_class = GQABloomConfig

    def __init__(self, config: GQABloomConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for index, block in enumerate(self.base_model.h):
            block.self_attention = GQABloomAttention(config, layer_idx=index)
        self.post_init()


class GQABloomModel(Grouped, source.BloomModel):
    pass


class GQABloomForCausalLM(Grouped, source.BloomForCausalLM):
    pass


class GQABloomForSequenceClassification(Grouped, source.BloomForSequenceClassification):
    pass


class GQABloomForTokenClassification(Grouped, source.BloomForTokenClassification):
    pass


class GQABloomForQuestionAnswering(Grouped, source.BloomForQuestionAnswering):
    pass
