"""Small real checkpoints written by hand, and the command run in this process: what the
hostile-input tests need.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.files import byte_size, format_header
from gqa.core.console import Watcher

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.int32: "I32",
    torch.uint32: "U32",
}
Tensors = dict[str, Tensor]
HEADS, HEAD_DIM, LAYERS, VOCABULARY = 8, 4, 2, 24
K0, V0 = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")
_UNMEASURED = r"--method \w+ does not run the model, .*|the result of --method \w+ is not usable .*"
NEEDS_TRAINING = re.compile(rf"^warning: (?:{_UNMEASURED})\n", re.MULTILINE)
MERGED = ("--kv-heads", 2, "--method", "mean")  # what most conversions of the tests are asked for
SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0", "unused": "\\u00e9"}\r\n',
    "chat_template.jinja": "{{ bös }}\n".encode(),
    "generation_config.json": b'{"do_sample":false}',
    "assets/nested/vocab.txt": bytes(range(256)),
    "modeling_mine.py": b"raise RuntimeError('this file must never be imported')\n",
}


def config(kv: int = 4, **changes: Any) -> dict[str, Any]:
    """config.json of a small Llama, in an order of keys that nothing would choose."""
    made = {
        "vocab_size": VOCABULARY,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": kv,
        "num_attention_heads": HEADS,
        "intermediate_size": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "unknown_to_everybody": {"é": [1, 2.50, None]},
    } | changes
    return {key: value for key, value in made.items() if value is not ...}


def weights(
    kv: int = 4, dtype: str = "F32", layers: int = LAYERS, width: int = 32, seed: int = 0
) -> Tensors:
    """The tensors of such a Llama, random: queries (H * d, D), keys and values (Hk * d, D) with d =
    D / H.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = kv * width // HEADS

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[dtype])

    made = {"model.embed_tokens.weight": random(VOCABULARY, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        made |= {
            f"{at}.input_layernorm.weight": random(width),
            f"{at}.self_attn.q_proj.weight": random(width, width),
            f"{at}.self_attn.k_proj.weight": random(rows, width),
            f"{at}.mlp.gate_proj.weight": random(width // 2, width),
            f"{at}.mlp.up_proj.weight": random(width // 2, width),
            f"{at}.mlp.down_proj.weight": random(width, width // 2),
            f"{at}.post_attention_layernorm.weight": random(width),
            f"{at}.self_attn.v_proj.weight": random(rows, width),
            f"{at}.self_attn.o_proj.weight": random(width, width),
        }
    return made | {"model.norm.weight": random(width), "lm_head.weight": random(VOCABULARY, width)}


def tensor_bytes(tensor: Tensor) -> bytes:
    """Row-major bytes."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """A file that says its header has `length` bytes, whatever the truth."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file with the tensors in this order, as the safetensors library would not write it."""
    header = format_header(
        {name: (_STORED[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    )
    path.write_bytes(header + b"".join(map(tensor_bytes, tensors.values())))


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a valid file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shards(directory: Path, tensors: Tensors, shards: int) -> None:
    """model.safetensors, or numbered shards and their index; K and V of a layer lie in different
    ones.
    """
    if shards == 1:
        write_safetensors(directory / SINGLE, tensors)
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file, part := dict(list(tensors.items())[number::shards]))
        weight_map |= dict.fromkeys(part, file)
    if K0 in weight_map:
        assert weight_map[K0] != weight_map.get(V0)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def llama(
    directory: Path,
    kv: int = 4,
    shards: int = 2,
    dtype: str = "F32",
    tensors: Tensors | None = None,
    side_files: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A checkpoint directory; `changes` go to config.json, where `...` removes a key."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps(config(kv, **changes), indent=4), encoding="utf-8"
    )
    made = weights(kv, dtype, seed=seed) if tensors is None else tensors
    write_shards(directory, made, shards)
    for name, content in SIDE_FILES.items() if side_files else ():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """`change` alters the object in place, or returns another."""
    value = json.loads(path.read_text(encoding="utf-8"))
    other = change(value)
    write_json(path, value if other is None else other)


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """`change` alters the tensors of each file in place, or returns others."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        others = change(tensors)
        save_file(others if isinstance(others, dict) else tensors, file, {"format": "pt"})


def load(directory: Path) -> Tensors:
    """All tensors of a directory, read by the safetensors library."""
    parts = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    assert len(set().union(*parts)) == sum(map(len, parts))
    return {name: tensor for part in parts for name, tensor in part.items()}


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of the files that are the same in every run: not of the two that state a time or a
    name.
    """
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("gqa_conversion.json", "README.md")
    }


def snapshot(directory: Path) -> dict[str, str]:
    """Every path below a directory with the SHA-256 of its bytes (or where it links to), its mode
    and its time.
    """
    entries = {}
    for path in sorted(directory.rglob("*")):
        status, content, written = path.lstat(), "directory", 0
        if path.is_symlink():
            content = f"-> {path.readlink()}"
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file():
            written = status.st_mtime_ns
        entries[path.relative_to(directory).as_posix()] = f"{content} {status.st_mode:o} {written}"
    return entries


@dataclass(frozen=True)
class Result:
    """What the command gave back."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it printed, each line whole again, however narrow a terminal is."""
        return self.out.replace("\n            ", " ")

    @property
    def complaints(self) -> str:
        """stderr without the warning that a model converted by `--method mean` and the like needs
        training.
        """
        return NEEDS_TRAINING.sub("", self.err)

    def expect(
        self,
        code: int = 0,
        *,
        out: str | None = None,
        err: str | None = None,
        complaints: str | None = None,
        err_lines: int | None = None,
        says: str = "",
    ) -> None:
        """Check what the command gave back; the first that differs is named, and shown.

        Args:
            code: Its exit code.
            out: All of stdout. None: whatever it is.
            err: All of stderr. None: whatever it is.
            complaints: All of `complaints`. None: whatever they are.
            err_lines: How many lines stderr has, whatever ends a line. None: however many.
            says: A part of stderr.
        """
        assert self.code == code, f"exit code {self.code} instead of {code}; stderr:\n{self.err}"
        if out is not None:
            assert self.out == out, f"stdout is:\n{self.out}"
        if err is not None:
            assert self.err == err, f"stderr is:\n{self.err}"
        if complaints is not None:
            assert self.complaints == complaints, f"complaints are:\n{self.complaints}"
        if err_lines is not None:
            lines = self.err.count("\n")
            assert lines == err_lines, f"stderr has {lines} lines:\n{self.err}"
            # Other characters end lines too, and then a terminal shows more
            assert len(self.err.splitlines()) == err_lines, repr(self.err)
        assert says in self.err, f"stderr does not say {says!r}:\n{self.err}"


class Recorder(Watcher):
    """Records [units, units done] of each stage, and warnings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.stages, self.warnings = list[list[int]](), list[str]()

    def stage(self, name: str, total: int, unit: str = "token", done: int = 0) -> None:
        self.stages.append([total, done])

    def update(self, count: int = 1, note: str = "") -> None:
        self.stages[-1][1] += count

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def call(program: str, words: Iterable[object]) -> None:
    """A command in this process, with its own messages and exit codes."""
    modules = {"gqa-ablate": "study.cli"}
    module = modules.get(program, f"{program.removeprefix('gqa-')}.cli")
    with mock.patch.object(sys, "argv", [program, *map(str, words)]):
        import_module(f"gqa.{module}").main()


def run(*words: object, program: str = "gqa-convert") -> Result:
    """`PROGRAM WORDS` in this process.

    Any exception but an exit fails the test, as a traceback would.
    """
    code, before = 0, signal.getsignal(signal.SIGTERM)
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            call(program, words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        finally:
            signal.signal(signal.SIGTERM, before)
    return Result(code, out.getvalue(), err.getvalue())


def check_refused(
    result: Result, *says: str, code: int = 2, program: str = "gqa-convert", advice: str = "; "
) -> str:
    """One line for people that says what was given and what to do, and no traceback; it is
    returned.
    """
    assert result.code == code, result
    before = r"(estimate    about .*\n)?"
    if program == "gqa-uptrain":  # it prints its plan before it reads text
        before = r"(model .*\n(no )?teacher .*\nestimate .*\noutput .*\n)?"
    assert re.fullmatch(before, result.out), result
    assert "Traceback" not in result.err
    assert result.err.startswith(f"{program}: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert len(result.err) < 1200
    for words in says:
        assert words in result.err, (words, result.err)
    assert advice in result.err, "what is to be done?"
    return result.err


def refusal(model: Path, *words: object) -> str:
    """The line with which the command refuses a model; nothing was written beside it."""
    before = snapshot(model.parent)
    said = check_refused(run(*words, model), advice="")
    assert snapshot(model.parent) == before
    return said


def leftovers(directory: Path) -> list[str]:
    """Hidden names that a conversion uses while it works."""
    return sorted(path.name for path in directory.iterdir() if ".gqa-" in path.name)


def write_hollow(directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Weights of these shapes that are a header and a hole; how many bytes they would be."""
    header = format_header({name: (dtype, shape) for name, shape in shapes.items()})
    total = sum(byte_size(dtype, shape) for shape in shapes.values())
    (directory / SINGLE).write_bytes(header)
    os.truncate(directory / SINGLE, len(header) + total)
    return total


def header_only(
    directory: Path, config: Any, buffers: Mapping[str, tuple[int, ...]] | None = None
) -> int:
    """A checkpoint of this config with hollow weights; how many bytes they would be.

    Args:
        directory: Where it is written; it exists.
        config: Of a class that predicts tokens, with a dtype.
        buffers: Names and shapes of tensors that are stored too, but are no weights.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config.save_pretrained(directory)
    return write_hollow(directory, shapes | dict(buffers or {}), _STORED[config.dtype])
