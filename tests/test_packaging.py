"""What is published: one version and one name everywhere, pictures that a package index can show, the documentation as
a site, and files for machines that are not run here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SITE = PROJECT["urls"]["Homepage"]
RAW = SITE.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
FILES = f"{SITE}/blob/main/"
LINKS = ("image", "link_open")


def test_one_version() -> None:
    version, cited = PROJECT["version"], yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    assert cited["repository-code"] == SITE
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    if tag := os.environ.get("RELEASE_TAG"):
        assert tag == f"v{version}"


def test_one_name() -> None:
    """What is installed by another name is found nowhere."""
    assert PROJECT["name"] == "gqa"
    places = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("[cuep]*/**/*.py")]
    named = {(path.name, name) for path in places for name in re.findall(r"pip install '?([\w-]+)", path.read_text())}
    assert {name for _, name in named} >= {"gqa"}
    assert [found for found in named if found[1].startswith("gqa-")] == []


def dead_links(page: str) -> list[str]:
    """Pictures and links that lead nowhere from a package index, which has no files of the repository."""
    parts = [part for token in MarkdownIt().enable("table").parse(page) for part in token.children or ()]
    found = [str(part.attrs["src" if part.type == "image" else "href"]) for part in parts if part.type in LINKS]
    assert found
    inside = [(address, address.removeprefix(start)) for address in found for start in (RAW, FILES)]
    missing = {address for address, name in inside if name != address and not (ROOT / name.partition("#")[0]).is_file()}
    return [address for address in found if address in missing or not address.startswith("https://")]


def test_the_readme_has_absolute_links_to_what_is_there() -> None:
    page = (ROOT / "README.md").read_text()
    assert dead_links(page) == []
    assert dead_links(page.replace("docs/api.md)", "docs/nothing.md)")) == [f"{FILES}docs/nothing.md"] * 2
    assert dead_links("[x](docs/api.md) ![x](docs/front.svg)") == ["docs/api.md", "docs/front.svg"]


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


def test_the_workflow_runs_without_root_and_several_tests_at_a_time() -> None:
    """What .ci/run would install is there before; tests of many processes or much memory do not run in parallel."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    *_, last = [step["run"] for step in jobs["check"]["steps"] if "run" in step]
    assert last == ".ci/run"
    assert not re.search(r"^command -v", (ROOT / last).read_text(), re.MULTILINE)
    parallel = [step["run"] for job in jobs.values() for step in job["steps"] if "-n auto" in step.get("run", "")]
    assert len(parallel) == 1
    assert all("not real and not scale" in command for command in parallel)


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    found = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not found.exists():
        pytest.skip("hadolint is not installed; `make install` does")
    return subprocess.run([found, "--no-color", path], capture_output=True, text=True, check=False)


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    done = hadolint(ROOT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    extras = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert {name for found in extras for name in found.split(",")} <= PROJECT["optional-dependencies"].keys()
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /src && pip install torch\n")
    assert hadolint(bad).returncode != 0  # the control


def build_site(config: Path, place: Path) -> subprocess.CompletedProcess[str]:
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make install` does")
    words = ["-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", place]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_the_documentation_is_a_site_without_dead_links(tmp_path: Path) -> None:
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}


def test_the_site_is_refused_where_something_is_dead(tmp_path: Path) -> None:
    """The control: a link to no page, one to no heading, a page outside the navigation."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# x\n\n[x](nowhere.md) [y](index.md#nothing)\n")
    (docs / "lost.md").write_text("# y\n")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config | {"nav": [{"x": "index.md"}]}))
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    for said in ("'nowhere.md'", "'index.md#nothing'", 'not included in the "nav"'):
        assert said in done.stderr
