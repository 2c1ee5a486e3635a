"""Recording what a teacher predicts for the blocks of a run, to train from it later without the teacher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqa.checkpoint.errors import OutputError, RefusedError, explain
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.processes import main_first, wait_for_everyone
from gqa.checkpoint.provenance import without_place
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.checkpoint.write import write_text
from gqa.convert.align.watcher import SILENT, Watcher
from gqa.convert.maps_file import digest_of
from gqa.corpus.likelihood import ChunkedHead, chunks
from gqa.corpus.predictions import Row, TopPredictions, writing
from gqa.corpus.tokens import Block
from gqa.uptrain.dataloader import stack
from gqa.uptrain.options import differences
from gqa.uptrain.setup import Setup
from gqa.uptrain.targets import PART, RECORD, StoredTargets, find_targets, tokenizer_digest
from gqa.uptrain.training_model import gathered, split_batch


@torch.no_grad()
def _predicted(setup: Setup, head: ChunkedHead, mass: float, blocks: Sequence[Block]) -> Iterator[Row]:
    """For each block its tokens and what the teacher, whose `head` it is, predicts."""
    device, temperature = setup.accelerator.device, setup.options.temperature
    batch = {name: tensor.to(device) for name, tensor in stack([*blocks]).items()}
    with setup.accelerator.autocast(), gathered(head.model):
        hidden = head.hidden(**split_batch(batch)[0])
        for number, block in enumerate(blocks):
            pieces = chunks(len(hidden[number]), head.vocabulary, device)
            tops = [TopPredictions.of(head.logits(hidden[number][p]), mass, temperature) for p in pieces]
            found = [top.stored(head.vocabulary) for top in tops]
            plain = {name: values.astype(np.int32) for name, values in block.items()}
            yield plain | {name: np.concatenate([row[name] for row in found]) for name in found[0]}


_OPTIONS = ("seed", "repeats", "mask_documents", "heldout_fraction", "block_size", "temperature", "precision")


def record_teacher(setup: Setup, directory: Path, mass: float, watcher: Watcher = SILENT) -> dict[str, Any]:
    """Record what the teacher of a setup predicts for all of its blocks, each process its share of them; returns what
    is in the directory, JSON-ready. What is there of the same recording stays.

    Raises RefusedError where the directory holds something else or memory ends, and OutputError where it cannot be
    written.
    """
    assert setup.teacher is not None
    accelerator, micro = setup.accelerator, setup.micro
    targets = StoredTargets(directory, _identity(setup, mass))
    try:
        with main_first():
            _claim(targets)
        missing = targets.missing
        wait_for_everyone()  # all have seen the same before one of them writes
        rank, ranks = accelerator.process_index, accelerator.num_processes
        watcher.stage("recording", len(missing[rank::ranks]) * PART * setup.options.block)
        head = ChunkedHead(setup.teacher)
        for start in range(0, len(missing), ranks):
            part, own = missing[min(start + rank, len(missing) - 1)], start + rank < len(missing)
            first = part * PART
            end = min(first + PART, len(targets))
            passes = [range(at, min(at + micro, end)) for at in range(first, first + PART, micro)]
            with writing(targets.part(part)) if own else nullcontext() as write:
                for numbers in passes:  # as many on every process: shards of a teacher wait for each other
                    if accelerator.is_fsdp2 or (own and numbers):
                        blocks = [_block(setup, number) for number in numbers or passes[0][:1]]
                        with setup.memory_explained("recording", ""):
                            found = [*_predicted(setup, head, mass, blocks)]
                        watcher.update(len(blocks) * setup.options.block)
                        if write and numbers:
                            for row in found:
                                write(row)
        wait_for_everyone()
    except OSError as error:
        raise OutputError(
            f"{directory} could not be written ({explain(error)}); the same words go on where it ended"
        ) from None
    return _told(targets)


def _block(setup: Setup, number: int) -> Block:
    held = len(setup.heldout)
    return setup.heldout[number] if number < held else setup.dataloader.block(setup.dataloader.first + number - held)


def _identity(setup: Setup, mass: float) -> dict[str, Any]:
    """What `targets.json` says."""
    options, dataloader = setup.options, setup.dataloader
    teacher = open_model(options.teacher)
    return {
        "teacher": teacher.hub_id or teacher.name,
        "weights": digest_of(teacher, teacher.tensors),
        "vocabulary": setup.model.config.get_text_config(decoder=True).vocab_size,
        "tokenizer": tokenizer_digest(load_tokenizer(setup.checkpoint, options.trust_remote_code)),
        "data": [*map(without_place, options.data)],
        "heldout": options.heldout and without_place(options.heldout),
        "content": dataloader.fingerprint,
        **{name: getattr(options, name) for name in _OPTIONS},
        "blocks": len(setup.heldout) + dataloader.steps * options.blocks_per_step,
        "heldout_blocks": len(setup.heldout),
        "mass": mass,
    }


def _claim(targets: StoredTargets) -> None:
    """The directory says what is recorded in it. Raises RefusedError where that is something else."""
    directory = targets.directory
    if found := find_targets(str(directory)):
        if changed := differences(targets.record, found.record):
            raise RefusedError(
                f"{directory} was recorded otherwise: {'; '.join(changed)}; give another directory, or delete it"
            )
    else:
        directory.mkdir(parents=True, exist_ok=True)
        work = directory / f".{RECORD}"
        write_text(work, json.dumps(targets.record, indent=2) + "\n")
        work.replace(directory / RECORD)


def _told(targets: StoredTargets) -> dict[str, Any]:
    """What was recorded, how much of it for each prediction, and how large it is."""
    predictions = kept = 0
    lost = 0.0
    for number in range(len(targets)):
        block = targets[number]
        rest = np.exp(block["top_rest"].view(np.float16).astype(np.float64))
        predictions, kept, lost = predictions + len(rest), kept + len(block["top_ids"]), lost + float(rest.sum())
    size = sum(path.stat().st_size for path in targets.directory.glob("part-*.arrow"))
    return targets.record | {
        "bytes": size, "tokens_a_prediction": kept / predictions, "kept_mass": 1 - lost / predictions
    }  # fmt: skip
