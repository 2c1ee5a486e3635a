# Licensed under the Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0).
"""Llama and models like it with another number of key/value heads in each layer (grouped-query
attention, arXiv 2305.13245): as `per_layer_config` says. Layers that it does not name have
`num_key_value_heads`.

Everything is transformers' own but these numbers. Each class is named `GQA` and the name of the
class of transformers that it extends, as GQAQwen2ForCausalLM; `__getattr__` makes it. Only Llama's
language model is called DeciLMForCausalLM: vLLM and llama.cpp know it by that name.
"""

from types import SimpleNamespace
from typing import Any

import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel


class ByLayer(PreTrainedModel):
    """Mixin for models: gives each layer an attention module with its number of heads."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        overrides = config.to_dict().get("per_layer_config")
        config.per_layer_config = None  # transformers' classes refuse a config that has it
        super().__init__(config, *args, **kwargs)
        config.per_layer_config = overrides

        # Set to overrides by layer, the property returns the whole config of each layer.
        for index, layer in enumerate(self.base_model.layers):
            layer.self_attn = type(layer.self_attn)(config.per_layer_config[index], index)
            # Which names the attention function, also when that is changed
            layer.self_attn.config = config
        self.post_init()


class GQALlamaConfig(LlamaConfig):
    """Llama's config under a model type of its own: Llama's classes would build all layers
    alike.
    """

    model_type = "gqa_llama"

    @property
    def block_configs(self) -> list[SimpleNamespace]:
        """The layers as vLLM reads those of a DeciLM: query heads for each key/value head, and the
        MLP's width.
        """
        heads = self.num_attention_heads
        width = self.intermediate_size
        return [
            SimpleNamespace(
                attention=SimpleNamespace(
                    no_op=False, n_heads_in_group=heads // layer.num_key_value_heads
                ),
                ffn=SimpleNamespace(no_op=False, intermediate_size=width),
            )
            for layer in self.per_layer_config
        ]


class DeciLMForCausalLM(ByLayer, LlamaForCausalLM):
    config_class = GQALlamaConfig


# modeling_gqa.py has nearly the same function: each file is copied beside weights alone, and must
# not import the other.
def __getattr__(name: str) -> Any:
    """The config or model `GQA...` of the class of transformers that is named after `GQA`."""
    if not name.startswith("GQA"):
        raise AttributeError(f"{__name__} has no {name}")

    source = getattr(transformers, name.removeprefix("GQA"))
    members = {"__module__": __name__}
    bases: tuple[Any, ...]
    if issubclass(source, PreTrainedConfig):
        bases = (source,)
        members["model_type"] = f"gqa_{source.model_type}"
    else:
        config = f"GQA{source.config_class.__name__}"
        bases = (ByLayer, source)
        members["config_class"] = globals().get(config) or __getattr__(config)

    globals()[name] = type(name, bases, members)
    return globals()[name]
