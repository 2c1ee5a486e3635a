"""gqa: all commands under one name. Each is loaded when it is called; nothing here imports torch."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from gqa.checkpoint.console import CONTEXT_SETTINGS, near, run, version_option

# Where each command is, as `command` and `main`, and what it does.
COMMANDS = {
    "convert": ("gqa.convert.cli", "Write a checkpoint with fewer (or more) key/value heads."),
    "calibrate": ("gqa.convert.calibrate_cli", "Find out how heads are best merged, to convert by it later."),
    "uptrain": ("gqa.uptrain.cli", "Train a converted checkpoint further."),
    "eval": ("gqa.eval.cli", "Compare checkpoints: quality, recall, memory, speed."),
    "ablate": ("gqa.eval.study.cli", "Measure which method, how many heads and how much training a model wants."),
    "run": ("gqa.recipe", "Convert, train and evaluate as a recipe says."),
}
_EPILOG = """\b
Examples:
  gqa convert --groups 2 MODEL
  gqa eval MODEL MODEL-gqa2 --data heldout.jsonl
  gqa run recipe.yaml --dry-run
"""


class _Group(click.Group):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            told = near(args[0], COMMANDS) or f"; choose {', '.join(COMMANDS)}"
            raise click.UsageError(f"There is no command {args[0]}{told}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])


@click.command(cls=_Group, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG, invoke_without_command=True)
@version_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """Convert checkpoints with multi-head attention to grouped-query attention, train and evaluate them.

    `gqa convert` is also `gqa-convert`, and so on. Each command has its own --help.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def call(name: str, words: list[str]) -> None:
    """Run one of the commands as its own program runs it: the same words, messages and exit codes."""
    sys.argv = [f"gqa-{name}", *words]
    import_module(COMMANDS[name][0]).main()


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS and "_GQA_COMPLETE" not in os.environ:
        call(words[0], words[1:])
    else:
        run(command, "gqa", "nothing was done")
