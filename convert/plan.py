"""A plan: everything about a conversion that config and headers decide and, with --kv-budget, what
was measured to choose the heads. It is frozen: no field is ever assigned.

`make_plan` (planning.py) makes it; writer, card, record and summary read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gqa.checkpoint.files import TensorSpec, byte_size
from gqa.checkpoint.hub import default_output
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.family import KVCounts, heads_suffix
from gqa.convert.heads.kv_cache import KVCache
from gqa.convert.heads.modules import AttentionModule, Change
from gqa.convert.methods.base import Method


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result: its source, copied or cast, or changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorSpec
    change: Change | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return byte_size(self.dtype, self.shape)

    @property
    def copied(self) -> bool:
        """Whether the bytes are the source's own."""
        return self.change is None and self.source.dtype == self.dtype


@dataclass(frozen=True)
class Shard:
    """One weight file of the result, with its tensors in the order of their bytes."""

    file: str
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """Everything about a conversion that can be known from config and headers.

    kv_heads: KV heads of the result.
    method: The method that makes the new heads; one of unmerged.py if no heads are merged.
    available_methods: Those that can merge the heads of the model, without controls, worst quality
        first; empty if no heads are merged.
    can_regroup: Whether groups of heads can be searched for: the method reads the model, and heads
        can be reordered into more than one partition.
    seed: Of random heads, and of text.
    modules: All attention modules that hold keys and values.
    changes: By path of a module the tensors of its heads that change; only modules with other
        numbers of heads than before.
    shards: All tensors of the result, by file.
    new_config, config_edits: config.json of the result, and what differs from the base model's.
    cache_before, cache_after: The KV cache of the base model and of the result.
    dtype: Of `--dtype`, as safetensors call it; None if tensors keep theirs.
    kv_budget: Of `--kv-budget`, by which `prepare` (api.py) has chosen the heads of each layer.
    losses: With a KV budget, by layer: heads -> loss (nats per token).
    """

    checkpoint: Checkpoint
    config: ModelConfig
    kv_heads: KVCounts
    method: Method
    available_methods: tuple[Method, ...]
    can_regroup: bool
    seed: int
    modules: tuple[AttentionModule, ...]
    changes: Mapping[str, tuple[Change, ...]]
    shards: tuple[Shard, ...]
    new_config: dict[str, Any]
    config_edits: tuple[dict[str, Any], ...]
    cache_before: KVCache
    cache_after: KVCache
    dtype: str | None = None
    warnings: tuple[str, ...] = ()
    kv_budget: float | None = None
    losses: Sequence[Mapping[int, float]] = ()

    @property
    def fewest(self) -> int:
        """KV heads of the layer that has the fewest."""
        return fewest_heads(self.kv_heads)

    def searches(self, grouping: str) -> bool:
        """Whether to search for the groups with the least loss, by the option `--grouping`."""
        return grouping == "auto" and self.can_regroup

    @property
    def tensors(self) -> Iterable[OutputTensor]:
        """All tensors of the result."""
        return chain.from_iterable(shard.tensors for shard in self.shards)

    @property
    def changed_tensors(self) -> list[OutputTensor]:
        """The tensors whose heads are merged or repeated."""
        return [tensor for tensor in self.tensors if tensor.change is not None]

    @property
    def total_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters_after(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    def default_directory(self, model: str, method: Method) -> Path:
        """Where the result of a method goes by default: `MODEL-gqa4-refined` next to a local model,
        in the working directory for a model id.

        `MODEL-gqa32` if none are merged; `MODEL-kv56-refined` if
        heads differ by layer and 56 % of them remain, or with `--kv-budget 0.56`.

        model: The base model, as the user named it.
        """
        if self.kv_budget:  # known before the heads of each layer are chosen
            suffix = f"-kv{100 * self.kv_budget:.0f}"
        elif isinstance(self.kv_heads, tuple):
            heads = sum(self.kv_heads) / len(self.kv_heads)
            suffix = f"-kv{100 * heads / self.config.main_heads.kv:.0f}"
        else:
            suffix = heads_suffix(self.kv_heads)
        if method.merges:
            suffix += f"-{method.name}"
        return default_output(self.checkpoint.hub_id or model, suffix)


def fewest_heads(kv_heads: KVCounts) -> int:
    """KV heads of the layer that has the fewest."""
    return kv_heads if isinstance(kv_heads, int) else min(kv_heads)
