"""What a person sees of work on the layers of a model, and of a model that writes text."""

from __future__ import annotations

import time
from typing import Any

import click

from gqa.checkpoint.console import progress_bar
from gqa.checkpoint.errors import one_line

_LOG_SECONDS = 30.0  # between two lines


class Watcher:
    """Progress on stderr unless it is `quiet`, and warnings; the `errors` of layers: what of its output each lost.

    A bar where a person looks at it, and a line now and then in the log of a job.
    """

    def __init__(self, quiet: bool = False, output_bytes: int = 0) -> None:
        self._quiet, self._output_bytes = quiet, output_bytes
        self._bar: Any = None
        self._state, self._unit, self._done, self._layers = "", "", 0, 0
        self._began = self._logged = time.monotonic()
        self.errors: dict[int, float] = {}

    def stage(self, name: str, total: int, unit: str = "tok") -> None:
        """Begin a stage of so many tokens or other units."""
        self.close()
        self._bar = progress_bar(total, unit, name, self._quiet)
        self._state, self._unit, self._done, self._layers = name, unit, 0, 0
        self._began = time.monotonic()

    def update(self, count: int) -> None:
        """Count tokens or other units that are done."""
        self._bar.update(count)
        self._done, now = self._done + count, time.monotonic()
        if self._bar.disable and not self._quiet and now - self._logged >= _LOG_SECONDS:
            self._logged, rate = now, self._done / (now - self._began)
            click.echo(f"{self._state} | {self._done:,} {self._unit} | {rate:,.2f} {self._unit}/s", err=True)

    def written(self, count: int) -> None:
        """Count bytes of the output; from any thread."""
        if self._unit != "B":
            self.stage("converting", self._output_bytes, "B")
        self.update(count)

    def layer(self, number: int, layers: int, error: float) -> None:
        """Count a layer, or a unit, with its error; NaN where none was measured."""
        if error == error:
            self.errors[number - 1] = error
        self._layers += 1
        counted = "layer" if self._unit == "tok" else self._unit
        self._state = f"{counted} {number}/{layers}" + (f", error {error:.3g}" if error == error else "")
        if self._done:  # layers of which nothing is merged are not trained: expect the rest to be like those so far
            self._bar.total = self._done + self._done * (layers - number) // self._layers
        self._bar.set_postfix_str(self._state)

    def warn(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        click.echo(one_line(f"warning: {text}"), err=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def table(self) -> str:
        """Squared error of each layer's attention output relative to the source's, on the calibration text."""
        if not self.errors:
            return ""
        errors = list(self.errors.items())
        rows = [errors[start : start + 5] for start in range(0, len(errors), 5)]
        title = "layers      squared error of attention outputs, relative to the base model's\n"
        lines = ["on the calibration text", *("  ".join(f"{i:3d} {error:.4f}" for i, error in row) for row in rows)]
        return title + "\n".join(f"            {line}" for line in lines)


SILENT = Watcher(quiet=True)
