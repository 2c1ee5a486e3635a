"""Everything is transformers' own GPT-2 but the size of the fused projection [Q | K | V] and where it is split."""

from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import Tensor
from transformers import GPT2Config, __version__
from transformers.models.gpt2 import modeling_gpt2 as source
from transformers.pytorch_utils import Conv1D


class GQAGPT2Config(GPT2Config):
    """GPT-2's config with the number of key/value heads, by default that of the query heads."""

    model_type = "gqa_gpt2"

    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads


def readers(query_heads: int, heads: int) -> int:
    """How many query heads read each of `heads` key/value heads."""
    if query_heads % heads:
        raise ValueError(f"num_key_value_heads {heads} does not divide the {query_heads} attention heads")
    return query_heads // heads


def eager_attention_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """GPT-2's own function on key and value heads (B, G, S, d) repeated for their queries (B, H, T, d)."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return source.eager_attention_forward(module, query, key, value, *args, **kwargs)


def repeating(forward: Any) -> Any:
    """A forward pass of transformers that calls the function above in place of the one of the same name.

    What transformers has besides eager attention repeats heads by `num_key_value_groups`.
    """
    forward = unwrap(forward)  # since 5.24 in what renames its arguments
    if "eager_attention_forward" not in forward.__code__.co_names:
        raise ImportError(f"transformers {__version__} computes this class' attention otherwise; install 5.18 to 5.24")
    seen = {**forward.__globals__, "eager_attention_forward": eager_attention_forward}
    del seen["__name__"]  # by which torch.compile would look for the other one
    return FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__)


class GQAGPT2Attention(source.GPT2Attention):
    """GPT-2's attention with G key/value heads, which is also what it caches."""

    forward = repeating(source.GPT2Attention.forward)

    def group(self, heads: int) -> None:
        """Give an attention module, which has been GPT-2's own, `heads` key/value heads in a new projection."""
        self.num_key_value_groups = readers(self.num_heads, heads)
        self.split_size = [self.embed_dim, heads * self.head_dim, heads * self.head_dim]
        self.c_attn = Conv1D(sum(self.split_size), self.embed_dim)

    def _upcast_and_reordered_attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        key, value = (heads.repeat_interleave(self.num_key_value_groups, dim=1) for heads in (key, value))
        return super()._upcast_and_reordered_attn(query, key, value, attention_mask)


class Grouped(source.GPT2PreTrainedModel):
    """What makes any of GPT-2's models grouped-query ones: their self-attention modules become such."""

    config_class = GQAGPT2Config

    def __init__(self, config: GQAGPT2Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for module in list(self.modules()):
            if isinstance(module, source.GPT2Attention) and not getattr(module, "is_cross_attention", False):
                module.__class__ = GQAGPT2Attention
                module.config = config  # by which it chooses its attention function
                module.group(config.num_key_value_heads)
        self.post_init()
