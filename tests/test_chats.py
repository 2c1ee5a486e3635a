"""Chat data: what is recognized, what a model reads of it, and which tokens are trained on."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.chats import (
    CHATML,
    LAST_THINKS,
    LLAMA2,
    MARKED,
    TEMPLATES,
    chat,
    sharegpt,
    text_of,
    with_template,
    write_chats,
)
from support.embedded import tokenizer
from support.hub_server import Hub, Machine
from support.patches import use_data_cache, use_data_hub, wait_one_second_for_templates

from gqa.core.errors import RefusedError, TextError
from gqa.corpus.chats import Chat, chat_text, spoken_text
from gqa.corpus.encoders import ChatEncoder, Encoded
from gqa.corpus.specs import parse_source

CHATS = [chat(number, turns=1 + number % 3) for number in range(6)]


@cache
def encoder_of(template: str, assistant_only_loss: bool) -> ChatEncoder:
    """One for all tests: its process takes seconds to start."""
    return ChatEncoder(with_template(template), "m", assistant_only_loss=assistant_only_loss)


def encoded(template: str, *chats: Any, assistant_only_loss: bool = False) -> list[Encoded]:
    encoder = encoder_of(template, assistant_only_loss)
    return encoder.encode([text_of(messages) for messages in chats])


def counted_text(one: Encoded) -> str:
    """What of a chat counts in the loss."""
    assert one.loss_mask is not None
    counted = zip(one.tokens, one.loss_mask, strict=True)
    text = tokenizer().decode([token for token, counts in counted if counts])
    assert isinstance(text, str)
    return text


def test_long_reasoning_is_no_template_that_does_not_end() -> None:
    """A template may write other fields of a message too, however long they are."""
    template = (
        "{% for message in messages %}{{ message.reasoning }}{{ message.content }}{% endfor %}"
    )
    long = "a " * 60_000
    message = {"role": "assistant", "content": "b", "reasoning": long}
    (one,) = ChatEncoder(with_template(template), "m").encode([text_of([message])])
    assert len(one.tokens) > 60_000


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_tokens_are_those_of_transformers(template: str) -> None:
    known = with_template(template)

    expected = [known.apply_chat_template(one, tokenize=True)["input_ids"] for one in CHATS]

    assert [one.tokens for one in encoded(template, *CHATS)] == expected
    assert [one.tokens for one in encoded(template, *CHATS, assistant_only_loss=True)] == expected
    assert all(one.loss_mask is None for one in encoded(template, *CHATS))


def test_the_mask_of_a_template_with_marks_is_that_of_transformers() -> None:
    settings = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = [
        with_template(MARKED).apply_chat_template(one, **settings)["assistant_masks"]
        for one in CHATS
    ]

    masks = [one.loss_mask for one in encoded(MARKED, *CHATS, assistant_only_loss=True)]

    assert masks == expected
    assert any(masks)
    assert all(0 < sum(mask) < len(mask) for mask in masks if mask)


def test_the_beginnings_of_a_chat_give_the_mask_of_the_marks() -> None:
    without_marks = encoded(CHATML, *CHATS, assistant_only_loss=True)

    assert without_marks == encoded(MARKED, *CHATS, assistant_only_loss=True)
    (one,) = encoded(CHATML, chat(7), assistant_only_loss=True)
    answers = [message["content"] + "</s>" for message in chat(7) if message["role"] != "user"]
    assert counted_text(one) == "".join(answers)


def test_a_template_without_a_prompt_for_the_assistant_has_a_mask_too() -> None:
    (one,) = encoded(LLAMA2, chat(7), assistant_only_loss=True)

    answers = [f" {one['content']} </s>" for one in chat(7) if one["role"] == "assistant"]
    assert counted_text(one).split() == "".join(answers).split()


def test_a_template_that_writes_earlier_turns_in_another_way_is_refused() -> None:
    assert len(encoded(LAST_THINKS, chat(0))) == 1

    with pytest.raises(
        RefusedError, match=r"formats message 2 of a chat differently.*add .* marks"
    ):
        encoded(LAST_THINKS, chat(0), assistant_only_loss=True)


def test_a_template_that_refuses_a_chat_is_named_with_the_chat() -> None:
    both = [chat(0), chat(1)[1:]]

    with pytest.raises(
        TextError,
        match=r"template of m refuses the chat that begins with 'answer 0: it is 1.*roles",
    ):
        encoded(LLAMA2, *both)


def test_a_chat_that_begins_with_the_assistant_is_named_if_nothing_is_written_before_it() -> None:
    """The templates of Llama 3 and Qwen2.5 read the first message outside of their loop, too."""
    template = "{% if messages[0].role == 'system' %}{{ '[system]' }}{% endif %}" + CHATML
    answers_first = chat(0)[1:]
    assert len(encoded(template, answers_first)) == 1

    says = (
        r"begins with the assistant \('answer 0: it is 0.*'\), and the chat template of m writes "
        r"no prompt before it \(.*no element 0\); add .* marks"
    )
    with pytest.raises(TextError, match=says):
        encoded(template, answers_first, assistant_only_loss=True)


def test_a_chat_that_begins_with_the_assistant_is_named_if_it_begins_in_another_way() -> None:
    """As where the template writes a system prompt of its own before the first message."""
    template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if loop.first %}{{ '[system]' }}{% endif %}",
    )
    assert template != CHATML

    with pytest.raises(
        TextError, match=r"begins with the assistant \('answer 0.*a chat begins in another way"
    ):
        encoded(template, chat(0)[1:], assistant_only_loss=True)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 sec"),
        ("{{ 'x' * 10 ** 11 }}", "bytes of memory"),
        ("{{ 'x' * 200000 }}", "200,000 characters"),
    ],
    ids=["loops", "memory", "long"],
)
def test_a_template_without_end_is_refused(
    template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_one_second_for_templates(monkeypatch)

    with pytest.raises(RefusedError, match=says):
        ChatEncoder(with_template(template), "m").encode([text_of(chat(0))])


def test_one_process_renders_all_chats_and_ends_with_its_encoder() -> None:
    encoder = ChatEncoder(with_template(CHATML), "m")
    for number in range(3):
        encoder.encode([text_of(chat(number))])
    process = encoder._renderer._process
    assert process
    assert process.poll() is None

    del encoder

    assert process.poll() is not None


def test_sharegpt_is_the_same_document(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    one = write_chats(tmp_path / "a.jsonl", [system, *chat(0)], chat(1))
    other = write_chats(
        tmp_path / "b.jsonl",
        sharegpt([system, *chat(0)]),
        sharegpt(chat(1)),
        column="conversations",
    )

    rows = [*parse_source(str(one)).rows()]

    assert rows == [*parse_source(str(other)).rows()]
    assert rows == [Chat((text_of(messages),)) for messages in ([system, *chat(0)], chat(1))]
    assert all(isinstance(row, Chat) for row in rows)


def write_table(path: Path, *chats: Any) -> Path:
    pq.write_table(pa.table({"id": range(len(chats)), "messages": chats}), path)
    return path


def test_chats_are_read_from_every_format_of_tables(tmp_path: Path) -> None:
    write_chats(tmp_path / "a.jsonl", *CHATS)
    rows = [{"messages": one} for one in CHATS]
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    write_table(tmp_path / "c.parquet", *CHATS)
    table = pa.table({"messages": CHATS})
    with (
        pa.OSFile(str(tmp_path / "d.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)

    expected = [Chat((text_of(one),)) for one in CHATS]
    for name in ("a.jsonl", "b.json", "c.parquet", "d.arrow"):
        assert [*parse_source(str(tmp_path / name)).rows()] == expected, name


def test_a_column_of_text_comes_before_one_of_chats(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "plain", "messages": chat(0), "name": "n"}) + "\n")

    assert [*parse_source(str(path)).rows()] == [("plain",)]
    assert [*parse_source(str(path), text_column="name").rows()] == [("n",)]
    assert not parse_source(str(path)).has_chats
    assert [*parse_source(str(path), text_column="messages").rows()] == [(text_of(chat(0)),)]
    assert parse_source(str(path), text_column="messages").has_chats


def test_a_column_of_that_name_may_have_text(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", "plain")

    assert [*parse_source(str(path), text_column="messages").rows()] == [("plain",)]
    with pytest.raises(TextError, match="has no column 'text'"):
        next(parse_source(str(path)).rows())


def test_other_columns_of_lists_are_no_chats(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "a.jsonl", chat(0), column="dialog")

    with pytest.raises(TextError, match="column 'dialog' has type list; pass a column of text"):
        next(parse_source(str(path), text_column="dialog").rows())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "it has type int"),
        (["hello"], "a message has type str"),
        ([{"content": "x"}], "a message has no role"),
        ([{"role": "user"}], "the content of a message has type NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has type list"),
        ([{"from": "alien", "value": "x"}], "a message is from 'alien'"),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    path = write_chats(tmp_path / "a.jsonl", value)

    with pytest.raises(TextError) as error:
        next(parse_source(str(path)).rows())

    assert says in str(error.value)
    assert "column 'messages' is not a chat" in str(error.value)
    assert 'pass a list of {"role"' in str(error.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_of_the_hub(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    use_data_hub(monkeypatch, hub.endpoint)
    use_data_cache(monkeypatch, tmp_path / "cache")
    (tmp_path / "data").mkdir()
    write_chats(tmp_path / "data/train.jsonl", *map(sharegpt, CHATS), column="conversations")
    hub.repo("lab/chats", tmp_path / "data")

    with machine.entered():
        rows = [*parse_source("lab/chats", streaming=streaming).rows()]

    assert rows == [Chat((text_of(one),)) for one in CHATS]


def test_columns_of_a_struct_are_messages_too() -> None:
    """As older versions of `datasets` return a list of structs."""
    columns = {key: [one[key] for one in chat(0)] for key in ("role", "content")}

    assert chat_text(columns, "messages", "a test") == text_of(chat(0))


def test_the_order_of_keys_does_not_matter() -> None:
    swapped = [dict(reversed(one.items())) for one in chat(0)]

    assert list(swapped[0]) != list(chat(0)[0])
    assert text_of(swapped) == text_of(chat(0))


def test_keys_without_a_value_are_left_out_and_others_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}

    assert json.loads(text_of([call])) == [{"role": "assistant", "tool_calls": [{"name": "f"}]}]


def test_system_prompts_are_not_searched_for_passages() -> None:
    system = {"role": "system", "content": "a prompt that all chats share"}

    assert spoken_text(text_of([system, *chat(0, 1)])) == spoken_text(text_of(chat(0, 1)))
    assert "question 0 of chat 0" in spoken_text(text_of(chat(0, 1)))
