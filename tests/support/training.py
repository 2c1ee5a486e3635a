"""Uptraining for tests: a tiny checkpoint, a small corpus, and runs as processes that can be killed
or work together.

One process imports everything once and forks a child for each run: `shared_runs().run(*words)`.
What is made to go wrong there is in faults.py. The fixtures that need what is here are in
conftest.py.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from support.checkpoints import Result, call, load
from support.embedded import SOURCE, UNIFORM_VOCABULARY, texts
from support.processes import Forks, Running, free_port
from support.repository import SCRIPTS

if TYPE_CHECKING:
    from support.tiny_configs import Tiny

BLOCK = 64  # tokens, the positions of tiny models
Step = Callable[..., object]


def scratch() -> Path:
    """A directory that is removed when this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="gqa-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def tiny_checkpoint(
    directory: Path,
    name: str | Tiny = "llama",
    kv_heads: int = 2,
    dtype: str = "float32",
    **options: Any,
) -> Path:
    """A random model of a family in `tiny_models`, with the embedded tokenizer."""
    import torch

    from support.tiny_models import TINY, build

    tiny = TINY[name] if isinstance(name, str) else name
    # Qwen's tokenizer adds one
    wider = {"vocab_size": UNIFORM_VOCABULARY + 8, "pad_token_id": None, **options}
    if tiny.owners != ("",):
        wider = {owner: {**tiny.options.get(owner, {}), **wider} for owner in tiny.owners}
    model = build(replace(tiny, options={**tiny.options, **wider}), kv_heads).to(
        getattr(torch, dtype)
    )
    model.save_pretrained(directory, max_shard_size="300KB")
    for file in SOURCE.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return directory


def write_corpus(path: Path, count: int = 25, column: str = "text", first: int = 0) -> Path:
    """JSON lines, each the beginning of a module: about 10,000 tokens in all."""
    chosen = texts(first + count, 1200)[first:]
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in chosen))
    return path


def words_for(model: Path, data: Path, out: Path, **options: Any) -> list[str]:
    """A short run of the command: `batch_size=4` is --batch-size 4, True a flag, None nothing."""
    given = {
        "data": data,
        "output": out,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "quiet": True,
    } | options
    words = [str(model)]
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is True:
                words.append(option)
            elif item is not None and item is not False:
                words += [option, str(item)]
    return words


@contextmanager
def expert_options(options: dict[str, Any], kind: Any = None) -> Iterator[dict[str, Any]]:
    """What is left of `options` without those that only Python callers have, which are the defaults
    meanwhile; of gqa-uptrain unless another `kind` is given.
    """
    from gqa.uptrain.options import UptrainOptions

    kind = kind or UptrainOptions
    fields = kind.__dataclass_fields__
    expert = {
        name: value
        for name, value in options.items()
        if name in fields and fields[name].metadata["expert"]
    }
    made = kind.__init__
    defaults = dict(
        zip(list(fields)[-len(made.__defaults__ or ()) :], made.__defaults__ or (), strict=True)
    )
    with mock.patch.object(made, "__defaults__", tuple((defaults | expert).values())):
        yield {name: value for name, value in options.items() if name not in expert}


def options_for(model: Path | str = "model", out: Path | str = "out", **given: Any) -> Any:
    """Of two steps over the corpus of `material`, unless others are given."""
    from gqa.uptrain.options import UptrainOptions

    short = {
        "data": (str(material() / "data.jsonl"),),
        "steps": 2,
        "batch_size": 2,
        "learning_rate": 1e-2,
    }
    return UptrainOptions(str(model), Path(out), **short | given)


def trained(options: Any, argv: Sequence[str] = ()) -> Any:
    """Progress and record of a run of these options."""
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    return uptrain(prepare(options, argv))


def training_model(model: Any, teacher: Any = None) -> Any:
    """The module that is trained."""
    from gqa.uptrain.training_model import TrainingModel

    return TrainingModel(model, teacher)


