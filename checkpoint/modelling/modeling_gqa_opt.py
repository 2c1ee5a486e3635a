# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""OPT with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` heads of keys and values, each read
by a group of query heads.

Everything is transformers' own OPT but the forward pass of attention, which in OPT cuts keys and values into as many
heads as queries.
"""

from typing import Any

from torch import Tensor, nn
from transformers import OPTConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt import modeling_opt as source


class GQAOPTConfig(OPTConfig):
    """OPT's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_opt"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """OPT's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


class GQAOPTAttention(source.OPTAttention):
    """OPT's attention with G key/value heads, which is also what it caches."""

    def __init__(self, config: GQAOPTConfig, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        groups = config.num_key_value_heads
        if self.num_heads % groups:
            raise ValueError(f"num_key_value_heads {groups} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // groups
        self.k_proj = nn.Linear(self.embed_dim, groups * self.head_dim, bias=self.enable_bias)
        self.v_proj = nn.Linear(self.embed_dim, groups * self.head_dim, bias=self.enable_bias)

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D) and the (B, H, T, S) weights where the attention function has them."""

        def split(heads: Tensor) -> Any:  # (B, T, n * d) -> (B, n, T, d)
            return heads.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = split(self.q_proj(hidden_states) * self.scaling)
        key, value = split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=1.0, **kwargs)
        return self.out_proj(output.flatten(2)), weights


class Grouped(source.OPTPreTrainedModel):
    """What makes any of OPT's models grouped-query ones: their attention is replaced."""

    config_class = GQAOPTConfig

    def __init__(self, config: GQAOPTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        decoder = next(module for module in self.modules() if isinstance(module, source.OPTDecoder))
        for index, layer in enumerate(decoder.layers):
            layer.self_attn = GQAOPTAttention(config, layer_idx=index)
        self.post_init()


class GQAOPTModel(Grouped, source.OPTModel):
    pass


class GQAOPTForCausalLM(Grouped, source.OPTForCausalLM):
    pass


class GQAOPTForSequenceClassification(Grouped, source.OPTForSequenceClassification):
    pass


class GQAOPTForQuestionAnswering(Grouped, source.OPTForQuestionAnswering):
    pass
