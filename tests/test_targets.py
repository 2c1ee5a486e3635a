"""Learning from predictions that were recorded is learning from the teacher, which need not be there."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from checkpoints import check_refused, load, run
from safetensors.torch import load_file, save_file
from torch import Tensor
from training import BLOCK, Runs, difference, losses, metrics, tiny_checkpoint, words_for, write_corpus

from gqa.corpus.predictions import TopPredictions
from gqa.uptrain.losses import distillation
from gqa.uptrain.targets import PART, RECORD, find_targets

PLACES, VOCABULARY = 12, 50


def predictions() -> tuple[Tensor, Tensor]:
    """Logits of a teacher, which all but rules a token out, and of a student, in float64."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, PLACES, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    teacher[0, 7] = -60
    return teacher, student


def in_16_bits(top: TopPredictions) -> TopPredictions:
    return TopPredictions(top.counts, top.ids, top.logs.half(), top.rest.half())


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_tokens_say_what_the_teacher_says(temperature: float) -> None:
    """Divergence and its gradient, to what float16 holds; of any slice; the control is another place's predictions."""
    teacher, student = predictions()
    student.requires_grad_()
    expected = distillation(student, teacher, temperature)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    top = TopPredictions.of(teacher, 1.0, temperature)
    assert top.counts.tolist() == [VOCABULARY] * PLACES
    found = in_16_bits(top).divergence(student, temperature)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert torch.allclose(found.double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.allclose(gradient, wanted, atol=2e-3)
    part = slice(3, 7)
    assert torch.equal(top[part].divergence(student[part], temperature), top.divergence(student, temperature)[part])
    other = TopPredictions.of(teacher.roll(1, 0), 1.0, temperature).divergence(student, temperature)
    assert not torch.allclose(other.double(), expected, rtol=0.1)


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_what_is_not_kept_is_what_the_divergence_lacks(mass: float) -> None:
    """By the chain rule: the mass of the other tokens x the divergence among them. Each place keeps no more tokens than
    it needs.
    """
    teacher, student = predictions()
    top = TopPredictions.of(teacher, mass, 1.0)
    found = top.divergence(student, 1.0).double()
    p, q = teacher.softmax(-1), student.softmax(-1)
    for place, ids in enumerate(top.ids.split(top.counts.tolist())):
        kept = p[place, ids].sum()
        assert kept >= mass > kept - p[place, ids].min()
        others = [token for token in range(VOCABULARY) if token not in ids]
        r, s = p[place, others], q[place, others]
        lacking = (r * ((r / r.sum()).log() - (s / s.sum()).log()).nan_to_num(neginf=0)).sum()
        whole = distillation(student[place : place + 1], teacher[place : place + 1], 1.0)
        assert float(whole - found[place]) == pytest.approx(float(lacking), abs=1e-5)
    assert (found < distillation(student, teacher, 1.0) - 1e-4).any()


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A teacher that a test can take away, and a model that has nearly its opinion."""
    found = {name: tmp_path / name for name in ("model", "teacher", "targets")}
    tiny_checkpoint(found["teacher"], kv_heads=4, initializer_range=0.2)
    shutil.copytree(found["teacher"], found["model"])
    for path in found["model"].glob("*.safetensors"):
        save_file({name: 0.9 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return found


STEPS = 9  # of 8 blocks: with those that are held out two files


def words(out: Path, teacher: Path, data: Any = None, **options: Any) -> list[str]:
    return words_for(teacher.parent / "model", data, out, teacher=teacher, **options)


def record(runs: Runs, out: Path, places: dict[str, Path], directory: Path | None = None, **options: Any) -> list[str]:
    given = {"steps": STEPS, "record_teacher": directory or places["targets"], "record_mass": 1} | options
    return words(out, places["teacher"], **{"data": runs.directory / "data.jsonl"} | given)


HOW: dict[str, dict[str, Any]] = {
    "documents": {"mask_documents": True, "heldout_fraction": 0.2, "distill": 0.5, "temperature": 2.0},
    "self": {"data": "self", "heldout_tokens": 256},
}


def test_no_block_is_recorded_twice(place: Path, tmp_path: Path, alone: None) -> None:
    """However many go through the teacher at a time: a part holds as many as another, to the byte."""
    sizes = []
    for micro in (8, 48):
        how = {"teacher": place / "teacher", "steps": 3, "batch_size": 48, "micro_batch": micro}
        done = run(*words_for(place / "model", place / "data.jsonl", tmp_path / "out", **how),
                   "--record-teacher", tmp_path / str(micro), "--json", program="gqa-uptrain")  # fmt: skip
        assert done.code == 0, done.err
        sizes.append(
            [file.stat().st_size for file in sorted((tmp_path / str(micro)).glob("*")) if file.suffix != ".json"]
        )
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) >= 3


@pytest.mark.parametrize("name", HOW)
def test_it_trains_as_with_the_teacher(runs: Runs, tmp_path: Path, places: dict[str, Path], name: str) -> None:
    """To what float16 holds, on held-out text too. The control has the predictions of other blocks."""
    options = HOW[name]
    live = {"data": runs.directory / "data.jsonl", "steps": 3} | options
    runs.finish(*words(tmp_path / "live", places["teacher"], **live))
    runs.finish(*record(runs, tmp_path / "none", places, steps=3, **options))
    assert not (tmp_path / "none").exists()
    shutil.rmtree(places["teacher"])
    kept = {key: options[key] for key in ("distill", "temperature") if key in options}
    runs.finish(*words(tmp_path / "stored", places["targets"], **kept))
    found, expected = (metrics(tmp_path / run / "gqa_uptraining.jsonl") for run in ("stored", "live"))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=3e-3)
    told, before = (json.loads((tmp_path / run / "gqa_uptraining.json").read_text()) for run in ("stored", "live"))
    assert (told["teacher"], told["data"]) == ("teacher", before["data"])
    assert told["losses"].keys() == before["losses"].keys()
    exchange(places["targets"])
    runs.finish(*words(tmp_path / "control", places["targets"], **kept))
    wrong = metrics(tmp_path / "control" / "gqa_uptraining.jsonl")
    for one, other in zip(wrong, expected, strict=True):
        assert one["distillation"] != pytest.approx(other["distillation"], rel=3e-3)


def exchange(directory: Path) -> None:
    """Each block of a directory has the predictions of another."""
    for path in directory.glob("part-*.arrow"):
        table = pyarrow.ipc.open_file(path.read_bytes()).read_all()
        rows = [table.slice(n, 1) for n in range(len(table))]
        with pyarrow.OSFile(str(path), "wb") as stream, pyarrow.ipc.new_file(stream, table.schema) as writer:
            for one, other in zip(rows, rows[1:] + rows[:1], strict=True):
                columns = {name: (other if name.startswith("top_") else one)[name] for name in table.schema.names}
                writer.write_table(pyarrow.table(columns))


def test_processes_share_a_recording_and_what_is_learnt(runs: Runs, tmp_path: Path, places: dict[str, Path]) -> None:
    """Two write what one writes, also where the teacher is in shards and with as many passes of each; they train to the
    same weights.
    """
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for way, how in ((one, {}), (two, {"ranks": 2}), (three, {"ranks": 2, "before": "shard()"})):
        runs.finish(*record(runs, tmp_path / "none", places, way, micro_batch=4, record_mass=0.9), **how)
    files = sorted(path.name for path in one.iterdir())
    assert files == ["part-000000.arrow", "part-000001.arrow", RECORD]
    for other in (two, three):
        assert sorted(path.name for path in other.iterdir()) == files
        found, expected = find_targets(str(other)), find_targets(str(one))
        assert found
        assert expected
        assert len(found) == len(expected) > PART
        for number in range(len(found)):
            for name, values in expected[number].items():
                if name in ("input_ids", "top_counts"):
                    assert (found[number][name] == values).all(), (other, number, name)
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)
    runs.finish(*words(tmp_path / "alone", one))
    runs.finish(*words(tmp_path / "ddp", two), ranks=2)
    assert difference(tmp_path / "ddp", tmp_path / "alone") <= 1e-5
    before = {"precision": "bf16", "micro_batch": 2}
    runs.finish(*words(tmp_path / "ddp16", one, **before), ranks=2)
    runs.finish(*words(tmp_path / "fsdp16", one, **before), ranks=2, before="shard()")
    assert losses(tmp_path / "fsdp16") == pytest.approx(losses(tmp_path / "ddp16"), rel=1e-3)


def test_a_recording_goes_on(runs: Runs, tmp_path: Path, places: dict[str, Path]) -> None:
    """Killed in its second part, nothing can be trained from it; what is there is not recorded again."""
    made = record(runs, tmp_path / "none", places)
    assert runs.run(*made, before="kill_in_part(1)").code == -signal.SIGKILL
    first = places["targets"] / "part-000000.arrow"
    before = first.stat().st_mtime_ns
    assert "is not complete: 1 of its parts are missing" in refused(runs, *words(tmp_path / "out", places["targets"]))
    runs.finish(*made, ranks=2)
    assert first.stat().st_mtime_ns == before
    runs.finish(*record(runs, tmp_path / "none", places, tmp_path / "straight"))
    for path in (tmp_path / "straight").iterdir():
        assert (places["targets"] / path.name).read_bytes() == path.read_bytes()


def refused(runs: Runs, *words: object) -> str:
    """What is said in one line."""
    done = runs.run(*words)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    return done.err


def test_what_cannot_be_recorded_is_refused_before_models_load(
    place: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gqa.uptrain.setup.load_model", None)
    made, kept = {"data": place / "data.jsonl", "steps": 1}, tmp_path / "kept"
    for given, says in (
        ({"record_teacher": kept}, "--record-teacher needs a model that teaches (--teacher none); name it"),
        ({"record_teacher": place, "teacher": place / "teacher"}, f"{place} exists and holds no targets; give another"),
        ({"record_mass": 0.5}, "--record-mass needs --record-teacher; give both or leave it out"),
    ):
        done = run(*words_for(place / "model", out=tmp_path / "out", **{"teacher": "none"} | made | given),
                   program="gqa-uptrain")  # fmt: skip
        check_refused(done, says, program="gqa-uptrain")
        assert list(tmp_path.iterdir()) == []


def test_memory_that_ends_while_a_teacher_is_recorded(
    place: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to lower is told, and with that the recording begins."""

    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = words_for(place / "model", place / "data.jsonl", tmp_path / "out", teacher=place / "teacher", steps=1)
    made += ["--record-teacher", str(tmp_path / "kept")]
    with monkeypatch.context() as patch:
        patch.setattr(TopPredictions, "of", fail)
        told = "out of memory while recording, 8 blocks of 64 tokens at a time on cpu; lower --micro-batch (now 8)"
        check_refused(run(*made, program="gqa-uptrain"), told, program="gqa-uptrain")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [RECORD]
    assert run(*made, "--micro-batch", 2, program="gqa-uptrain").code == 0


def test_what_does_not_fit_is_refused(runs: Runs, tmp_path: Path, places: dict[str, Path]) -> None:
    """In one line: other blocks, context, temperature, tokens, and what a recording cannot do."""
    runs.finish(*record(runs, tmp_path / "none", places, steps=1))
    stored, out = places["targets"], tmp_path / "out"
    for given, says in (
        ({"data": "stdlib:train"}, "--data is of text, and"),
        ({"context": 32}, f"was recorded with --context {BLOCK}, not 32; give the same or record it again"),
        ({"heldout_tokens": 64}, "--heldout-tokens is of text, and"),
        ({"temperature": 2}, "was recorded with --temperature 1, not 2"),
        ({"steps": 2}, "16 blocks of training are more than the 8 that"),
        ({"record_teacher": tmp_path / "again"}, "--record-teacher needs a model that teaches"),
    ):
        assert says in refused(runs, *words(out, stored, **given)), given
    assert "--record-teacher needs a model that teaches" in refused(
        runs, *record(runs, out, places, tmp_path / "again", steps=1), "--teacher", "none"
    )
    assert "was recorded otherwise: mass: 1.0 -> 0.5; give another directory" in refused(
        runs, *record(runs, out, places, steps=1, record_mass=0.5)
    )
    other = write_corpus(tmp_path / "other.jsonl", first=30)
    assert "; content: " in refused(runs, *record(runs, out, places, steps=1, data=other))
    assert "exists and holds no targets" in refused(runs, *record(runs, out, places, runs.directory, steps=1))
    for key, value, says in (
        ("vocabulary", 7, f"recorded in {tmp_path / 'vocabulary'} predicts 7 tokens, the model "),
        ("tokenizer", "7", f"the tokenizer of the teacher recorded in {tmp_path / 'tokenizer'} has other tokens"),
    ):
        changed = tmp_path / key
        shutil.copytree(stored, changed)
        (changed / RECORD).write_text(json.dumps(json.loads((stored / RECORD).read_text()) | {key: value}))
        assert says in refused(runs, *words(out, changed))
    (changed / RECORD).write_text("{")
    assert "cannot be read" in refused(runs, *words(out, changed))
    assert not out.exists()
    runs.finish(*words(out, stored))
    assert load(out)
