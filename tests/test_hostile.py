"""Broken and hostile checkpoints through the real command: one clear line, exit code 2, nothing
written or touched.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    INDEX,
    K0,
    MERGED,
    SINGLE,
    V0,
    Tensors,
    check_refused,
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
)

from gqa.checkpoint.read import read_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Break = Callable[[Path], object]
ONE = torch.ones(1)


def refused(model: Path, says: tuple[str, ...]) -> None:
    """The command refuses the model, both to plan and to convert it."""
    before, out = snapshot(model), model.parent / "out"
    check_refused(run(*MERGED, "-o", out, model), *says)
    assert snapshot(model) == before
    assert not os.path.lexists(out)
    assert leftovers(out.parent) == []
    check_refused(run(*MERGED, "--dry-run", "--json", model), *says)


def header(
    change: Callable[[dict[str, Any]], Any], data: Callable[[bytes], bytes] = bytes
) -> Break:
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


def link(file: str, target: str) -> Break:
    return lambda model: (model / file).symlink_to(target)


def both(one: Break, other: Break) -> Break:
    return lambda model: (one(model), other(model))


def text(file: str, content: bytes) -> Break:
    return lambda model: (model / file).write_bytes(content)


def pickled(state: object, zipped: bool = True) -> Break:
    """A file of torch.save instead of the safetensors one."""
    path = "pytorch_model.bin"
    return both(
        remove(SINGLE), lambda m: torch.save(state, m / path, _use_new_zipfile_serialization=zipped)
    )


AGAIN, BIN, LFS = (
    "download it again",
    "pytorch_model.bin",
    b"version https://git-lfs.github.com/spec/v1\n",
)
MLX = {K0: torch.ones(16, 4, dtype=torch.uint32)} | {
    K0.replace("weight", part): ONE for part in ("scales", "biases")
}
REFUSED_TYPES = {
    "deepseek_v3": "latent attention",
    "mamba": "no attention",
    "longt5": "related model",
    "umt5": "no number of KV heads",
    "bert": "it is an encoder, which reads a whole text at once: it has no KV cache to shrink; "
    "docs/models.md lists",
    "deberta-v2": "it is an encoder",
}

# What the format's own library does not take; test_fuzz.py compares many more files with it.
UNSOUND: dict[str, Break] = {
    "a length just below the limit in a small file must not allocate it": raw(
        b"{}", length=99_999_999
    ),
    "header nested deeply": raw(b"[" * 200_000),
    "garbage that would take 600 MB of Python's": raw(b"[" + b"[]," * 6_000_000 + b"1]"),
    "truncated": header(lambda h: None, lambda data: data[:-100]),
    "shape overflows": raw(
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,8,0],"data_offsets":[0,0]}}'
    ),
}

Cases = dict[str, tuple[Break, tuple[str, ...]]]
# A way to break a sound checkpoint of one file, and what the message must contain.
CASES: Cases = {
    # config.json
    "no config": (remove("config.json"), ("no config.json", "pass a checkpoint")),
    **{
        f"config is {made[:9]!r}": (text("config.json", made), ("config.json is not JSON", AGAIN))
        for made in (b"{", b"[" * 100_000)
    },
    "config has half a surrogate pair": (
        text("config.json", b'{"model_type":"llama","a":"\\ud800"}'),
        ("config.json is not JSON in UTF-8",),
    ),
    "config is a list": (
        text("config.json", b"[1]"),
        ("config.json holds a JSON list, not an object",),
    ),
    "config is a directory": (
        both(remove("config.json"), lambda m: (m / "config.json").mkdir()),
        ("config.json", "not a regular file"),
    ),
    **{
        f"model_type {odd}": (settings(model_type=odd), ("config.json has no model_type",))
        for odd in ({}, None)
    },
    "unknown model_type": (
        settings(model_type="llaama"),
        ("'llaama'", "transformers does not have"),
    ),
    **{name: (settings(model_type=name), (name, says)) for name, says in REFUSED_TYPES.items()},
    "heads do not divide": (settings(num_attention_heads=7), ("config",)),
    "KV heads do not divide the heads": (settings(kv=3), ("3 ", "8 ")),
    **{
        f"{count} in {key} of {model_type}": (
            settings(model_type=model_type, **{key: count}),
            (key, str(count)),
        )
        for model_type, key, count in (
            ("llama", "num_hidden_layers", 10**12),
            ("llama", "num_attention_heads", 2**63),
            ("llama", "num_labels", 10**12),
            ("bart", "encoder_layers", 10**12),
            ("dbrx", "n_heads", 2**63),
        )
    },
    # which weights
    "no weights": (remove(SINGLE), ("its weights: none", "pass a checkpoint")),
    "weights of another name": (
        settings(transformers_weights="mine.safetensors"),
        ("names another file of weights, 'mine.safetensors'", "rename it to"),
    ),
    "GGUF only": (
        rename(SINGLE, "model.gguf"),
        ("model.gguf", "from which the GGUF or ONNX file was made"),
    ),
    "adapter only": (
        both(rename(SINGLE, "adapter_model.bin"), rename("config.json", "adapter_config.json")),
        ("no config.json", "merge it into its base model"),
    ),
    "packed names": (
        tensors(lambda t: t | {K0.replace("weight", "qweight"): torch.ones(4, 4)}),
        ("k_proj.q", "quantized", "dequantize"),
    ),
    "MLX": (tensors(lambda t: t | MLX), (K0, "U32", "quantized or packed", "dequantize")),
    "K in 8 bits": (
        tensors(lambda t: t | {K0: t[K0].to(torch.float8_e4m3fn)}),
        (K0, "quantized or packed"),
    ),
    # links and pipes
    "a side file's link leaves the directory": (
        both(text("../secret", b"mine"), link("tokenizer.model", "../secret")),
        ("tokenizer.model", "link that leaves"),
    ),
    "a tokenizer's link leads nowhere": (
        link("merges.txt", "gone"),
        (
            "merges.txt in ",
            "is a broken link: it points to gone, which does not exist",
            "put the file itself",
        ),
    ),
    "a link of the config leads to itself": (
        both(remove("config.json"), link("config.json", "config.json")),
        ("config.json in ", "is a broken link: it points to config.json"),
    ),
    "a side file is a pipe": (lambda m: os.mkfifo(m / "pipe"), ("pipe", "not a regular file")),
    # the header
    **{
        name: (breaks, (SINGLE, "is truncated or not a safetensors file: ", AGAIN))
        for name, breaks in UNSOUND.items()
    },
    "a Git LFS pointer": (text(SINGLE, LFS), ("git lfs pull",)),
    "no tensors": (header(lambda h: {}, lambda data: b""), ("hold no tensors", "download")),
    # tensors against the config and each other
    "K has other rows": (
        settings(kv=2),
        (K0, "[16, 32]", "16 rows", "config asks for", "2 key heads x 4"),
    ),
    "a layer with more digits than Python reads": (
        tensors(lambda t: t | {K0.replace(".0.", f".{'1' * 5000}."): t[K0]}),
        ("looks like keys or values",),
    ),
    "K without V": (
        tensors(lambda t: t.__delitem__(V0)),
        ("layers.0.self_attn has k_proj but no v_proj",),
    ),
    "no attention at all": (
        tensors(lambda t: {n: t[n] for n in t if "attn" not in n}),
        ("no tensor like",),
    ),
    "an unknown tensor in attention": (
        tensors(lambda t: t | {K0.replace("k_proj", "k_prj"): torch.ones(3, 5)}),
        ("k_prj.weight [3, 5] F32", "is not a known tensor of an attention module"),
    ),
    "a name with line breaks": (
        tensors(lambda t: t | {K0.replace("k_proj", "\n\x1b[2Jx"): torch.ones(1)}),
        ("\\n\\x1b[2Jx",),
    ),
    # not safetensors
    "not only tensors in .bin": (
        pickled({"model": weights(), "step": 3}),
        ("other than named dense te",),
    ),
    "a sparse tensor in .bin": (
        pickled(weights() | {"x": torch.eye(2).to_sparse()}),
        ("named dense", "'x'"),
    ),
    "a .bin tensor far larger than its file": (
        pickled(weights() | {"x": torch.zeros(1).expand(10**9)}),
        ("repeats stored numbers", "'x'"),
    ),
    "the old .bin format": (
        pickled(weights(), zipped=False),
        ("can be mapped (mmap can only", "as safetensors first"),
    ),
}
# The same of one with two shards and an index.
SHARDED: Cases = {
    "index without weight_map": (
        index(lambda made: made.__delitem__("weight_map")),
        (INDEX, "weight_map"),
    ),
    "missing shard": (remove(SECOND), ("has no file", SECOND, AGAIN)),
    "index climbs": (file_of(K0, f"../m/{FIRST}"), ("'../m/", "same directory")),
    "index names a number": (file_of(K0, 7), ("is in 7", "same directory")),
    "index with an endless name": (
        file_of(K0, "m" * 100_000 + ".safetensors"),
        ("has no file mmm",),
    ),
    "a link leaves the directory": (
        both(rename(SECOND, "../elsewhere"), link(SECOND, "../elsewhere")),
        (SECOND, "link that leaves", "elsewhere"),
    ),
    "index names a tensor that its shard lacks": (
        file_of("model.x", FIRST),
        ("model.x", FIRST, "it is in no file"),
    ),
    "index names the wrong shard": (file_of(K0, FIRST), (K0, "it is in")),
    "index forgets a tensor": (
        index(lambda made: made["weight_map"].__delitem__(K0)),
        (K0, "is in no file, but"),
    ),
    "a tensor in two shards": (
        both(
            lambda m: write_safetensors(m / "more.safetensors", weights()),
            file_of("lm_head.weight", "more.safetensors"),
        ),
        ("in two files", "duplicate"),
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one file and of two, which are not refused."""
    models = [llama(tmp_path_factory.mktemp("sound") / "m", shards=shards) for shards in (1, 2)]
    assert [run(*MERGED, "--dry-run", model).code for model in models] == [0, 0]
    return models


