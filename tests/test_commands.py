"""Options of the commands: their names, counts and sizes, and what is misspelt."""

import ast
import io
import math
import re
import subprocess
import sys
from dataclasses import MISSING
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import run
from training import tiny_checkpoint, write_corpus

from gqa.checkpoint import console
from gqa.checkpoint.console import Watcher
from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.hub import quiet
from gqa.checkpoint.options import BYTES, Amount, Number, Several, Text, _types, read, read_amount
from gqa.convert import cli as convert_cli
from gqa.convert.options import ConvertOptions
from gqa.eval.options import EvaluateOptions
from gqa.eval.study.options import AblateOptions
from gqa.models import called_from_python
from gqa.uptrain.options import TrainOptions

KINDS: dict[str, Any] = {
    "gqa-convert": ConvertOptions,
    "gqa-uptrain": TrainOptions,
    "gqa-eval": EvaluateOptions,
    "gqa-ablate": AblateOptions,
}
ROOMS = {
    "gqa-convert": "convert.cli",
    "gqa-uptrain": "uptrain.cli",
    "gqa-eval": "eval.cli",
    "gqa-ablate": "eval.study.cli",
}
# Arguments without which a command says nothing else.
LEAST = {
    "gqa-convert": ["m", "-g", "2"],
    "gqa-uptrain": ["m", "--data", "text", "-o", "out"],
    "gqa-eval": ["m"],
    "gqa-ablate": ["m", "-o", "study"],
}


ALL_OPTIONS = {
    program: [
        one.opts[-1]
        for one in import_module(f"gqa.{room}").command.params
        if isinstance(one, click.Option) and not one.is_flag
    ]
    for program, room in ROOMS.items()
}


def command_of(program: str) -> click.Command:
    command: click.Command = import_module(f"gqa.{ROOMS[program]}").command
    return command


def parsed(program: str, *words: str) -> Any:
    """The options of a command, without running it."""
    with command_of(program).make_context(program, [*LEAST[program], *words]) as ctx:
        return read(KINDS[program], ctx.params)


def options_of(program: str) -> dict[str, click.Option]:
    return {name: one for one in command_of(program).params if isinstance(one, click.Option) for name in one.opts}


def test_there_are_at_most_120_options() -> None:
    """--help and --version aside."""
    assert sum(len(set(options_of(program).values())) - 1 for program in ROOMS) <= 120


def test_messages_name_options_that_are_there() -> None:
    """Every option in a string of ours is one of the commands, or of a program that the string names."""
    known = {name for program in ROOMS for option in options_of(program).values() for name in option.opts}
    known |= {name for program in ROOMS for option in options_of(program).values() for name in option.secondary_opts}
    others = {"--help", "--version", "--no-", "--option", "--nproc", "--kl-divergence"}
    words = {
        (file.name, word)
        for folder in ("checkpoint", "corpus", "convert", "uptrain", "eval", "package")
        for file in (Path(__file__).parents[1] / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", node.value)
    }
    assert len(words) > 50
    assert [(file, word) for file, word in sorted(words) if word not in known | others] == []


@pytest.mark.parametrize(
    ("program", "words", "name", "value"),
    [
        ("gqa-convert", "--tokens 64k", "tokens", 64_000),
        ("gqa-convert", "--data a.txt@2,self --data b", "data", ("a.txt@2", "self", "b")),
        ("gqa-convert", "--max-shard-size 5GB", "max_shard_size", 5 * 10**9),
        ("gqa-uptrain", "--tokens 1M", "tokens", 10**6),
        ("gqa-uptrain", "--heldout-tokens 2k", "heldout_tokens", 2000),
        ("gqa-uptrain", "--context 2k", "context", 2000),
        ("gqa-uptrain", "--data a,b@2", "data", ("text", "a", "b@2")),
        ("gqa-eval", "--tokens 64K", "tokens", 64_000),
        ("gqa-eval", "--memory 80GiB", "memory", 80 * 2**30),
        ("gqa-eval", "--cache-bits 8,4 --cache-bits 2", "cache_bits", (8, 4, 2)),
        ("gqa-eval", "--decode-contexts 1k,2k", "decode_contexts", (1000, 2000)),
        ("gqa-ablate", "--eval-tokens 0.5M", "eval_tokens", 500_000),
        ("gqa-ablate", "--skip kl,recall", "skip", ("kl", "recall")),
        ("gqa-convert", "--groups 1,2", "groups", (1, 2)),
    ],
)
def test_values(program: str, words: str, name: str, value: object) -> None:
    assert getattr(parsed(program, *words.split()), name) == value


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("gqa-convert", "--metod mean", "No such option '--metod'. (Did you mean one of: '--method'"),
        ("gqa-convert", "--kv-heads 2", "No such option '--kv-heads'"),
        ("gqa-convert", "--method refind", "'refind' is not one of 'auto', 'mean'"),
        ("gqa-convert", "--data ,", "names nothing; give one or more"),
        ("gqa-convert", "--context 1", "'1' is not a number of tokens from 2 to 1000T"),
        (
            "gqa-convert",
            "--tokens 5GB",
            "'5GB' is not a number of tokens from 1 to 1000T; give one like 65536, 64k",
        ),
        ("gqa-convert", "--precision int8", "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        ("gqa-convert", "--method random --seed -1", "'-1' is not a whole number from 0 to 2147483647"),
        ("gqa-uptrain", "--precision fp8", "'fp8' is not one of"),
    ],
)
def test_what_is_misspelt_or_makes_no_sense(program: str, words: str, message: str) -> None:
    done = run(*LEAST[program], *words.split(), program=program)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


