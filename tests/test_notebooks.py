"""The notebooks in examples/ run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """Beside the model that it names, on little text."""
    from gqa.corpus.stdlib import stdlib_texts

    (tmp_path / "stdlib-mha").symlink_to(EXAMPLES / "stdlib-mha")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gqa.corpus.sources.stdlib_texts", lambda side: islice(stdlib_texts(side), 10))
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = dict[str, Any]()
    for cell in cells:
        code = "".join(cell["source"]).replace("TOKENS = 4_000", "TOKENS = 1_000")
        exec(code.replace("tokens=8192, context=128", "tokens=1024, context=32"), names)
    assert len(names) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