@pytest.mark.parametrize("case", [*CASES, *SHARDED], ids=lambda case: case.replace(" ", "-"))
def test_broken_checkpoint_is_refused(case: str, sound: list[Path], tmp_path: Path) -> None:
    breaks, says = (CASES | SHARDED)[case]
    model = shutil.copytree(sound[case in SHARDED], tmp_path / "m")
    breaks(model)
    refused(model, says=says)


class Bomb:
    """Unpickled without care, it leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_is_never_executed(zipped: bool, tmp_path: Path) -> None:
    model, ran = llama(tmp_path / "m", shards=1), tmp_path / "ran"
    pickled(weights() | {"bomb": Bomb(ran)}, zipped=zipped)(model)
    refused(model, says=("pytorch_model.bin", "as safetensors first"))
    assert not ran.exists()


def test_too_long_a_header_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small bound, which any header goes over
    monkeypatch.setattr("gqa.checkpoint.files.MAX_HEADER_BYTES", 1000)
    refused(llama(tmp_path / "m"), says=("a header of ", "at most 1,000 are allowed"))


def test_a_side_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before anything is written, not after the weights."""
    model, access = llama(tmp_path / "m"), os.access
    # Root, who may run the tests, may read everything
    monkeypatch.setattr(
        "os.access", lambda path, mode: Path(path).name != "tokenizer.json" and access(path, mode)
    )
    check_refused(run(*MERGED, "--dry-run", model), "tokenizer.json: Permission denied", code=1)


def test_hidden_files_are_not_looked_at(tmp_path: Path) -> None:
    """They are not copied, so nothing is wrong with a link of theirs."""
    model = llama(tmp_path / "m")
    (model / ".Trash-0").symlink_to(tmp_path.parent)
    assert read_checkpoint(model).warnings == ()
    (model / "trash").symlink_to(tmp_path.parent)
    assert "trash is a link that leaves" in read_checkpoint(model).warnings[0]


def test_hub_cache_links_are_followed_to_their_blobs_only(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    snapshot_dir, blobs = entry / "snapshots" / "c0ffee", entry / "blobs"
    llama(snapshot_dir, side_files=False)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot_dir.iterdir())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(f"../../blobs/{number:040x}")
    assert run(*MERGED, "-o", tmp_path / "good", snapshot_dir).code == 0
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    link = snapshot_dir / FIRST
    link.resolve().rename(other / "theirs")
    link.unlink()
    link.symlink_to(other / "theirs")
    check_refused(run(*MERGED, "-o", tmp_path / "bad", snapshot_dir), FIRST, "link that leaves")
