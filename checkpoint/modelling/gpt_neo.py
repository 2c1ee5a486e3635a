"""Everything is transformers' own GPT-Neo but the size of the key and value projections, how they are cut into heads,
and that heads come out of the cache repeated.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.gpt_neo import modeling_gpt_neo as source

from gqa.checkpoint.modelling.bloom import RepeatedHeads
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

    def forward(self, *args: Any, layer_past: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, layer_past=RepeatedHeads(layer_past, self.num_key_value_groups), **kwargs)


class GQAGPTNeoFlashAttention2(GQAGPTNeoSelfAttention, source.GPTNeoFlashAttention2):
    pass


class GQAGPTNeoAttention(source.GPTNeoAttention):
    """What holds the attention of a GPT-Neo layer, global or local."""

    def group(self, heads: int) -> None:
        flash = isinstance(self.attention, source.GPTNeoFlashAttention2)
        self.attention.__class__ = GQAGPTNeoFlashAttention2 if flash else GQAGPTNeoSelfAttention
        self.attention.group(heads)
