"""What the commands share: names and values of options, --help, progress,
one line for every error.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import MISSING, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from support.checkpoints import Recorder, leftovers, llama, run
from support.patches import use_data_cache
from support.repository import PACKAGES, SCRIPTS
from support.training import tiny_checkpoint

from gqa.calls import options_of_call
from gqa.checkpoint.hub import quiet
from gqa.convert import cli as convert_cli
from gqa.convert.methods.table import METHODS
from gqa.convert.options import ConvertOptions
from gqa.core import console
from gqa.core import options as core_options
from gqa.core.errors import OutputError, RefusedError
from gqa.core.option_types import Amount, Number, Several, Text
from gqa.core.options import Options, _types, flag, options_from_click
from gqa.eval.options import EvaluateOptions
from gqa.study.options import AblateOptions
from gqa.uptrain.options import Rate, UptrainOptions

ROOT = Path(__file__).parents[1]
# The dataclass of each command, its module, and arguments without which it says nothing else.
PROGRAMS: dict[str, tuple[Any, str, list[str]]] = {
    "gqa-convert": (ConvertOptions, "gqa.convert.cli", ["m", "-g", "2"]),
    "gqa-uptrain": (UptrainOptions, "gqa.uptrain.cli", ["m", "--data", "text", "-o", "out"]),
    "gqa-eval": (EvaluateOptions, "gqa.eval.cli", ["m"]),
    "gqa-ablate": (AblateOptions, "gqa.study.cli", ["m", "-o", "study"]),
}
COMMANDS: dict[str, click.Command] = {
    name: import_module(room).command for name, (_, room, _) in PROGRAMS.items()
}
OPTIONS = {
    name: [p for p in command.params if isinstance(p, click.Option)]
    for name, command in COMMANDS.items()
}


def test_messages_name_options_that_are_there() -> None:
    """Every option in a string of ours is one of the commands, or of a program that the string
    names.
    """
    known = {
        name
        for options in OPTIONS.values()
        for option in options
        for name in option.opts + option.secondary_opts
    }
    known |= {"--help", "--version", "--no-", "--option", "--nproc", "--kl-divergence"}
    words = {
        (file.name, word)
        for folder in PACKAGES
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", node.value)
    }
    assert len(words) > 50
    assert [(file, word) for file, word in sorted(words) if word not in known] == []


@pytest.mark.parametrize(
    ("program", "words", "name", "value"),
    [
        ("gqa-convert", "--tokens 64k", "tokens", 64_000),
        ("gqa-convert", "--tokens 1.005m", "tokens", 1_005_000),  # not those of the nearest float
        ("gqa-eval", "--memory 1.001MB", "memory", 1_001_000),
        ("gqa-convert", "--data a.txt@2,self --data b", "data", ("a.txt@2", "self", "b")),
        ("gqa-convert", "--kv-heads 1,2", "kv_heads", (1, 2)),
        ("gqa-uptrain", "--tokens 1M", "tokens", 10**6),
        ("gqa-uptrain", "--gradient-checkpointing", "gradient_checkpointing", True),
        ("gqa-uptrain", "--data a,b@2", "data", ("text", "a", "b@2")),
        ("gqa-eval", "--memory 80GiB", "memory", 80 * 2**30),
        ("gqa-eval", "--simulate-cache 8,4 --simulate-cache 2", "simulate_cache", (8, 4, 2)),
        ("gqa-eval", "--simulate-cache fp8,8", "simulate_cache", ("fp8", 8)),
        ("gqa-eval", "--decode-contexts 1k,2k", "decode_contexts", (1000, 2000)),
        ("gqa-ablate", "--eval-tokens 0.5M", "eval_tokens", 500_000),
        ("gqa-ablate", "--skip kl,recall", "skip", ("kl", "recall")),
    ],
)
def test_values(program: str, words: str, name: str, value: object) -> None:
    kind, _, least = PROGRAMS[program]
    with COMMANDS[program].make_context(program, [*least, *words.split()]) as ctx:
        assert getattr(options_from_click(kind, ctx.params), name) == value


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (
            "gqa-convert",
            "--metod mean",
            "there is no option --metod; did you mean --method",
        ),
        (
            "gqa-convert",
            "--kv-headd 2",
            "there is no option --kv-headd; did you mean --kv-heads? See gqa-convert --help",
        ),
        (
            "gqa-uptrain",
            "--held-out text",
            "there is no option --held-out; see gqa-uptrain --help",
        ),
        ("gqa-convert", "--heads 2", "there is no option --heads; did you mean --kv-heads"),
        ("gqa-convert", "--data ,", "is empty; pass one or more values"),
        (
            "gqa-convert",
            "--tokens 5GB",
            "'5GB' is not a number of tokens from 1 to 1000T; pass one like 65536, 64K",
        ),
        ("gqa-convert", "--refine-steps 0", "is not a whole number from 1 to 1,000,000,000"),
        ("gqa-convert", "--kv-budget 1", "'1' is not a number above 0 and below 1"),
        (
            "gqa-eval",
            "--simulate-cache 8,fp4",
            "'fp4' is not a whole number from 2 to 8, nor fp8",
        ),
        ("gqa-uptrain", "--alpha 0", "'0' is not a number above 0 and at most 1"),
        (
            "gqa-ablate",
            "--data text --methods mean,aligned --refine-steps 2",
            "--refine-steps is not used by --methods mean,aligned; remove it, or use it with "
            "--method refined",
        ),
    ],
)
def test_what_is_misspelt_or_makes_no_sense(program: str, words: str, message: str) -> None:
    done = run(*PROGRAMS[program][2], *words.split(), program=program)
    done.expect(2, says=message, err_lines=1)


def test_a_study_without_a_directory_is_told_how_to_name_one() -> None:
    done = run("model", "--data", "text", program="gqa-ablate")
    says = "pass the directory of the study with -o DIR"
    done.expect(2, says=says, err_lines=1)


@pytest.mark.parametrize(
    ("program", "option"),
    [
        (program, option)
        for program, options in OPTIONS.items()
        for option in options
        if not option.is_flag
    ],
    ids=str,
)
def test_bad_values_are_refused_in_one_line(
    program: str, option: click.Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the type of the option; a name may be anything but empty,
    and names nothing that is there.
    """
    monkeypatch.chdir(tmp_path)
    name, kind = option.opts[-1], option.type
    is_name = isinstance(kind.value_type if isinstance(kind, Several) else kind, Text)
    for value in ("-1", "") if is_name else ("nan", "inf", "-1", str(10**19), "9" * 400, ""):
        done = run(*PROGRAMS[program][2], f"{name}={value}", program=program)
        done.expect(2, out="", err_lines=1)
        if not is_name or not value:
            assert f"{program}: {flag(option.name)} " in done.err, (value, done.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_python_refuses_the_same_values(program: str) -> None:
    """Also of options that are for Python alone, with the name of the parameter."""
    kind = PROGRAMS[program][0]
    needed = {
        name: "x" for name, one in kind.__dataclass_fields__.items() if one.default is MISSING
    }
    for name, (type_, _) in _types(kind).items():
        of_one = type_.value_type if isinstance(type_, Several) else type_
        numeric = isinstance(of_one, (Number, Amount, Rate))
        bad = (math.nan, math.inf, -1, 10**40, True, "x") if numeric else ("", 1.5)
        for value in bad:
            with pytest.raises(RefusedError, match=f"^{name}: "):
                kind(**needed | {name: value})


@pytest.mark.parametrize(
    ("words", "used"),
    [
        ("mean --tokens 64", False),
        ("mean --grouping contiguous", False),
        ("mean --device cpu", False),
        ("mean --seed 3", False),
        ("random --seed 3", True),
        ("aligned --grouping contiguous", True),
        ("aligned --data notes.txt", False),
        ("calibrated --data notes.txt --text-column body --separator x", True),
        ("calibrated --refine-steps 7", False),
        ("refined --refine-steps 7 --context 64 --precision bfloat16", True),
        ("mean --no-check", False),
    ],
)
def test_an_option_is_refused_by_the_methods_that_do_not_use_it(
    words: str, used: bool, tmp_path: Path
) -> None:
    """One that is used gets as far as the model, which is not there."""
    method, option, *_ = words.split()
    message = run("-g", 2, "--method", *words.split(), tmp_path / "nothing").err
    if used:
        assert "there is no directory" in message
    else:
        assert (
            f"gqa-convert: {option} is not used by --method {method}; remove it, or use it with "
            "--method " in message
        )
        users = re.split(", | or ", message.strip().split("--method ")[-1])
        assert {*users} <= METHODS.keys()


@pytest.mark.parametrize(
    ("groups", "name"), [(2, "m-gqa2-first"), (1, "m-gqa1-first"), (8, "m-gqa8"), (4, "m-gqa4")]
)
def test_the_name_says_the_method_if_there_is_any(groups: int, name: str, tmp_path: Path) -> None:
    """4 heads become fewer, stay, or are repeated; a method that has nothing to do is told of."""
    words = ("--method", "first", "--dtype", "float32")
    done = run("--kv-heads", groups, *words, llama(tmp_path / "m"))
    done.expect()
    assert leftovers(tmp_path) == []
    assert (tmp_path / name / "config.json").is_file()
    assert ("--method is not used: none of the 4 heads are merged" in done.out) == (groups >= 4)


def test_a_method_that_has_nothing_to_do_is_told_of_if_it_was_typed(tmp_path: Path) -> None:
    """The default one too."""
    words = ("--kv-heads", 4, "--dtype", "bfloat16", "--dry-run", llama(tmp_path / "m"))
    assert "note        --method is not used: " in run(*words, "--method", "refined").out
    assert "note " not in run(*words).out


def option_names(program: str) -> list[str]:
    """The long names of the options of a command, without --help."""
    return [
        next(name for name in option.opts if name.startswith("--")) for option in OPTIONS[program]
    ]


def help_groups(text: str) -> dict[str, list[str]]:
    """The options that --help lists below each of its headings."""
    groups: dict[str, list[str]] = {}
    for heading, rows in re.findall(r"^(\w[\w (),-]*):\n((?:  .*\n)+)", text, re.MULTILINE):
        names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", rows, re.MULTILINE)
        if names:
            groups[heading] = names
    return groups


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_begins_with_the_few_options_that_people_need_first(program: str) -> None:
    groups = help_groups(run("--help", program=program).out)
    assert next(iter(groups)) == "Main options"
    assert 4 <= len(groups["Main options"]) <= 7
    assert "--output" in groups["Main options"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_is_in_one_group_of_help(program: str) -> None:
    groups = help_groups(run("--help", program=program).out)
    places = {name: [] for name in [*option_names(program), "--help"]}
    for heading, names in groups.items():
        for name in names:
            places[name].append(heading)
    assert {name: found for name, found in places.items() if len(found) != 1} == {}
    assert len(groups) >= 6
    assert max(len(names) for names in groups.values()) <= 7


def help_lines(program: str, columns: int) -> list[str]:
    """The lines of --help in a terminal that has so many columns."""
    with mock.patch.dict(os.environ, COLUMNS=str(columns)):
        return run("--help", program=program).out.splitlines()


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fits_the_terminal(program: str, columns: int) -> None:
    lengths = [len(line) for line in help_lines(program, columns)]
    assert max(lengths) <= columns
    # It uses the columns, up to those that are pleasant to read.
    assert max(lengths) > min(columns, 110) - 10


@pytest.mark.parametrize("columns", [80, 110, 140])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_breaks_no_name_at_a_hyphen(program: str, columns: int) -> None:
    assert [line for line in help_lines(program, columns) if line.endswith("-")] == []


def test_help_shows_the_methods_in_columns() -> None:
    text = run("--help").out
    header = re.search(r"^  method +fitted to +", text, re.MULTILINE)
    assert header
    for name, method in METHODS.items():
        row = re.search(rf"^  {name} +{method.reads} +", text, re.MULTILINE)
        assert row, name
        assert len(row[0]) == len(header[0])


def test_an_option_without_a_group_of_help_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(Options):
        words: str | None = core_options.option(None, "Words.")

    with pytest.raises(AssertionError, match="words needs a group of --help"):
        core_options.command(Lost)(print)


@pytest.mark.parametrize("name", ["convert", "uptrain", "eval", "study"])
def test_every_command_runs_as_a_module(name: str) -> None:
    """Launchers start modules: `accelerate launch -m gqa.uptrain`."""
    words = [sys.executable, "-m", f"gqa.{name}", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    program = {"study": "ablate"}.get(name, name)
    assert done.stdout.startswith(f"gqa-{program} ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_version(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option once, in sentences; quickly."""
    words = [sys.executable, SCRIPTS / "help_and_modules.py", program, PROGRAMS[program][1]]
    monkeypatch.setenv("COLUMNS", "80")
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    heavy = "torch transformers datasets pandas numpy huggingface_hub safetensors tqdm asyncio"
    assert "click" in done.stderr.split()
    assert not {*heavy.split()} & set(done.stderr.split())
    text, _, examples = done.stdout.partition("Examples:")
    assert "gqa" in examples
    listed = [name for names in help_groups(text).values() for name in names]
    assert sorted(listed) == sorted([*option_names(program), "--help"])
    assert set(listed) >= {"--overwrite", "--verbose", "--quiet", "--version"}
    assert [
        one.opts
        for one in OPTIONS[program]
        if not re.search(r"[.?](  \[default.*)?$", one.help or "")
    ] == []
    text = run("--version", program=program).out
    assert (
        text == f"{program} {version('gqa')} (torch {version('torch')}, "
        "transformers "
        f"{version('transformers')})\n"
    )


@pytest.mark.parametrize("program", ["gqa-convert", "gqa-uptrain"])
def test_without_a_model_the_error_says_what_a_model_is(program: str) -> None:
    done = run(program=program)
    done.expect(2)
    assert done.err == (
        f"{program}: pass the model: a directory with config.json, or a model id; "
        f"see {program} --help\n"
    )


class Terminal(io.StringIO):
    """stderr that says a person looks at it."""

    def isatty(self) -> bool:
        return True


def test_progress_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining time comes first on a narrow terminal; a log gets a line now and then."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.Watcher() as watcher:
        watcher.stage("calibrating", 200, "layer")
        watcher.update(100, "error 0.0123, and words " * 5)
        line = watcher._bar.format_meter(**{**watcher._bar.format_dict, "ncols": 80})
    assert re.match(r"calibrating  50% eta \S+ 100/200 ", line)
    assert len(line) <= 80
    # A log, which is no terminal
    monkeypatch.setattr(sys, "stderr", text := io.StringIO())
    for seconds, silent in ((60.0, False), (0.0, True), (0.0, False)):
        # A minute between lines of a log, or none
        monkeypatch.setattr(console, "_LOG_SECONDS", seconds)
        with console.Watcher(silent) as watcher:
            watcher.stage("calibrating", 30, "layer", done=1)
            watcher.update(note="error 0.25")
            watcher.update()
            watcher.stage("base writes", 20_000)
            watcher.update(10_000)
    line = r"calibrating: {} of 30 layers, 00:00 elapsed, about 00:00 left, error 0.25\n"
    lines = (
        line.format(2)
        + line.format(3)
        + r"base writes: 10.0k of 20.0k tokens, 00:00 elapsed, about 00:00 left\n"
    )
    assert re.fullmatch(lines, text.getvalue())


@pytest.mark.parametrize("method", ["refined", "aligned"])
def test_the_total_of_the_bar_is_what_is_done(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model writes, layers and the steps in each are calibrated, shards are written."""
    # Nothing is sampled yet
    use_data_cache(monkeypatch, str(tmp_path / "cache"))
    watcher = Recorder()
    # Notes what the bar is told
    monkeypatch.setattr(convert_cli, "Watcher", lambda *_, **__: watcher)
    words = (
        ["--data", "self:320", "--context", 16, "--refine-steps", 3] if method == "refined" else []
    )
    done = run(
        tiny_checkpoint(tmp_path / "model"),
        "-g",
        1,
        "--method",
        method,
        *words,
        "-o",
        tmp_path / "out",
        "-q",
    )
    done.expect()
    stages = 3 if words else 2
    assert len(watcher.stages) == stages
    assert all(total == done for total, done in watcher.stages)
    assert ('"tokens": 320' in (tmp_path / "out" / "gqa_conversion.json").read_text()) == bool(
        words
    )


@click.command()
@click.option("-v", "--verbose", is_flag=True)
@click.option("-q", "--quiet", is_flag=True)
@click.pass_obj
def failing(error: Exception, verbose: bool, quiet: bool) -> None:
    """A command with a defect."""
    try:
        raise ZeroDivisionError("the cause")
    except ZeroDivisionError as cause:
        raise error from cause


@pytest.mark.parametrize("library", ["huggingface_hub", "datasets"])
def test_quiet_is_without_the_bars_of_libraries(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [import_module(f"{name}.utils") for name in {library, "huggingface_hub"}]
    for module in modules:  # whatever a test before has left
        module.enable_progress_bars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    for is_quiet in (False, True):
        with failing.make_context("gqa-x", ["-q"] * is_quiet), quiet(library):
            assert {module.are_progress_bars_disabled() for module in modules} == {is_quiet}
        with options_of_call(ConvertOptions, {"quiet": is_quiet}, model="m"), quiet(library):
            assert {module.are_progress_bars_disabled() for module in modules} == {is_quiet}
    assert not any(module.are_progress_bars_disabled() for module in modules)


@pytest.mark.parametrize("words", ["", "-v", "--verbose", "-q -v", "-qv", "-vq", "-q"])
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RefusedError("no such thing"), 2, "gqa-x: no such thing"),
        (FileNotFoundError(2, "No such file", "m/x.json"), 1, "gqa-x: m/x.json: No such file; "),
        (OutputError("m holds no space"), 1, "gqa-x: m holds no space"),
        (
            KeyError("m"),
            1,
            "gqa-x: unexpected KeyError: 'm'; please report it with the command and what -v prints",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_traceback_with_its_cause_on_request(
    error: Exception,
    code: int,
    line: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gqa-x", *words.split()])
    # What the command that is run here raises
    monkeypatch.setattr(failing, "context_settings", {"obj": error})
    with pytest.raises(SystemExit) as leaving:
        console.run(failing, "gqa-x", "nothing was done")
    *shown, last = capsys.readouterr().err.splitlines()
    assert leaving.value.code == code, last
    assert last.startswith(line), last
    assert ("the cause" in "".join(shown)) == ("v" in words)


@pytest.mark.parametrize("name", ["--kv-heads", "--groups", "-g"])
def test_the_number_of_heads_has_the_names_of_the_field_and_of_the_paper(
    small: Path, tmp_path: Path, name: str
) -> None:
    done = run(small, name, 2, "--method", "mean", "-q", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out/config.json").read_text())["num_key_value_heads"] == 2


def test_a_dry_run_says_that_a_source_is_no_file(small: Path) -> None:
    """As a mistyped name of a file is none; but generated and built-in text needs no file."""
    words = ["--kv-heads", 2, "--dry-run", small, "--data"]
    note = "no file here: a data set of the hub"
    assert note not in run(*words, "self,general").out
    shown = run(*words, "self,train.jsnl").out
    assert f"data        self, train.jsnl ({note}, which a dry run does not look up)\n" in shown
