"""What makes two trainings the same run, and the command that continues one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.core.devices import native_bfloat16, ranks
from gqa.core.escape import shell_line
from gqa.core.options import flag
from gqa.uptrain.data_sources import data_sources, validation_sources
from gqa.uptrain.options import UptrainOptions

CONTENT_OF_DATA = "content of --data"
_HASHED = {
    "model",
    "revision",
    "teacher",
    "data",
    "validation",
}  # options that name models and text


def describe_run(
    options: UptrainOptions,
    checkpoint: Checkpoint,
    teacher: Checkpoint | None,
    device: str,
    argv: Sequence[str],
) -> dict[str, Any]:
    """What a state records of its run, JSON-ready.

    `identity`: what a run that continues it must share: options by flag, and hashes of models and
    text, which may have other paths.
    """
    values = options.identity_values()
    shared = {flag(name): value for name, value in values.items() if name not in _HASHED}
    return {
        "identity": shared | _content_hashes(options, checkpoint, teacher, device),
        "overwrite": options.overwrite,
        "argv": [*argv],
        "directory": os.getcwd(),
        "ranks": ranks().num_processes,
    }


def _content_hashes(
    options: UptrainOptions, checkpoint: Checkpoint, teacher: Checkpoint | None, device: str
) -> dict[str, str]:
    """`content of MODEL`, `content of --data` and so on: short hashes of what options name."""
    content = {"MODEL": checkpoint_digest(checkpoint)}
    if teacher:
        content["--teacher"] = checkpoint_digest(teacher)
    if options.validation:
        content["--validation"] = " ".join(
            source.identify() for source in validation_sources(options)
        )

    if options.is_generated:  # samples also depend on these
        libraries = versions("torch", "transformers")
        content["--data"] = f"{options.data[0]} {libraries} {native_bfloat16(device)}"
    else:
        identities = []
        for source in data_sources(options):
            is_hub_stream = options.streaming and not source.files
            identity = source.spec if is_hub_stream else source.identify()
            identities.append(identity)
        content["--data"] = " ".join(identities)
    return {
        f"content of {name}": hashlib.sha256(value.encode()).hexdigest()[:12]
        for name, value in content.items()
    }


def command_of(record: dict[str, Any]) -> str:
    """The command that saved a state with this record, for a shell in the current directory."""
    words = ["gqa-uptrain"]
    if record["ranks"] > 1:
        words = ["torchrun", "--nproc_per_node", str(record["ranks"]), "-m", "gqa.uptrain"]

    line = shell_line([*words, *record["argv"]])
    if record["directory"] == os.getcwd():
        return line
    return f"{shell_line(['cd', record['directory']])} && {line}"
