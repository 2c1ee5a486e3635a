"""Data of which only the text matters: other columns, empty parts, links and names of files may be
anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.checkpoints import run
from support.documents import lines, open_data, write_table

from gqa.core.errors import TextError
from gqa.corpus.files import find_files
from gqa.corpus.readers import FORMATS
from gqa.corpus.specs import parse_source
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions

TEXTS = [f"text {number} of many words that a model reads" for number in range(40)]


def texts_of(spec: object) -> list[str]:
    return list(parse_source(str(spec)).texts())


# A file of each kind that has columns, and the other form of Arrow's.
KINDS = [f"a{kind.suffixes[0]}" for kind in FORMATS.values() if kind.title != "text"]
KINDS += ["feather.arrow"]


def directory_of(directory: Path, name: str, *tables: pa.Table) -> Path:
    """A directory with each table as a file, in the format of the name."""
    directory.mkdir()
    for number, table in enumerate(tables):
        write_table(directory / f"{number}-{name}", table)
    return directory


def train_blocks(data: Path, tokenizer: Any, *, streaming: bool) -> Dataloader:
    options = UptrainOptions(
        "m",
        data=(str(data),),
        streaming=streaming,
        context=16,
        batch_size=1,
        steps=2,
        teacher="none",
        repeats=False,
    )
    return open_data(options, tokenizer, 64)


@pytest.mark.parametrize("name", KINDS)
def test_a_column_may_have_another_type_in_another_file(name: str, tmp_path: Path) -> None:
    numbers = pa.table({"text": TEXTS[:20], "score": [0.5] * 20})
    words = pa.table({"text": TEXTS[20:], "score": ["n/a"] * 20})
    assert texts_of(directory_of(tmp_path / "data", name, numbers, words)) == TEXTS


@pytest.mark.parametrize("name", KINDS)
def test_a_column_may_be_in_some_files_only(name: str, tmp_path: Path) -> None:
    plain = pa.table({"text": TEXTS[:20]})
    more = pa.table({"id": range(20), "text": TEXTS[20:]})
    assert texts_of(directory_of(tmp_path / "data", name, plain, more, plain)) == [
        *TEXTS,
        *TEXTS[:20],
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "feather.arrow", "a.jsonl"])
def test_other_columns_may_be_maps_and_structs(name: str, tmp_path: Path) -> None:
    maps = pa.array([[("source", "web")]] * 40, pa.map_(pa.string(), pa.string()))
    structs = pa.array([{"a": {"b": [1]}}] * 40)
    table = pa.table({"meta": maps, "text": TEXTS, "more": structs})
    assert texts_of(directory_of(tmp_path / "data", name, table)) == TEXTS


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "feather.arrow", "a.csv"])
def test_a_part_without_rows_holds_no_text(name: str, tmp_path: Path) -> None:
    tables = [
        pa.table({"text": pa.array(part, pa.string())}) for part in ([], TEXTS[:20], [], TEXTS[20:])
    ]
    assert texts_of(directory_of(tmp_path / "data", name, *tables)) == TEXTS
    with pytest.raises(TextError, match="has no text left: it is empty or blank"):
        texts_of(directory_of(tmp_path / "empty", name, tables[0]))


@pytest.mark.parametrize("streaming", [False, True])
def test_training_reads_empty_parts_and_other_columns(
    streaming: bool, tmp_path: Path, tokenizer: Any
) -> None:
    """Cached and streamed: the blocks are those of a plain file."""
    empty = pa.table({"text": pa.array([], pa.string())})
    maps = pa.array([[("source", "web")]] * 40, pa.map_(pa.string(), pa.string()))
    data = directory_of(tmp_path / "data", "a.parquet", pa.table({"text": TEXTS, "meta": maps}))
    plain = directory_of(tmp_path / "plain", "a.jsonl", pa.table({"text": TEXTS}))
    blocks, expected = (train_blocks(one, tokenizer, streaming=streaming) for one in (data, plain))
    assert [blocks.block(i)["input_ids"].tolist() for i in range(2)] == [
        expected.block(i)["input_ids"].tolist() for i in range(2)
    ]
    write_table(data / "1-a.parquet", empty)
    again = train_blocks(data, tokenizer, streaming=streaming)
    assert again.block(1)["input_ids"].tolist() == expected.block(1)["input_ids"].tolist()


def test_a_file_without_the_column_is_named_with_the_columns_that_it_has(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory_of(
        directory, "a.csv", pa.table({"text": TEXTS}), pa.table({"title": TEXTS, "id": TEXTS})
    )
    with pytest.raises(TextError, match=r"data/1-a.csv has no column 'text'; it has 'id', 'title'"):
        texts_of(directory)


JSON = [
    '[{"text": "a"}, {"text": "b", "n": {}}]',
    '["a", "b"]',
    '{"text": ["a", "b"],\n "n": [1, 2]}',
    '\n\n{"text": "a"}\n\n{"n": 1, "text": "b"}',
]


@pytest.mark.parametrize("content", JSON)
def test_json_may_be_lines_or_one_value(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert texts_of(tmp_path / "a.json") == ["a", "b"]


def test_zst_needs_no_further_package(tmp_path: Path) -> None:
    with pa.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as stream:
        stream.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS))
    assert texts_of(tmp_path / "a.jsonl.zst") == TEXTS


# ---------------------------------------------------------------------------------- links and names


def test_a_directory_with_links_to_itself_is_searched_once(tmp_path: Path) -> None:
    """With two links, every path of them would be searched: 2^40."""
    (tmp_path / "data/deep").mkdir(parents=True)
    lines(tmp_path / "data/a.jsonl", {"text": "a"})
    lines(tmp_path / "data/deep/b.jsonl", {"text": "b"})
    for number in range(2):
        (tmp_path / f"data/l{number}").symlink_to(".")
        (tmp_path / f"data/deep/l{number}").symlink_to("..")
    assert texts_of(tmp_path / "data") == ["a", "b"]
    assert texts_of(tmp_path / "data" / "**") == ["a", "b"]
    assert texts_of(tmp_path / "data" / "**" / "*.jsonl") == ["a", "b"]


def test_a_file_with_several_paths_is_read_once(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    os.link(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    assert find_files(str(tmp_path)) == (tmp_path / "a.jsonl",)
    assert texts_of(tmp_path / "*.jsonl") == ["a"]


def test_a_directory_of_links_is_read(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    lines(tmp_path / "store/1", {"text": "a"})
    lines(tmp_path / "store/x.jsonl", {"text": "b"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").symlink_to("../store/1")
    (tmp_path / "data/more").symlink_to("../store")
    (tmp_path / "data/gone.jsonl").symlink_to("nowhere")
    assert texts_of(tmp_path / "data") == ["a", "b"]


NAMES = [
    "a[1]",
    "a*",
    "a?",
    "{a,b}",
    "a b",
    "a#b",
    "a%41",
    "a:b",
    "a@b",
    "a\nb",
    "it's",
    'a"b',
    "-a",
    "a::b",
    "__a__",
    "~a",
    "a\\b",
    "$HOME",
    "file:",
    "zip:",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_not_interpreted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, directories and files in directories, by absolute and relative paths."""
    monkeypatch.chdir(tmp_path)
    directory = Path(name)
    directory.mkdir()
    lines(directory / f"{name}.jsonl", {"text": "in"})
    lines(Path(f"{name}.jsonl"), {"text": "out"})
    lines(Path("a1.jsonl"), {"text": "other"})
    for path in (Path(name), tmp_path / name, Path(name) / f"{name}.jsonl"):
        assert texts_of(path if path.is_absolute() else f"./{path}") == ["in"]
    assert texts_of(f"./{name}.jsonl") == ["out"]
    assert texts_of(f"./{name}/*.jsonl") == ["in"]


# ------------------------------------------------------------------------------------ every command


def test_every_command_reads_a_directory_with_an_empty_part(small: Path, tmp_path: Path) -> None:
    empty = pa.table({"text": pa.array([], pa.string()), "n": pa.array([], pa.int64())})
    maps = pa.array([[("source", "web")]] * 40, pa.map_(pa.string(), pa.string()))
    data = directory_of(
        tmp_path / "a[1] b", "a.parquet", empty, pa.table({"text": TEXTS, "n": maps})
    )
    out, text = tmp_path / "-o u't", ("--data", data, "--context", 16)
    converted = run(small, "-g", 2, *text, "--tokens", 256, "-o", out, "-q")
    converted.expect(err="")
    evaluated = run(small, out, *text, "-q", program="gqa-eval")
    evaluated.expect(err="")
    trained = run(
        out,
        "--teacher",
        "none",
        *text,
        "--steps",
        1,
        "--batch-size",
        1,
        "-o",
        tmp_path / "t",
        "-q",
        program="gqa-uptrain",
    )
    trained.expect(err="")
