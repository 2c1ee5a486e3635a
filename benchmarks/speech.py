"""What conversions of Whisper tiny.en lose: word error rate and KL divergence on speech of espeak-ng.

    PYTHONPATH=tests python benchmarks/speech.py
    PYTHONPATH=tests python benchmarks/speech.py --groups 3 --method calibrated --voices 4

Calibrated on other sentences than it is asked of, each spoken by `--voices` voices, with what Whisper writes of them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
from harness import JSON_OPTION, write_json
from real_model import real_checkpoint
from real_whisper import (
    SENTENCES,
    VOICES,
    WHISPER,
    divergence,
    hear,
    logits,
    record,
    words_wrong,
    written,
)
from tokenizers import Tokenizer

from gqa.checkpoint.loading import load_model
from gqa.convert import convert_checkpoint
from gqa.convert.align.options import CalibrationText, MapsOptions

LENGTH = 48  # tokens of what is heard at most


@click.command()
@click.option("--groups", multiple=True, type=int, default=(3, 2, 1))
@click.option("--method", "methods", multiple=True, default=("mean", "auto", "calibrated", "refined"))
@click.option("--voices", type=click.IntRange(1, len(VOICES)), default=1, help="That speak each sentence.")
@JSON_OPTION
def main(groups: tuple[int, ...], methods: tuple[str, ...], voices: int, json_file: Path | None) -> None:
    source = real_checkpoint(WHISPER)
    heard, tokenizer, found = hear(source), Tokenizer.from_file(str(source / "tokenizer.json")), []

    def texts(ids: Any) -> list[str]:
        return [tokenizer.decode(row) for row in ids.tolist()]

    said = texts(heard.ids)
    before = logits(load_model(str(source), dtype="float32", attention="sdpa"), heard)
    click.echo(f"the original writes {words_wrong(said, SENTENCES):.1%} of words wrong")
    with tempfile.TemporaryDirectory() as scratch:
        (speeches := Path(scratch) / "speech").mkdir()
        tokens = LENGTH * record(speeches, voices)
        how = MapsOptions(CalibrationText((str(speeches),), tokens=tokens, length=LENGTH))
        for kept in groups:
            for method in methods:
                start = time.monotonic()
                out = convert_checkpoint(
                    source, kept, Path(scratch) / f"{method}{kept}", method=method, calibration=how
                ).out
                seconds = time.monotonic() - start
                model = load_model(str(out), dtype="float32", attention="sdpa")
                wrote = texts(written(model, heard.hidden))
                row = {
                    "kl": divergence(logits(model, heard), before, heard.ids),
                    "wrong": words_wrong(wrote, SENTENCES),
                }
                row |= {"otherwise": words_wrong(wrote, said)}
                found.append({"groups": kept, "method": method, "seconds": seconds, **row})
                told = f"{row['wrong']:6.1%} wrong, {row['otherwise']:6.1%} otherwise than the original"
                click.echo(f"{method:12}{kept} of 6 heads: KL {row['kl']:.3f}, {told}, {seconds:.0f} s")
    write_json(found, json_file)


if __name__ == "__main__":
    main()
