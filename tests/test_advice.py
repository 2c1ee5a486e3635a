"""What commands advise: each advised command is one that its program takes, and it does what the
sentence says.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from support.checkpoints import Result, llama, run
from support.embedded import copy_source
from support.evaluations import few_questions
from support.patches import call_good_up_to, train_on_few_tokens
from support.repository import ROOT
from support.training import fresh_accelerator, tiny_checkpoint

import gqa
from gqa.convert.methods.table import METHODS
from gqa.core.options import default_text

PROGRAMS = {
    "gqa-convert": "gqa.convert.cli",
    "gqa-uptrain": "gqa.uptrain.cli",
    "gqa-eval": "gqa.eval.cli",
    "gqa-ablate": "gqa.study.cli",
}
KINDS: dict[str, Any] = {
    "gqa-convert": gqa.ConvertOptions,
    "gqa-uptrain": gqa.UptrainOptions,
    "gqa-eval": gqa.EvaluateOptions,
    "gqa-ablate": gqa.AblateOptions,
}
COMMANDS: dict[str, click.Command] = {
    name: import_module(module).command for name, module in PROGRAMS.items()
}
SHORT = ("--tokens", 256, "--context", 16)
# As little text, which is not a smaller number than the default of --tokens.
LITTLE = ("--data", "self:256", "--context", 16)


def advised(done: Result) -> list[list[str]]:
    """The words of every command in the output: they go from the name of a program to the end of
    the line.
    """
    found = re.findall(r"(?:^|: )((?:gqa-[a-z]+) .*)$", done.out + done.err, re.MULTILINE)
    return [shlex.split(line) for line in found]


def parse(words: list[str]) -> dict[str, Any]:
    """Parameters as the program reads them. Raises click.UsageError."""
    with COMMANDS[words[0]].make_context(words[0], words[1:]) as context:
        return context.params


def parse_heads(words: list[str]) -> str:
    """The value of --kv-heads in a command; empty without it."""
    return words[words.index("--kv-heads") + 1] if "--kv-heads" in words else ""


MODELS = ("it's a model", "no tokenizer")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose names a shell would split."""
    directory = tmp_path_factory.mktemp("advice")
    tiny_checkpoint(directory / "it's a model", kv_heads=4)
    llama(directory / "no tokenizer", side_files=False)
    return directory


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, for results too; they go away."""
    monkeypatch.chdir(place)
    yield place
    for path in place.iterdir():
        if path.name not in MODELS:
            shutil.rmtree(path)


# Arguments of gqa-convert and the programs that it advises.
RUNS: dict[str, tuple[tuple[object, ...], list[str]]] = {
    "mean": (("-g", 2, "--method", "mean"), ["gqa-eval", "gqa-convert", "gqa-uptrain"]),
    "random": (
        ("-g", 2, "--method", "random", "--seed", 3),
        ["gqa-eval", "gqa-convert", "gqa-uptrain"],
    ),
    "aligned": (
        ("-g", 1, "--method", "aligned", "--device", "cpu"),
        ["gqa-eval", "gqa-convert", "gqa-uptrain"],
    ),
    "calibrated": (("-g", 2, "--method", "calibrated", *SHORT), ["gqa-convert"]),
    "refined": (("-g", 2, "--method", "refined", "--refine-steps", 1, *LITTLE), ["gqa-uptrain"]),
    "on little text": (
        ("-g", 2, "--method", "refined", "--refine-steps", 1, *SHORT),
        ["gqa-convert"],
    ),
    "unmeasured": (
        ("-g", 2, "--method", "calibrated", "--no-check", "--seed", 1, *SHORT, "-o", "the output"),
        ["gqa-eval", "gqa-convert"],
    ),
    "by layer": (("-g", "1,4", "--method", "mean"), ["gqa-eval", "gqa-convert", "gqa-uptrain"]),
    "nothing merged": (("-g", 4, "--dtype", "bfloat16"), []),
}


@pytest.mark.parametrize("name", RUNS)
def test_advised_commands_are_read_by_their_programs(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the names and options that were given."""
    call_good_up_to(monkeypatch, 0.0)  # a random model has nothing to lose
    arguments, programs = RUNS[name]
    done = run("it's a model", *arguments)
    assert done.code == 0, done.err
    commands = advised(done)
    assert [words[0] for words in commands] == programs
    written = re.search(r"^written     (.*): \S+ \S+ in ", done.out, re.MULTILINE)
    assert written
    for words in commands:
        params = parse(words)
        if words[0] == "gqa-eval":
            assert params["models"] == ("it's a model", written[1])
            assert params["data"] == (("stdlib:heldout",),), "perplexity is measured on text"
        else:
            assert params["model"] == ("it's a model" if words[0] == "gqa-convert" else written[1])
        if words[0] == "gqa-convert":
            assert params["method"] == "refined"
            is_replaced = bool(params["overwrite"])
            assert is_replaced == (name == "on little text")
            assert is_replaced or not (params["output"] and params["output"].exists())
            given = dict(zip(map(str, arguments), map(str, arguments[1:]), strict=False))
            if is_replaced:  # with more tokens
                del given["--tokens"]
            repeated = {option[2:]: value for option, value in given.items() if option in REPEATED}
            assert {option: str(params[option]) for option in repeated} == repeated


