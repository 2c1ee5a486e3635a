"""The module that accelerate wraps: computes the summed loss of a batch of blocks.

DDP and FSDP hook into a module's forward, so everything that uses parameters happens there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from gqa.core.compat import layer_classes, set_layer_classes
from gqa.corpus.likelihood import common_log_probabilities, nats
from gqa.models.chunked_head import ChunkedHead, chunks
from gqa.uptrain.dropout import has_jitter, turn_off_dropout

Batch = dict[str, Tensor]
# (rows (n, D) with gradient, their slice of all rows) -> (loss to minimize, sums to report), both
# summed over these rows.
LossOfSlice = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class MeanLosses(NamedTuple):
    """Means per predicted token, in nats.

    cross_entropy: Of the model.
    kl: KL divergence of the model from the teacher; 0 without one.
    """

    cross_entropy: float
    kl: float


def zero_sums(device: torch.device) -> Tensor:
    """(3,) zeros to add the sums of batches to, as exact as the device allows."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(3, dtype=dtype, device=device)


def mean_losses(sums: Tensor) -> MeanLosses:
    """The means of the sums (3,) that a `TrainingModel` returns: predictions, cross-entropy and KL
    divergence.
    """
    predictions, cross_entropy, kl = sums.tolist()
    count = max(predictions, 1.0)
    return MeanLosses(cross_entropy / count, kl / count)


