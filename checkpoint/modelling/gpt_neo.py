"""Everything is transformers' own GPT-Neo but the size of the key and value projections, how they are cut into heads,
and that attention is one of transformers' functions.
"""

from typing import Any

from torch import Tensor, finfo, float32, nn, zeros_like
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neo import modeling_gpt_neo as source

from gqa.checkpoint.modelling.bloom import eager_attention_forward
from gqa.checkpoint.modelling.gpt2 import readers


class GQAGPTNeoSelfAttention(source.GPTNeoSelfAttention):
    """GPT-Neo's attention with G key/value heads, which is also what it caches."""

    def group(self, heads: int) -> None:
        """Give an attention module, which has been GPT-Neo's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.num_heads, heads)
        self.k_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.embed_dim, heads * self.head_dim, bias=False)

    def _split_heads(self, tensor: Tensor, num_heads: int, attn_head_size: int) -> Any:
        """(B, T, n * d) -> (B, n, T, d), whatever n."""
        return super()._split_heads(tensor, tensor.shape[-1] // attn_head_size, attn_head_size)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        """(B, H, T, d) queries, (B, G, S, d) keys and values -> (B, H, T, d), computed in float32, and the weights
        (B, H, T, S) where the attention function has them.
        """
        length, total = query.shape[2], key.shape[2]
        near = self.bias[:, :, total - length : total, :total]  # of a local layer, a window
        mask = zeros_like(near, dtype=float32).masked_fill(~near, finfo(float32).min)
        mask = mask if attention_mask is None else mask + attention_mask
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attn_dropout.p if self.training else 0.0
        heads = (query.float(), key.float(), value.float())
        output, weights = attend(self, *heads, mask, dropout=dropout, scaling=1.0)
        return output.transpose(1, 2).to(value.dtype), weights


class GQAGPTNeoFlashAttention2(GQAGPTNeoSelfAttention, source.GPTNeoFlashAttention2):
    pass


class GQAGPTNeoAttention(source.GPTNeoAttention):
    """What holds the attention of a GPT-Neo layer, global or local."""

    def group(self, heads: int) -> None:
        flash = isinstance(self.attention, source.GPTNeoFlashAttention2)
        self.attention.__class__ = GQAGPTNeoFlashAttention2 if flash else GQAGPTNeoSelfAttention
        self.attention.group(heads)
