"""Everything is transformers' own T5 but the size of the key and value projections. Relative positions are those of the
query heads.
"""

from torch import nn
from transformers.models.t5 import modeling_t5 as source

from gqa.checkpoint.modelling.gpt2 import readers, repeating


class GQAT5Attention(source.T5Attention):
    """T5's attention with G key/value heads, which is also what it caches."""

    forward = repeating(source.T5Attention.forward)

    def group(self, heads: int) -> None:
        """Give an attention module, which has been T5's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.n_heads, heads)
        for name in ("k", "v"):
            setattr(self, name, nn.Linear(self.d_model, heads * self.key_value_proj_dim, bias=False))
