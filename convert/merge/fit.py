"""Fit the maps of one attention module in closed form, on hidden states of calibration text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gqa.convert.head_maps import HeadMaps, query_order
from gqa.convert.heads.layouts import LayerHeads
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.rotary import Rotary, unrotated
from gqa.convert.merge.grouping import find_order
from gqa.convert.merge.layer import Attention, Stream, check_finite
from gqa.convert.merge.linear_algebra import CUT, add_products, pseudo_inverse, ridge
from gqa.convert.merge.moments import Moments, MomentSums, head_maps, heads_of, stack_groups
from gqa.convert.merge.pair import ModelPair
from gqa.convert.merge.rope import unrotate
from gqa.convert.merge.sensitivity import output_roots, query_sensitivity, visible_keys
from gqa.core.devices import as_float64, float64_device

# Of longer text only every n-th batch is used to fit keys and values (`fitted_batches`): this many
# positions, up to twice as many, with padding and validation blocks. More hardly improve them. The
# refit of W_O uses all positions that have weight.
FITTED_TOKENS = 16_384
# Attention weights (B H T S) up to which the stacked values (width m e) are attended in one call.
# Above, they are attended in m calls of width e, that of one head, for which torch has fused
# kernels that store no attention weights.
MAX_SCORES = 1 << 28


@dataclass(frozen=True)
class FittedModule:
    """The maps of one attention module, and their error.

    Attributes:
        module: The module.
        maps: Its maps.
        error: sum w |target - output|^2 / sum w |target|^2, w being the position weights; NaN if it
            was not measured. Targets include the drift.
            After the refit of W_O: on the text that W_O was fitted to, without its bias.
            After training: on the validation blocks, relative to the mean energy of all blocks,
            with the bias.
        trained_tensors: Tensors that were trained, by stored name. They take the place of the maps.
    """

    module: AttentionModule
    maps: HeadMaps
    error: float
    trained_tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FitTask:
    """One attention module to merge.

    Attributes:
        pair: Both models, and how heads are merged.
        module: The module.
        base_attention: The module in the base model. Modules before it in the same layer are
            converted there too, so that it reads what the converted module will read.
        converted_attention: The module in the converted model.
        inputs: Hidden states of the *converted* model before this layer. Both attentions read them
            here: also the base model's, whose heads are observed on what the merged heads will get.
            Only the targets come from the base model's own hidden states.
        targets: (N, T, D), the attention output that would make the converted model's hidden
            states those of the base model again.
        position_weights: (N, T), what a squared error at a position counts (`position_weights` in
            sensitivity.py).
    """

    pair: ModelPair
    module: AttentionModule
    base_attention: Attention
    converted_attention: Attention
    inputs: Stream
    targets: Tensor
    position_weights: Tensor

    @property
    def heads(self) -> LayerHeads:
        """The heads of the base model's module."""
        return self.pair.change_of(self.module).heads

    @property
    def groups(self) -> int:
        """Number of KV heads of the converted module."""
        return self.pair.change_of(self.module).groups

    def apply(self, maps: HeadMaps) -> None:
        """Give the converted module the merged heads of these maps."""
        self.converted_attention.layer.set_tensors(self.pair.merged_tensors(self.module, maps))

    def fitted_batches(self) -> list[Tensor]:
        """Every n-th batch of the text (indices of its blocks), with n = tokens / FITTED_TOKENS,
        rounded down: shorter text is used whole.

        Batches in which no position counts are left out before counting: of few long blocks, every
        n-th could be one of these.
        """
        step = max(1, self.position_weights.numel() // FITTED_TOKENS)
        batches = [rows for rows in self.inputs.batches() if self.position_weights[rows].any()]
        return batches[::step]


def fit_or_average(task: FitTask) -> FittedModule:
    """`fit_module`, or the mean of the heads if it is not known how they can be aligned."""
    if task.pair.symmetry is None:
        return FittedModule(task.module, task.pair.mean_maps(task.module), error=float("nan"))
    return fit_module(task)


def fit_module(task: FitTask) -> FittedModule:
    """Fit the maps of an attention module whose heads have a known symmetry.

    1. Measure second moments of the base model's queries, keys and values.
    2. Choose the heads of each group, if groups are searched for.
    3. Fit the shared key of each group.
    4. Fit the shared value of each group, under the attention that merged keys give.
    5. Refit W_O, so that the output comes closest to the targets.

    In step 1 each query counts as much as its sensitivity times the weight of its position, and all
    keys and values count alike. In steps 4 and 5 each position counts as much as its weight. The
    validation blocks of `refined` weigh nothing anywhere.
    """
    pair = task.pair
    symmetry = pair.symmetry
    assert symmetry is not None
    heads = task.heads
    groups = task.groups
    rotary = rotary_of(task, heads.key_dim)
    aligns_keys = symmetry.can_align_keys(pair.config.text_config)
    search = pair.searches_groups

    # W_O by query heads, transposed: (H, e, D).
    w_o = heads_of(pair.checkpoint, pair.changes_of(task.module))["output"]
    check_finite(task.module.layer, w_o)

    # 1. Second moments. For a search they are measured of all heads as one group, because those of
    # any group are a part of them.
    measured_groups = 1 if search else groups
    moments = measure_moments(task, rotary, w_o, measured_groups)

    # 2. The heads of each group; the search itself is small, and runs on the CPU.
    order = None
    if search:
        order = find_order(moments.cpu(), w_o.double(), groups, rotary, aligns_keys)
        moments = moments.regrouped(order, groups)
    if order:
        w_o = w_o[query_order(order, heads.query)]

    # 3. The shared keys. Those that pass a norm before the scores are averaged.
    keys = moments.shared_keys(rotary) if aligns_keys else None

    # 4. The shared values, under the attention of the merged keys: the converted module gets these
    # keys, and placeholders for values.
    task.apply(head_maps(heads, groups, keys=keys, values=None, order=order))
    attended = attended_moments(task, order)  # (H, m e, m e)
    w_o = w_o.to(attended.device).double()
    values = moments.shared_values(attended.unflatten(0, (groups, -1)), w_o)

    # 5. W_O, on the outputs of the merged heads. They are what enters it, so the converted module
    # does not need its own W_O yet.
    merged = head_maps(heads, groups, keys=keys, values=values, order=order)
    task.apply(replace(merged, output=None))
    return refit_output(task, merged, w_o.flatten(0, 1))


def rotary_of(task: FitTask, key_dim: int) -> Rotary:
    """The rotary embedding of the module's keys."""
    symmetry = task.pair.symmetry
    assert symmetry is not None
    length = task.inputs.hidden.shape[1]  # dynamic RoPE depends on it
    rotary = symmetry.rotary(task.pair.config.text_config, task.module.layer, key_dim, length)
    return unrotated(rotary) if task.module.kind == "cross" else rotary


def measure_moments(task: FitTask, rotary: Rotary, w_o: Tensor, groups: int) -> Moments:
    """Moments of the base model's heads on the converted model's hidden states.

    Args:
        rotary: Of the module's keys.
        w_o: (H, e, D).
        groups: G of the moments; 1 for all heads as one group.
    """
    length = task.inputs.hidden.shape[1]
    sums = MomentSums(task.heads, groups, length, float64_device(task.pair.base_model.device))
    roots = output_roots(w_o).to(task.pair.base_model.device)

    for rows in task.fitted_batches():
        capture = task.base_attention.capture_blocks(task.inputs, rows, "heads")
        q, k, v = capture.heads
        check_finite(task.module.layer, q, k, v)

        weights = task.position_weights[rows].to(q.device)
        sensitivity, distances = query_sensitivity(
            q,
            k,
            v,
            capture.mask,
            scaling=capture.call_options.get("scaling") or q.shape[-1] ** -0.5,
            roots=roots,
            weights=weights,
            bias=capture.call_options.get("position_bias"),
            causal=getattr(task.base_attention.module, "is_causal", True),
        )
        # The validation blocks of `refined` have no weight, and must not count for keys either.
        visible = visible_keys(capture.mask, k) * weights.any(1, keepdim=True)
        sums.add(unrotate(q, rotary), unrotate(k, rotary), v, sensitivity, visible, distances)
    return sums.averaged()


def attended_moments(task: FitTask, order: tuple[int, ...] | None) -> Tensor:
    """Second moments (H, m e, m e) of the attention-weighted stacked values of each query head.

    Attention is that of the converted module, which has the merged keys already. Values are the
    base model's, in the `order` of the groups.
    """
    heads = task.heads
    groups = task.groups
    width = heads.kv // groups * heads.value_dim
    device = float64_device(task.pair.base_model.device)
    moments = torch.zeros(heads.query, width, width, dtype=torch.float64, device=device)

    for rows in task.fitted_batches():
        # Computed a second time: storing the values of all batches takes memory.
        v = task.base_attention.capture_blocks(task.inputs, rows, "heads").heads[2]
        if order is not None:
            v = v[:, order]
        stacked = stack_groups(v, groups).transpose(0, 1)  # (B, G, S, m e)

        capture = task.converted_attention.capture_blocks(task.inputs, rows, "heads")
        q, k, _ = capture.heads
        attend = partial(
            task.pair.converted_model.attend,
            task.converted_attention.module,
            q,
            k,
            mask=capture.mask,
            **capture.call_options,
        )
        few_scores = q[..., 0].numel() * k.shape[2] <= MAX_SCORES
        part_width = width if few_scores else heads.value_dim
        parts = stacked.split(part_width, -1)
        attended = torch.cat([attend(v=part) for part in parts], -1)  # (B, T, H, m e)

        weight_roots = task.position_weights[rows].sqrt()[..., None, None].to(attended)
        add_products(moments, (attended * weight_roots).flatten(0, 1).transpose(0, 1))

    # Positions without weight are counted too: a common factor of all moments changes no map.
    positions = sum(task.position_weights[rows].numel() for rows in task.fitted_batches())
    return moments / positions


def refit_output(task: FitTask, maps: HeadMaps, w_o_t: Tensor) -> FittedModule:
    """Refit W_O by weighted ridge regression of the targets on merged heads' outputs.

    The converted module has these merged heads already.

    Returns the maps with the refitted `output`, and their error.

    Args:
        maps: With `output` (H e, H e), from which the refit starts: each query head's way back from
            the shared value; the identity for values that are only averaged.
        w_o_t: (H e, D), the base model's W_O, transposed.
    """
    assert maps.output is not None
    assert task.converted_attention.projection is not None
    device = task.pair.converted_model.device
    bias = getattr(task.converted_attention.projection, "bias", None)

    gram = w_o_t.new_zeros(len(w_o_t), len(w_o_t))
    cross = torch.zeros_like(w_o_t)
    energy = w_o_t.new_zeros(())
    for capture in task.converted_attention.capture(task.inputs, "head_outputs"):
        root = task.position_weights[capture.rows].flatten().sqrt()[:, None].to(device)
        target = task.targets[capture.rows].flatten(0, 1).to(device, torch.float32)
        if bias is not None:
            target = target - bias
        target = target * root
        outputs = capture.head_outputs.flatten(0, 1) * root

        energy += as_float64(target.square().sum(1)).sum()
        add_products(gram, outputs)
        add_products(cross, outputs, target)

    # `maps.output` is C of W_O' = W_O C. Here all is transposed: W_O'^T = C^T W_O^T.
    way_back = maps.output.to(w_o_t).T
    start = way_back @ w_o_t
    # With less text, the fit follows its accidents more, so the ridge is stronger.
    count = int(task.position_weights.count_nonzero())
    strength = task.pair.options.ridge / count
    solution = ridge(gram / count, cross / count, start, strength, block=task.heads.value_dim)
    way_back = way_back + _as_map(solution - start, w_o_t)

    # sum |x W - y|^2 = sum |y|^2 + tr W^T (gram W - 2 cross), W being the W_O^T that is stored.
    new_w_o_t = way_back @ w_o_t
    residual = float(energy) + float((new_w_o_t * (gram @ new_w_o_t - 2 * cross)).sum())
    error = max(residual, 0.0) / max(float(energy), 1e-300)
    return FittedModule(task.module, replace(maps, output=way_back.T.cpu()), error)


def _as_map(change: Tensor, w_o_t: Tensor) -> Tensor:
    """The map X (H e, H e) for which X W_O^T comes closest to a change (H e, D) of W_O^T.

    Maps are what is stored, and the writer multiplies them with the base model's W_O. If H e is at
    least D (and W_O has full rank), that gives any change exactly. If it is less, only the part of
    the change in the row space of W_O^T.
    """
    inverse = pseudo_inverse(w_o_t.T @ w_o_t, CUT**2)  # squared, as eigenvalues of W_O W_O^T are
    return change @ inverse @ w_o_t.T
