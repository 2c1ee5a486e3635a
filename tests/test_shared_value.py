"""The value that several heads share: nearly as good as any that gradients find, unlike the principal one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gqa.convert.align import alignment
from gqa.convert.align.alignment import shared_value

HEADS, REPEAT, DIM = 3, 2, 6
OWNER = torch.arange(HEADS).repeat_interleave(REPEAT)


def made(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """What query heads see (some directions more than others, each somewhat in its own way), all values, W_O^T W_O."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    width = HEADS * DIM
    spread = (normal(width, width) + normal(HEADS * REPEAT, width, width)) * (normal(width) / 2).exp()
    seen, w_o = spread @ spread.mT, normal(HEADS * REPEAT, DIM, 8 * DIM)
    return seen, seen.mean(0), w_o @ w_o.mT


def left(project: Tensor, restore: Tensor, seen: Tensor, outputs: Tensor) -> Tensor:
    """The share of the energy of outputs that is lost, straight from the definition."""
    lost, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for head, back in enumerate(restore):
        pick = torch.zeros(DIM, HEADS * DIM, dtype=torch.float64)
        pick[:, int(OWNER[head]) * DIM : (int(OWNER[head]) + 1) * DIM] = torch.eye(DIM)
        off = pick - back @ project
        lost = lost + (outputs[head] @ off @ seen[head] @ off.T).trace()
        whole = whole + (outputs[head] @ pick @ seen[head] @ pick.T).trace()
    return lost / whole


def descended(project: Tensor, restore: Tensor, seen: Tensor, outputs: Tensor) -> float:
    """What quasi-Newton steps on both make of it."""
    weights = [project.clone().requires_grad_(), restore.clone().requires_grad_()]
    optimizer = torch.optim.LBFGS(weights, max_iter=400, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = left(*weights, seen, outputs)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(left(*weights, seen, outputs).detach())


@pytest.mark.parametrize("seed", range(4))
def test_most_of_what_gradients_would_gain_is_gained(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, values, outputs = made(seed)
    found = shared_value(seen, values, outputs, OWNER)
    monkeypatch.setattr(alignment, "_ROUNDS", 0)
    start = shared_value(seen, values, outputs, OWNER)
    least = descended(found.merge, found.back, seen, outputs)
    before, after = (float(left(maps.merge, maps.back, seen, outputs)) for maps in (start, found))
    assert least < 0.75 * before  # there is something to gain
    assert after - least < 0.2 * (before - least)


def test_values_that_are_one_lose_nothing() -> None:
    """Each head's value is an invertible map of the first one's."""
    seen, _, outputs = made(0)
    generator = torch.Generator().manual_seed(1)
    copies = torch.cat([torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) for _ in range(HEADS)])
    seen = copies @ seen[:, :DIM, :DIM] @ copies.T
    found = shared_value(seen, seen.mean(0), outputs, OWNER)
    assert float(left(found.merge, found.back, seen, outputs)) < 1e-12
    energy = (found.merge @ seen.mean(0) @ found.merge.T).trace()
    assert energy == pytest.approx(float(seen.mean(0).trace()) / HEADS)  # it keeps the size of what it stands for
