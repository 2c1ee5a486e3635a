"""A model class that is code beside weights: `support.embedded.bring_class` copies this file."""

from typing import Any

from transformers import LlamaForCausalLM

TOKEN = 7


class Ours(LlamaForCausalLM):
    """Whatever it reads, it writes one token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., TOKEN] += 1e4
        return output
