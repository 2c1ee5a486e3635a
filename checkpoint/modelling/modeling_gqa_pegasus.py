# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""Pegasus with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads, in the attention modules that `grouped_attention` names.

Everything is transformers' own Pegasus but the size of the key and value projections.
"""

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import PegasusConfig
from transformers.models.pegasus import modeling_pegasus as source


class GQAPegasusConfig(PegasusConfig):
    """Pegasus's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_pegasus"

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.decoder_attention_heads
        self.grouped_attention = list(self.grouped_attention)


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Pegasus's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**vars(source), "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]


class GQAPegasusAttention(source.PegasusAttention):
    """Pegasus's attention with G key/value heads, which is also what it caches."""

    # Pegasus's own. What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    forward = FunctionType(
        source.PegasusAttention.forward.__code__,
        SEEN,
        "forward",
        source.PegasusAttention.forward.__defaults__,
    )

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been Pegasus's own, `heads` key/value heads in new projections."""
        if self.num_heads % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // heads
        for name in ("k_proj", "v_proj"):
            full = getattr(self, name)
            setattr(self, name, nn.Linear(full.in_features, heads * self.head_dim, bias=full.bias is not None))


class Grouped(source.PegasusPreTrainedModel):
    """What makes any of Pegasus's models grouped-query ones: their attention modules become such."""

    config_class = GQAPegasusConfig

    def __init__(self, config: GQAPegasusConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.PegasusAttention):
                place = "cross" if name.endswith("encoder_attn") else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQAPegasusAttention
                    module.group(config.num_key_value_heads)
        self.post_init()


class GQAPegasusModel(Grouped, source.PegasusModel):
    pass


class GQAPegasusForConditionalGeneration(Grouped, source.PegasusForConditionalGeneration):
    pass


class GQAPegasusForCausalLM(Grouped, source.PegasusForCausalLM):
    pass
