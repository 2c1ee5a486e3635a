"""The models of a run: the teacher, the parameters that train, low-rank adapters, and the
optimizer.
"""

from __future__ import annotations

import os
import re
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
from gqa.core.errors import RefusedError, explain, listing
from gqa.corpus.sources import is_self, parse_self
from gqa.models.loading import load_model
from gqa.models.names import follow_prefix, parameter_names, shared_names, sources
from gqa.uptrain.options import AUTO_TEACHER, NO_TEACHER, Scope, TrainOptions
from gqa.uptrain.weights import LORA_ALPHA, shard_teacher

TOKENS = 512_000  # to train on by default
_LINEAR = ("Linear", "FalconLinear")  # classes that adapters fit


def settle(
    options: TrainOptions, checkpoint: Checkpoint
) -> tuple[TrainOptions, Checkpoint | None, str]:
    """The options with teacher, data, length, repeats and scope decided; the teacher's checkpoint;
    and its name, or why there is none. Raises RefusedError if there is neither text nor a teacher
    to write it.
    """
    record = read_record(checkpoint, PROVENANCE)
    conversion = record if isinstance(record, dict) else {}  # users edit such files
    parts = (conversion.get("source"), conversion.get("options"))
    source, conversion_options = (part if isinstance(part, dict) else {} for part in parts)
    teacher = None
    name = NO_TEACHER
    teacher_text = "--teacher none"
    if options.teacher == AUTO_TEACHER:
        teacher, teacher_text = find_base(checkpoint, source)
        name = (teacher.hub_id or str(teacher.directory)) if teacher else NO_TEACHER
    elif options.teacher != NO_TEACHER:
        name = options.teacher
        converted = name == source.get("model") and not Path(name).exists()
        teacher = open_model(name, source.get("revision") if converted else None)
        teacher_text = name + _at_commit(teacher)
    if not options.data and teacher is None:
        raise RefusedError(
            f"no --data is given, and there is no teacher that could write it ({teacher_text}); "
            "give text, or the model before conversion with --teacher"
        )
    data = options.data or ("self",)
    sampled = is_self(data[0])
    tokens = options.tokens if options.lengths or (sampled and parse_self(data[0])[0]) else TOKENS
    method = METHODS.get(str(conversion_options.get("method")))
    has_maps = method is not None and method.reads != "nothing"
    train = options.train or ("attention" if has_maps else "all")
    repeats = options.repeats
    if repeats is None and not sampled:
        # Without a teacher the model would learn that text repeats itself. Pairs do not repeat.
        repeats = teacher is not None and not checkpoint.config.get("is_encoder_decoder")
    return (
        replace(options, teacher=name, data=data, tokens=tokens, train=train, repeats=repeats),
        teacher,
        teacher_text,
    )


def find_base(checkpoint: Checkpoint, source: dict[str, Any]) -> tuple[Checkpoint | None, str]:
    """The base model, which the `source` of a conversion's provenance names, at the commit that was
    converted, or None; and its name in words, or why there is none.

    A local base model is looked up by its path relative to the result, then beside the result.
    """
    if not (name := source.get("model")) or not isinstance(name, str):
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"
    local = find_local_base(checkpoint, source)
    if local is None and "path" in source:  # it was local at the conversion
        return None, f"the base model {name} was moved or deleted; name it with --teacher"
    try:
        base = open_model(local or name, None if local else source.get("revision"))
    except (RefusedError, OSError) as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    return (
        base,
        f"{local or name}{_at_commit(base)}, the base model (--teacher none: train on text alone)",
    )


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
    return next((str(path.resolve()) for path in candidates if os.path.isdir(path)), None)


def is_base_model(teacher: Checkpoint, checkpoint: Checkpoint, source: Mapping[str, Any]) -> bool:
    """Whether a teacher is the base model of a checkpoint: by its place, or by its name where that
    place is empty.
    """
    if local := find_local_base(checkpoint, source):
        return Path(local) == teacher.directory.resolve()
    return bool(source.get("model") == (teacher.hub_id or teacher.name))


def _at_commit(teacher: Checkpoint) -> str:
    return f" at commit {teacher.revision[:12]}" if teacher.revision else ""


def build_model(
    options: TrainOptions, checkpoint: Checkpoint, accelerator: Accelerator
) -> PreTrainedModel:
    """The model in float32, with frozen parameters that do not train.

    They are empty under FSDP2, which reads weights into shards later.
    """
    model = _load(checkpoint, options, accelerator, "float32")
    follow_prefix(model, checkpoint.tensors)
    if options.target_field and not model.config.is_encoder_decoder:
        raise RefusedError(
            f"--target-field is for encoder-decoders, {checkpoint.name} is not one; leave it out"
        )
    set_seed(options.seed)  # initializes adapters
    freeze_parameters(model, checkpoint, options.train or "all", options.lora_rank)
    if options.checkpointing:
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise RefusedError(f"--checkpointing: {explain(error)}") from error
    return model


