"""The notebooks in examples/ run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
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


def run_notebook(path: Path, place: Path) -> Any:
    """In a kernel, beside the model that the notebooks name."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        pytest.skip("nbclient and ipykernel are not installed; `make install` does")
    import nbformat
    from nbclient import NotebookClient

    shutil.copytree(EXAMPLES / "stdlib-mha", place / "stdlib-mha")
    text = path.read_text().replace("TOKENS = 4_000", "TOKENS = 1_000").replace("tokens=8192", "tokens=2048")
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Results show as tables there."""
    notebook = run_notebook(path, tmp_path)
    shown = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "data" in out]
    assert any("<table>" in out["data"].get("text/html", "") for out in shown)


def test_a_cell_that_fails_is_seen(tmp_path: Path) -> None:
    """The control."""
    notebook = json.loads(NOTEBOOKS[0].read_text())
    notebook["cells"] = [next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")]
    notebook["cells"][0]["source"] = "raise ValueError('seen')"
    (tmp_path / "bad.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(Exception, match=": seen"):
        run_notebook(tmp_path / "bad.ipynb", tmp_path)
