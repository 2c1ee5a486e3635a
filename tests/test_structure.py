"""What holds for the repository as a whole: imports, private names of libraries, generated text."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.pages import with_table
from support.repository import PACKAGES, ROOT

import gqa
from gqa.convert.heads.families.table import FAMILIES, NESTED, REFUSED
from gqa.convert.methods.table import METHODS
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
            why = found
            if not isinstance(found, str):
                why = found.impossible_if[0] if found.impossible_if else ""
            if why:
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
    """docs/models.md with its last table written anew."""
    return with_table(MODELS.read_text(encoding="utf-8"), HEADER, family_rows())


def test_models_page_shows_every_model_type() -> None:
    """`python tests/test_structure.py` writes the page anew."""
    page = MODELS.read_text(encoding="utf-8")
    assert page == models_page()
    shown = set(re.split(r"[,:|] *| *[,:|]", page.partition(HEADER)[2]))
    stated = {model_type for family in FAMILIES for model_type in family.symmetries}
    assert stated | set(NESTED) | set(REFUSED) | {"gpt2", "gpt_neox", "opt"} <= {
        name.strip() for name in shown
    }


# ----------------------------------------------------------------------------------- docs/design.md

# Names on the page that libraries or checkpoints define
LIBRARIES = ("accelerate", "datasets", "jinja2", "torch")
THEIRS = {
    "_attn_implementation",
    "baseline_NAME",
    "input_ids",
    "max_position_embeddings",
    "self_attn",
}
FILE = re.compile(r"[\w./-]+(/|\.py|\.md)")
IDENTIFIER = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?")
NAME_AND_FILE = re.compile(r"`([A-Za-z_][\w.]*)`\s+(?:\(|in )`([\w./-]+\.py)`")


def defined_names(path: Path) -> set[str]:
    """Functions, classes and constants of a file, and members of classes: `member` and
    `Class.member`.
    """
    names = set[str]()
    for node in ast.parse(path.read_text()).body:
        names |= names_of_statement(node)
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                members = names_of_statement(statement)
                names |= members
                names |= {f"{node.name}.{member}" for member in members}
    return names


def names_of_statement(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return set()


TESTS = sorted((ROOT / "tests").rglob("*.py"))
PUBLIC = {f"gqa.{name}" for name in (*gqa.__all__, *PACKAGES)}


@cache
def names_by_file() -> dict[Path, set[str]]:
    return {path: defined_names(path) for path in (*MODULES, *TESTS)}


@cache
def known_names() -> set[str]:
    return {"gqa", *PUBLIC, *METHODS, *THEIRS}.union(*names_by_file().values())


def files_named(name: str) -> list[Path]:
    """The file or directory of this path, or the files whose paths end with it."""
    if (ROOT / name).exists():
        return [ROOT / name]
    return [path for path in names_by_file() if path.as_posix().endswith(f"/{name}")]


def missing_names(page: str) -> list[str]:
    """Files, functions, classes and constants that a page names in backquotes and that do not
    exist, or not in the file that it names after them.
    """
    missing = []
    tokens = MarkdownIt().enable("table").parse(page)
    parts = [part for token in tokens for part in token.children or ()]
    for code in (part.content for part in parts if part.type == "code_inline"):
        files = [word for word in code.split() if FILE.fullmatch(word)]
        missing += [file for file in files if not files_named(file)]

        identifier = IDENTIFIER.fullmatch(code)
        if files or not identifier:
            continue
        name = identifier[1]
        if name not in known_names() and name.split(".")[0] not in LIBRARIES:
            missing.append(name)

    for name, file in NAME_AND_FILE.findall(page):
        names = [names_by_file().get(path, set()) for path in files_named(file)]
        defined = set[str]().union(*names)
        if name.removeprefix("gqa.") not in defined:
            missing.append(f"{name} in {file}")
    return missing


def test_design_page_names_what_exists() -> None:
    missing = missing_names((ROOT / "docs/design.md").read_text(encoding="utf-8"))
    assert not missing, f"docs/design.md names what does not exist: {', '.join(missing)}"


def test_a_name_that_does_not_exist_is_noticed() -> None:
    page = (
        "`Plan` `Plan.nothing` `nothing` `core/nothing.py` `train` (`core/compat.py`) `--nothing`"
    )
    missing = ["Plan.nothing", "nothing", "core/nothing.py", "train in core/compat.py"]
    assert missing_names(page) == missing


def test_no_test_module_imports_another() -> None:
    """What they share is in tests/support."""
    modules = [*(ROOT / "tests").glob("test_*.py")]
    assert Path(__file__) in modules
    for path in modules:
        imports = re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert not imports, f"{path.name} imports {', '.join(imports)}"


if __name__ == "__main__":
    MODELS.write_text(models_page(), encoding="utf-8")
