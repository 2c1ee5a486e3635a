"""Text from the model itself: sequences sampled at temperature 1 need no data and look like what it was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError, explain
from gqa.convert.align.attention import registered


def first_token(config: Any, name: str) -> int:
    """What a sequence starts from: BOS, or EOS where there is none. Raises RefusedError where there is neither.

    `config` is that of the text part.
    """
    for given in (config.bos_token_id, config.eos_token_id):
        if isinstance(given, list):
            given = given[0] if given else None
        if isinstance(given, int) and 0 <= given < config.vocab_size:
            return given
    raise RefusedError(f"{name} has neither BOS nor EOS to start a sample from; give text instead of self")


@torch.no_grad()
def samples(model: Any, length: int, *, seed: int, batch: int) -> Iterator[Tensor]:
    """(batch, length) sequences of token ids, without end, the same for the same seed, batch and machine.

    Nothing stops a sequence: after EOS the model starts another text, as it does in training.
    """
    start = first_token(model.config.get_text_config(decoder=True), model.name_or_path)
    how = GenerationConfig(do_sample=False, max_new_tokens=length - 1, pad_token_id=start)  # Draw does the sampling
    how.eos_token_id = None
    model.generation_config = how  # else the checkpoint's own habits (top-p, penalties) fill in what is not set
    draw = LogitsProcessorList([Draw(torch.Generator().manual_seed(seed))])
    while True:
        prompt = torch.full((batch, 1), start, device=model.device)
        try:
            with _quick_steps(model):
                ids = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), generation_config=how, logits_processor=draw
                )
        except (ValueError, RuntimeError, TypeError, NotImplementedError, MemoryError) as error:
            if out_of_memory(error):
                raise RefusedError(
                    f"out of memory on {model.device} while {model.name_or_path} writes {batch} samples of {length} "
                    "tokens at a time; give shorter blocks, another --device, or text instead of self"
                ) from None
            raise RefusedError(
                f"{model.name_or_path} cannot be sampled from: {explain(error)}; give text instead of self"
            ) from None
        yield ids.cpu()


class Draw:
    """A logits processor: one token of each row at temperature 1, by the inverse of the distribution function. It takes
    one random number a row; torch.multinomial takes one for each token of the vocabulary, a third of a step's time.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> the same shape, 0 for the token that is drawn and -inf for all others."""
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        reached = scores.float().softmax(-1).cumsum(-1, dtype=precise)
        drawn = torch.rand(len(scores), 1, generator=self._generator, dtype=precise).to(scores.device)
        tokens = torch.searchsorted(reached, drawn * reached[:, -1:], right=True).clamp_max(scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def _quick_steps(model: Any) -> AbstractContextManager[None]:
    """Meanwhile attention of single queries of this model is two plain products on a CPU: torch's kernel takes them one
    by one, which is four times slower in bfloat16. Other models attend as they did.
    """
    if model.device.type != "cpu":
        return nullcontext()
    plain, own = ALL_ATTENTION_FUNCTIONS["sdpa"], set(model.modules())

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        beside = any(options.get(name) is not None for name in ("position_bias", "softcap", "cache"))
        if module not in own or query.shape[2] > 1 or beside:
            whole: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, **options)
            return whole
        return attend_one(query, key, value, attention_mask, options.get("scaling")), None

    return registered({"sdpa": attend})


def attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None) -> Tensor:
    """(B, H, 1, d) queries, (B, G, T, d) keys, (B, G, T, e) values, a mask of (B, 1 or H, 1, T) -> (B, 1, H, e)."""
    groups, scaling = key.shape[1], query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query.unflatten(1, (groups, -1)).squeeze(3) * scaling) @ key.mT  # (B, G, H / G, T)
    if mask is not None:
        shared = mask if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1)).squeeze(3)
        scores = scores.masked_fill(~shared, -torch.inf) if mask.dtype == torch.bool else scores + shared
    paid = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    seen: Tensor = paid @ value
    return seen.flatten(1, 2)[:, None]
