"""What an evaluation takes: forward passes over what is read, by how fast this device multiplies."""

from __future__ import annotations

from collections.abc import Sequence

from gqa.convert.estimate import forward, products_a_second
from gqa.corpus.windows import tokens_read as windows_read
from gqa.eval.evaluate import find_recall_context, run_device
from gqa.eval.options import EvaluateOptions
from gqa.eval.recall import tokens_read
from gqa.eval.subjects import open_subjects
from gqa.eval.text import choose_context, read_text


def seconds(baseline: str, others: Sequence[str], options: EvaluateOptions) -> float:
    """Of a comparison with so many `others` as large as the baseline, the only one that is looked at; those may not be
    there yet. Perplexity, --kl and recall; --decode comes on top. Raises RefusedError.
    """
    subjects = open_subjects([baseline], options.trust_remote_code, options.revision)
    (subject,), tokens = subjects, 0
    models = (1 + len(others)) * (1 + len(options.cache_bits or ()))
    length = choose_context(subjects, options.context, options.beyond_positions)
    if options.data:
        read = windows_read(read_text(subjects, options).windows)
        tokens += read * (models + (models - 1 if options.kl else 0))
    if context := find_recall_context(subjects, options):
        tokens += tokens_read(context) * models
    operations = tokens * forward(subject.checkpoint.parameters, subject.config, length)
    return operations / products_a_second(run_device(options), int(subject.text_config.hidden_size))
