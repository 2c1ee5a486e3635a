"""The safetensors header: 8 bytes of length, JSON, then the tensors' bytes. The safetensors library
checks it against the file; then it is read as JSON, for the byte range of every tensor.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gqa.checkpoint.errors import CorruptError, explain, listing

# Of one header, judged before it is parsed (the format's own limit is 100 MB): the largest models have some hundred
# thousand tensors, in many files, and each takes about 150 bytes.
MAX_HEADER_BYTES = 20_000_000
MAX_RANK = 64  # torch's own limit
_AGAIN = "download it again"
BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor: what it is and where its bytes lie, `[begin, end)` counted from the start of `file`."""

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
    """Bytes of a tensor: packed sub-byte types are rounded up."""
    return (math.prod(shape) * BITS[dtype] + 7) // 8


def read_header(path: Path, file: str) -> list[TensorSpec]:
    """The tensors of `file`, which is at `path`, in the order of their bytes. Raises CorruptError if safetensors
    rejects it or a name occurs twice (safetensors takes the last).
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptError(
                f"{file} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; is it safetensors? "
                f"{_AGAIN}"
            )
        text = stream.read(length)
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"{file} is truncated or no safetensors file: {explain(error)}; {_AGAIN}") from error
    header = parse_json(text, f"{file}: its header", object_pairs_hook=partial(_unique, file))
    header.pop("__metadata__", None)
    specs = []
    for name, entry in header.items():
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in BITS or len(shape) > MAX_RANK:
            raise CorruptError(
                f"{file}: {name} is {dtype} of {len(shape)} dimensions, allowed are {listing(BITS, 30)} of at most "
                f"{MAX_RANK}; save it again"
            )
        specs.append(TensorSpec(name, dtype, shape, file, 8 + length + begin, 8 + length + end))
    return sorted(specs, key=lambda spec: (spec.begin, spec.end))


def parse_json(text: bytes, name: str, **hooks: Any) -> dict[str, Any]:
    """A JSON object in UTF-8 that can be written again. Raises CorruptError with the `name` of what it is."""
    try:
        value = json.loads(text.decode("utf-8"), **hooks)
        if b"\\u" in text:  # half of a surrogate pair is a string that no file can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except CorruptError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} is not JSON in UTF-8 ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{name} holds a JSON {type(value).__name__}, not an object; {_AGAIN}")
    return value


def _unique(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise CorruptError(f"{file}: duplicate {listing(twice)} in its header; save the file again")
    return result


def format_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})
) -> bytes:
    """Length prefix and header for tensors `name -> (dtype, shape)` written one after another in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + byte_size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
