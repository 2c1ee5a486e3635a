"""docs/api.md and the README: blocks run in their order, on a tiny model and little text of the names that stand there;
and the page names what is public.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from training import fresh_accelerator, tiny_checkpoint

import gqa

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/api.md"
README = ROOT / "README.md"


def blocks(page: Path) -> list[tuple[list[int] | None, str]]:
    """The lines and the text of a page's Python."""
    return [(token.map, token.content) for token in MarkdownIt().parse(page.read_text()) if token.info == "python"]


def lacks(code: str) -> list[str]:
    """Libraries that a block imports and that are not installed."""
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return [name for name in names if find_spec(name) is None]


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """A directory that has examples/stdlib-mha, a tiny model, and a library of ten modules."""
    from gqa.corpus.stdlib import stdlib_texts

    tiny_checkpoint(tmp_path / "examples/stdlib-mha", kv_heads=8, num_attention_heads=8, hidden_size=64)
    monkeypatch.setattr("gqa.corpus.sources.stdlib_texts", lambda side: islice(stdlib_texts(side), 10))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small_world")
def test_every_block_runs(tmp_path: Path) -> None:
    """As one session. Blocks with libraries that are not here are left out; of those with the project's own
    dependencies none is.
    """
    left_out, names = [], dict[str, object]()
    with fresh_accelerator():
        for lines, code in blocks(PAGE):
            assert lines is not None
            if found := lacks(code):
                left_out += found
                continue
            exec(compile("\n" * (lines[0] + 1) + code, PAGE, "exec"), names)  # so that a traceback has the page's lines
    assert set(left_out) <= {"trl", "peft"}
    assert lacks("import os\nfrom nowhere_to_be_found import x\n") == ["nowhere_to_be_found"]  # the control
    assert {"small", "two_heads", "refined", "plan", "trained", "comparison", "trainer"} <= names.keys()
    assert (tmp_path / "continued/model.safetensors").is_file()


@pytest.mark.usefixtures("small_world")
def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, code),) = blocks(README)
    exec(compile(code.replace("tokens=20_000", "tokens=2_000"), README, "exec"), {})
    assert "x baseline" in capsys.readouterr().out


def test_everything_public_is_named() -> None:
    page = PAGE.read_text()
    assert [name for name in gqa.__all__ if name not in page and name != "__version__"] == []
