"""Everything is transformers' own MPT but the size of the fused projection [Q | K | V], how it is cut into heads, and
that attention is one of transformers' functions. The slopes of ALiBi are those of the query heads.
"""

from typing import Any

from torch import Tensor, finfo, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpt import modeling_mpt as source

from gqa.checkpoint.modelling.bloom import eager_attention_forward
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
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) with the slopes times distances (H, 1, longest) and True where nothing is seen (B, 1, T, S) ->
        (B, T, D) and the weights (B, H, T, S) where the attention function has them.
        """
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for heads in mixed.split(self.split_size, dim=2)
        )
        cache = past_key_values if cache is None else cache  # as it is called since transformers 5.24
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        mask = position_bias[None, :, :, max(0, position_bias.size(2) - key.size(2)) :].to(query.dtype)
        if attention_mask is not None:
            mask = mask.masked_fill(attention_mask, finfo(query.dtype).min)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attn_dropout_p if self.training else 0.0
        output, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.softmax_scale)
        return self.out_proj(output.flatten(2)), weights
