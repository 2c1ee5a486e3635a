# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""Whisper with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads, in the attention modules that `grouped_attention` names.

Everything is transformers' own Whisper but the size of the key and value projections and how many heads they hold.
"""

from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import WhisperConfig
from transformers.models.whisper import modeling_whisper as source


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


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Whisper's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


# What the forward pass below sees as its module: with the function above for the one of the same name, and without a
# name, by which torch.compile would look for the other one.
SEEN = {**vars(source), "eager_attention_forward": eager_attention_forward}
del SEEN["__name__"]


class GQAWhisperAttention(source.WhisperAttention):
    """Whisper's attention with G key/value heads, which is also what it caches."""

    # Whisper's own. What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    forward = FunctionType(
        source.WhisperAttention.forward.__code__,
        SEEN,
        "forward",
        source.WhisperAttention.forward.__defaults__,
    )

    def group(self, heads: int) -> None:
        """Give an attention module, which may have been Whisper's own, `heads` key/value heads in new projections."""
        query = self.q_proj.out_features // self.head_dim
        if query % heads:
            raise ValueError(f"num_key_value_heads {heads} does not divide the {query} attention heads")
        self.num_key_value_groups = query // heads
        self.num_heads = heads  # the forward pass reads it for keys and values only
        for name in ("k_proj", "v_proj"):
            full = getattr(self, name)
            setattr(self, name, nn.Linear(full.in_features, heads * self.head_dim, bias=full.bias is not None))


class Grouped(source.WhisperPreTrainedModel):
    """What makes any of Whisper's models grouped-query ones: their attention modules become such."""

    config_class = GQAWhisperConfig

    def __init__(self, config: GQAWhisperConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, module in list(self.named_modules()):
            if isinstance(module, source.WhisperAttention):
                place = "cross" if name.endswith("encoder_attn") else "decoder-self" if module.is_decoder else "encoder"
                if place in config.grouped_attention:
                    module.__class__ = GQAWhisperAttention
                    module.group(config.num_key_value_heads)
        self.post_init()


class GQAWhisperModel(Grouped, source.WhisperModel):
    pass


class GQAWhisperForConditionalGeneration(Grouped, source.WhisperForConditionalGeneration):
    pass


class GQAWhisperForCausalLM(Grouped, source.WhisperForCausalLM):
    pass


class GQAWhisperForAudioClassification(Grouped, source.WhisperForAudioClassification):
    pass
