"""Broken and hostile checkpoints through the real command: one clear line, exit code 2, nothing written or touched."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    INDEX,
    K0,
    SINGLE,
    V0,
    Result,
    Tensors,
    config,
    edit_json,
    leftovers,
    llama,
    read_header,
    run,
    snapshot,
    weights,
    write_json,
    write_raw,
    write_safetensors,
)  # fmt: skip

from gqa.checkpoint.errors import CorruptError
from gqa.checkpoint.headers import read_header as read_safetensors_header

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Break = Callable[[Path], object]


def check_refused(result: Result, *says: str, code: int = 2) -> None:
    """One line for people that says what was given and what to do, and no traceback."""
    assert result.code == code, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.startswith("gqa-convert: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert len(result.err) < 1200
    for words in says:
        assert words in result.err, (words, result.err)
    assert "; " in result.err, "what is to be done?"


def check_untouched(model: Path, before: Mapping[str, str], out: Path) -> None:
    assert snapshot(model) == before
    assert not os.path.lexists(out)
    assert leftovers(out.parent) == []


def refused(model: Path, *words: object, says: tuple[str, ...], code: int = 2) -> None:
    """The command refuses the model, both to plan and to convert it."""
    before, out = snapshot(model), model.parent / "out"
    check_refused(run(*words, "-o", out, model), *says, code=code)
    check_untouched(model, before, out)
    check_refused(run(*words, "--dry-run", "--json", model), *says, code=code)


@dataclass(frozen=True)
class Case:
    """A way to break a sound checkpoint, and what the message must contain."""

    name: str
    breaks: Break
    says: tuple[str, ...]
    shards: int = 1


def header(change: Callable[[dict[str, Any]], Any], data: Callable[[bytes], bytes] = bytes) -> Break:
    """Alter the header (as an object) and the bytes of the single file."""

    def breaks(model: Path) -> None:
        made, rest = read_header(model / SINGLE)
        other = change(made)
        write_raw(model / SINGLE, json.dumps(made if other is None else other).encode(), data(rest))

    return breaks


def raw(text: bytes, data: bytes = b"", length: int | None = None) -> Break:
    return lambda model: write_raw(model / SINGLE, text, data, length)


def tensors(change: Callable[[Tensors], Any]) -> Break:
    """Alter the tensors, the file stays well-formed."""

    def breaks(model: Path) -> None:
        made = weights()
        other = change(made)
        write_safetensors(model / SINGLE, made if other is None else other)

    return breaks


def index(change: Callable[[dict[str, Any]], Any]) -> Break:
    return lambda model: edit_json(model / INDEX, change)


def file_of(name: str, file: object) -> Break:
    """The index says that a tensor is in `file`."""
    return index(lambda made: made["weight_map"].__setitem__(name, file))


def settings(**changes: Any) -> Break:
    return lambda model: write_json(model / "config.json", config(**changes))


def remove(file: str) -> Break:
    return lambda model: (model / file).unlink()


def rename(file: str, other: str) -> Break:
    return lambda model: (model / file).rename(model / other)


def both(one: Break, other: Break) -> Break:
    return lambda model: (one(model), other(model))


def text(file: str, content: bytes) -> Break:
    return lambda model: (model / file).write_bytes(content)


def shift(name: str, begin: int, end: int) -> Callable[[dict[str, Any]], None]:
    """Move the offsets of a tensor by so many bytes."""

    def change(made: dict[str, Any]) -> None:
        old = made[name]["data_offsets"]
        made[name]["data_offsets"] = [old[0] + begin, old[1] + end]

    return change


def setting(name: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda made: made[name].__setitem__(key, value)


def again(model: Path, file: str) -> None:
    """Every tensor of the first shard is in another file of the index too."""
    write_safetensors(model / file, weights())
    edit_json(model / INDEX, lambda made: made["weight_map"].__setitem__("lm_head.weight", file))


def leaving_link(model: Path) -> None:
    (model / SECOND).rename(model.parent / "elsewhere.safetensors")
    (model / SECOND).symlink_to(model.parent / "elsewhere.safetensors")


def leaving_side_file(model: Path) -> None:
    (model.parent / "secret").write_text("mine")
    (model / "tokenizer.model").symlink_to(model.parent / "secret")


def nested(depth: int) -> bytes:
    return b'{"model_type":"llama","x":' + b"[" * depth + b"]" * depth + b"}"


def duplicates(model: Path) -> None:
    """The same name twice in one header: the format's own reader takes the last."""
    made, data = read_header(model / SINGLE)
    entry = json.dumps({K0: made[K0]})[1:-1]
    write_raw(model / SINGLE, (json.dumps(made)[:-1] + "," + entry + "}").encode(), data)


