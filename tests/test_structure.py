"""What holds for the repository as a whole: imports, private names of libraries, generated text."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.repository import PACKAGES, ROOT

from gqa.convert.heads.families.table import FAMILIES, NESTED, REFUSED
from gqa.convert.recast.targets import RECASTINGS

MODELS = ROOT / "docs/models.md"
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    """As it is imported: what is in package/ is at the top."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("gqa", *parts[parts[0] == "package" :])).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}


def imported(path: Path) -> set[str]:
    """Files of this project that a file imports: at its top level, inside functions, for type
    checkers.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.add(f"{name_of(path.parent / '__init__.py')}.{node.module}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gqa."):
            assert node.module in NAMES, f"{path} imports {node.module}"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else node.module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("gqa.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    allowed = PACKAGES[: PACKAGES.index(package_of(path)) + 1]
    for name in imported(path):
        assert package_of(NAMES[name]) in allowed, f"{path} imports {name}"


def test_no_circle_among_files() -> None:
    graph = {path: {NAMES[name] for name in imported(path)} - {path} for path in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    some = next(path for path in MODULES if graph[path])
    graph[next(iter(graph[some]))].add(some)
    with pytest.raises(CycleError):  # the control
        list(TopologicalSorter(graph).static_order())


def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that a file imports, or reads or sets as attributes of
    another object.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id.endswith("attr")
        ):
            names |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("gqa"):
            names |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    # Of namedtuples, public
    return {name for name in names if re.match("_[a-zA-Z]", name)} - {"_asdict", "_fields"}


COMPAT = ROOT / "core/compat.py"
PRIVATE = private_names(COMPAT)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_one_file_touches_private_names_of_libraries(path: Path) -> None:
    """At most 15, each with a comment beside it.

    Files beside weights need no package, and read one themselves.
    """
    beside_weights = {"_attn_implementation"} if path.parent.name == "modeling" else set()
    assert 0 < len(PRIVATE) <= 15
    if path != COMPAT:
        assert private_names(path) <= beside_weights


HEADER = "| how heads are stored | model types | note |\n|---|---|---|\n"


def family_rows() -> Iterator[tuple[str, str, str]]:
    """(how heads are stored, model types, note) of every family."""
    for family in FAMILIES:
        notes, reasons = [family.note] if family.note else [], defaultdict(list)
        # Why the heads of which types cannot be aligned
        for name, found in family.symmetries.items():
            if why := found if isinstance(found, str) else found.unless and found.unless[0]:
                reasons[why].append(name)
        notes += [f"not aligned: {', '.join(names)} ({why})" for why, names in reasons.items()]
        layerwise = defaultdict(list)
        for name, why in family.not_layerwise.items():
            layerwise[why].append(name)
        notes += [
            f"neither calibrated nor refined: {', '.join(names)} ({why})"
            for why, names in layerwise.items()
        ]
        yield family.name, ", ".join(sorted(family.symmetries)), "; ".join(notes)
    yield "text part of a larger model", ", ".join(sorted(NESTED)), "only the text part changes"
    for recasting in RECASTINGS:
        way = "native" if recasting.architecture else "custom modeling code"
        yield f"written as {recasting.target}, {way}", recasting.source, recasting.note
    for reason in dict.fromkeys(REFUSED.values()):
        yield (
            "refused",
            ", ".join(sorted(name for name, why in REFUSED.items() if why == reason)),
            reason,
        )


def models_page() -> str:
    """docs/models.md with its last table written anew: Markdown, in whose cells a bar would end the
    cell.
    """
    rows = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in family_rows())
    prose = MODELS.read_text(encoding="utf-8").partition(HEADER)[0]
    return prose + HEADER + "".join(f"| {row} |\n" for row in rows)


def test_models_page_shows_every_model_type() -> None:
    """`python tests/test_structure.py` writes the page anew."""
    page = MODELS.read_text(encoding="utf-8")
    assert page == models_page()
    shown = set(re.split(r"[,:|] *| *[,:|]", page.partition(HEADER)[2]))
    stated = {model_type for family in FAMILIES for model_type in family.symmetries}
    assert stated | set(NESTED) | set(REFUSED) | {"gpt2", "gpt_neox", "opt"} <= {
        name.strip() for name in shown
    }


def test_no_test_module_imports_another() -> None:
    """What they share is in tests/support."""
    modules = [*(ROOT / "tests").glob("test_*.py")]
    assert Path(__file__) in modules
    for path in modules:
        imports = re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert not imports, f"{path.name} imports {', '.join(imports)}"


if __name__ == "__main__":
    MODELS.write_text(models_page(), encoding="utf-8")
