"""A run from its start to a trained checkpoint. `uptrain` is what the command calls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from gqa.checkpoint.provenance import without_place
from gqa.checkpoint.write import finite
from gqa.uptrain.card import provenance
from gqa.uptrain.export import ADAPTER, METRICS, export
from gqa.uptrain.loop import AfterStep, Progress, Weights, train
from gqa.uptrain.lora import merged, save_adapter
from gqa.uptrain.setup import Setup


def uptrain(
    setup: Setup, *, quiet: bool = True, words: Sequence[str] = (), after_step: AfterStep | None = None
) -> tuple[Progress, dict[str, Any]]:
    """Train and write the checkpoint to `options.output`; returns how it went and the record that is written there.

    `words` are those of the command. Raises what `train` and `export` raise.
    """
    with held(setup):
        progress, weights = train(setup, quiet=quiet, after_step=after_step)
        record = finite(provenance(setup.checkpoint, words, facts(setup, progress)))
        if setup.accelerator.is_main_process:
            _write(setup, weights, record)
        setup.accelerator.wait_for_everyone()
    return progress, record


@contextmanager
def held(setup: Setup) -> Iterator[None]:
    """The states' directory is there, and no other run uses it. Raises RefusedError where one does."""
    with setup.states.held() if setup.accelerator.is_main_process else nullcontext():
        yield


def _write(setup: Setup, weights: Weights, record: dict[str, Any]) -> None:
    options, extra = setup.options, {METRICS: setup.metrics}
    if options.keep_adapter:
        names = {name for name, p in setup.model.named_parameters() if p.requires_grad}
        directory = setup.states.directory / ADAPTER
        save_adapter(weights, names, directory)
        extra |= {f"{ADAPTER}/{path.name}": path for path in directory.iterdir()}
    export(
        setup.model, merged(weights), setup.checkpoint, options.output, record, overwrite=options.overwrite,
        extra=extra, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if not options.keep_state:
        shutil.rmtree(setup.states.directory)


def facts(setup: Setup, progress: Progress) -> dict[str, Any]:
    """What was trained on what, JSON-ready."""
    options, dataloader = setup.options, setup.dataloader
    told = {
        name: [without_place(v) for v in value] if isinstance(value, list)
        else without_place(value) if isinstance(value, str) else value
        for name, value in options.binding().items()
    }  # fmt: skip
    return {
        "data": told["data"],
        "alpha": options.alpha,
        "tokens": progress.tokens,
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "teacher": told["teacher"],
        "losses": {
            "training": progress.loss,
            "heldout_before": progress.heldout_before,
            "heldout_after": progress.heldout_after,
        },
        "data_summary": dataloader.summary,
        "data_fingerprint": dataloader.fingerprint,
        "ranks": setup.accelerator.num_processes,
        "options": told | {"block_size": setup.block_size},
    }
