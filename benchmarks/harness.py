"""What the benchmarks share: random models, the commands as functions, measurements in a file."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "examples" / "stdlib-mha"


class Shape(NamedTuple):
    """Of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    positions: int = 2048


SHAPES = {
    # SmolLM2-135M, with as many KV heads as query heads
    "135m": Shape(576, 1536, 30, 9, 9, 49152, True),
    "1.3b": Shape(2048, 5504, 24, 16, 16, 32000),
    "llama-7b": Shape(4096, 11008, 32, 32, 32, 32000),
}


def random_llama(shape: Shape, dtype: str = "float32", device: str = "cpu", **options: Any) -> Any:
    """A random model, created on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        dtype=dtype,
    )
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype), **options)


def write_random(directory: Path, shape: Shape, dtype: str = "float32", device: str = "cpu") -> str:
    """Write a random Llama with the embedded tokenizer, whose ids it can all predict.

    Returns the directory.
    """
    random_llama(shape, dtype, device).save_pretrained(directory, max_shard_size="1GB")
    for file in EMBEDDED.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return str(directory)


def run_command(module: str, *words: str) -> None:
    """Run the command gqa-MODULE in this process. Raises RuntimeError if it fails."""
    arguments = sys.argv
    sys.argv = [f"gqa-{module}", *words]
    try:
        import_module(f"gqa.{module}.cli").main()
    except SystemExit as leaving:
        if leaving.code:
            raise RuntimeError(f"gqa-{module} {' '.join(words)}: exit {leaving.code}") from leaving
    finally:
        sys.argv = arguments


class Measurements:
    """Measurements by name, appended to a file of JSON lines one by one: a program that was stopped
    continues with those that are missing. Those that failed have an `error` and are measured again.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.rows: dict[str, dict[str, Any]] = {
            row.pop("name"): row for row in map(json.loads, lines)
        }

    def missing(self, *names: str) -> bool:
        """Whether one of them was not measured, or failed."""
        return any("error" in self.rows.get(name, {"error": ""}) for name in names)

    def measure(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Add what `function` returns, or why it failed, and the seconds it `took`, unless `name`
        was measured.
        """
        if not self.missing(name):
            return
        started = time.monotonic()
        try:
            row = function(*arguments)
        except Exception as error:  # one measurement that fails must not cost the others
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.rows[name] = row | {"took": round(time.monotonic() - started, 2)}
        with self.file.open("a") as stream:
            stream.write(json.dumps({"name": name, **self.rows[name]}) + "\n")
        print(f"{self.file.stem:8} {name}: {json.dumps(self.rows[name])[:160]}", flush=True)
