"""What options leave open and the checkpoint of a run determines: teacher, data, length, scope."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gqa.checkpoint.base_model import at_commit, find_local_base
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, object_in, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.methods.table import METHODS
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import ranks
from gqa.core.errors import RefusedError, explain
from gqa.corpus.specs import parse_self
from gqa.uptrain.options import AUTO_TEACHER, NO_TEACHER, Scope, UptrainOptions

DEFAULT_TOKENS = 512_000  # to train on by default


def decide_defaults(
    options: UptrainOptions, checkpoint: Checkpoint, config: Any, watcher: Watcher = SILENT
) -> tuple[UptrainOptions, Checkpoint | None, str]:
    """Decide what the options leave open and the checkpoint determines.

    Args:
        options: As the user passed them.
        checkpoint: The model that is trained.
        config: transformers' config of it.
        watcher: Is warned if the base model is named, but cannot teach.

    Returns:
        The options with teacher, data, length, repeats and scope decided; the teacher's checkpoint;
        and its name, or why there is none.

    Raises:
        RefusedError: There is neither text nor a teacher to write it.
    """
    record = read_record(checkpoint, PROVENANCE)
    base_record = object_in(record, "source")
    teacher, name, teacher_text = _find_teacher(options, checkpoint, base_record)
    if not options.data and teacher is None:
        if record is None and options.teacher == AUTO_TEACHER:
            raise RefusedError(
                f"{checkpoint.name} is not a converted model (no {PROVENANCE}); run gqa-convert "
                "first, or pass its base model with --teacher, or train on text alone with --data "
                "and --teacher none"
            )
        raise RefusedError(
            f"no --data was passed, and there is no teacher to generate the text ({teacher_text}); "
            "pass text with --data, or the base model with --teacher"
        )
    names_a_base = bool(base_record.get("model"))
    is_lost = teacher is None and options.teacher == AUTO_TEACHER and names_a_base
    if is_lost and ranks().is_main_process:
        watcher.warn(
            f"there is no teacher ({teacher_text}): the model is trained on text alone. To train "
            "without a teacher on purpose, pass --teacher none"
        )

    options = replace(options, data=options.data or ("self",))
    states_tokens = options.is_generated and parse_self(options.data[0])[0] is not None
    tokens = options.tokens
    if not options.lengths and not states_tokens:
        tokens = DEFAULT_TOKENS

    repeats = options.repeats
    if repeats is None and not options.is_generated:
        # Without a teacher the model would learn that text repeats itself. Pairs do not repeat.
        repeats = teacher is not None and not config.is_encoder_decoder

    method = METHODS.get(str(object_in(record, "options").get("method")))
    attention_fits = method is not None and method.computes_maps
    usual_scope: Scope = "attention" if attention_fits else "all"
    train = options.train or usual_scope

    options = replace(options, teacher=name, tokens=tokens, train=train, repeats=repeats)
    return options, teacher, teacher_text


def _find_teacher(
    options: UptrainOptions, checkpoint: Checkpoint, base_record: dict[str, Any]
) -> tuple[Checkpoint | None, str, str]:
    """The teacher's checkpoint; its name as an option; and its name in words, or why there is
    none.
    """
    if options.teacher == NO_TEACHER:
        return None, NO_TEACHER, "--teacher none"

    if options.teacher == AUTO_TEACHER:
        base, text = _find_base(checkpoint, base_record)
        if base is None:
            return None, NO_TEACHER, text
        return base, base.hub_id or str(base.directory), text

    name = options.teacher
    is_base_at_hub = name == base_record.get("model") and not Path(name).exists()
    revision = base_record.get("revision") if is_base_at_hub else None  # the one that was converted
    teacher = open_model(name, revision, headers_only=True)
    if teacher.directory.resolve() == checkpoint.directory.resolve():
        raise RefusedError(
            f"the teacher {name} is the model itself, so there is nothing to learn; pass its base "
            f"model with --teacher, or --teacher {NO_TEACHER} to train on text alone"
        )
    return teacher, name, name + at_commit(teacher)


def _find_base(
    checkpoint: Checkpoint, base_record: dict[str, Any]
) -> tuple[Checkpoint | None, str]:
    """The base model at the commit that was converted.

    A local base model is looked up by its path relative to the result, then beside the result.

    Args:
        checkpoint: The converted model.
        base_record: The part of the conversion's record that names the base model.

    Returns:
        The base model or None; and its name in words, or why there is none.

    Raises:
        OSError: This machine is the cause: its disk is full, for example.
    """
    name = base_record.get("model")
    if not name or not isinstance(name, str):
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"

    local = find_local_base(checkpoint, base_record)
    if local is None and "path" in base_record:  # it was local at the conversion
        return None, f"the base model {name} was moved or deleted; pass it with --teacher"

    location = local or name
    revision = None if local else base_record.get("revision")
    try:
        base = open_model(location, revision, headers_only=True)
    except RefusedError as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    text = f"{location}{at_commit(base)}, the base model (--teacher none: train on text alone)"
    return base, text