def difference(one: Path, other: Path) -> float:
    """The largest of any weight of two checkpoints."""
    left, right = load(one), load(other)
    assert left.keys() == right.keys()
    assert all(left[name].shape == right[name].shape for name in left)
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def metrics(path: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells, without what depends on the machine."""
    timed = ("tokens_per_second", "memory_bytes")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


def losses(out: Path) -> list[float]:
    """Of every step of a run."""
    return [record["cross_entropy"] for record in metrics(out / "gqa_uptraining.jsonl")]


def state_files(state: Path) -> dict[str, bytes]:
    """What a state holds; of torch's checkpoints without the file that has the name of the
    directory in it.
    """
    files = [path for path in state.rglob("*") if path.is_file() and path.name != ".metadata"]
    return {str(path.relative_to(state)): path.read_bytes() for path in files}


def command(job: dict[str, Any]) -> None:
    """`gqa-uptrain` or another program, after the calls that `job["before"]` names.

    A word of JSON has the options that are only for Python callers.
    """
    os.environ.update(job["environment"])
    for module, name, arguments in job["before"]:
        getattr(import_module(module), name)(*arguments)
    words = [word for word in job["words"] if not word.startswith("{")]
    expert = {
        name: value
        for word in {*job["words"]} - {*words}
        for name, value in json.loads(word).items()
    }
    with expert_options(expert):
        call(f"gqa-{job['program']}", words)


def named(step: Step) -> tuple[str, str, tuple[Any, ...]]:
    """Module, name and arguments of a function or of a `partial` of one, for another process."""
    call = step if isinstance(step, partial) else partial(step)
    assert not call.keywords, "arguments go to the other process by position"
    return call.func.__module__, call.func.__name__, call.args


class Runs(Forks):
    """The cache of tokens is below `directory` too."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory,
            SCRIPTS / "serve_runs.py",
            directory,
            HF_DATASETS_CACHE=str(directory / "cache"),
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )

    def run(
        self,
        *words: object,
        ranks: int = 1,
        before: Sequence[Step] = (),
        program: str = "uptrain",
        **environment: str,
    ) -> Result:
        """`gqa-uptrain WORDS` or another program on so many processes, waited for.

        Args:
            words: Of the command line.
            ranks: How many processes.
            before: What each process calls first: functions of faults.py, or `partial`s of them.
            program: Without `gqa-`.
            environment: Variables of the processes.

        Returns:
            The output of the first process, and the exit code of all, or minus the signal that
            killed them.
        """
        launcher = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        running = []
        for rank in range(ranks):
            place = launcher | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            variables = {name: str(value) for name, value in place.items()} | environment
            running.append(self.begin(*words, before=before, program=program, **variables))
        codes = [process.wait() for process in running]
        assert len(set(codes)) == 1, (codes, [process.said()[-1500:] for process in running])
        return Result(codes[0], running[0].said("out"), running[0].said())

    def begin(
        self,
        *words: object,
        before: Sequence[Step] = (),
        program: str = "convert",
        **environment: str,
    ) -> Running:
        """`gqa-convert WORDS` or another program on one process, not waited for."""
        return self.start(
            words=[*map(str, words)],
            before=[named(step) for step in before],
            program=program,
            environment=environment,
        )

    def finish(self, *words: object, **options: Any) -> Result:
        """`run`, which must succeed."""
        done = self.run(*words, **options)
        assert done.code == 0, done.err[-3000:]
        return done

    def words(self, out: Path, *, model: str = "model", **options: Any) -> list[str]:
        """Words of a run over what `shared_runs` has made, for `command`."""
        if "teacher" in options:
            options["teacher"] = self.directory / options["teacher"]
        with expert_options(options) as rest:
            expert = {name: value for name, value in options.items() if name not in rest}
        rest = {"data": self.directory / "data.jsonl"} | rest
        words = words_for(self.directory / model, out=out, **rest)
        return words + ([json.dumps(expert)] if expert else [])


@cache
def material() -> Path:
    """A directory of tiny models and `data.jsonl`, for all tests of this process."""
    made = scratch()
    tiny_checkpoint(made / "model")
    tiny_checkpoint(made / "dropout", attention_dropout=0.2)
    tiny_checkpoint(made / "teacher", kv_heads=4)
    tiny_checkpoint(made / "tied", "llama+tied", dtype="bfloat16")
    tiny_checkpoint(made / "nested", "gemma3")
    write_corpus(made / "data.jsonl")
    return made


def converted_beside_base(directory: Path) -> Path:
    """The tiny model `base` in a directory, and beside it what becomes of it with 2 KV heads."""
    from gqa.convert.api import convert_checkpoint

    shutil.copytree(material() / "teacher", directory / "base")
    return convert_checkpoint(directory / "base", 2, directory / "converted", method="mean").out


def runs_shelf() -> Path:
    """Where `Runs` note the states of their runs."""
    return material() / "cache" / "gqa-runs"


PAIRS = [
    {"said": f"{n} in words is " + "one " * (n % 7 + 1), "meant": f"the number {n}"}
    for n in range(80)
]


@cache
def pair_material() -> Path:
    """T5 with sentinels and BART with a mask token, each converted to 2 KV heads; Marian, of which
    plain text makes no pairs; pairs.jsonl and text.jsonl.
    """
    from transformers import AutoTokenizer

    from gqa.convert.api import convert_checkpoint

    place = scratch()
    for name, added in (
        ("t5", {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(6)]}),
        ("bart", {"mask_token": "<mask>"}),
        ("marian", {}),
    ):
        base = tiny_checkpoint(
            place / f"{name}-base", f"gqa_{name}", 4, pad_token_id=0, dropout=0.0, dropout_rate=0.0
        )
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_special_tokens(added)
        tokenizer.save_pretrained(base)
        convert_checkpoint(base, 2, place / name, method="mean")
    rows = [*PAIRS[:3], PAIRS[3] | {"meant": None}, *PAIRS[4:]]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_corpus(place / "text.jsonl")
    return place


@cache
def shared_runs() -> Runs:
    """One for all tests of this process."""
    made = Runs(material())
    atexit.register(made.close)
    return made


@contextmanager
def fresh_accelerator() -> Iterator[None]:
    """accelerate remembers the first precision of a process, and what launched it."""
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
