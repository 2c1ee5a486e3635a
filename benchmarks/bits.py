"""Whether a rebuild changed a number: convert, train, evaluate and ablate with fixed seeds.

    python benchmarks/bits.py store before.json      # at the commit before
    python benchmarks/bits.py compare before.json    # at the commit after; exit code 1 if not equal

Every figure is a hash of the weights that were written, or a number of a record. They depend on
the machine and on the versions of the libraries: compare on one machine, with one OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gqa

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/stdlib-mha"
METHODS = ("mean", "first", "random", "procrustes", "aligned", "calibrated", "refined")
# Plain, biases, rotary part of a head, fused projections, sinks, post-norm, encoder-decoder, custom
# code.
FAMILIES = ("llama", "qwen2", "phi", "gpt_neox", "gpt_oss", "olmo2", "gqa_t5", "gpt2")

Figures = dict[str, Any]


def weights_digest(directory: Path) -> str:
    """SHA-256 of all weights of a checkpoint, shard by shard."""
    digest = hashlib.sha256()
    for shard in sorted(directory.glob("*.safetensors")):
        digest.update(shard.read_bytes())
    return digest.hexdigest()[:16]


def attempt(figures: Figures, name: str, action: Callable[[], Any]) -> None:
    """Store what an action returns, or the first words of its refusal."""
    try:
        figures[name] = action()
    except gqa.RefusedError as error:
        figures[name] = f"refused: {str(error)[:60]}"
    print(f"{name:40} {figures[name]}", flush=True)


def text_pairs(vocabulary: int, padding: int) -> dict[str, Any]:
    """32 source texts of 24 tokens and targets of 16, then `padding` positions that are none."""
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    for side, length in (("", 24), ("decoder_", 16)):
        ids = torch.randint(10, vocabulary, (32, length), generator=generator)
        mask = torch.ones(32, length + padding, dtype=torch.long)
        mask[:, length:] = 0
        inputs[f"{side}input_ids"] = torch.cat([ids, ids[:, :padding].flip(1)], 1)
        inputs[f"{side}attention_mask"] = mask
    return inputs


def convert_tiny_families(figures: Figures, scratch: Path) -> None:
    """Every method on one random model of each family, with 2 of 4 KV heads."""
    from support.scrambled import on_ids
    from support.tiny_models import TINY, build

    from gqa.convert.api import convert_checkpoint, plan_conversion
    from gqa.convert.merge.calibrate import Calibrator
    from gqa.convert.merge.options import Refinement

    options = on_ids(
        refinement=Refinement(steps=6, validation=0.25, autocast=False), check=True, batch=24
    )
    for family in FAMILIES:
        if family not in TINY:
            continue
        base = scratch / family
        build(TINY[family], 4).save_pretrained(base, max_shard_size=20_000)
        for method in METHODS:
            out = scratch / f"{family}-{method}"

            def convert(base: Path = base, out: Path = out, method: str = method) -> str:
                convert_checkpoint(base, 2, out, method=method, maps_options=options)
                return weights_digest(out)

            if not (family == "gqa_t5" and method in ("calibrated", "refined")):
                attempt(figures, f"{family} {method}", convert)

    for method in ("calibrated", "refined"):  # self- and cross-attention
        plan = plan_conversion(scratch / "gqa_t5", 2, method=method)
        pairs = text_pairs(TINY["gqa_t5"].tokens, 8)
        calibrator = Calibrator(plan, pairs, options, plan.method.fit)
        errors = dict[str, float]()
        for layer in range(calibrator.n_layers):
            for result in calibrator.run(layer):
                errors[result.module.path] = result.error
        attempt(figures, f"gqa_t5 {method} errors", lambda errors=errors: errors)


def convert_example(figures: Figures, scratch: Path) -> None:
    """The example by every method that reads, with a check, a KV budget and heads by layer."""
    common = {"data": "stdlib:train", "tokens": 8192, "quiet": True}
    for name, options in {
        "aligned": {"method": "aligned", "kv_heads": 2},
        "calibrated": {"method": "calibrated", "kv_heads": 2, **common},
        "refined": {"method": "refined", "kv_heads": 2, "refine_steps": 16, **common},
        "self": {"method": "calibrated", "kv_heads": 4, "tokens": 4096, "quiet": True},
        "budget": {"method": "calibrated", "kv_budget": 0.5, **common},
        "by layer": {"method": "calibrated", "kv_heads": (1, 2, 4, 8, 4, 2), **common},
    }.items():
        out = scratch / f"example-{name}"

        def convert(out: Path = out, options: dict[str, Any] = options) -> dict[str, Any]:
            result = gqa.convert_model(EXAMPLE, output=out, **options)
            record = result.record
            return {
                "weights": weights_digest(out),
                "layer_errors": record.get("layer_errors"),
                "quality": record.get("quality"),
                "kv_heads": record.get("kv_heads", record.get("groups")),
            }

        attempt(figures, f"example {name}", convert)


def train_and_evaluate(figures: Figures, scratch: Path) -> None:
    """Four steps of training from a converted example, and what gqa-eval says of it."""
    converted = scratch / "example-calibrated"
    trained = scratch / "trained"

    def train() -> str:
        gqa.uptrain_model(
            converted,
            output=trained,
            data="stdlib:train",
            steps=4,
            batch_size=2,
            context=128,
            quiet=True,
        )
        return weights_digest(trained)

    def evaluate() -> Any:
        evaluation = gqa.evaluate_models(
            EXAMPLE,
            converted,
            trained,
            data="stdlib:heldout",
            tokens=4096,
            kl=True,
            recall=True,
            quiet=True,
        )
        keys = ("quality", "perplexity", "against_baseline", "recall", "nats_per_token")
        figures_of_models = list[dict[str, Any]]()
        for model in evaluation.record["models"]:
            figures_of_models.append({key: model.get(key) for key in keys})
        return figures_of_models

    attempt(figures, "trained", train)
    attempt(figures, "evaluated", evaluate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["store", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()

    sys.path.insert(0, str(ROOT / "tests"))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        convert_tiny_families(figures, scratch)
        convert_example(figures, scratch)
        train_and_evaluate(figures, scratch)

    figures = json.loads(json.dumps(figures))
    if arguments.action == "store":
        arguments.file.write_text(json.dumps(figures, indent=1))
        return 0

    before = json.loads(arguments.file.read_text())
    different = [name for name in before | figures if before.get(name) != figures.get(name)]
    for name in different:
        print(f"DIFFERS {name}: {before.get(name)} -> {figures.get(name)}")
    print(f"{len(figures) - len(different)} of {len(figures)} figures are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
