"""Defaults that depend on the checkpoint or the data: teacher, text, length, scope, block and batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.methods import METHODS
from gqa.corpus.sources import is_self, parse_self
from gqa.uptrain.options import AUTO_TEACHER, NO_TEACHER, TrainOptions

TOKENS = 512_000  # to train on by default
_STEPS = 250  # of a run at least, if smaller batches and blocks allow it
_BATCH, _BLOCK = 8, 256  # most blocks of a step, fewest tokens of a block


def settle(
    options: TrainOptions, checkpoint: Checkpoint, headers_only: bool = False
) -> tuple[TrainOptions, Checkpoint | None, str]:
    """The options with teacher, data, length, repeats and scope decided; the teacher's checkpoint; and its name, or
    why there is none. Raises RefusedError if there is neither text nor a teacher to write it.
    """
    record = read_record(checkpoint, PROVENANCE)
    conversion = record if isinstance(record, dict) else {}  # users edit such files
    parts = (conversion.get("source"), conversion.get("options"))
    source, conversion_options = (part if isinstance(part, dict) else {} for part in parts)
    teacher, name, teacher_text = None, NO_TEACHER, "--teacher none"
    if options.teacher == AUTO_TEACHER:
        teacher, teacher_text = find_base(checkpoint, source, headers_only)
        name = (teacher.hub_id or str(teacher.directory)) if teacher else NO_TEACHER
    elif options.teacher != NO_TEACHER:
        name = options.teacher
        converted = name == source.get("model") and not Path(name).exists()
        teacher = open_model(name, source.get("revision") if converted else None, headers_only)
        teacher_text = name + _at_commit(teacher)
    if not options.data and teacher is None:
        raise RefusedError(
            f"no --data is given, and there is no teacher that could write it ({teacher_text}); give text, or the "
            "model before conversion with --teacher"
        )
    data = options.data or ("self",)
    sampled = is_self(data[0])
    tokens = options.tokens if options.lengths or (sampled and parse_self(data[0]).tokens) else TOKENS
    method = METHODS.get(str(conversion_options.get("method")))
    train = options.train or ("attention" if method and method.aligns else "all")
    repeats = options.repeats
    if repeats is None and not sampled:
        # Without a teacher the model would learn that text repeats itself. Pairs do not repeat.
        repeats = teacher is not None and not checkpoint.config.get("is_encoder_decoder")
    return replace(options, teacher=name, data=data, tokens=tokens, train=train, repeats=repeats), teacher, teacher_text


def find_base(
    checkpoint: Checkpoint, source: dict[str, Any], headers_only: bool = False
) -> tuple[Checkpoint | None, str]:
    """The base model, which the `source` of a conversion's provenance names, at the commit that was converted, or None;
    and its name in words, or why there is none.

    A local base model is looked up by its path relative to the result, then beside the result.
    """
    if not (name := source.get("model")) or not isinstance(name, str):
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"
    assert checkpoint.directory is not None
    directory = checkpoint.directory.resolve()
    candidates = [directory / str(source["path"])] if source.get("path") else []
    candidates += [directory.with_name(name)] if Path(name).name == name else []
    local = next((str(path.resolve()) for path in candidates if path.is_dir()), None)
    if local is None and "path" in source:  # it was local at the conversion
        return None, f"the base model {name} is not where it was; --teacher says where it is now"
    try:
        base = open_model(local or name, None if local else source.get("revision"), headers_only)
    except (RefusedError, OSError) as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    return base, f"{local or name}{_at_commit(base)}, the base model; --teacher none is without"


def _at_commit(teacher: Checkpoint) -> str:
    return f" at commit {teacher.revision[:12]}" if teacher.revision else ""


def settle_steps(options: TrainOptions, data_tokens: int, longest: int, ranks: int) -> TrainOptions:
    """The options with the tokens of a block and the blocks of a step decided.

    By default a step has eight blocks of `longest` tokens. If that makes less than 250 steps, a step has fewer blocks,
    and blocks are shorter: with few tokens the number of steps decides the result (docs/uptraining.md). A constant
    learning rate keeps the default, so that a longer run begins with the steps of a shorter one. `ranks` share a step.
    """
    tokens = options.tokens or data_tokens
    if options.alpha is not None:
        tokens = int(options.alpha * (options.pretraining_tokens or data_tokens))
    short = options.steps is None and options.schedule != "constant"
    block, batch = options.context or longest, options.batch_size
    while short and options.context is None and tokens < _STEPS * block and block // 2 >= _BLOCK:
        block //= 2
    if batch is None:
        unit = ranks * (options.micro_batch or 1)
        target = min(_BATCH, tokens // (_STEPS * block)) if short else _BATCH
        batch = max(1, target // unit) * unit
    return replace(options, context=block, batch_size=batch)
