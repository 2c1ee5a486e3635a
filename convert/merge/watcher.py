"""What a person sees of work on the layers of a model, and of a model that writes text."""

from __future__ import annotations

import time
from typing import Any

import click

from gqa.checkpoint.console import progress_bar
from gqa.checkpoint.errors import one_line

_LOG_SECONDS = 30.0  # between two lines


class Watcher:
    """Told of a stage that begins and of how many tokens (or `unit`s) it is; of those that are done; of a layer that
    is (or a `unit`), with its error (NaN where none was measured); and of what went otherwise than wanted. This one
    keeps it to itself.
    """

    def stage(self, name: str, total: int, unit: str = "tok") -> None: ...
    def update(self, count: int) -> None: ...
    def layer(self, index: int, layers: int, error: float) -> None: ...
    def warn(self, text: str) -> None: ...


SILENT = Watcher()


class Bar(Watcher):
    """Progress of finding maps on stderr, and the `errors` of layers: what of its output each lost.

    A bar where a person looks at it, and a line now and then in the log of a job.
    """

    def __init__(self, quiet: bool, output_bytes: int = 0) -> None:
        self._quiet, self._output_bytes = quiet, output_bytes
        self._bar: Any = None
        self._writing, self._layers = False, 0
        self.errors: dict[int, float] = {}
        self._state, self._unit, self._done, self._began, self._told = "", "", 0, time.monotonic(), time.monotonic()

    def stage(self, name: str, total: int, unit: str = "tok") -> None:
        self.close()
        self._bar, self._layers = progress_bar(total, unit, name, self._quiet), 0
        self._state, self._unit, self._done, self._began = name, unit, 0, time.monotonic()

    def update(self, count: int) -> None:
        self._bar.update(count)
        self._done, now = self._done + count, time.monotonic()
        if self._bar.disable and not self._quiet and now - self._told >= _LOG_SECONDS:
            self._told, rate = now, self._done / (now - self._began)
            told = f"{rate:,.0f}" if rate > 9 else f"{rate:.2g}"
            click.echo(f"{self._state} | {self._done:,} {self._unit} | {told} {self._unit}/s", err=True)

    def written(self, count: int) -> None:
        """Told of bytes of the output, from any thread."""
        if not self._writing:
            self.close()
            self._writing, self._bar = True, progress_bar(self._output_bytes, "B", "converting", self._quiet)
        self._bar.update(count)

    def layer(self, index: int, layers: int, error: float) -> None:
        if error == error:
            self.errors[index - 1] = error
        self._layers += 1
        counted = "layer" if self._unit == "tok" else self._unit
        self._state = f"{counted} {index}/{layers}" + (f", error {error:.3g}" if error == error else "")
        if self._bar is not None:
            if self._done:  # layers of which nothing is merged are not trained: what is left is as what was
                self._bar.total = self._done + self._done * (layers - index) // self._layers
            self._bar.set_postfix_str(self._state)

    def warn(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        click.echo(one_line(f"warning: {text}"), err=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def table(self) -> str:
        """Squared error of each layer's attention output relative to the source's, on the calibration text."""
        if not self.errors:
            return ""
        errors = list(self.errors.items())
        rows = [errors[start : start + 5] for start in range(0, len(errors), 5)]
        title = "layers      squared error of attention outputs, relative to the base model's\n"
        lines = ["on the calibration text", *("  ".join(f"{i:3d} {error:.4f}" for i, error in row) for row in rows)]
        return title + "\n".join(f"            {line}" for line in lines)
