"""What conversions of Whisper tiny.en lose and save: word error rate and KL divergence on speech of espeak-ng, bytes of
the KV cache, time of a decoding step.

    PYTHONPATH=tests python benchmarks/speech.py
    PYTHONPATH=tests python benchmarks/speech.py --groups 3 --method calibrated --recordings 96

Calibrated on other sentences than it is asked of, up to four in a recording, and what is said in them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from harness import JSON_OPTION, write_json
from real_model import real_checkpoint
from real_whisper import (
    SENTENCES,
    WHISPER,
    Heard,
    divergence,
    hear,
    logits,
    spoken,
    words_wrong,
    written,
)
from sentences import texts
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from gqa.checkpoint.loading import cache_name, load_model
from gqa.convert import convert_checkpoint
from gqa.convert.align.options import MapsOptions
from gqa.eval.subjects import open_subjects

LENGTH = 64  # tokens of what is said in a recording at most
STEPS = 40  # that are timed, one after another


def cached(checkpoint: Path) -> tuple[float, float]:
    """KiB of self-attention's cache for a written token, in 16 bits, and of cross-attention's for a recording."""
    subject = open_subjects([str(checkpoint)])[0]
    return subject.cache.bytes_per_token / 1024, subject.cache.cross_bytes_per_token * 1500 / 1024


@torch.no_grad()
def step_times(models: Sequence[PreTrainedModel], heard: Heard) -> list[float]:
    """Milliseconds of a step that decodes a token of every sentence, the median, for models side by side."""
    given = [BaseModelOutput(heard.hidden)] * len(models)
    caches, found = [None] * len(models), [list[float]() for _ in models]
    for step in range(STEPS):
        for number, model in enumerate(models):
            held = {(name := cache_name(model)): caches[number]}
            start = time.perf_counter()
            out = model(encoder_outputs=given[number], decoder_input_ids=heard.ids[:, :1], use_cache=True, **held)
            caches[number] = out[name]
            if step:  # the first computes what cross-attention caches
                found[number].append(1000 * (time.perf_counter() - start))
    return [median(times) for times in found]


@click.command()
@click.option("--groups", multiple=True, type=int, default=(3, 2, 1))
@click.option("--method", "methods", multiple=True, default=("mean", "auto", "calibrated", "refined"))
@click.option("--recordings", type=click.IntRange(1), default=384, help="To calibrate on.")
@JSON_OPTION
def main(groups: tuple[int, ...], methods: tuple[str, ...], recordings: int, json_file: Path | None) -> None:
    source = real_checkpoint(WHISPER)
    heard, tokenizer, found = hear(source), Tokenizer.from_file(str(source / "tokenizer.json")), []

    def read(ids: Any) -> list[str]:
        return [tokenizer.decode(row) for row in ids.tolist()]

    said = read(heard.ids)
    original = load_model(str(source), dtype="float32", attention="sdpa")
    before, kept_of = logits(original, heard), "{:.0f} KiB a token and {:,.0f} a recording cached".format
    click.echo(f"the original writes {words_wrong(said, SENTENCES):.1%} of words wrong, {kept_of(*cached(source))}")
    with tempfile.TemporaryDirectory() as scratch:
        (speeches := Path(scratch) / "speech").mkdir()
        how = MapsOptions(spoken(speeches, texts(recordings), LENGTH))
        for kept in groups:
            for method in methods:
                start = time.monotonic()
                out = convert_checkpoint(
                    source, kept, Path(scratch) / f"{method}{kept}", method=method, calibration=how
                ).out
                seconds = time.monotonic() - start
                model = load_model(str(out), dtype="float32", attention="sdpa")
                wrote = read(written(model, heard.hidden))
                row = {
                    "kl": divergence(logits(model, heard), before, heard.ids),
                    "wrong": words_wrong(wrote, SENTENCES),
                }
                mine, its = step_times((model, original), heard)
                row |= {"otherwise": words_wrong(wrote, said), "step_ms": mine, "original_step_ms": its}
                found.append({"groups": kept, "method": method, "seconds": seconds, **row})
                told = f"{row['wrong']:6.1%} wrong, {row['otherwise']:6.1%} otherwise than the original"
                told += f", {kept_of(*cached(out))}, {its / mine:.2f} steps in the time of one of the original"
                click.echo(f"{method:12}{kept} of 6 heads: KL {row['kl']:.3f}, {told}, {seconds:.0f} s")
    write_json(found, json_file)


if __name__ == "__main__":
    main()
