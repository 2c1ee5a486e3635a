"""Load checkpoints by transformers alone, with and without trust in the code beside the weights.

    python load_custom_code.py '["gpt2", ...]' CHECKPOINT ...

Without trust the first checkpoint is refused, and none of its code is copied to `modules` in the
working directory, which is the cache of remote code.

With trust each class of its `auto_map` loads, or only the main class where the model type is not
among those that are named. The main class computes the inputs in `given.pt` beside the checkpoint,
and writes the logits to `CLASS.pt` and the model to `saved`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


def check_refusal(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not list(Path("modules").rglob("modeling_gqa*"))


def save_logits(model: Any, place: Path, auto: str) -> None:
    inputs = torch.load(place.parent / "given.pt")
    with torch.no_grad():
        logits = model.float().eval()(**inputs).logits
    torch.save(logits, place.parent / f"{auto}.pt")
    model.save_pretrained(place.parent / "saved")


def load_classes(place: Path, whole: list[str]) -> None:
    """Every class of `auto_map` where the model type is in `whole`, else the main one."""
    config = json.loads((place / "config.json").read_text())
    main = config["architectures"][0]
    is_whole = config["model_type"].removeprefix("gqa_") in whole
    for auto, name in config["auto_map"].items():
        if not is_whole and not name.endswith(main):
            continue
        made = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True)
        assert "transformers_modules" in type(made).__module__, type(made)
        if type(made).__name__ == main:
            save_logits(made, place, auto)


if __name__ == "__main__":
    check_refusal(sys.argv[2])
    for argument in sys.argv[2:]:
        load_classes(Path(argument), json.loads(sys.argv[1]))
    ours = [name for name in sys.modules if name == "gqa" or name.startswith("gqa.")]
    assert not ours, "transformers needs nothing of gqa"
