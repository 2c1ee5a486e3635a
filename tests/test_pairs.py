"""What encoder-decoders are calibrated on: columns of a data set, plain text with spans left out, what they write."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import check_refused, run
from embedded import SOURCE, tokenizer
from test_families import write_checkpoint
from tiny_models import TINY, build
from torch import Tensor
from transformers import AutoTokenizer

import gqa.convert.merge.text_pairs as pairs_module
from gqa.checkpoint.console import SILENT
from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import plan_conversion
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.options import CalibrationText, MapsOptions
from gqa.corpus.pairs import PairEncoder, corrupted

START, END = 1, 2  # of the tiny models
ROWS = [{"said": f"{n} in words is " + "one " * (n % 7 + 1), "meant": f"the number {n}"} for n in range(40)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 with sentinels, BART with a mask token, Marian with neither; pairs and text."""
    found, plain = tmp_path_factory.mktemp("pairs"), tokenizer()
    marks = {"t5": [f"<extra_id_{n}>" for n in range(8)], "bart": ["<mask>"], "marian": []}
    for name, added in marks.items():
        tiny = replace(TINY[f"gqa_{name}"], options={**TINY[f"gqa_{name}"].options, "vocab_size": len(plain) + 8})
        where = write_checkpoint(build(tiny, 4), found / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SOURCE / file, where)
        if added:
            own = AutoTokenizer.from_pretrained(SOURCE)
            own.add_special_tokens({"mask_token": added[0]} if name == "bart" else {"additional_special_tokens": added})
            own.save_pretrained(where)
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (found / "text.txt").write_text("What was said was meant. " * 300)
    return found


def inputs(place: Path, name: str, source: str, count: int = 12, **how: Any) -> dict[str, Tensor]:
    text = CalibrationText((str(place / source) if "." in source else source,), 24 * count, 24, **how)
    return text.inputs(read_checkpoint(place / name), "cpu", SILENT)


def rows(given: dict[str, Tensor], prefix: str = "") -> list[list[int]]:
    """Ids without their padding, which is at the end."""
    masks = given[f"{prefix}attention_mask"].bool()
    assert bool((masks[:, :-1] >= masks[:, 1:]).all())
    return [ids[mask].tolist() for ids, mask in zip(given[f"{prefix}input_ids"], masks, strict=True)]


def test_columns_of_a_data_set(place: Path) -> None:
    """Each target behind its source, chosen by the seed; the decoder is given it shifted by one."""
    pairs, plain = inputs(place, "t5", "pairs.jsonl", field="said", target_field="meant"), tokenizer()
    # Its tokenizer puts the decoder's first token before a text.
    known = {tuple(plain(row["said"])["input_ids"][:24]): plain(row["meant"])["input_ids"][1:] for row in ROWS}
    assert len(rows(pairs)) == 12
    for source, target in zip(rows(pairs), rows(pairs, "decoder_"), strict=True):
        assert target == [START, *known[tuple(source)]]
    again = inputs(place, "t5", "pairs.jsonl", field="said", target_field="meant")
    assert torch.equal(again["input_ids"], pairs["input_ids"])


def test_spans_are_left_out_and_asked_for() -> None:
    """15 % in spans of 3: source and target together are the text, in its order."""
    ids, marks = np.arange(100, 300), list(range(10, 60))
    source, target = corrupted(ids, marks, np.random.default_rng(0))
    spans: dict[int, list[int]] = {}
    for token in target:
        spans.setdefault(token, []) if token in marks else spans[list(spans)[-1]].append(token)
    assert list(spans) == marks[:10]
    assert sum(map(len, spans.values())) == 30
    assert len({len(span) for span in spans.values()}) > 1
    back = [token for one in source for token in spans.get(one, [one])]
    assert back == ids.tolist()
    masked, whole = corrupted(ids, [5], np.random.default_rng(0))
    assert (masked.count(5), whole) == (10, ids.tolist())


