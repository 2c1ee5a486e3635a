"""Everything is transformers' own Llama but the number of key/value heads, of which every layer has its own: as
`per_layer_config` says. Layers that it does not name have `num_key_value_heads`.
"""

from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as source


class GQALlamaConfig(LlamaConfig):
    """Llama's config under a name of its own: Llama's classes would build all layers alike."""

    model_type = "gqa_llama"


def block_configs(config: GQALlamaConfig) -> list[SimpleNamespace]:
    """The layers as vLLM reads those of a DeciLM: how many query heads share a key/value head, how wide the MLP is."""
    heads, width = config.num_attention_heads, config.intermediate_size
    return [
        SimpleNamespace(
            attention=SimpleNamespace(no_op=False, n_heads_in_group=heads // layer.num_key_value_heads),
            ffn=SimpleNamespace(no_op=False, intermediate_size=width),
        )
        for layer in config.per_layer_config
    ]


class Grouped(source.LlamaPreTrainedModel):
    """What gives any of Llama's models attention modules with the heads of their layers."""

    config_class = GQALlamaConfig

    def __init__(self, config: GQALlamaConfig, *args: Any, **kwargs: Any) -> None:
        layers = config.to_dict().get("per_layer_config")
        config.per_layer_config = None  # by which transformers' class would refuse the config
        super().__init__(config, *args, **kwargs)
        config.per_layer_config = layers
        for module in list(self.modules()):
            if isinstance(module, source.LlamaAttention):
                index = int(module.layer_idx)
                module.__init__(config.per_layer_config[index], index)
                module.config = config  # by which a model chooses its attention functions
        self.post_init()
