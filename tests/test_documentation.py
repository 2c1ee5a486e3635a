"""README.md, docs/ and the notebooks: every command that they show parses, those of the README run in order, and so do
all blocks of Python; on tiny models of the names that stand there, with little text. What is published: one version,
links that lead somewhere, workflows, extras of the image. `make lint docs` checks the Dockerfile and the site.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import run
from markdown_it import MarkdownIt
from training import fresh_accelerator, tiny_checkpoint, write_corpus

import gqa

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = {
    "gqa-convert": "convert.cli", "gqa-uptrain": "uptrain.cli",
    "gqa-eval": "eval.cli", "gqa-ablate": "eval.study.cli",
}  # fmt: skip
# Query and KV heads of the stand-ins.
MODELS = {"examples/stdlib-mha": (8, 8), "Llama-2-7b-hf": (32, 32)}
# Numbers that take hours become small ones. What is true of the command stays: its options, its order, its names.
LIMITS = {"--tokens": "512", "--context": "64", "--batch-size": "2"}
# Options that a command has besides.
ADDED = {
    "gqa-convert": {"--method": "mean"},
    "gqa-uptrain": {"--tokens": "512", "--context": "64", "--batch-size": "2", "--heldout-tokens": "256"},
    "gqa-eval": {"--no-recall": "", "--tokens": "400"},
}  # fmt: skip


def blocks(page: Path, *languages: str) -> list[tuple[list[int], str]]:
    """The lines and the text of a page's blocks."""
    return [
        (t.map or [], t.content)
        for t in MarkdownIt().parse(page.read_text())
        if t.type == "fence" and t.info in languages
    ]


