"""Tiny checkpoints of families, and how they are compared with the classes of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

from gqa.convert.api import Plan
from gqa.convert.heads.layouts import QUERY_ROLES, Role
from gqa.convert.heads.modules import Change
from gqa.convert.methods.unmerged import repeat_heads
from gqa.convert.rewrite import ConvertedCheckpoint
from gqa.models.loading import cache_name
from support.tiny_models import (
    TINY,
    Tiny,
    config,
    model_class,
)

TOLERANCE = 2e-5


CONTROL = 100  # a wrong head order must be this many times worse than the tolerance


# Only this part is converted and its share of the logits is small: made louder, so that a wrong
# order shows.
QUIET = {"blt": "global_transformer"}


def louder(tiny: Tiny, model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if QUIET.get(tiny.name, "no such part") in name and name.endswith("o_proj.weight"):
            parameter.data *= 32
    return model


def write_checkpoint(model: PreTrainedModel, directory: Path) -> Path:
    """Save in several shards, as transformers does."""
    model.save_pretrained(directory, max_shard_size=20_000)
    return directory


def load(
    tiny: Tiny, directory: Path | None, attention: str = "eager", **given: Any
) -> PreTrainedModel:
    """Load with the family's own class; nothing may be missing, unexpected or of another shape."""
    model, info = model_class(tiny).from_pretrained(
        directory,
        output_loading_info=True,
        attn_implementation=attention,
        dtype=torch.float32,
        **given,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def planned(tiny: Tiny, plan: Plan, attention: str, maps: Any = None) -> PreTrainedModel:
    """The model that a plan makes with these maps, without writing it."""
    read, stored = plan.checkpoint.read, all_tensors(Path(str(plan.checkpoint.directory)))
    tensors = {tensor.name: stored[tensor.name] for tensor in plan.tensors if not tensor.change}
    writer = ConvertedCheckpoint(plan, maps)
    for change in {tensor.change for tensor in plan.changed_tensors if tensor.change}:
        tensors[change.source.name] = writer.converted(change, read(change.source))
    return load(tiny, None, attention, config=config(tiny, plan.fewest), state_dict=tensors)


def all_tensors(directory: Path) -> dict[str, Tensor]:
    return {
        k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@contextmanager
def tiled_heads() -> Iterator[None]:
    """The negative control: heads are repeated in tiles (h % G), which no runtime reads."""

    def tile(change: Change, role: Role, heads: Tensor) -> Tensor:
        if role in QUERY_ROLES:
            return repeat_heads(change, role, heads)
        more = change.groups // change.heads.kv
        return heads.repeat(more, *[1] * (heads.ndim - 1))

    with mock.patch("gqa.convert.methods.unmerged.repeat_heads", tile):
        yield


def attention_of(name: str) -> str:
    return "sdpa" if "sdpa" in TINY[name].attention else "eager"


def left_padded(given: dict[str, Tensor], padding: int) -> dict[str, Tensor]:
    """The second sequence starts `padding` tokens later."""
    mask = torch.ones_like(given["input_ids"])
    mask[1, :padding] = 0
    return {**given, "attention_mask": mask}


@torch.no_grad()
def decode(model: PreTrainedModel, given: dict[str, Tensor], prompt: int = 8) -> Tensor:
    """Logits of the tokens after the prompt, each from one forward pass of one token and the
    cache.
    """
    ids = given["input_ids"]
    extra = {k: v for k, v in given.items() if k != "input_ids" and v.shape[1:] != ids.shape[1:]}
    output = model(input_ids=ids[:, :prompt], use_cache=True, **extra)
    steps = []
    for position in range(prompt, ids.shape[1]):
        held = {cache_name(model): output[cache_name(model)]}
        output = model(input_ids=ids[:, position : position + 1], use_cache=True, **held, **extra)
        steps.append(output.get("logits", output.get("last_hidden_state"))[:, -1])
    return torch.stack(steps, 1)


def check_same_tensors(actual: Path, expected: Path, tolerance: float = 0.0) -> None:
    """Oracle 1: G == Hk leaves every tensor bit-identical."""
    found, wanted = all_tensors(actual), all_tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
