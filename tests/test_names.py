"""Names out of checkpoints and data files, with any characters: on the terminal, in model cards and
in reports.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import save_file
from support.checkpoints import Result, edit_json, load, run
from support.repository import PACKAGES
from support.training import fresh_accelerator, tiny_checkpoint, write_corpus

from gqa.core.errors import one_line
from gqa.core.escape import code_block, code_span, markdown, python_string, shell_line, visible
from gqa.models.card import BASE_CARD, model_name

ROOT = Path(__file__).parents[1]
# An escape sequence, a bell, text from right to left, a line break, HTML, a cell of a table, code,
# a link, emphasis.
HOSTILE = "m\x1b[31m\x07\u202e\nx<script>|`x`[x](y)*z*"


def render(text: str) -> str:
    return str(MarkdownIt().enable("table").render(text))


def controls(text: str) -> set[str]:
    """Characters that steer a terminal or hide text."""
    return {
        character for character in text if not character.isprintable() and character not in "\n\t"
    }


def check_printed(done: Result) -> None:
    """A line break in a name begins no line."""
    assert done.code == 0, done.err
    printed = done.out + done.err
    assert "script" in printed, "the name was not printed at all"
    assert controls(printed) == set()
    assert not re.search(r"^x<script>", printed, re.MULTILINE)


def check_card(path: Path) -> str:
    text = (path / "README.md").read_text()
    assert controls(text) == set()
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert "base_model" not in metadata, "it is no model id"
    ours = ModelCard(text).text.partition(BASE_CARD)[0]
    html = render(ours)
    assert "script" in html, "the name is not in the card at all"
    assert "<script" not in html
    assert 'href="y"' not in html
    assert "<em>" not in html
    assert html.count("<h1>") == 1
    return text


def check_page(path: Path) -> None:
    html = (path / "report.html").read_text()
    assert controls(html) == set()
    assert html.count("&lt;script&gt;") > 2
    assert html.count("<script") == 1, "the page has one of its own"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text of such names; a config value too."""
    place = tmp_path_factory.mktemp("hostile")
    model = tiny_checkpoint(place / HOSTILE, kv_heads=4)
    edit_json(model / "config.json", lambda config: config.update({HOSTILE: HOSTILE}))
    (model / "README.md").write_text(
        f"---\nlicense: mit\ntags: ['{'x' * 3}', \"a\\e[2Jb\"]\n---\n# {HOSTILE}\n"
    )
    write_corpus(place / f"{HOSTILE}.jsonl", 6)
    return place


@pytest.fixture(scope="module")
def converted(hostile: Path) -> tuple[Result, Path]:
    out = hostile / f"{HOSTILE}-small"
    return run(hostile / HOSTILE, "-g", 2, "--method", "mean", "-v", "-o", out), out


def test_a_conversion(converted: tuple[Result, Path]) -> None:
    done, out = converted
    check_printed(done)
    check_card(out)


def test_a_tensor(hostile: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(hostile / HOSTILE, tmp_path / "model"))
    tensors = load(model) | {f"model.{HOSTILE}": torch.ones(1)}
    for path in model.glob("model*.safetensors*"):
        path.unlink()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = run(model, "-g", 2, "--method", "mean", "-v", "-o", tmp_path / "out")
    check_printed(done)
    assert "does not read these copied tensors" in done.err
    check_printed(run(model, "-g", 2, "--method", "mean", "--dry-run"))


@pytest.mark.usefixtures("alone")
def test_a_training(hostile: Path, converted: tuple[Result, Path]) -> None:
    """With a record that names its base model so, and text of such a name."""
    out = hostile / f"{HOSTILE}-trained"
    data, size = hostile / f"{HOSTILE}.jsonl", ("--context", 32, "--batch-size", 1)
    done = run(converted[1], "--data", data, "--steps", 1, *size, "-o", out, program="gqa-uptrain")
    check_printed(done)
    assert "distilled from the base model" in check_card(out)
    record = json.loads((converted[1] / "gqa_conversion.json").read_text())
    assert record["source"]["model"] == HOSTILE


@pytest.mark.usefixtures("alone")
def test_a_record_that_names_another_base_model(
    hostile: Path, converted: tuple[Result, Path], tmp_path: Path
) -> None:
    edit_json(
        converted[1] / "gqa_conversion.json",
        lambda record: record["source"].update(model=f"other {HOSTILE}", path="no"),
    )
    data, size = hostile / f"{HOSTILE}.jsonl", ("--context", 32, "--batch-size", 1)
    done = run(
        converted[1],
        "--data",
        data,
        "--steps",
        1,
        *size,
        "-o",
        tmp_path / "out",
        program="gqa-uptrain",
    )
    check_printed(done)
    assert "was moved or deleted" in done.out
    check_card(tmp_path / "out")


def test_an_evaluation(hostile: Path, converted: tuple[Result, Path], tmp_path: Path) -> None:
    data = ("--data", hostile / f"{HOSTILE}.jsonl", "--tokens", 300)
    done = run(
        hostile / HOSTILE,
        converted[1],
        *data,
        "--no-recall",
        "-o",
        tmp_path / "report",
        program="gqa-eval",
    )
    check_printed(done)
    check_page(tmp_path / "report")


