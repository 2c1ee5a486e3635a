"""Memory and speed by the number of key/value heads: neither depends on the method or on the weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa.checkpoint.loading import load_model
from gqa.convert import convert_checkpoint
from gqa.convert.plan import make_plan
from gqa.eval.decode import measure_decode
from gqa.eval.evaluate import decode_contexts
from gqa.eval.study.study import StudyOptions
from gqa.eval.subjects import Subject

STEPS, REPEATS = 32, 5


def measure_speeds(
    subject: Subject, options: StudyOptions, groups: Sequence[int], known: Mapping[str, Any], work: Path
) -> dict[str, Any]:
    """Columns by the number of groups: KV bytes of a token, by formula, and the time of decoding one.

    `known` ones are kept; the others are timed in turns, each as a conversion whose weights are means.
    """
    missing = [count for count in groups if str(count) not in known]
    found: dict[str, Any] = {str(count): _memory(subject, count) for count in missing}
    if options.decode and missing:
        contexts = (options.decode_context,) if options.decode_context else None
        context = decode_contexts([subject], contexts, STEPS)[-1]
        models = {}
        for count in missing:
            place = work / f"speed-g{count}"
            convert_checkpoint(options.model, count, place, overwrite=True)
            models[str(count)] = load_model(str(place), dtype=options.dtype, device=options.devices[0])
            shutil.rmtree(place)
        for name, points in measure_decode(models, [options.decode_batch], [context], STEPS, REPEATS).items():
            point = points[0]
            found[name] |= {
                "decode_seconds_per_token": point.seconds_per_token,
                "decode_fastest": point.fastest,
                "decode_slowest": point.slowest,
                "decode_tokens_per_second": point.tokens_per_second,
                "decode_tokens_before": context,
            }
    return {**known, **found}


def _memory(subject: Subject, groups: int) -> dict[str, Any]:
    plan = make_plan(subject.checkpoint, groups)
    return {
        "kv_bytes_per_token": plan.cache_after.bytes_per_token,
        "kv_share": plan.cache_after.bytes_per_token / plan.cache_before.bytes_per_token,
    }
