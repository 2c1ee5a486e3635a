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
        self._name, self._total, self._unit, self._done = "", 0, "", 0
        self._began = self._logged = time.monotonic()
        self.errors: dict[int, float] = {}

    def stage(self, name: str, total: int, unit: str = "tok") -> None:
        """Begin a stage of so many tokens, layers or other units."""
        self.close()
        self._bar = progress_bar(total, unit, name, self._quiet)
        self._name, self._total, self._unit, self._done = name, total, unit, 0
        self._began = time.monotonic()

    def update(self, count: int) -> None:
        """Count units that are done."""
        self._bar.update(count)
        self._done, now = self._done + count, time.monotonic()
        if self._bar.disable and not self._quiet and now - self._logged >= _LOG_SECONDS:
            self._logged, rate = now, self._done / (now - self._began)
            counted = f"{self._done:,} of {self._total:,} {self._unit}"
            click.echo(f"{self._name} | {counted} | {rate:,.2f} {self._unit}/s", err=True)

    def layer(self, index: int, error: float) -> None:
        """Count a layer, with its error; NaN where none was measured."""
        if error == error:
            self.errors[index] = error
            self._bar.set_postfix_str(f"error {error:.3g}")
        self.update(1)

    def written(self, count: int) -> None:
        """Count bytes of the output; from any thread."""
        if self._unit != "B":
            self.stage("converting", self._output_bytes, "B")
        self.update(count)

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