REPEATED = ("--seed", "--device", "--tokens", "--context")


def test_the_command_that_measures_perplexity_and_recall_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is printed, but for fewer tokens."""
    few_questions(monkeypatch)
    monkeypatch.chdir(tmp_path)
    copy_source(tmp_path, "a model")
    done = run("a model", "-g", 2, "--method", "first")
    assert "quality     not measured; to measure perplexity and recall: gqa-eval" in done.out
    words = next(words for words in advised(done) if words[0] == "gqa-eval")
    words[words.index("20000")] = "600"
    measured = run(*words[1:], "--context", 128, program="gqa-eval")
    assert measured.code == 0, measured.err
    assert re.match(
        r"damaged    a model-gqa2-first: 2 of 8 KV heads, KV cache 4x smaller, "
        r"perplexity x\S+ .*, recall \d+% -> ",
        measured.out,
    )


@pytest.mark.usefixtures("alone")
def test_the_commands_that_improve_the_result_do(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The better method, then the training that its output advises; a base model that no record
    names is named.
    """
    call_good_up_to(monkeypatch, 0.0)
    train_on_few_tokens(monkeypatch)
    (here / "elsewhere").mkdir()
    # No path that others could use is recorded
    monkeypatch.setattr(
        "gqa.convert.summary.relative_path", lambda directory, out: None
    )  # as with the user's name in it
    done = run("it's a model", "-g", 2, "--method", "calibrated", *LITTLE, "-o", "elsewhere/out")
    (words,) = advised(done)
    done = run(*words[1:], "--refine-steps", 1)
    assert done.code == 0, done.err
    (words,) = advised(done)
    assert words == ["gqa-uptrain", "elsewhere/out-refined", "--teacher", "it's a model"]
    with fresh_accelerator():
        done = run(*words[1:], program="gqa-uptrain")
    assert done.code == 0, done.err
    assert Path("elsewhere/out-refined-uptrained/config.json").is_file()
    (words,) = advised(done)
    assert words[:3] == ["gqa-eval", "it's a model", "elsewhere/out-refined-uptrained"]
    measured = run(*words[1:], "--tokens", 300, program="gqa-eval")
    assert measured.code == 0, measured.err


