"""What encoder-decoders are calibrated on: columns of a data set, plain text with spans left out, what they write."""

from __future__ import annotations

import io
import json
import shutil
import wave
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from checkpoints import check_refused, run
from datasets import Audio, Dataset
from embedded import SOURCE, bring_class, tokenizer
from test_families import write_checkpoint
from tiny_models import TINY, build
from torch import Tensor
from transformers import AutoTokenizer, WhisperFeatureExtractor

import gqa.convert.align.pairs as pairs_module
from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.checkpoint.read import read_checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert import plan_conversion
from gqa.convert.align.calibration import Calibrator
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.align.refine import Calls, Rows
from gqa.convert.align.watcher import SILENT, Bar
from gqa.convert.heads.config import transformers_config
from gqa.corpus.document import SoundField
from gqa.corpus.hub import read_rows
from gqa.corpus.pairs import PairEncoder, corrupted, read_pairs
from gqa.corpus.recordings import Hearing, Sound, read_transcripts
from gqa.corpus.sources import Source, parse_source

START, END = 1, 2  # of the tiny models
COLUMNS = "--field audio --target-field text --context 24"
ROWS = [{"said": f"{n} in words is " + "one " * (n % 7 + 1), "meant": f"the number {n}"} for n in range(40)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 with sentinels, BART with a mask token, Marian with neither, Whisper; pairs and text."""
    found, plain = tmp_path_factory.mktemp("pairs"), tokenizer()
    marks = {"t5": [f"<extra_id_{n}>" for n in range(8)], "bart": ["<mask>"], "marian": [], "whisper": []}
    for name, added in marks.items():
        tiny = replace(TINY[f"gqa_{name}"], options={**TINY[f"gqa_{name}"].options, "vocab_size": len(plain) + 8})
        where = write_checkpoint(build(tiny, 4), found / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SOURCE / file, where)
        if added:
            own = AutoTokenizer.from_pretrained(SOURCE)
            own.add_special_tokens({"mask_token": added[0]} if name == "bart" else {"additional_special_tokens": added})
            own.save_pretrained(where)
    hears = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "hop_length": 1000}
    hears["chunk_length"] = 1
    (found / "whisper" / "preprocessor_config.json").write_text(json.dumps(hears))
    (found / "speech").mkdir()
    for number in range(6):
        write_sound(found / "speech" / f"{number}.wav", seed=number)
    write_sound(found / "slow.wav", rate=8000)
    write_sound(found / "coarse.wav", width=1)
    write_sound(found / "long.wav", samples=16_160)
    write_sound(found / "whole.wav", samples=16_000)
    (found / "broken.wav").write_bytes(b"RIFF")
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = [{"audio": f"speech/{number}.wav", "text": f"the number {number}" * (1 + number)} for number in range(6)]
    (found / "speech.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_sounds(found / "speech.jsonl")
    (found / "junk.wav").write_bytes(b"no sound at all")
    (found / "gone.jsonl").write_text(json.dumps({"audio": "speech/gone.wav", "text": "gone"}) + "\n")
    (found / "text.txt").write_text("What was said was meant. " * 300)
    return found


def write_sound(path: Path, rate: int = 16_000, width: int = 2, seed: int = 0, samples: int = 4000) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.random.default_rng(seed).bytes(samples * width))


def write_sounds(rows: Path) -> None:
    """The same rows as parquet, with a column as `datasets.Audio` stores it: the last has a path, the others bytes."""
    table = [json.loads(line) for line in rows.read_text().splitlines()]
    for left, row in enumerate(reversed(table)):
        row["audio"] = {"bytes": (rows.parent / row["audio"]).read_bytes() if left else None, "path": row["audio"]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), rows.with_suffix(".parquet"))


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
    given, plain = inputs(place, "t5", "pairs.jsonl", field="said", target_field="meant"), tokenizer()
    # Its tokenizer puts the decoder's first token before a text.
    known = {tuple(plain(row["said"])["input_ids"][:24]): plain(row["meant"])["input_ids"][1:] for row in ROWS}
    assert len(rows(given)) == 12
    for source, target in zip(rows(given), rows(given, "decoder_"), strict=True):
        assert target == [START, *known[tuple(source)]]
    again = inputs(place, "t5", "pairs.jsonl", field="said", target_field="meant")
    assert torch.equal(again["input_ids"], given["input_ids"])


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


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_plain_text_makes_pairs(place: Path, name: str) -> None:
    given = inputs(place, name, "text.txt")
    marks = {"t5": "<extra_id_0>", "bart": "<mask>"}
    mark = read_marks(place / name)[marks[name]]
    assert all(mark in row for row in rows(given))
    assert all((mark in row) == (name == "t5") for row in rows(given, "decoder_"))
    assert all(row[0] == START for row in rows(given, "decoder_"))


def read_marks(model: Path) -> dict[str, int]:
    return {one["content"]: one["id"] for one in json.loads((model / "tokenizer.json").read_text())["added_tokens"]}


@pytest.mark.parametrize(
    ("name", "source", "how"),
    [("t5", "self", {}), ("marian", "self", {}), ("marian", "pairs.jsonl", {"field": "said", "target_field": "self"})],
)
def test_the_decoder_writes(place: Path, name: str, source: str, how: dict[str, str]) -> None:
    """The same each time; a target ends where the decoder ends it."""
    given, again = (inputs(place, name, source, 4, **how) for _ in range(2))
    assert all(torch.equal(given[key], again[key]) for key in given)
    if source == "self":
        assert len({tuple(row) for row in rows(given)}) == 4
        assert all(END not in row[:-1] for row in rows(given))
    assert all(END not in row for row in rows(given, "decoder_"))


def test_a_model_that_is_code_writes_where_that_is_asked_for(place: Path, tmp_path: Path) -> None:
    """Its own class, of which every text is one token long; not trusted, it is read by transformers' class."""
    bart = Path(shutil.copytree(place / "bart", tmp_path / "bart"))
    bring_class(bart, "AutoModelForSeq2SeqLM", "BartForConditionalGeneration", END, model_type="bart")
    for trusted in (True, False):
        given = inputs(tmp_path, "bart", "self", 4, trust_remote_code=trusted)
        assert (rows(given, "decoder_") == [[START]] * 4) is trusted


def test_whatever_is_written_has_random_numbers_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources and targets, and what stands twice; the first source is what it is alone."""
    seeds, plain = list[int](), pairs_module.samples

    def told(*given: Any, seed: int, **how: Any) -> Tensor:
        seeds.append(seed)
        return plain(*given, seed=seed, **how)

    monkeypatch.setattr(pairs_module, "samples", told)
    alone = inputs(place, "marian", "self", 4)
    text = CalibrationText(("self", "self"), 24 * 8, 24)
    both = text.inputs(read_checkpoint(place / "marian"), "cpu", SILENT)
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert rows(both)[:4] == rows(alone)


def test_recordings(place: Path, tmp_path: Path) -> None:
    """What the extractor makes of each, and what the decoder then writes; the command is calibrated on it."""
    given, fewer = (inputs(place, "whisper", "speech/*.wav", count) for count in (12, 4))
    extractor = WhisperFeatureExtractor.from_pretrained(place / "whisper")
    known = set()
    for file in (place / "speech").iterdir():
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(4000), "<i2") / 32768
        known.add(extractor(samples, sampling_rate=16_000)["input_features"].tobytes())
    assert given["input_features"].shape == (6, 8, 16)
    assert {row.numpy().tobytes() for row in given["input_features"]} == known
    assert torch.equal(fewer["input_features"], given["input_features"][:4])
    assert all(row[0] == START and END not in row for row in rows(given, "decoder_"))
    assert len({tuple(row) for row in rows(given, "decoder_")}) > 1
    assert bool(inputs(place, "whisper", "whole.wav")["input_features"][0, :, -1].any()), "the whole window is heard"
    words = ("--groups", 2, "--method", "calibrated", "--data", place / "speech", "--context", 24, "--tokens", 144)
    done = run(place / "whisper", *words, "-o", tmp_path / "out", "-q")
    assert (done.code, done.err.count("\n")) == (0, 1), done.err
    told = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())
    assert " --data speech " in told["command"]


def test_transcripts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each recording with what its row says, cut to the context; how many are is told."""
    text = CalibrationText((str(place / "speech.jsonl"),), 8 * 6, 8, field="audio", target_field="text")
    with Bar(quiet=True) as bar:
        given = text.inputs(read_checkpoint(place / "whisper"), "cpu", bar)
    hearing, cut = Hearing(place / "whisper", "whisper"), 0
    for number in range(6):
        heard = hearing.features(Sound(str(place / "speech" / f"{number}.wav")))
        (row,) = [at for at, one in enumerate(given["input_features"]) if torch.equal(one, heard)]
        ids = tokenizer()(f"the number {number}" * (1 + number))["input_ids"]
        assert rows(given, "decoder_")[row] == ids[:8]
        cut += len(ids) > 8  # as long as this with the end in the place of BOS
    assert 0 < cut < 6
    assert f"warning: {cut} of 6 pairs are longer, and cut to 8 tokens a side" in capsys.readouterr().err


def test_recordings_are_shared_out_by_weight(place: Path, tmp_path: Path) -> None:
    """As text is; without weights by their names alone. What is no mixture is refused."""
    other, speech, whisper = place / "other.jsonl", place / "speech.jsonl", read_checkpoint(place / "whisper")
    other.write_text(speech.read_text().replace("the number", "another"))
    means = tokenizer()("another")["input_ids"][1]

    def found(*sources: str) -> list[bool]:
        given = CalibrationText(sources, 48, 8, field="audio", target_field="text").inputs(whisper, "cpu", SILENT)
        return [row[1] == means for row in rows(given, "decoder_")]

    assert sorted(found(f"{speech}@2.5", f"{other}@0.5")) == [False] * 5 + [True]
    assert len(found(str(speech), str(other))) == 6
    for sources, reason in (((f"{speech}@2", str(other)), "has no weight"), ((str(other), str(other)), "given twice")):
        with pytest.raises(CorpusError, match=reason):
            found(*sources)


def test_fewer_rows_than_asked_for_are_told_of(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source, count, fields in (
        ("t5", "pairs.jsonl", 41, {"field": "said", "target_field": "meant"}),
        ("whisper", "speech.jsonl", 7, {"field": "audio", "target_field": "text"}),
    ):
        for asked in (count, count - 1):
            text = CalibrationText((str(place / source),), 48 * asked, 48, **fields)
            with Bar(quiet=True) as bar:
                assert len(text.inputs(read_checkpoint(place / name), "cpu", bar)["decoder_input_ids"]) == count - 1
        said = f"{source}: {count - 1} of the {count} pairs of 48 tokens that are asked for; give more text"
        assert capsys.readouterr().err.count(said) == 1


def test_recordings_are_told_apart(place: Path, tmp_path: Path) -> None:
    """By what is in them, by what is said and by their names: work of others is not gone on with."""
    shutil.copytree(place / "speech", tmp_path / "speech")
    listed, whisper = shutil.copy(place / "speech.jsonl", tmp_path), read_checkpoint(place / "whisper")

    def told() -> str:
        return str(CalibrationText((str(listed),), 48, 8, field="audio", target_field="text").identify(whisper))

    found = [told()]
    write_sound(tmp_path / "speech" / "2.wav", seed=7)
    found.append(told())
    Path(listed).write_text(Path(listed).read_text().replace("number 2", "number two", 1))
    found.append(told())
    (tmp_path / "speech" / "2.wav").rename(tmp_path / "speech" / "two.wav")
    Path(listed).write_text(Path(listed).read_text().replace("speech/2.wav", "speech/two.wav"))
    found.append(told())
    assert len(set(found)) == 4
    assert told() == found[3]


def test_a_column_of_sounds(place: Path, tmp_path: Path) -> None:
    """Of parquet, or of the hub's `datasets.Audio`, for which nothing is decoded: heard as the files are. No text."""
    hearing, table, fields = (
        Hearing(place / "whisper", "whisper"),
        place / "speech.parquet",
        (SoundField("audio"), "text"),
    )
    files = [Sound(str(place / f"speech/{number}.wav")) for number in range(6)]
    rows = Dataset.from_parquet(str(table), cache_dir=str(tmp_path)).select(range(5)).cast_column("audio", Audio())
    stored = [parse_source(str(table), field=name) for name in fields]
    of_hub = [Source("lab/speech", partial(read_rows, "lab/speech", rows, name), str) for name in fields]
    for (one, other), count in ((stored, 6), (of_hub, 5)):
        found = list(read_transcripts(one, other))
        assert [text for _, text in found] == [f"the number {number}" * (1 + number) for number in range(count)]
        for number, (sound, _) in enumerate(found):
            assert sound.digest() == files[number].digest()
            assert torch.equal(hearing.features(sound), hearing.features(files[number]))
            assert not torch.equal(hearing.features(sound), hearing.features(files[number - 1]))
    for plain in (
        parse_source(str(table), field="audio"),
        replace(of_hub[0], read=partial(read_rows, "lab", rows, "audio")),
    ):
        with pytest.raises(CorpusError, match="field 'audio' is no text but dict"):
            next(plain.documents())


def test_sounds_are_kept_whole(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a system that writes a part of what it is given at a time."""

    class Little(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:1000]))

    def made(buffering: int = -1) -> Any:
        raw = Little(tmp_path / "held", "w+b")
        return io.BufferedRandom(raw) if buffering else raw

    monkeypatch.setattr("gqa.corpus.recordings.TemporaryFile", made)
    stored = (parse_source(str(place / "speech.parquet"), field=name) for name in (SoundField("audio"), "text"))
    for number, (sound, _) in enumerate(read_transcripts(*stored)):
        assert sound.read() == (place / f"speech/{number}.wav").read_bytes()


def test_other_formats_and_rates(place: Path, tmp_path: Path) -> None:
    """With a library: FLAC is what the WAV file is, and half the rate sounds alike; another note does not."""
    why = "it needs transformers[audio], which is no dependency"
    _, soundfile = pytest.importorskip("soxr", reason=why), pytest.importorskip("soundfile", reason=why)
    hearing, notes = Hearing(place / "whisper", "whisper"), {}
    for rate, pitch in ((16_000, 440), (8_000, 440), (16_000, 450)):
        levels = (16_384 * np.sin(2 * np.pi * pitch * np.arange(rate // 2) / rate)).astype(np.int16)
        for suffix in ("wav", "flac"):
            file = tmp_path / f"{rate}-{pitch}.{suffix}"
            soundfile.write(file, levels, rate, subtype="PCM_16")
            notes[file.name] = hearing.samples(Sound(str(file)))
    assert np.array_equal(notes["16000-440.flac"], notes["16000-440.wav"])
    middle = slice(500, -500)
    for name, apart in (("8000-440.wav", False), ("8000-440.flac", False), ("16000-450.wav", True)):
        assert (np.abs(notes[name] - notes["16000-440.wav"])[middle].max() > 1e-3) == apart
    with pytest.raises(RefusedError, match=r"junk\.wav is no recording that can be read: "):
        hearing.samples(Sound(str(place / "junk.wav")))


def test_the_command(place: Path, tmp_path: Path) -> None:
    words = ("--groups", 2, "--method", "refined", "--refine-steps", 4, "--tokens", 960)
    words = (*words, "--source-field", "said", "--target-field", "meant")
    done = run(place / "t5", *words, "--context", 24, "--data", place / "pairs.jsonl", "-o", tmp_path / "out", "-q")
    assert (done.code, done.err.count("\n")) == (0, 1), done.err
    told = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())
    assert " --field said --target-field meant" in told["command"]


REFUSED = [
    ("whisper", "--data self", "the encoder of whisper is given sound: it takes recordings, and self names none"),
    ("whisper", "--data text.txt", "rows that hold or name them with --field and --target-field, or use"),
    ("whisper", "--data slow.wav --context 24", "16 bits; the model hears 16-bit PCM at 16,000 Hz: ffmpeg -i IN"),
    ("whisper", "--data coarse.wav --context 24", "16,000 Hz of 8 bits; the model hears 16-bit PCM"),
    ("whisper", "--data junk.wav --context 24", "or, to have it converted, pip install 'transformers[audio]'"),
    ("whisper", "--data long.wav --context 24", "has 1.01 s; whisper hears 1 s: cut it into such pieces, or leave"),
    ("whisper", "--data broken.wav --context 24", "broken.wav is no WAV file of PCM (EOFError)"),
    ("whisper", "--data speech/*.wav --target-field text", "nothing matches {place}/speech/*.wav (files: .txt,"),
    (
        "whisper",
        f"--data gone.jsonl {COLUMNS}",
        "{place}/speech/gone.wav cannot be read: No such file or directory",
    ),
    ("marian", "--data text.txt --context 24", "neither sentinels nor a mask token, so plain text makes no pairs"),
    ("t5", "--data pairs.jsonl --field said --target-field nothing", "has no field 'nothing'; it has 'meant'"),
    ("t5", "--data pairs.jsonl --field said --target-field said", "are the same text; name two columns"),
    ("whisper", "--data speech/0.wav --context 65", "whisper has 64 positions, --context is 65; give at most 64"),
    ("bart", "--data text.txt --context 65", "bart has 64 positions, --context is 65; give at most 64"),
    ("llama", "--data pairs.jsonl --field said --target-field meant", "--target-field is for encoder-decoders"),
]


@pytest.mark.parametrize(("name", "words", "says"), REFUSED)
def test_refused(
    place: Path, tmp_path: Path, name: str, words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("soundfile") or find_spec("torchcodec"):  # else transformers says so itself

        def missing(sound: str, rate: int) -> None:
            raise ImportError

        monkeypatch.setattr("transformers.audio_utils.load_audio", missing)
    model = SOURCE if name == "llama" else place / name
    named = [str(place / word) if "." in word else word for word in words.split()]
    done = run(model, "--groups", 2, "--method", "calibrated", "--tokens", 960, *named, "-o", tmp_path / "out")
    assert says.format(place=place) in check_refused(done, advice="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_in_some_batches_only(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches without any are masked like the others, whichever comes first: layers are trained with all masks."""
    plan = plan_conversion(place / name, 2, method="refined")
    generator, ids = torch.Generator().manual_seed(0), {}
    for prefix, length in (("", 12), ("decoder_", 8)):
        ids[f"{prefix}input_ids"] = torch.randint(5, 100, (16, length), generator=generator)
        mask = ids[f"{prefix}attention_mask"] = torch.ones(16, length, dtype=torch.long)
        mask[8:, length // 2 :] = 0
    options = MapsOptions(refinement=Refinement(steps=2, batch=4), batch=8)
    plain, masks = Calls.of, list[Tensor]()

    def noted(*given: Any) -> Calls:
        found = plain(*given)
        given = [*found.args, *found.kwargs.values()]
        masks.extend(each.tensor for each in given if isinstance(each, Rows) and each.tensor.ndim == 5)
        return found

    monkeypatch.setattr(Calls, "of", noted)
    for given in (ids, {key: part.flip(0) for key, part in ids.items()}):
        masks.clear()
        calibrator = Calibrator(plan, given, options)
        modules = sum(len(calibrator.run(layer)) for layer in range(calibrator.layers))
        assert len(masks) == 2 * modules == 8, "a layer of the decoder is given one of each text"
        assert all(len(mask) == 16 and bool((mask[:8] != mask[8:]).any()) for mask in masks)


def test_rows_of_two_columns(tmp_path: Path) -> None:
    """A row without a source or a target is left out, wherever it stands; the others keep what belongs to them."""
    rows = [{"said": s, "meant": m} for s, m in (("a", None), ("b", "B"), (" ", "C"), ("d", "D"), (None, "E"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, meant = (parse_source(str(tmp_path / "rows.jsonl"), field=field) for field in ("said", "meant"))
    assert [(found.text, target) for found, target in read_pairs(said, meant)] == [("b", "B"), ("d", "D")]


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("length", [8, 24])
def test_no_side_of_a_pair_is_longer_than_its_text(place: Path, name: str, length: int) -> None:
    """What the tokenizer puts before it and the end of the target have their room in it."""
    checkpoint = read_checkpoint(place / name)
    made = PairEncoder(transformers_config(checkpoint.config), load_tokenizer(checkpoint), name)
    source, target = made.corrupt(np.arange(10, 10 + length), np.random.default_rng(0))
    assert source[0] == tokenizer().bos_token_id
    assert target[-1] == END
    assert max(len(source), len(target)) <= length
    assert len(made.framed(source * 9, target * 9, length)[1]) == length
