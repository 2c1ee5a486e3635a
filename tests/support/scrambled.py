"""Heads moved by random members of their symmetry group, written on stored tensors, without the
code that undoes it.

What may be done is what `gqa.convert.heads.family` says of a model type; how it is done is written
here once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.hub import open_model
from gqa.checkpoint.read import Checkpoint
from gqa.convert.find_maps import with_maps
from gqa.convert.heads.config import ModelConfig, read_config
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.layouts import LayerHeads
from gqa.convert.heads.modules import attention_modules
from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.table import METHODS
from gqa.convert.plan import Plan

Change = Callable[[Tensor], Tensor]
Stored = dict[str, dict[str, Tensor]]  # by name: the tensors of the file that holds it
# What the tensors of queries, keys, values and outputs are called, below an attention module.
NAMES = {
    "query": ("q_proj", "q_proj.linear", "q", "query_net"),
    "key": ("k_proj", "k_proj.linear", "k", "key_net"),
    "value": ("v_proj", "v_proj.linear", "v", "value_net"),
    "output": (
        "o_proj",
        "o_proj.linear",
        "out_proj",
        "dense",
        "c_proj",
        "attn_out",
        "o",
        "out_projection",
    ),
    "stacked": ("qkv_proj", "att_proj", "Wqkv"),
    "per_head": ("query_key_value", "c_attn"),
}
GPT2_NAMES = {"output": ("c_proj",), "stacked": ("c_attn",)}  # whose weights are stored (in, out)

# Methods that align heads, and refuse models whose heads cannot be aligned; `refined` then begins
# with the mean.
ALIGNING = tuple(
    name for name, method in METHODS.items() if "symmetry" in method.needs and not method.is_control
)

# One row of numbers, or several, for each query or key head; of the head dimension where all heads
# share them.
QUERY_ROWS = (
    "sinks",
    "softmax_offset",
    "attention_sink_bias",
    "q_norm.weight",
    "q_norm.bias",
    "g_proj.weight",
    "gate_proj.weight",
)
KEY_ROWS = ("k_norm.weight", "k_norm.bias")


@dataclass(frozen=True)
class Ids(CalibrationText):
    """Random token ids in place of a text: `CalibrationReader` returns them for it."""

    length: int = 16
    tokens: int = 16
    count: int = 64
    low: int = 10
    high: int = 96

    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.low, self.high, (self.count, self.length), generator=generator)

    def heldout_ids(self, heldout_tokens: int) -> Tensor:
        return replace(self, seed=self.seed + 1, count=heldout_tokens // self.length).ids()


_read_text = CalibrationReader.blocks_and_heldout


def _blocks_and_heldout(
    reader: CalibrationReader, heldout_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    if isinstance(reader.text, Ids):
        return reader.text.ids(), reader.text.heldout_ids(heldout_tokens)
    return _read_text(reader, heldout_tokens)


# For the process, since options with `Ids` reach the reader through whole conversions
CalibrationReader.blocks_and_heldout = _blocks_and_heldout  # type: ignore[method-assign]


def on_ids(**options: Any) -> MapsOptions:
    """Options of finding maps on random ids."""
    return MapsOptions(**({"text": Ids(), "most_blocks": 64} | options))


@contextmanager
def _stored(directory: Path, name: str) -> Iterator[tuple[Checkpoint, ModelConfig, Stored]]:
    """A checkpoint, its config and its tensors by name and file, which are written when the context
    ends.
    """
    checkpoint = open_model(str(directory))
    files = {path: load_file(path) for path in directory.glob("*.safetensors")}
    yield (
        checkpoint,
        read_config(checkpoint.config, name),
        {n: tensors for tensors in files.values() for n in tensors},
    )
    for path, tensors in files.items():
        save_file(tensors, path, metadata={"format": "pt"})


def scramble(
    directory: Path, seed: int = 0, pairing: str | None = None, stretch: bool = True
) -> None:
    """Move all heads of a checkpoint; `pairing` contradicts the table, without `stretch` they are
    only turned.
    """
    generator = torch.Generator().manual_seed(seed)
    with _stored(directory, "scrambled") as (checkpoint, config, stored):
        symmetry = config.symmetry
        assert isinstance(symmetry, Symmetry)
        stores_transposed = config.text_config.model_type == "gqa_gpt2"
        for module in attention_modules(checkpoint, config):
            heads = config.heads(module.layer)
            rotary = symmetry.rotary(config.text_config, module.layer, heads.key_dim)
            rotary = replace(rotary, pairing=pairing) if pairing else rotary  # type: ignore[arg-type]
            keys = [
                _commuting(heads.key_dim, rotary, generator, stretch)
                if symmetry.can_align_keys(config.text_config)
                else torch.eye(heads.key_dim, dtype=torch.float64)
                for _ in range(heads.kv)
            ]
            values = [_invertible(heads.value_dim, generator, stretch) for _ in range(heads.kv)]
            _move(stored, module.path, heads, keys, values, stores_transposed)


def rearrange(directory: Path) -> None:
    """Key/value heads 1, 3, ... come before 0, 2, ..., with all that belongs to them and to their
    query heads.
    """
    with _stored(directory, "rearranged") as (checkpoint, config, stored):
        stores_transposed = config.text_config.model_type == "gqa_gpt2"
        for module in attention_modules(checkpoint, config):
            heads = config.heads(module.layer)
            _rearrange_module(stored, module.path, heads, stores_transposed)


def _rearrange_module(
    stored: Stored, path: str, heads: LayerHeads, stores_transposed: bool
) -> None:
    repeat = heads.query // heads.kv
    kv = [*range(1, heads.kv, 2), *range(0, heads.kv, 2)]
    queries = [head * repeat + i for head in kv for i in range(repeat)]
    stacked = [
        *queries,
        *(heads.query + head for head in kv),
        *(heads.query + heads.kv + head for head in kv),
    ]
    per_head = [head * (repeat + 2) + i for head in kv for i in range(repeat + 2)]
    orders = {"query": queries, "key": kv, "value": kv, "stacked": stacked, "per_head": per_head}

    def reorder(order: list[int]) -> Change:
        return lambda t: t.unflatten(0, (len(order), -1))[order].flatten(0, 1)

    rows = {role: reorder(order) for role, order in orders.items()}
    _change_heads(stored, path, rows, lambda t: reorder(queries)(t.T).T, stores_transposed)
    for role, beside in (("query", QUERY_ROWS), ("key", KEY_ROWS)):
        for name in (f"{path}.{name}" for name in beside):
            # All heads'
            if not (
                "norm" in name and name in stored and stored[name][name].shape == (heads.key_dim,)
            ):
                _replace(stored, name, rows[role], stores_transposed)


def _invertible(size: int, generator: torch.Generator, stretch: bool = True) -> Tensor:
    """A random (size, size) matrix of condition number 10, or 1."""

    def orthogonal() -> Tensor:
        normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal)[0]

    exponents = torch.linspace(-0.5, 0.5, size, dtype=torch.float64)
    return orthogonal() * (10.0 if stretch else 1.0) ** exponents @ orthogonal()


def _commuting(dim: int, rotary: Rotary, generator: torch.Generator, stretch: bool) -> Tensor:
    """What commutes with the rotation: z -> c z at each frequency with 0.5 <= |c| <= 2, anything on
    the rest.
    """
    found = torch.zeros(dim, dim, dtype=torch.float64)
    for frequency in range(rotary.dims // 2):
        pair = [2 * frequency, 2 * frequency + 1]
        if rotary.pairing == "half":
            pair = [frequency, frequency + rotary.dims // 2]
        size, angle = torch.rand(2, generator=generator).tolist()
        length = 0.5 * 4**size if stretch else 1.0
        real, imaginary = (
            length * math.cos(2 * math.pi * angle),
            length * math.sin(2 * math.pi * angle),
        )
        found[pair[0], pair] = torch.tensor([real, -imaginary], dtype=torch.float64)
        found[pair[1], pair] = torch.tensor([imaginary, real], dtype=torch.float64)
    if rotary.dims < dim:
        found[rotary.dims :, rotary.dims :] = _invertible(dim - rotary.dims, generator, stretch)
    return found


def _move(
    stored: Stored,
    path: str,
    heads: LayerHeads,
    keys: list[Tensor],
    values: list[Tensor],
    stores_transposed: bool,
) -> None:
    """Queries take the inverse transposed of the keys that they read, W_O's columns the inverse of
    the values.
    """
    reads = [i * heads.kv // heads.query for i in range(heads.query)]
    queries = [torch.linalg.inv(keys[j]).T for j in reads]
    per_head = [
        m
        for j in range(heads.kv)
        for m in (*(q for q, r in zip(queries, reads, strict=True) if r == j), keys[j], values[j])
    ]
    matrices = {
        "query": queries,
        "key": keys,
        "value": values,
        "stacked": [*queries, *keys, *values],
        "per_head": per_head,
    }
    rows: dict[str, Change] = {
        role: lambda t, m=m: torch.block_diag(*m) @ t for role, m in matrices.items()
    }
    inverse = torch.block_diag(*(torch.linalg.inv(values[j]) for j in reads))
    _change_heads(stored, path, rows, lambda t: t @ inverse, stores_transposed)


def _change_heads(
    stored: Stored, path: str, rows: Mapping[str, Change], columns: Change, stores_transposed: bool
) -> None:
    """Change what is stored of each role, by its rows; outputs by their columns."""
    changed, names = set(), GPT2_NAMES if stores_transposed else NAMES
    for role, change in rows.items():
        for name in names.get(role, ()):
            for kind in ("weight", "bias"):
                _replace(stored, f"{path}.{name}.{kind}", change, stores_transposed)
            changed |= {role} if f"{path}.{name}.weight" in stored else set()
    for name in names["output"]:
        _replace(stored, f"{path}.{name}.weight", columns, stores_transposed)
    assert changed in ({"query", "key", "value"}, {"stacked"}, {"per_head"}), path


def _replace(stored: Stored, name: str, change: Change, stores_transposed: bool) -> None:
    if name in stored:
        before = stored[name][name]
        transpose = stores_transposed and before.ndim == 2
        after = change((before.T if transpose else before).double())
        stored[name][name] = (after.T if transpose else after).to(before.dtype).contiguous()


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the range of what is expected."""
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


def find_maps(plan: Plan, out: Path, options: MapsOptions) -> dict[str, Tensor]:
    """The maps that a conversion to `out` finds, by the names that they are stored under."""
    with with_maps(plan, out, options) as maps:
        assert maps
        return {name: maps.tensor(name) for name in maps.names}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.equal(other[name]) for name, tensor in one.items()
    )
