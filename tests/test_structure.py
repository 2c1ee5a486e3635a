"""What holds for the repository as a whole: imports, sizes, generated text, start-up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("checkpoint", "corpus", "convert", "uptrain", "eval")  # each may import those before it
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return ".".join(("gqa", *path.relative_to(ROOT).with_suffix("").parts))


def imported(path: Path) -> set[str]:
    """Modules of this project that a file imports, at its top level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gqa."):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("gqa.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    allowed = PACKAGES[: PACKAGES.index(package_of(path)) + 1]
    for name in imported(path):
        assert name.split(".")[1] in allowed, f"{path} imports {name}"


def test_no_import_cycles() -> None:
    """Among top-level imports, which run when a module is first imported."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        body = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
        graph[name_of(path)] = {n.module or "" for n in body}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        for following in graph.get(module, ()):
            visit(following, (*trail, module))

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_and_files_stay_small(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 450
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name}"


def test_readme_shows_the_families_table() -> None:
    """`python tests/test_structure.py` writes it anew."""
    from gqa.convert.heads.support import families_markdown

    assert families_markdown() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_speaks_of_options_that_exist() -> None:
    from gqa.convert.cli import command

    options = {"--help"} | {name for parameter in command.params for name in parameter.opts}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"gqa-convert (.*)", text):
        for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", line):
            assert word in options, f"README: gqa-convert {line}"


def write_readme_table() -> None:
    from gqa.convert.heads.support import families_markdown

    path = ROOT / "README.md"
    before, _, rest = path.read_text(encoding="utf-8").partition("<!-- families -->\n")
    _, _, after = rest.partition("<!-- /families -->")
    path.write_text(f"{before}<!-- families -->\n{families_markdown()}\n<!-- /families -->{after}", encoding="utf-8")


if __name__ == "__main__":
    write_readme_table()
