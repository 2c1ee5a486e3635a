"""What is published: one version, links that a package index can follow, workflows, the Dockerfile, the site."""

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


def dead_links(page: str) -> list[str]:
    """Pictures and links that lead nowhere from a package index, which has no files of the repository."""
    parts = [part for token in MarkdownIt().enable("table").parse(page) for part in token.children or ()]
    links = [str(part.attrs["src" if part.type == "image" else "href"]) for part in parts if part.type in LINKS]
    assert links
    files = [(link, link.removeprefix(start)) for link in links for start in (RAW, FILES)]
    missing = {link for link, name in files if name != link and not (ROOT / name.partition("#")[0]).is_file()}
    return [link for link in links if link in missing or not link.startswith("https://")]


def test_the_readme_has_absolute_links_to_existing_files() -> None:
    page = (ROOT / "README.md").read_text()
    assert dead_links(page) == []
    assert {*dead_links(page.replace("docs/api.md)", "docs/nothing.md)"))} == {f"{FILES}docs/nothing.md"}  # the control
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


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not program.exists():
        pytest.skip("hadolint is not installed; `make install` does")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /src && pip install torch\n")
    runs = [subprocess.run([program, path], capture_output=True, check=False) for path in (ROOT / "Dockerfile", bad)]
    assert [(run.returncode, bool(run.stdout)) for run in runs] == [(0, False), (1, True)]
    extras = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert {name for group in extras for name in group.split(",")} <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("has_dead_links", [False, True])
def test_the_documentation_is_a_site_without_dead_links(has_dead_links: bool, tmp_path: Path) -> None:
    """The control: a link to no page, one to no heading, a page outside the navigation."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make install` does")
    config, messages = ROOT / "mkdocs.yml", ["'nowhere.md'", "'index.md#nothing'", 'not included in the "nav"']
    if has_dead_links:
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "index.md").write_text("# x\n\n[x](nowhere.md) [y](index.md#nothing)\n")
        (tmp_path / "docs" / "lost.md").write_text("# y\n")
        text = yaml.safe_dump(yaml.safe_load(config.read_text()) | {"nav": [{"x": "index.md"}]})
        config = tmp_path / "mkdocs.yml"
        config.write_text(text)
    words = ["-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", tmp_path / "site"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (run.returncode != 0) == has_dead_links, run.stderr
    assert [message in run.stderr for message in messages] == [has_dead_links] * 3
