"""Import once what runs of the commands need, then fork a child for each: `support.training.Runs`.

    python serve_runs.py DIRECTORY

The first conversion and what it imports are done here too, so that no child does them again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import datasets.io.generator  # noqa: F401
import peft  # noqa: F401
from support import faults, processes, training  # noqa: F401
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

import gqa.uptrain.advice
import gqa.uptrain.cli
import gqa.uptrain.run
import gqa.uptrain.summary  # noqa: F401
from gqa.convert.api import convert_checkpoint

if __name__ == "__main__":
    # What a test writes need not survive a power cut
    os.fsync = lambda handle: None  # type: ignore[assignment]

    made = Path(sys.argv[1])
    convert_checkpoint(made / "model", 1, made / "warm", method="mean")
    processes.serve(training.command)
