"""What holds for every test."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gqa.core.run_directory import read_mark

if TYPE_CHECKING:
    from support.documents import Counted
    from support.hub_server import Hub, Machine
    from support.training import Runs


# Threads that transformers reads tiny tensors in take longer
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

# Trainings compute in float32 on every machine, as if a launcher had asked for it. Tests of the
# default precision remove this.
os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "no")

# What is tokenized, generated and trained meanwhile leaves nothing in the cache of the person who
# runs the tests, and no test can remove a run of theirs. The first process makes the directory, and
# those that it starts inherit it.
_SHARED = "GQA_TESTS_SHARED"
if _SHARED not in os.environ:
    os.environ[_SHARED] = tempfile.mkdtemp(prefix="gqa-tests-shared-")
    atexit.register(shutil.rmtree, os.environ[_SHARED], ignore_errors=True)
os.environ["HF_DATASETS_CACHE"] = os.path.join(os.environ[_SHARED], "datasets")


def pytest_collection() -> None:
    """What is imported stays: no garbage is looked for meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Imported modules stay: no collection of garbage need look through them, a quarter of a second
    each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A stand-in for the Hugging Face hub, in this process, which no request leaves."""
    from support.hub_server import Hub, http

    hub = Hub()
    monkeypatch.setattr(
        http.HTTPTransport, "handle_request", lambda transport, request: hub.answer(request)
    )
    return hub


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A fresh machine that knows the hub."""
    from support.hub_server import Machine

    return Machine(tmp_path)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts the documents that are tokenized."""
    from support.documents import Counted

    return Counted(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell that starts the tests in the background has interrupts ignored, in all of its
    children too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _disks_are_not_waited_for() -> Iterator[None]:
    """What a test writes need not survive a power cut; nor what `Runs` start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _configs_are_not_printed() -> Iterator[None]:
    """transformers writes out each config that it reads, for a log that nobody sees: a fifth of
    many tests' time.
    """
    from transformers import PreTrainedConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(autouse=True)
def _random_numbers_are_those_of_a_new_process() -> None:
    """What a test draws does not depend on the tests that its process has run before."""
    random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _runs_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A training of the next test that happens to have the options of one that was stopped does not
    continue it.
    """
    yield
    if "torch" not in sys.modules:
        return
    from gqa.core.shelves import shelves

    base = tmp_path_factory.getbasetemp()
    directories = [base]
    caches = [*shelves(), base / "cache" / "gqa-runs"]  # the last: of `alone`
    if "support.training" in sys.modules:
        training = sys.modules["support.training"]
        directories.append(training.material())
        caches.append(training.runs_shelf())

    for shelf in caches:
        for entry in shelf.glob("*"):
            where = Path((read_mark(entry) or {}).get("directory", ""))
            # Not those of another worker, nor of the person who runs the tests
            if any(where.is_relative_to(directory) for directory in directories):
                shutil.rmtree(entry, ignore_errors=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """That of the example; what it makes of texts is kept in a directory of the test module."""
    from support.patches import use_data_cache
    from transformers import AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        use_data_cache(patch, tmp_path_factory.mktemp("cache"))
        yield AutoTokenizer.from_pretrained(Path(__file__).parent.parent / "examples/stdlib-mha")


@pytest.fixture
def runs() -> Runs:
    """Runs of gqa-uptrain as processes, and what they train on."""
    from support.training import shared_runs

    return shared_runs()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with biases and 4 KV heads, which no test may change."""
    from support.tiny_models import TINY, build

    directory = tmp_path_factory.mktemp("source") / "model"
    build(TINY["llama+bias"], 4).save_pretrained(directory, max_shard_size=20_000)
    return directory


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with the embedded tokenizer, which no test may change."""
    from dataclasses import replace

    from support.evaluations import with_tokenizer
    from support.tiny_models import TINY, build

    tiny = replace(TINY["llama"], options={"vocab_size": 4096})
    return with_tokenizer(build(tiny, 4), tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def place() -> Path:
    """Tiny models (`model`, `teacher` ...) and `data.jsonl` to train on."""
    from support.training import material

    return material()


@pytest.fixture(scope="session")
def pair_models() -> Path:
    """Encoder-decoders with 2 KV heads (`t5`, `bart`, `marian`), their base models, and pairs of
    text.
    """
    from support.training import pair_material

    return pair_material()


@pytest.fixture
def alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A cache of its own, and no memory of the accelerator of the test before."""
    from support.patches import use_data_cache
    from support.training import fresh_accelerator

    use_data_cache(monkeypatch, tmp_path_factory.getbasetemp() / "cache")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with fresh_accelerator():
        yield
