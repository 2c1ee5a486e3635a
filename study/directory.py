"""The directory of a study: its rows, its report and, in `.work`, the conversions and trainings of
configurations that are not measured yet.

What the rows were measured with is in the rows themselves; `.work` is marked and locked
(core/run_directory.py), and goes when all configurations are measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gqa.checkpoint.write import system_errors
from gqa.core.errors import RefusedError
from gqa.core.run_directory import RunDirectory, differences, read_mark, refuse_another
from gqa.study.options import ADVICE, ELSEWHERE, names_of_identity
from gqa.study.rows import FILES, ROWS, Row, read_rows

WORK = ".work"
WORK_PURPOSE = "study"
CONVERSION_PURPOSE = "conversion"


class StudyDirectory:
    """The directory of one study.

    Attributes:
        path: Where rows and reports are.
        work: Where unfinished work is, below `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run_directory = RunDirectory(path / WORK, WORK_PURPOSE)
        self.work = self._run_directory.path

    def check(self, identity: Row, overwrite: bool) -> None:
        """Raise RefusedError if the directory contains files but no study, or, unless `overwrite`,
        rows of a study whose options differ from `identity`. Also if its `.work` was made by
        somebody else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RefusedError(f"{self.path} exists and is not a directory; {ELSEWHERE}")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._is_study():
            raise RefusedError(f"{self.path} exists and holds no study; {ELSEWHERE}")
        self._run_directory.refuse_foreign("made by gqa-ablate")

        rows = read_rows(self.path)
        identity_before = next((row["options"] for row in rows.values()), identity)
        changed = differences(identity, identity_before, names_of_identity())
        if changed and not overwrite:
            advice = f"{ELSEWHERE}, the same options, or start over with --overwrite"
            refuse_another(self.path, "another study", changed, advice)

    def _is_study(self) -> bool:
        """Whether gqa-ablate made what is in the directory: it has rows of a study, and then its
        report and pictures are ours too; or the marked `.work` of a study that has no rows yet, and
        then there are no others.
        """
        if read_rows(self.path):
            return True
        others = [name for name in FILES if name != ROWS and (self.path / name).exists()]
        return read_mark(self.work) is not None and not others

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the study; remove `.work` at the end if it is empty.

        Raises RefusedError if another process runs the same study, OutputError if nothing can be
        written.
        """
        with system_errors(f"{self.path} cannot be written", ADVICE):
            self._run_directory.claim()
        busy = f"another run is working on {self.path}; wait for it, or {ELSEWHERE}"
        with self._run_directory.held(busy):
            yield

    def start_over(self) -> None:
        """Remove the rows, the report and all unfinished work of the study that was here before."""
        self.remove_work()
        # A report without rows is not ours: see `_is_study`
        ours = FILES if read_rows(self.path) else [ROWS]
        for name in ours:
            (self.path / name).unlink(missing_ok=True)

    def conversion(self, name: str) -> RunDirectory:
        """Where a conversion of this name, and what is trained from it, is kept until its
        configurations are measured.
        """
        return RunDirectory(self.work / name, CONVERSION_PURPOSE)

    def remove_work(self, keep: Collection[str] = ()) -> None:
        """Remove all conversions but those to `keep`, and what was trained from them.

        Nothing else in `.work`.
        """
        for path in self.work.iterdir():
            conversion = self.conversion(path.name)
            if path.name not in keep and conversion.is_ours():
                conversion.remove()
