"""The models of a run: the teacher, the parameters that train, and low-rank adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedModel

from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, path_of_record, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import read_config
from gqa.convert.heads.modules import attention_modules, rule_of
from gqa.convert.methods.table import METHODS
from gqa.core.compat import unsaved_names
from gqa.core.devices import emulates, free_memory
from gqa.core.errors import RefusedError, explain, listing
from gqa.corpus.specs import is_self, parse_self
from gqa.models.loading import WEIGHTS_SHARE, load_model
from gqa.models.names import follow_prefix, parameter_names, shared_names, sources
from gqa.uptrain.options import AUTO_TEACHER, NO_TEACHER, Scope, TrainOptions
from gqa.uptrain.weights import LORA_ALPHA, is_of_mamba, shard_teacher

DEFAULT_TOKENS = 512_000  # to train on by default
_FLOAT32 = 4  # bytes
_LINEAR = ("Linear", "FalconLinear")  # classes that adapters fit


def settle(
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
    source = _part(record, "source")
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
    data_has_length = is_sampled and parse_self(data[0])[0]
    tokens = options.tokens if options.lengths or data_has_length else DEFAULT_TOKENS

    repeats = options.repeats
    if repeats is None and not is_sampled:
        # Without a teacher the model would learn that text repeats itself. Pairs do not repeat.
        repeats = teacher is not None and not checkpoint.config.get("is_encoder_decoder")

    method = METHODS.get(str(_part(record, "options").get("method")))
    has_maps = method is not None and method.reads != "nothing"
    usual_scope: Scope = "attention" if has_maps else "all"
    train = options.train or usual_scope

    options = replace(options, teacher=name, data=data, tokens=tokens, train=train, repeats=repeats)
    return options, teacher, teacher_text


def _part(record: Any, name: str) -> dict[str, Any]:
    """An object in a conversion's record, which users edit; empty if it is none."""
    part = record.get(name) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


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
    return teacher, name, name + _at_commit(teacher)


def find_base(checkpoint: Checkpoint, source: dict[str, Any]) -> tuple[Checkpoint | None, str]:
    """The base model at the commit that was converted.

    A local base model is looked up by its path relative to the result, then beside the result.

    Args:
        checkpoint: The converted model.
        source: The part of the conversion's record that names the base model.

    Returns:
        The base model or None; and its name in words, or why there is none.
    """
    name = source.get("model")
    if not name or not isinstance(name, str):
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"

    local = find_local_base(checkpoint, source)
    if local is None and "path" in source:  # it was local at the conversion
        return None, f"the base model {name} was moved or deleted; pass it with --teacher"

    location = local or name
    revision = None if local else source.get("revision")
    try:
        base = open_model(location, revision)
    except (RefusedError, OSError) as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    text = f"{location}{_at_commit(base)}, the base model (--teacher none: train on text alone)"
    return base, text


def find_local_base(checkpoint: Checkpoint, source: Mapping[str, Any]) -> str | None:
    """The directory of the base model that the `source` of a conversion's record names.

    None if there is none.
    """
    name = source.get("model")
    directory = checkpoint.directory.resolve()

    candidates: list[Path] = []
    if path := path_of_record(source.get("path")):
        candidates.append(directory / path)
    if path_of_record(name) and Path(str(name)).name == name:
        candidates.append(directory.with_name(str(name)))

    for candidate in candidates:
        if os.path.isdir(candidate):
            return str(candidate.resolve())
    return None


def is_base_model(candidate: Checkpoint, checkpoint: Checkpoint, source: Mapping[str, Any]) -> bool:
    """Whether a model is the base model of a checkpoint: by its place, or by its name where that
    place is empty.
    """
    if local := find_local_base(checkpoint, source):
        return Path(local) == candidate.directory.resolve()
    return bool(source.get("model") == (candidate.hub_id or candidate.name))


def distills_from_base(checkpoint: Checkpoint, teacher: Checkpoint | None) -> bool:
    """Whether the teacher is the model from which the checkpoint was converted, by its record."""
    if teacher is None:
        return False
    source = _part(read_record(checkpoint, PROVENANCE), "source")
    return bool(source) and is_base_model(teacher, checkpoint, source)


