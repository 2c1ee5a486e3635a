"""Layer by layer: the statistics of what heads compute on a text, the maps that follow, and the next layer's input.

Two streams of hidden states run side by side: the source's own, which sets what every layer's attention should give,
and that of the converted model, which is what each layer will really be given, so that every layer also corrects what
those before it did (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gqa.convert.alignment import ridge, shared_key, shared_value
from gqa.convert.attention import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.checkpoint import Checkpoint
from gqa.convert.errors import RefusedError
from gqa.convert.layerwise import Layerwise, Stop, run_layer, watched
from gqa.convert.layout import LayerHeads
from gqa.convert.maps import HeadMaps
from gqa.convert.methods import Merging, mean
from gqa.convert.naming import parameter_names
from gqa.convert.plan import Plan, rules_beside
from gqa.convert.refine import Calls, Refinement, refine
from gqa.convert.symmetries import Rotary, Symmetry, find_symmetry

Progress = Callable[[int], None]


@dataclass(frozen=True)
class LayerResult:
    """What came out of one layer: the maps, and the error of its attention output relative to the source's
    (squares over squares), before and after the ridge refit of W_O.
    """

    module: AttentionModule
    maps: HeadMaps
    error: float
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class InMemory:
    """Maps that are not on disk, for one layer."""

    module: str
    maps: HeadMaps
    names: frozenset[str] = frozenset()

    def of(self, module: str) -> HeadMaps | None:
        return self.maps if module == self.module else None

    def tensor(self, name: str) -> Tensor:
        raise KeyError(name)


@dataclass(frozen=True)
class Streams:
    """Hidden states (N, T, D) of all blocks: the source's, and those of the model whose layers so far are converted."""

    source: Tensor
    converted: Tensor


@dataclass
class Pair:
    """The source and the converted model, one layer at a time, and how to get from one to the other."""

    plan: Plan
    source: Layerwise
    target: Layerwise
    modules: list[AttentionModule]
    batch: int
    given: dict[int, list[tuple[Any, dict[str, Any]]]] = field(default_factory=dict)  # by the number of rows

    @classmethod
    def open(cls, plan: Plan, device: str, dtype: torch.dtype, batch: int) -> Pair:
        checkpoint, config = plan.checkpoint, plan.config
        modules = [m for m in attention_modules(checkpoint, config) if m.layer < config.layers and not m.cross]
        path = modules[0].path
        source = Layerwise.make(_transformers_config(config.raw), path, _reader(checkpoint), dtype, device)
        target = Layerwise.make(_transformers_config(plan.new_config), path, _reader(checkpoint), dtype, device)
        return cls(plan, source, target, modules, batch)

    def module_of(self, layer: int) -> AttentionModule | None:
        """The attention module of a layer whose heads are merged."""
        found = [m for m in self.modules if m.layer == layer and self.changes(m)]
        if len(found) > 1:
            raise RefusedError(f"layer {layer} has several attention modules, which cannot be calibrated apart")
        return found[0] if found else None

    def changes(self, module: AttentionModule) -> list[Change]:
        beside = rules_beside(self.plan.config, self.plan.merging.method, self.plan.checkpoint.name)
        return module_changes(module, self.plan.config, self.plan.groups, beside)

    def weights(self, module: AttentionModule, maps: HeadMaps) -> dict[str, Tensor]:
        """The converted module's tensors by their stored names."""
        merging, read = Merging(self.plan.merging.method, maps=InMemory(module.path, maps)), self.plan.checkpoint.read
        found: dict[str, Tensor] = {}
        for change in self.changes(module):
            tensors = change.compute([read(spec).float() for spec in change.sources], merging)
            found |= dict(zip(change.outputs, tensors, strict=True))
        return found

    def load_target(self, module: AttentionModule, weights: Mapping[str, Tensor]) -> nn.Module:
        """The converted model's layer with these stored tensors."""
        names = parameter_names(self.target.model)
        return self.target.load(module.layer, {names[name]: tensor for name, tensor in weights.items()})

    def arrive(self, blocks: Tensor) -> Streams:
        """(N, T) ids -> what the first layer is given."""
        hidden = []
        for ids in blocks.split(self.batch):
            first, given = self.source.arrive(ids)
            if len(ids) not in self.given:
                self.given[len(ids)] = given
            hidden.append(first.cpu())
        states = torch.cat(hidden)
        return Streams(states, states.clone())

    def batches(self, stream: Tensor, layer: int) -> Iterator[tuple[slice, Tensor, Any]]:
        for start in range(0, len(stream), self.batch):
            piece = slice(start, min(start + self.batch, len(stream)))
            hidden = stream[piece].to(self.source.device)
            yield piece, hidden, self.given[len(hidden)][layer]


