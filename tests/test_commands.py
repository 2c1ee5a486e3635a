"""Options of the commands: their names, older names that still work, counts and sizes, and what is misspelt."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
import pytest
from checkpoints import run

from gqa.checkpoint.console import Option

ROOMS = {
    "gqa-convert": "convert.cli",
    "gqa-calibrate": "convert.calibrate_cli",
    "gqa-uptrain": "uptrain.cli",
    "gqa-eval": "eval.cli",
    "gqa-ablate": "eval.study.cli",
}
# Arguments without which a command says nothing else.
LEAST = {
    "gqa-convert": ["m", "-g", "2"],
    "gqa-calibrate": ["m", "-g", "2", "-o", "maps"],
    "gqa-uptrain": ["m", "--data", "text", "-o", "out"],
    "gqa-eval": ["m"],
    "gqa-ablate": ["m", "-o", "study"],
}
EVERYWHERE = {"--overwrite", "--verbose", "--quiet", "--version", "--help"}


def command_of(program: str) -> click.Command:
    command: click.Command = import_module(f"gqa.{ROOMS[program]}").command
    return command


def parsed(program: str, *words: str) -> dict[str, Any]:
    """What the options of a command come to, without running it."""
    with command_of(program).make_context(program, [*LEAST[program], *words]) as ctx:
        return ctx.params


def options_of(program: str) -> dict[str, Option]:
    return {name: found for found in command_of(program).params if isinstance(found, Option) for name in found.opts}


OLD = [
    ("gqa-convert", "--groups", "--kv-heads", "3"),
    ("gqa-convert", "--data", "--calibration", "notes.txt"),
    ("gqa-convert", "--tokens", "--calibration-tokens", "640"),
    ("gqa-convert", "--context", "--calibration-length", "64"),
    ("gqa-convert", "--no-repeats", "--no-calibration-repeats", ""),
    ("gqa-convert", "--repeats", "--calibration-repeats", ""),
    ("gqa-convert", "--precision", "--calibration-dtype", "bfloat16"),
    ("gqa-calibrate", "--data", "--calibration", "notes.txt"),
    ("gqa-uptrain", "--context", "--block-size", "64"),
    ("gqa-uptrain", "--learning-rate", "--lr", "0.5"),
    ("gqa-uptrain", "--attn-implementation", "--attention", "eager"),
    ("gqa-eval", "--tokens", "--max-tokens", "640"),
    ("gqa-eval", "--precision", "--dtype", "float16"),
    ("gqa-eval", "--attn-implementation", "--attention", "eager"),
    ("gqa-eval", "--decode-batches", "--batches", "2,3"),
    ("gqa-eval", "--decode-contexts", "--contexts", "2,3"),
    ("gqa-eval", "--decode-steps", "--steps", "3"),
    ("gqa-eval", "--decode-repeats", "--repeats", "3"),
    ("gqa-ablate", "--train-context", "--block-size", "64"),
    ("gqa-ablate", "--eval-precision", "--dtype", "float16"),
    ("gqa-ablate", "--calibration-context", "--calibration-length", "64"),
    ("gqa-ablate", "--calibration-precision", "--calibration-dtype", "float16"),
    ("gqa-ablate", "--device", "--devices", "cuda:0,cuda:1"),
]


@pytest.mark.parametrize(("program", "name", "old", "value"), OLD, ids=lambda word: word)
def test_old_names_mean_the_same_and_are_not_shown(program: str, name: str, old: str, value: str) -> None:
    words = [value] if value else []
    assert parsed(program, old, *words) == parsed(program, name, *words)
    assert parsed(program, old, *words) != parsed(program) or name == "--repeats"
    with command_of(program).make_context(program, [*LEAST[program]]) as ctx:
        shown = ctx.get_help().replace(",", " ").split()
    assert name in shown
    assert old not in shown


def test_every_alias_is_tested() -> None:
    """But for the plurals of gqa-ablate, and what gqa-calibrate and gqa-ablate share with others."""
    told = {old for _, _, old, _ in OLD} | {"--method", "--alpha", "--teacher"}
    for program in ROOMS:
        for found in options_of(program).values():
            assert {*found.aliases, *found.secondary_aliases} <= told


@pytest.mark.parametrize("program", ROOMS)
def test_what_all_commands_have(program: str) -> None:
    names = {name for found in command_of(program).params for name in found.opts}
    assert {*names, "--help"} >= EVERYWHERE


@pytest.mark.parametrize(
    ("program", "words", "name", "value"),
    [
        ("gqa-convert", "--tokens 64k", "calibration_tokens", 64_000),
        ("gqa-convert", "--data a.txt@2,self --data b", "calibration", ("a.txt@2", "self", "b")),
        ("gqa-convert", "--refine-precision bf16", "refine_precision", "bfloat16"),
        ("gqa-convert", "--max-shard-size 5GB", "max_shard_size", 5 * 10**9),
        ("gqa-uptrain", "--tokens 1M", "tokens", 10**6),
        ("gqa-uptrain", "--heldout-tokens 2k", "heldout_tokens", 2000),
        ("gqa-uptrain", "--pretraining-tokens 1B", "pretraining_tokens", 10**9),
        ("gqa-uptrain", "--context 2k", "block_size", 2000),
        ("gqa-uptrain", "--data a,b@2", "data", ("text", "a", "b@2")),
        ("gqa-uptrain", "--precision bfloat16", "precision", "bf16"),
        ("gqa-uptrain", "--precision no", "precision", "no"),
        ("gqa-uptrain", "", "precision", "no"),
        ("gqa-eval", "--tokens 64K", "tokens", 64_000),
        ("gqa-eval", "--memory 80GiB", "memory", 80 * 2**30),
        ("gqa-eval", "--precision bf16", "precision", "bfloat16"),
        ("gqa-eval", "--decode-contexts 1k,2k", "decode_contexts", (1000, 2000)),
        ("gqa-ablate", "--eval-tokens 0.5M", "eval_tokens", 500_000),
        ("gqa-ablate", "--precision bf16 --dtype bf16", "dtype", "bfloat16"),
        ("gqa-ablate", "--precision bf16 --dtype bf16", "precision", "bf16"),
        ("gqa-ablate", "--context 64 --train-context 32", "context", 64),
        ("gqa-ablate", "--context 64 --train-context 32", "block_size", 32),
    ],
)
def test_values(program: str, words: str, name: str, value: object) -> None:
    assert parsed(program, *words.split())[name] == value


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("gqa-convert", "--metod mean", "No such option --metod; did you mean --method?"),
        ("gqa-convert", "--calibration-token 5", "No such option --calibration-token; did you mean --tokens?"),
        ("gqa-convert", "--nothing-like-it", "No such option --nothing-like-it; see gqa-convert --help"),
        ("gqa-convert", "--method refind", "'refined'; did you mean refined?"),
        ("gqa-convert", "--method zzz", "'refined'; see gqa-convert --help"),
        ("gqa-convert", "--data ,", "names nothing; give one source or more"),
        ("gqa-convert", "--context 1", "1 is less than 2 tokens"),
        ("gqa-convert", "--tokens 5GB", "'5GB' is not a number of tokens; give one like 65536, 64k, 500M or 1B"),
        ("gqa-convert", "--precision int8", "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        ("gqa-calibrate", "--method mean", "'mean' is not one of 'procrustes', "),
        ("gqa-uptrain", "--trane all", "did you mean --train?"),
        ("gqa-uptrain", "--blok-size 4", "did you mean --context?"),
        ("gqa-uptrain", "--optimizer adam", "did you mean adamw?"),
        ("gqa-uptrain", "--precision fp8", "'fp8' is not one of"),
        ("gqa-eval", "--precison auto", "did you mean --precision?"),
        ("gqa-eval", "--protocol stride", "did you mean strided?"),
        ("gqa-ablate", "--methods mean,first,alligned", "did you mean aligned?"),
    ],
)
def test_what_is_misspelt(program: str, words: str, message: str) -> None:
    done = run(*LEAST[program], *words.split(), program=program)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1
