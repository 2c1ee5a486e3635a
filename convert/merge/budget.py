"""Choose the KV heads of each layer for a given share of all KV heads (`--kv-budget`).

Where all layers keep the whole context, that is the share of the KV cache's bytes.

The loss of a layer is measured with only its heads merged, in closed form: the KL divergence of
next-token distributions from the base model's, on calibration text. A knapsack then finds the
numbers of heads with the least sum of losses. Layers merged together lose more than that sum; as
long as all losses grow in proportion, the choice stays optimal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import ModelConfig, read_config
from gqa.convert.heads.config_edits import valid_kv_heads
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.layer import Stream
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.quality import CHECKED_TOKENS
from gqa.convert.methods.table import BUDGET_METHOD
from gqa.convert.plan import Plan
from gqa.convert.planning import make_plan
from gqa.convert.recast.targets import recast_as_is
from gqa.core.console import SILENT, Watcher
from gqa.core.errors import RefusedError
from gqa.corpus.likelihood import kl_divergence

# Of calibration text at most: layers are fitted to four fifths of them and measured on the rest.
SAMPLED_TOKENS = 20_480

# By layer: number of KV heads -> KL divergence in nats per token.
Losses = Sequence[Mapping[int, float]]


def allotted(losses: Losses, budget: int) -> tuple[int, ...]:
    """KV heads of each layer with the least sum of losses, at most `budget` heads in all
    (multiple-choice knapsack).
    """
    # Forward: the least sum of losses of the layers so far, by the heads available to them (0 to
    # `budget`), and the heads of the last of these layers that it takes.
    least = np.zeros(budget + 1)
    choices_by_layer: list[np.ndarray] = []
    for layer in losses:
        counts = sorted(layer)
        totals = np.full((len(counts), budget + 1), math.inf)
        for row, count in zip(totals, counts, strict=True):
            if count <= budget:
                row[count:] = least[: budget + 1 - count] + layer[count]

        best = totals.argmin(0)
        least = totals.min(0)
        choices_by_layer.append(np.array(counts)[best])

    # Backward: each layer's choice, with what the layers after it leave.
    heads: list[int] = []
    available = budget
    for choices in reversed(choices_by_layer):
        count = int(choices[available])
        heads.append(count)
        available -= count
    return tuple(reversed(heads))


def uneven_heads(checkpoint: Checkpoint, share: float) -> tuple[int, ...]:
    """Heads by layer with which a plan shows whether layers may differ: all in the first, the
    fewest in the others.

    Raises RefusedError if the fewest heads everywhere exceed `share` of all heads.
    """
    config = read_config(recast_as_is(checkpoint).config, checkpoint.name)
    heads = config.main_heads.kv
    counts = _counts(config)
    if min(counts) > share * heads + 1e-9:
        raise RefusedError(
            f"--kv-budget {share:g} is not possible for the {heads} KV heads of "
            f"{checkpoint.name}; pass at least {min(counts) / heads:.3g}"
        )

    fewest_in_others = [min(counts)] * (config.layers - 1)
    return (heads, *fewest_in_others)


def _counts(config: ModelConfig) -> list[int]:
    """The numbers of KV heads that a layer may have, at most the base model's."""
    return [count for count in valid_kv_heads(config) if count <= config.main_heads.kv]


def heads_within(
    checkpoint: Checkpoint, share: float, options: MapsOptions, watcher: Watcher = SILENT
) -> tuple[tuple[int, ...], Losses]:
    """KV heads of each layer within `share` of all KV heads, and the losses of each layer
    by number of heads.

    Raises RefusedError if text or model cannot be used.
    """
    config = read_config(recast_as_is(checkpoint).config, checkpoint.name)
    heads = config.main_heads.kv
    layers = config.layers

    # 1. The text, without the blocks on which the result is compared with the base model.
    heldout_tokens = CHECKED_TOKENS if options.check else 0
    reader = CalibrationReader(options.text, checkpoint, options.device, watcher)
    blocks, _ = reader.blocks_and_heldout(heldout_tokens)
    if len(blocks) < 2:
        raise RefusedError(
            f"{', '.join(options.text.sources)} gives only one block of {options.text.length} "
            "tokens, but --kv-budget needs two: one to convert layers, one to measure them; pass "
            "more text, or a smaller --context"
        )
    fitted, measured = _fitted_and_measured(blocks)

    # 2. The loss of each layer with each number of heads.
    losses: list[dict[int, float]] = [{heads: 0.0} for _ in range(layers)]
    for groups in _counts(config):
        if groups == heads:
            continue
        alone = make_plan(checkpoint, groups, BUDGET_METHOD)
        for layer, lost in enumerate(losses_alone(alone, fitted, measured, options, watcher)):
            losses[layer][groups] = lost

    # 3. The numbers of heads.
    budget = math.floor(share * layers * heads + 1e-9)
    return allotted(losses, budget), losses


def _fitted_and_measured(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks that layers are fitted to, and a quarter as many that they are measured on, of
    together about SAMPLED_TOKENS tokens: both are spread evenly over the text.
    """
    count = max(2, SAMPLED_TOKENS // blocks.shape[1])
    count = min(count, len(blocks))
    picks = np.linspace(0, len(blocks) - 1, count).astype(int)
    measured = slice(1, None, 5)
    return blocks[np.delete(picks, measured)], blocks[picks[measured]]


@torch.no_grad()
def losses_alone(
    plan: Plan, blocks: Tensor, measured: Tensor, options: MapsOptions, watcher: Watcher
) -> list[float]:
    """KL divergence from the base model in nats per token, by layer, if only that layer had the
    plan's heads.

    Layers are fitted to `blocks` (N, T) and measured on `measured` (M, T). Memory: M x T x D
    numbers for each layer, the logits of one block, and the weights of one layer.
    """
    calibrator = Calibrator(plan, blocks, options)
    pair = calibrator.pair
    watcher.stage(f"measuring layers, G = {plan.kv_heads}", calibrator.n_layers, "layer")

    # Its hidden states in the base model, and in each model that is converted in one layer only.
    base = pair.states_before_layers({"input_ids": measured}, copies=1 + calibrator.n_layers)
    pair.base_model.streams.append(base)
    changed_alone: list[Stream] = []  # by layer: hidden states if only that layer is converted
    for layer in range(calibrator.n_layers):
        # This text goes through the converted layer, and through the base model's from then on.
        alone = base.clone()
        changed_alone.append(alone)
        pair.converted_model.streams.append(alone)
        calibrator.run(layer)
        pair.converted_model.streams.remove(alone)
        pair.base_model.streams.append(alone)

        # The next layer is fitted as if it were the first one that changes.
        states = calibrator.calibration_states
        states.converted.hidden.copy_(states.base.hidden)
        watcher.update(1)

    lost = [0.0] * calibrator.n_layers
    for block in range(len(measured)):
        rows = slice(block, block + 1)
        base_log_probs = pair.base_model.logits(base.hidden[rows]).log_softmax(-1)
        for layer, stream in enumerate(changed_alone):
            log_probs = pair.base_model.logits(stream.hidden[rows]).log_softmax(-1)
            lost[layer] += float(kl_divergence(base_log_probs, log_probs).sum())
    return [nats / measured.numel() for nats in lost]