def _at_commit(teacher: Checkpoint) -> str:
    """The commit of a checkpoint, as the end of its name; empty if it is not from the hub."""
    return f" at commit {teacher.revision[:12]}" if teacher.revision else ""


def loading_device(
    checkpoint: Checkpoint, teacher: Checkpoint | None, accelerator: Accelerator
) -> str:
    """Where model and teacher are loaded before their frozen weights are rounded: on the device of
    the run if both fit there as they are loaded, else on the host.
    """
    device = accelerator.device
    free = free_memory(device)
    loaded = _FLOAT32 * sum(spec.numel for spec in checkpoint.tensors.values())
    if teacher is not None:
        loaded += teacher.nbytes
    if free is None or loaded < WEIGHTS_SHARE * free:
        return str(device)
    return "cpu"


def build_model(
    options: TrainOptions, checkpoint: Checkpoint, accelerator: Accelerator, device: str
) -> PreTrainedModel:
    """The model in float32 on a device, with frozen parameters that do not train.

    They are empty under FSDP2, which reads weights into shards later.
    """
    model = _load(checkpoint, options, accelerator, "float32", device)
    follow_prefix(model, checkpoint.tensors)
    set_seed(options.seed)  # initializes adapters
    freeze_parameters(model, checkpoint, options.train or "all", options.lora_rank)

    if options.gradient_checkpointing:
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise RefusedError(
                f"--gradient-checkpointing cannot be used ({explain(error)}); remove "
                "--gradient-checkpointing"
            ) from error
    return model


def build_teacher(
    options: TrainOptions, checkpoint: Checkpoint, accelerator: Accelerator, device: str
) -> PreTrainedModel:
    """The teacher, the model of `checkpoint`, on a device, without gradients.

    It has its stored dtype, except on a CPU that emulates 16 bits, where float32 is faster: the
    example model trains on 1,300 instead of 600 tokens a second.
    """
    dtype = "auto"
    if emulates(torch.bfloat16, str(accelerator.device)):
        dtype = "float32"
    teacher = _load(checkpoint, options, accelerator, dtype, device)
    teacher.requires_grad_(False)
    if accelerator.is_fsdp2:
        shard_teacher(teacher, checkpoint, accelerator)
    return teacher


def _load(
    checkpoint: Checkpoint, options: TrainOptions, accelerator: Accelerator, dtype: str, device: str
) -> PreTrainedModel:
    """The model of a checkpoint on a device; empty under FSDP2."""
    return load_model(
        str(checkpoint.directory),
        dtype=dtype,
        device=device,
        attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights=not accelerator.is_fsdp2,
    )


def freeze_parameters(
    model: PreTrainedModel, checkpoint: Checkpoint, scope: Scope, rank: int = 16
) -> None:
    """Freeze the parameters outside the scope.

    Args:
        model: The model.
        checkpoint: Its checkpoint.
        scope: What trains. `all` freezes only parameters that the class does not store, like
            sinusoids; `lora` adds adapters to the other linear layers.
        rank: Of the adapters.

    Raises:
        RefusedError: The model does not allow the scope.
    """
    if scope == "all":
        unsaved = unsaved_names(model)
        for name, parameter in model.named_parameters():
            if name in unsaved:
                parameter.requires_grad_(False)
        return

    attention, keys_and_values = attention_parameters(model, checkpoint)
    trained = attention if scope == "attention" else keys_and_values
    if scope == "lora":
        add_adapters(model, trained, rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained or "lora_" in name)


