"""Where text comes from: every format gives the same documents, and whatever is wrong is one line
that says where.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset
from support.documents import lines, write
from support.hub_server import Hub, Machine
from support.patches import use_data_cache, use_data_hub
from support.repository import ROOT

from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.errors import TextError
from gqa.corpus.chat_column import chat_column_of_data
from gqa.corpus.readers import FORMATS, allowed_files
from gqa.corpus.sources import Source
from gqa.corpus.specs import (
    BUILT_IN,
    BuiltIn,
    check_text_options,
    parse_source,
    parse_sources,
)
from gqa.uptrain.data_sources import data_sources, validation_sources
from gqa.uptrain.options import UptrainOptions

# Whatever a loader that guesses types would turn into something else, and whatever could be cut in
# two.
TEXTS = [
    "2020-01-01",
    "007",
    "NA",
    "null",
    "[1]",
    'a, "b"\tc',
    "line\nbreak\r\nother",
    "é ü 漢字 🙂",
    "x\u2028y\x85\x0c",
]


def texts_of(spec: object, **options: str) -> list[str]:
    return list(parse_source(str(spec), **options).texts())


def refusal(spec: object, **options: str) -> str:
    with pytest.raises(TextError) as refused:
        texts_of(spec, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


KINDS = {
    "large.parquet": pa.large_string(),
    "coded.parquet": pa.dictionary(pa.int32(), pa.string()),
}
TABLES = [kind for kind in FORMATS.values() if kind.title != "text"]
NAMES = [
    *(f"a{suffix}" for kind in TABLES for suffix in kind.suffixes),
    "a.jsonl.gz",
    "a.JSONL",
    *KINDS,
    "feather.arrow",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path, texts = tmp_path / name, [*TEXTS, "", " \n"]
    source = parse_source(str(write(path, texts, KINDS.get(name))))
    assert list(source.texts()) == TEXTS == list(source.texts())


def test_a_text_file_is_one_document_unless_a_separator_cuts_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"# three\n"))
    (tmp_path / "empty.txt").touch()
    assert texts_of(tmp_path / "a.txt") == ["one\n\n\ntwo\n"]
    assert texts_of(tmp_path) == ["one\n\n\ntwo\n", "# three\n"]
    for separator in ("\n\n", "\\n\\n"):
        assert texts_of(tmp_path, separator=separator) == ["one", "two", "# three"]
    for blank in (b"", b"\n", b"\r\n\n"):
        (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + blank + b"text\none\n")
        assert texts_of(tmp_path / "a.csv") == ["one"]


def test_files_directories_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden files, cards and caches are skipped unless they are named."""
    for name in (
        "b.jsonl",
        "a.jsonl",
        "deep/er/c.jsonl",
        ".hidden.jsonl",
        ".cache/d.jsonl",
        "data/train/0.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines(tmp_path / name, {"text": name})
    for name in ("README.md", "README.txt", "deep/LICENSE.txt", "cache-1f2e.arrow"):
        (tmp_path / name).write_text("no data")
    (tmp_path / "b[1].txt").write_text("by name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    deep = ["deep/er/c.jsonl"]
    expected = {
        "[ab].jsonl": ["a.jsonl", "b.jsonl"],
        "d*p/**": deep,
        "deep": deep,
        "./deep/": deep,
        "~/deep": deep,
        "**/*.jsonl": ["a.jsonl", "b.jsonl", "data/train/0.jsonl", *deep],
        "data/**/train/*": ["data/train/0.jsonl"],
        "b[1].txt": ["by name"],
        "*.txt": ["by name"],
        "README.txt": ["no data"],
    }
    assert {spec: texts_of(spec) for spec in expected} == expected

    (tmp_path / "data/test").mkdir()
    lines(tmp_path / "data/test/0.jsonl", {"text": "a"})
    for name in ("b.parquet", "notes", "deep/empty/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    refused = {
        "*.*": (
            "*.* names files of several formats (b.jsonl, b.parquet, b[1].txt); pass a pattern "
            "that names those of one"
        ),
        "data": (
            "the directory data holds several splits (test, train); pass the files of one, like "
            "'data/**/*train*', or all as 'data/**/*'"
        ),
        "stdlib:test": "there is no stdlib:test; pass stdlib:train or stdlib:heldout",
        "a b": (
            "there is no file or directory 'a b', and it is not a dataset name "
            "(org/name[:config[:split]]); check the spelling"
        ),
        "general:test": "there is no general:test; pass general",
        " ": (
            "no data was passed; pass a file, a directory, a pattern, a hub dataset, stdlib:train, "
            "stdlib:heldout or general"
        ),
    }
    for spec in ("none.txt", "~nouser/a.jsonl", "x" * 300 + ".txt"):
        refused[spec] = f"there is no file {spec!r}; check the path"
    allowed = f"allowed are {allowed_files()}"
    refused |= {
        "../none/": "there is no directory '../none/'; check the path",
        "notes": f"notes is not a file of a supported kind; {allowed}; name plain text .txt",
        "deep/empty": f"the directory deep/empty has no file of a supported kind; {allowed}",
        "*.csv": f"no file of a supported kind matches *.csv; {allowed}",
    }
    assert {spec: refusal(spec) for spec in refused} == refused


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train.jsonl", "val.jsonl"), "train, validation"),
        (("training.jsonl", "Test.jsonl"), "test, train"),
        (("train-00000-of-00002.jsonl", "evaluation-00000-of-00001.jsonl"), "eval, train"),
        (("a-train.jsonl", "held-out.jsonl"), "heldout, train"),
    ],
)
def test_splits_are_known_by_their_usual_names(
    tmp_path: Path, names: tuple[str, ...], splits: str
) -> None:
    for name in names:
        lines(tmp_path / name, {"text": name})
    assert f"holds several splits ({splits}); pass the files of one" in refusal(tmp_path)
    assert len(texts_of(f"{tmp_path}/**/*")) == 2  # as the error says


