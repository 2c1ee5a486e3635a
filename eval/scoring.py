"""Score windows of text with a model: nats per token, and how its predictions differ from a baseline's.

Everything is kept per token in the order of the text, so that sums, percentiles and positions are computed from the
same numbers whatever the batch size or the number of ranks was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gqa.checkpoint.devices import free_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.write import Progress, unwatched
from gqa.corpus.likelihood import ChunkedHead, chunks, kl_divergence, nats
from gqa.corpus.windows import Window, batches


@dataclass(frozen=True)
class Scores:
    """One number per scored token, window by window. `kl` and `same_top` are against a baseline, where there is one.

    nats: -ln p(token); context: how many tokens were read before it; window: the number of its window.
    kl: KL(baseline || model) in nats; same_top: both find the same token the most probable.
    """

    nats: NDArray[np.float32]
    context: NDArray[np.int32]
    window: NDArray[np.int32]
    kl: NDArray[np.float32] | None = None
    same_top: NDArray[np.bool_] | None = None
    baseline_nats: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, windows: Sequence[Window], nats: NDArray[np.float32], **compared: Any) -> Scores:
        """Scores of `windows`, whose context and window numbers follow from them."""
        counts = [window.scored for window in windows]
        context = np.concatenate([_contexts(window) for window in windows])
        return cls(nats, context, np.repeat(np.arange(len(counts), dtype=np.int32), counts), **compared)

    @property
    def total_nats(self) -> float:
        return float(self.nats.sum(dtype=np.float64))

    @property
    def tokens(self) -> int:
        return len(self.nats)


@dataclass(frozen=True)
class PaddedWindows:
    """Windows side by side: (B, T) inputs and, of every scored prediction, its flat position in them and its target."""

    inputs: dict[str, Tensor]
    flat: Tensor
    targets: Tensor
    rows: NDArray[np.int64]  # where each prediction stands in Scores


class Baseline(Protocol):
    """What a model is compared with: a model in lockstep, or log-probabilities on disk."""

    def start(self, batch: PaddedWindows) -> None: ...

    def log_probabilities(self, batch: PaddedWindows, piece: slice) -> Tensor:
        """(n, V) float32 for some of the batch's predictions."""
        ...


class LiveBaseline:
    """The baseline's model, run over the same batches."""

    def __init__(self, head: ChunkedHead) -> None:
        self._head = head

    def start(self, batch: PaddedWindows) -> None:
        self._hidden = self._head.hidden(**batch.inputs).flatten(0, 1)

    def log_probabilities(self, batch: PaddedWindows, piece: slice) -> Tensor:
        return self._head.logits(self._hidden[batch.flat[piece]]).float().log_softmax(-1)


@torch.inference_mode()
def score(
    head: ChunkedHead,
    windows: Sequence[Window],
    *,
    batch_size: int,
    baseline: Baseline | None = None,
    record: Callable[[NDArray[np.int64], Tensor], None] | None = None,
    progress: Progress = unwatched,
) -> Scores:
    """Score every window; with several ranks (accelerate) each takes its share and all get the whole.

    Args:
        baseline: Also compare the distributions, position by position.
        record: Called with (rows, their log-probabilities (n, V) float32), to keep them.
        progress: Called with the number of tokens scored.

    Raises:
        RefusedError: The logits are not finite; names the window and the first module whose output is not.
    """
    state = ranks()
    ends = np.cumsum([0, *(window.scored for window in windows)]).tolist()
    places = [slice(start, end) for start, end in pairwise(ends)]  # of each window's predictions in the scores
    found = _empty(ends[-1], baseline is not None)
    mine = list(batches(windows, batch_size))[state.process_index :: state.num_processes]
    for indices in mine:
        batch = _make_batch([windows[i] for i in indices], [places[i] for i in indices], head.model.device)
        _score_batch(head, batch, found, baseline, record)
        if bad := [i for i in indices if not np.isfinite(found["nats"][places[i]]).all()]:
            _refuse_not_finite(head, windows, min(bad))
        progress(len(batch.rows))
    if state.num_processes > 1:
        _gather(found, [places[i] for batch in mine for i in batch])
    return Scores.of(windows, **found)


def _empty(count: int, compared: bool) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {"nats": np.full(count, np.nan, np.float32)}
    if compared:
        found |= {"kl": np.zeros(count, np.float32), "baseline_nats": np.zeros(count, np.float32)}
        found["same_top"] = np.zeros(count, np.bool_)
    return found


