# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""UMT5 with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads, in the attention modules that `grouped_attention` names.

Everything is transformers' own UMT5 but the size of the key and value projections, and how many heads they hold.
Relative positions are those of the query heads.
"""

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import UMT5Config
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5 import modeling_umt5 as source


class GQAUMT5Config(UMT5Config):
    """UMT5's config with the number of key/value heads (by default H), and where they are fewer: a choice of
    `decoder-self`, `cross` and `encoder`.
    """

    model_type = "gqa_umt5"

    num_key_value_heads: int | None = None
    grouped_attention: list[str] | tuple[str, ...] = ("decoder-self", "cross")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_heads
        self.grouped_attention = list(self.grouped_attention)


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """UMT5's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**T5Attention.forward.__globals__, "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]
# T5's own forward pass, which cuts keys and values into as many heads as there are (UMT5's into as many as queries).
# What transformers has besides eager attention repeats heads by `num_key_value_groups`.
attend_like_t5 = FunctionType(
    T5Attention.forward.__code__,
    SEEN,
    "attend_like_t5",
    T5Attention.forward.__defaults__,
)


class GQAUMT5Attention(source.UMT5Attention):
    """UMT5's attention with G key/value heads, which is also what it caches."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As UMT5's own: T5's, with relative positions of each layer's own."""
        output, _, weights = attend_like_t5(
            self, hidden_states, attention_mask, encoder_hidden_states, None, past_key_values, **kwargs
        )
        return output, weights

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been UMT5's own, `heads` key/value heads in new projections."""
        if self.n_heads % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {self.n_heads} attention heads")
        self.num_key_value_groups = self.n_heads // heads
        self.gradient_checkpointing = False  # T5's forward pass asks
        for name in ("k", "v"):
            setattr(self, name, nn.Linear(self.d_model, heads * self.key_value_proj_dim, bias=False))


class Grouped(source.UMT5PreTrainedModel):
    """What makes any of UMT5's models grouped-query ones: their attention modules become such."""

    config_class = GQAUMT5Config

    def __init__(self, config: GQAUMT5Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.UMT5Attention):
                cross = name.endswith("EncDecAttention")
                place = "cross" if cross else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQAUMT5Attention
                    module.group(config.num_key_value_heads)
        self.post_init()


class GQAUMT5Model(Grouped, source.UMT5Model):
    pass


class GQAUMT5ForConditionalGeneration(Grouped, source.UMT5ForConditionalGeneration):
    pass


class GQAUMT5EncoderModel(Grouped, source.UMT5EncoderModel):
    pass


class GQAUMT5ForSequenceClassification(Grouped, source.UMT5ForSequenceClassification):
    pass


class GQAUMT5ForTokenClassification(Grouped, source.UMT5ForTokenClassification):
    pass


class GQAUMT5ForQuestionAnswering(Grouped, source.UMT5ForQuestionAnswering):
    pass
