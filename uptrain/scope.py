"""Which parameters of a model train: all, those of attention, or low-rank adapters with them."""

from __future__ import annotations

from transformers import PreTrainedModel

from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import read_config
from gqa.convert.heads.modules import attention_modules, rule_of
from gqa.core.compat import unsaved_names
from gqa.core.errors import RefusedError, listing
from gqa.models.names import parameter_names
from gqa.uptrain.adapters import add_adapters
from gqa.uptrain.options import Scope


def freeze_parameters(
    model: PreTrainedModel, checkpoint: Checkpoint, scope: Scope, rank: int = 16
) -> None:
    """Freeze the parameters outside the scope.

    Args:
        model: The model.
        checkpoint: Its checkpoint.
        scope: What trains. `all` freezes only parameters that the class does not store, like
            sinusoids; `lora` adds adapters to the other linear layers.
        rank: The rank of the adapters.

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
    # With lora the other linear layers train only by their adapters.
    trained = {"attention": attention, "kv": keys_and_values, "lora": keys_and_values}[scope]
    if scope == "lora":
        add_adapters(model, trained, rank)
    for name, parameter in model.named_parameters():
        is_adapter = scope == "lora" and "lora_" in name
        parameter.requires_grad_(name in trained or is_adapter)


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


def trained_names(model: PreTrainedModel) -> list[str]:
    """Names in the state dict of parameters that train, with all names of a tied one."""
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]