def test_a_conversion_on_little_text_is_repeated_on_more_before_it_is_distilled(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same place, as the plan of the command shows."""
    call_good_up_to(monkeypatch, 0.0)
    refine = ("--method", "refined", "--refine-steps", 1, "-o", "the output")
    done = run("it's a model", "-g", 2, *refine, *SHORT)
    assert (
        "convert again on 65,536 tokens of text, the default, before you uptrain it: " in done.out
    )
    (words,) = advised(done)
    assert parse(words)["tokens"] is None
    assert parse(words)["output"] == Path("the output")
    run(*words[1:], "--dry-run").expect(err="")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_measured_ends_with_a_warning(method: str, here: Path) -> None:
    """It says what to do; also with --quiet. A method that reads nothing leaves no usable result,
    one that reads the weights may.

    One that is measured needs none.
    """
    text = SHORT if METHODS[method].reads == "text" else ()
    steps = ("--refine-steps", 1) if "training" in METHODS[method].settings else ()
    done = run("it's a model", "-g", 2, "--method", method, *text, *steps, "-q")
    done.expect(out="")
    advice = {
        "text": "",
        "weights": f"warning: --method {method} does not run the model, so the quality of the "
        "result was not measured. Measure it with gqa-eval. Unless the verdict is good, use "
        "--method refined, or train it: gqa-uptrain ",
        "nothing": f"warning: the result of --method {method} is not usable until it is trained: "
        "gqa-uptrain ",
    }
    expected = advice[METHODS[method].reads]
    assert done.err.startswith(expected)
    assert bool(done.err) == bool(expected)


def test_nothing_is_advised_for_a_good_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model has little to lose; on so little text the interval is wide."""
    call_good_up_to(monkeypatch, 1.4)
    done = run("it's a model", "-g", 2, *SHORT)
    measured = re.search(r"^quality     good: perplexity x(\d\.\d+) ", done.out, re.MULTILINE)
    assert measured, done.out
    assert float(measured[1]) < 1.4  # on which side of 1 it is depends on the text
    assert "next " not in done.out
    assert advised(done) == []


def call_damaged(monkeypatch: pytest.MonkeyPatch, steep: float) -> None:
    """Call every result damaged, and a rise of the drift by `steep` in one layer steep."""
    # A tiny random model loses so little that its results are never damaged
    monkeypatch.setattr("gqa.convert.verdict.DAMAGED_RATIO", 0.5)
    monkeypatch.setattr("gqa.convert.advice._STEEP_DRIFT", steep)


@pytest.mark.parametrize("output", [(), ("-o", "the output")])
def test_the_layer_in_which_a_loss_begins_is_named_with_a_conversion_that_keeps_its_heads(
    output: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_damaged(monkeypatch, steep=0.0)
    done = run("it's a model", "-g", 2, "--method", "calibrated", *SHORT, *output)
    (made,) = [path for path in here.iterdir() if path.name not in MODELS]
    first, second = json.loads((made / "gqa_conversion.json").read_text())["layer_drifts"]
    layer = 0 if first >= second - first else 1
    assert f"the loss begins in layer {layer + 1} of 2: after it, the hidden states" in done.err

    (words,) = [words for words in advised(done) if "," in parse_heads(words)]
    kept = ["2", "2"]
    kept[layer] = "4"
    assert parse_heads(words) == ",".join(kept)
    run(*words[1:]).expect()
    assert len([path for path in here.iterdir() if path.name not in MODELS]) == 2


def test_no_layer_is_named_where_no_drift_is_steep(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_damaged(monkeypatch, steep=2.0)
    done = run("it's a model", "-g", 2, "--method", "calibrated", *SHORT)
    assert "the converted model is damaged" in done.err
    assert "the loss begins in layer" not in done.err


def test_no_layer_is_named_where_layers_cannot_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral is not among the types with custom modeling code for that."""
    call_damaged(monkeypatch, steep=0.0)
    tiny_checkpoint(tmp_path / "model", "mixtral", kv_heads=4)
    monkeypatch.chdir(tmp_path)
    done = run("model", "-g", 2, "--method", "calibrated", *SHORT)
    assert "the converted model is damaged" in done.err
    assert "the loss begins in layer" not in done.err


def test_no_command_is_advised_that_the_model_does_not_allow(here: Path) -> None:
    """Without a tokenizer it can be neither measured on text nor trained."""
    done = run("no tokenizer", "-g", 2, "--method", "mean")
    assert (
        "quality     not measured: the model has no tokenizer that transformers can load\n"
        in done.out
    )
    assert [words[0] for words in advised(done)] == ["gqa-convert"]
    assert done.err.endswith(" is not usable until it is trained\n")


# --------------------------------------------------------------------------------------------- help


def examples(program: str) -> list[list[str]]:
    """The words of the examples in --help."""
    epilog = str(COMMANDS[program].epilog).partition("Documentation:")[0]
    text = epilog.partition("Examples:")[2].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.strip().splitlines()]
    launched = [line[line.index("-m") + 1 :] if "-m" in line else line for line in lines]
    return [[words[0].replace("gqa.", "gqa-"), *words[1:]] for words in launched]


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_of_help_are_read_by_their_programs(program: str) -> None:
    commands = examples(program)
    assert len(commands) >= 3
    for words in commands:
        assert words[0] == program
        parse(words)


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_of_help_have_names_that_defaults_make(program: str) -> None:
    """A conversion is named after its heads and its method."""
    words = [word for words in examples(program) for word in words[1:]]
    names = [word for word in words if re.search(r"-mha-gqa", word)]
    pattern = rf"examples/stdlib-mha-gqa\d+-({'|'.join(METHODS)})"
    assert all(re.fullmatch(pattern, name) for name in names), names
    assert bool(names) == (program in ("gqa-uptrain", "gqa-eval"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_of_help_begin_with_a_model_of_this_repository(program: str) -> None:
    words = examples(program)[0]
    names = [word for word in words if word.startswith("examples/")]
    assert names
    base = re.sub(r"-(gqa\d+)-\w+$", "", names[0])
    assert (ROOT / base / "config.json").is_file()


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_every_default(program: str) -> None:
    """Also 0, which is equal to False. Of a flag that is off it says nothing."""
    shown = "".join(run("--help", program=program).out.split())
    checked = 0
    for name, field in KINDS[program].__dataclass_fields__.items():
        default, is_option = (
            field.default,
            not (field.metadata["argument_metavar"] or field.metadata["expert"]),
        )
        if (
            is_option
            and default not in (None, ())
            and default is not MISSING
            and default is not False
        ):
            values = default if isinstance(default, tuple) else [default]
            texts = ["on" if value is True else re.sub(r"\.0$", "", str(value)) for value in values]
            text = field.metadata["help"]
            if "[default: " not in text:  # in other words
                text += f" [default: {','.join(texts)}]"
            assert "".join(text.split()) in shown, name
            checked += 1
    assert checked >= 4


def test_a_default_of_zero_is_a_default() -> None:
    shown = [
        default_text(value) for value in (0, 0.0, 3e-4, True, False, None, (), ("a", "b"), "x")
    ]
    on = ["0", "0", "0.0003", "on"]
    assert shown == [
        *(f"  [default: {text}]" for text in on),
        "",
        "",
        "",
        "  [default: a,b]",
        "  [default: x]",
    ]
