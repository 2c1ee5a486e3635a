"""Convert, train and evaluate tiny models on the CPU and on the stand-in for an accelerator; print
as JSON how far apart the results are, and how often tensors moved.

    python on_stand_in.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import stand_in
from support.calibrations import SHORT, pairs, plan_of
from support.families import write_checkpoint
from support.tiny_models import TINY, build
from support.training import difference, material, options_for, trained
from torch import Tensor

import gqa
import gqa.convert.merge.pair
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.quality import QualityCheck
from gqa.convert.methods.table import METHODS

LENGTH = 16
AT_ONCE = 16  # blocks


def calibration(
    source: Path, method: str, device: str, inputs: Tensor | dict[str, Tensor], check: bool = False
) -> dict[str, Tensor]:
    """Everything that a calibration finds, by name, in the host's memory."""
    plan = plan_of(source, method)
    text = CalibrationText(("x",), 32 * LENGTH, LENGTH)
    # Every call takes ten times as long on the stand-in, so two steps must do. Float32 on both: a
    # CPU with native bfloat16 would train in that.
    training = replace(SHORT, steps=2, autocast=False)
    options = MapsOptions(text=text, device=device, most_blocks=AT_ONCE, refinement=training)
    calibrator = Calibrator(plan, inputs, options, METHODS[method].fit)
    heldout = torch.arange(8 * LENGTH).view(8, LENGTH) % 50 + 10
    quality = QualityCheck(calibrator.pair, heldout) if check else None

    found: dict[str, Tensor] = {}
    for layer in range(calibrator.n_layers):
        for result in calibrator.run(layer):
            path = result.module.path
            found[f"{path} error"] = torch.tensor(result.error)
            # Not the maps themselves, whose bases may turn by rounding.
            tensors = calibrator.pair.merged_tensors(result.module, result.maps)
            for name, tensor in {**tensors, **result.trained_tensors}.items():
                found[f"{path} {name}"] = tensor.cpu()
    for name, hidden in calibrator.pair.state().items():
        found[name] = hidden.cpu()
    if quality:
        found["ratio"] = torch.tensor(quality.result()["ratio"])
    return found


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two results, relative to the size of each tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp_min(1e-9))
        for name in one
    )


def against_the_cpu(run: Callable[[str], dict[str, Tensor]], free: int) -> dict[str, Any]:
    """The difference of a run's result on the device from that on the CPU, and what moved; `free`
    bytes of the device are free.
    """
    expected = run("cpu")
    gqa.convert.merge.streams.free_memory = lambda device: None if device.type == "cpu" else free
    with stand_in.stand_in() as moves:
        found = run(stand_in.NAME)
    return {"difference": farthest(expected, found), "there": moves.there, "back": moves.back}


def conversions(directory: Path) -> dict[str, Any]:
    """Of a decoder and of an encoder-decoder with padding."""
    llama = write_checkpoint(build(TINY["llama"], 4), directory / "llama")
    t5 = write_checkpoint(build(TINY["gqa_t5"], 4), directory / "t5")
    gemma = write_checkpoint(build(TINY["gemma2"], 4), directory / "gemma2")
    padded = pairs(TINY["gqa_t5"].tokens, padding=8)

    def blocks(count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(10, 60, (count, LENGTH), generator=generator)

    def calibrate(count: int, free: int, method: str = "calibrated", check: bool = False) -> Any:
        return against_the_cpu(
            lambda device: calibration(llama, method, device, blocks(count), check), free
        )

    few = 2 * AT_ONCE
    many = 6 * AT_ONCE
    roomy = 1 << 40
    return {
        "few blocks": calibrate(few, roomy),
        "many blocks": calibrate(many, roomy),
        "many blocks, full device": calibrate(many, free=1),
        "refined and checked": calibrate(few, roomy, method="refined", check=True),
        "encoder-decoder": against_the_cpu(
            lambda device: calibration(t5, "calibrated", device, padded), roomy
        ),
        "aligned, with norms after attention and MLP": against_the_cpu(
            lambda device: from_weights(gemma, device), roomy
        ),
    }


def from_weights(source: Path, device: str) -> dict[str, Tensor]:
    """The tensors that `aligned` merges, by name."""
    plan = plan_of(source, "aligned")
    found: dict[str, Tensor] = {}
    for path, maps in METHODS["aligned"].maps_by_module(plan, device=device):
        for name, tensor in vars(maps).items():
            if isinstance(tensor, Tensor):
                found[f"{path} {name}"] = tensor.cpu()
    return found


def trainings(directory: Path) -> dict[str, Any]:
    """The difference of weights after two steps from the CPU's, and what moved to the device."""
    outcome: dict[str, Any] = {}
    for name in ("cpu", stand_in.NAME):
        options = options_for(material() / "model", directory / name, device=name)
        with stand_in.stand_in() as moves:
            trained(options)
        outcome[name] = moves.there
    outcome["difference"] = difference(directory / "cpu", directory / stand_in.NAME)
    return outcome


def evaluation() -> dict[str, list[float]]:
    """Nats per token and KL divergence of a model and of its base model, by device."""
    found = {}
    for device in ("cpu", stand_in.NAME):
        with stand_in.stand_in():
            record = gqa.evaluate_models(
                str(material() / "teacher"),
                str(material() / "model"),
                data=str(material() / "data.jsonl"),
                context=32,
                tokens=1000,
                kl=True,
                device=device,
            ).record
        base, model = record["models"]
        found[device] = [
            base["quality"]["nats_per_token"],
            model["quality"]["nats_per_token"],
            model["against_baseline"]["kl"]["mean"],
        ]
    return found


def error_of_two_devices() -> str:
    """What adding tensors of both devices raises."""
    with stand_in.stand_in():
        on_device = torch.ones(2, device=stand_in.NAME)
        try:
            on_device + torch.ones(2)
        except RuntimeError as error:
            return str(error)
    return "nothing"


if __name__ == "__main__":
    stand_in.register()
    place = Path(sys.argv[1])
    outcome = {
        "error of two devices": error_of_two_devices(),
        "conversions": conversions(place),
        "training": trainings(place),
        "evaluation": evaluation(),
    }
    print(json.dumps(outcome, default=str))
