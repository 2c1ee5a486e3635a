"""Everything is transformers' own BLOOM but the size of the fused projection, how it is cut into heads, and that
attention is one of transformers' functions. The rows of the projection are, for each key/value head, those of its
queries, its key and its value. The slopes of ALiBi are those of the query heads.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom as source

from gqa.checkpoint.modelling.gpt2 import readers


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, dropout: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Queries (B, H, T, d), keys and values (B, G, S, d), a mask to add -> (B, T, H, d) and weights (B, H, T, S)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling + mask
    weights = nn.functional.dropout(scores.float().softmax(dim=-1).to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


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

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) with the slopes times distances (B * H, 1, S) -> (B, T, D), added to `residual`, and the weights
        (B, H, T, S) where the attention function has them.
        """
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        mask = alibi.unflatten(0, (-1, self.num_heads))
        mask = mask if attention_mask is None else mask + attention_mask
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout.p if self.training else 0.0
        output, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.inv_norm_factor)
        return source.dropout_add(self.dense(output.flatten(2)), residual, self.hidden_dropout, self.training), weights