def _transformers_config(raw: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))


def _reader(checkpoint: Checkpoint) -> Callable[[Any], Callable[[str], Tensor]]:
    def reader(model: Any) -> Callable[[str], Tensor]:
        stored = {own: name for name, own in parameter_names(model).items()}

        def read(name: str) -> Tensor:
            if name not in stored or stored[name] not in checkpoint.tensors:
                raise RefusedError(
                    f"{name} is not stored as it is in {checkpoint.name}; it cannot be run layer by layer"
                )
            return checkpoint.read(checkpoint.tensors[stored[name]])

        return read

    return reader


def attention_of(layer: nn.Module, module: AttentionModule) -> nn.Module:
    """The attention submodule of a layer: the end of its stored path."""
    return layer.get_submodule(module.path.split(f".{module.layer}.", 1)[1])


@contextmanager
def inputs_of(module: nn.Module, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Meanwhile `note` is told what `module` is given."""
    handle = module.register_forward_pre_hook(lambda _, args: note(args[0]))
    try:
        yield
    finally:
        handle.remove()


def _until_stop(layer: nn.Module, hidden: Tensor, given: Any) -> None:
    try:
        run_layer(layer, hidden, given)
    except Stop:
        return
    raise RefusedError(f"{type(layer).__name__} does not call transformers' attention functions")


# ------------------------------------------------------------------------------------------------- one layer


@dataclass
class Moments:
    """Sums of products of what heads compute, float64. Shapes: see `shared_key` and `shared_value`."""

    keys: Tensor
    key_means: Tensor
    queries: Tensor
    values: Tensor
    count: int

    @classmethod
    def zeros(cls, heads: LayerHeads, groups: int) -> Moments:
        m, d, e = heads.kv // groups, heads.key_dim, heads.value_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            zeros(groups, m * d, m * d), zeros(groups, m * d), zeros(heads.kv, d, d), zeros(groups, m * e, m * e), 0
        )

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """(B, H, T, d) queries, (B, Hk, T, d) keys, (B, Hk, T, e) values."""
        groups = len(self.keys)
        keys, values = stack_groups(k, groups), stack_groups(v, groups)
        rows = keys.flatten(1, 2).double()  # (G, n, m d)
        self.keys += (rows.mT @ rows).cpu()
        self.key_means += rows.sum(1).cpu()
        rows = values.flatten(1, 2).double()
        self.values += (rows.mT @ rows).cpu()
        rows = q.transpose(0, 1).flatten(1, 2).double()  # (H, n, d)
        self.queries += (rows.mT @ rows).unflatten(0, (k.shape[1], -1)).sum(1).cpu()
        self.count += q.shape[0] * q.shape[2]


def stack_groups(heads: Tensor, groups: int) -> Tensor:
    """(B, Hk, T, d) -> (G, B, T, m * d)."""
    stacked: Tensor = heads.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return stacked.flatten(3)


def calibrate_layer(
    pair: Pair, streams: Streams, layer: int, how: Calibration, progress: Progress
) -> LayerResult | None:
    """The maps of one layer; both streams go through it. None where the layer has no heads to merge."""
    module = pair.module_of(layer)
    own = pair.source.load(layer)
    if module is None:
        for stream in (streams.source, streams.converted):
            for piece, hidden, given in pair.batches(stream, layer):
                stream[piece] = run_layer(own, hidden, given).cpu()
        pair.source.release(layer)
        return None
    attention = attention_of(own, module)
    symmetry = find_symmetry(pair.plan.config.text.model_type)
    seen = _run_source(pair, streams, layer, own, attention, symmetry)
    if symmetry:
        maps, error = _closed_form(pair, streams, module, own, attention, symmetry, seen.inputs, how.ridge)
    else:
        heads = pair.plan.config.heads(layer)
        maps, error = mean(heads.kv, heads.kv * pair.plan.groups // pair.plan.config.main.kv), float("nan")
    pair.source.release(layer)
    weights = pair.weights(module, maps)
    trained: dict[str, Tensor] = {}
    changed = pair.load_target(module, weights)
    if how.refine:
        trained, error = _refine(pair, streams, module, changed, seen.outputs, how.refine, progress)
        changed = pair.load_target(module, weights | trained)
    for piece, hidden, given in pair.batches(streams.converted, layer):
        streams.converted[piece] = run_layer(changed, hidden, given).cpu()
        progress(hidden.shape[0] * hidden.shape[1])
    pair.target.release(layer)
    return LayerResult(module, maps, error, trained)


@dataclass(frozen=True)
class Seen:
    """Of the source's attention on its own stream: what W_O is given, (N, T, H e), and what it gives, (N, T, D)."""

    inputs: Tensor
    outputs: Tensor


def _run_source(
    pair: Pair, streams: Streams, layer: int, own: nn.Module, attention: nn.Module, symmetry: Symmetry | None
) -> Seen:
    """The source's stream goes through the layer."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    watch = attention.get_submodule(symmetry.output.tensor) if symmetry else nn.Identity()
    hook = attention.register_forward_hook(lambda _, args, output: outputs.append(_first(output).cpu()))
    with inputs_of(watch, lambda given: inputs.append(given.cpu())):
        for piece, hidden, given in pair.batches(streams.source, layer):
            streams.source[piece] = run_layer(own, hidden, given).cpu()
    hook.remove()
    return Seen(torch.cat(inputs) if inputs else torch.empty(0), torch.cat(outputs))


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _refine(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    changed: nn.Module,
    targets: Tensor,
    how: Refinement,
    progress: Progress,
) -> tuple[dict[str, Tensor], float]:
    """The converted module's trained tensors by their stored names, and the error that is left."""
    attention, calls = attention_of(changed, module), Calls()

    def stop(*given: Any) -> None:
        raise Stop

    hook = attention.register_forward_hook(stop)
    with calls.of(attention), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, module.layer):
            _until_stop(changed, hidden, given)
    hook.remove()
    names = parameter_names(pair.target.model)
    own = {id(parameter): name for name, parameter in attention.named_parameters()}
    start, stored = {}, {}
    for name in (name for change in pair.changes(module) for name in change.outputs):
        parameter = pair.target.model.get_parameter(names[name])
        start[own[id(parameter)]], stored[own[id(parameter)]] = parameter.detach(), name
    with torch.enable_grad():
        best, _, error = refine(attention, start, calls, targets, how, progress)
    return {stored[name]: tensor for name, tensor in best.items()}, error


