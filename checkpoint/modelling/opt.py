"""Everything is transformers' own OPT but the forward pass of attention, which in OPT cuts keys and values into as many
heads as queries.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt import modeling_opt as source

from gqa.checkpoint.modelling.gpt2 import eager_attention_forward, readers


class GQAOPTAttention(source.OPTAttention):
    """OPT's attention with G key/value heads, which is also what it caches."""

    def group(self, heads: int) -> None:
        """Give an attention module, which has been OPT's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.num_heads, heads)
        self.k_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=self.enable_bias)
        self.v_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=self.enable_bias)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D) and the (B, H, T, S) weights where the attention function has them."""

        def split(heads: Tensor) -> Any:  # (B, T, n * d) -> (B, n, T, d)
            return heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = split(self.q_proj(hidden_states) * self.scaling)
        key, value = split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
        cache = past_key_values if cache is None else cache  # as it is called since transformers 5.24
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=1.0, **kwargs)
        return self.out_proj(output.flatten(2)), weights
