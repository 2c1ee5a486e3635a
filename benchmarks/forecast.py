"""What layers lose alone, in sum, against what they lose together: whether the one foretells the other.

    python benchmarks/forecast.py --kind qwen3 --kind phi --json points.json     # tiny models, trained by auto.py
    python benchmarks/forecast.py --kind none --model examples/stdlib-mha
    python benchmarks/forecast.py --fit points.json

A row for each model, number of heads and method: the sum of what every layer loses alone, as `--kv-budget` measures it,
and the KL divergence of the whole conversion from the base model, on the same 4,096 tokens of the model's own text.
--fit gives a and b of a * alone ** b by least squares of logarithms for each method, the factor that is twice the
standard deviation of what is left, and how many points lie within those of a fit to all models but their own.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from auto import CONTEXT, KINDS, of_models
from harness import JSON_OPTION, write_json


def divergence(base: Path, other: Path, windows: Any) -> float:
    """Nats a token, in float32."""
    import torch

    from gqa.checkpoint.loading import load_model

    models = [load_model(str(place), dtype="float32") for place in (base, other)]
    lost = 0.0
    with torch.inference_mode():
        for rows in windows.split(8):
            true, found = (model(input_ids=rows).logits.float().log_softmax(-1) for model in models)
            lost += float((true.exp() * (true - found)).sum())
    return float(lost / windows.numel())


def measure(model: Path, options: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    from gqa.checkpoint.hub import open_model
    from gqa.convert import convert_checkpoint
    from gqa.convert.align.allot import FITTED, MEASURED, losses_alone
    from gqa.convert.align.options import CalibrationText, MapsOptions
    from gqa.convert.align.watcher import SILENT
    from gqa.convert.methods import MEASURING
    from gqa.convert.plan import make_plan

    source, rows = open_model(str(model)), []
    text = CalibrationText(tokens=FITTED + MEASURED, length=options["length"])
    how, last = MapsOptions(text), MEASURED // options["length"]
    blocks = text.blocks(source, how.device, SILENT)
    for groups in options["groups"]:
        alone = losses_alone(make_plan(source, groups, MEASURING), blocks[:-last], blocks[-last:], how)
        for method in options["methods"]:
            fitted = replace(how, text=replace(text, tokens=options["tokens"], seed=1))
            convert_checkpoint(
                model, groups, scratch / "made", method=method, dtype="float32", overwrite=True, calibration=fitted
            )
            joint = divergence(model, scratch / "made", blocks[-last:])
            rows.append({"model": model.name, "groups": groups, "method": method, "alone": sum(alone), "joint": joint})
            print(f"| {model.name} | {groups} | {method} | {sum(alone):.4f} | {joint:.4f} |", flush=True)
    return rows


def fit(points: Path) -> None:
    import numpy as np

    def line(found: list[dict[str, Any]]) -> tuple[float, float, float]:
        x, y = np.log([[row[key] for row in found] for key in ("alone", "joint")])
        power, scale = np.polyfit(x, y, 1)
        return float(power), float(scale), 2 * float(np.std(y - power * x - scale, ddof=2))

    rows = json.loads(points.read_text())
    for method in sorted({row["method"] for row in rows}):
        own, within = [row for row in rows if row["method"] == method], 0
        for row in own:
            power, scale, width = line([other for other in own if other["model"] != row["model"]])
            within += abs(math.log(row["joint"]) - power * math.log(row["alone"]) - scale) <= width
        power, scale, width = line(own)
        print(f"{method}: {math.exp(scale):.3g} * alone ** {power:.3g}, within a factor of {math.exp(width):.3g}; "
              f"{within} of {len(own)} points by a fit to the other models")  # fmt: skip


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--kind", "kinds", type=click.Choice((*KINDS, "none")), multiple=True, default=tuple(KINDS))
@click.option("--model", "models", type=click.Path(exists=True, path_type=Path), multiple=True, help="Others as well.")
@click.option("--groups", type=int, multiple=True, default=(4, 2, 1), help="Several times for several.")
@click.option("--method", "methods", multiple=True, default=("calibrated", "refined"))
@click.option("--steps", type=int, default=400, help="Of training, 2,048 tokens each.")
@click.option("--tokens", type=int, default=65_536, help="Of calibration text.")
@click.option("--length", type=int, default=CONTEXT, help="Tokens of a block.")
@click.option("--fit", "points", type=click.Path(exists=True, path_type=Path), help="Measure nothing.")
@JSON_OPTION
def main(
    json_file: Path | None,
    kinds: tuple[str, ...],
    models: tuple[Path, ...],
    points: Path | None,
    **options: Any,
) -> None:
    if points:
        fit(points)
        return
    print("| model | KV heads | method | alone, in sum | together |\n|---|---|---|---|---|")
    write_json(of_models(measure, kinds, models, options), json_file)


if __name__ == "__main__":
    main()
