"""Where a result may go, and wrong usage: refused in one line before a byte is written."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import MERGED, check_refused, leftovers, llama, run, snapshot

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.write import OutputDirectory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "m", side_files=False)


NOTHING = ("./nothing", "/nothing/there", "a/b/c", "two words", "../m\n", "a\x1b[2Jb")
WRONG_USAGE = {
    "--groups 3 m": "4 key/value heads and 8 query heads of m; choose 1, 2, 4 or 8",
    "--groups 16 m": "choose 1, 2, 4 or 8",
    **{f"--groups {word} m": f"'{word}' is no number of heads" for word in ("0", "-2", "two", "2.0", "1,,x")},
    "-g2 m --method median": "'median' is not one of 'mean', 'first'",
    "-g2 m --dtype int8": "'int8' is not one of",
    "-g2 m --tensor-parallel 0": "'0' is not a whole number from 1",
    "-g2 m --no-such-option": "No such option",
    "-g2 m a b": "unexpected extra argument",
    "-g2 m --revision main": "--revision is for hub ids",
    "m": "give --groups G, or --kv-budget SHARE",
    "-g2": "Missing argument 'MODEL'",
    "-g2 m/config.json": "config.json is no directory; give the one",
    "-g2 empty": "empty has no config.json; give a checkpoint",
    "-g2 ./broken": "broken is no directory; give the one",
    **{f"-g2 {shlex.quote(nothing)}": "there is no directory" for nothing in NOTHING},
}


@pytest.mark.parametrize("words", WRONG_USAGE)
def test_wrong_usage(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    before, says = snapshot(tmp_path), WRONG_USAGE[words]
    check_refused(run(*shlex.split(words)), says, *(["hub id"] if says == "there is no directory" else []))
    assert snapshot(tmp_path) == before


def test_refused_outputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUT for every way to get it wrong, and what is said."""
    root, ismount = model.parent, os.path.ismount
    (root / "volume").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == root / "volume" or ismount(path))
    (root / "file").write_text("mine")
    (root / "full").mkdir()
    (root / "full" / "precious.txt").write_text("mine")
    for name, target in (("link", "full"), ("loose", "nowhere"), ("same", "m"), ("loop", "loop")):
        (root / name).symlink_to(target)
    cases: dict[str, tuple[object, str]] = {
        "exists": (root / "full", "full exists; choose another directory with -o, or replace it with --overwrite"),
        "a file": (root / "file", "file exists and is not a directory"),
        "below a file": (root / "file" / "out", "file is not a directory that you may write to; give another"),
        "below a link to itself": (root / "loop" / "out", "loop is not a directory that you may write to"),
        "where no files are made": ("/proc/out", "give another directory with -o"),
        "a link": (root / "link", "is a link; give the directory itself"),
        "a link to nothing": (root / "loose", "is a link"),
        "the model by another name": (root / "full" / ".." / "m" / "", "is the model itself or inside it"),
        "in the model by a link": (root / "same" / "deep" / "out", "is the model itself or inside it"),
        "around the model with dots": (f"{model}/..", "contains the model"),
        "a mount point": (root / "volume", "is a mount point; give a directory in it"),
        "the root": ("/", "the root of a file system"),
        "too long": (root / ("x" * 300), "too long"),
    }
    before = snapshot(root)
    for name, (out, says) in cases.items():
        code = 1 if name.startswith("below") or name in ("where no files are made", "too long") else 2
        for words in ([], ["--overwrite"]) if name != "exists" else ([],):
            check_refused(run(*MERGED, "-o", out, *words, model), says, code=code)
            assert snapshot(model.parent) == before, name
    (root / ".out.gqa-lock").mkdir()  # what is in the way only when it is entered
    says = f"cannot write beside {root / 'out'}: "
    check_refused(run(*MERGED, "-o", root / "out", model), says, "give another directory with -o", code=1)


@pytest.mark.parametrize("name", ["notes.txt", "runs/1.json", ".env", "model.safetensors", "link", "results.json"])
def test_overwrite_refuses_what_no_record_lists(model: Path, tmp_path: Path, name: str) -> None:
    """In a result, and alone; what the product wrote is replaced, also a copy of a file of that name."""
    out, report = tmp_path / "out", '{"files": ["results.json"]}'
    (model / "runs").mkdir()
    (model / "runs/0.json").write_text("{}")
    assert run(*MERGED, "-o", out, model).code == 0
    for place in (out, tmp_path / "other"):
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).symlink_to(model) if name == "link" else (place / name).write_text(report)
    before = snapshot(tmp_path)
    for place in (out, tmp_path / "other"):
        refused = run(*MERGED, "--overwrite", "-o", place, model)
        check_refused(refused, f"holds {name}, which --overwrite will not remove", "move it away")
    assert snapshot(tmp_path) == before
    (out / name).unlink()
    (out / "empty").mkdir()
    assert run(*MERGED, "--overwrite", "-o", out, model).code == 0
    assert not (out / "empty").exists()


def test_work_directory_that_is_a_link_is_not_followed(model: Path, tmp_path: Path) -> None:
    victim = llama(tmp_path / "victim")
    before = snapshot(victim)
    for name in ("partial", "replaced"):
        (tmp_path / f".out.gqa-{name}").symlink_to(victim)
    (tmp_path / ".out.gqa-lock").symlink_to(victim / "config.json")
    result = run(*MERGED, "-o", tmp_path / "out", model)
    if result.code:  # a lock that is a link is refused, which is as good
        check_refused(result, "cannot write beside", code=1)
        (tmp_path / ".out.gqa-lock").unlink()
        assert run(*MERGED, "-o", tmp_path / "out", model).code == 0
    assert snapshot(victim) == before
    assert leftovers(tmp_path) == []


def test_output_with_dots(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is meant, not a name beside its last part; an empty one is used."""
    (tmp_path / "out").mkdir()
    (model / "assets").mkdir()
    (model / "assets" / "a.txt").write_text("a")
    for out in ("out", "out/assets/..", "out/../out/."):
        monkeypatch.chdir(tmp_path)
        assert run(*MERGED, "--overwrite", "-o", out, model).code == 0, out
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
        assert (tmp_path / "out" / "assets" / "a.txt").is_file()
    monkeypatch.chdir(tmp_path / "out")
    assert run("--groups", 1, "--method", "mean", "--overwrite", "-o", ".", model).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]


def test_output_made_meanwhile_is_not_replaced(model: Path, tmp_path: Path) -> None:
    """Somebody else made OUT after it was looked at: before the lock is taken, and before the end."""
    out = tmp_path / "out"
    waiting = OutputDirectory(out, model)
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(RefusedError, match="exists; choose another"), waiting:
        pass
    assert leftovers(tmp_path) == []
    (out / "precious.txt").unlink()
    with OutputDirectory(out, model) as output:
        (output.work / "config.json").write_text("{}")
        (out / "precious.txt").write_text("mine")
        with pytest.raises(OutputError, match="exists; choose another"):
            output.commit("gqa_record.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
    assert (out / "precious.txt").read_text() == "mine"


def test_one_real_process(model: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"no\xffutf\n8")
    command = [Path(sys.executable).with_name("gqa-convert"), *map(str, MERGED), "-o", tmp_path / name, model]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (tmp_path / name / "config.json").is_file()
