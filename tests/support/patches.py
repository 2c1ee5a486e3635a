"""What tests replace inside this process, and why.

Everything else is reached through commands and public functions. What is here has no public way:
the world outside (a hub, a cache, a network, the speed of a machine), sizes that make a test of a
large case small, and what must not happen. A test that replaces something else says why beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest


def use_data_cache(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Keep tokenized and generated text in a directory, so that no test finds what another kept.

    `datasets` reads its environment variable only once, when it is imported.
    """
    patch.setattr("datasets.config.HF_DATASETS_CACHE", directory)


def use_data_hub(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Load data sets from a stand-in for the hub: `datasets` reads its variable only once, too."""
    patch.setattr("datasets.config.HF_ENDPOINT", endpoint)


def forbid(patch: pytest.MonkeyPatch, name: str, why: str) -> None:
    """Whatever calls a function fails the test: what would take long, or harm, is not begun.

    Args:
        patch: That of the test, which ends it.
        name: Where the function is looked up, with dots.
        why: What would have happened.
    """
    patch.setattr(name, lambda *given, **options: pytest.fail(why))


def forbid_training(patch: pytest.MonkeyPatch) -> None:
    """A run may do anything but take a step."""
    forbid(patch, "gqa.uptrain.run.train", "it trains")


def forbid_network(patch: pytest.MonkeyPatch) -> None:
    """No address may be asked."""
    forbid(patch, "socket.socket.connect", "the network was asked")


def raising(error: Exception) -> Callable[..., NoReturn]:
    """A function that fails, to stand for one that meets a full disk or too little memory."""

    def fail(*given: Any, **options: Any) -> NoReturn:
        raise error

    return fail


def use_speed(patch: pytest.MonkeyPatch, flops: float) -> None:
    """A machine of so many floating-point operations a second, whatever this one does: estimates of
    time are then the same everywhere.
    """
    for module in ("convert.estimate", "uptrain.training_time"):
        patch.setattr(f"gqa.{module}.measure_flops", lambda device, width, dtype="float32": flops)


def use_bfloat16(patch: pytest.MonkeyPatch, native: bool) -> None:
    """A CPU that has instructions for bfloat16 or not, and no launcher that chose a precision."""
    patch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": native})
    patch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def sample_at_once(patch: pytest.MonkeyPatch, count: int) -> None:
    """A model writes at most so many texts at once, so that a few texts are several batches."""
    patch.setattr("gqa.convert.generate.self_samples.MAX_BATCH", count)


def log_every_line(patch: pytest.MonkeyPatch) -> None:
    """A log gets each line of progress, not one in a while: a test is over before the second."""
    patch.setattr("gqa.core.console._LOG_SECONDS", 0.0)


def wait_one_second_for_templates(patch: pytest.MonkeyPatch) -> None:
    """A chat template that never ends is stopped after a second, as others are later."""
    patch.setattr("gqa.checkpoint.chat_template.SECONDS", 1)


def call_good_up_to(patch: pytest.MonkeyPatch, ratio: float) -> None:
    """Perplexity up to so many times that of the base model is good: random models lose nothing by
    being converted, and so get every verdict by its bound.
    """
    patch.setattr("gqa.convert.verdict.GOOD_RATIO", ratio)


def train_on_few_tokens(patch: pytest.MonkeyPatch) -> None:
    """Where no number of tokens is given, train on 512 and not on millions."""
    patch.setattr("gqa.uptrain.defaults.DEFAULT_TOKENS", 512)


def use_validation_losses(patch: pytest.MonkeyPatch, losses: Iterator[dict[str, float]]) -> None:
    """The measures on held-out text, at the start and after each step, whatever the model is.

    A real training does not rise and fall on demand.
    """
    patch.setattr("gqa.uptrain.evaluation.validation_losses", lambda *given: next(losses))
