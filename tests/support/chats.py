"""Chats, chat templates, and data sets of chats, as the tests of chat data need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gqa.corpus.chats import chat_text
from support.checkpoints import edit_json
from support.embedded import copy_source, tokenizer

# As ChatML: every message has a role and an end; the assistant's part is marked for transformers.
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message.role + ']\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ message.content + eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
CHATML = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Llama 2: no prompt for the assistant, users' messages in brackets; roles must take turns.
LLAMA2 = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Shows what an assistant thinks in the last message alone, as templates of reasoning models do.
LAST_THINKS = CHATML.replace(
    "{{ message.content + eos_token }}",
    "{% if loop.last %}{{ 'hm ' }}{% endif %}{{ message.content + eos_token }}",
)
TEMPLATES = {"marked": MARKED, "chatml": CHATML, "llama2": LLAMA2}

Messages = list[dict[str, str]]


def chat(number: int, turns: int = 2) -> Messages:
    """A chat that says its number, of so many questions and answers."""
    return [
        {"role": role, "content": content}
        for turn in range(turns)
        for role, content in (
            ("user", f"question {turn} of chat {number}: what is {number} + {turn}?"),
            ("assistant", f"answer {turn}: it is {number + turn}, as anybody can see"),
        )
    ]


def sharegpt(messages: Messages) -> Messages:
    """The same chat in the other form."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in messages]


def write_chats(path: Path, *chats: Any, column: str = "messages") -> Path:
    """JSON lines of chats, each with a number."""
    rows = [{"id": number, column: one} for number, one in enumerate(chats)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(messages: Messages) -> str:
    """The text by which a chat is known to encoders."""
    text = chat_text(messages, "messages", "a test")
    assert text
    return text


def with_template(template: str) -> Any:
    """The embedded tokenizer with a chat template, as transformers loads it."""
    import copy

    result = copy.deepcopy(tokenizer())
    result.chat_template = template
    return result


def chat_model(place: Path, template: str, name: str = "copy") -> Path:
    """A copy of the embedded checkpoint with a chat template."""
    model = copy_source(place, name)
    edit_json(model / "tokenizer_config.json", lambda config: config | {"chat_template": template})
    return model
