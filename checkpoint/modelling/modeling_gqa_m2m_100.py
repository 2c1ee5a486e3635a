# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""M2M-100 with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads, in the attention modules that `grouped_attention` names.

Everything is transformers' own M2M-100 but the size of the key and value projections.
"""

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import M2M100Config
from transformers.models.m2m_100 import modeling_m2m_100 as source


class GQAM2M100Config(M2M100Config):
    """M2M-100's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_m2m_100"

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.decoder_attention_heads
        self.grouped_attention = list(self.grouped_attention)


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """M2M-100's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**vars(source), "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]


class GQAM2M100Attention(source.M2M100Attention):
    """M2M-100's attention with G key/value heads, which is also what it caches."""

    # M2M-100's own. What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    forward = FunctionType(
        source.M2M100Attention.forward.__code__,
        SEEN,
        "forward",
        source.M2M100Attention.forward.__defaults__,
    )

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been M2M-100's own, `heads` key/value heads in new projections."""
        if self.num_heads % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // heads
        for name in ("k_proj", "v_proj"):
            full = getattr(self, name)
            setattr(self, name, nn.Linear(full.in_features, heads * self.head_dim, bias=full.bias is not None))


class Grouped(source.M2M100PreTrainedModel):
    """What makes any of M2M-100's models grouped-query ones: their attention modules become such."""

    config_class = GQAM2M100Config

    def __init__(self, config: GQAM2M100Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.M2M100Attention):
                place = "cross" if name.endswith("encoder_attn") else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQAM2M100Attention
                    module.group(config.num_key_value_heads)
        self.post_init()


class GQAM2M100Model(Grouped, source.M2M100Model):
    pass


class GQAM2M100ForConditionalGeneration(Grouped, source.M2M100ForConditionalGeneration):
    pass
