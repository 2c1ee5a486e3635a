"""Links in the directory of a model: those that transformers follows work, others are left out or
named as they are.
"""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import MERGED, SINGLE, Result, check_refused, llama, run

from gqa.checkpoint import read
from gqa.checkpoint.read import read_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small checkpoint of one file, without other files."""
    directory = llama(tmp_path / "m", shards=1, side_files=False)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def convert(model: Path) -> Result:
    return run(*MERGED, "-q", "-o", model.with_name("out"), model)


def written(model: Path) -> set[str]:
    out = model.with_name("out")
    assert not any(path.is_symlink() for path in out.rglob("*"))
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


def test_links_inside_the_directory_are_followed(model: Path) -> None:
    """A link to a log, and one to a directory, which are copied as what they lead to."""
    (model / "logs").mkdir()
    (model / "logs/1.txt").write_text("log")
    (model / "last.txt").symlink_to("logs/1.txt")
    (model / "last").symlink_to("logs")
    result = convert(model)
    result.expect(complaints="")
    assert written(model) >= {"logs/1.txt", "last.txt", "last/1.txt"}


def test_checkpoint_last_is_left_out_as_what_it_leads_to(model: Path) -> None:
    shutil.copytree(model, model / "checkpoint-500")
    (model / "checkpoint-last").symlink_to("checkpoint-500")
    (model / "last").symlink_to("checkpoint-500")
    result = convert(model)
    assert result.code == 0, result
    assert not any("500" in name or "last" in name for name in written(model))


def test_links_in_a_circle_end(model: Path) -> None:
    (model / "a").mkdir()
    (model / "b").mkdir()
    (model / "a/x.txt").write_text("x")
    for number in range(3):
        (model / f"self{number}").symlink_to(".")
        (model / f"a/b{number}").symlink_to("../b")
        (model / f"b/a{number}").symlink_to("../a")
        (model / f"a/loop{number}").symlink_to(f"loop{number}")
    result = convert(model)
    assert result.code == 0, result
    assert "a/x.txt" in written(model)


@pytest.mark.parametrize(
    ("name", "target", "warning"),
    [
        (
            "train.log",
            "gone.log",
            "train.log in {} is a broken link: it points to gone.log, which does not exist",
        ),
        (
            "train.log",
            "../outside/a.log",
            "train.log is a link that leaves {}: it points to {}/outside/a.log",
        ),
        ("logs", "../outside", "logs is a link that leaves {}: it points to {}/outside"),
    ],
)
def test_links_that_are_not_needed_are_left_out_with_a_warning(
    model: Path, name: str, target: str, warning: str
) -> None:
    (model / "../outside").mkdir()
    (model / "../outside/a.log").write_text("log")
    (model / name).symlink_to(target)
    result = convert(model)
    assert result.code == 0, result
    assert result.complaints == f"warning: {warning.format(model, model.parent)}; it is left out\n"
    assert name not in written(model)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", SINGLE, "chat_template.jinja", "modeling_x.py"]
)
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gone", "is a broken link: it points to gone, which does not exist"),
        ("../outside", "is a link that leaves"),
    ],
)
def test_links_that_are_needed_are_named_as_what_they_are(
    model: Path, name: str, target: str, says: str
) -> None:
    (model / "../outside").write_text("{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target)
    check_refused(convert(model), name, says, "put the file itself in its place")


def test_links_into_a_cache_of_the_hub_are_followed(model: Path, tmp_path: Path) -> None:
    """To snapshots, which are links to blobs, and to blobs."""
    entry = tmp_path / "hub/models--a--b"
    (entry / "blobs").mkdir(parents=True)
    (entry / "snapshots/c0ffee").mkdir(parents=True)
    for name in ("config.json", SINGLE):
        (model / name).rename(entry / "blobs" / name)
        (entry / "snapshots/c0ffee" / name).symlink_to(f"../../blobs/{name}")
    (model / "config.json").symlink_to(entry / "snapshots/c0ffee/config.json")
    (model / SINGLE).symlink_to(entry / "blobs" / SINGLE)
    result = convert(model)
    result.expect(complaints="")
    assert written(model) >= {"config.json", SINGLE}


def test_a_directory_of_snapshots_that_is_no_cache_may_link_into_one(
    model: Path, tmp_path: Path
) -> None:
    """`snapshots` alone does not make a cache: its parent has to be named models--..."""
    blobs = tmp_path / "hub/models--a--b/blobs"
    blobs.mkdir(parents=True)
    (tmp_path / "snapshots").mkdir()
    moved = model.rename(tmp_path / "snapshots/m")
    (moved / SINGLE).rename(blobs / SINGLE)
    (moved / SINGLE).symlink_to(blobs / SINGLE)
    assert read_checkpoint(moved).files == (SINGLE,)


@pytest.mark.parametrize(("name", "is_needed"), [("chart.png", False), ("tokenizer.json", True)])
def test_files_that_cannot_be_read_are_left_out_unless_they_are_needed(
    model: Path, name: str, is_needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / name).write_text("x")
    monkeypatch.setattr(read.os, "access", lambda path, mode: Path(path).name != name)
    if is_needed:
        with pytest.raises(PermissionError):
            read_checkpoint(model)
        return

    checkpoint = read_checkpoint(model)
    assert name not in checkpoint.side_files
    assert checkpoint.warnings == (f"{name} cannot be read; it is left out",)


def test_what_looks_like_a_cache_inside_a_model_leads_nowhere_else(
    model: Path, tmp_path: Path
) -> None:
    """A download may contain anything: only where a link really leads counts."""
    (tmp_path / "secret").write_text("mine")
    (model / "models--a--b/blobs").mkdir(parents=True)
    (model / "models--a--b/blobs/x").symlink_to(tmp_path / "secret")
    (model / "vocab.json").symlink_to("models--a--b/blobs/x")
    check_refused(convert(model), "vocab.json is a link that leaves", "secret")


def test_training_warns_of_links_that_are_left_out(small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    (model / "train.log").symlink_to("gone")
    (tmp_path / "t.txt").write_text("words " * 200)
    words = (
        "--teacher",
        "none",
        "--data",
        tmp_path / "t.txt",
        "--steps",
        1,
        "--context",
        16,
        "--batch-size",
        1,
    )
    result = run(model, *words, "-o", tmp_path / "out", "-q", program="gqa-uptrain")
    assert result.code == 0, result
    assert "warning: train.log in " in result.err
    assert not (tmp_path / "out/train.log").exists()


def test_commands_to_type_are_quoted(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell reads them as they are meant, and gqa-eval takes no path for an option."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small, "-m [it's]")
    result = run(*MERGED, "-o", "-o #1", "--", "-m [it's]")
    assert result.code == 0, result
    evaluation = result.out.partition("gqa-eval ")[2].splitlines()[0]
    assert shlex.split(evaluation, comments=True)[:2] == ["./-m [it's]", "./-o #1"]


@pytest.mark.parametrize(
    "name",
    ["m[1]", "m*", "m?", "{a,b}", "m m", "m#1", "m%41", "m:1", "m@b", "m\nm", "it's", 'm"', "-m"],
)
def test_names_of_models_are_not_interpreted(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model, of its files and of the result."""
    monkeypatch.chdir(tmp_path)
    model.rename(name)
    (Path(name) / f"{name}.txt").write_text("side")
    result = run(*MERGED, "-q", "-o", f"out {name}", "--", name)
    result.expect(complaints="")
    assert read_checkpoint(Path(f"out {name}")).side_files
    assert (Path(f"out {name}") / f"{name}.txt").exists()


def test_directories_that_cannot_be_read_are_left_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `lost+found`, where a volume is the directory of a model."""
    (model / "lost+found").mkdir()
    list_directory = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_directory(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert read_checkpoint(model).warnings == ("lost+found cannot be read; it is left out",)
