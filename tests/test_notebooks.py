"""The notebooks in examples/ run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import ast
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(path: Path) -> None:
    assert cells(path)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path))


def shown_by(code: str, names: dict[str, Any]) -> Any:
    """What a cell shows: the value of an expression that it ends with."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else ast.Expr(ast.Constant(None))
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.fix_missing_locations(ast.Expression(last.value)), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """Beside the model that it names, on little text."""
    from gqa.corpus.stdlib import stdlib_texts

    (tmp_path / "stdlib-mha").symlink_to(EXAMPLES / "stdlib-mha")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gqa.corpus.sources.stdlib_texts", lambda side: islice(stdlib_texts(side), 10))
    names, shown = dict[str, Any](), list[Any]()
    for cell in cells(path):
        code = "".join(cell["source"]).replace("TOKENS = 4_000", "TOKENS = 1_000")
        code = code.replace("tokens=8192, context=128", "tokens=1024, context=32")
        shown.append(shown_by(code, names))
    assert any(repr(value).startswith("<") for value in shown)


def test_what_a_cell_shows_and_what_fails_are_seen() -> None:
    """The control."""
    names: dict[str, Any] = {}
    assert (shown_by("a = 3\na", names), shown_by("b = a", names), names["b"]) == (3, None, 3)
    with pytest.raises(ValueError, match="seen"):
        shown_by("raise ValueError('seen')", names)