BAD = ("nan", "inf", "-1", str(10**19), "9" * 400, "")


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in ROOMS for name in ALL_OPTIONS[program]])
def test_bad_values_are_refused_in_one_line(
    program: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the type of the option; a name may be anything but empty, and names nothing that is there."""
    monkeypatch.chdir(tmp_path)
    kind = options_of(program)[name].type
    is_name = isinstance(kind._kind if isinstance(kind, Several) else kind, Text)
    for value in BAD:
        done = run(*LEAST[program], f"{name}={value}", program=program)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), (value, done)
        if not is_name or not value:
            assert "Invalid value for " in done.err, (value, done.err)
            assert f"'{name}'" in done.err, (value, done.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS.values())
def test_python_refuses_the_same_values(kind: Any) -> None:
    """Also of options that are for Python alone, with the name of the parameter."""
    needed = {name: "x" for name, one in kind.__dataclass_fields__.items() if one.default is MISSING}
    for name, (type_, _) in _types(kind).items():
        numeric = isinstance(type_._kind if isinstance(type_, Several) else type_, (Number, Amount))
        bad = (math.nan, math.inf, -1, 10**40, True, "x") if numeric else ("", 1.5)
        for value in bad:
            with pytest.raises(RefusedError, match=f"^{name}: "):
                kind(**needed | {name: value})


def headings(program: str) -> dict[str, list[str]]:
    """Heading -> the long names below it, of --help as it is printed."""
    with command_of(program).make_context(program, [*LEAST[program]]) as ctx:
        lines = ctx.get_help().splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            found[line[:-1]] = []
        elif found and (name := re.match(r"  (?:-\w, )?(--[\w-]+)", line)):
            found[[*found][-1]].append(name[1])
    return found


@pytest.mark.parametrize("program", ROOMS)
def test_help_has_each_option_once_below_a_heading(program: str) -> None:
    found = headings(program)
    assert [*found] == ["Basic", "Quality", "Data", "Output", "Advanced"]
    listed = [name for names in found.values() for name in names]
    assert len(listed) == len(set(listed))
    with command_of(program).make_context(program, [*LEAST[program]]) as ctx:
        shown = [p for p in command_of(program).get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    assert set(listed) == {next(name for name in option.opts if name.startswith("--")) for option in shown}
    assert set(listed) >= {"--overwrite", "--verbose", "--quiet", "--version", "--help"}


def test_an_option_is_below_the_same_heading_everywhere() -> None:
    found = {program: headings(program) for program in ROOMS}
    places: dict[str, set[str]] = {}
    for below in found.values():
        for heading, names in below.items():
            for name in names:
                places.setdefault(name, set()).add(heading)
    assert {name for name, where in places.items() if len(where) > 1} == set()


@pytest.mark.parametrize("program", ROOMS)
def test_help_is_in_sentences(program: str) -> None:
    for name, found in options_of(program).items():
        told = (found.help or "").partition("  [default")[0]
        assert told, name
        assert told[-1] in ".?" or told.endswith("..."), (name, told)
        assert not re.search(r"\b(INTEGER|FLOAT|RANGE|LIST)\b", found.make_metavar(click.Context(command_of(program))))


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 80]


@pytest.mark.parametrize("program", ROOMS)
def test_help_fits_a_terminal_of_80_columns(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for examples, which are whole commands."""
    monkeypatch.setenv("COLUMNS", "80")
    told, _, examples = run("--help", program=program).out.partition("Examples:")
    assert too_wide(told) == []
    assert "gqa" in examples


def test_a_conversion_and_a_training_fit_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they say, with the errors of many layers, every changed tensor and a line of status; as a control, a line
    that is too wide is seen, and cut between words.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    tiny_checkpoint(Path("model"), kv_heads=4, num_hidden_layers=12)
    text = ("--data", write_corpus(Path("text.jsonl")), "--context", 64)
    made = run("model", "-g", 2, "--method", "calibrated", *text, "--tokens", 512, "-v")
    assert made.code == 0, made.err
    assert made.out.count("squared error of attention outputs") == made.out.count("\nnext ") == 1
    trained = run(
        "model-gqa2-calibrated", *text, "--tokens", 1024, "--batch-size", 4, "--teacher", "model", "-o", "out",
        program="gqa-uptrain",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert " | held-out " in trained.err.splitlines()[-1]
    for done in (made, trained):
        assert too_wide(f"{done.out}\n{done.err}") == []
        assert too_wide(done.said) != []
        assert [line for line in done.out.splitlines() if line.rstrip() != line] == []


@pytest.mark.parametrize("program", ROOMS)
def test_help_imports_neither_torch_nor_transformers(program: str) -> None:
    code = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    code += f"from gqa.{ROOMS[program]} import main\nsys.argv = ['{program}', '--help']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: " in done.stdout
    assert not {"torch", "transformers", "datasets", "pandas"} & set(done.stderr.split())


@pytest.mark.parametrize("program", ROOMS)
def test_versions(program: str) -> None:
    told = run("--version", program=program).out
    assert told == f"{program} {version('gqa')} (torch {version('torch')}, transformers {version('transformers')})\n"


class Terminal(io.StringIO):
    """stderr that says a person looks at it."""

    def isatty(self) -> bool:
        return True


def test_what_is_left_comes_first_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.progress_bar(200, "tok", "calibrating", quiet=False) as bar:
        bar.update(100)
        bar.set_postfix_str("layer 3/30, error 0.0123, and words " * 5)
        line = bar.format_meter(**{**bar.format_dict, "ncols": 80})
    assert re.match(r"calibrating  50% eta \S+ 100/200 ", line)
    assert len(line) <= 80
    assert not console.progress_bar(200, "tok", "x", quiet=False).disable
    assert console.progress_bar(200, "tok", "x", quiet=True).disable


def test_nobody_looks_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    assert console.progress_bar(200, "tok", "x", quiet=False).disable
    console.say_device("cpu", quiet=False)
    assert told.getvalue() == ""


@click.command(cls=console.Command)
@click.option("-v", "--verbose", is_flag=True)
@click.option("-q", "--quiet", is_flag=True)
def broken(verbose: bool, quiet: bool) -> float:
    """A command with a defect."""
    return 1 / 0


@pytest.mark.parametrize("library", ["huggingface_hub", "datasets"])
def test_quiet_is_without_the_bars_of_libraries(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [import_module(f"{name}.utils") for name in {library, "huggingface_hub"}]
    for utils in found:  # whatever a test before has left
        utils.enable_progress_bars()
    monkeypatch.setattr(sys, "stderr", Terminal())
    for words, without in (([], False), (["-q"], True)):
        with broken.make_context("gqa-x", words), quiet(library):
            assert {utils.are_progress_bars_disabled() for utils in found} == {without}
    for progress in (True, False):
        with called_from_python(not progress), quiet(library):
            assert {utils.are_progress_bars_disabled() for utils in found} == {not progress}
    assert not any(utils.are_progress_bars_disabled() for utils in found)


@pytest.mark.parametrize("words", ["-v", "--verbose", "-q -v", "-qv", "-vq", "-q"])
def test_where_a_defect_is_is_shown_on_request(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gqa-x", *words.split()])
    with pytest.raises(SystemExit):
        console.run(broken, "gqa-x", "nothing was done")
    told = capsys.readouterr().err
    assert ("in broken" in told) == ("v" in words)
    assert told.endswith("gqa-x: unexpected ZeroDivisionError: division by zero; -v shows where, please report it\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RefusedError("no such thing"), 2, "gqa-x: no such thing"),
        (FileNotFoundError(2, "No such file", "m/x.json"), 1, "gqa-x: m/x.json: No such file; "),
        (OutputError("m holds no space"), 1, "gqa-x: m holds no space"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_traceback_with_its_cause_on_request(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command(cls=console.Command)
    @click.option("-v", "--verbose", is_flag=True)
    def failing(verbose: bool) -> None:
        try:
            raise ZeroDivisionError("the cause")
        except ZeroDivisionError as cause:
            raise error from cause

    for words in ([], ["-v"]):
        monkeypatch.setattr(sys, "argv", ["gqa-x", *words])
        with pytest.raises(SystemExit) as left:
            console.run(failing, "gqa-x", "nothing was done")
        *shown, last = capsys.readouterr().err.splitlines()
        assert (left.value.code, last.startswith(line)) == (code, True), last
        assert ("the cause" in "".join(shown)) == bool(words)


def test_a_command_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To people only."""
    model = tiny_checkpoint(tmp_path / "model")
    words = ["--data", "self:64", "--context", 16, "--method", "calibrated", "--device", "cpu"]
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    told = run(model, "-g", 1, *words, "-o", tmp_path / "a").err
    assert "device      cpu\n" in told
    assert run(model, "-g", 1, *words, "-o", tmp_path / "b", "--quiet").err == ""
    monkeypatch.undo()
    assert "device" not in run(model, "-g", 1, *words, "-o", tmp_path / "c").err


@pytest.mark.parametrize("method", ["calibrated", "refined", "aligned"])
def test_the_total_of_the_bar_is_what_is_done(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and the steps in each are counted."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))  # nothing is sampled yet
    stages: list[list[int]] = []

    class Counting(Watcher):
        def stage(self, name: str, total: int, unit: str = "tok") -> None:
            stages.append([total, 0])

        def update(self, count: int) -> None:
            stages[-1][1] += count

        def layer(self, index: int, error: float) -> None:
            self.update(1)

    monkeypatch.setattr(convert_cli, "Watcher", Counting)
    steps = ["--refine-steps", 3] if method == "refined" else []
    text = [] if method == "aligned" else ["--data", "self:320", "--context", 16]
    words = ["--method", method, *text, *steps]
    done = run(tiny_checkpoint(tmp_path / "model"), "-g", 1, *words, "-o", tmp_path / "out", "-q")
    assert done.code == 0, done.err
    assert len(stages) == (3 if text else 2), "the model writes, layers are calibrated, the result is written"
    assert [total for total, _ in stages] == [count for _, count in stages]


def test_shells_complete_options_and_methods() -> None:
    from click.shell_completion import ShellComplete

    complete = ShellComplete(command_of("gqa-convert"), {}, "gqa-convert", "_GQA_CONVERT_COMPLETE")
    assert [item.value for item in complete.get_completions([], "--g")] == ["--groups", "--grouping"]
    assert [item.value for item in complete.get_completions(["--method"], "ref")] == ["refined"]


def test_numbers_are_those_that_are_written() -> None:
    """Not those of the nearest float."""
    assert [read_amount(text) for text in ("8.2M", "1.005m", "64k", "0", "x", "9" * 400)] == [
        8_200_000,
        1_005_000,
        64_000,
        None,
        None,
        None,
    ]
    assert BYTES.convert("1.001MB", None, None) == 1_001_000
    with pytest.raises(click.BadParameter, match="'inf' is not a number"):
        Number(float).convert("inf", None, None)
