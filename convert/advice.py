"""What a finished conversion advises.

Every command runs as it is printed: it has the names that the user gave, quoted for a shell, and is
left out where the model does not allow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from gqa.convert.estimate import duration, estimate
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.config_edits import valid_kv_heads
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.methods.base import Method
from gqa.convert.options import ConvertOptions, options_of
from gqa.convert.plan import OutputTensor, Plan
from gqa.convert.planning import make_plan
from gqa.convert.summary import quality_loss, quality_text, size
from gqa.convert.verdict import Loss
from gqa.core import devices
from gqa.core.console import operand
from gqa.core.errors import RefusedError
from gqa.core.escape import shell_line
from gqa.core.options import flag
from gqa.models.classes import positions, predicts_tokens
from gqa.models.tokenizer import load_tokenizer
from gqa.models.training_memory import MAX_BLOCK, activation_memory, training_memory

# The rise of the drift in one layer from which on that layer is named. It rises by 2% to 6% in a
# layer of the example model. In the first layer of Qwen2.5-Coder-1.5B it rises by 55% with
# `calibrated`, and by 23% where `refined` has adjusted that layer: both results are damaged, while
# one that keeps the layer's heads is a trade-off.
_STEEP_DRIFT = 0.2
_LEAST_RECALL_CONTEXT = 128  # `gqa-eval --recall` refuses a shorter context
# An estimate of memory up to this share of what there is will do: activations are known roughly.
_SURE_SHARE = 3 / 4
EVALUATION_TEXT = "stdlib:heldout"  # what the printed commands of gqa-eval measure on
_EVALUATED_TOKENS = 20_000  # seconds for a small model, minutes for one of 7B on a GPU

# Options of gqa-uptrain that make activations small, and its plan (docs/guide-7b.md).
_SAVING_OPTIONS = ("--micro-batch", "1", "--gradient-checkpointing", "--dry-run")


@dataclass(frozen=True)
class Advice:
    """What a finished conversion says of its quality, and what it advises.

    plan: The plan of the conversion.
    maps: What its method has found; None if it reads nothing.
    options: Its options.
    out: Its result.
    source: The part of its record that names the base model.
    """

    plan: Plan
    maps: StoredMaps | None
    options: ConvertOptions
    out: Path
    source: Mapping[str, Any]

    # ------------------------------------------------------------------------------ what is printed

    def warnings(self) -> Iterator[str]:
        """A warning if the result is of no use as it is, with what to do."""
        method = self.plan.method
        if not method.merges:
            return

        if method.reads == "nothing":
            train = f": {self.training_command}" if self.training_command else ""
            yield f"the result of --method {method.name} is not usable until it is trained{train}"
        elif method.reads == "weights":
            yield (
                f"--method {method.name} does not run the model, "
                f"so the quality of the result was not measured. {self._unmeasured()}"
            )
        elif self._loss.level == "damaged":
            *others, last = self._remedies()
            advice = ", ".join(["Keep more KV heads", *others, f"or {last}"])
            yield f"the converted model is damaged, not usable as it is. {advice}"
            yield from self._layer_to_keep()

    def _remedies(self) -> list[str]:
        """What helps a result that is of no use as it is; training comes last."""
        remedies = []
        if self._best_method != self.plan.method:
            remedies.append(f"use --method {self._best_method.name}")

        train = "train it"
        if self.training_command:
            train += f": {self.training_command}"
        return [*remedies, train]

    def _layer_to_keep(self) -> Iterator[str]:
        """A warning that names the layer in which the loss begins, and the conversion that keeps
        all KV heads there; none if no layer stands out, or if the model's layers cannot differ.
        """
        drifts = self.maps.drifts if self.maps else ()
        layer = _steepest_layer(drifts)
        if layer is None:
            return
        plan = self._plan_that_keeps(layer)
        if plan is None:
            return

        command = self.conversion_command(plan.method, plan)
        if command:
            yield (
                f"the loss begins in layer {layer + 1} of {plan.config.layers}: after it, the "
                f"hidden states differ from the base model's by {drifts[layer]:.0%}. To keep all "
                "KV heads of that layer (the result then needs custom modeling code, "
                f"trust_remote_code, which fewer engines load), run: {command}"
            )

    def _unmeasured(self) -> str:
        """What to do about a result whose method reads the weights: it may be usable, so it is to
        be measured, if that is possible.
        """
        remedy = ", or ".join(self._remedies())
        if self._predicts_tokens:
            return f"Measure it with gqa-eval. Unless the verdict is good, {remedy}"
        return f"It is not usable as it is; {remedy}"

    def quality_line(self) -> str:
        """The measured quality with its verdict, or why it was not measured and what measures
        it.
        """
        if not self._predicts_tokens:
            return "not measured: the model has no language-modeling head (lm_head)"
        if text := quality_text(self.maps):
            return f"{self._loss.level}: {text}"
        if self._config.is_encoder_decoder:
            return (
                "not measured; gqa-eval measures it on pairs of text: see its options --data and "
                "--target-column"
            )
        if not self._has_tokenizer:
            return "not measured: the model has no tokenizer that transformers can load"

        command = self.evaluation_command()
        measures = "perplexity and recall" if "--recall" in command else "perplexity"
        return f"not measured; to measure {measures}: {command}"

    def next_line(self) -> str:
        """What improves the result: the best method that the model allows, or training; empty where
        nothing can.
        """
        if self._loss.level == "good" or not self._predicts_tokens:
            return ""

        best = self._best_method
        if best != self.plan.method and (command := self.conversion_command(best)):
            seconds, _ = estimate(self.plan, best, self.options.maps_options)
            takes = f"about {duration(seconds)} on {self._device}"
            return f"for better quality, use --method {best.name} ({takes}): {command}"
        if self.plan.method.reads != "text":  # `warnings` has advised training
            return ""

        command = self.more_text_command()
        if command:
            return (
                f"for better quality convert again on {CalibrationText.tokens:,} tokens of text, "
                f"the default, before you uptrain it: {command}"
            )

        if not self.training_command:
            return ""
        goal = "for better quality "
        if self._can_keep_more:
            goal += "keep more KV heads, or "
        goal += "uptrain it"
        if self._fits_training:
            return f"{goal}: {self.training_command}"
        plan = (
            f"the defaults need about {size(self.training_memory)}; this is the plan of a run that "
            "needs less"
        )
        return f"{goal} ({plan}): {self.training_command}"

    # ------------------------------------------------------------------------ what the model allows

    @property
    def _best_method(self) -> Method:
        """The method that loses least of those that the model allows."""
        return self.plan.available_methods[-1]

    @property
    def _can_keep_more(self) -> bool:
        """Whether all layers can have more KV heads than the result, and fewer than the model."""
        plan = self.plan
        if not isinstance(plan.kv_heads, int):
            return False
        counts = valid_kv_heads(plan.config)
        return any(plan.kv_heads < count < plan.config.main_heads.kv for count in counts)

    @cached_property
    def _loss(self) -> Loss:
        """What the result has lost, as far as it was measured."""
        return quality_loss(self.maps)

    def _plan_that_keeps(self, layer: int) -> Plan | None:
        """The same conversion, but with all KV heads of one layer; None if the layers of the model
        cannot differ.
        """
        plan = self.plan
        if not isinstance(plan.kv_heads, int):
            return None
        kv_heads = [plan.kv_heads] * plan.config.layers
        kv_heads[layer] = plan.config.main_heads.kv
        try:
            return make_plan(
                plan.checkpoint, tuple(kv_heads), plan.method.name, plan.seed, self.options.dtype
            )
        except RefusedError:
            return None

    @cached_property
    def _config(self) -> Any:
        """transformers' config of the result."""
        return transformers_config(self.plan.new_config)

    @cached_property
    def _predicts_tokens(self) -> bool:
        """Whether the model has a head that predicts tokens."""
        return predicts_tokens(self._config)

    @cached_property
    def _has_tokenizer(self) -> bool:
        """Whether transformers can load the model's tokenizer."""
        try:
            load_tokenizer(self.plan.checkpoint, self.options.trust_remote_code)
        except RefusedError:
            return False
        return True

    @property
    def _device(self) -> str:
        """The device of the conversion."""
        return self.options.maps_options.device

    # ---------------------------------------------------------------- commands; empty if impossible

    def evaluation_command(self) -> str:
        """gqa-eval of the result against the base model."""
        further = []
        if self.options.revision:
            further += ["--revision", self.options.revision]
        further += self._shared_options()
        return evaluation_line([self.options.model, str(self.out)], self._config, further)

    @cached_property
    def training_command(self) -> str:
        """gqa-uptrain of the result, with the base model as its teacher; empty if it cannot be
        trained.

        Where its defaults may need more memory than there is, it is the plan of a training that
        needs less.
        """
        base = self.plan.checkpoint
        if base.packed or not self._predicts_tokens or not self._has_tokenizer:
            return ""

        words = ["gqa-uptrain", operand(str(self.out))]
        is_local = base.hub_id is None
        if is_local and not self.source.get("path") and not _are_beside(self.out, base.directory):
            # Neither the record says where the base model is, nor is it where gqa-uptrain looks.
            words += ["--teacher", self.options.model]
        words += self._shared_options()
        if not self._fits_training:
            words += _SAVING_OPTIONS
        return shell_line(words)

    def more_text_command(self) -> str:
        """The same conversion on the default number of tokens, in place of its result; empty if it
        was not on fewer.
        """
        options = self.options
        if not options.is_set("tokens") or options.tokens >= CalibrationText.tokens:
            return ""
        method = self.plan.method
        words = self._conversion_words(method, self.plan)
        if options.output or options.kv_budget:  # the name of the result is not that of its heads
            words += ["-o", str(self.out)]
        words.append("--overwrite")
        return shell_line([*words, *self._repeated_options(method, without="tokens")])

    def conversion_command(self, method: Method, other_plan: Plan | None = None) -> str:
        """gqa-convert with another method or to other KV heads, and with the same other options, as
        far as that method uses them; empty if its result exists.

        other_plan: With the other KV heads; None if they stay.
        """
        options = self.options
        plan = other_plan or self.plan
        words = self._conversion_words(method, plan)
        if options.output:
            if options.output.name in ("", ".."):  # `-o .`: its path does not have its own name
                return ""
            suffix = "more-heads" if other_plan else method.name
            output = options.output.with_name(f"{options.output.name}-{suffix}")
            words += ["-o", str(output)]
        else:
            output = plan.default_directory(options.model, method)
            if options.kv_budget:  # the command names the heads instead, and so would its result
                words += ["-o", str(output)]
        if output.exists():
            return ""
        return shell_line([*words, *self._repeated_options(method)])

    def _conversion_words(self, method: Method, plan: Plan) -> list[str]:
        """gqa-convert of the same model to the KV heads of a plan, by a method."""
        kv_heads = plan.kv_heads
        counts = (kv_heads,) if isinstance(kv_heads, int) else kv_heads
        heads = ",".join(map(str, counts))
        model = operand(self.options.model)
        return ["gqa-convert", model, "--kv-heads", heads, "--method", method.name]

    def _repeated_options(self, method: Method, without: str = "") -> list[str]:
        """The options that were given and that a method uses too, but for the one named
        `without`.
        """
        used = options_of(method)
        words = []
        for name, field in type(self.options).__dataclass_fields__.items():
            is_used = not field.metadata["setting"] or name in used
            is_repeated = field.metadata["repeated"] and not field.metadata["expert"]
            if is_used and is_repeated and name != without and self.options.is_set(name):
                words += _option_words(name, getattr(self.options, name))
        return words

    def _shared_options(self) -> list[str]:
        """The options given that mean the same in all commands."""
        words = []
        if self.options.device:
            words += ["--device", self.options.device]
        if self.options.trust_remote_code:
            words.append("--trust-remote-code")
        return words

    # ----------------------------------------------------------------------- the memory of training

    @property
    def _fits_training(self) -> bool:
        """Whether gqa-uptrain surely fits this machine with its default options."""
        total = devices.total_memory(self._device)
        if total is None:
            return True
        return self.training_memory <= _SURE_SHARE * total

    @cached_property
    def training_memory(self) -> int:
        """Bytes that gqa-uptrain of the result needs on the device with its default options,
        roughly.
        """
        plan = self.plan
        trained = parameters = plan.parameters_after
        rounded = 0
        shared = 0
        autocast = devices.native_bfloat16(self._device)
        if plan.method.computes_maps:  # then attention alone trains
            attention = tuple(f"{module.path}." for module in plan.modules)
            trained = sum(one.numel for one in plan.tensors if one.name.startswith(attention))
            if autocast:
                frozen = list(_frozen_matrices(plan, attention))
                rounded = sum(one.numel for one in frozen)
                shared = sum(one.nbytes for one in frozen)

        block = min(positions(self._config) or MAX_BLOCK, MAX_BLOCK)
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