def _closed_form(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    own: nn.Module,
    attention: nn.Module,
    symmetry: Symmetry,
    targets: Tensor,
    strength: float,
) -> tuple[HeadMaps, float]:
    """Keys, then values as the merged attention sees them, then the refit of W_O."""
    heads, layer = pair.plan.config.heads(module.layer), module.layer
    groups = heads.kv * pair.plan.groups // pair.plan.config.main.kv
    moments, values = _watch_source(pair, streams, layer, own, attention, Moments.zeros(heads, groups))
    rotary = symmetry.rotary(pair.plan.config.text, layer, heads.key_dim)
    maps = _key_maps(moments, heads, groups, rotary, symmetry)
    maps = _value_maps(pair, streams, module, maps, moments, values, symmetry)
    return _refit(pair, streams, module, maps, symmetry, targets, strength)


def _watch_source(
    pair: Pair, streams: Streams, layer: int, own: nn.Module, attention: nn.Module, moments: Moments
) -> tuple[Moments, list[Tensor]]:
    """Moments of the source's heads on the converted stream, and all values (B, Hk, T, e)."""
    values: list[Tensor] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        if not bool(q.isfinite().all() & k.isfinite().all() & v.isfinite().all()):
            raise RefusedError(f"layer {layer} computes NaN or Inf on the calibration text; the model is broken there")
        moments.add(q, k, v)
        values.append(v.cpu())
        raise Stop

    with watched(attention, attend), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, layer):
            _until_stop(own, hidden, given)
    return moments, values


def _key_maps(moments: Moments, heads: LayerHeads, groups: int, rotary: Rotary, symmetry: Symmetry) -> HeadMaps:
    """Shared keys with what they ask of the queries; values and outputs are still to come (first of each group)."""
    m, n = heads.kv // groups, moments.count
    weights = torch.zeros(groups, m, dtype=torch.float64)
    weights[:, 0] = 1.0
    if not symmetry.free_keys:
        return HeadMaps(torch.full_like(weights, 1 / m), weights)
    key, query = [], []
    repeat = heads.query // heads.kv
    for j in range(groups):
        found = shared_key(
            moments.keys[j] / n, moments.queries[j * m : (j + 1) * m] / n, moments.key_means[j] / n, rotary
        )
        key.append(found.key)
        query.append(found.query.repeat_interleave(repeat, 0))
    return HeadMaps(torch.stack(key), weights, torch.cat(query))


