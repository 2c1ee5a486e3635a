"""Files of text in every format that is read, and what is tokenized of them: what the tests of the
corpus share.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa.corpus.encoders import Encoded, Encoders, TextEncoder
from gqa.corpus.specs import parse_source
from gqa.corpus.tokens import Documents, tokenize
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.text_data import TextDataBuilder


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Texts of some 5 to 500 tokens, some that spell special tokens, a tenth of them twice."""
    draw = random.Random(seed)
    words = ["def", "return x", "</s>", "<s>", "é漢🙂", "\n    ", "import os\n", "0x1f"]
    texts = [
        f"{seed} {i} " + " ".join(draw.choices(words, k=int(draw.paretovariate(0.8)) % 100))
        for i in range(count)
    ]
    return [*texts, *texts[: count // 10]]


def lines(path: Path, *rows: object) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _write_json_lines(path: Path, table: pa.Table) -> None:
    with pa.output_stream(path, compression="detect") as stream:
        for row in table.to_pylist():
            stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _write_json(path: Path, table: pa.Table) -> None:
    path.write_text(json.dumps(table.to_pylist(), indent=1))


def _write_csv(path: Path, table: pa.Table) -> None:
    table.to_pandas().to_csv(path, index=False)


def _write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path)


def _write_arrow(path: Path, table: pa.Table) -> None:
    make = pa.ipc.new_file if "feather" in path.name else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


# By the first suffix of the name.
_WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    ".jsonl": _write_json_lines,
    ".ndjson": _write_json_lines,
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
}


def write_table(path: Path, table: pa.Table) -> None:
    """A table, in the format and compression that the name of the file says."""
    suffix = path.with_name(path.name.lower()).suffixes[0]
    _WRITERS[suffix](path, table)


def write(path: Path, texts: list[str], kind: pa.DataType | None = None) -> Path:
    """Texts with a number each, in the format and compression that the name of the file says;
    `kind` is the type of the texts in Parquet and Arrow.
    """
    column = pa.array(texts, pa.string()).cast(kind or pa.string())
    write_table(path, pa.table({"id": range(len(texts)), "text": column}))
    return path


def tokenized(path: Path, texts: list[str], tokenizer: Any) -> Documents:
    """The texts, written to a file and tokenized from there."""
    return tokenize([parse_source(str(write(path, texts)))], Encoders(tokenizer))


def open_data(options: Any, tokenizer: Any, longest: int) -> Dataloader:
    """The blocks of these options, of one process; `longest`: tokens of a block, at most."""
    return TextDataBuilder(options, Encoders(tokenizer), longest).build()


def documents_of(tokens: list[list[int]]) -> Documents:
    """Documents of these tokens, with digests that differ."""
    digests = [
        row.tobytes()
        for row in np.random.default_rng(0).integers(0, 256, (len(tokens), 32), np.uint8)
    ]
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("int32")), "digest": datasets.Value("binary")}
    )
    data = datasets.Dataset.from_dict({"tokens": tokens, "digest": digests}, features)
    return Documents(data, "", divisible=np.ones(len(tokens), bool))


class Counted:
    """The texts that are tokenized from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts = list[str]()
        encode = TextEncoder.encode

        def counting(encoder: TextEncoder, texts: Sequence[str]) -> list[Encoded]:
            self.texts += texts
            return encode(encoder, texts)

        # What is read again from the cache is not seen in any result
        monkeypatch.setattr(TextEncoder, "encode", counting)

    def taken(self) -> int:
        """How many there were since the last time."""
        count = len(self.texts)
        self.texts.clear()
        return count
