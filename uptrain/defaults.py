"""What options leave open and the checkpoint of a run determines: teacher, data, length, scope."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gqa.checkpoint.base_model import at_commit, find_base, object_in
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.methods.table import METHODS
from gqa.core.errors import RefusedError
from gqa.corpus.specs import is_self, parse_self
from gqa.uptrain.options import AUTO_TEACHER, NO_TEACHER, Scope, TrainOptions

DEFAULT_TOKENS = 512_000  # to train on by default


def decide_defaults(
    options: TrainOptions, checkpoint: Checkpoint
) -> tuple[TrainOptions, Checkpoint | None, str]:
    """Decide what the options leave open and the checkpoint determines.

    Returns:
        The options with teacher, data, length, repeats and scope decided; the teacher's checkpoint;
        and its name, or why there is none.

    Raises:
        RefusedError: There is neither text nor a teacher to write it.
    """
    record = read_record(checkpoint, PROVENANCE)
    source = object_in(record, "source")
    teacher, name, teacher_text = _find_teacher(options, checkpoint, source)
    if not options.data and teacher is None:
        if record is None and options.teacher == AUTO_TEACHER:
            raise RefusedError(
                f"{checkpoint.name} is not a converted model (no {PROVENANCE}); run gqa-convert "
                "first, or pass a --teacher, or train on text alone with --data and --teacher "
                "none"
            )
        raise RefusedError(
            f"no --data is given, and there is no teacher to generate the text ({teacher_text}); "
            "pass text with --data, or the base model with --teacher"
        )

    data = options.data or ("self",)
    is_sampled = is_self(data[0])
    states_tokens = is_sampled and parse_self(data[0])[0] is not None
    tokens = options.tokens
    if not options.lengths and not states_tokens:
        tokens = DEFAULT_TOKENS

    repeats = options.repeats
    if repeats is None and not is_sampled:
        # Without a teacher the model would learn that text repeats itself. Pairs do not repeat.
        repeats = teacher is not None and not checkpoint.config.get("is_encoder_decoder")

    method = METHODS.get(str(object_in(record, "options").get("method")))
    has_maps = method is not None and method.reads != "nothing"
    usual_scope: Scope = "attention" if has_maps else "all"
    train = options.train or usual_scope

    options = replace(options, teacher=name, data=data, tokens=tokens, train=train, repeats=repeats)
    return options, teacher, teacher_text


def _find_teacher(
    options: TrainOptions, checkpoint: Checkpoint, source: dict[str, Any]
) -> tuple[Checkpoint | None, str, str]:
    """The teacher's checkpoint; its name as an option; and its name in words, or why there is
    none.
    """
    if options.teacher == NO_TEACHER:
        return None, NO_TEACHER, "--teacher none"

    if options.teacher == AUTO_TEACHER:
        base, text = find_base(checkpoint, source)
        if base is None:
            return None, NO_TEACHER, text
        return base, base.hub_id or str(base.directory), text

    name = options.teacher
    is_base_at_hub = name == source.get("model") and not Path(name).exists()
    revision = source.get("revision") if is_base_at_hub else None  # the one that was converted
    teacher = open_model(name, revision)
    return teacher, name, name + at_commit(teacher)