def _value_maps(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    maps: HeadMaps,
    moments: Moments,
    values: Sequence[Tensor],
    symmetry: Symmetry,
) -> HeadMaps:
    """Shared values from what every query head sees of the stacked values under the merged attention."""
    heads = pair.plan.config.heads(module.layer)
    groups, e = len(moments.values), heads.value_dim
    m, repeat = heads.kv // groups, heads.query // heads.kv
    seen = torch.zeros(heads.query, m * e, m * e, dtype=torch.float64)
    changed = pair.load_target(module, pair.weights(module, maps))
    attention = attention_of(changed, module)
    waiting = iter(values)

    def attend(own: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        stacked = stack_groups(next(waiting).to(k.device), groups).transpose(0, 1)  # (B, G, T, m e)
        rows = pair.target.attend(own, q, k, stacked, mask, **options)  # (B, T, H, m e)
        for head in range(heads.query):
            one = rows[:, :, head].flatten(0, 1).double()
            seen[head] += (one.T @ one).cpu()
        raise Stop

    with watched(attention, attend), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, module.layer):
            _until_stop(changed, hidden, given)
    w_o = _output_weight(pair, module, symmetry).double().unflatten(0, (heads.query, e))  # (H, e, D)
    owner = torch.arange(m).repeat_interleave(repeat)
    value, output = [], []
    for j in range(groups):
        of = slice(j * m * repeat, (j + 1) * m * repeat)
        found = shared_value(seen[of] / moments.count, moments.values[j] / moments.count, w_o[of] @ w_o[of].mT, owner)
        value.append(found.value)
        output += list(found.output)
    return HeadMaps(maps.key, torch.stack(value), maps.query, torch.block_diag(*output))


def _output_weight(pair: Pair, module: AttentionModule, symmetry: Symmetry) -> Tensor:
    """The source's W_O transposed, (H e, D)."""
    spec = module.tensors[f"{symmetry.output.tensor}.weight"]
    return pair.plan.checkpoint.read(spec).float().T


def _refit(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    maps: HeadMaps,
    symmetry: Symmetry,
    targets: Tensor,
    strength: float,
) -> tuple[HeadMaps, float]:
    """W_O once more, in least squares over all heads, from what the merged heads really give; with the error left."""
    assert maps.output is not None
    changed = pair.load_target(module, pair.weights(module, HeadMaps(maps.key, maps.value, maps.query)))
    output = attention_of(changed, module).get_submodule(symmetry.output.tensor)
    width = len(maps.output)
    gram, cross = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    wanted = torch.zeros_like(gram)
    waiting = iter(targets.split(pair.batch))

    def note(given: Tensor) -> None:
        rows, target = given.flatten(0, 1).double(), next(waiting).to(given.device).flatten(0, 1).double()
        gram.add_((rows.T @ rows).cpu())
        cross.add_((rows.T @ target).cpu())
        wanted.add_((target.T @ target).cpu())
        raise Stop

    with inputs_of(output, note), torch.no_grad():
        for _, hidden, given in pair.batches(streams.converted, module.layer):
            _until_stop(changed, hidden, given)
    count = targets.shape[0] * targets.shape[1]
    found = ridge(gram / count, cross / count, maps.output, strength)
    w_o = _output_weight(pair, module, symmetry).double()

    def energy(matrix: Tensor) -> float:
        return float((w_o.T @ matrix @ w_o).trace())

    left = found @ gram @ found.T - found @ cross - cross.T @ found.T + wanted
    return HeadMaps(maps.key, maps.value, maps.query, found), energy(left) / max(energy(wanted), 1e-300)


@dataclass(frozen=True)
class Calibration:
    """How maps are found.

    ridge: Strength of the refit of W_O, relative to the mean energy of a head's outputs.
    refine: How layers are trained after their closed form; None where they are not.
    batch: Blocks that go through a layer at a time.
    """

    ridge: float = 1e-4
    refine: Refinement | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: int = 8


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(self, plan: Plan, blocks: Tensor, how: Calibration, streams: Streams | None = None) -> None:
        """`blocks` are (N, T) token ids of calibration text, `streams` what an earlier one had after some layers."""
        self._pair, self._how = Pair.open(plan, how.device, how.dtype, how.batch), how
        with torch.no_grad():
            fresh = self._pair.arrive(blocks)
        self.streams = streams or fresh

    @property
    def layers(self) -> int:
        return len(self._pair.source.layers)

    @torch.no_grad()
    def run(self, layer: int, progress: Progress = lambda tokens: None) -> LayerResult | None:
        """The maps of one layer, the next in order; None where it has no heads to merge. `progress` is called with the
        number of tokens that went through it.
        """
        return calibrate_layer(self._pair, self.streams, layer, self._how, progress)
