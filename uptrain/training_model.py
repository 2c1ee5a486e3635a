"""The module that accelerate wraps: from a batch of blocks to a summed loss.

DDP and FSDP hook into a module's forward, so everything that uses parameters happens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from gqa.checkpoint.compat import layer_classes, set_layer_classes
from gqa.corpus.likelihood import ChunkedHead
from gqa.uptrain.losses import chunked_sum, next_token_loss
from gqa.uptrain.options import TrainOptions

Batch = dict[str, Tensor]


class TrainingModel(nn.Module):
    """The model with its loss, and the teacher if there is one, which is not a submodule: not trained, not saved."""

    def __init__(self, model: PreTrainedModel, teacher: PreTrainedModel | None, options: TrainOptions) -> None:
        super().__init__()
        self.model = model
        self._options = options
        self._head = ChunkedHead(model, options.compile)
        self._teacher = None if teacher is None else ChunkedHead(teacher)
        # The classes of layers, which FSDP gathers one at a time.
        classes = {type(module).__name__ for module in model.modules()}
        set_layer_classes(self, classes & layer_classes(model))

    def tie_weights(self) -> None:
        """FSDP calls it after it has replaced parameters."""
        self.model.tie_weights()

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """`input_ids` (B, T), or for an encoder-decoder the encoder's inputs and `labels` (B, T) -> the summed loss of
        the predictions that count, and the sums (predictions, nats, distillation).
        """
        inputs, targets = split_batch(batch)
        if "labels" in batch:
            inputs["decoder_input_ids"] = shift_right(self.model, batch["labels"])
        options, teacher = self._options, self._teacher
        hidden = self._head.hidden(**inputs).flatten(0, 1)
        with gathered(teacher.model) if teacher else nullcontext():
            with torch.no_grad():
                teacher_hidden = teacher.hidden(**inputs).flatten(0, 1) if teacher else None

            def slice_loss(rows: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
                with torch.no_grad():
                    teacher_logits = None
                    if teacher is not None and teacher_hidden is not None:
                        teacher_logits = teacher.logits(teacher_hidden[piece])
                logits = self._head.logits(rows)
                return next_token_loss(logits, targets[piece], teacher_logits, options.distill, options.temperature)

            loss, sums = chunked_sum(slice_loss, self._head.vocabulary, hidden, self._head_parameters())
        return loss, torch.cat([(targets >= 0).sum(dtype=sums.dtype).reshape(1), sums])

    def _head_parameters(self) -> list[nn.Parameter]:
        """Parameters that the head uses: those outside the backbone, and a tied embedding."""
        if not self._head.split:
            return []
        inside = {id(p) for p in self._head.backbone.parameters()}
        outside = [p for p in self.model.parameters() if id(p) not in inside]
        table = self.model.get_output_embeddings()
        tied = [p for p in (table.parameters() if table is not None else ()) if id(p) in inside]
        return [p for p in (*outside, *tied) if p.requires_grad]


@contextmanager
def gathered(teacher: PreTrainedModel) -> Iterator[None]:
    """Gather a sharded teacher's parameters outside its layers until all slices have passed its head."""
    sharded = isinstance(teacher, FSDPModule)
    if sharded:
        teacher.unshard()
    yield
    if sharded:
        teacher.reshard()


def split_batch(batch: Batch) -> tuple[Batch, Tensor]:
    """The model's inputs, and the (N,) ids to predict, -100 where none is. `shift_right` makes a decoder's inputs from
    `labels`.
    """
    if "labels" in batch:
        return {name: tensor for name, tensor in batch.items() if name != "labels"}, batch["labels"].flatten()
    ids = batch["input_ids"]
    return {"input_ids": ids[:, :-1]}, ids[:, 1:].flatten()


def shift_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Decoder inputs (B, T) for `labels`, as the class makes them: the first token (mBART's is the language), then all
    labels but the last, with padding in place of -100.
    """
    pad = model.config.pad_token_id
    if (method := getattr(model, "prepare_decoder_input_ids_from_labels", None)) and pad is not None:
        shifted: Tensor = method(labels)
        return shifted
    ids = labels.roll(1, -1)  # M2M-100 has the function but not the method
    ids[:, 0] = model.config.decoder_start_token_id
    return ids.masked_fill(ids == -100, pad or 0)


def predictions(batch: Batch) -> int:
    """Count the predictions of a batch."""
    return int((split_batch(batch)[1] >= 0).sum())
