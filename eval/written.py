"""What encoder-decoders write for the sources of a text: how long it is the baseline's, and how near to the targets.

The metrics are those of the libraries that papers cite: sacrebleu, rouge-score and jiwer (the extra `seq2seq`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.corpus.windows import Window
from gqa.eval.greedy import continued
from gqa.eval.statistics import ratio_interval

AGREEMENT = 64  # texts, where no metric asks for all
Texts = Sequence[str]


def chosen(windows: Sequence[Window], every: bool) -> list[Window]:
    """Pairs whose sources are written for: all, or some, spread evenly."""
    picks = np.linspace(0, len(windows) - 1, len(windows) if every else min(AGREEMENT, len(windows))).astype(int)
    return [windows[pick] for pick in picks]


def write(model: PreTrainedModel, pairs: Sequence[Window], batch_size: int) -> list[Window]:
    """What the model writes for the sources, always the most probable token, as many as the longest target has."""
    steps, found = max(pair.scored for pair in pairs), list[Window]()
    for start in range(0, len(pairs), batch_size):
        some = pairs[start : start + batch_size]
        found += continued(model, [pair.ids[: -pair.scored] for pair in some], steps, some)
    return found


def against_targets(
    names: Sequence[str], tokenizer: Any, written: Sequence[Window], pairs: Sequence[Window]
) -> dict[str, dict[str, float]]:
    """Of each metric its value, in per cent, and its 95 % bootstrap interval over texts (`value`, `low`, `high`)."""
    ours, theirs = (
        [tokenizer.decode(list(one.ids[-one.scored :]), skip_special_tokens=True) for one in each]
        for each in (written, pairs)
    )
    found = {}
    for name in names:
        for told, (value, low, high) in METRICS[name][1](ours, theirs).items():
            found[told] = {"value": 100 * value, "low": 100 * low, "high": 100 * high}
    return found


def check_metrics(names: Sequence[str]) -> None:
    """Raises RefusedError where a library is not installed."""
    for name in names:
        try:
            import_module(METRICS[name][0])
        except ModuleNotFoundError:
            raise RefusedError(
                f"--metrics {name} needs {METRICS[name][0]}; install it with: pip install 'gqa[seq2seq]'"
            ) from None


Found = dict[str, tuple[float, float, float]]


def _rouge(ours: Texts, theirs: Texts) -> Found:
    """Means of F1 (rouge-score, without a stemmer)."""
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(names)
    scores = [scorer.score(wanted, said) for said, wanted in zip(ours, theirs, strict=True)]
    ones = np.ones(len(scores))
    return {name: ratio_interval(np.array([score[name].fmeasure for score in scores]), ones) for name in names}


def _bleu(ours: Texts, theirs: Texts) -> Found:
    """Of the corpus (sacrebleu's defaults); the interval is its own bootstrap."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    value = metric.corpus_score(list(ours), [list(theirs)]).score / 100
    generator, spread = np.random.default_rng(0), []
    for _ in range(200):
        picks = generator.integers(len(ours), size=len(ours))
        spread.append(metric.corpus_score([ours[i] for i in picks], [[theirs[i] for i in picks]]).score / 100)
    low, high = np.percentile(spread, (2.5, 97.5))
    return {"bleu": (value, float(low), float(high))}


def _wer(ours: Texts, theirs: Texts) -> Found:
    """Insertions, deletions and replacements by words of the targets (jiwer), without case and punctuation."""
    import jiwer

    ours, theirs = ([re.sub(r"[^\w\s']", " ", text.lower()) for text in texts] for texts in (ours, theirs))
    pairs = [(said, wanted) for said, wanted in zip(ours, theirs, strict=True) if wanted.split()]
    counted = [jiwer.process_words(wanted, said) for said, wanted in pairs]
    errors = np.array([one.substitutions + one.deletions + one.insertions for one in counted], float)
    words = np.array([len(wanted.split()) for _, wanted in pairs], float)
    return {"wer": ratio_interval(errors, words)}


# By name: what it needs, and what it says of texts and the targets that they should be.
METRICS: dict[str, tuple[str, Callable[[Texts, Texts], Found]]] = {
    "rouge": ("rouge_score", _rouge),
    "bleu": ("sacrebleu", _bleu),
    "wer": ("jiwer", _wer),
}
