"""What a run does where its options leave it open: who teaches, on which text, how long, which weights train, and how
much of the text a step takes.
"""

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

TOKENS = 512_000  # to train on where nothing says how many
_STEPS = 250  # that a run has at least, where smaller batches and blocks can give it them
_BATCH, _BLOCK = 8, 256  # blocks of a step at most, tokens of a block at least


def settle(
    options: TrainOptions, checkpoint: Checkpoint, headers_only: bool = False
) -> tuple[TrainOptions, Checkpoint | None, str]:
    """The options with the teacher, data, length, repeats and scope decided; the teacher's checkpoint; and for people
    which one it is, or why there is none. Raises RefusedError where there is neither text nor a teacher to write it.
    """
    record = read_record(checkpoint, PROVENANCE)
    conversion: dict[str, Any] = record if isinstance(record, dict) else {}
    teacher, told = None, "--teacher none"
    if options.teacher == AUTO_TEACHER:
        teacher, told = find_base(checkpoint, conversion, headers_only)
    elif options.teacher != NO_TEACHER:
        teacher = open_model(options.teacher, _recorded_commit(options.teacher, conversion), headers_only)
        told = options.teacher + _at_commit(teacher)
    if not options.data and teacher is None:
        raise RefusedError(
            f"no --data is given, and there is no teacher that could write it ({told}); give text, or the model before "
            "conversion with --teacher"
        )
    name = NO_TEACHER if teacher is None else options.teacher
    if name == AUTO_TEACHER and teacher is not None:
        name = teacher.hub_id or str(teacher.directory)
    data = options.data or ("self",)
    counted = is_self(data[0]) and parse_self(data[0]).tokens
    tokens = options.tokens if options.lengths or counted else TOKENS
    train = options.train or ("attention" if _aligned(conversion) else "all")
    found = replace(options, teacher=name, data=data, tokens=tokens, train=train)
    if options.repeats is None and not is_self(data[0]):
        # A teacher says what to make of text that repeats itself; without one it is learnt that text does.
        pairs = bool(checkpoint.config.get("is_encoder_decoder"))  # of which none repeats itself
        found = replace(found, repeats=bool(found.distills) and not options.mask_documents and not pairs)
    return found, teacher, told


def _aligned(conversion: dict[str, Any]) -> bool:
    """Whether heads were merged by a method that looks at the model."""
    chosen = conversion.get("options")
    how = METHODS.get(str(chosen.get("method"))) if isinstance(chosen, dict) else None
    return how is not None and how.aligns


def find_base(
    checkpoint: Checkpoint, conversion: dict[str, Any], headers_only: bool = False
) -> tuple[Checkpoint | None, str]:
    """The base model that a conversion's provenance names, at the commit that was converted, or None; and which it is
    or why there is none, for people.

    It is looked for where it lay from the result, beside the result, and at the hub where it came from there.
    """
    source = conversion.get("source")
    if not isinstance(source, dict) or not isinstance(name := source.get("model"), str) or not name:
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"
    assert checkpoint.directory is not None
    here = checkpoint.directory.resolve()
    places = [here / str(source["path"])] if source.get("path") else []
    places += [here.with_name(name)] if Path(name).name == name else []
    found = next((str(place.resolve()) for place in places if place.is_dir()), None)
    if found is None and "path" in source:  # it was a local one
        return None, f"the base model {name} is not where it was; --teacher says where it is now"
    try:
        base = open_model(found or name, None if found else _recorded_commit(name, conversion), headers_only)
    except (RefusedError, OSError) as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    return base, f"{found or name}{_at_commit(base)}, the base model; --teacher none is without"


def _recorded_commit(name: str, conversion: dict[str, Any]) -> str | None:
    """The commit of the hub id `name` that was converted, if the conversion's provenance has it."""
    source = conversion.get("source")
    if not isinstance(source, dict) or source.get("model") != name or Path(name).exists():
        return None
    revision = source.get("revision")
    return revision if isinstance(revision, str) else None


def _at_commit(teacher: Checkpoint) -> str:
    return f" at commit {teacher.revision[:12]}" if teacher.revision else ""


def settle_steps(options: TrainOptions, have: int, longest: int, ranks: int) -> TrainOptions:
    """The options with the tokens of a block and the blocks of a step decided, of `have` tokens of data.

    Blocks are the `longest` that the model reads and a step has eight of them. A run that had less than 250 steps then
    takes fewer, and shorter blocks where one is too many: what few tokens bring is a matter of steps
    (docs/uptraining.md). With a constant rate it does not, so that the first steps of a longer run are a shorter one.
    The blocks of a step are shared by `ranks`.
    """
    tokens = options.tokens or have
    if options.alpha is not None:
        tokens = int(options.alpha * (options.pretraining_tokens or have))
    short = options.steps is None and options.schedule != "constant"
    block, batch = options.context or longest, options.batch_size
    while short and options.context is None and tokens < _STEPS * block and block // 2 >= _BLOCK:
        block //= 2
    if batch is None:
        unit = ranks * (options.micro_batch or 1)
        wanted = min(_BATCH, tokens // (_STEPS * block)) if short else _BATCH
        batch = max(1, wanted // unit) * unit
    return replace(options, context=block, batch_size=batch)
