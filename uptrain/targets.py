"""What a teacher predicts for the blocks of a run, kept in a directory that a run learns from without the teacher.

`targets.json` says of which run, and each `part-N.arrow` holds `PART` blocks: their tokens, and for each prediction the
most probable tokens that together have the mass asked for, with the rest as one number. A part has its name when it is
whole, so a recording that was stopped goes on, with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gqa.checkpoint.errors import RefusedError, explain
from gqa.corpus.predictions import open_rows, read_row
from gqa.corpus.tokens import Block
from gqa.uptrain.options import TrainOptions

RECORD = "targets.json"
PART = 64  # blocks of a file
# What a recording has decided, and what a run from it would ignore.
_DECIDED = (
    "data", "field", "target_field", "data_config", "split", "data_revision", "separator", "streaming", "heldout",
    "heldout_fraction", "heldout_tokens", "alpha", "pretraining_tokens", "repeats", "mask_documents",
)  # fmt: skip


@dataclass(frozen=True)
class StoredTargets:
    """The targets in `directory`; indexed by the number of a block, the `heldout` ones first.

    A block has `input_ids` (T,) and perhaps `position_ids` and `document_ids`, as text has them, and for its T - 1
    predictions `top_counts` (T - 1,), `top_ids` and `top_logs` (the sum of the counts) and `top_rest` (T - 1,): see
    `gqa.corpus.predictions.TopPredictions`. Numbers in 16 bits are given as the integers of the same bits: who gathers
    shards in bfloat16 rounds what floats it is given.
    """

    directory: Path
    record: dict[str, Any]

    def __len__(self) -> int:
        return int(self.record["blocks"])

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError outside."""
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        found = read_row(_part(self.part(index // PART)), index % PART)
        return {name: _widened(name, values) for name, values in found.items()}

    def part(self, number: int) -> Path:
        """The file of blocks `number` * PART and on."""
        return self.directory / f"part-{number:06d}.arrow"

    @property
    def missing(self) -> list[int]:
        """Parts that are not recorded yet."""
        return [number for number in range(-(-len(self) // PART)) if not self.part(number).is_file()]

    @property
    def heldout(self) -> int:
        """How many of the blocks are held out."""
        return int(self.record["heldout_blocks"])

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.record["block_size"])

    @property
    def fingerprint(self) -> str:
        """Equal where the targets are."""
        return hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:32]

    def settled(self, options: TrainOptions) -> TrainOptions:
        """The options of a run from these targets: with their data, context, and length where none is given.

        Raises RefusedError where they say something else, and where the recording is not complete.
        """
        if missing := self.missing:
            raise RefusedError(
                f"{self.directory} is not complete: {len(missing)} of its parts are missing; give the words with which "
                "it was recorded once more, and the recording goes on"
            )
        default = TrainOptions(options.model, options.output)
        for name in _DECIDED:
            if getattr(options, name) != getattr(default, name):
                raise RefusedError(
                    f"--{name.replace('_', '-')} is of text, and {self.directory} has the blocks that it was recorded "
                    "for; do without, or record it for others"
                )
        for name, flag in (("block_size", "context"), ("temperature", "temperature")):
            if (asked := getattr(options, name)) not in (None, self.record[name]):
                raise RefusedError(
                    f"{self.directory} was recorded with --{flag} {self.record[name]:g}, not {asked:g}; give the same "
                    "or record it again"
                )
        tokens = options.tokens if options.lengths else (len(self) - self.heldout) * self.block_size
        return replace(options, data=tuple(self.record["data"]), block_size=self.block_size, tokens=tokens)


def find_targets(name: str) -> StoredTargets | None:
    """What stands in a directory of targets, complete or not; None where it is none. Raises RefusedError."""
    path = Path(name) / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        assert {"blocks", "heldout_blocks", "block_size", "vocabulary", "tokenizer", "data", "teacher"} <= record.keys()
    except (OSError, ValueError, AttributeError, AssertionError) as error:
        raise RefusedError(f"{path} cannot be read ({explain(error)}); record the teacher again") from None
    return StoredTargets(Path(name), record)


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal where tokenizers give the same ids to the same tokens."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def check_teacher(name: str, vocabulary: int, digest: str, model: Any, tokenizer: Any) -> None:
    """Raise RefusedError where a model does not predict the tokens that a teacher predicts, with a tokenizer of this
    `tokenizer_digest`.
    """
    ours = model.config.get_text_config(decoder=True).vocab_size
    if vocabulary != ours:
        odd = f"the teacher {name} predicts {vocabulary:,} tokens, the model {ours:,}"
    elif digest != tokenizer_digest(tokenizer):
        odd = f"the tokenizer of the teacher {name} has other tokens than the model's"
    else:
        return
    raise RefusedError(f"{odd}; give the checkpoint from which the model was converted")


_part = cache(open_rows)


def _widened(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if values.dtype == np.float16:
        return values.view(np.int16)
    return values.astype(np.int32 if name.startswith("top_") else np.int64)
