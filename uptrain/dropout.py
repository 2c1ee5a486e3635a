"""Turn off what a model does at random in training: dropout, dropped layers and paths, jitter of
routers.

With them a step would depend on the random numbers of each forward pass, and so on --micro-batch
and on the number of processes. Distillation asks a model to predict what its teacher predicts,
which noise only hinders; and few models of today were trained with dropout.

Models take a rate from one of three places, and all three are set to zero: modules of torch
(`nn.Dropout`), attributes of their own modules (`attention_dropout` of an attention module,
`layerdrop` of a stack of layers, `drop_prob`), and attributes of the config, which some read in
every pass. The names were found by listing each attribute of transformers' modeling files that is
given to a dropout function or compared with a random number: all contain "drop".

Jitter is another case: in Phi-3.5-MoE its size also belongs to the deterministic part of the
router. So routers that have it stay in evaluation mode instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_RATES_OF_DROP_CLASSES = ("p", "prob", "rate")  # attributes of custom classes like `DropPath`
_OTHER_HEADS = ("classifier", "summary")  # in names of rates of heads that predict no tokens


def turn_off_dropout(model: Any) -> dict[str, float]:
    """Set every dropout rate of a model to zero.

    Returns:
        The rates of its config that were not zero, by name, and under the names of their classes
        those of modules that no rate in the config explains.
    """
    rates = dict[str, float]()
    for config in _configs_of(model):
        for name, rate in _rates_of(config, "drop"):
            if not any(part in name for part in _OTHER_HEADS):
                rates[name] = rate
            _set_to_zero(config, name)

    for module in model.modules():
        if isinstance(module, _MODULES):
            if module.p and module.p not in rates.values():
                rates[type(module).__name__] = float(module.p)
            module.p = 0.0

        for name, _ in [*_rates_of(module, "drop")]:
            setattr(module, name, 0.0)

        if "drop" in type(module).__name__.lower():
            for name in _RATES_OF_DROP_CLASSES:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    return rates


def has_jitter(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs by random numbers, or draws experts at random, in
    training mode.
    """
    return any(True for _ in _rates_of(module, "jitter"))


def _configs_of(model: nn.Module) -> Iterator[Any]:
    """All configs that modules of a model have, and all in them, each once: objects or
    dictionaries.
    """
    waiting = list[Any]()
    for module in model.modules():
        waiting += [value for value in vars(module).values() if hasattr(value, "to_dict")]

    configs = dict[int, Any]()
    while waiting:
        config = waiting.pop()
        if id(config) in configs:
            continue
        configs[id(config)] = config

        entries = config if isinstance(config, dict) else vars(config)
        for value in entries.values():
            if isinstance(value, dict) or hasattr(value, "to_dict"):
                waiting.append(value)
    yield from configs.values()


def _rates_of(owner: Any, word: str) -> Iterator[tuple[str, float]]:
    """The attributes, or entries, with a word in their names that are a rate above zero."""
    entries = owner if isinstance(owner, dict) else vars(owner)
    for name, value in [*entries.items()]:
        has_word = isinstance(name, str) and word in name.lower()
        if has_word and isinstance(value, float) and value > 0:
            yield name, value


def _set_to_zero(owner: Any, name: str) -> None:
    """Set an attribute of an object, or an entry of a dictionary, to zero."""
    if isinstance(owner, dict):
        owner[name] = 0.0
    else:
        setattr(owner, name, 0.0)
