"""Sequences sampled from a model, many at a time, with less overhead a step than transformers' own loop has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask

from gqa.checkpoint.compat import attention_name
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.loading import cache_name, out_of_memory
from gqa.convert.merge.layerwise import attend_sdpa, register
from gqa.corpus.tokens import first_token

_MORE = 128  # tokens by which a cache grows


@torch.no_grad()
def samples(
    model: Any, length: int, *, seed: int | Sequence[int], batch: int,
    progress: Callable[[int], object] = lambda tokens: None,
    encoder_inputs: Mapping[str, Tensor] | None = None, banned: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """(batch, length) token ids, the same for the same seed, batch and machine, none of those that are `banned`; of
    several seeds one batch below the other. Raises RefusedError.

    Nothing stops a sequence: after EOS the model starts another text, as it does in training. `encoder_inputs`
    are keyword arguments of an encoder-decoder.
    """
    if not hasattr(model, "generate"):
        raise RefusedError(
            f"{model.name_or_path} cannot be sampled from: {type(model).__name__} has no head that predicts tokens; "
            "give text instead of self"
        )
    start = first_token(model.config, model.name_or_path)
    settings = GenerationConfig(do_sample=False, max_new_tokens=length - 1, pad_token_id=start)  # Draw samples
    settings.eos_token_id, settings.decoder_start_token_id, settings.suppress_tokens = None, start, list(banned) or None
    model.generation_config = settings  # else generate() takes unset fields from the checkpoint's
    seeds = [seed] if isinstance(seed, int) else seed
    draw = LogitsProcessorList([Draw(*(torch.Generator().manual_seed(one) for one in seeds), progress=progress)])
    batch *= len(seeds)
    prompt = torch.full((batch, 1), start, device=model.device)
    try:
        with _quick_steps(model):
            read = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} if encoder_inputs is None else {
                **encoder_inputs, "decoder_input_ids": prompt
            }  # fmt: skip
            # Not the class's override, which may add tokens or search differently.
            ids: Tensor = GenerationMixin.generate(
                model, **read, generation_config=settings, logits_processor=draw, **_cache(model)
            )
    except (ValueError, RuntimeError, TypeError, NotImplementedError, MemoryError) as error:
        refusal = f"{model.name_or_path} cannot be sampled from: {explain(error)}; give text instead of self"
        if out_of_memory(error):
            refusal = (
                f"out of memory on {model.device} while {model.name_or_path} writes {batch} samples of {length} "
                "tokens at a time; give shorter blocks, another --device, or text instead of self"
            )
        raise RefusedError(refusal) from error
    return ids.cpu()


class Draw:
    """A logits processor: one token of each row at temperature 1, by the inverse of the distribution function. It takes
    one random number a row; torch.multinomial takes one for each token of the vocabulary, a third of a step's time.
    """

    def __init__(self, *generators: torch.Generator, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Each generator samples an equal share of the rows."""
        self._generators, self._progress = generators, progress

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> the same shape, 0 for the token that is drawn and -inf for all others."""
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        cdf = scores.float().softmax(-1).cumsum(-1, dtype=precise)
        rows_per_seed = len(scores) // len(self._generators)
        drawn = torch.cat([torch.rand(rows_per_seed, 1, generator=one, dtype=precise) for one in self._generators])
        drawn = drawn.to(scores.device)
        tokens = torch.searchsorted(cdf, drawn * cdf[:, -1:], right=True).clamp_max(scores.shape[1] - 1)
        self._progress(len(scores))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache with spare capacity; DynamicLayer copies everything at every token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, G, t, d) keys and (B, G, t, e) values; those of all tokens."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [x[:, :, :0] for x in (key_states, value_states)]
        end = first + key_states.shape[2]
        for number, new in enumerate((key_states, value_states)):
            if end > (old := self._buffers[number]).shape[2]:
                self._buffers[number] = new.new_zeros(*new.shape[:2], -(-end // _MORE) * _MORE, new.shape[3])
                self._buffers[number][:, :, :first] = old[:, :, :first]
            self._buffers[number][:, :, first:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        for part, buffer in zip((self.keys, self.values), self._buffers, strict=True):
            part.buffer = buffer  # type: ignore[attr-defined]
        return self.keys, self.values


def _cache(model: Any) -> dict[str, Any]:
    """Cache argument for generate(), or {} if a layer is neither DynamicLayer nor sliding, or there is an encoder."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    usual = {DynamicLayer, DynamicSlidingWindowLayer}.issuperset(map(type, cache.layers))
    if model.config.is_encoder_decoder or not usual:
        return {}
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return {cache_name(model): cache}


@contextmanager
def _quick_steps(model: Any) -> Iterator[None]:
    """Within the block: on CPU, two matmuls per single-query step (torch's kernel is four times slower in bfloat16); on
    CUDA, no cuDNN kernels, which are compiled for each length.
    """
    if model.device.type == "cuda":
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    elif model.device.type == "cpu" and attention_name(model) == "sdpa":
        model.set_attn_implementation("gqa_steps")
        try:
            yield
        finally:
            model.set_attn_implementation("sdpa")
    else:
        yield


def _attend_steps(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    if q.shape[2] > 1 or any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")):
        return attend_sdpa(module, q, k, v, mask, **options)
    return attend_one(q, k, v, mask, options.get("scaling"))


register("gqa_steps", _attend_steps, sdpa_mask)


def attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None) -> Tensor:
    """(B, H, 1, d) queries, (B, G, T, d) keys, (B, G, T, e) values, a mask of (B, 1 or H, 1, T) -> (B, 1, H, e)."""
    groups, scaling = key.shape[1], query.shape[-1] ** -0.5 if scaling is None else scaling
    length = key.shape[2]
    # matmul would copy the slice, so multiply the whole buffer; its rest is zero.
    key, value = (getattr(part, "buffer", part) for part in (key, value))
    scores = ((query.unflatten(1, (groups, -1)).squeeze(3) * scaling) @ key.mT)[..., :length]  # (B, G, H / G, T)
    if mask is not None:
        shared = mask if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1)).squeeze(3)
        scores = scores.masked_fill(~shared, -torch.inf) if mask.dtype == torch.bool else scores + shared
    attention = pad(scores.softmax(-1, dtype=torch.float32).to(value.dtype), (0, value.shape[2] - length))
    output: Tensor = attention @ value
    return output.flatten(1, 2)[:, None]
