"""Score windows of text with a model: nats per token, and how its predictions differ from a
baseline's.

A window is `ids` of length n + 1: the model reads ids[:-1] and predicts ids[1:], and the last
`scored` of those n predictions count. Every protocol is a list of windows, so scoring and batching
do not depend on the protocol.

Scores are arrays with one number per scored token, in the order of the text, whatever the batch
size and the number of ranks. `ARRAYS` has the arrays of one model, `COMPARISONS` those of two; the
array NAME of the baseline is called `baseline_NAME`. A metric (`gqa.eval.metrics`) names the arrays
that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.write import Progress, no_progress
from gqa.core.devices import ranks
from gqa.core.errors import RefusedError
from gqa.corpus.likelihood import common_log_probabilities, kl_divergence, nats
from gqa.models.chunked_head import ChunkedHead, chunks

Scores = dict[str, NDArray[Any]]  # by name, each (scored tokens,)

BASELINE = "baseline_"  # begins the names of the baseline's arrays


@dataclass(frozen=True)
class Window:
    """A window of text to score.

    Attributes:
        ids: Inputs and the last target.
        scored: Number of predictions that count, from the end.
        document: Number of the text.
        source: Ids of the encoder, if there is one.
    """

    ids: tuple[int, ...]
    scored: int
    document: int = 0
    source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.scored < len(self.ids), f"{self.scored} scored of {len(self.ids)} ids"


def rolling_windows(
    ids: Sequence[int], context: int, prefix: int, document: int = 0
) -> Iterator[Window]:
    """Each token scored exactly once: the windows of lm-evaluation-harness'
    `loglikelihood_rolling`.

    The first window starts with the token `prefix` (BOS) and scores up to `context` tokens; each
    later one scores the next `context` (or what is left, with left context up to `context` tokens
    in all).
    """
    first = min(context, len(ids))
    if first:
        yield Window((prefix, *ids[:first]), first, document)

    for begin in range(first, len(ids), context):
        end = min(begin + context, len(ids))
        yield Window(tuple(ids[end - context - 1 : end]), end - begin, document)


@dataclass(frozen=True)
class Predictions:
    """What one model predicts at n positions.

    Attributes:
        logits: (n, V) float32, over all rows of its embedding.
        targets: (n,) token ids.
        log_probabilities: (n, W) over the tokens that it has in common with the model that it is
            compared with, or None.
    """

    logits: Tensor
    targets: Tensor
    log_probabilities: Tensor | None = None


def _nats(predictions: Predictions) -> Tensor:
    """-ln q(target), (n,), where q is over all rows of the model."""
    log_q = predictions.log_probabilities
    if log_q is not None and log_q.shape == predictions.logits.shape:
        return nll_loss(log_q, predictions.targets, reduction="none")
    return nats(predictions.logits, predictions.targets)


def _hits(predictions: Predictions) -> Tensor:
    """Whether the target is the most probable token, (n,)."""
    return predictions.logits.argmax(-1) == predictions.targets


def _top1_agreement(p: Tensor, q: Tensor) -> Tensor:
    """Whether the most probable tokens of both models are equal, (n,)."""
    return p.argmax(-1) == q.argmax(-1)


def _acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Sum over tokens x of min(p(x), q(x)), (n,): the probability that speculative sampling from
    the baseline's p accepts a token drafted from the model's q (Leviathan et al., arXiv 2211.17192,
    section 3.2).
    """
    return torch.minimum(p, q).exp().sum(-1).clamp_max(1.0)


# Arrays of one model.
ARRAYS: dict[str, Callable[[Predictions], Tensor]] = {"nats": _nats, "hits": _hits}

# Arrays of two models, from log-probabilities (n, W) of the baseline and of the model, over the
# tokens that both have.
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_divergence,
    "top1_agreement": _top1_agreement,
    "acceptance": _acceptance,
}


@torch.inference_mode()
def score(
    head: ChunkedHead,
    windows: Sequence[Window],
    *,
    batch_size: int,
    arrays: Collection[str] | None = None,
    baseline: ChunkedHead | None = None,
    progress: Progress = no_progress,
) -> Scores:
    """Score every window; with several ranks (accelerate) each takes its share and all get the
    whole.

    Args:
        arrays: Names of the arrays to compute, by default all; `nats` is always one of them.
        baseline: Also compare the distributions with this model's, position by position, batch by
            batch. Without it, `COMPARISONS` and the baseline's arrays are left out.
        progress: Called with the number of tokens scored.

    Returns:
        Arrays (scored tokens,), window by window.

    Raises:
        RefusedError: Logits are not finite.
    """
    state = ranks()
    names = _computed(arrays)
    ends = np.cumsum([window.scored for window in windows], dtype=int)

    # The longest first, so that little is padded.
    def longest_first(number: int) -> tuple[int, int, int]:
        window = windows[number]
        return -len(window.ids), -len(window.source), number

    order = sorted(range(len(windows)), key=longest_first)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    parts: list[tuple[NDArray[Any], Scores]] = []
    for batch in batches[state.process_index :: state.num_processes]:
        # Where the predictions of these windows stand in the scores of the whole text.
        places = np.concatenate([np.arange(ends[i] - windows[i].scored, ends[i]) for i in batch])
        scores = _score_batch(head, [windows[i] for i in batch], baseline, names)
        _check_finite(head, scores["nats"])
        if baseline:
            _check_finite(baseline, scores[BASELINE + "nats"])
        parts.append((places, scores))
        progress(len(places))

    parts = gather_object(parts)  # every rank's
    text_order = np.concatenate([places for places, _ in parts]).argsort()
    in_text_order: Scores = {}
    for name in parts[0][1]:
        scored = np.concatenate([scores[name] for _, scores in parts])
        in_text_order[name] = scored[text_order]
    return in_text_order


