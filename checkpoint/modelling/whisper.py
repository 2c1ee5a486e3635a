"""Everything is transformers' own Whisper but the size of the key and value projections and how many heads they
hold.
"""

from typing import Any, ClassVar

from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper import modeling_whisper as source

from gqa.checkpoint.modelling.gpt2 import readers, repeating


class GQAWhisperConfig(WhisperConfig):
    """Whisper's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_whisper"
    # In Whisper's own config this is another name of the encoder's heads.
    attribute_map: ClassVar[dict[str, str]] = {
        key: name for key, name in WhisperConfig.attribute_map.items() if key != "num_key_value_heads"
    }

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.decoder_attention_heads
        self.grouped_attention = list(self.grouped_attention)


class GQAWhisperAttention(source.WhisperAttention):
    """Whisper's attention with G key/value heads, which is also what it caches."""

    forward = repeating(source.WhisperAttention.forward)

    def group(self, heads: int) -> None:
        """Give an attention module, which has been Whisper's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.q_proj.out_features // self.head_dim, heads)
        self.num_heads = heads  # the forward pass reads it for keys and values only
        for name in ("k_proj", "v_proj"):
            full = getattr(self, name)
            setattr(self, name, nn.Linear(full.in_features, heads * self.head_dim, bias=full.bias is not None))