@pytest.mark.parametrize(
    "names",
    [
        ("valid.jsonl", "validation.jsonl", "val.jsonl"),
        ("val-gardena.jsonl", "training-plans.jsonl", "on-testing.jsonl", "evaluator.jsonl"),
    ],
)
def test_words_that_name_no_split_are_no_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Also several names of one split."""
    for name in names:
        lines(tmp_path / name, {"text": name})
    assert len(texts_of(str(tmp_path))) == len(names)


def test_the_page_of_data_names_every_kind_of_file() -> None:
    """In the words of the error."""
    page = (ROOT / "docs/training-text.md").read_text(encoding="utf-8")
    assert f"one of these kinds: {allowed_files()};" in page, (
        f"docs/training-text.md does not say that {allowed_files()} are read"
    )


def test_the_page_of_data_names_every_built_in_text() -> None:
    page = (ROOT / "docs/training-text.md").read_text(encoding="utf-8")
    assert [spec for spec in BUILT_IN if f"| `{spec}` |" not in page] == []


@pytest.fixture
def _tales(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more built-in text, in two parts."""
    monkeypatch.setitem(BUILT_IN, "tales:old", BuiltIn(lambda: ["once"], heldout="tales:new"))
    monkeypatch.setitem(BUILT_IN, "tales:new", BuiltIn(lambda: ["again"]))


@pytest.mark.usefixtures("_tales")
def test_an_entry_makes_a_source() -> None:
    assert texts_of("tales:old") == ["once"]
    assert refusal("tales") == "there is no tales; pass tales:old or tales:new"
    assert refusal(" ").endswith("general, tales:old or tales:new")


@pytest.mark.usefixtures("_tales")
def test_an_entry_names_what_is_held_out_of_it_alone() -> None:
    def held_out(*data: str, **options: Any) -> list[str]:
        sources = validation_sources(UptrainOptions("m", data=data, **options))
        return [source.spec for source in sources]

    assert held_out("tales:old") == ["tales:new"]
    assert held_out("tales:new") == []
    assert held_out("tales:old", "general") == []
    assert held_out("tales:old", validation="general") == ["general"]


# What is in a file, and how what is said of it goes on after its name.
EMPTY = " has no text"
NOT_UTF8 = " is not UTF-8: 'utf-8' codec can't decode byte 0xe9 in position "
UNREADABLE = " cannot be read: "  # and what the library says
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", EMPTY),
    "head.csv": (b"text\n", EMPTY),
    "latin.txt": (b"caf\xe9 au lait", NOT_UTF8),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', UNREADABLE),
    "number.jsonl": (
        b'{"text": 4}\n{"text": null}\n{"text": 5}\n',
        ": column 'text' has type int; pass a column of text with --text-column",
    ),
    "missing.jsonl": (
        b'{"title": "a", "b\\n": 1}\n',
        " has no column 'text'; it has 'b\\n', 'title'",
    ),
    "missing.csv": (
        b"title,body\na,b\n",
        " has no column 'text'; it has 'body', 'title'; name the column of text with --text-column",
    ),
    "pairs.jsonl": (
        b'{"prompt": "a", "completion": "b"}\n',
        " has no column 'text'; it has 'completion', 'prompt'; join prompt and answer into one "
        "column 'text', or write chats in 'messages'",
    ),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', ": column 'text' is not Unicode: "),
    "long.csv": (b"id,text\n1,a\n2,b,c\n", UNREADABLE),
    "not.gz.txt.gz": (b"plain", UNREADABLE),
    "cut.txt.gz": (gzip.compress(b"a" * 1000)[:-12], UNREADABLE),
}


