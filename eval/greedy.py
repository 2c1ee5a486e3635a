"""Greedy agreement: for how many tokens a model's greedy text equals the baseline's, after prompts.

Two greedy texts are equal up to the first difference, so only the baseline generates. A model scores that text and
leaves it at the first token that is not its most probable one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from gqa.checkpoint.errors import RefusedError, explain
from gqa.eval.scoring import Window
from gqa.eval.statistics import mean_interval

STEPS = 64
OPENING = 32  # tokens of a sample that are a prompt
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "List three things to pack for a hike in the mountains.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Rewrite this politely: Send me the report now.",
    "My name is Alina and I live in Oslo. What is my name, and where do I live?",
    "Translate to French: The library opens at nine.",
    "What is 17 plus 25? Show your steps.",
    "Write a Python function that returns the largest number of a list.",
    "Summarise: The meeting was moved from Monday to Thursday because two people were ill.",
    "Give me a recipe for pancakes with the amounts.",
    "Sort these words: pear, apple, fig, banana.",
)


def prompts(tokenizer: Any, samples: Sequence[Sequence[int]]) -> list[list[int]]:
    """PROMPTS in the chat template if there is one, else the beginnings of `samples`."""
    if not getattr(tokenizer, "chat_template", None):
        return [list(sample[:OPENING]) for sample in samples]
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


@torch.inference_mode()
def continued(model: PreTrainedModel, openings: Sequence[Sequence[int]], steps: int = STEPS) -> list[Window]:
    """Greedy texts after each opening, up to EOS or `steps` tokens, as windows that score them.

    Raises RefusedError for a model that transformers cannot generate with.
    """
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    greedy = GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0)
    greedy.eos_token_id = sorted(ends) or None
    checkpoint_config = model.generation_config
    model.generation_config = greedy  # without the checkpoint's penalties and sampling
    ids, mask = (
        pad_sequence([torch.tensor(line) for line in lines], batch_first=True, padding_side="left").to(model.device)
        for lines in (openings, [[1] * len(opening) for opening in openings])
    )
    try:
        output: Tensor = model.generate(input_ids=ids, attention_mask=mask, generation_config=greedy)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise RefusedError(f"{model.name_or_path} cannot write text: {explain(error)}; give --no-recall") from error
    finally:
        model.generation_config = checkpoint_config
    windows = []
    for number, (opening, text) in enumerate(zip(openings, output[:, ids.shape[1] :].tolist(), strict=True)):
        end = next((length for length, token in enumerate(text, 1) if token in ends), steps)
        windows.append(Window((*opening, *text[:end]), end, number))
    return windows


def agreement(hits: NDArray[np.bool_], windows: Sequence[Window]) -> dict[str, float]:
    """Mean number of tokens before the model leaves the baseline's text, with a 95 % bootstrap interval, and the share
    of texts that are equal to their end. `hits`: for each scored token of `windows`, whether it is the most probable.
    """
    ends = np.cumsum([window.scored for window in windows])[:-1]
    lengths = np.array([np.append(text_hits, False).argmin() for text_hits in np.split(hits, ends)], float)
    whole = np.array([window.scored for window in windows])
    mean, low, high = mean_interval(lengths, np.arange(len(lengths)))
    return {
        "texts": len(windows), "longest": float(whole.mean()), "tokens": mean, "tokens_low": low, "tokens_high": high,
        "whole": float((lengths == whole).mean()),
    }  # fmt: skip


def as_text(tokenizer: Any, windows: Sequence[Window]) -> list[dict[str, str]]:
    """Prompts and greedy texts, decoded for a report."""
    parts = [{"prompt": window.ids[: -window.scored], "text": window.ids[-window.scored :]} for window in windows]
    return [
        {name: str(tokenizer.decode(list(ids), skip_special_tokens=True)) for name, ids in part.items()}
        for part in parts
    ]