def _contexts(window: Window) -> NDArray[np.int32]:
    last = len(window.ids) - 1
    return np.arange(last - window.scored + 1, last + 1, dtype=np.int32)


def _make_batch(windows: Sequence[Window], places: Sequence[slice], device: torch.device) -> PaddedWindows:
    """Padded on the right: with causal attention no scored position sees padding, so no mask is needed."""
    width = max(len(w.ids) for w in windows) - 1
    ids = torch.zeros((len(windows), width), dtype=torch.long)
    flat, targets = [], []
    for line, window in enumerate(windows):
        count = len(window.ids) - 1
        ids[line, :count] = torch.tensor(window.ids[:-1])
        flat.append(torch.arange(count - window.scored, count) + line * width)
        targets.append(torch.tensor(window.ids[-window.scored :]))
    inputs = {"input_ids": ids}
    if any(window.source for window in windows):
        inputs = _with_encoder(windows, ids)
    return PaddedWindows(
        {name: tensor.to(device) for name, tensor in inputs.items()},
        torch.cat(flat).to(device), torch.cat(targets).to(device), np.r_[tuple(places)],
    )  # fmt: skip


def _with_encoder(windows: Sequence[Window], ids: Tensor) -> dict[str, Tensor]:
    """The encoder reads both directions: its padding is masked."""
    width = max(len(w.source) for w in windows)
    source, mask = torch.zeros((len(windows), width), dtype=torch.long), torch.zeros(len(windows), width)
    for line, window in enumerate(windows):
        source[line, : len(window.source)] = torch.tensor(window.source)
        mask[line, : len(window.source)] = 1
    return {"input_ids": source, "attention_mask": mask.long(), "decoder_input_ids": ids}


def _score_batch(
    head: ChunkedHead,
    batch: PaddedWindows,
    found: dict[str, NDArray[Any]],
    baseline: Baseline | None,
    record: Callable[[NDArray[np.int64], Tensor], None] | None,
) -> None:
    hidden = head.hidden(**batch.inputs).flatten(0, 1)
    if baseline:
        baseline.start(batch)
    device = batch.targets.device
    for piece in chunks(len(batch.rows), head.vocabulary, device, free_memory(device)):
        rows, targets = batch.rows[piece], batch.targets[piece]
        logits = head.logits(hidden[batch.flat[piece]]).float()
        if baseline is None and record is None:
            found["nats"][rows] = nats(logits, targets).cpu().numpy()
            continue
        q = logits.log_softmax(-1)
        found["nats"][rows] = _at(q, targets)
        if record:
            record(rows, q)
        if baseline:
            p = baseline.log_probabilities(batch, piece)
            found["baseline_nats"][rows] = _at(p, targets)
            found["kl"][rows] = kl_divergence(p, q).cpu().numpy()
            found["same_top"][rows] = (p.argmax(-1) == q.argmax(-1)).cpu().numpy()


def _at(log_probabilities: Tensor, targets: Tensor) -> NDArray[np.float32]:
    picked: NDArray[np.float32] = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1).cpu().numpy()
    return picked


def _gather(found: dict[str, NDArray[Any]], mine: Sequence[slice]) -> None:
    """Put every rank's windows together, in the order of the text: what one rank alone would have found."""
    from accelerate.utils import gather_object

    for part in gather_object([[(place, {key: values[place] for key, values in found.items()}) for place in mine]]):
        for place, values in part:
            for key, value in values.items():
                found[key][place] = value


def _refuse_not_finite(head: ChunkedHead, windows: Sequence[Window], bad: int) -> NoReturn:
    batch = _make_batch([windows[bad]], [slice(0, windows[bad].scored)], head.model.device)
    where = first_not_finite(head.model, batch.inputs)
    raise RefusedError(
        f"{head.model.name_or_path}: the logits of window {bad} (document {windows[bad].document}) are not finite; "
        + (f"the first module whose output is not finite is {where}" if where else "all modules' outputs are finite")
    )


def first_not_finite(model: torch.nn.Module, inputs: dict[str, Tensor]) -> str | None:
    """The first module, in the order of execution, that turns finite inputs into NaN or Inf."""
    names: list[str] = []

    def watch(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(module: torch.nn.Module, given: Any, output: Any) -> None:
            tensors = (part for part in tree_leaves(output) if isinstance(part, Tensor) and part.is_floating_point())
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                names.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        model(**inputs, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return names[0] if names else None