def test_data_that_is_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), TEXTS)
    for specs in (("a.jsonl", "./a.jsonl"), (".", "a.jsonl"), ("stdlib:train", "stdlib:train")):
        with pytest.raises(TextError, match=r"names \S+ 2 times; pass every file and dataset once"):
            parse_sources(specs)
    assert len(parse_sources(("a.jsonl", "stdlib:train"))) == 2


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (data, _) in BROKEN.items():
        Path(name).write_bytes(data)
    os.truncate(write(Path("cut.parquet"), TEXTS), Path("cut.parquet").stat().st_size - 9)
    pq.write_table(pa.table({"text": [1, 2], "title": ["a", "b"]}), "ints.parquet")
    os.truncate(write(Path("cut.arrow"), TEXTS * 100), 2001)
    Path("many").mkdir()
    for number in range(4):
        lines(Path("many", f"{number}.jsonl"), {"text": f"{number}"})
    Path("many/2.jsonl").write_text("{")
    Path("first.jsonl").write_bytes(b'\nnot json\n{"text": "a"}\n')
    Path("long.ndjson").write_bytes(b"x" * 1000)
    Path("escape.jsonl").write_bytes(b"\x1b[2J\n")
    Path("value.json").write_bytes(b'{\n"text":  oh}\n')
    Path("cut.jsonl").write_bytes(b'{"text": "a"}\n\n{"text": "b\n')
    Path("latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), "missing.parquet")
    wanted = {name: name + said for name, (_, said) in BROKEN.items()} | {
        "cut.jsonl": 'line 3 of cut.jsonl is not JSON (\'{"text": "b\'); repair it, or pass other',
        "first.jsonl": "line 2 of first.jsonl is not JSON ('not json'); repair it, or pass other",
        "long.ndjson": f"line 1 of long.ndjson is not JSON ('{'x' * 40} ... {'x' * 20}'); repair",
        "escape.jsonl": "line 1 of escape.jsonl is not JSON ('\\x1b[2J'); repair it",
        "value.json": "value.json cannot be read: Expecting value: line 2 column 10 (char 11); ",
        "latin.jsonl": f"line 2 of latin.jsonl{NOT_UTF8}",
        "missing.parquet": "missing.parquet has no column 'text'; it has 'body', 'title'",
        "cut.parquet": "cut.parquet cannot be read: ",
        "ints.parquet": "ints.parquet: column 'text' has type int; "
        "pass a column of text with --text-column",
        "cut.arrow": "cut.arrow cannot be read: ",
        "many": "line 1 of many/2.jsonl is not JSON ('{'); ",
    }
    assert {name: refusal(name)[: len(said)] for name, said in wanted.items()} == wanted


def test_a_csv_whose_rows_have_more_fields_than_its_header_is_refused(tmp_path: Path) -> None:
    """pandas would take the first column for labels, and give the second as the text."""
    shifted = tmp_path / "shifted.csv"
    shifted.write_text("text,label\nhello,1,\nworld,2,\n")
    assert "rows with more fields than its header has columns" in refusal(shifted)
    shifted.write_text("text,label\nhello,1\nworld,2\n")
    assert texts_of(shifted) == ["hello", "world"]


def test_the_first_file_that_is_not_empty_says_where_chats_are(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    messages = [{"role": "user", "content": "hello"}]
    lines(tmp_path / "b.jsonl", {"messages": messages})
    assert parse_source(str(tmp_path)).columns == ("messages",)
    (tmp_path / "b.jsonl").unlink()
    lines(tmp_path / "b.jsonl", {"text": "hello"})
    assert parse_source(str(tmp_path)).columns == ("text",)


def test_a_broken_first_line_is_no_reason_to_read_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "cut\n' + '{"text": "a"}\n' * 100)
    monkeypatch.setattr("gqa.corpus.readers._MAX_VALUE", 50)
    assert "line 1 of" in refusal(path)
    # One value in several lines, under the name of JSON Lines
    path.write_text('{\n"text":\n"a"\n}\n')
    assert texts_of(path) == ["a"]


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.zst"])
def test_formats_that_compress_themselves_have_no_further_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert "allowed are" in refusal(tmp_path / name)


def test_a_target_that_is_no_text_names_its_option(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["one"], "score": [1]}), tmp_path / "a.parquet")
    columns = {"text_column": "a", "target_column": "score"}
    said = refusal(tmp_path / "a.parquet", **columns)
    assert "pass a column of text with --target-column" in said
    columns = {"text_column": "score", "target_column": "a"}
    assert "--text-column" in refusal(tmp_path / "a.parquet", **columns)


