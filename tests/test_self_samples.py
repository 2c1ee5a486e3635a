"""`self:TOKENS`: what the teacher writes is the same for every run, and sampled once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from embedded import SOURCE, copy_source, load

import gqa.convert.align.self_samples as module
from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.align.self_samples import SampledBlocks, sampled_blocks
from gqa.corpus.sources import is_self, self_tokens
from gqa.uptrain.options import TrainOptions

SIZE = 12


@pytest.fixture(scope="module")
def teacher():
    return load(SOURCE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(module, "_BATCH", 4)
    return tmp_path / "gqa-samples"


def sampled(teacher, n_blocks: int, seed: int = 0, source: Path = SOURCE) -> tuple[SampledBlocks, list[int]]:
    told: list[int] = []
    found = sampled_blocks(lambda dtype: teacher, "cpu", read_checkpoint(source), SIZE, n_blocks, seed, told.append)
    return found, told


def ids(blocks: SampledBlocks) -> np.ndarray:
    return np.stack([blocks[i]["input_ids"] for i in range(len(blocks))])


def test_a_longer_run_goes_on_where_a_shorter_one_ended(teacher, cache: Path) -> None:
    few, told = sampled(teacher, 3)
    assert told == [4 * SIZE]  # a batch
    many, told = sampled(teacher, 10)
    assert told == [4 * SIZE] * 2
    again, told = sampled(teacher, 10)
    assert told == []
    assert np.array_equal(ids(many), ids(again))
    assert np.array_equal(ids(many)[:3], ids(few))
    assert few.fingerprint == many.fingerprint  # what a state of training must agree with
    assert len({row.tobytes() for row in ids(many)}) == 10
    with pytest.raises(IndexError):
        few[3]


def test_what_was_interrupted_is_sampled_again(teacher, cache: Path) -> None:
    whole = ids(sampled(teacher, 8)[0])
    (file,) = cache.glob("*.int32")
    file.write_bytes(file.read_bytes()[:-7])  # killed while the second batch was written
    found, told = sampled(teacher, 8)
    assert told == [4 * SIZE]
    assert np.array_equal(ids(found), whole)


def test_seeds_and_sizes_have_samples_of_their_own(teacher, cache: Path) -> None:
    one, other = ids(sampled(teacher, 4)[0]), ids(sampled(teacher, 4, seed=1)[0])
    assert not np.array_equal(one, other)
    assert len(list(cache.glob("*.int32"))) == 2
    assert one.dtype == np.int64
    assert (one[:, 0] == teacher.config.bos_token_id).all()


def test_a_text_begins_as_the_tokenizer_begins_it(teacher, cache: Path, tmp_path: Path) -> None:
    """With BOS where it adds BOS; where it does not, or there is none, with what came after it, or with it."""
    with_bos = ids(sampled(teacher, 4)[0])
    plain = copy_source(tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        told = json.loads((plain / name).read_text())
        told.update(add_bos_token=False) if "add_bos_token" in told else told.update(post_processor=None)
        (plain / name).write_text(json.dumps(told))
    assert ids(sampled(teacher, 4, source=plain)[0])[:, 0].tolist() != with_bos[:, 0].tolist()
    assert ids(sampled(teacher, 4, source=plain)[0]).shape == with_bos.shape
    for file in plain.glob("*token*"):
        file.unlink()
    assert np.array_equal(ids(sampled(teacher, 4, source=plain)[0]), with_bos)


def test_what_is_asked_for() -> None:
    assert [self_tokens(spec) for spec in ("self", "self:64", "self:1.5k", "self:2M@3")] == [None, 64, 1500, 2_000_000]
    assert is_self("self:1M")
    assert is_self("self@2")
    assert not is_self("selfish.txt")
    for spec in ("self:", "self:0", "self:many", "self:1M:2"):
        with pytest.raises(CorpusError, match="like self:1M"):
            self_tokens(spec)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher": None}, "give the model before conversion"),
        ({"data": ("self",)}, "say how many tokens"),
        ({"data": ("self:1M", "stdlib:train")}, "stands alone"),
        ({"streaming": True}, "stands alone"),
    ],
)
def test_refusals(changes: dict[str, object], reason: str) -> None:
    given = {"model": "m", "output": Path("out"), "data": ("self:1M",), "teacher": "t"} | changes
    with pytest.raises(RefusedError, match=reason):
        TrainOptions(**given).check(1)  # type: ignore[arg-type]
