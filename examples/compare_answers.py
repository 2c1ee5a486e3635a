"""Compare the answers of two models to the same questions.

    python examples/compare_answers.py tasks-base tasks-result

The directories are those of two runs of lm_eval with `--log_samples --output_path DIRECTORY`. For
each task it prints how many percentage points the second model gained or lost, the standard error
of this change, and the change less two standard errors: the loss is unlikely to be larger than
that. It needs nothing but Python.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

# Task, filter and metric; then the question
Scores = dict[tuple[str, str, str], dict[int, float]]


def newest_answers(directory: Path) -> dict[str, Path]:
    """For each task the file of its last run: lm_eval writes DIRECTORY/MODEL/samples_TASK_DATE."""
    if not directory.is_dir():
        sys.exit(f"error: there is no directory {directory}; run tasks.sh for this model first")
    files = [*directory.rglob("samples_*.jsonl")]
    models = sorted({str(path.parent) for path in files})
    if len(models) > 1:
        sys.exit(
            f"error: {directory} has answers of several models ({', '.join(models)}); move all but "
            "one of these directories away"
        )
    newest: dict[str, Path] = {}
    for path in sorted(files, key=lambda path: path.stem.rpartition("_")[2]):
        newest[path.stem.removeprefix("samples_").rpartition("_")[0]] = path
    return newest


def read_scores(directory: Path) -> Scores:
    """The scores that are numbers; of several runs of a task, those of the last."""
    scores: Scores = {}
    for task, path in newest_answers(directory).items():
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        for row in rows:
            for metric in row["metrics"]:
                if isinstance(row[metric], int | float):
                    by_question = scores.setdefault((task, row["filter"], metric), {})
                    by_question[row["doc_id"]] = row[metric]
    return scores


def describe_changes(base: Scores, result: Scores) -> list[str]:
    """A line for each task that has at least two questions which both models answered."""
    lines = []
    for name in sorted(base.keys() & result.keys()):
        questions = base[name].keys() & result[name].keys()
        changes = [100 * (result[name][question] - base[name][question]) for question in questions]
        if len(changes) > 1:
            error = statistics.stdev(changes) / len(changes) ** 0.5
            change = statistics.mean(changes)
            lines.append(
                f"{' '.join(name)}: {change:+.1f} points, at worst {change - 2 * error:+.1f} "
                f"(standard error {error:.1f}, {len(changes)} questions)"
            )
    return lines


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python compare_answers.py DIRECTORY_OF_BASE DIRECTORY_OF_RESULT")
    base, result = (read_scores(Path(directory)) for directory in sys.argv[1:])
    lines = describe_changes(base, result)
    if not lines:
        sys.exit("error: the directories have no answers to the same questions")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
