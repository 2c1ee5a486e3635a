"""A run that is killed and continued is the run that was not: bit for bit.

What does not fit together is refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from support.faults import (
    kill_at,
    kill_rank_at,
    kill_save_after,
    load_no_tokenizer,
    no_space_for_the_random_states_of,
    no_space_for_the_result,
    no_space_for_the_state_of,
    note_seeks,
    set_losses,
    shard,
    states_cannot_be_removed,
    stop_while_sampling,
)
from support.training import Runs, Step, difference, losses, metrics, shared_runs, state_files
from torch.distributed.checkpoint.api import CheckpointException

from gqa.core.errors import RefusedError
from gqa.uptrain.state import States, states_directory
from gqa.uptrain.state_files import _readable

STEPS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "streaming": {
        "streaming": True,
        "validation_tokens": 640,
        "optimizer": "adafactor",
        "schedule": "cosine",
    },
    "lora": {"train": "lora", "lora_rank": 4, "teacher": "teacher", "micro_batch": 2},
    "ranks": {"model": "dropout", "ranks": 2, "precision": "bfloat16"},
    "gone-back": {"learning_rate": 1.0, "warmup": 0, "eval_every": 2},
}


def saving(runs: Runs, out: Path, **options: Any) -> list[str]:
    """Words of a run that saves every two steps and keeps what it saved."""
    return runs.words(out, **{"steps": STEPS, "save_every": 2, "keep_state": True} | options)


def state(out: Path, step: int) -> Path:
    return out.with_name(f"{out.name}-state") / f"step-{step:08d}"


def states(out: Path) -> States:
    return States(states_directory(out), out)


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_and_continued_is_bit_identical(runs: Runs, tmp_path: Path, name: str) -> None:
    options = dict(VARIANTS[name])
    ranks = options.pop("ranks", 1)
    one, other = tmp_path / "straight", tmp_path / "killed"
    runs.finish(*saving(runs, one, **options), ranks=ranks)
    killed = saving(runs, other, **options)
    assert runs.run(*killed, ranks=ranks, before=[partial(kill_at, 3)]).code == -signal.SIGKILL
    assert not other.exists()
    assert [record["step"] for record in metrics(state(other, 2).parent / "metrics.jsonl")] == [
        1,
        2,
        3,
    ]
    notes = str(tmp_path / "notes")
    runs.finish(*killed, ranks=ranks, before=[partial(note_seeks, notes)])
    assert Path(f"{notes}-0").exists() == (name == "streaming"), (
        "a stream is read from where it was"
    )
    files, again = (
        {
            name: data.replace(str(out).encode(), b"")
            for name, data in state_files(state(out, STEPS)).items()
        }
        for out in (one, other)
    )
    for rank in range(ranks):
        assert {f"random_states_{rank}.pkl", f"shards/__{rank}_0.distcp"} <= set(files)
    assert again == files
    records = metrics(one / "gqa_uptraining.jsonl")
    assert metrics(other / "gqa_uptraining.jsonl") == records
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    weights = sorted(path.name for path in one.glob("*.safetensors"))
    assert weights
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in weights)


BEST: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"train": "lora", "lora_rank": 4},
    "tied": {"model": "tied"},
    "sharded": {"ranks": 2, "before": [shard]},
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_state_is_what_is_written(runs: Runs, tmp_path: Path, name: str) -> None:
    """The first step's, though others follow, and though a run that was killed had thought of a
    later one better; of shards also where one process continues.
    """
    options = {"schedule": "constant", **BEST[name]}
    ranks = options.pop("ranks", 1)
    before = options.pop("before", [])
    best_first = partial(set_losses, 9, 8, 9, 9, 9)
    best_later = partial(set_losses, 9, 8, 9, 7, 9)
    one, other = tmp_path / "straight", tmp_path / "killed"
    runs.finish(*saving(runs, one, **options), ranks=ranks, before=[*before, best_first])

    words = saving(runs, other, **options)
    killed = runs.run(*words, ranks=ranks, before=[*before, best_later, partial(kill_at, 3)])
    assert killed.code == -signal.SIGKILL
    runs.finish(*words, before=[best_first])
    assert difference(one, other) == 0
    recorded = json.loads((one / "gqa_uptraining.json").read_text())["losses"]
    assert recorded["best_step"] == 1
    assert recorded["validation_after"] == 8
    if name == "plain":
        for steps, losses, equal in ((1, [9, 8], True), (2, [9, 8, 7], False)):
            words = saving(runs, tmp_path / str(steps), **options | {"steps": steps})
            runs.finish(*words, before=[partial(set_losses, *losses)])
            assert (difference(tmp_path / str(steps), one) == 0) == equal


@pytest.mark.parametrize(
    ("before", "after", "given"),
    [
        (3, 1, {"batch_size": 6, "micro_batch": 2}),
        (2, 1, {"batch_size": None, "steps": None, "tokens": 512}),
    ],
)
def test_more_or_fewer_ranks_may_continue(
    runs: Runs, tmp_path: Path, before: int, after: int, given: dict[str, Any]
) -> None:
    """Blocks and losses do not depend on ranks, so neither does a state; nor on the passes that a
    process makes.
    """
    out = tmp_path / "out"
    words = saving(runs, out, **given)
    runs.run(*words, ranks=before, before=[partial(kill_at, 3)])
    runs.finish(*words, ranks=after)
    runs.finish(*saving(runs, tmp_path / "straight", **given), ranks=before)
    assert losses(out) == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


@pytest.mark.parametrize(
    ("number", "code", "what"), [(15, 143, "terminated"), (2, 130, "interrupted")]
)
def test_a_training_that_is_stopped_while_it_generates_text_says_what_is_kept(
    small: Path, tmp_path: Path, runs: Runs, number: int, code: int, what: str
) -> None:
    words = (
        small,
        "--teacher",
        shutil.copytree(small, tmp_path / "teacher"),
        "--data",
        "self:2K",
        "--seed",
        number,
        "--steps",
        1,
        "--context",
        16,
    )
    stopped = runs.run(
        *words, "-o", tmp_path / "out", before=[partial(stop_while_sampling, number)]
    )
    says = (
        f"gqa-uptrain: {what}; saved states and finished batches of generated text are kept; the "
        "same command continues"
    )
    stopped.expect(code)
    assert stopped.err.strip().splitlines()[-1] == says


@pytest.mark.parametrize(
    ("number", "code", "ranks"), [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 1)]
)
def test_a_signal_saves_and_leaves(
    runs: Runs, tmp_path: Path, number: int, code: int, ranks: int
) -> None:
    """Also where only one rank was signalled, and where nothing else asked for saves."""
    out = tmp_path / "out"
    words = runs.words(out, steps=STEPS)
    before = partial(kill_rank_at, ranks - 1, 3, int(number))
    stopped = runs.run(*words, ranks=ranks, before=[before])
    assert stopped.code == code
    message = f"gqa-uptrain: stopped; step 3 is saved in {out}-state; the same command continues"
    assert stopped.err.splitlines()[-1] == message
    assert "Traceback" not in stopped.err
    assert not out.exists()
    assert states(out).step_directories() == [state(out, 3)]
    notes = Path(f"{out}-state", "notes")
    if alone := ranks == 1:
        notes.touch()  # a file of somebody else
    runs.finish(*words, ranks=ranks)
    assert [record["step"] for record in metrics(out / "gqa_uptraining.jsonl")] == [1, 2, 3, 4]
    assert {*out.parent.glob("out-state"), *notes.parent.glob("*")} == (
        {notes.parent, notes} if alone else set()
    )


def test_a_save_that_was_killed_is_never_picked_up(runs: Runs, tmp_path: Path) -> None:
    """Killed before a change on disk: the newest state is the one before, whole, or the new one,
    whole; and when the run is continued nothing of the killed one is left.
    """
    saved, steps, whole = states(tmp_path / "out"), [], dict[str, dict[str, bytes]]()
    words = saving(runs, tmp_path / "out", steps=3, save_every=1)
    for change in range(1, 40, 2):
        done = runs.run(*words, before=[partial(kill_save_after, 2, change)])
        newest = saved.latest()
        assert done.code == -signal.SIGKILL, done.err
        assert newest.path == state(tmp_path / "out", newest.record["step"])
        steps.append(newest.record["step"])
        # Each is whole at once, and the same in every run
        for path in saved.directory.glob("step-????????"):
            assert whole.setdefault(path.name, state_files(path)) == state_files(path)
        with saved.lock():
            assert saved.latest() == newest
            assert not list(saved.directory.glob("*.partial"))
        shutil.rmtree(saved.directory)
        if steps.count(2) > 1:
            break
    assert steps == sorted(steps)
    assert steps.count(1) > 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of a run that was killed after two of its states."""
    out = tmp_path_factory.mktemp("saved") / "out"
    runs = shared_runs()
    assert (
        runs.run(*saving(runs, out, steps=6), before=[partial(kill_at, 5)]).code == -signal.SIGKILL
    )
    return out