def cast(made: Tensors, names: tuple[str, ...], to: torch.dtype) -> None:
    for name in names:
        made[name] = made[name].to(to)


BIG = b'{"a":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0]}}'
PACKED = {K0.replace("weight", part): torch.ones(4, 4) for part in ("qweight", "qzeros", "scales")}
AGAIN = "download it again"

CASES = (
    # config.json
    Case("no config", remove("config.json"), ("no config.json", "give a directory")),
    Case("config is not JSON", text("config.json", b"{"), ("config.json is not JSON", AGAIN)),
    Case("config is not UTF-8", text("config.json", b'{"a":"\xff"}'), ("config.json is not JSON",)),
    Case("config has half a surrogate pair", text("config.json", b'{"model_type":"llama","a":"\\ud800"}'),
         ("config.json is not JSON in UTF-8",)),
    Case("config is empty", text("config.json", b""), ("config.json is not JSON",)),
    Case("config is a list", text("config.json", b"[1]"), ("config.json holds a JSON list, not an object",)),
    Case("config is a directory", both(remove("config.json"), lambda m: (m / "config.json").mkdir()),
         ("config.json", "not a regular file")),
    Case("config without model_type", settings(model_type=...), ("config.json has no model_type",)),
    Case("model_type is a number", settings(model_type=7), ("config.json has no model_type",)),
    Case("unknown model_type", settings(model_type="llaama"), ("'llaama'", "transformers does not have")),
    Case("deep nesting", text("config.json", nested(100_000)), ("config.json is not JSON",)),
    Case("less deep nesting", text("config.json", nested(900)), ("config.json",)),
    Case("quantised", settings(quantization_config={"quant_method": "gptq"}), ("quantised", "gptq", "dequantise")),
    Case("compressed", settings(compression_config={"x": 1}), ("quantised", "compression_config")),
    Case("heads do not divide", settings(num_attention_heads=7), ("config",)),
    Case("no heads", settings(num_attention_heads=0), ("config",)),
    Case("negative heads", settings(num_attention_heads=-8), ("config",)),
    Case("negative KV heads", settings(kv=-4), ("config",)),
    Case("KV heads do not divide the heads", settings(kv=3), ("3 ", "8 ")),
    Case("endless heads", settings(num_attention_heads=10**12, head_dim=4), ("config",)),
    Case("endless layers", settings(num_hidden_layers=10**12), ("config",)),
    Case("no layers", settings(num_hidden_layers=0), ("config",)),
    Case("negative layers", settings(num_hidden_layers=-1), ("config",)),
    Case("heads in words", settings(num_attention_heads="eight"), ("config",)),
    Case("text_config in words", settings(model_type="llava", text_config="llama"), ("config",)),
    # which weights
    Case("no weights", remove(SINGLE), ("no weights at all", "give a directory")),
    Case("GGUF only", rename(SINGLE, "model.gguf"), ("model.gguf", "GGUF is another")),
    Case("adapter only", both(rename(SINGLE, "adapter_model.bin"), rename("config.json", "adapter_config.json")),
         ("no config.json", "merged into its base model first")),
    Case("packed names", tensors(lambda t: t | PACKED), ("k_proj.q", "quantised", "dequantise")),
    *(Case(f"K in {to}", tensors(partial(cast, names=(K0, V0), to=to)), (K0, "quantised or packed"))
      for to in (torch.int8, torch.uint8, torch.float8_e4m3fn)),
    # the index
    Case("index is not JSON", text(INDEX, b"{]"), (INDEX, "not JSON", AGAIN), 2),
    Case("index without weight_map", index(lambda made: made.__delitem__("weight_map")), (INDEX, "weight_map"), 2),
    Case("empty index", text(INDEX, b"{}"), (INDEX, "no weight_map"), 2),
    Case("weight_map is a list", index(lambda made: {"weight_map": [1]}), (INDEX, "no weight_map"), 2),
    Case("weight_map is empty", index(lambda made: {"weight_map": {}}), (INDEX, "no weight_map"), 2),
    Case("missing shard", remove(SECOND), ("has no file", SECOND, AGAIN), 2),
    Case("index names a missing file", file_of(K0, "model-9.safetensors"), ("no file model-9.safetensors",), 2),
    Case("index climbs", file_of(K0, f"../m/{FIRST}"), ("'../m/", "same directory"), 2),
    Case("index is absolute", file_of(K0, "/etc/model.safetensors"), ("'/etc/", "same directory"), 2),
    Case("index names a subdirectory", file_of(K0, "a/model.safetensors"), ("'a/", "same directory"), 2),
    Case("index with backslashes", file_of(K0, "..\\m.safetensors"), ("same directory",), 2),
    Case("index with a null byte", file_of(K0, "m\0.safetensors"), ("same directory",), 2),
    Case("index with a line break", file_of(K0, "m\n.safetensors"), ("same directory",), 2),
    Case("index names a number", file_of(K0, 7), ("is in 7", "same directory"), 2),
    Case("index names no shard", file_of(K0, "config.json"), ("'config.json'", "same directory"), 2),
    Case("index names a hidden file", file_of(K0, ".safetensors"), ("same directory",), 2),
    Case("index with an endless name", file_of(K0, "m" * 100_000 + ".safetensors"), ("has no file mmm",), 2),
    Case("a link leaves the directory", leaving_link, (SECOND, "link that leaves", "elsewhere"), 2),
    Case("a side file's link leaves the directory", leaving_side_file, ("tokenizer.model", "link that leaves")),
    Case("a side file's link leads nowhere", lambda m: (m / "merges.txt").symlink_to("gone"), ("no file merges.txt",)),
    Case("a side directory's link leaves the directory", lambda m: (m / "runs").symlink_to(m.parent),
         ("runs in", "is a link to a directory")),
    Case("a side directory's link leads back", lambda m: (m / "assets/again").symlink_to(m / "assets"),
         ("assets/again in", "is a link to a directory")),
    Case("a link to itself", both(remove(SECOND), lambda m: (m / SECOND).symlink_to(SECOND)), (SECOND,), 2),
    Case("a side file is a pipe", lambda m: os.mkfifo(m / "pipe"), ("pipe", "not a regular file")),
    Case("index names a tensor that its shard lacks", file_of("model.x", FIRST), ("model.x", FIRST, "no file has"), 2),
    Case("index names the wrong shard", file_of(K0, FIRST), (K0, "it is in"), 2),
    Case("index forgets a tensor", index(lambda made: made["weight_map"].__delitem__(K0)), (K0, "not in the ind"), 2),
    Case("a tensor in two shards", lambda m: again(m, "model-extra.safetensors"), ("in two files", "duplicate"), 2),
    # the header
    Case("empty file", text(SINGLE, b""), (SINGLE, "truncated", AGAIN)),
    Case("seven bytes", text(SINGLE, b"1234567"), (SINGLE, "truncated")),
    Case("a Git LFS pointer", text(SINGLE, b"version https://git-lfs.github.com/spec/v1\n"), ("git lfs pull",)),
    Case("a web page", text(SINGLE, b"<!DOCTYPE html><html>Not found</html>"), (SINGLE, "not safetensors?")),
    Case("header longer than the file", raw(b"{}", length=4000), ("truncated", "4000", "10", AGAIN)),
    Case("header of 2^63 bytes", raw(b"{}", length=2**63), (str(2**63), "20000000 are allowed")),
    Case("header is not JSON", raw(b"{'a':1}"), ("its header is not JSON",)),
    Case("header is not UTF-8", raw(b'{"\xff":1}'), ("its header is not JSON",)),
    Case("header is empty", raw(b""), ("its header is not JSON",)),
    Case("header has NaN", raw(b'{"a":NaN}'), ("its header is not JSON", "NaN")),
    Case("header has half a surrogate pair", header(lambda h: h | {"\ud800": h[K0]}), ("not JSON", "surrogates")),
    Case("header nested deeply", raw(b"[" * 200_000), ("its header is not JSON",)),
    Case("header is a list", raw(b"[]"), ("JSON list, not an object",)),
    Case("header is all", header(lambda h: {}, lambda data: b""), ("hold no tensors", "download")),
    Case("metadata is a list", header(lambda h: h | {"__metadata__": [1]}), ("__metadata__", "object of strings")),
    Case("metadata of numbers", header(lambda h: h | {"__metadata__": {"a": 1}}), ("__metadata__",)),
    Case("an entry is a list", header(lambda h: h | {K0: ["F32", [1], [0, 4]]}), (K0, "dtype, shape and data_offsets")),
    Case("an entry lacks its shape", header(lambda h: h[K0].__delitem__("shape")), (K0, "dtype, shape")),
    Case("unknown dtype", header(setting(K0, "dtype", "F33")), (K0, "unknown dtype 'F33'", "BF16")),
    Case("dtype is a list", header(setting(K0, "dtype", ["F32"])), (K0, "unknown dtype")),
    Case("duplicate tensor", duplicates, ("duplicate", K0)),
    Case("overlapping offsets", header(shift(K0, -8, -8)), ("overlap", AGAIN)),
    Case("a hole", header(shift(K0, 8, 8)), ("hole",)),
    Case("bytes at the end", header(lambda h: None, lambda data: data + b"12345678"), ("8 bytes belong to no tensor",)),
    Case("truncated", header(lambda h: None, lambda data: data[:-100]), ("lm_head.weight", "truncated", AGAIN)),
    Case("offsets out of range", header(setting("lm_head.weight", "data_offsets", [0, 2**62])), ("lm_head", "trunca")),
    Case("minus nothing", raw(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}'), ("natural numbers",)),
    Case("negative offsets", header(setting(K0, "data_offsets", [-4, 4])), (K0, "natural numbers")),
    Case("reversed offsets", header(setting(K0, "data_offsets", [8, 4])), (K0, "bytes 8 to 4")),
    Case("offsets beyond 64 bits", header(setting(K0, "data_offsets", [0, 2**70])), (K0, "natural numbers")),
    Case("offsets of True", header(setting(K0, "data_offsets", [False, True])), (K0, "natural numbers")),
    Case("three offsets", header(setting(K0, "data_offsets", [0, 4, 8])), (K0, "natural numbers")),
    Case("shape is a number", header(setting(K0, "shape", 512)), (K0, "natural numbers")),
    Case("shape of floats", header(setting(K0, "shape", [16.0, 32.0])), (K0, "natural numbers")),
    Case("negative shape", header(setting(K0, "shape", [-16, -32])), (K0, "natural numbers")),
    Case("shape against bytes", header(setting(K0, "shape", [16, 33])), (K0, "2048 bytes", "needs 2112")),
    Case("shape overflows", raw(BIG), ("63 bits",)),
    Case("shape of a thousand dimensions", header(setting(K0, "shape", [1] * 1000)), ("1000 dimensions",)),
    # tensors against the config and each other
    Case("K has other rows", settings(kv=2), (K0, "[16, 32]", "16 rows", "config asks for", "2 key heads x 4")),
    Case("K and V in another width", settings(head_dim=8), (K0, "16 rows", "4 key heads x 8")),
    Case("K without V", tensors(lambda t: t.__delitem__(V0)), ("layers.0.self_attn has k_proj but no v_proj",)),
    Case("V without K", tensors(lambda t: t.__delitem__(K0)), ("layers.0.self_attn has v_proj but no k_proj",)),
    Case("V alone is half", tensors(partial(cast, names=(V0,), to=torch.float16)), ("k_proj F32", "v_proj F16")),
    Case("no attention at all", tensors(lambda t: {n: t[n] for n in t if "attn" not in n}), ("no tensor like",)),
    Case("an unknown tensor in attention", tensors(lambda t: t | {K0.replace("k_proj", "k_prj"): torch.ones(3, 5)}),
         ("k_prj.weight [3, 5] F32", "nearest: k_proj")),
    Case("a name with line breaks", tensors(lambda t: t | {K0.replace("k_proj", "\n\x1b[2Jx"): torch.ones(1)}),
         ("\\n\\x1b[2Jx",)),
    # not safetensors
    Case("pickle without an archive", lambda m: bin_file(m, pickle.dumps({"a": 1})), ("pytorch_model.bin",)),
    Case("a Git LFS pointer as .bin", lambda m: bin_file(m, b"version https://git-lfs.github.com/spec/v1\n"), ("lfs",)),
    Case("not only tensors in .bin", lambda m: save_bin(m, {"model": weights(), "step": 3}), ("other than named te",)),
    Case("a sparse tensor in .bin", lambda m: save_bin(m, weights() | {"x": torch.eye(2).to_sparse()}), ("x is",)),
    Case("a complex tensor in .bin", lambda m: save_bin(m, weights() | {"x": torch.ones(1) * 1j}), ("complex64",)),
    Case("the old .bin format", lambda m: save_bin(m, weights(), zipped=False), ("before 1.6", "as safetensors first")),
)  # fmt: skip


def bin_file(model: Path, content: bytes) -> None:
    (model / SINGLE).unlink()
    (model / "pytorch_model.bin").write_bytes(content)


def save_bin(model: Path, state: object, zipped: bool = True) -> None:
    (model / SINGLE).unlink()
    torch.save(state, model / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_broken_checkpoint_is_refused(case: Case, tmp_path: Path) -> None:
    model = llama(tmp_path / "m", shards=case.shards)
    assert run("--groups", 2, "--dry-run", model).code == 0
    case.breaks(model)
    refused(model, "--groups", 2, says=case.says)


REFUSED_TYPES = {
    "deepseek_v3": "latent attention", "persimmon": "no number of key/value heads", "jetmoe": "G x top-k",
    "zaya": "convolutions", "moonshine": "reshapes its queries", "longt5": "sister model",
    "mamba": "no attention", "llama4_vision_model": "not supported",
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED_TYPES)
def test_refused_architecture(model_type: str, tmp_path: Path) -> None:
    model = llama(tmp_path / "m", model_type=model_type)
    refused(model, "--groups", 2, says=(model_type, REFUSED_TYPES[model_type]))


class Bomb:
    """Unpickled without care, it leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_is_never_executed(zipped: bool, tmp_path: Path) -> None:
    model, ran = llama(tmp_path / "m", shards=1), tmp_path / "ran"
    save_bin(model, weights() | {"bomb": Bomb(ran)}, zipped=zipped)
    refused(model, "--groups", 2, says=("pytorch_model.bin", "as safetensors first"))
    assert not ran.exists()


def test_duplicate_names_are_found_in_linear_time(tmp_path: Path) -> None:
    model = llama(tmp_path / "m", shards=1)
    names = [f'"{number % 100_000}":1' for number in range(100_001)]
    raw(("{" + ",".join(names) + "}").encode())(model)
    refused(model, "--groups", 2, says=("duplicate 0 in its header",))


def test_too_large_json_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gqa.checkpoint.read.MAX_JSON_BYTES", 100)
    refused(llama(tmp_path / "m"), "--groups", 2, says=("config.json has", "at most 100 are allowed"))


def test_files_are_opened_only_after_the_header_is_checked(tmp_path: Path) -> None:
    """A length just below the limit in a small file must not allocate it."""
    model = llama(tmp_path / "m", shards=1)
    (model / SINGLE).write_bytes(struct.pack("<Q", 19_999_999) + b"{}")
    refused(model, "--groups", 2, says=("truncated", "19999999"))


@pytest.mark.parametrize(
    ("garbage", "count", "says"),
    [
        (b"[],", 33_000_000, "header of 99000003 bytes, at most 20000000 are allowed"),
        (b"[],", 6_000_000, "its header holds more than 100000 tensors would"),
        (b'{"a":0},', 2_000_000, "its header holds more than 100000 tensors would"),
    ],
)
def test_a_large_header_of_garbage_is_not_parsed(tmp_path: Path, garbage: bytes, count: int, says: str) -> None:
    """100 MB of empty lists are 3 GB of Python's."""
    write_raw(tmp_path / SINGLE, b"[" + garbage * count + b"1]", b"")
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("rb") as stream:
        tracemalloc.start()
        start = time.monotonic()
        with pytest.raises(CorruptError, match=says):
            read_safetensors_header(stream, SINGLE, size)
        seconds, (_, peak) = time.monotonic() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < 2
    assert peak < 25 << 20


def test_hub_cache_links_are_followed_to_their_blobs_only(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    snapshot_dir, blobs = entry / "snapshots" / "c0ffee", entry / "blobs"
    llama(snapshot_dir, side_files=False)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot_dir.iterdir())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(f"../../blobs/{number:040x}")
    assert run("--groups", 2, "-o", tmp_path / "good", snapshot_dir).code == 0
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    link = snapshot_dir / FIRST
    link.resolve().rename(other / "theirs")
    link.unlink()
    link.symlink_to(other / "theirs")
    check_refused(run("--groups", 2, "-o", tmp_path / "bad", snapshot_dir), FIRST, "link that leaves")
