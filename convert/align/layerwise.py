"""A model one layer at a time: hidden states of all text go through a layer before the next one's weights are read.

What a layer is given besides hidden states (masks, positions' embeddings) is recorded from the model's own forward, in
which every layer is replaced by one that only notes it; so nothing here knows how an architecture makes them.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.loading import model_class
from gqa.checkpoint.names import parameter_names
from gqa.convert.align.attention import Attend, attend_eager, attend_sdpa, watchable

# What a layer is called with beside hidden states.
Given = tuple[tuple[Any, ...], dict[str, Any]]
# A parameter's name, and stored tensors that replace the checkpoint's -> the parameter.
Read = Callable[[str, Mapping[str, Tensor]], Tensor]

# What layers return, by architecture.
_RETURNED: tuple[Callable[[Tensor], Any], ...] = (lambda h: h, lambda h: (h,), lambda h: (h, None))


@dataclass
class Layerwise:
    """A model without weights, of whose layers one at a time has them."""

    model: PreTrainedModel
    layers: list[nn.Module]
    prefix: str  # of the layers' parameters
    read: Read
    device: torch.device
    attend: Attend

    @classmethod
    def make(
        cls, config: Any, path: str, read: Callable[[PreTrainedModel], Read], dtype: Any, device: Any
    ) -> Layerwise:
        """A model of transformers' `config`, one of whose attention modules is stored at `path`."""
        eager = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
        made = model_class(config)
        if not hasattr(made, "_from_config"):
            raise RefusedError(
                f"transformers has no model of {config.model_type} alone; it cannot be run layer by layer"
            )
        eager = eager or not made._supports_sdpa
        alone = f"{made.__name__} does not call transformers' attention functions; it cannot be run layer by layer"
        if eager and not hasattr(sys.modules[made.__module__], "eager_attention_forward"):
            raise RefusedError(alone)
        try:
            with watchable(), init_empty_weights(include_buffers=False):
                model = made._from_config(config, attn_implementation="gqa_eager" if eager else "gqa_sdpa", dtype=dtype)
        except (KeyError, ValueError):  # a class with a table of its own
            raise RefusedError(alone) from None
        model.tie_weights()  # which the empty weights have undone
        stored = parameter_names(model)
        attention = next((own for name, own in stored.items() if name.startswith(f"{path}.")), None)
        match = re.match(r"(.+?)\.\d+\.", attention) if attention else None
        if attention is None or match is None:
            raise RefusedError(f"{type(model).__name__} has no layer with {path}; it cannot be run layer by layer")
        layers = list(model.get_submodule(match[1]))
        self = cls(
            model.eval(), layers, match[1], read(model), torch.device(device), attend_eager if eager else attend_sdpa
        )
        outside = [name for name in model.state_dict() if not name.startswith(f"{match[1]}.") and "lm_head" not in name]
        self._fill(outside, {})
        for buffer_name, buffer in model.named_buffers():
            set_module_tensor_to_device(model, buffer_name, self.device, buffer)
        return self

    def _fill(self, names: list[str], changed: Mapping[str, Tensor]) -> None:
        for name in names:
            tensor = self.read(name, changed)
            set_module_tensor_to_device(self.model, name, self.device, tensor, dtype=self.model.dtype)

    def load(self, index: int, changed: Mapping[str, Tensor] = MappingProxyType({})) -> nn.Module:
        """Layer `index` with its weights, of which the stored tensors `changed` replace the checkpoint's."""
        layer = self.layers[index]
        self._fill([f"{self.prefix}.{index}.{name}" for name in layer.state_dict()], changed)
        return layer

    def release(self, index: int) -> None:
        for name in self.layers[index].state_dict():
            set_module_tensor_to_device(self.model, f"{self.prefix}.{index}.{name}", "meta")

    @torch.no_grad()
    def arrive(self, ids: Tensor) -> tuple[Tensor, list[Given]]:
        """(B, T) ids -> the (B, T, D) hidden states that the first layer is given, and what every layer is besides."""
        told: dict[int, Given] = {}
        first: list[Tensor] = []

        def note(index: int, returned: Callable[[Tensor], Any]) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                told[index] = (args, kwargs)
                if not first:
                    first.append(hidden)
                return returned(hidden)

            return forward

        owner = self.model.get_submodule(self.prefix.rpartition(".")[0])
        callers = (self.model.base_model,) if self.model.config.is_encoder_decoder else (self.model.base_model, owner)
        failed: list[Exception] = []
        for caller, returned in itertools.product(callers, _RETURNED):
            told.clear()
            first.clear()
            for index, layer in enumerate(self.layers):
                layer.forward = note(index, returned)
            try:
                with watchable():
                    out = caller(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
            except RefusedError:
                raise
            except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                if out_of_memory(error):
                    raise
                failed.append(error)
                continue
            finally:
                for layer in self.layers:
                    del layer.forward
            if first and out.shape == first[0].shape and len(told) == len(self.layers):
                return first[0], [told[index] for index in range(len(self.layers))]
        # What torch itself says tells more than that a layer's result was not of the form that was tried.
        reason = next((error for error in failed if isinstance(error, RuntimeError)), next(iter(failed), None))
        why = f": {explain(reason)}" if reason else ""
        raise RefusedError(f"{type(self.model).__name__} cannot be run layer by layer{why}")


def run_layer(layer: nn.Module, hidden: Tensor, given: Given) -> Tensor:
    """Hidden states after the layer."""
    with watchable():
        output = layer(hidden, *given[0], **given[1])
    return output if isinstance(output, Tensor) else output[0]
