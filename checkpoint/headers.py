"""The safetensors header: 8 bytes of length, JSON, then the tensors' bytes. Read strictly, written plainly.

The format's own reader accepts duplicate names (the last wins) and is only reached by opening the file; a converter
that copies byte ranges must know every range itself before it trusts it.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO

from gqa.checkpoint.errors import CorruptError, listing

# What one file can sensibly hold, judged before anything is parsed (the format's own limit is 100 MB): the largest
# models have some hundred thousand tensors, in many files, and each takes about 150 bytes of a header.
MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 200 * MAX_TENSORS
_MAX_MARKS = 16 * MAX_TENSORS  # of "[", "{" and ",": of a tensor of four dimensions there are ten
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


def read_header(stream: BinaryIO, file: str, file_size: int) -> list[TensorSpec]:
    """The tensors of one file in the order of their bytes. Raises CorruptError for whatever is not well-formed."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        raise CorruptError(f"{file} is truncated: {file_size} bytes hold no safetensors header; {_AGAIN}")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise _broken(file, f"header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; not safetensors?")
    if 8 + length > file_size:
        raise CorruptError(f"{file} is truncated: header of {length} bytes in a file of {file_size}; {_AGAIN}")
    return parse_header(stream.read(length), file, file_size)


def _broken(file: str, what: str, advice: str = _AGAIN) -> CorruptError:
    return CorruptError(f"{file}: {what}{' ' if what.endswith('?') else '; '}{advice}")


def parse_header(text: bytes, file: str, file_size: int) -> list[TensorSpec]:
    """The same from the header's bytes, for a file of `file_size` bytes in all."""
    if sum(text.count(mark) for mark in (b"[", b"{", b",")) > _MAX_MARKS:
        raise _broken(file, f"its header holds more than {MAX_TENSORS} tensors would; not safetensors?")
    # As the format's own reader takes it: Python's is laxer.
    strict: dict[str, Any] = {
        "object_pairs_hook": partial(_unique, file),
        "parse_constant": _no_number,
        "parse_int": _integer,
    }
    header = parse_json(text, f"{file}: its header", **strict)
    metadata = header.pop("__metadata__", None)
    strings = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not strings:
        raise _broken(file, "__metadata__ in its header is not an object of strings")
    data, data_start = file_size - 8 - len(text), 8 + len(text)
    specs = [_tensor_spec(name, entry, file, data_start, data) for name, entry in header.items()]
    specs.sort(key=lambda s: (s.begin, s.end))
    position = data_start
    for spec in specs:
        if spec.begin != position:
            what = "overlap the tensor before" if spec.begin < position else "leave a hole before them"
            raise _broken(file, f"the bytes of {spec.name} start where they {what}")
        position = spec.end
    if position != file_size:
        raise _broken(file, f"{file_size - position} bytes belong to no tensor")
    return specs


def parse_json(text: bytes, name: str, **hooks: Any) -> dict[str, Any]:
    """A JSON object in UTF-8 that can be written again. Raises CorruptError with the `name` of what it is."""
    try:
        value = json.loads(text.decode("utf-8"), **hooks)
        if b"\\u" in text:  # half of a surrogate pair is a string that no file can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except CorruptError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} is not JSON in UTF-8 ({error}); {_AGAIN}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{name} holds a JSON {type(value).__name__}, not an object; {_AGAIN}")
    return value


def _unique(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise _broken(file, f"duplicate {listing(twice)} in its header", "save the file again")
    return result


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _integer(text: str) -> int:
    return int(text) if text != "-0" else -1  # a natural number has no sign


def _tensor_spec(name: str, entry: object, file: str, data_start: int, data: int) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"the header entry of {name} is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        allowed = listing(BITS, 30)
        raise _broken(file, f"{name} has the unknown dtype {dtype!r}; allowed are {allowed}", "save it again")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _broken(file, f"{name} has shape {shape!r} and data_offsets {offsets!r}, allowed are natural numbers")
    if len(shape) > MAX_RANK:
        raise _broken(file, f"{name} has {len(shape)} dimensions, at most {MAX_RANK} are allowed", "save it again")
    begin, end = offsets
    if not begin <= end <= data:
        raise _broken(file, f"{name} has bytes {begin} to {end} of {data}; truncated?")
    bits = math.prod(shape) * BITS[dtype]
    if math.prod(max(n, 1) for n in shape) * BITS[dtype] >= 2**63:  # also where another dimension is 0
        raise _broken(file, f"{name} has shape {shape}, more than can be counted in 63 bits")
    if (end - begin) * 8 != bits:
        raise _broken(file, f"{name} has {end - begin} bytes where {dtype} {shape} needs {bits / 8:.15g}")
    return TensorSpec(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


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