def test_a_stream_without_named_columns_lacks_one() -> None:
    """Of some streams only a row tells which columns there are."""

    def load(columns: object, chats: bool) -> IterableDataset:
        return IterableDataset.from_generator(lambda: iter([{"body": "hello"}]))

    with pytest.raises(TextError, match="lab/data has no column 'text'; it has 'body'"):
        list(Source("lab/data", load).texts())
    assert list(Source("lab/data", load, ("body",)).texts()) == ["hello"]


def test_only_columns_that_may_have_chats_are_decoded() -> None:
    """Others may need packages of their own: here a row of all columns cannot be read."""

    class Data:
        column_names = ("messages", "audio")

        def select_columns(self, columns: list[str]) -> Iterator[dict[str, Any]]:
            assert columns == ["messages"]
            return iter([{"messages": [{"role": "user", "content": "a"}]}])

    assert chat_column_of_data("lab/data", Data, ["text"]) == "messages"


def test_options_of_sources_are_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.jsonl"):
        Path(name).write_text("{}")
    with pytest.raises(
        TextError, match=r"--text-column body is a column .*, but stdlib:train has no columns"
    ):
        check_text_options(["self", "stdlib:train"], "body", None)
    with pytest.raises(
        TextError, match=r"--separator .*, but a.jsonl, stdlib:heldout is not a text file"
    ):
        check_text_options(["a.jsonl", "stdlib:heldout"], "text", "x")
    check_text_options(["a.txt", "a.jsonl"], "body", "x")


def test_training_and_conversion_read_the_parts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one--two")
    specs, parts = (str(tmp_path / "a.txt"),), []
    training = UptrainOptions("m", data=specs, validation=specs[0], separator="--")
    parts += [
        list(sources[0].texts())
        for sources in (data_sources(training), validation_sources(training))
    ]
    parts.append(list(CalibrationText(specs, separator="--")._parse(specs[0]).texts()))
    assert parts == [["one", "two"]] * 3


def test_columns(tmp_path: Path) -> None:
    """A row without a source or a target is left out; names of columns are printed harmlessly."""
    rows = [
        {"a": a, "b": b} for a, b in (("a", None), ("b", "B"), (" ", "C"), ("d", "D"), (None, "E"))
    ]
    pairs = parse_source(
        str(lines(tmp_path / "rows.jsonl", *rows)), text_column="a", target_column="b"
    )
    assert list(pairs.rows()) == [("b", "B"), ("d", "D")]
    message = refusal(lines(tmp_path / "a.jsonl", {"\x1b[2J\nok" * 1000: 1}), text_column="\x1b]0;")
    assert message.isprintable()
    assert len(message) < 1100


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    one, other = (
        lines(tmp_path / "a.jsonl", {"text": "a"}),
        lines(tmp_path / "b.jsonl", {"text": "a"}),
    )
    assert parse_source(str(one)).identify() == parse_source(str(other)).identify()
    identities = {
        parse_source(str(one), text_column=column).identify() for column in ("text", "title")
    }
    lines(one, {"text": "b"})
    for name in ("a.jsonl", "b.csv", "b.txt"):
        (tmp_path / name).write_bytes(one.read_bytes())
        identities.add(parse_source(str(tmp_path / name)).identify())
    separated = parse_source(str(tmp_path / "b.txt"), separator="b").identify()
    assert len(identities | {separated, parse_source(str(one)).heldout_part(0.5).identify()}) == 7
    times, before = (
        (other.stat().st_atime_ns, other.stat().st_mtime_ns),
        parse_source(str(other)).identify(),
    )
    os.utime(lines(other, {"text": "c"}), ns=times)  # the same size, as a copy by rsync has it
    assert parse_source(str(other)).identify() != before


