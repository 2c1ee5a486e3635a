"""What a finished conversion advises.

Every command runs as it is printed: it has the names that the user gave, quoted for a shell, and is
left out where the model does not allow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gqa.convert.estimate import duration, estimate
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.methods.base import Method
from gqa.convert.options import ConvertOptions, options_of
from gqa.convert.output import default_directory, output_of
from gqa.convert.plan import OutputTensor, Plan
from gqa.convert.summary import quality_loss, quality_text, size
from gqa.core import devices
from gqa.core.console import operand
from gqa.core.errors import RefusedError
from gqa.core.escape import shell_line
from gqa.core.options import flag
from gqa.models.classes import positions, predicts_tokens
from gqa.models.tokenizer import load_tokenizer
from gqa.models.training_memory import MAX_BLOCK, activation_memory, training_memory

_LEAST_RECALL_CONTEXT = 128  # `gqa-eval --recall` refuses a shorter context
# An estimate of memory up to this share of what there is will do: activations are known roughly.
_SURE_SHARE = 3 / 4
_EVALUATED_TOKENS = 20_000  # seconds for a small model, minutes for one of 7B on a GPU

# Options of gqa-uptrain that make activations small, and its plan (docs/guide-7b.md).
_SAVING_OPTIONS = ("--micro-batch", "1", "--gradient-checkpointing", "--dry-run")

# Options that another run of gqa-convert does not repeat: what is written where, and what is
# printed.
_NOT_REPEATED = frozenset(
    {
        "model",
        "kv_heads",
        "kv_budget",
        "method",
        "output",
        "overwrite",
        "dry_run",
        "check",
        "json",
        "verbose",
        "quiet",
    }
)


def quality_line(plan: Plan, maps: StoredMaps | None, options: ConvertOptions, out: Path) -> str:
    """The measured quality with its verdict, or why it was not measured and what measures it."""
    config = transformers_config(plan.new_config)
    if not predicts_tokens(config):
        return "not measured: the model has no head that predicts tokens"
    if text := quality_text(maps):
        return f"{quality_loss(maps).level}: {text}"
    if config.is_encoder_decoder:
        return (
            "not measured; gqa-eval measures it on pairs of text: see its options --data and "
            "--target-column"
        )
    if not _has_tokenizer(plan, options):
        return "not measured: the model has no tokenizer that transformers can load"

    command = evaluation_command(plan, options, out)
    measures = "perplexity and recall" if "--recall" in command else "perplexity"
    return f"not measured; to measure {measures}: {command}"


def next_line(
    plan: Plan,
    maps: StoredMaps | None,
    options: ConvertOptions,
    out: Path,
    source: dict[str, Any],
) -> str:
    """What improves the result: the best method that the model allows, or training; empty where
    nothing can.

    Args:
        plan: The plan of the conversion.
        options: Its options.
        out: Its result.
        source: The part of its record that names the base model.
    """
    if quality_loss(maps).level == "good":
        return ""
    if not predicts_tokens(transformers_config(plan.new_config)):
        return ""

    best = plan.available_methods[-1]
    command = conversion_command(plan, options, best)
    if best.name != plan.method_name and command:
        seconds, _ = estimate(plan, best, options.maps_options)
        takes = f"about {duration(seconds)} on {options.maps_options.device}"
        return f"for better quality, use --method {best.name} ({takes}): {command}"
    if not plan.reads_text:  # `warnings` has advised training
        return ""

    command = more_text_command(plan, options)
    if command:
        return (
            f"for better quality convert again on {CalibrationText.tokens:,} tokens of text, the "
            f"default, before you uptrain it: {command}"
        )

    command = training_command(plan, options, out, source)
    if not command:
        return ""
    goal = "for better quality uptrain it"
    if _fits_training(plan, options):
        return f"{goal}: {command}"
    needed = size(default_training_memory(plan, options.maps_options.device))
    return f"{goal}; by default that needs about {needed}, so look at the plan first: {command}"


def warnings(
    plan: Plan,
    maps: StoredMaps | None,
    options: ConvertOptions,
    out: Path,
    source: dict[str, Any],
) -> Iterator[str]:
    """A warning if the result is of no use as it is, with what to do."""
    if plan.merge_method is None:
        return

    remedies = []
    best = plan.available_methods[-1]
    if best.name != plan.method_name:
        remedies.append(f"use --method {best.name}")
    training = training_command(plan, options, out, source)
    train = "train it"
    if training:
        train += f": {training}"
    remedies.append(train)

    if not plan.reads_text:
        yield (
            f"--method {plan.method_name} does not run the model, "
            f"so the quality of the result was not measured: {_unmeasured_advice(plan, remedies)}"
        )
    elif quality_loss(maps).level == "damaged":
        remedies.insert(0, "keep more KV heads")
        yield f"this model is damaged and not usable as it is: {' or '.join(remedies)}"


def _unmeasured_advice(plan: Plan, remedies: Sequence[str]) -> str:
    """What to do about a result whose method does not run the model.

    A method that reads the weights may leave a usable model, so it is to be measured; of one that
    reads nothing, no result was.
    """
    remedy = " or ".join(remedies)
    method = plan.merge_method
    is_measurable = predicts_tokens(transformers_config(plan.new_config))
    if method is not None and method.reads == "weights" and is_measurable:
        return f"measure it with gqa-eval, and unless the verdict is good, {remedy}"
    return f"the result is not usable until it is trained; {remedy}"


def evaluation_command(plan: Plan, options: ConvertOptions, out: Path) -> str:
    """gqa-eval of the result against the base model."""
    further = []
    if options.revision:
        further += ["--revision", options.revision]
    further += _shared(options)
    config = transformers_config(plan.new_config)
    return evaluation_line([options.model, str(out)], config, further)


def evaluation_line(models: Sequence[str], config: Any, further: Sequence[str]) -> str:
    """gqa-eval of decoders on text that is always there and that no calibration uses by itself.

    Args:
        models: The base model and what is compared with it.
        config: transformers' config of the result.
        further: Options that the command gets too.
    """
    words = ["gqa-eval", *map(operand, models)]
    words += ["--data", "stdlib:heldout", "--tokens", str(_EVALUATED_TOKENS)]
    context = positions(config)
    if context is None or context >= _LEAST_RECALL_CONTEXT:
        words.append("--recall")
    return shell_line([*words, *further])


def training_command(plan: Plan, options: ConvertOptions, out: Path, source: dict[str, Any]) -> str:
    """gqa-uptrain of the result, with the base model as its teacher; empty if it cannot be trained.

    Where its defaults may need more memory than there is, it is the plan of a training that needs
    less.
    """
    if plan.checkpoint.packed or not predicts_tokens(transformers_config(plan.new_config)):
        return ""
    if not _has_tokenizer(plan, options):
        return ""

    words = ["gqa-uptrain", operand(str(out))]
    is_local = plan.checkpoint.hub_id is None
    if is_local and not source.get("path") and not _are_beside(out, plan.checkpoint.directory):
        # Neither the record says where the base model is, nor is it where gqa-uptrain looks.
        words += ["--teacher", options.model]
    words += _shared(options)
    if not _fits_training(plan, options):
        words += _SAVING_OPTIONS
    return shell_line(words)


def default_training_memory(plan: Plan, device: str) -> int:
    """Bytes that gqa-uptrain of the result needs on a device with its default options, roughly."""
    trained = parameters = plan.parameters_after
    rounded = 0
    shared = 0
    autocast = devices.native_bfloat16(device)
    assert plan.merge_method is not None
    if plan.merge_method.computes_maps:  # then attention alone trains
        attention = tuple(f"{module.path}." for module in plan.modules)
        trained = sum(one.numel for one in plan.tensors if one.name.startswith(attention))
        if autocast:
            frozen = list(_frozen_matrices(plan, attention))
            rounded = sum(one.numel for one in frozen)
            shared = sum(one.nbytes for one in frozen)

    config = transformers_config(plan.new_config)
    block = min(positions(config) or MAX_BLOCK, MAX_BLOCK)
    number_bytes = 2 if autocast else 4
    needs = training_memory(
        parameters,
        trained,
        plan.checkpoint.nbytes,
        autocast=autocast,
        rounded=rounded,
        shared=shared,
    )
    activations = activation_memory(
        hidden_size=int(plan.config.text_config.hidden_size),
        layers=plan.config.layers,
        tokens=block,
        number_bytes=number_bytes,
    )
    return needs.memory + activations


def _frozen_matrices(plan: Plan, attention: tuple[str, ...]) -> Iterator[OutputTensor]:
    """Matrices of the layers outside of attention that `gqa-uptrain` surely keeps in bfloat16, once
    for model and teacher. Experts are not among them, which classes keep in larger tensors.
    """
    for one in plan.tensors:
        is_in_layer = re.search(r"\.\d+\.", one.name)
        is_expert = "expert" in one.name
        is_matrix = len(one.shape) == 2
        if is_in_layer and is_matrix and not is_expert and not one.name.startswith(attention):
            yield one


def _fits_training(plan: Plan, options: ConvertOptions) -> bool:
    """Whether gqa-uptrain surely fits this machine with its default options."""
    total = devices.total_memory(options.maps_options.device)
    if total is None:
        return True
    return default_training_memory(plan, options.maps_options.device) <= _SURE_SHARE * total


def more_text_command(plan: Plan, options: ConvertOptions) -> str:
    """The same conversion on the default number of tokens, in place of its result; empty if it was
    not on fewer.
    """
    if not options.is_set("tokens") or options.tokens >= CalibrationText.tokens:
        return ""
    method = plan.merge_method
    assert method is not None
    words = _conversion_words(plan, options, method)
    if options.output or options.kv_budget:  # the name of the result is not that of its heads
        words += ["-o", str(output_of(options, plan))]
    words.append("--overwrite")
    return shell_line([*words, *_repeated_options(options, method, without="tokens")])


def conversion_command(plan: Plan, options: ConvertOptions, method: Method) -> str:
    """gqa-convert with another method and the same other options, as far as that method uses them;
    empty if its result exists.
    """
    words = _conversion_words(plan, options, method)
    if options.output:
        if options.output.name in ("", ".."):  # `-o .`: the directory's own name is not in its path
            return ""
        output = options.output.with_name(f"{options.output.name}-{method.name}")
        words += ["-o", str(output)]
    else:
        output = default_directory(options, plan, method.name)
        if options.kv_budget:  # the command names the heads instead, and so would its result
            words += ["-o", str(output)]
    if output.exists():
        return ""
    return shell_line([*words, *_repeated_options(options, method)])


def _conversion_words(plan: Plan, options: ConvertOptions, method: Method) -> list[str]:
    """gqa-convert of the same model to the same heads, by a method."""
    counts = (plan.kv_heads,) if isinstance(plan.kv_heads, int) else plan.kv_heads
    heads = ",".join(map(str, counts))
    return ["gqa-convert", operand(options.model), "--kv-heads", heads, "--method", method.name]


def _repeated_options(options: ConvertOptions, method: Method, without: str = "") -> list[str]:
    """The options that were given and that a method uses too, but for the one named `without`."""
    used = options_of(method)
    words = []
    for name, field in type(options).__dataclass_fields__.items():
        is_used = not field.metadata["setting"] or name in used
        is_repeated = name not in (*_NOT_REPEATED, without) and not field.metadata["expert"]
        if is_used and is_repeated and options.is_set(name):
            words += _option_words(name, getattr(options, name))
    return words


def _are_beside(path: Path, other: Path) -> bool:
    """Whether two paths are in the same directory."""
    try:
        return path.resolve().parent == other.resolve().parent
    except OSError:  # the working directory is gone: the result has replaced it
        return False


def _shared(options: ConvertOptions) -> list[str]:
    """Options that mean the same in all commands."""
    words = []
    if options.device:
        words += ["--device", options.device]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    return words


def _option_words(name: str, value: Any) -> list[str]:
    """An option and its value, as words of a command."""
    if value is True:
        return [flag(name)]
    if value is False:
        return [flag(f"no_{name}")]
    values = value if isinstance(value, tuple) else (value,)
    return [f"{flag(name)}={word}" for word in values]


def _has_tokenizer(plan: Plan, options: ConvertOptions) -> bool:
    """Whether transformers can load the model's tokenizer."""
    try:
        load_tokenizer(plan.checkpoint, options.trust_remote_code)
    except RefusedError:
        return False
    return True