def _computed(arrays: Collection[str] | None) -> set[str]:
    """Names of `ARRAYS` and `COMPARISONS` that are computed so that `arrays` can be returned."""
    if arrays is None:
        return {*ARRAYS, *COMPARISONS}
    return {"nats", *(name.removeprefix(BASELINE) for name in arrays)}


def _check_finite(head: ChunkedHead, nats: NDArray[Any]) -> None:
    """Raise RefusedError unless all nats (n,) of a model are finite."""
    if np.isfinite(nats).all():
        return
    advice = "check its weights, or download it again"
    if head.model.dtype != torch.float32:
        advice = f"pass --precision float32; if that does not help, {advice}"
    raise RefusedError(f"{head.model.name_or_path} predicts NaN or infinite logits; {advice}")


def _inputs(windows: Sequence[Window], device: torch.device) -> dict[str, Tensor]:
    """Model inputs of windows, each (B, T), padded on the right: with causal attention no scored
    position attends to padding, so no mask is needed. The bidirectional encoder gets a mask.
    """
    ids = _pad((window.ids[:-1] for window in windows), device)
    if not any(window.source for window in windows):
        return {"input_ids": ids}

    source = _pad((window.source for window in windows), device)
    mask = _pad(([1] * len(window.source) for window in windows), device)
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": ids}


def _scored_positions(windows: Sequence[Window], device: torch.device) -> Tensor:
    """Indices of the scored predictions among the B * T positions of `_inputs`, (n,)."""
    marks = []
    for window in windows:
        unscored = len(window.ids) - 1 - window.scored
        marks.append([0] * unscored + [1] * window.scored)
    return _pad(marks, device).flatten().nonzero().squeeze(1)


def _targets(windows: Sequence[Window], device: torch.device) -> Tensor:
    """Token ids of the scored predictions, (n,)."""
    ids = list[int]()
    for window in windows:
        ids += window.ids[-window.scored :]
    return torch.tensor(ids, device=device)


def _pad(lines: Iterable[Sequence[int]], device: torch.device) -> Tensor:
    """Lines of numbers as (B, T), filled with zeros on the right."""
    rows = [torch.tensor(line, dtype=torch.long) for line in lines]
    return pad_sequence(rows, batch_first=True).to(device)


def _score_batch(
    head: ChunkedHead, windows: Sequence[Window], baseline: ChunkedHead | None, names: set[str]
) -> Scores:
    """The arrays `names` of these windows. Each backbone runs once, logits are taken in slices."""
    device = head.model.device
    heads = [head, baseline] if baseline else [head]
    inputs = _inputs(windows, device)
    positions = _scored_positions(windows, device)
    targets = _targets(windows, device)
    hidden = [one.hidden(**inputs).flatten(0, 1) for one in heads]

    parts = []
    for piece in chunks(len(targets), head.vocabulary, device):
        rows = positions[piece]
        logits = [
            one.logits(states[rows]).float() for one, states in zip(heads, hidden, strict=True)
        ]
        parts.append(_arrays(logits, targets[piece], names))

    joined: Scores = {}
    for name in parts[0]:
        joined[name] = torch.cat([part[name] for part in parts]).cpu().numpy()
    return joined


def _arrays(logits: Sequence[Tensor], targets: Tensor, names: set[str]) -> dict[str, Tensor]:
    """The arrays `names`, each (n,), of n positions.

    Args:
        logits: Of the model, (n, V), and, if it is compared, of the baseline.
        targets: Token ids, (n,).
    """
    of_one_model = {name: array for name, array in ARRAYS.items() if name in names}
    if len(logits) == 1:
        model = Predictions(logits[0], targets)
        return {name: array(model) for name, array in of_one_model.items()}

    model_logits, baseline_logits = logits
    p, q = common_log_probabilities(baseline_logits, model_logits)
    model = Predictions(model_logits, targets, q)
    baseline = Predictions(baseline_logits, targets, p)

    arrays = {name: array(model) for name, array in of_one_model.items()}
    arrays |= {BASELINE + name: array(baseline) for name, array in of_one_model.items()}
    arrays |= {name: compare(p, q) for name, compare in COMPARISONS.items() if name in names}
    return arrays
