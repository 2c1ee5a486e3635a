"""The module that accelerate wraps: a batch of blocks goes in, a summed loss comes out.

DDP and FSDP work by hooks on a module's forward, so everything that touches parameters has to happen inside of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.corpus.likelihood import ChunkedHead
from gqa.uptrain.losses import chunked_sum, next_token_loss

Batch = dict[str, Tensor]


class TrainingModel(nn.Module):
    """The model with its loss and, where there is one, its teacher (which is no part of it: not trained, not saved)."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | None = None,
        *,
        distill: float = 1.0,
        temperature: float = 1.0,
        match: str | None = None,
        match_weight: float = 1.0,
        compile_backbone: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self._head = ChunkedHead(model, compile_backbone)
        self._teacher = [] if teacher is None else [ChunkedHead(teacher)]  # a list hides it from nn.Module
        self._distill, self._temperature = distill, temperature
        self._match, self._match_weight = match, match_weight

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """`input_ids` (B, T) and perhaps `position_ids`, `document_ids` -> the loss summed over the predictions that
        count, and (predictions, nats, distillation, matching error) as sums.
        """
        inputs, counts, targets = split_batch(batch)
        match = self._match if torch.is_grad_enabled() else None
        with _outputs(self.model, match) as ours:
            hidden = self._head.hidden(**inputs).flatten(0, 1)[counts]
        teacher_rows, theirs = None, {}
        if self._teacher and torch.is_grad_enabled():
            head = self._teacher[0]
            with torch.no_grad(), _outputs(head.model, match) as theirs:
                teacher_rows = head.hidden(**inputs).flatten(0, 1)[counts]

        def of_slice(rows: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
            given = None
            if teacher_rows is not None:
                with torch.no_grad():
                    given = self._teacher[0].logits(teacher_rows[piece])
            logits = self._head.logits(rows)
            return next_token_loss(logits, targets[piece], given, self._distill, self._temperature)

        loss, told = chunked_sum(of_slice, self._head.vocabulary, hidden, self._head_parameters())
        matching = matching_error(ours, theirs, hidden)
        if match:
            loss = loss + self._match_weight * matching * len(targets)
        count = told.new_tensor([len(targets)])
        return loss, torch.cat([count, told, (matching.detach() * len(targets)).reshape(1)])

    def _head_parameters(self) -> list[nn.Parameter]:
        """What the head reads besides hidden states: parameters outside the backbone, and a tied embedding."""
        inside = {id(p) for p in self._head.backbone.parameters()}
        outside = [p for p in self.model.parameters() if id(p) not in inside]
        table = self.model.get_output_embeddings()
        tied = [p for p in (table.parameters() if table is not None else ()) if id(p) in inside]
        return [p for p in (*outside, *tied) if p.requires_grad] if self._head.split else []


def split_batch(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """What the model reads, which flat positions of it count, and the ids that they are to predict.

    A block's last token has nothing to predict, and the last of a document inside a block must not predict the next
    document's first (with `document_ids`, where attention stays inside documents).
    """
    ids = batch["input_ids"]
    inputs = {"input_ids": ids[:, :-1]}
    scored = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if "position_ids" in batch:  # transformers keeps attention inside runs of positions
        inputs["position_ids"] = batch["position_ids"][:, :-1]
    if "document_ids" in batch:
        scored = batch["document_ids"][:, 1:] == batch["document_ids"][:, :-1]
    counts = scored.flatten().nonzero().squeeze(-1)
    return inputs, counts, ids[:, 1:].flatten()[counts]


@contextmanager
def _outputs(model: PreTrainedModel, match: str | None) -> Iterator[dict[str, Tensor]]:
    """The outputs of `attention` modules or whole decoder layers (`hidden`) of one forward pass, by module name."""
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(_keep(found, name))
        for name, module in model.named_modules()
        if match and _is_matched(module, match)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _is_matched(module: nn.Module, match: str) -> bool:
    name = type(module).__name__
    return "Attention" in name if match == "attention" else name.endswith(("DecoderLayer", "Block"))


def _keep(found: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        found[name] = output[0] if isinstance(output, tuple) else output

    return hook


def matching_error(ours: dict[str, Tensor], theirs: dict[str, Tensor], like: Tensor) -> Tensor:
    """Mean over modules of ||ours - theirs||^2 / ||theirs||^2; zero where nothing is matched."""
    if not theirs:
        return like.new_zeros((), dtype=torch.float32)
    errors = [
        (ours[name].float() - value.float()).square().sum() / value.float().square().sum().clamp_min(1e-12)
        for name, value in theirs.items()
    ]
    return torch.stack(errors).mean()
