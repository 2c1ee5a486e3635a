"""Chats in data sets: what a record looks like, and the text that stands for it.

A column `messages` or `conversations` has a list of messages in one of two forms:

    {"role": "user", "content": "..."}          as transformers, TRL and the APIs have them
    {"from": "human", "value": "..."}           ShareGPT

A chat is kept as the JSON text of its messages in the first form, so the same chat is the same
document whatever form and file it comes from: its hash decides the order of training and whether it
is held out. Imports nothing that takes long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gqa.core.errors import TextError

CHAT_COLUMNS = ("messages", "conversations")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_FORMS = (
    'a list of {"role": ..., "content": ...} or of {"from": "human", "gpt" or "system", '
    '"value": ...}'
)

Message = dict[str, Any]


class Chat(tuple[Any, ...]):
    """A row whose one text is a chat (`chat_text`), so that it is not taken for plain text."""


def chat_text(value: Any, column: str, where: str) -> str | None:
    """The JSON text of a chat's messages, in transformers' form; None if there is no message.

    Raises TextError if the value is no list of messages.
    """
    if isinstance(value, Mapping):  # a list of structs as older versions of `datasets` return it
        value = _rows_of_columns(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _not_messages(column, where, f"it has type {type(value).__name__}")

    messages = [_in_order(_message(entry, column, where)) for entry in value]
    try:
        return json.dumps(messages, ensure_ascii=False)
    except TypeError as error:  # of a Parquet file: a date, bytes
        raise _not_messages(column, where, str(error)) from error


def _rows_of_columns(value: Mapping[str, Any]) -> Any:
    """{"role": [a, b], "content": [c, d]} -> a list of two messages; anything else as it is."""
    columns = list(value.values())
    if not columns or not all(isinstance(column, list) for column in columns):
        return value
    if len({len(column) for column in columns}) > 1:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def _message(entry: Any, column: str, where: str) -> Message:
    """One message in transformers' form, without keys that have no value."""
    if not isinstance(entry, Mapping):
        raise _not_messages(column, where, f"a message has type {type(entry).__name__}")

    message = {str(key): value for key, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        content = message.pop("value", None)
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise _not_messages(column, where, f"a message is from {speaker!r}")
        # What else ShareGPT has in a message (weights, names of models) no template reads.
        message = {"role": role, "content": content}

    if not isinstance(message.get("role"), str):
        raise _not_messages(column, where, "a message has no role")
    content = message.get("content")
    calls_tools = content is None and "tool_calls" in message
    if not isinstance(content, str) and not calls_tools:
        kind = type(content).__name__
        raise _not_messages(column, where, f"the content of a message has type {kind}")
    return message


def _in_order(message: Message) -> Message:
    """A message with its role first and its content next, whatever order a file has."""
    first = {key: message[key] for key in ("role", "content") if key in message}
    return first | message


def _not_messages(column: str, where: str, reason: str) -> TextError:
    return TextError(f"{where}: column {column!r} is not a chat: {reason}; pass {_FORMS}")


def messages_of(text: str) -> list[Message]:
    """The messages of a chat's text."""
    messages: list[Message] = json.loads(text)
    return messages


def spoken_text(text: str) -> str:
    """What users and assistants say in a chat: its contents without system prompts, which many
    chats share.
    """
    contents = [
        message["content"]
        for message in messages_of(text)
        if message["role"] != "system" and "content" in message
    ]
    return "\n".join(contents)
