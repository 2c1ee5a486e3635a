"""What lies beside a result: its record and its model card."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from test_custom_code import THEIRS
from test_families import all_tensors, write_checkpoint
from test_native import CASES
from tiny_models import TINY, build
from torch import Tensor
from training import fresh_accelerator, tiny_checkpoint, write_corpus

from gqa.checkpoint.provenance import SOURCE_CARD
from gqa.convert.api import convert_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(build(TINY["llama"], 4), tmp_path_factory.mktemp("provenance") / "model")


def convert(*words: object) -> dict[str, Tensor]:
    done = checkpoints.run(*words, "-q", "--overwrite")
    assert done.code == 0, done.err
    return all_tensors(Path(str(words[words.index("-o") + 1])))


def test_the_card_compares_the_base_model_with_the_result(source: Path, tmp_path: Path) -> None:
    """Counted from the files; where none are merged both columns say the same."""
    made = convert(source, "-g", 2, "--method", "mean", "-o", tmp_path / "2")
    assert checkpoints.run(source, "-g", 4, "-o", tmp_path / "4", "-q").code == 0
    rows = {}
    for groups in (2, 4):
        card = (tmp_path / str(groups) / "README.md").read_text()
        assert "\n- gqa\n" in card
        found = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
        assert found[0] == ["base model", "this model"]
        rows[groups] = {name: numbers for name, *numbers in found[1:]}
    (tmp_path / "2" / "README.md").open("a").write(f"{SOURCE_CARD}\n\nFirst words.\n")
    convert(tmp_path / "2", "-g", 1, "--method", "mean", "-o", tmp_path / "1")
    again = (tmp_path / "1" / "README.md").read_text()
    assert again.endswith(f"{SOURCE_CARD}\n\nFirst words.\n"), "cards do not grow with every step"
    assert again.count("key/value heads |") == 1
    before, after = (sum(t.numel() for t in tensors.values()) for tensors in (all_tensors(source), made))
    assert rows[2]["parameters"] == [f"{before:,}", f"{after:,}"]
    assert rows[2]["key/value heads"] == ["4", "2"]
    assert all(one != other for one, other in rows[2].values())
    assert all(one == other for one, other in rows[4].values())


# The source, arguments of the conversion, and what loads the result, with its own code or not.
CARDS: dict[str, tuple[str, str, str, bool]] = {
    "same class": ("llama", "-g 2 --method mean", "AutoModelForCausalLM", False),
    "no heads merged": ("llama", "-g 4", "AutoModelForCausalLM", False),
    "expanded": ("grouped", "-g 4", "AutoModelForCausalLM", False),
    "measured": ("llama", "-g 2 --tokens 512 --context 64", "AutoModelForCausalLM", False),
    "by layer": ("llama", "-g 1,2 --method mean", "AutoModelForCausalLM", True),
    "another class": ("gpt_neox", "-g 2 --method mean", "AutoModelForCausalLM", False),
    "encoder-decoder": ("t5", "-g 2 --method mean", "AutoModelForSeq2SeqLM", True),
    "without a head": ("headless", "-g 2 --method mean", "LlamaModel", False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    tiny_checkpoint(directory / "llama", kv_heads=4)
    tiny_checkpoint(directory / "grouped", kv_heads=2)
    for name, tiny in (("t5", THEIRS["t5"]), ("gpt_neox", CASES["gpt_neox"].tiny), ("headless", TINY["llama"])):
        write_checkpoint(build(tiny, 4), directory / name)
    checkpoints.edit_json(
        directory / "headless/config.json", lambda config: config.update(architectures=["LlamaModel"])
    )
    return directory


def check_card(out: Path, loader: str, needs_code: bool, tables: int) -> None:
    """Rendered, its tables are tables, and the first code loads the model."""
    html = MarkdownIt().enable("table").render(ModelCard.load(out / "README.md").text)
    assert (html.count("<table>"), "| |" in html, "<p>|" in html) == (tables, False, False), html
    tokens = MarkdownIt().parse(ModelCard.load(out / "README.md").text)
    code = next(token for token in tokens if token.type == "fence")
    assert (code.info, "trust_remote_code=True" in code.content) == ("python", needs_code)
    names = dict[str, Any]()
    exec(code.content, names)
    assert names["model"].config.name_or_path == out.name
    assert loader in names
    assert ("tokenizer" in names) == (out / "tokenizer.json").exists()
    assert "Options: <code>" in html


@pytest.mark.parametrize("kind", CARDS)
def test_a_card_is_rendered_and_loads_the_model(
    kind: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, words, loader, needs_code = CARDS[kind]
    monkeypatch.chdir(tmp_path)
    done = checkpoints.run(sources / name, *words.split(), "-o", "out", "-q")
    assert done.code == 0, done.err
    check_card(Path("out"), loader, needs_code, tables=1)
    text = Path("out/README.md").read_text()
    assert ("Quality is not measured" in text) == ("mean" in words)
    assert bool(re.search(r"perplexity x\d.*, recall .* on self-generated text", text)) == (kind == "measured")
    if kind == "by layer":
        data = write_corpus(Path("text.jsonl"), 4)
        training = (
            "--teacher",
            sources / name,
            "--steps",
            1,
            "--batch-size",
            1,
            "--context",
            16,
            "-o",
            "trained",
            "-q",
        )
        with fresh_accelerator():
            assert checkpoints.run("out", "--data", data, *training, program="gqa-uptrain").code == 0
        check_card(Path("trained"), loader, needs_code, tables=1)


@pytest.mark.parametrize(
    ("metadata", "tags"),
    [("tags: mine", ["mine"]), ("tags: [[mine], a, {b: 1}]", ["a"]), (f"license: {'[' * 400}{']' * 400}", None)],
)
def test_metadata_of_a_card(source: Path, tmp_path: Path, metadata: str, tags: list[str] | None) -> None:
    """Tags are words; a card that cannot be written again is carried along."""
    shutil.copytree(source, tmp_path / "model")
    card = f"---\n{metadata}\n---\n# Mine\n"
    (tmp_path / "model/README.md").write_text(card)
    convert(tmp_path / "model", "-g", 2, "--method", "mean", "-o", tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert text.endswith(f"{SOURCE_CARD}\n\n" + (card if tags is None else "# Mine\n"))
    if tags is not None:
        assert ModelCard(text).data.to_dict()["tags"] == [*tags, "gqa-convert", "grouped-query-attention", "gqa"]


def test_the_record_has_the_arguments_of_the_command(source: Path, tmp_path: Path) -> None:
    """Without the paths of this machine; a call from Python has none, and its card shows no command."""
    convert(source, "-g", 2, "--method", "mean", "-o", tmp_path / "out")
    record = json.loads((tmp_path / "out/gqa_conversion.json").read_text())
    assert record["argv"] == ["model", "-g", "2", "--method", "mean", "-o", "out", "-q", "--overwrite"]
    assert "\ngqa-convert model -g 2 --method mean -o out -q --overwrite\n" in (tmp_path / "out/README.md").read_text()
    made = convert_checkpoint(source, 2, tmp_path / "ours", method="mean").out
    assert json.loads((made / "gqa_conversion.json").read_text())["argv"] == []
    assert "gqa-convert model" not in (made / "README.md").read_text()
