# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""OPT with grouped-query attention (arXiv 2305.13245): `num_key_value_heads` key/value heads, each read by a group of
query heads.

Everything is transformers' OPT but the size of the key and value projections, and attention's forward pass, which in
OPT splits keys and values into as many heads as queries.
"""

from typing import Any

from torch import Tensor, nn
from transformers import OPTConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt import modeling_opt as opt


class GQAOPTConfig(OPTConfig):
    """OPT's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_opt"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """OPT's function of this name, with key/value heads (B, G, S, d) repeated for the query heads (B, H, T, d). The
    other attention functions of transformers repeat them.
    """
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return opt.eager_attention_forward(module, query, key, value, *args, **kwargs)


class GQAOPTAttention(opt.OPTAttention):
    """Self-attention with G key/value heads. The cache holds G heads too."""

    def __init__(self, config: GQAOPTConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        kv_heads = int(config.num_key_value_heads or self.num_heads)
        if self.num_heads % kv_heads:
            raise ValueError(f"num_key_value_heads {kv_heads} does not divide the {self.num_heads} attention heads")
        self.num_key_value_groups = self.num_heads // kv_heads
        self.k_proj = nn.Linear(self.embed_dim, kv_heads * self.head_dim, bias=self.enable_bias)
        self.v_proj = nn.Linear(self.embed_dim, kv_heads * self.head_dim, bias=self.enable_bias)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the weights (B, H, T, S) where the attention function returns them."""
        projected = (self.q_proj(hidden_states) * self.scaling, self.k_proj(hidden_states), self.v_proj(hidden_states))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projected)
        cache = past_key_values if cache is None else cache  # transformers 5.24 renames the argument
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=1.0, **kwargs)
        return self.out_proj(output.flatten(2)), weights


class Grouped(opt.OPTPreTrainedModel):
    """Mixin for OPT's models: replaces their self-attention modules."""

    config_class = GQAOPTConfig

    def __init__(self, config: GQAOPTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for index, layer in enumerate(self.base_model.decoder.layers):
            layer.self_attn = GQAOPTAttention(config, index)
        self.post_init()


class GQAOPTModel(Grouped, opt.OPTModel):
    pass


class GQAOPTForCausalLM(Grouped, opt.OPTForCausalLM):
    pass


class GQAOPTForQuestionAnswering(Grouped, opt.OPTForQuestionAnswering):
    pass


class GQAOPTForSequenceClassification(Grouped, opt.OPTForSequenceClassification):
    pass