def evaluation_line(models: Sequence[str], config: Any, further: Sequence[str]) -> str:
    """gqa-eval of decoders on text that is always there and that no calibration uses by itself.

    Args:
        models: The base model and what is compared with it.
        config: transformers' config of the result.
        further: Options that the command gets too.
    """
    words = ["gqa-eval", *map(operand, models)]
    words += ["--data", EVALUATION_TEXT, "--tokens", str(_EVALUATED_TOKENS)]
    context = positions(config)
    if context is None or context >= _LEAST_RECALL_CONTEXT:
        words.append("--recall")
    return shell_line([*words, *further])


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


def _steepest_layer(drifts: Sequence[float]) -> int | None:
    """The index of the layer in which the loss begins: that at which the drift rises most; None if
    it rises steeply nowhere.
    """
    rises = [after - before for before, after in pairwise([0.0, *drifts])]
    if not rises or max(rises) < _STEEP_DRIFT:
        return None
    return rises.index(max(rises))


def _are_beside(path: Path, other: Path) -> bool:
    """Whether two paths are in the same directory."""
    try:
        return path.resolve().parent == other.resolve().parent
    except OSError:  # the working directory is gone: the result has replaced it
        return False


def _option_words(name: str, value: Any) -> list[str]:
    """An option and its value, as words of a command."""
    if value is True:
        return [flag(name)]
    if value is False:
        return [flag(f"no_{name}")]
    values = value if isinstance(value, tuple) else (value,)
    return [f"{flag(name)}={word}" for word in values]
