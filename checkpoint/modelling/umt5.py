"""Everything is transformers' own UMT5 but the size of the key and value projections, and how many heads they hold.
Relative positions are those of the query heads.
"""

from typing import Any

from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5 import modeling_umt5 as source

from gqa.checkpoint.modelling.gpt2 import readers, repeating


class GQAUMT5Attention(source.UMT5Attention):
    """UMT5's attention with G key/value heads, which is also what it caches."""

    # It cuts keys and values into as many heads as there are, UMT5's into as many as queries.
    attend_like_t5 = repeating(T5Attention.forward)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As UMT5's own: T5's, where each layer has relative positions of its own."""
        cache = past_key_values if cache is None else cache  # as it is called since transformers 5.24
        positional = hidden_states, attention_mask, encoder_hidden_states, None, cache
        output, _, weights = self.attend_like_t5(*positional, **kwargs)
        return output, weights

    def group(self, heads: int) -> None:
        """Give an attention module, which has been UMT5's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.n_heads, heads)
        self.gradient_checkpointing = False  # T5's forward pass asks
        for name in ("k", "v"):
            setattr(self, name, nn.Linear(self.d_model, heads * self.key_value_proj_dim, bias=False))
