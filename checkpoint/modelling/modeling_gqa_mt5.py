# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""mT5 with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads, in the attention modules that `grouped_attention` names.

Everything is transformers' own mT5 but the size of the key and value projections. Relative positions are those of the
query heads.
"""

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import MT5Config
from transformers.models.mt5 import modeling_mt5 as source


class GQAMT5Config(MT5Config):
    """mT5's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_mt5"

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_heads
        self.grouped_attention = list(self.grouped_attention)


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """mT5's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**vars(source), "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]


class GQAMT5Attention(source.MT5Attention):
    """mT5's attention with G key/value heads, which is also what it caches."""

    # mT5's own. What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    forward = FunctionType(
        source.MT5Attention.forward.__code__,
        SEEN,
        "forward",
        source.MT5Attention.forward.__defaults__,
    )

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been mT5's own, `heads` key/value heads in new projections."""
        if self.n_heads % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {self.n_heads} attention heads")
        self.num_key_value_groups = self.n_heads // heads
        for name in ("k", "v"):
            setattr(self, name, nn.Linear(self.d_model, heads * self.key_value_proj_dim, bias=False))


class Grouped(source.MT5PreTrainedModel):
    """What makes any of mT5's models grouped-query ones: their attention modules become such."""

    config_class = GQAMT5Config

    def __init__(self, config: GQAMT5Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.MT5Attention):
                cross = name.endswith("EncDecAttention")
                place = "cross" if cross else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQAMT5Attention
                    module.group(config.num_key_value_heads)
        self.post_init()


class GQAMT5Model(Grouped, source.MT5Model):
    pass


class GQAMT5ForConditionalGeneration(Grouped, source.MT5ForConditionalGeneration):
    pass


class GQAMT5EncoderModel(Grouped, source.MT5EncoderModel):
    pass


class GQAMT5ForSequenceClassification(Grouped, source.MT5ForSequenceClassification):
    pass


class GQAMT5ForTokenClassification(Grouped, source.MT5ForTokenClassification):
    pass


class GQAMT5ForQuestionAnswering(Grouped, source.MT5ForQuestionAnswering):
    pass
