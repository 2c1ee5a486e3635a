"""A checkpoint's chat template is rendered within limits of time, memory and length."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import check_refused, edit_json, run
from support.embedded import copy_source
from support.patches import forbid, wait_one_second_for_templates
from transformers import AutoTokenizer

from gqa.checkpoint.chat_template import render_chat
from gqa.checkpoint.read import read_checkpoint
from gqa.core.errors import RefusedError

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
# One call into C each, which nothing inside the process interrupts.
POWER = "{{ 7 ** 99999999 }}"
LONG_STRING = "{{ 'x' * 10 ** 11 }}"
LONG_CHAT = "{{ 'x' * 200000 }}"
ORDINARY = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message['content'] | "
    "trim }}{% generation %}{{ eos_token }}{% endgeneration %}{% endfor %}{{ messages | tojson }}"
)


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_one_second_for_templates(monkeypatch)


def with_template(directory: Path, template: str) -> Path:
    model = copy_source(directory)
    edit_json(model / "tokenizer_config.json", lambda config: config | {"chat_template": template})
    return model


def rendered(model: Path) -> str | None:
    return render_chat(AutoTokenizer.from_pretrained(model), read_checkpoint(model), "a")


def test_an_ordinary_template_renders_as_in_transformers(tmp_path: Path) -> None:
    model = with_template(tmp_path, ORDINARY)

    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )

    assert rendered(model) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOPS, "1 seconds of computing"),
        (POWER, "1 seconds of computing"),
        (LONG_STRING, "bytes of memory"),
        (LONG_CHAT, "200,000 characters"),
    ],
    ids=["loops", "power", "long string", "long chat"],
)
def test_a_template_without_end_is_refused_in_a_thread_too(
    template: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_template(tmp_path, template)
    if template == LONG_STRING:
        # To fill the memory takes more than a second where other programs compute too
        monkeypatch.undo()

    with ThreadPoolExecutor(1) as pool, pytest.raises(RefusedError) as error:
        pool.submit(rendered, model).result()

    assert says in str(error.value)
    assert "the chat template of copy (tokenizer_config.json)" in str(error.value)


def test_a_template_that_refuses_such_a_chat_is_none(tmp_path: Path) -> None:
    assert rendered(with_template(tmp_path, "{{ raise_exception('system first') }}")) is None


def test_a_model_without_template_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, "subprocess.Popen", "a process was started")

    assert rendered(copy_source(tmp_path)) is None


def test_the_command_names_the_template_that_does_not_end(tmp_path: Path) -> None:
    model = with_template(tmp_path, "x")
    (model / "chat_template.jinja").write_text(LOOPS)

    result = run("--kv-heads", 2, "--tokens", 2048, "-o", tmp_path / "out", model)

    check_refused(
        result,
        "the chat template of copy (chat_template.jinja) cannot be used",
        "1 seconds of computing",
    )
    assert not (tmp_path / "out").exists()
