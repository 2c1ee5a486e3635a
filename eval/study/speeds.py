"""Memory and speed by the number of key/value heads: neither depends on the method or on the weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
    subject: Subject, options: StudyOptions, groups: Sequence[int], work: Path
) -> dict[str, dict[str, Any]]:
    """Columns by the number of groups: KV bytes of a token, by formula, and the time of decoding one.

    They are timed in turns, each as a conversion whose weights are means.
    """
    found: dict[str, dict[str, Any]] = {}
    caches = {}
    for count in groups:
        plan = make_plan(subject.checkpoint, count)
        caches[str(count)] = plan.cache_after
        after, before = plan.cache_after.bytes_per_token, plan.cache_before.bytes_per_token
        found[str(count)] = {"kv_bytes_per_token": after, "kv_share": after / before}
    if not (options.decode and groups):
        return found
    asked = (options.decode_context,) if options.decode_context else None
    context = decode_contexts([subject], asked, STEPS)[-1]
    models = {}
    for count in groups:
        place = work / f"speed-g{count}"
        convert_checkpoint(options.model, count, place, overwrite=True)
        models[str(count)] = load_model(str(place), dtype=options.dtype, device=options.devices[0])
        shutil.rmtree(place)
    timed = measure_decode(models, caches, [options.decode_batch], [context], STEPS, REPEATS)
    for name, (point,) in timed.items():
        found[name] |= {
            "decode_seconds_per_token": point["seconds_per_token"],
            "decode_fastest": point["fastest"],
            "decode_slowest": point["slowest"],
            "decode_tokens_per_second": point["tokens_per_second"],
            "decode_tokens_before": context,
        }
    return found