@pytest.fixture
def out(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(f"{saved}-state", tmp_path / "out-state")
    return tmp_path / "out"


def refused(runs: Runs, *words: object, code: int = 2, before: Sequence[Step] = ()) -> str:
    """What a run that is refused says, in one line."""
    done = runs.run(*words, before=before)
    done.expect(code, err_lines=1)
    return done.err


def test_a_damaged_state_is_refused(runs: Runs, out: Path) -> None:
    words = saving(runs, out, steps=6)
    for file in ("shards/__0_0.distcp", "random_states_0.pkl", "shards/.metadata"):
        path = state(out, 4) / file
        data = path.read_bytes()
        for damage in (None, b"half"):
            path.unlink() if damage is None else path.write_bytes(damage)
            assert f"the state {state(out, 4)} cannot be read (" in refused(runs, *words)
        path.write_bytes(data)
    path = state(out, 4) / "trainer_state.json"
    record = json.loads(path.read_text())
    path.unlink()
    for damage in (
        "",
        "[]",
        *(json.dumps({k: v for k, v in record.items() if k != name}) for name in record),
    ):
        with pytest.raises(RefusedError, match="cannot be read"):
            states(out).latest()
        path.write_text(damage)
    advice = f"delete it to continue from the one before, or delete {out}-state to start over"
    assert f"({path.name} lacks {[*record][-1]}); {advice}" in refused(runs, *words)
    shutil.rmtree(state(out, 4))
    done = runs.finish(*saving(runs, out, steps=6, quiet=False))
    assert f"\ncontinues   after step 2, saved in {out}-state\n" in done.out


def test_another_run_is_refused_with_every_difference(runs: Runs, out: Path, saved: Path) -> None:
    """Before anything heavy is done, and with the command that continues."""
    command = shlex.join(["gqa-uptrain", *saving(runs, saved, steps=6)])
    end = f"); continue it with {command}, or start over with --overwrite\n"
    different = saving(runs, out, learning_rate=2e-3, clip=0.5, alpha=0.5, steps=None)
    says = (
        "(--alpha: None -> 0.5; --clip: 1.0 -> 0.5; --learning-rate: 0.001 -> 0.002; --steps: 6 -> "
        "None"
    )
    assert (
        refused(runs, *different, before=[load_no_tokenizer])
        == f"gqa-uptrain: {out}-state holds another run {says}{end}"
    )
    taught = refused(
        runs,
        *saving(runs, out, steps=6, data="self", teacher="teacher"),
        before=[load_no_tokenizer],
    )
    says = r"\(--repeats: .*; content of --data: \w+ -> \w+; content of --teacher: None -> \w+\)"
    assert re.search(says, taught)
    elsewhere = refused(runs, *different, before=[load_no_tokenizer, partial(os.chdir, "/")])
    assert f"continue it with cd {Path.cwd()} && {command}" in elsewhere
    data, config = runs.directory / "data.jsonl", runs.directory / "model" / "config.json"
    texts = {data: data.read_text(), config: config.read_text()}
    try:
        data.write_text(texts[data].partition("\n")[2])
        config.write_text(texts[config].replace("10000.0", "20000.0"))
        message = refused(runs, *saving(runs, out, steps=6), before=[load_no_tokenizer])
    finally:
        for path, text in texts.items():
            path.write_text(text)
    assert re.search(
        r"\(content of --data: \w+ -> \w+; content of MODEL: \w+ -> \w+\); continue", message
    )
    assert states(out).step_directories() == [state(out, 2), state(out, 4)]


def test_ranks_that_cannot_share_the_batch(runs: Runs, tmp_path: Path) -> None:
    """The batch is that of the stopped run, also where it is not named."""
    words = saving(runs, tmp_path / "out", batch_size=None, micro_batch=1)
    assert runs.run(*words, ranks=2, before=[partial(kill_at, 3)]).code == -signal.SIGKILL
    done = runs.run(*words, ranks=3, before=[load_no_tokenizer])
    command = shlex.join(["torchrun", "--nproc_per_node", "2", "-m", "gqa.uptrain", *words])
    assert done.code == 2
    assert (
        f"(processes: 2 -> 3, which cannot share a batch of 8); continue it with {command}, or"
        in done.err
    )


def test_ranks_that_cannot_share_the_batch_are_refused_for_another_output_too(
    runs: Runs, tmp_path: Path
) -> None:
    given = {"batch_size": None, "micro_batch": 1, "seed": 5}
    stopped = saving(runs, tmp_path / "out", **given)
    assert runs.run(*stopped, ranks=2, before=[partial(kill_at, 3)]).code == -signal.SIGKILL
    elsewhere = saving(runs, tmp_path / "other", **given)
    done = runs.run(*elsewhere, ranks=3, before=[load_no_tokenizer])
    done.expect(2, says="(processes: 2 -> 3, which cannot share a batch of 8); continue it with")


def test_a_rank_that_cannot_write_its_random_states_has_all_ranks_go_on(
    runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    full = partial(no_space_for_the_random_states_of, 1, 2)
    done = runs.finish(*saving(runs, out), ranks=2, before=[full])
    assert "warning: the state of step 2 could not be saved in" in done.err
    assert states(out).step_directories() == [state(out, STEPS)]


def test_overwriting(runs: Runs, out: Path) -> None:
    """With it a run begins anew, whatever was saved; one that was started with it is continued by
    the same command.
    """
    (state(out, 4) / "trainer_state.json").write_text("half")
    words = saving(runs, out, steps=6, overwrite=True, quiet=False)
    stopped = runs.run(*words, before=[partial(kill_at, 3, int(signal.SIGTERM))])
    assert "continues" not in stopped.out
    assert states(out).step_directories() == [state(out, 2), state(out, 3)]
    assert "\ncontinues   after step 3" in runs.finish(*words).out


def test_what_may_change(runs: Runs, out: Path) -> None:
    """Paths, and what changes no result.

    Foreign names beside states stay, and the last two states.
    """
    for name in ("step-backup", "step-0000009", "step-00000008.partial", "notes"):
        (out.with_name("out-state") / name).mkdir()
    assert states(out).step_directories() == [state(out, 2), state(out, 4)]
    changes = {
        "micro_batch": 2,
        "save_every": 1,
        "gradient_checkpointing": True,
        "attn_implementation": "eager",
    }
    copy = shutil.copyfile(runs.directory / "data.jsonl", out.with_name("copy.jsonl"))
    runs.finish(*saving(runs, out, steps=6, data=copy, verbose=True, **changes))
    assert states(out).step_directories() == [state(out, step) for step in (5, 6)]
    assert {path.name for path in out.with_name("out-state").iterdir()} >= {
        "step-backup",
        "step-0000009",
        "notes",
    }


def test_a_result_that_cannot_be_written_is_not_trained_again(runs: Runs, tmp_path: Path) -> None:
    """The disk is full at the very end; the last state is there, and continuing only writes.

    All processes end.
    """
    out = tmp_path / "out"
    message = refused(runs, *saving(runs, out), code=1, before=[no_space_for_the_result])
    assert f"the result could not be written: no space left for {out}" in message
    assert f"But step 4 is saved in {out}-state" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-state"]
    before = (tmp_path / "out-state" / "metrics.jsonl").read_bytes()
    done = runs.run(*saving(runs, out), ranks=2, before=[shard, no_space_for_the_result])
    done.expect(1, says=f"no space left for {out}")
    Path(shutil.copytree(f"{out}-state", tmp_path / "cleared-state"), "metrics.jsonl").unlink()
    runs.finish(*saving(runs, tmp_path / "cleared"))
    runs.finish(*saving(runs, out))
    assert (out / "gqa_uptraining.jsonl").read_bytes() == before
    assert json.loads((out / "gqa_uptraining.json").read_text())["steps"] == STEPS


def test_no_space_for_a_state(runs: Runs, tmp_path: Path) -> None:
    """The state before is kept, and the run goes on to its end; where it is stopped then, it says
    what is left.
    """
    out = tmp_path / "out"
    full = partial(no_space_for_the_state_of, 4)
    stop = partial(kill_at, 4, int(signal.SIGTERM))
    stopped = saving(runs, tmp_path / "stopped", steps=5, save_every=2)
    message = refused(runs, *stopped, code=1, before=[full, stop])
    assert "the state of step 4 could not be saved in" in message
    assert "(PytorchStreamWriter failed" in message
    assert f"step 2 is saved in {tmp_path}/stopped-state, and the same command continues" in message

    done = runs.finish(*saving(runs, out), before=[full])
    assert "warning: the state of step 4 could not be saved in" in done.err
    assert sorted(path.name for path in Path(f"{out}-state").glob("step-*")) == [state(out, 2).name]
    assert json.loads((out / "gqa_uptraining.json").read_text())["steps"] == STEPS


def test_a_state_is_saved_although_an_older_one_cannot_be_removed(
    runs: Runs, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = saving(runs, out, save_every=1, keep_state=True)
    done = runs.finish(*words, before=[states_cannot_be_removed])
    assert "could not be saved" not in done.err
    assert len([*Path(f"{out}-state").glob("step-*")]) == STEPS


def test_two_runs_into_one_output(runs: Runs, tmp_path: Path) -> None:
    with states(tmp_path / "out").lock():
        done = runs.run(*runs.words(tmp_path / "out", steps=1), ranks=2)  # which end alike
    assert done.code == 2
    assert (
        f"another run is using {tmp_path}/out-state; wait for it, or choose another directory"
        in done.err
    )
    assert not list(tmp_path.iterdir())


def test_memory_that_runs_out_while_a_state_is_read_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), _readable(tmp_path):
        raise CheckpointException(
            "load", {0: (torch.OutOfMemoryError("out of memory"), StackSummary())}
        )
