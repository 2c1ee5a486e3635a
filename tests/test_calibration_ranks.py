"""Calibration shared by processes: the maps of one, however blocks are shared out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training import Runs, difference

TEXT = ("--groups", 2, "--tokens", 1024, "--context", 16, "--grouping", "contiguous", "--no-repeats")
STEPS = ("--method", "refined", "--refine-steps", 8, "--refine-precision", "float32", "--refine-batch", 16)


def words(runs: Runs, out: Path, *more: object) -> tuple[object, ...]:
    return (runs.directory / "teacher", *TEXT, "--data", runs.directory / "data.jsonl", "-o", out, *more)


def apart(one: Path, other: Path) -> float:
    """The largest difference of any of the maps of two files, relative to the largest number there."""
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / left[name].abs().max()) for name in left)


def test_ranks_find_the_maps_of_one_process(runs: Runs, tmp_path: Path) -> None:
    """Each looks at its share of the text and solves for its share of the groups; without the sums over processes the
    maps are others.
    """
    for ranks in (1, 2):
        told, solved = tmp_path / f"told{ranks}", tmp_path / f"solved{ranks}"
        before = f"tell_tokens({str(told)!r}); tell_solves({str(solved)!r})"
        done = runs.finish(*words(runs, tmp_path / f"{ranks}"), ranks=ranks, program="calibrate", before=before)
        assert done.out.count("written") == 1
        seen = [sum(map(int, Path(f"{told}-{rank}").read_text().split())) for rank in range(ranks)]
        assert seen == [2 * 1024 // ranks] * ranks, "of two layers"
        solves = [path.read_text().split() for path in tmp_path.glob(f"solved{ranks}-*")]
        assert [Counter(each) for each in solves] == [
            {"shared_key": 4 // len(solves), "shared_value": 4 // len(solves)}
        ] * ranks, "of two groups"
        assert apart(tmp_path / "1", tmp_path / f"{ranks}") <= 1e-5
    alone = "import gqa.convert.align.closed_form as c; c.add_up = lambda *sums: None"
    runs.finish(*words(runs, tmp_path / "control"), ranks=2, program="calibrate", before=alone)
    assert apart(tmp_path / "1", tmp_path / "control") > 1e-2


@pytest.mark.scale  # four processes
def test_a_stopped_run_goes_on_with_other_ranks(runs: Runs, tmp_path: Path) -> None:
    stopped = (
        "from gqa.convert.align.calibration import Calibrator as C; run = C.run; "
        "C.run = lambda self, layer, *rest: exit(3) if layer else run(self, layer, *rest)"
    )
    runs.finish(*words(runs, tmp_path / "whole"), program="calibrate")
    for number, (first, then) in enumerate(((2, 1), (1, 4), (4, 2))):
        out, told = tmp_path / f"out{number}", tmp_path / f"told{number}"
        assert runs.run(*words(runs, out), ranks=first, program="calibrate", before=stopped).code == 3
        done = f"tell_tokens({str(told)!r})"
        runs.finish(*words(runs, out), ranks=then, program="calibrate", before=done)
        assert sum(map(int, Path(f"{told}-0").read_text().split())) == 1024 // then, "the first layer was done again"
        assert apart(tmp_path / "whole", out) <= 1e-5
    assert not list(tmp_path.glob(".*"))


def test_ranks_refine_and_convert(runs: Runs, tmp_path: Path) -> None:
    """Gradients are averaged: what is left differs as sums in another order do, and Muon rounds to bfloat16. Processes
    wait for the one that writes longer than a collective would.
    """
    losses, slow = {}, "impatient(4); import gqa.convert.api as a, time; w = a.write; "
    slow += "a.write = lambda *given, **how: (time.sleep(6), w(*given, **how))[1]"
    alone = "import gqa.convert.align.refine as r; r.add_up = lambda *sums: None"
    for name, ranks, before in (("1", 1, ""), ("2", 2, slow), ("alone", 2, alone)):
        done = runs.finish(*words(runs, tmp_path / name, *STEPS), ranks=ranks, program="convert", before=before)
        losses[name] = [float(error) for error in re.findall(r"\d (0\.\d+)", done.out.split("layers ")[1])][:2]
    assert losses["2"] == pytest.approx(losses["1"], rel=1e-2)
    assert difference(tmp_path / "1", tmp_path / "2") <= 0.1 * difference(tmp_path / "1", tmp_path / "alone")


@pytest.mark.scale  # four processes
def test_ranks_write_the_text_of_one_process(runs: Runs, tmp_path: Path) -> None:
    """Bit for bit, also where an interrupted run goes on; each writes its share of 16 batches of 4."""
    text = (runs.directory / "teacher", *TEXT[:-1], "--method", "calibrated")
    for ranks in (1, 2, 4):
        cache, told = tmp_path / f"cache{ranks}", tmp_path / f"told{ranks}"
        for again in (False, True):
            if again:  # interrupted in the sixth batch
                (file,) = cache.glob("*/*.int32")
                whole = file.read_bytes()
                file.write_bytes(whole[: 4 * 16 * 4 * 5 + 7])
            before = f"keep_samples({str(cache)!r}, 4, {str(told)!r})"
            out = ("-o", tmp_path / f"{ranks}", "--overwrite")
            runs.finish(*text, *out, ranks=ranks, program="calibrate", before=before)
        assert file.read_bytes() == whole == next((tmp_path / "cache1").glob("*/*.int32")).read_bytes()
        assert not list(cache.glob("*/*.[0-9]*"))
        written = [sum(map(int, Path(f"{told}-{rank}").read_text().split())) for rank in range(ranks)]
        assert sum(written) == 16 + 11
        assert max(written) <= -(-16 // ranks) + -(-11 // ranks)
    cache, told = tmp_path / "cache", tmp_path / "told"
    large = "import gqa.convert.align.self_samples as s; s.too_large = lambda *given: True"
    before = f"keep_samples({str(cache)!r}, 4, {str(told)!r}); {large}"
    runs.finish(*text, "-o", tmp_path / "large", ranks=2, program="calibrate", before=before)
    assert next(cache.glob("*/*.int32")).read_bytes() == whole
    assert not Path(f"{told}-1").exists(), "one process writes what no device holds"


def test_heads_by_layer_are_chosen_alike(runs: Runs, tmp_path: Path) -> None:
    text = [*words(runs, tmp_path / "1")[3:], "--kv-budget", 0.75, "--dtype", "float32"]
    for ranks in (1, 2):
        given = [runs.directory / "teacher", *text, "-o", tmp_path / str(ranks)]
        runs.finish(*given, ranks=ranks, program="convert")
    assert difference(tmp_path / "1", tmp_path / "2") <= 1e-4


@pytest.mark.parametrize(
    ("program", "more", "says"),
    [
        ("calibrate", ("--device", "cpu"), "--device cpu is for one process; a launcher gives each of several its own"),
        ("calibrate", ("--tokens", 16), "1 blocks of text are too few for 2 processes; give more text (--tokens)"),
        ("convert", ("--method", "refined", "--dry-run"), "runs in one process, and WORLD_SIZE is 2"),
    ],
)
def test_refused(runs: Runs, tmp_path: Path, program: str, more: tuple[object, ...], says: str) -> None:
    done = runs.run(*words(runs, tmp_path / "out", *more), ranks=2, program=program)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
