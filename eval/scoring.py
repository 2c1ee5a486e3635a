"""Score windows of text with a model: nats per token, and how its predictions differ from a
baseline's.

A window is `ids` of length n + 1: the model reads ids[:-1] and predicts ids[1:], and the last
`scored` of those n predictions count. Every protocol is a list of windows, so scoring and batching
do not depend on the protocol.

Scores are one number per token in the order of the text, whatever the batch size and the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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

Scores = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Window:
    """`ids`: inputs and the last target; `scored`: number of predictions that count, from the end;
    `document`: number of the text; `source`: ids of the encoder, if there is one.
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


@torch.inference_mode()
def score(
    head: ChunkedHead,
    windows: Sequence[Window],
    *,
    batch_size: int,
    baseline: ChunkedHead | None = None,
    progress: Progress = no_progress,
) -> Scores:
    """Score every window; with several ranks (accelerate) each takes its share and all get the
    whole.

    Arrays of one number per scored token, window by window; from `kl` on only with a baseline:
        nats: -ln q(token); hits: the token is the most probable one. kl: KL(baseline || model) in
        nats; same_top: the most probable tokens of both are equal. These and `acceptance` are over
        the tokens that both models have. acceptance: sum over tokens x of min(p(x), q(x)), the
        probability that speculative sampling from the baseline's p accepts a token drafted from the
        model's q (Leviathan et al., arXiv 2211.17192, section 3.2). baseline_nats: -ln p(token).

    Args:
        baseline: Also compare the distributions with this model's, position by position, batch by
            batch.
        progress: Called with the number of tokens scored.

    Raises:
        RefusedError: Logits are not finite.
    """
    state = ranks()
    ends = np.cumsum([0, *(window.scored for window in windows)]).tolist()
    # Of each window's predictions in the scores
    ranges = [range(start, end) for start, end in pairwise(ends)]
    # The longest first, so that little is padded.
    order = sorted(
        range(len(windows)), key=lambda i: (-len(windows[i].ids), -len(windows[i].source), i)
    )
    parts = []
    for start in range(0, len(order), batch_size)[state.process_index :: state.num_processes]:
        indices = order[start : start + batch_size]
        rows = np.concatenate([ranges[i] for i in indices])
        values = _score_batch(head, [windows[i] for i in indices], baseline)
        for model, name in ((head.model, "nats"), (baseline and baseline.model, "baseline_nats")):
            if model and not np.isfinite(values[name]).all():
                raise RefusedError(
                    f"{model.name_or_path}: logits are not finite; look for NaN in the weights, or "
                    "give --precision float32"
                )
        parts.append((rows, values))
        progress(len(rows))
    parts = gather_object(parts)  # every rank's
    text_order = np.concatenate([rows for rows, _ in parts]).argsort()
    return {
        key: np.concatenate([values[key] for _, values in parts])[text_order] for key in parts[0][1]
    }


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


def _pad(lines: Iterable[Sequence[int]], device: torch.device) -> Tensor:
    return pad_sequence(
        [torch.tensor(line, dtype=torch.long) for line in lines], batch_first=True
    ).to(device)


def _score_batch(
    head: ChunkedHead, windows: Sequence[Window], baseline: ChunkedHead | None
) -> Scores:
    """Scores of these windows."""
    device, parts = head.model.device, []
    inputs, heads = _inputs(windows, device), [head, baseline] if baseline else [head]
    scored = _pad(([0] * (len(w.ids) - 1 - w.scored) + [1] * w.scored for w in windows), device)
    positions = scored.flatten().nonzero().squeeze(1)
    targets = torch.tensor(
        [token for window in windows for token in window.ids[-window.scored :]], device=device
    )
    hidden = [one.hidden(**inputs).flatten(0, 1) for one in heads]
    for piece in chunks(len(targets), head.vocabulary, device):
        true = targets[piece]
        logits, *others = (
            one.logits(states[positions[piece]]).float()
            for one, states in zip(heads, hidden, strict=True)
        )
        part = {"hits": logits.argmax(-1) == true}
        if others:
            other = others.pop()
            p, q = common_log_probabilities(other, logits)
            # The likelihood is over all rows of a model; p and q are, too, unless one model has
            # more rows.
            own, base = (
                nll_loss(common, true, reduction="none")
                if common.shape == whole.shape
                else nats(whole, true)
                for common, whole in ((q, logits), (p, other))
            )
            part |= {
                "nats": own,
                "kl": kl_divergence(p, q),
                "same_top": p.argmax(-1) == q.argmax(-1),
                "acceptance": torch.minimum(p, q).exp().sum(-1).clamp_max(1.0),
                "baseline_nats": base,
            }
        else:
            part["nats"] = nats(logits, true)
        parts.append(part)
    return {key: torch.cat([part[key] for part in parts]).cpu().numpy() for key in parts[0]}
