"""The files of a checkpoint: find its weights and the side files to copy; headers of safetensors
files.

A safetensors file is 8 bytes of length, a header in JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gqa.core.errors import CorruptError, explain

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = frozenset(
    (
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".ot",
        ".gguf",
        ".ggml",
        ".onnx",
        ".onnx_data",
        ".tflite",
        ".mlmodel",
        ".litertlm",
        ".task",
        ".pte",
        ".engine",
        ".nemo",
        ".npz",
        ".distcp",
    )
)
# Vocabularies and tokenizer configs or code; special tokens alone (special_tokens_map.json) make no
# tokenizer.
TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
# Logs of the training of the old model, as examples/pretrain.py and LLaMA-Factory write them.
_LOGS = frozenset(("training_log.jsonl", "trainer_log.jsonl"))
# The same model for other programs (Meta's and Mistral's own, OpenVINO, ONNX, Core ML, MLC, Ollama,
# llama.cpp, LitGPT, NeMo, vLLM), adapters trained on it, and states of its training.
_OLD_MODEL = (
    "params.json",
    "original/*",
    "openvino*",
    "onnx/*",
    "genai_config.json",
    "coreml/*",
    "mlc-chat-config.json",
    "*-cache.json",
    "Modelfile",
    "*imatrix*",
    "adapter_config.json",
    "checkpoint-*/*",
    "trainer_state.json",
    "*.onnx[._]data*",
    "*.mlpackage/*",
    "lit_config.json",
    "model_config.yaml",
    "kv_cache_scales.json",
)
# Further modules of Sentence Transformers, which have weights of their own, and the voices of
# Qwen2.5-Omni.
FURTHER_MODULE = re.compile(r"\d+_[A-Z]\w*/|(.*/)?spk_dict\.pt$")
MAX_HEADER_BYTES = 20_000_000  # of one file; a tensor takes about 150 bytes
# Bits of a number, by the dtypes of safetensors.
BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Its dtype as safetensors names it, a key of `BITS`.
        shape: Its shape.
        file: The file that contains it.
        begin: The position of its first byte in `file`.
        end: The position after its last byte in `file`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def byte_size(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor, rounded up for packed sub-byte types."""
    return (math.prod(shape) * BITS[dtype] + 7) // 8


def read_header(path: Path, file: str) -> list[TensorSpec]:
    """The tensors of a file in the order of their bytes; valid files have no gaps.

    Args:
        path: Where the file is stored.
        file: Its name in the checkpoint.

    Raises:
        CorruptError: safetensors rejects it.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        position = 8 + int.from_bytes(stream.read(8), "little")

    specs = []
    try:
        if position > MAX_HEADER_BYTES:  # it would take minutes and gigabytes
            raise OSError(
                f"a header of {position:,} bytes, but at most {MAX_HEADER_BYTES:,} are allowed"
            )
        with safe_open(path, framework="np") as stored:
            for name in stored.offset_keys():
                tensor = stored.get_slice(name)
                dtype = tensor.get_dtype()
                shape = tuple(tensor.get_shape())
                end = position + byte_size(dtype, shape)
                specs.append(TensorSpec(name, dtype, shape, file, position, end))
                position = end
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: unknown dtype
        raise CorruptError(
            f"{file} is truncated or not a safetensors file: {explain(error)}; "
            "download it again (if it is a Git LFS pointer, with git lfs pull)"
        ) from error

    return specs


def format_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Length prefix and header for tensors `name -> (dtype, shape)` written one after another in
    this order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + byte_size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end

    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padding = b" " * (-len(text) % 8)
    text += padding
    return struct.pack("<Q", len(text)) + text


def weight_files(
    config: Mapping[str, Any], names: Collection[str], read: Callable[[str], dict[str, Any]]
) -> tuple[list[str], str | None]:
    """Weight files, and the name of their index or None, as transformers chooses: a single file
    before an index, safetensors before `.bin`.

    Args:
        config: The checkpoint's config.json.
        names: Names of all its files.
        read: Reads a JSON file of the checkpoint by its name.

    Returns:
        The names of the weight files, none if the checkpoint has none, and that of the index.

    Raises:
        CorruptError: config.json names other weights, or the index is broken.
    """
    chosen = config.get("transformers_weights")
    if chosen is not None:
        raise CorruptError(
            f"config.json names another file of weights, {chosen!r} (transformers_weights); rename "
            f"it to {SINGLE}, its index to {INDEX}, and remove the entry"
        )

    formats = (
        (SINGLE, INDEX, ".safetensors"),
        (TORCH_SINGLE, TORCH_INDEX, ".bin"),
    )
    for single, index, suffix in formats:
        if single in names:
            return [single], None
        if index in names:
            return _shards(read(index), index, suffix), index
    return [], None


def _shards(index: Mapping[str, Any], name: str, suffix: str) -> list[str]:
    """The shards that an index lists, sorted.

    Raises CorruptError unless each is a plain file name.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{name} has no weight_map (tensor -> file); download it again")

    plain_name = re.compile(rf"[\w][\w.\- ]*{re.escape(suffix)}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not plain_name.fullmatch(file):
            raise CorruptError(
                f"{name} says that {tensor} is in {file!r}; allowed are names of {suffix} files in "
                "the same directory; download the checkpoint again"
            )
    return sorted(set(weight_map.values()))


def side_files(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Split names other than config and weights into files to copy and files to leave out: the old
    model in other formats, or descriptions of it. Hidden files and logs of its training are in
    neither.
    """
    visible = sorted(name for name in names if not _is_hidden(name) and name not in _LOGS)
    weights = {name for name in visible if _is_weights(name)}
    # Whatever is next to weights in a subdirectory belongs to another model.
    other_models = tuple({f"{name.rpartition('/')[0]}/" for name in weights if "/" in name})

    to_copy = list[str]()
    left_out = list[str]()
    for name in visible:
        if name in weights or name.startswith(other_models) or _describes_old_model(name):
            left_out.append(name)
        else:
            to_copy.append(name)
    return to_copy, left_out


def _is_hidden(name: str) -> bool:
    """Whether a file is hidden, or in a hidden directory."""
    return any(part.startswith(".") for part in name.split("/"))


def _is_weights(name: str) -> bool:
    """Whether a file contains weights of a model, or is their index."""
    if FURTHER_MODULE.match(name):
        return False
    return Path(name).suffix.lower() in WEIGHT_SUFFIXES or name.endswith(".index.json")


def _describes_old_model(name: str) -> bool:
    """Whether a file says something that no longer holds of a converted model."""
    return any(fnmatchcase(name, pattern) for pattern in _OLD_MODEL)


def shard_names(count: int) -> list[str]:
    """Names of `count` weight files, as in transformers."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
