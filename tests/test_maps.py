"""Files of maps: made once, applied to the model that they are of and to no other, looked at with any reader."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scrambled import on_ids
from test_families import all_tensors, write_checkpoint
from tiny_models import TINY, build
from torch import Tensor

from gqa.checkpoint.read import read_checkpoint
from gqa.convert import convert_checkpoint, plan_conversion
from gqa.convert.align.find_maps import describe, find_maps
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.api import convert_plan
from gqa.convert.maps_file import MapsFile
from gqa.convert.summary import _told_of_maps

KEY = "model.layers.0.self_attn/key"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and maps that merge its four heads into two."""
    place = tmp_path_factory.mktemp("maps")
    source = write_checkpoint(build(TINY["llama+bias"], 4), place / "model")
    plan = plan_conversion(source, 2, method="calibrated", headers_only=False)
    return source, find_maps(plan, place / "maps.safetensors", on_ids(grouping="contiguous")).path


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as stream:
        return dict(stream.metadata())


def test_what_a_file_holds(made: tuple[Path, Path]) -> None:
    """Shapes and names as docs/methods.md says, float32, and how it was made as JSON."""
    _, file = made
    tensors = load_file(file)
    parts = {"key": (2, 8, 16), "value": (2, 8, 16), "query": (4, 8, 8), "output": (32, 32)}
    expected = {f"model.layers.{i}.self_attn/{part}": shape for i in range(2) for part, shape in parts.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    (told,) = metadata(file).values()
    assert {"format", "method", "groups", "model", "name", "text", "ridge"} <= json.loads(told).keys()


@pytest.mark.parametrize("method", ["refined", "aligned"])
def test_applied_later_is_applied_at_once(
    made: tuple[Path, Path], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs shapes alone; a run takes each map from the file once, though four projections need it."""
    options = on_ids(refinement=Refinement(steps=4, batch=8))
    at_once = convert_checkpoint(made[0], 2, tmp_path / "at-once", method=method, calibration=options).out
    file = find_maps(plan_conversion(made[0], 2, method=method, headers_only=False), tmp_path / "maps", options).path
    taken, read = list[str](), MapsFile.tensor

    def counting(self: MapsFile, name: str, meta: bool = False) -> Tensor:
        taken.extend([] if meta or name.endswith("/order") else [name])  # orders are a few numbers
        return read(self, name, meta)

    monkeypatch.setattr(MapsFile, "tensor", counting)
    planned = plan_conversion(made[0], 2, maps=file, headers_only=False)
    assert taken == []
    now, later = all_tensors(at_once), all_tensors(convert_plan(planned, tmp_path / "later").out)
    assert taken
    assert len(taken) == len(set(taken))
    assert now.keys() == later.keys()
    assert all(torch.equal(tensor, later[name]) for name, tensor in now.items())


def edited(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        tensors, told = load_file(file), metadata(file)
        change(tensors)
        save_file(tensors, file, metadata=told)

    return edit


def told_as(text: str) -> Callable[[Path], None]:
    return lambda file: save_file(load_file(file), file, metadata={"gqa_maps": text})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda file: os.truncate(file, file.stat().st_size - 100), "cannot be read: "),
    "empty": (lambda file: file.write_bytes(b""), "cannot be read: "),
    "text": (lambda file: file.write_text("not maps"), "cannot be read: "),
    "weights": (lambda file: save_file(load_file(file), file), "is not a file of gqa-maps-1; make one with"),
    "format": (told_as('{"format": "gqa-maps-9"}'), "is a file of gqa-maps-9, not of gqa-maps-1"),
    "list": (told_as("[1]"), "does not say how it was made"),
    "no-json": (told_as("{"), "does not say how it was made"),
    "method": (told_as('{"format": "gqa-maps-1", "groups": 2}'), "does not say how it was made"),
    "missing": (edited(lambda tensors: tensors.pop(KEY)), f"has no {KEY}; make it again"),
    "shape": (
        edited(lambda tensors: tensors.update({KEY: tensors[KEY][:, :, :8].clone()})),
        f"has {KEY} [2, 8, 8]; make it again",
    ),
    "tensor": (
        edited(lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 4)})),
        "has model.layers.0.self_attn.k_proj.weight [4, 4]; make it again",
    ),
}


def refused(tmp_path: Path, message: str, *words: object, program: str = "gqa-convert") -> None:
    """One line, exit code 2, nothing written."""
    before = checkpoints.snapshot(tmp_path)
    checkpoints.check_refused(checkpoints.run(*words, program=program), message, program=program, advice="")
    assert checkpoints.snapshot(tmp_path) == before


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_file_of_maps(made: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    source, file = made
    change, message = BROKEN[case]
    copy = Path(shutil.copyfile(file, tmp_path / "maps"))
    change(copy)
    refused(tmp_path, message, source, "-g", 2, "--maps", copy, "-o", tmp_path / "out")


def test_another_model_or_another_number(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    words = ("--maps", file, "-o", tmp_path / "out")
    refused(tmp_path, f"--maps {file} is for 2 groups, not for 1", source, "-g", 1, *words)
    other = write_checkpoint(build(TINY["llama+bias"], 4, seed=1), tmp_path / "other")
    refused(tmp_path, "was made for model, which is another model than other", other, "-g", 2, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-g", 4, "-o", "new"), "--groups 4 of the 4 key/value heads of"),
        (("-g", 2, "-o", "no/maps"), "is no directory; give a file in one that exists"),
        (("-g", 2, "-o", "maps"), "exists; give another name or --overwrite"),
        (("-g", 3, "-o", "new"), "--groups 3 is not possible"),
        *((("-g", 2, "-o", "new", "--device", device), f"--device {device} cannot be used: ")
          for device in ("cudda", "cuda:77", "xpu")),
    ],
)  # fmt: skip
def test_maps_that_cannot_be_written(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], message: str
) -> None:
    """Nothing to merge, no such directory or device, a file that is there: said before anything is computed."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(made[1], "maps")
    refused(tmp_path, message, made[0], *words, program="gqa-calibrate")


def test_the_result_says_how_its_maps_were_made(made: tuple[Path, Path], tmp_path: Path) -> None:
    """No directory of this machine is in it."""
    text = tmp_path / "secret" / "text.txt"
    text.parent.mkdir()
    text.write_text("x")
    described = {"text": {"sources": [f"{text}@2", "self"], "tokens": 64, "length": 8, "seed": 3}}
    described |= {"ridge": 1e-3, "dtype": "bfloat16", "grouping": "contiguous"}
    checkpoint, maps = made
    out = convert_checkpoint(checkpoint, 2, tmp_path / "out", maps=maps).out
    record = json.loads((out / "gqa_conversion.json").read_text())
    assert record["maps"]["model"]
    assert "secret" not in json.dumps(_told_of_maps(described))
    assert "(method calibrated)" in (out / "README.md").read_text()


def test_what_tells_models_and_texts_apart(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Also weights in .bin files, and a file of text that has changed since."""
    pickled = []
    for number in range(2):
        place = Path(shutil.copytree(made[0], tmp_path / f"bin{number}"))
        tensors = all_tensors(place)
        for file in place.glob("*.safetensors*"):
            file.unlink()
        tensors["model.layers.0.self_attn.k_proj.weight"] += number
        torch.save(tensors, place / "pytorch_model.bin")
        plan = plan_conversion(place, 2, method="calibrated", headers_only=False)
        pickled.append(describe(plan, MapsOptions())["model"])
    assert pickled[0] != pickled[1]
    text, told = tmp_path / "text.txt", []
    for content in ("one", "two", "two"):
        text.write_text(content)
        told.append(CalibrationText((str(text), "self")).identify(read_checkpoint(made[0])))
    assert told[0] != told[1] == told[2]
    assert told[0][1] == "self"