@pytest.mark.usefixtures("alone")
def test_a_study(hostile: Path, tmp_path: Path) -> None:
    options = (
        "--methods",
        "mean",
        "--kv-heads",
        1,
        "--alphas",
        0,
        "--context",
        64,
        "--skip",
        "kl,recall",
    )
    data = ("--data", hostile / f"{HOSTILE}.jsonl", "--validation-fraction", 0.5)
    with fresh_accelerator():
        done = run(
            hostile / HOSTILE, *data, *options, "-o", tmp_path / "study", program="gqa-ablate"
        )
    check_printed(done)
    check_page(tmp_path / "study")


REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "a column": ("gqa-eval", ("--data", "DATA", "--text-column", HOSTILE)),
    "a text": ("gqa-eval", ("--data", f"./{HOSTILE}.txt")),
    "a method": ("gqa-convert", ("-g", 2, "--method", HOSTILE)),
    "a tokenizer's class": ("gqa-eval", ("--data", "DATA")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_one_line(name: str, hostile: Path, tmp_path: Path) -> None:
    program, words = REFUSED[name]
    model = tiny_checkpoint(tmp_path / HOSTILE, kv_heads=4)
    if "tokenizer" in name:
        edit_json(
            model / "tokenizer_config.json",
            lambda config: config.update(tokenizer_class=HOSTILE, tokenizer_type=1),
        )
        (model / "tokenizer.json").write_text("{}")
    data = hostile / f"{HOSTILE}.jsonl"
    done = run(model, *(data if word == "DATA" else word for word in words), program=program)
    done.expect(2, out="", err_lines=1)
    assert controls(done.err) == set()


def test_a_traceback_is_printed_safely(tmp_path: Path) -> None:
    done = run(tmp_path / HOSTILE, "-g", 2, "-v")
    assert "Traceback" in done.err
    assert controls(done.err) == set()


# ------------------------------------------------------------------------- the functions themselves


def test_the_markdown_of_a_name_is_its_text() -> None:
    """Whatever is in it; a control: the name itself is markup."""
    texts = [
        HOSTILE,
        "a_b_c",
        "https://x.y",
        "www.x.y",
        "a@b.c",
        "**",
        "# h",
        "~~s~~",
        "$x$",
        "&amp;",
        "\\",
        "![i](u)",
        "> quoted",
        "a <b>",
    ]
    for text in texts:
        assert unescape(MarkdownIt().renderInline(markdown(text))) == one_line(text)
    assert "<script>" in render(HOSTILE)
    assert "<em>" in render(HOSTILE)


def test_ordinary_text_has_no_backslashes() -> None:
    """Cards are read as text, too."""
    text = "perplexity x1.05 (1.04-1.06), recall 82% -> 81%: trade-off"
    assert markdown(text) == text


@pytest.mark.parametrize("text", ["`", "``", "a`b", "`a`", "``a`` b`", " ", "", HOSTILE])
def test_a_span_and_a_block_of_code_end_where_they_should(text: str) -> None:
    span = render(f"before {code_span(text)} after")
    assert re.fullmatch(r"<p>before <code>[^<]*</code> after</p>\n", span), span
    block = render(code_block([f"x{text}", text, "```", "~~~"]) + "\n\nafter")
    assert re.fullmatch(r"<pre><code>[^<]*</code></pre>\n<p>after</p>\n", block), block


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "it's",
        'a"b',
        "$HOME `id` \\",
        "two\nlines",
        HOSTILE,
        "\x1b7",
        "a\udcffb",
        "é\u202e1",
    ],
)
def test_a_shell_reads_the_word_that_was_quoted(text: str) -> None:
    line = shell_line(["printf", "%s", text])
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout == text.encode(errors="surrogateescape")


@pytest.mark.parametrize("text", ["plain", 'a"b', "it's", "\\", HOSTILE])
def test_python_reads_the_string_that_was_quoted(text: str) -> None:
    assert ast.literal_eval(python_string(text)) == text
    assert python_string(text).isprintable()


def test_text_of_several_lines_stays_so() -> None:
    """Also in other scripts: marks that join or order letters are part of the text."""
    assert visible("a\n\tb\x1b[2J\x07\r\u202e\x85") == "a\n\tb\\x1b[2J\\x07\\r\\u202e\\x85"
    assert visible(
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u200f \U0001f469\u200d\U0001f4bb"
    ) == ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u200f \U0001f469\u200d\U0001f4bb")


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "gpt2"])
def test_a_hub_id_is_a_link(name: str) -> None:
    assert f'<a href="https://huggingface.co/{name}">{name}</a>' in render(model_name(name, True))
    assert "href" not in render(model_name(name, False))


@pytest.mark.parametrize("name", [HOSTILE, "a/b/c", "../x", "a b", "x](y)", ""])
def test_what_is_no_hub_id_is_no_link(name: str) -> None:
    assert "href" not in render(model_name(name, True))


def test_nothing_prints_but_the_console() -> None:
    """It escapes what it prints; `click.echo` and `print` do not."""
    calls = set[tuple[str, str]]()
    for folder in PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                calls |= {(file.name, name) for name in printing(node)}
    assert calls == {("console.py", "echo")}


def printing(node: ast.AST) -> set[str]:
    """The names of functions that print, if a node is a call of one."""
    name: Any = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    called = getattr(name, "attr", getattr(name, "id", ""))
    return {called} & {"echo", "secho", "print", "pprint", "print_exc", "print_exception"}
