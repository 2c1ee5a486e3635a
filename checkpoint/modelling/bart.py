"""Everything is transformers' own BART but the size of the key and value projections."""

from typing import Any

from torch import nn
from transformers import BartConfig
from transformers.models.bart import modeling_bart as source

from gqa.checkpoint.modelling.gpt2 import readers, repeating


class GQABartConfig(BartConfig):
    """BART's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_bart"

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        query_heads = getattr(self, "decoder_attention_heads", self.num_attention_heads)
        self.num_key_value_heads = self.num_key_value_heads or query_heads
        self.grouped_attention = list(self.grouped_attention)


class GQABartAttention(source.BartAttention):
    """BART's attention with G key/value heads, which is also what it caches."""

    forward = repeating(source.BartAttention.forward)

    def group(self, heads: int) -> None:
        """Give an attention module, which has been BART's own, `heads` key/value heads in new projections."""
        self.num_key_value_groups = readers(self.num_heads, heads)
        for name in ("k_proj", "v_proj"):
            full = getattr(self, name)
            setattr(self, name, nn.Linear(full.in_features, heads * self.head_dim, bias=full.bias is not None))


class Grouped(source.BartPreTrainedModel):
    """What makes any of BART's models grouped-query ones: their attention modules become such."""

    config_class = GQABartConfig

    def __init__(self, config: GQABartConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.BartAttention):
                cross = name.endswith(("encoder_attn", "EncDecAttention"))
                place = "cross" if cross else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQABartAttention
                    module.group(config.num_key_value_heads)
        self.post_init()
