"""Saves the state of a training: every so many steps, from time to time, and when it stops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from gqa.core.console import Watcher
from gqa.core.errors import OutputError
from gqa.corpus.streamed import Bookmark
from gqa.uptrain.evaluation import Weights
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.setup import ReadyRun
from gqa.uptrain.state_files import TrainingProgress, state_record

STATE_SECONDS = 600  # between two states, at least
STATE_SHARE = 50  # between two states, at least so many times the seconds that saving one takes


def states_kept(options: UptrainOptions) -> int:
    """How many states of a run are kept. While one is saved, they are still there."""
    return 2 if options.save_every else 1


class Saver:
    """Saves states: every `save_every` steps, by default by time; and when the run stops."""

    def __init__(self, run: ReadyRun, wrapped: Any, optimizer: Any, watcher: Watcher) -> None:
        """`wrapped`: the `TrainingModel` of the run, as accelerate wraps it."""
        self._run = run
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._watcher = watcher
        self._saved_at = time.monotonic()
        self._save_seconds = 0.0  # that the last save took

    def is_due(self, step: int) -> bool:
        """Whether to save after this step.

        By time: every ten minutes, or less often, so that the run spends less than a fiftieth of
        its time on it.
        """
        is_last = step == self._run.dataloader.steps
        every = self._run.options.save_every
        if every:
            return is_last or step % every == 0
        if is_last:  # the trained weights are saved next
            return False

        interval = max(STATE_SECONDS, STATE_SHARE * self._save_seconds)
        is_time = time.monotonic() - self._saved_at >= interval
        return self._run.accelerator.is_main_process and is_time

    def save(
        self,
        progress: TrainingProgress,
        best: Weights,
        bookmark: Bookmark | None,
        *,
        unreadable_text: bool,
        stops: bool,
    ) -> Path:
        """Save a state; return the directory in which it is. All ranks call it.

        If that fails, the run goes on with a warning: it may save the next one, or reach its end.
        Raises OutputError if it `stops` here.

        Args:
            progress: How far the run is.
            best: The weights with the lowest validation loss; empty if there is no validation text.
            bookmark: Where the stream of text is; None if the data is no stream.
            unreadable_text: Whether the run stops since its text cannot be read.
            stops: Whether the run stops here, for whatever reason.
        """
        run = self._run
        began = time.monotonic()
        stream = gather_object(bookmark.saved_lanes) if bookmark else []
        record = state_record(
            progress,
            run.description,
            run.options.blocks_per_step,
            stream=stream,
            unreadable_text=unreadable_text,
        )

        try:
            run.states.save(
                run.accelerator,
                self._wrapped,
                self._optimizer,
                best,
                record,
                keep=states_kept(run.options),
            )
        except OutputError as error:
            if stops:
                raise
            if run.accelerator.is_main_process:
                self._watcher.warn(f"{error}. The run goes on")

        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - began
        return run.states.directory
