"""Everything is transformers' own MPT but the size of the fused projection [Q | K | V], how it is cut into heads, and
that heads come out of the cache repeated. The slopes of ALiBi are those of the query heads.
"""

from typing import Any

from torch import Tensor, finfo, nn
from transformers.models.mpt import modeling_mpt as source

from gqa.checkpoint.modelling.gpt2 import readers


class GQAMptAttention(source.MptAttention):
    """MPT's attention with G key/value heads, which is also what it caches."""

    def group(self, heads: int) -> None:
        """Give an attention module, which has been MPT's own, `heads` key/value heads in a new projection."""
        self.num_key_value_groups = readers(self.n_heads, heads)
        self.split_size = [self.hidden_size, heads * self.head_dim, heads * self.head_dim]
        self.Wqkv = nn.Linear(self.hidden_size, sum(self.split_size), bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(B, T, D) with the slopes times distances (H, 1, longest) -> (B, T, D) and the weights (B, H, T, S)."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for heads in mixed.split(self.split_size, dim=2)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        key, value = (heads.repeat_interleave(self.num_key_value_groups, dim=1) for heads in (key, value))
        scores = query @ key.transpose(-1, -2) * self.softmax_scale
        if position_bias is not None:
            scores = scores + position_bias[:, :, max(0, position_bias.size(2) - key.size(2)) :]
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, finfo(query.dtype).min)
        weights = scores.float().softmax(dim=-1).to(value.dtype)
        weights = nn.functional.dropout(weights, p=self.attn_dropout_p, training=self.training)
        return self.out_proj((weights @ value).transpose(1, 2).flatten(2)), weights
