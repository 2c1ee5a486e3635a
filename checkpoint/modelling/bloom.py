"""Everything is transformers' own BLOOM but the size of the fused projection, how it is cut into heads, and that heads
come out of the cache repeated. Its rows are, for each key/value head, those of its queries, its key and its value. The
slopes of ALiBi are those of the query heads.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.bloom import modeling_bloom as source

from gqa.checkpoint.modelling.gpt2 import readers


class RepeatedHeads:
    """A cache of G heads (or none) as BLOOM's attention asks it: keys and values (B, G, T, d) -> (B, H, S, d)."""

    def __init__(self, cache: Any, repeats: int) -> None:
        self.cache, self.repeats = cache, repeats

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any) -> tuple[Tensor, Tensor]:
        if self.cache is not None:
            key, value = self.cache.update(key, value, layer_idx, *args)
        return key.repeat_interleave(self.repeats, dim=1), value.repeat_interleave(self.repeats, dim=1)


class GQABloomAttention(source.BloomAttention):
    """BLOOM's attention with G key/value heads, which is also what it caches."""

    def group(self, heads: int) -> None:
        """Give an attention module, which has been BLOOM's own, `heads` key/value heads in a new projection."""
        self.num_key_value_heads, self.num_key_value_groups = heads, readers(self.num_heads, heads)
        self.query_key_value = nn.Linear(self.hidden_size, (self.num_heads + 2 * heads) * self.head_dim, bias=True)

    def _reshape(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, (H + 2 G) * d) -> (B, H, T, d), (B, G, T, d), (B, G, T, d)."""
        per_group = fused_qkv.unflatten(-1, (self.num_key_value_heads, -1, self.head_dim))
        query, key, value = per_group.split([self.num_key_value_groups, 1, 1], dim=3)
        return query.flatten(2, 3).transpose(1, 2), key.squeeze(3).transpose(1, 2), value.squeeze(3).transpose(1, 2)

    def forward(self, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, layer_past=RepeatedHeads(layer_past, self.num_key_value_groups), **kwargs)