class TrainingModel(nn.Module):
    """The model with its loss.

    The teacher, if any, is no submodule, so it is neither trained nor saved.
    """

    def __init__(
        self, model: PreTrainedModel, teacher: PreTrainedModel | None, compile_model: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.dropout = turn_off_dropout(model)  # the rates that were not zero
        self._always_evaluated = [module for module in model.modules() if has_jitter(module)]
        self._head = ChunkedHead(model, compile_model)
        self._teacher = None if teacher is None else ChunkedHead(teacher)
        # FSDP gathers the parameters of modules of these classes one module at a time.
        classes = {type(module).__name__ for module in model.modules()}
        set_layer_classes(self, classes & layer_classes(model))

    def train(self, mode: bool = True) -> TrainingModel:
        """Set the mode of all modules, except that routers with random jitter stay in evaluation
        mode.
        """
        super().train(mode)
        for module in self._always_evaluated:
            module.training = False
        return self

    def tie_weights(self) -> None:
        """Called by FSDP after it has replaced parameters."""
        self.model.tie_weights()

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch.

        Args:
            batch: `input_ids` (B, T), perhaps with a `loss_mask` (B, T), or for an encoder-decoder
                the encoder's inputs and `labels` (B, T).

        Returns:
            The loss summed over predictions with a target; and the sums (3,) over them: their
            number, cross-entropy, KL divergence from the teacher (see `mean_losses`).
        """
        inputs, targets = split_batch(batch)
        inputs |= text_types(self.model, inputs["input_ids"])
        if "labels" in batch:
            inputs["decoder_input_ids"] = shift_right(self.model, batch["labels"])
        hidden = self._head.hidden(**inputs).flatten(0, 1)

        teacher = self._teacher
        sharded_teacher = None
        if teacher and isinstance(teacher.model, FSDPModule):
            sharded_teacher = teacher.model
        # Keep the parameters outside of its layers until all slices have passed its head.
        if sharded_teacher:
            sharded_teacher.unshard()
        with torch.no_grad():
            teacher_hidden = teacher.hidden(**inputs).flatten(0, 1) if teacher else None

        def loss_of_slice(rows: Tensor, slice_: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                teacher_logits = None
                if teacher is not None and teacher_hidden is not None:
                    teacher_logits = teacher.logits(teacher_hidden[slice_])
            logits = self._head.logits(rows)
            return next_token_loss(logits, targets[slice_], teacher_logits)

        loss, sums = chunked_sum(
            loss_of_slice, self._head.vocabulary, hidden, self._head_parameters()
        )
        if sharded_teacher:
            sharded_teacher.reshard()

        predictions = (targets >= 0).sum(dtype=sums.dtype).reshape(1)
        return loss, torch.cat([predictions, sums])

    def _head_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the head: those outside the backbone, and a tied embedding."""
        if not self._head.split:
            return []

        inside = {id(parameter) for parameter in self._head.backbone.parameters()}
        parameters = [
            parameter for parameter in self.model.parameters() if id(parameter) not in inside
        ]
        table = self.model.get_output_embeddings()
        if table is not None:
            parameters += [parameter for parameter in table.parameters() if id(parameter) in inside]
        return [parameter for parameter in parameters if parameter.requires_grad]


def split_batch(batch: Batch) -> tuple[Batch, Tensor]:
    """The model's inputs, and the ids to predict (N,), -100 for none and for those that a
    `loss_mask` leaves out.

    `shift_right` makes a decoder's inputs from `labels`.
    """
    if "labels" in batch:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return inputs, batch["labels"].flatten()

    ids = batch["input_ids"]
    targets = ids[:, 1:]
    if "loss_mask" in batch:
        targets = targets.masked_fill(batch["loss_mask"][:, 1:] == 0, -100)
    return {"input_ids": ids[:, :-1]}, targets.flatten()


def text_types(model: PreTrainedModel, ids: Tensor) -> Batch:
    """The types of tokens, all text, for models that do not train without them (Molmo 2)."""
    if model.config.model_type != "molmo2":
        return {}
    return {"mm_token_type_ids": torch.zeros_like(ids)}


def shift_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Decoder inputs (B, T) for `labels`, as the class makes them: the first token (mBART's is the
    language), then all labels but the last, with padding in place of -100.
    """
    pad = model.config.pad_token_id
    method = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if method and pad is not None:
        shifted: Tensor = method(labels)
        return shifted

    # M2M-100, for example, has the function but not the method.
    ids = labels.roll(1, -1)
    ids[:, 0] = model.config.decoder_start_token_id
    return ids.masked_fill(ids == -100, pad or 0)


class _ChunkedSum(torch.autograd.Function):
    """`chunked_sum`: computes the gradients of each slice in the forward pass, so that the logits
    of one slice exist at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of_slice: LossOfSlice,
        vocabulary: int,
        differentiate: bool,
        rows: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total_loss = rows.new_zeros((), dtype=torch.float32)
        total_sums = None
        row_gradient = torch.empty_like(rows) if differentiate else None
        head_gradients: list[Tensor | None] = [None] * len(parameters)

        for slice_ in chunks(len(rows), vocabulary, rows.device):
            with torch.set_grad_enabled(differentiate):
                leaf = rows[slice_].detach().requires_grad_(differentiate)
                loss, sums = loss_of_slice(leaf, slice_)
            total_loss += loss.detach()
            total_sums = sums.detach() if total_sums is None else total_sums + sums.detach()

            if row_gradient is not None:
                with torch.autocast(rows.device.type, enabled=False):  # as in any backward pass
                    row_gradient[slice_], *gradients = torch.autograd.grad(
                        loss, [leaf, *parameters], allow_unused=True
                    )
                pairs = zip(head_gradients, gradients, strict=True)
                head_gradients = [_add_in_float32(before, part) for before, part in pairs]

        ctx.gradients = None if row_gradient is None else (row_gradient, *head_gradients)
        assert total_sums is not None
        ctx.mark_non_differentiable(total_sums)
        return total_loss, total_sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        # They are scaled in place, so they can be used only once.
        gradients = ctx.gradients
        ctx.gradients = None

        # In float32, as the slices are added; autograd casts the result.
        scaled = list[Tensor | None]()
        for gradient in gradients:
            if gradient is None:
                scaled.append(None)
            else:
                scaled.append(gradient.float().mul_(upstream[0]))
        return None, None, None, *scaled


def _add_in_float32(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    """The sum of gradients: in bfloat16 rounding would lose those of small slices."""
    if before is None or part is None:
        return before if part is None else part.float()
    return before.add_(part)


def chunked_sum(
    loss_of_slice: LossOfSlice, vocabulary: int, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Sum of a loss over slices of rows, differentiable (once) in the rows and in the head's
    parameters.

    Args:
        loss_of_slice: The loss of a slice, and the sums that it reports.
        vocabulary: V, which sizes the slices.
        rows: (N, D).
        parameters: Those of the head; all need a gradient.

    Returns:
        The loss, and the sums to report, over all slices.
    """
    differentiate = torch.is_grad_enabled()
    totals: tuple[Tensor, Tensor] = _ChunkedSum.apply(
        loss_of_slice, vocabulary, differentiate, rows, *parameters
    )  # type: ignore[no-untyped-call]
    return totals


def next_token_loss(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summed loss: cross-entropy, or with a teacher the KL divergence from it.

    That is KL(teacher || student), the loss of distillation (Hinton et al., arXiv 1503.02531,
    section 2), over the tokens that both have: checkpoints of one tokenizer may be padded to
    different numbers of rows.

    Args:
        logits: (n, V) of the student, any dtype; computed in float32.
        targets: (n,) ids; rows of -100 do not count.
        teacher_logits: (n, W) of the teacher, or None.

    Returns:
        The loss, and (2,) the summed cross-entropy and KL divergence.
    """
    logits = logits.float()
    cross_entropy = nats(logits, targets).sum()
    if teacher_logits is None:
        return cross_entropy, torch.stack([cross_entropy, cross_entropy.new_zeros(())])

    p, q = common_log_probabilities(teacher_logits.float(), logits)
    kl_of_rows = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    kl = kl_of_rows.where(targets >= 0, 0.0).sum()
    return kl, torch.stack([cross_entropy, kl])
