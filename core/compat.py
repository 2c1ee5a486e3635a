"""Private names of libraries: all that the product touches, each with what it is needed for.

No public name does the same. All are in the versions of constraints-lowest.txt (torch 2.13,
transformers 5.18, accelerate 1.10, datasets 4.3) and in the newest; a comment names the major
version that brought it. tests/test_structure.py fails where a name is gone and where another file
touches one. Only files of `modeling` read `_attn_implementation` themselves: they lie beside
weights, where this package need not be installed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def build_model(cls: Any, config: Any, **options: Any) -> Any:
    """A model of the class `cls` with new weights.

    `options` are `dtype` and `attn_implementation`.
    """
    # PreTrainedModel._from_config, transformers 4: from_config is for Auto classes, constructors
    # take no dtype.
    return cls._from_config(config, **options)


def weight_conversions(model: Any) -> list[Any] | None:
    """How stored tensors became the model's parameters, by which they are stored again.

    None without weights.
    """
    # PreTrainedModel._weight_conversions, transformers 5: what save_pretrained reverts.
    return getattr(model, "_weight_conversions", None)


def set_weight_conversions(model: Any, conversions: list[Any]) -> None:
    model._weight_conversions = conversions


def load_weights(model: Any, tensors: Mapping[str, Any], options: Any) -> Any:
    """Load tensors, or slices of files, into the empty parameters of a model; returns what was
    missing and unexpected.

    options: A LoadStateDictConfig of transformers.
    """
    present = {
        name for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta
    }
    for name in present:
        # _is_hf_initialized, transformers 4: else transformers draws what no file has, like
        # adapters, anew.
        model.get_parameter_or_buffer(name)._is_hf_initialized = True
    # PreTrainedModel._load_pretrained_model, transformers 5: from_pretrained builds its model
    # without shards.
    info, _ = model._load_pretrained_model(model, tensors, None, options)
    info.missing_keys -= present
    # PreTrainedModel._finalize_model_loading, transformers 5: ties weights and fills buffers after
    # that.
    return model._finalize_model_loading(model, options, info)


def unsaved_names(model: Any) -> set[str]:
    """Names of parameters that the class computes and does not save, like sinusoidal positions."""
    # PreTrainedModel._keys_to_ignore_on_save, transformers 4: what no checkpoint need hold.
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def initialize(model: Any, module: Any) -> None:
    """Compute or draw the weights of one module of a model."""
    # PreTrainedModel._init_weights, transformers 4: the public init_weights is for all of a model.
    model._init_weights(module)


def layer_classes(model: Any) -> set[str]:
    """Names of the classes of layers, which are sharded one at a time."""
    # PreTrainedModel._no_split_modules, transformers 4: accelerate reads it too.
    return set(model._no_split_modules or ())


def set_layer_classes(module: Any, names: Iterable[str]) -> None:
    """Name the classes of layers that accelerate shards one at a time."""
    module._no_split_modules = sorted(names)


def attention_name(model: Any) -> str:
    """The attention implementation of a model: `sdpa`, `eager` ..."""
    # PreTrainedConfig._attn_implementation, transformers 4: there is a public setter only.
    return str(model.config._attn_implementation)


def reset_run_flags(config: Any) -> None:
    """Let a config object, and those inside it, have transformers' own defaults for how a model is
    run.
    """
    from transformers import PreTrainedConfig

    # PreTrainedConfig._attn_implementation, transformers 4, and _experts_implementation,
    # transformers 5: what config.json names stays there, and no public function takes it away.
    config._attn_implementation = None
    config._experts_implementation = None
    config.output_attentions = False
    config.output_hidden_states = False
    config.return_dict = True
    config.use_cache = True
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            reset_run_flags(part)


def supports_sdpa(cls: Any) -> bool:
    """Whether the classes' attention may be torch's.

    gpt_oss and its like have sinks, which it lacks.
    """
    # PreTrainedModel._supports_sdpa, transformers 4: else a class would be built to fail.
    return bool(cls._supports_sdpa)


def fingerprint(data: Any) -> str:
    """A hash of a data set of the hub by its commit, configuration and split."""
    # Dataset._fingerprint, datasets 1: the key of the library's own cache.
    return str(data._fingerprint)


@contextmanager
def fresh_accelerator() -> Iterator[None]:
    """accelerate remembers the first precision of a process: that of the caller is restored when
    the block ends.
    """
    from accelerate.state import AcceleratorState, GradientState

    # _shared_state, accelerate 0: the states of accelerate are singletons, which no public function
    # resets.
    states = [state._shared_state for state in (AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    try:
        for state in states:
            state.clear()
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)