def test_heldout_part(tmp_path: Path) -> None:
    """It depends on the texts alone: not on their order or file, and copies stay together."""
    texts = [f"text {i % 700}" for i in range(1000)]
    source = parse_source(str(write(tmp_path / "a.jsonl", texts)))
    heldout = list(source.heldout_part(0.1).texts())
    assert heldout == [text for text in texts if text in set(heldout)]
    assert 40 < len(set(heldout)) < 100
    again = parse_source(str(write(tmp_path / "b.jsonl", texts[::-1])))
    assert list(again.heldout_part(0.1).texts()) == heldout[::-1]
    assert set(heldout) < set(source.heldout_part(0.2).texts())
    with pytest.raises(
        TextError, match=r"a.jsonl has no text left: it is empty or blank, or all of it is"
    ):
        next(source.heldout_part(0.0).texts())


# ----------------------------------------------------------------------------- data sets of the hub


def data_set(directory: Path) -> Path:
    """Two configurations, the first with two splits."""
    for name in ("a/train", "a/test", "b/train"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        lines(
            directory / f"{name}.jsonl",
            {"text": f"{name} 1", "n": 1},
            {"text": f"{name} 2", "n": 2},
        )
    (directory / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: train, path: a/train.jsonl}\n"
        "  - {split: test, path: a/test.jsonl}\n- config_name: b\n  data_files: "
        "b/train.jsonl\n---\n"
    )
    return directory


def test_a_dataset_that_the_hub_does_not_show_is_refused_with_advice(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be there for who is logged in."""
    use_data_hub(monkeypatch, hub.endpoint)
    use_data_cache(monkeypatch, tmp_path / "cache")
    with machine.entered():
        refused = refusal("lab/none")
    assert refused.endswith("; check the name, or log in (hf auth login)")
    assert ".;" not in refused


def test_hub(
    tmp_path: Path,
    hub: Hub,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing but what is raised is said."""
    use_data_hub(monkeypatch, hub.endpoint)
    use_data_cache(monkeypatch, tmp_path / "cache")
    hub.repo("lab/data", data_set(tmp_path / "data"))
    hub.repo("lab/gated", data_set(tmp_path / "gated"), gated=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/train.parquet").write_bytes(b"PAR1 and no more")
    hub.repo("lab/broken", tmp_path / "broken")
    choose = "; write lab/data:CONFIG or lab/data:CONFIG:SPLIT"
    cannot = "the dataset lab/data cannot be loaded: "
    missing = (
        cannot + "Config name is missing. Please pick one among the available configs: ['a', 'b']"
    )
    read: list[tuple[str, dict[str, Any], list[str]]] = [
        ("lab/data:a", {}, ["a/train 1", "a/train 2"]),
        ("lab/data:a:test", {}, ["a/test 1", "a/test 2"]),
        ("lab/data:a", {"split": "test"}, ["a/test 1", "a/test 2"]),
        ("lab/data:b", {"streaming": True}, ["b/train 1", "b/train 2"]),
    ]
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("lab/data", {}, missing + choose),
        (
            "lab/data:a:x",
            {},
            cannot + "Unknown split \"x\". Should be one of ['train', 'test']" + choose,
        ),
        (
            "lab/data:a:x",
            {"streaming": True},
            cannot + "Bad split: x. Available splits: ['train', 'test']" + choose,
        ),
        (
            "lab/data:a",
            {"text_column": "body"},
            "lab/data:a has no column 'body'; it has 'n', 'text'",
        ),
        (
            "lab/none",
            {},
            "there is no file or directory 'lab/none', and huggingface_hub says: 401 Client Error. "
            "Repository Not Found for url: ",
        ),
        (
            "lab/gated",
            {},
            "the dataset lab/gated cannot be loaded: Dataset 'lab/gated' is a gated",
        ),
        (
            "lab/broken",
            {},
            "the dataset lab/broken cannot be loaded: Parquet magic bytes not found in footer. "
            "Either the file is corrupted or this is not a parquet file",
        ),
    ]
    with machine.entered():
        for spec, options, texts in read:
            assert texts_of(spec, **options) == texts
        for spec, options, message in refused:
            assert refusal(spec, **options).startswith(message)

    requests = len(hub.requests)
    # `datasets` reads its variable only once
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with machine.entered(HF_HUB_OFFLINE="1"):
        assert texts_of("lab/data:a:test") == ["a/test 1", "a/test 2"]
        unreachable = "the dataset lab/none cannot be loaded: Couldn't reach 'lab/none' on the Hub"
        assert refusal("lab/none").startswith(unreachable)
    assert len(hub.requests) == requests
    assert capfd.readouterr() == ("", "")
