"""Text from the model itself: sequences sampled at temperature 1 need no data and look like what it was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gqa.convert.errors import RefusedError, explain


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
    from transformers import GenerationConfig

    start = first_token(model.config.get_text_config(decoder=True), model.name_or_path)
    how = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length - 1,
                           max_new_tokens=length - 1, pad_token_id=start)  # fmt: skip
    how.eos_token_id = None
    model.generation_config = how  # else the checkpoint's own habits (top-p, penalties) fill in what is not set
    generator = torch.Generator().manual_seed(seed)
    while True:
        prompt = torch.full((batch, 1), start, device=model.device)
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            try:
                ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
            except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
                raise RefusedError(
                    f"{model.name_or_path} cannot be sampled from: {explain(error)}; give text instead of self"
                ) from None
        yield ids.cpu()
