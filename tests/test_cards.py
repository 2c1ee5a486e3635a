"""Model cards can be published as they are: metadata that the hub knows, one title, no place of
this machine.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from support.checkpoints import edit_json, run
from support.training import fresh_accelerator, options_for, tiny_checkpoint, trained, write_corpus

import gqa
from gqa.models.card import BASE_CARD, demote_headings
from gqa.uptrain.card import training_text

pytestmark = pytest.mark.usefixtures("alone")

# https://huggingface.co/docs/hub/model-cards; values are words or lists of words.
KEYS = {
    "base_model",
    "base_model_relation",
    "datasets",
    "language",
    "library_name",
    "license",
    "license_link",
    "license_name",
    "pipeline_tag",
    "tags",
}
BASE_README = """\
---
license: other
license_name: my-license
license_link: LICENSE.md
language: [en, de]
datasets:
- lab/corpus
base_model: lab/pretrained
pipeline_tag: text-generation
library_name: mlx
extra_gated_prompt: Agree!
model-index:
- name: x
  results: []
tags:
- mine
- grouped-query-attention
---
My model
========

<h1 align="center">Big</h1>

## Use

```
# a comment
```
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama`, in a directory whose name is that of no model."""
    directory = tmp_path_factory.mktemp("cards")
    (tiny_checkpoint(directory / "private-place" / "llama", kv_heads=4) / "README.md").write_text(
        BASE_README
    )
    write_corpus(directory / "private-place" / "text.jsonl", 6)
    return directory / "private-place"


@pytest.fixture(scope="module")
def converted(place: Path) -> Path:
    """Measured, by a command with absolute paths."""
    text = ("--data", place / "text.jsonl", "--tokens", 512, "--context", 16)
    done = run(place / "llama", "-g", 2, *text, "-o", place / "small", "-q")
    assert done.code == 0, done.err
    return place / "small"


def train(model: Path, out: Path, *words: object) -> dict[str, Any]:
    """A short training; its record."""
    size = ("--steps", 2, "--context", 16, "--batch-size", 2, "--validation-tokens", 64)
    with fresh_accelerator():
        done = run(model, *size, *words, "-o", out, "-q", program="gqa-uptrain")
    assert done.code == 0, done.err
    return dict(json.loads((out / "gqa_uptraining.json").read_text()))


@pytest.fixture(scope="module")
def distilled(place: Path, converted: Path) -> Path:
    train(converted, place / "distilled", "--data", place / "text.jsonl")
    return place / "distilled"


def metadata(model: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((model / "README.md").read_text().split("---\n")[1]))


def ours(model: Path) -> str:
    """The card without metadata and without the base model's card."""
    return str(ModelCard.load(model / "README.md").text).partition(BASE_CARD)[0]


@pytest.mark.parametrize("name", ["converted", "distilled"])
def test_metadata_are_what_the_hub_knows(name: str, request: pytest.FixtureRequest) -> None:
    """The license and the languages of the base model go on; its results and its gate do not."""
    model: Path = request.getfixturevalue(name)
    fields = metadata(model)
    assert set(fields) <= KEYS
    assert all(
        isinstance(word, str)
        for value in fields.values()
        for word in (value if isinstance(value, list) else [value])
    )
    assert {
        key: fields[key]
        for key in ("license", "license_name", "language", "datasets", "pipeline_tag")
    } == {
        "license": "other",
        "license_name": "my-license",
        "language": ["en", "de"],
        "datasets": ["lab/corpus"],
        "pipeline_tag": "text-generation",
    }
    assert fields["library_name"] == "transformers"
    assert fields["base_model"] == "lab/pretrained"
    assert fields["base_model_relation"] == "finetune"
    assert fields["license_link"] == "https://huggingface.co/lab/pretrained/blob/main/LICENSE.md"
    assert {"mine", "gqa", "grouped-query-attention"} <= set(fields["tags"])
    assert len({*fields["tags"]}) == len(fields["tags"])
    assert ("gqa-uptrain" in fields["tags"]) == (name == "distilled")


@pytest.mark.parametrize("name", ["converted", "distilled"])
def test_a_card_has_one_title(name: str, request: pytest.FixtureRequest) -> None:
    """The base model's headings are below the one of its card; its code stays."""
    text = ModelCard.load(request.getfixturevalue(name) / "README.md").text
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert re.findall(r"<h1[ >]", html) == ["<h1>"]
    levels = [
        int(level) for level in re.findall(r"<h([1-6])[ >]", html.partition("The base model")[2])
    ]
    assert levels == [3, 3, 4]
    assert "# a comment" in html


@pytest.mark.parametrize("name", ["converted", "distilled"])
def test_a_card_has_no_place_of_this_machine(name: str, request: pytest.FixtureRequest) -> None:
    text = (request.getfixturevalue(name) / "README.md").read_text()
    assert [word for word in ("private-place", "/tmp", str(Path.home())) if word in text] == []


def test_the_card_of_a_conversion_says_what_it_cost(converted: Path) -> None:
    """With the numbers of its record, and what they were measured on."""
    text, record = ours(converted), json.loads((converted / "gqa_conversion.json").read_text())
    ratio = record["quality"]["ratio"]
    assert re.search(
        rf"perplexity x{ratio:.2f} \(95% interval \S+\) on [\d,]+ tokens of held-out blocks of "
        r"text\.jsonl in windows of \d+, recall ",
        text,
    )
    assert "`llama` with 2 instead of 4 key/value heads" in text
    assert "| KV cache per token | 512 bytes | 256 bytes |" in text
    assert "gqa-convert llama -g 2 --data text.jsonl" in text
    for name in ("torch", "transformers"):
        assert f"{name} {record['versions'][name]}" in text
    assert "## Limits" in text


def test_the_card_of_a_conversion_lists_what_made_the_result(place: Path, tmp_path: Path) -> None:
    """Without the check, another part of the text calibrates."""
    text = {"data": [str(place / "text.jsonl")], "tokens": 512, "context": 16}
    unchecked = gqa.convert_model(
        place / "llama", kv_heads=2, output=tmp_path / "small", check=False, quiet=True, **text
    )
    assert "`check=False`" in ours(unchecked.path)
    kept = gqa.convert_model(place / "llama", kv_heads=4, output=tmp_path / "same", quiet=True)
    assert "`method=" not in ours(kept.path)