def commands(page: Path) -> Iterator[tuple[str, list[str], bool]]:
    """Program, words, and whether it is started as it stands, not through a launcher of many processes."""
    for _, text in blocks(page, "", "sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"(\S*/)?(gqa-\w+|accelerate|torchrun) ", line) else []
            if not words or "..." in words:  # `...` stands for the words of the line before
                continue
            program, rest = words[0].rpartition("/")[2], words[1:]
            if program in MODULES:
                yield program, rest, True
            elif "-m" in rest:
                module, *rest = rest[rest.index("-m") + 1 :]
                yield module.replace("gqa.", "gqa-"), rest, False


SHOWN = [(page, *command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("program", "words"), [(program, words) for _, program, words, _ in SHOWN],
                         ids=[f"{page.stem}-{number}" for number, (page, *_) in enumerate(SHOWN)])  # fmt: skip
def test_options_exist(program: str, words: list[str]) -> None:
    import_module(f"gqa.{MODULES[program]}").command.make_context(program, list(words))


def test_every_fence_of_commands_is_seen(tmp_path: Path) -> None:
    """And no other: what closes a block of Python opens none."""
    page = tmp_path / "page.md"
    python = "```python\nimport gqa\n```\n\ngqa-convert is a command.\n\n"
    fences = "```\ngqa-eval A \\\n  B  # told\n```\n\n", "- a list\n  ```sh\n  gqa-ablate R\n  ```\n"
    page.write_text(python.join(("", *fences)))
    assert list(commands(page)) == [("gqa-eval", ["A", "B"], True), ("gqa-ablate", ["R"], True)]


def made_small(program: str, words: list[str]) -> list[str]:
    """The same command on little text, which is read where it says stdlib."""
    previous = ["", *words]
    small = [LIMITS.get(before, word) for before, word in zip(previous, words, strict=False)]
    small = [re.sub(r"^stdlib:\w+$", "corpus.jsonl", word) for word in small]
    small = [re.sub(r"^self(:\w+)?$", "self:1024", word) for word in small]
    if "--dry-run" in words:
        return small
    added = {name: value for name, value in ADDED[program].items() if name not in words}
    if "refined" in words:
        added |= {"--refine-steps": "2", "--tokens": "256", "--context": "64"}
    return [*small, *(word for pair in added.items() for word in pair if word)]


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> Path:
    """The working directory, with tiny models by the names that the pages use, texts, and a library of ten modules."""
    from gqa.corpus.stdlib import stdlib_texts

    for name, (heads, kv_heads) in MODELS.items():
        size = {"num_attention_heads": heads, "hidden_size": 8 * heads, "max_position_embeddings": 128}
        tiny_checkpoint(tmp_path / name, kv_heads=kv_heads, tie_word_embeddings=True, **size)
    (tmp_path / "stdlib-mha").symlink_to("examples/stdlib-mha")
    write_corpus(tmp_path / "corpus.jsonl")
    monkeypatch.setattr("gqa.corpus.sources.stdlib_texts", lambda side: islice(stdlib_texts(side), 10))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_of_the_readme_run_in_order(small_world: Path) -> None:
    count = 0
    for program, words, is_whole in commands(ROOT / "README.md"):
        if is_whole and program in ADDED:
            with fresh_accelerator():
                done = run(*made_small(program, words), program=program)
            assert done.code == 0, (program, words, done.err)
            count += 1
    assert count > 4


def missing_libraries(code: str) -> list[str]:
    """Libraries that a block imports and that are not installed."""
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return [name for name in names if find_spec(name) is None]


def test_python_of_the_pages_runs(small_world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one session a page. Blocks with libraries that are not here are left out; of those with the project's own
    dependencies none is.
    """
    left_out = list[str]()
    for page in (ROOT / "docs/api.md", ROOT / "README.md"):
        names = dict[str, Any]()
        with fresh_accelerator():
            for lines, code in blocks(page, "python"):
                left_out += (missing := missing_libraries(code))
                if not missing:  # line by line as on the page, for tracebacks
                    exec(
                        compile("\n" * (lines[0] + 1) + code.replace("tokens=20_000", "tokens=2_000"), page, "exec"),
                        names,
                    )
        assert isinstance(names["small"], gqa.Result)
    assert set(left_out) <= {"trl", "peft"}
    assert missing_libraries("import os\nfrom nowhere_to_be_found import x\n") == ["nowhere_to_be_found"]  # the control
    assert "x baseline" in capsys.readouterr().out
    assert (small_world / "continued/model.safetensors").is_file()
    text = (ROOT / "docs/api.md").read_text()
    assert [name for name in gqa.__all__ if name not in text and name != "__version__"] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, small_world: Path) -> None:
    """From the first cell to the last; it is stored without outputs."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = dict[str, Any]()
    for cell in cells:
        code = "".join(cell["source"]).replace("TOKENS = 4_000", "TOKENS = 1_000")
        exec(code.replace("tokens=8192, context=128", "tokens=1024, context=32"), names)
    assert len(names) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


# -------------------------------------------------------------------------------------------------- what is published

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKS = ("image", "link_open")


def test_one_version() -> None:
    version, cited = PROJECT["version"], yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    if tag := os.environ.get("RELEASE_TAG"):
        assert tag == f"v{version}"


def dead_links(page: str) -> list[str]:
    """Pictures and links of a page at the root that lead to no file of the repository, or to no heading of it."""
    parts = [part for token in MarkdownIt().enable("table").parse(page) for part in token.children or ()]
    links = [str(part.attrs["src" if part.type == "image" else "href"]) for part in parts if part.type in LINKS]
    return [link for link in links if not link.startswith("https://") and not leads_somewhere(link)]


def leads_somewhere(link: str) -> bool:
    name, _, heading = link.partition("#")
    file = ROOT / (name or "README.md")
    if not heading or not file.is_file():
        return file.exists()
    titles = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}


def test_links_of_the_readme_lead_somewhere() -> None:
    assert dead_links((ROOT / "README.md").read_text()) == []
    page = "[x](examples) [x](CONTRIBUTING.md#nothing) [x](docs/nothing.md) [x](#nothing) ![x](front.svg)"
    assert dead_links(page) == ["CONTRIBUTING.md#nothing", "docs/nothing.md", "#nothing", "front.svg"]


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name)
def test_workflows_run_what_is_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert all(job.get("needs", name) in jobs for name, job in jobs.items())
    for command in commands:
        words = command.split()
        assert words[0] != "make" or set(words[1:]) <= targets, command
        assert all((ROOT / word).exists() for word in words if word.startswith(("tests/", ".ci/"))), command


def test_the_image_has_extras_that_are_there() -> None:
    extras = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert {name for group in extras for name in group.split(",")} <= PROJECT["optional-dependencies"].keys()
