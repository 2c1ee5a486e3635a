"""What a finished training advises: the command that measures its result; if no step helped, a
lower learning rate, or more tokens.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.base_model import find_local_base
from gqa.checkpoint.provenance import PROVENANCE, object_in, read_record
from gqa.convert.advice import EVALUATION_TEXT, evaluation_line
from gqa.core.options import flag
from gqa.corpus.specs import heldout_of_built_in, parse_self
from gqa.uptrain.optimizer import base_rate, is_relative
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.setup import OpenedRun
from gqa.uptrain.state_files import TrainingProgress

# After a training that did not help: a tenth of the learning rate, or ten times the tokens
_FACTOR = 10


def next_line(run: OpenedRun, progress: TrainingProgress) -> str:
    """How to measure the result against its base model, with a command that runs as it is printed;
    of a result that equals the model before training, how to train it otherwise.

    Pairs of text are the user's own: of an encoder-decoder it says what gqa-eval needs.
    """
    options = run.options
    if progress.is_unchanged:
        return train_otherwise(options, progress)
    if run.config.is_encoder_decoder:
        return "measure it on pairs of text: see --data and --target-column of gqa-eval"

    further = []
    baseline, revision = _baseline(run)
    if revision:
        further += ["--revision", revision]
    if options.device:
        further += ["--device", options.device]
    if options.trust_remote_code:
        further.append("--trust-remote-code")

    models = [_as_typed(baseline), _as_typed(str(options.output))]
    note = ""
    if EVALUATION_TEXT in (options.validation, heldout_of_built_in(options.data)):
        note = " (slightly optimistic, because this text has chosen the weights)"
    return f"measure it{note}: {evaluation_line(models, run.config, further)}"


def train_otherwise(options: UptrainOptions, progress: TrainingProgress) -> str:
    """How to train again, after a training of which no step helped."""
    return (
        f"repeat the command with --overwrite --learning-rate {lower_rate(options)}; if that does "
        f"not help, with --overwrite {more_tokens(options, progress)}"
    )


def lower_rate(options: UptrainOptions) -> str:
    """A tenth of the learning rate, as it is typed: `0.03%`, or `1e-05`."""
    rate = base_rate(options) / _FACTOR
    return f"{100 * rate:g}%" if is_relative(options) else f"{rate:g}"


def more_tokens(options: UptrainOptions, progress: TrainingProgress) -> str:
    """The options for more tokens; the length was given in one of three ways, or not at all."""
    more = _FACTOR * progress.tokens
    length = f"--tokens {more}"
    given = [flag(name) for name in ("alpha", "steps") if options.is_set(name)]

    if options.is_generated:
        stated, is_plain = parse_self(options.data[0])
        if stated and more > stated:
            source = "self:plain" if is_plain else "self"
            length = f"--data {source}:{more}"
            if options.is_set("tokens"):
                length += f" --tokens {more}"
            given = [f"--data {options.data[0]}", *given]

    instead = f" instead of {' and '.join(given)}" if given else ""
    return f"{length}{instead}"


def _baseline(run: OpenedRun) -> tuple[str, str | None]:
    """What the result is compared with, and its --revision for gqa-eval.

    With a teacher that is the teacher. Otherwise the base model, or if that is not there the model
    before training. The revision is what the user passed for that model, to gqa-uptrain or to
    gqa-convert; None for a local one.
    """
    options = run.options
    record = read_record(run.checkpoint, PROVENANCE)
    base_record = object_in(record, "source")
    base = find_local_base(run.checkpoint, base_record)
    name_at_hub = None
    if base is None and "path" not in base_record:
        name_at_hub = _text(base_record.get("model"))

    baseline = options.teacher if options.distills else base or name_at_hub or options.model
    if baseline == options.model:
        return baseline, options.revision
    if baseline == name_at_hub:
        return baseline, _text(object_in(record, "options").get("revision"))
    return baseline, None


def _text(value: Any) -> str | None:
    """A value of a record, which users edit, if it is text."""
    return value if isinstance(value, str) else None


def _as_typed(name: str) -> str:
    """A path below the working directory, from there; any other name as it is."""
    path = Path(name)
    with suppress(OSError, ValueError):  # it is elsewhere; or the working directory is gone
        if path.is_absolute():
            return str(path.relative_to(Path.cwd()))
    return name