@pytest.mark.parametrize(("name", "mark"), [("t5", "<extra_id_0>"), ("bart", "<mask>")])
def test_plain_text_makes_pairs(place: Path, name: str, mark: str) -> None:
    """No side is longer than its text: what the tokenizer puts before it and the end of the target have their room."""
    pairs, checkpoint = inputs(place, name, "text.txt"), read_checkpoint(place / name)
    own = load_tokenizer(checkpoint)
    token = own.convert_tokens_to_ids(mark)
    assert all(token in row for row in rows(pairs))
    assert all((token in row) == (name == "t5") for row in rows(pairs, "decoder_"))
    assert all(row[0] == START for row in rows(pairs, "decoder_"))
    encoder = PairEncoder(transformers_config(checkpoint.config), own, name)
    for length in (8, 24):
        source, target = encoder.corrupt(np.arange(10, 10 + length), np.random.default_rng(0))
        assert source[0] == own.bos_token_id
        assert target[-1] == END
        assert max(len(source), len(target)) <= length
        assert len(encoder.framed(source * 9, target * 9, length)[1]) == length


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_the_decoder_writes(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same each time, with random numbers of their own for sources, targets, and what stands twice; a target ends
    where the decoder ends it.
    """
    seeds, sample = list[int](), pairs_module.samples

    def recorded(*args: Any, seed: int, **options: Any) -> Tensor:
        seeds.append(seed)
        return sample(*args, seed=seed, **options)

    monkeypatch.setattr(pairs_module, "samples", recorded)
    once = inputs(place, name, "self", 4)
    text = CalibrationText(("self", "self"), 24 * 8, 24)
    twice = text.inputs(read_checkpoint(place / name), "cpu", SILENT)
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert rows(twice)[:4] == rows(once)
    assert rows(twice, "decoder_")[:4] == rows(once, "decoder_")
    assert len({tuple(row) for row in rows(once)}) == 4
    assert all(END not in row[:-1] for row in rows(once))
    assert all(END not in row for row in rows(once, "decoder_"))


def test_the_command(place: Path, tmp_path: Path) -> None:
    words = ("--groups", 2, "--method", "refined", "--refine-steps", 4, "--tokens", 960)
    words = (*words, "--field", "said", "--target-field", "meant")
    done = run(place / "t5", *words, "--context", 24, "--data", place / "pairs.jsonl", "-o", tmp_path / "out", "-q")
    assert (done.code, done.err.count("\n")) == (0, 1), done.err
    told = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())
    assert told["maps"]["text"]["target_field"] == "meant"


REFUSED = [
    ("marian", "--data text.txt --context 24", "neither sentinels nor a mask token, so plain text makes no pairs"),
    ("t5", "--data pairs.jsonl --field said --target-field nothing", "has no field 'nothing'; it has 'meant'"),
    ("t5", "--data pairs.jsonl --field said --target-field said", "are the same text; name two columns"),
    ("bart", "--data text.txt --context 65", "bart has 64 positions, --context is 65; give at most 64"),
    ("llama", "--data pairs.jsonl --field said --target-field meant", "--target-field is for encoder-decoders"),
]


@pytest.mark.parametrize(("name", "words", "says"), REFUSED)
def test_refused(place: Path, tmp_path: Path, name: str, words: str, says: str) -> None:
    model = SOURCE if name == "llama" else place / name
    named = [str(place / word) if "." in word else word for word in words.split()]
    done = run(model, "--groups", 2, "--method", "calibrated", "--tokens", 960, *named, "-o", tmp_path / "out")
    assert says.format(place=place) in check_refused(done, advice="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_in_some_batches_only(place: Path, name: str) -> None:
    """Whichever batch comes first, the text is the same."""
    plan = plan_conversion(place / name, 2, method="calibrated")
    generator, ids, errors = torch.Generator().manual_seed(0), {}, []
    for prefix, length in (("", 12), ("decoder_", 8)):
        ids[f"{prefix}input_ids"] = torch.randint(5, 100, (16, length), generator=generator)
        mask = ids[f"{prefix}attention_mask"] = torch.ones(16, length, dtype=torch.long)
        mask[8:, length // 2 :] = 0
    for inputs in (ids, {key: part.flip(0) for key, part in ids.items()}):
        calibrator = Calibrator(plan, inputs, MapsOptions(batch=8, device="cpu"))
        errors.append([result.error for layer in range(calibrator.layers) for result in calibrator.run(layer)])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