def test_the_card_of_a_training_says_what_it_gained(converted: Path, distilled: Path) -> None:
    """And what the conversion had measured before it."""
    text, record = ours(distilled), json.loads((distilled / "gqa_uptraining.json").read_text())
    losses, conversion = (
        record["losses"],
        json.loads((converted / "gqa_conversion.json").read_text()),
    )
    assert (
        "then distilled from the base model (`gqa-uptrain`): 64 tokens of `text.jsonl` in 2 steps "
        "(64 of the " in text
    )
    for title, name in (
        ("KL divergence from the teacher", "distillation"),
        ("cross-entropy", "validation"),
    ):
        assert (
            f"| {title} | {losses[f'{name}_before']:.4f} | {losses[f'{name}_after']:.4f} |" in text
        )
    ratio = conversion["quality"]["ratio"]
    before = "Before training, measured by the conversion against the base model: perplexity"
    assert f"{before} x{ratio:.2f}" in text
    assert "The perplexity of this model was not compared with that of the base model" in text
    assert "| key/value heads | 4 | 2 |" in text
    assert "lora_rank" not in text


@pytest.mark.parametrize(
    ("data", "repeats", "says"),
    [
        ("self", True, "generated text in 2 steps (..., with repeated passages)"),
        ("selfies.jsonl", True, "`selfies.jsonl` in 2 steps (..., with repeated passages)"),
        ("text.jsonl", False, "`text.jsonl` in 2 steps (..., read 4.00 times)"),
    ],
)
def test_a_card_says_what_was_read(distilled: Path, data: str, repeats: bool, says: str) -> None:
    record = json.loads((distilled / "gqa_uptraining.json").read_text())
    record |= {"data": [data], "tokens": 64, "distinct_tokens": 16, "data_tokens": 16}
    record["options"]["repeats"] = repeats
    expected = says.replace("...", "16 of the 16 tokens of the data")
    assert f"64 tokens of {expected}" in training_text(record)


