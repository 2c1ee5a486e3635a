"""The shared value of a group of heads: the least squared error of the outputs, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.convert.merge.linear_algebra import (
    GroupMaps,
    energy_factor,
    pseudo_inverse,
    root_and_inverse,
    root_mean_squares,
)

_SWEEPS = 10  # of alternating least squares; more change the fourth digit of the error
_LEAST_GAIN = 1e-6  # share of the energy: a sweep that gains less is the last


def shared_value(attended: Tensor, values: Tensor, outputs: Tensor, owner: Tensor) -> GroupMaps:
    """Merge the m values of a group, so that W_O's outputs are recovered with the least squared
    error.

    A model is the same if one head's values are multiplied by a number and its rows of W_O divided
    by it. So heads are brought to equal energy first: otherwise a large head would push the others
    below the cuts of the inverses.

    Args:
        attended: (R, m e, m e) E[z z^T] for each of the group's R = m H / Hk query heads, z the
            attention-weighted average of the stacked values. (1, m e, m e) if all attend alike:
            then the start is the optimum.
        values: (m e, m e) second moments of the stacked values. The shared value gets their mean
            energy.
        outputs: (R, e, e) W_O,i W_O,i^T of each query head, W_O,i (e, D).
        owner: (R,), which of the m heads each query head reads.
    """
    dim = outputs.shape[1]
    sizes = root_mean_squares(values, dim)  # (m,)
    by_row = sizes.repeat_interleave(dim)
    by_query_head = sizes[owner.to(sizes.device)][:, None, None]

    shared = _shared_value_of_equal_heads(
        attended / by_row[:, None] / by_row, outputs * by_query_head.square(), owner
    )
    merge = shared.merge / by_row
    merged_energy = (merge @ values @ merge.T).trace()
    scale = energy_factor(values.trace() / len(sizes), merged_energy)
    return GroupMaps(merge * scale, shared.back * by_query_head / scale)


def _shared_value_of_equal_heads(attended: Tensor, outputs: Tensor, owner: Tensor) -> GroupMaps:
    """See `shared_value`; the scale of the shared value is not defined.

    Alternating least squares, from the optimum for equal attention in all query heads: the map to
    the shared value takes a line search along the preconditioned gradient, then each query head's
    map back is solved for.
    """
    dim = outputs.shape[1]
    heads = attended.shape[1] // dim

    # The optimum if all heads attend alike.
    root, inverse = root_and_inverse(attended.mean(0))
    gain = torch.block_diag(*(outputs[owner == head].sum(0) for head in range(heads)))
    top = torch.linalg.eigh(root @ gain @ root)[1][:, -dim:]
    merge = top.T @ inverse  # (e, m e)

    # For each query head, the rows of the value that it reads among the stacked ones.
    head_dims = (owner[:, None] * dim + torch.arange(dim)).to(attended.device)
    query_head = torch.arange(len(owner), device=head_dims.device)[:, None]
    crossed = attended.expand(len(owner), -1, -1)[query_head, head_dims]  # (R, e, m e) E[z_a z^T]
    energy = (outputs * crossed.take_along_dim(head_dims[:, None], 2)).sum()
    restore = _restoring_maps(merge, attended, crossed)

    # `move` is the gradient of `merge` for the present maps back, divided by the curvature that the
    # loss would have if all query heads attended alike (`inverse @ inverse` inverts the mean of
    # `attended`). Along it the loss is quadratic: the step is slope / curvature, and gains
    # slope^2 / curvature.
    sweeps = _SWEEPS if len(attended) > 1 else 0
    for _ in range(sweeps):
        gains = restore.mT @ outputs @ restore
        missing = crossed - restore @ merge @ attended
        gradient = (restore.mT @ outputs @ missing).sum(0)
        move = pseudo_inverse(gains.sum(0)) @ gradient @ inverse @ inverse

        slope = (gradient * move).sum()
        curvature = (move * (gains @ move @ attended).sum(0)).sum()
        if slope.square() <= _LEAST_GAIN * energy * curvature:
            break
        merge = merge + slope / curvature * move
        restore = _restoring_maps(merge, attended, crossed)

    return GroupMaps(merge, restore)


def _restoring_maps(merge: Tensor, attended: Tensor, crossed: Tensor) -> Tensor:
    """Least-squares maps (R, e, e) from the shared value to the value that each query head reads.

    merge: (e, m e), the shared value is merge @ z.
    crossed: (R, e, m e) E[z_a z^T], z_a the value that the query head reads.
    """
    return crossed @ merge.T @ pseudo_inverse(merge @ attended @ merge.T)