def build_teacher(
    options: TrainOptions, base: Checkpoint, accelerator: Accelerator
) -> PreTrainedModel:
    """The model of `base` in its stored dtype, without gradients."""
    teacher = _load(base, options, accelerator, "auto")
    teacher.requires_grad_(False)
    if accelerator.is_fsdp2:
        shard_teacher(teacher, base, accelerator)
    return teacher


def _load(
    checkpoint: Checkpoint, options: TrainOptions, accelerator: Accelerator, dtype: str
) -> PreTrainedModel:
    return load_model(
        str(checkpoint.directory),
        dtype=dtype,
        device=str(accelerator.device),
        attention=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
        weights=not accelerator.is_fsdp2,
    )


def freeze_parameters(
    model: PreTrainedModel, checkpoint: Checkpoint, scope: Scope, rank: int = 16
) -> None:
    """Freeze the parameters outside the scope; `lora` adds adapters of that rank to the other
    linear layers.

    `all` freezes only parameters that the class does not store, like sinusoids. Raises
    RefusedError.
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
    modules = attention_modules(checkpoint, config)
    inside = {f"{module.path}.{tail}" for module in modules for tail in module.tensors}
    projections = {
        f"{m.path}.{tail}" for m in modules for tail in m.tensors if rule_of(tail, config)
    }
    parameters = parameter_names(model)
    trainable = {name for name, _ in model.named_parameters()}
    if missing := [name for name in projections if name not in parameters]:
        raise RefusedError(
            f"{type(model).__name__} stores {listing(missing)} inside a larger parameter, so keys "
            "and values cannot train alone; use --train all"
        )
    attention = {parameters[name] for name in inside if parameters.get(name) in trainable}
    return attention, {parameters[name] for name in projections} & trainable


def add_adapters(model: PreTrainedModel, trained: AbstractSet[str], rank: int) -> None:
    """Add adapters to the linear layers, except the head and layers whose weights are in `trained`.

    Routers get none, though some are subclasses of nn.Linear, as they return tuples. Nor do output
    projections of Mamba mixers, whose weights fused kernels read without calling the layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise RefusedError(
            "--train lora needs peft; install it with: pip install 'gqa[lora]'"
        ) from error
    table = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in _LINEAR
        and module is not table
        and f"{name}.weight" not in trained
        and not (
            name.endswith("out_proj")
            and hasattr(model.get_submodule(name.rpartition(".")[0]), "conv1d")
        )
    }
    if not layers:
        name = type(model).__name__
        raise RefusedError(
            f"--train lora: {name} has no other linear layers to adapt; use --train attention or "
            "all"
        )
    empty = {module: module.weight for module in layers.values() if module.weight.is_meta}
    # Peft puts adapters on the device of the weight: not on meta
    for module, weight in empty.items():
        module.weight = nn.Parameter(
            torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False
        )
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
    stored = {name: shape for name, (shape, _) in sources(model).items()}
    tied = {
        name.replace(".base_layer.", ".")
        for name, same in shared_names(model).items()
        if len(same) > 1
    }
    known = {name: spec.shape for name, spec in source.tensors.items()}
    wrong = [
        name
        for name, shape in stored.items()
        if known.get(name) != shape and (name in known or name not in tied)
    ]
    if wrong or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(wrong or stored)} differently from "
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
    theirs, ours = (one.config.get_text_config(decoder=True).vocab_size for one in (teacher, model))
    vocabulary = tokenizer.get_vocab()
    needed = max(vocabulary.values()) + 1
    same = teacher_tokenizer.get_vocab() == vocabulary
    if same and theirs != ours and theirs < needed:
        raise RefusedError(
            f"the teacher {name} knows {theirs:,} tokens, fewer than the {needed:,} of the model's "
            "tokenizer; give the checkpoint from which the model was converted"
        )
    if not same:
        raise RefusedError(
            f"the teacher {name} has another tokenizer than the model, "
            "so their predictions cannot be compared; give "
            "the checkpoint from which the model was converted"
        )


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused if the device supports it), or Adafactor with an external learning rate (arXiv
    1804.04235, section 3.1). Matrices decay; vectors (norms, biases, gates) do not, even if stored
    as matrices. There is no empty parameter group, which torch's distributed state dicts cannot
    hold.
    """
    matrices = list[nn.Parameter]()
    vectors = list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = parameter.ndim < 2 or re.search(r"norm|bias", name.lower())
            (vectors if is_vector else matrices).append(parameter)
    decays = (matrices, options.weight_decay), (vectors, 0.0)
    groups: list[dict[str, Any]] = [
        {"params": part, "weight_decay": decay} for part, decay in decays if part
    ]
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        adafactor: torch.optim.Optimizer = Adafactor(
            groups,
            lr=options.learning_rate,
            relative_step=False,
            scale_parameter=False,
            warmup_init=False,
        )
        return adafactor
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)