def attention_parameters(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> tuple[set[str], set[str]]:
    """Names of the parameters in attention modules, and of those among them that project to keys or
    values.

    The family's entry names the stored tensors, which are mapped to the model's parameters. A fused
    projection of queries, keys and values counts as one of keys and values. Raises RefusedError if
    the class combines the tensors of a projection with others.
    """
    config = read_config(checkpoint.config, checkpoint.name)
    stored = set[str]()
    projections = set[str]()
    for module in attention_modules(checkpoint, config):
        for tail in module.tensors:
            stored.add(f"{module.path}.{tail}")
            if rule_of(tail, config):
                projections.add(f"{module.path}.{tail}")

    parameters = parameter_names(model)
    if missing := [name for name in projections if name not in parameters]:
        raise RefusedError(
            f"{type(model).__name__} stores {listing(missing)} inside a larger parameter, so keys "
            "and values cannot train alone; use --train all"
        )

    trainable = {name for name, _ in model.named_parameters()}
    attention = {parameters[name] for name in stored if parameters.get(name) in trainable}
    return attention, {parameters[name] for name in projections} & trainable


def add_adapters(model: PreTrainedModel, trained: AbstractSet[str], rank: int) -> None:
    """Add adapters to the linear layers, except the head and layers whose weights are in `trained`.

    Routers get none, though some are subclasses of nn.Linear, as they return tuples. Nor do output
    projections of Mamba mixers, whose weights fused kernels read without calling the layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise RefusedError("--train lora needs peft; install it with: pip install peft") from error

    head = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        is_linear = type(module).__name__ in _LINEAR and module is not head
        if is_linear and f"{name}.weight" not in trained and not is_of_mamba(model, name):
            layers[name] = module
    if not layers:
        class_name = type(model).__name__
        raise RefusedError(
            f"--train lora: {class_name} has no other linear layers to adapt; use --train "
            "attention or all"
        )

    # peft puts adapters on the device of the weight, which must not be meta.
    empty = {module: module.weight for module in layers.values() if module.weight.is_meta}
    for module, weight in empty.items():
        zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module.weight = nn.Parameter(zeros, requires_grad=False)

    # peft has rules for some model types (it adapts experts instead of dense layers, and refuses
    # out_proj), which it does not apply to a module without a config.
    shell = nn.ModuleDict({"model": model})
    targets = [f"model.{name}" for name in layers]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=targets), shell
    )
    for module, weight in empty.items():
        module.weight = weight


def trained_names(model: PreTrainedModel) -> list[str]:
    """Names in the state dict of parameters that train, with all names of a tied one."""
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]


def check_exportable(model: PreTrainedModel, source: Checkpoint) -> None:
    """Raise RefusedError if the model's class would store other tensors or shapes than its source
    has.
    """
    known = {name: spec.shape for name, spec in source.tensors.items()}
    stored = {name: shape for name, (shape, _) in sources(model).items()}
    tied = {
        name.replace(".base_layer.", ".")
        for name, same in shared_names(model).items()
        if len(same) > 1
    }

    different = []
    for name, shape in stored.items():
        has_other_shape = name in known and known[name] != shape
        # A checkpoint need not contain each name of a tied parameter.
        is_missing = name not in known and name not in tied
        if has_other_shape or is_missing:
            different.append(name)

    if different or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(different or stored)} differently from "
            f"{source.name}; load it with transformers, save it again and train that"
        )


def check_teacher(
    teacher: Any, teacher_tokenizer: Any, model: Any, tokenizer: Any, name: str
) -> None:
    """Raise RefusedError if the teacher of that name has another tokenizer than the model, or lacks
    some of its tokens.

    The number of rows of their embeddings may differ: some are padded to a multiple of 64, 128 or
    more.
    """
    vocabulary = tokenizer.get_vocab()
    if teacher_tokenizer.get_vocab() != vocabulary:
        raise RefusedError(
            f"the teacher {name} has another tokenizer than the model, so their predictions "
            "cannot be compared; pass the checkpoint from which the model was converted"
        )

    needed = max(vocabulary.values()) + 1
    teacher_rows = teacher.config.get_text_config(decoder=True).vocab_size
    model_rows = model.config.get_text_config(decoder=True).vocab_size
    if teacher_rows != model_rows and teacher_rows < needed:
        raise RefusedError(
            f"the embedding of the teacher {name} has only {teacher_rows:,} of the {needed:,} "
            "tokens of the model's tokenizer; pass the checkpoint from which the model was "
            "converted"
        )
