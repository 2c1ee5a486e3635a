"""JSON that somebody else wrote is read, or refused in one line, whatever is in it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from support.checkpoints import INDEX, check_refused, llama, run

from gqa.checkpoint.provenance import PROVENANCE, read_record
from gqa.checkpoint.read import read_checkpoint
from gqa.core.errors import CorruptError, one_line
from gqa.core.json_text import MAX_BYTES, MAX_DEPTH, parse_json, read_json_file

HOSTILE = {
    "just deeper than allowed": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    # What json reads, and json.dumps with an indentation does not write.
    "deep": '{"a":' * 520 + "1" + "}" * 520,
    "deeper than json reads": "[" * 100_000,
    "a number of 5,000 digits": '{"a": ' + "1" * 5000 + "}",
    "a number of 101 digits": '{"a": ' + "1" * 101 + "}",
    "half of a surrogate pair": '{"a": "\\ud800"}',
    "half of a surrogate pair in a key": '{"\\udfff": 1}',
    "nothing": "",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_is_refused_in_one_line(case: str) -> None:
    with pytest.raises(CorruptError, match=r"^x\.json is not JSON in UTF-8") as error:
        parse_json(HOSTILE[case].encode(), "x.json")

    assert len(one_line(str(error.value))) < 300


def test_other_bytes_than_utf8_are_refused() -> None:
    with pytest.raises(CorruptError, match="is not JSON in UTF-8"):
        parse_json(b'{"a": "\xff"}', "x.json")


def test_what_tools_write_is_read() -> None:
    """The control: infinity of tokenizers, a NUL, nesting as deep as allowed; and all of it can be
    walked.
    """
    text = json.dumps({"model_max_length": 10**30, "a\0": float("inf"), "pair": "\U0001f600"})
    assert parse_json(text, "x.json") == json.loads(text)

    deep = parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "x.json")
    assert json.dumps(copy.deepcopy(deep), indent=2).count("[") == MAX_DEPTH


def test_a_file_of_endless_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)

    with pytest.raises(CorruptError, match="has 50,000,001 bytes, but at most 50,000,000"):
        read_json_file(tmp_path / "x.json", "x.json")


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_the_command_refuses_it(file: str, tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    (model / file).write_text(HOSTILE["deep"])

    result = run("--kv-heads", 2, "--method", "mean", "--dry-run", model)

    check_refused(result, f"{file} is not JSON", f"nested deeper than {MAX_DEPTH} levels")


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    (model / PROVENANCE).write_text('{"a": 1}')
    assert read_record(read_checkpoint(model), PROVENANCE) == {"a": 1}

    (model / PROVENANCE).write_text(HOSTILE["deep"])
    assert read_record(read_checkpoint(model), PROVENANCE) is None
