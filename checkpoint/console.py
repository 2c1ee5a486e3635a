"""What the commands share: how options are declared, types of their values, one line for every error, exit codes.
Imports no torch.
"""

import math
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, NoReturn

import click

from gqa.checkpoint.errors import RefusedError, explain, one_line

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PRECISIONS = {"no": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ACCELERATE = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
WIDTH = 80  # characters of a line in a terminal
_LABEL = 12  # of them before what a line says
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Precision(click.Choice[str]):
    """What numbers are computed in, by any of its names. `accelerate`: the result is accelerate's name (no, bf16)."""

    def __init__(self, *choices: str, accelerate: bool = False) -> None:
        super().__init__(choices)
        self._accelerate = accelerate

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = super().convert(_PRECISIONS.get(str(value), value), param, ctx)
        return _ACCELERATE[found] if self._accelerate else found


class FloatRange(click.FloatRange):
    """A finite number in a range: of nan click's own finds no bound that it breaks."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(number := super().convert(value, param, ctx)):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class ByteSize(click.ParamType[int]):
    """`5GB`, `500MiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size; give a number with KB, MB, GB, KiB, MiB or GiB, like 5GB", param, ctx)
        size = Fraction(match[1]) * _UNITS[match[2].upper()]
        return min(max(int(size), 1), 2**62)


def read_count(text: str) -> int | None:
    """A number of tokens like 65536, 64k, 500M or 1B; None for what is no such number above zero."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    return int(Fraction(match[1]) * 1000 ** (" KMBT".index(match[2] or " "))) or None if match else None


class Count(click.ParamType[int]):
    """`64k`, `500M`, `1B`: a number of tokens, at least `least`."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if (count := read_count(str(value))) is None:
            self.fail(f"{value!r} is not a number of tokens; give one like 65536, 64k, 500M or 1B", param, ctx)
        if count < self._least:
            self.fail(f"{value} is less than {self._least} tokens", param, ctx)
        return count


class Several(click.ParamType[tuple[Any, ...]]):
    """`1,8,32`: values of another type, one or more."""

    name = "list"

    def __init__(self, kind: Any) -> None:
        self._kind = click.types.convert_type(kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = filter(None, map(str.strip, str(value).split(",")))
        found = dict.fromkeys(self._kind.convert(word, param, ctx) for word in words)
        if not found:
            self.fail(f"{value!r} names nothing; give one or more, separated by commas", param, ctx)
        return tuple(found)


class KVHeads(click.ParamType[int | tuple[int, ...]]):
    """`8`, or one number for each layer: `1,3,3,1`, or a file that holds them."""

    name = "kv heads"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:  # fmt: skip
        if isinstance(value, int | tuple):
            return value
        words = str(value)
        if not words.isdecimal() and os.path.isfile(words):
            words = Path(words).read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"[^\s,]+", words)
        if not found or not all(word.isdecimal() and 0 < int(word) < 10**6 for word in found):
            self.fail(
                f"{value!r} is no number of heads; give one from 1 on, or one for each layer with commas or in a file",
                param, ctx,
            )  # fmt: skip
        return int(found[0]) if words.strip() == found[0] else tuple(map(int, found))


_METAVARS = {click.types.IntRange: "N", click.types.IntParamType: "N", click.types.FloatRange: "X",
             click.types.FloatParamType: "X", Several: "N[,...]"}  # fmt: skip


class Option(click.Option):
    """An option whose --help is short."""

    def make_metavar(self, ctx: click.Context) -> str:
        """Short and readable: N and X for numbers, whatever they are held to."""
        short = next((name for kind, name in _METAVARS.items() if isinstance(self.type, kind)), "")
        return self.metavar or short or super().make_metavar(ctx)

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default and whether it is required: what numbers are allowed says the refusal of another."""
        return {name: told for name, told in super().get_help_extra(ctx).items() if name != "range"}


# Under which heading --help lists an option, the same in all commands; the rest is under the last.
_HEADINGS = {
    "Basic": "groups kv-budget output method methods alphas alpha steps train teacher teachers kl "
    "recall cache-bits decode memory recommend dry-run device",
    "Quality": "grouping ridge refine-steps refine-batch refine-learning-rate refine-precision "
    "learning-rate schedule warmup decay weight-decay optimizer clip batch-size distill temperature "
    "lora-rank precision calibration-precision eval-precision seed seeds kv-bytes max-loss-increase max-recall-loss "
    "protocol stride decode-batches "
    "decode-contexts decode-steps decode-repeats decode-batch decode-context",
    "Data": "data calibration tokens calibration-tokens context calibration-context train-context repeats "
    "calibration-repeats field target-field data-config split data-revision separator streaming heldout "
    "heldout-fraction heldout-tokens eval-tokens pretraining-tokens mask-documents beyond-positions",
    "Output": "dtype max-shard-size overwrite resume checksums verify-load save-every save-minutes "
    "keep-last keep-state eval-every report-to json verbose quiet",
}
_LAST = "Advanced"


class Command(click.Command):
    """A command whose --help has headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every option once, under its heading, in the order of the command."""
        heading = {f"--{name}": title for title, names in _HEADINGS.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_HEADINGS, _LAST)}
        for found in self.get_params(ctx):
            if not isinstance(found, click.Argument) and (told := found.get_help_record(ctx)):
                rows[next((heading[name] for name in found.opts if name in heading), _LAST)].append(told)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=26)

    def invoke(self, ctx: click.Context) -> Any:
        """At once it says that it has begun: to import torch and transformers takes seconds."""
        if watched() and not ctx.params.get("quiet"):
            click.echo(f"{ctx.info_name} {installed('gqa')} is starting", err=True)
        return super().invoke(ctx)


def _sources(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Sources given one by one or separated by commas; a file with a comma in its name is one."""
    found = [value.split(",") if "," in value and not os.path.exists(value) else [value] for value in values]
    words = [word.strip() for several in found for word in several]
    if values and not any(words):
        raise click.BadParameter("names nothing; give one source or more, separated by commas", ctx, param)
    return tuple(filter(None, words))


# Options of several commands, by their documented names.
_POSITIVE = click.IntRange(min=1)
SHARED: dict[str, dict[str, Any]] = {
    "--groups": {"short": "-g", "type": KVHeads(), "metavar": "G", "required": True},
    "--data": {"multiple": True, "callback": _sources, "metavar": "SOURCE[,...]"},
    "--field": {
        "default": "text", "metavar": "NAME",
        "help": "The column that holds the text, in jsonl, csv, parquet and data sets.",
    },
    "--data-config": {"metavar": "NAME", "help": "The configuration of a hub data set."},
    "--tokens": {"type": Count(), "metavar": "COUNT"},
    "--context": {"metavar": "COUNT"},
    "--device": {
        "metavar": "NAME",
        "help": "Where models run: cpu, cuda, cuda:1, mps.  [default: a GPU where there is one]",
    },
    "--precision": {"type": Precision("float32", "bfloat16", "float16")},
    "--attn-implementation": {
        "metavar": "NAME",
        "help": "How transformers computes attention: sdpa, eager, flash_attention_2 ...  "
        "[default: sdpa where the model has it]",
    },
    "--trust-remote-code": {"is_flag": True, "help": "Run code that a checkpoint brings (dangerous)."},
    "--cache-bits": {"type": click.IntRange(2, 8)},
    "--seed": {"type": click.IntRange(0, 2**31 - 1), "default": 0},
    "--revision": {"metavar": "NAME", "help": "The branch, tag or commit of a hub id."},
    "--tensor-parallel": {"type": _POSITIVE, "metavar": "N"},
    "--dry-run": {"is_flag": True},
    "--overwrite": {"is_flag": True},
    "--json": {"is_flag": True, "help": "One JSON object on stdout, everything else on stderr."},
    "--verbose": {"short": "-v", "is_flag": True, "help": "Show where an unexpected error comes from."},
    "--quiet": {"short": "-q", "is_flag": True, "help": "Print errors and warnings only."},
}  # fmt: skip


def option(*names: str, **how: Any) -> Decorator:
    """`click.option` with the default shown and what options of that name have in common."""
    flags = [name for name in names if name.startswith("--")]
    how = SHARED.get(flags[0].partition("/")[0], {}) | {"show_default": True} | how if flags else how
    short = [name] if (name := how.pop("short", "")) else []
    return click.option(*short, *names, **{"cls": Option} | how)


def with_options(*groups: Sequence[Decorator]) -> Decorator:
    """Groups of click options as one decorator; --help lists them in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def version_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--version of one command, whose name click keeps."""
    versions = "%(prog)s %(version)s (torch {}, transformers {})".format(*map(installed, ("torch", "transformers")))
    told = "Print the version, and those of torch and transformers, and exit."
    return click.version_option(installed("gqa"), message=versions, help=told)(command)


# What is left comes first, so that it never falls off a narrow terminal; the bar takes the columns that remain.
_BAR = "{desc} {percentage:3.0f}% eta {remaining} {n_fmt}/{total_fmt} {rate_fmt}{postfix} |{bar}|"


def progress_bar(total: int, unit: str, description: str, quiet: bool, done: int = 0) -> Any:
    """On stderr, or in the cell of a notebook, only where a person looks at it. Of 0 in all nobody knows the end."""
    from tqdm.auto import tqdm

    return tqdm(
        total=total, initial=done, unit=unit, unit_scale=True, desc=description, file=sys.stderr, leave=False,
        dynamic_ncols=True, bar_format=_BAR if total else None, disable=quiet or not watched(),
    )  # fmt: skip


def labelled(text: str) -> str:
    """Lines that each begin with a label, in the width of a terminal; no word is broken. What is indented (rows of
    tables, commands to copy) stays as it is.
    """
    lines = []
    for line in text.splitlines():
        if len(line) > WIDTH and not line.startswith(" "):
            told = textwrap.wrap(line[_LABEL:], WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
            line = line[:_LABEL] + ("\n" + _LABEL * " ").join(told)
        lines.append(line)
    return "\n".join(lines)


def say_device(name: object, quiet: bool) -> None:
    """Where it runs, for a person who looks at it; records of results hold it too."""
    if watched() and not quiet:
        click.echo(f"device      {name}", err=True)


def watched() -> bool:
    """Whether a person looks at what is written as it comes: at a terminal, or in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or "IPKernelApp" in getattr(shell, "config", ())


def fail(program: str, message: str, code: int) -> NoReturn:
    click.echo(one_line(f"{program}: {message}"), err=True)
    sys.exit(code)


def check_alone() -> None:
    """Raises RefusedError in a command that would do all its work once in each of several processes."""
    if (found := os.environ.get("WORLD_SIZE", "1")) != "1":
        program = click.get_current_context().find_root().info_name
        raise RefusedError(
            f"{program} runs in one process, and WORLD_SIZE is {found}; start it without torchrun or accelerate launch"
        )


def run(command: click.Command, program: str, interrupted: str) -> None:
    """Run a command; in colour where the terminal has it, unless NO_COLOR is set (no-color.org).

    Exit codes: 0 done, 2 wrong usage or refused, 130 interrupted (143 terminated), 1 anything else.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        command.main(prog_name=program, standalone_mode=False, color=False if os.environ.get("NO_COLOR") else None)
    except click.ClickException as error:
        fail(program, f"{error.format_message().rstrip('.')}; see {program} --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail(program, f"interrupted; {interrupted}", 130)
    except RefusedError as error:
        fail(program, str(error), 2)
    except OSError as error:
        fail(program, str(error), 1)
    except Exception as error:  # a defect of ours: one line all the same, the traceback on request
        from gqa.checkpoint.devices import out_of_memory

        if any(re.fullmatch("--verbose|-[a-z]*v[a-z]*", word) for word in sys.argv):  # also in -qv
            traceback.print_exc()
        if out_of_memory(error):
            fail(program, f"out of memory: {explain(error)}", 1)
        fail(program, f"unexpected {type(error).__name__}: {explain(error)}; -v shows where, please report it", 1)