def test_lora_has_a_rank(converted: Path, place: Path, tmp_path: Path) -> None:
    train(converted, tmp_path / "out", "--data", place / "text.jsonl", "--train", "lora")
    assert "`lora_rank=16`" in ours(tmp_path / "out")


def test_a_teacher_of_the_same_name_is_another_model(place: Path, tmp_path: Path) -> None:
    """Without a record nothing says that it is the base model."""
    teacher = shutil.copytree(place / "llama", tmp_path / "llama")
    data = place / "text.jsonl"
    train(place / "llama", tmp_path / "out", "--data", data, "--teacher", teacher)
    assert "`llama`, further distilled from another model of the same name (" in ours(
        tmp_path / "out"
    )


def test_a_teacher_is_the_base_model_only_where_that_is(
    converted: Path, place: Path, tmp_path: Path
) -> None:
    other = tiny_checkpoint(tmp_path / "llama", kv_heads=4)
    record = train(converted, tmp_path / "out", "--data", place / "text.jsonl", "--teacher", other)
    assert record["teacher"] == "llama"
    assert record["teacher_is_base"] is False
    assert "then distilled from `llama` (" in ours(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"quality": {"ratio": "x"}},
        {"quality": {"ratio": None}},
        {"quality": []},
        {"maps": 3},
        {"heads": {"kv_before": "4"}},
        {"heads": {"kv_before": 4, "kv_after": [1, "2"]}},
        {"kv_cache": {"bytes_per_token_before": "a"}},
        {"source": "x"},
        {"source": {"model": 3}},
        {"options": {"method": ["x"]}},
    ],
)
def test_a_record_that_was_edited_leaves_its_numbers_out(
    change: dict[str, Any], converted: Path, place: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(converted, tmp_path / "model"))
    edit_json(model / "gqa_conversion.json", lambda record: record | change)
    data = (str(place / "text.jsonl"),)
    trained(
        options_for(
            model, tmp_path / "out", data=data, teacher="none", steps=1, context=16, batch_size=1
        )
    )
    assert "## How it was made" in ours(tmp_path / "out")


def test_the_base_model_of_the_hub_is_linked(
    hub: Any, machine: Any, place: Path, tmp_path: Path
) -> None:
    """By its id, also in a card that is made from the result."""
    hub.repo("lab/base", place / "llama")
    done = machine.run("lab/base", "-g", 2, "--method", "mean", "-o", tmp_path / "small", "-q")
    assert done.code == 0, done.err
    assert (
        run(tmp_path / "small", "-g", 1, "--method", "mean", "-o", tmp_path / "smaller", "-q").code
        == 0
    )
    train(
        tmp_path / "small",
        tmp_path / "trained",
        "--data",
        place / "text.jsonl",
        "--teacher",
        "none",
    )
    for name in ("small", "trained"):
        assert (
            "[lab/base](https://huggingface.co/lab/base) with 2 instead of 4 key/value heads"
            in ours(tmp_path / name)
        )
    for name in ("small", "smaller", "trained"):
        assert metadata(tmp_path / name)["base_model"] == "lab/base"
        assert (
            metadata(tmp_path / name)["license_link"]
            == "https://huggingface.co/lab/base/blob/main/LICENSE.md"
        )


@pytest.mark.parametrize(
    ("text", "demoted"),
    [
        ("# A\ntext\n## B", "### A\ntext\n#### B"),
        ("## A\n###### B", "### A\n###### B"),
        ("### A\n#### B", "### A\n#### B"),
        ("A\n===\n\nB\n---", "### A\n\n#### B"),
        ("```\n# code\n```\n# A", "```\n# code\n```\n### A"),
        ("~~~\n```\n# code\n~~~\n## A", "~~~\n```\n# code\n~~~\n### A"),
        ("text\n\n---\n\n| a |\n|---|", "text\n\n---\n\n| a |\n|---|"),
        ('<h1 align="x">A</h1>\n<h2>B</h2>', '<h3 align="x">A</h3>\n<h4>B</h4>'),
        ("#hashtag\n#", "#hashtag\n###"),
        ("", ""),
    ],
)
def test_headings_move_below_that_of_the_base_models_card(text: str, demoted: str) -> None:
    """All by as much; a card that was moved before stays."""
    assert demote_headings(text) == demoted
    assert demote_headings(demoted) == demoted
