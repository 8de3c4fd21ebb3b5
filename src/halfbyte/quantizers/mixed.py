"""Mixed precision: a format for each layer, so that the total loss is least within a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.errors import ArgumentError

_UNITS = 10_000  # of the budget: sizes are rounded up to whole ones


def allocate(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """For each layer the index of one of its choices, so that the sum of losses is least and the sum of sizes is within `budget`.

    Args:
        sizes, losses: Bytes and loss of each choice of each layer, [layers][choices]; a layer has at least one choice.
        budget: Bytes of all layers.

    A multiple-choice knapsack, solved by dynamic programming over the budget in 10 000 units: never over the budget, and optimal
    up to less than one unit per layer. Raises ArgumentError where the smallest choices together exceed the budget.
    """
    least = sum(min(row) for row in sizes)
    if least > budget:
        raise ArgumentError(
            f"the smallest formats together take {least} bytes, and the budget is {budget}: allow more bits or smaller formats"
        )
    # Sizes count from each layer's smallest choice, so that rounding up costs nothing where the budget is tight.
    spare = budget - least
    unit = max(1.0, spare / _UNITS)
    width = int(spare / unit) + 1
    best = torch.zeros(width, dtype=torch.float64, device="cpu")  # least loss with at most this many units
    chosen = []
    for row_sizes, row_losses in zip(sizes, losses, strict=True):
        options = []
        for size, loss in zip(row_sizes, row_losses, strict=True):
            extra = -int(-(size - min(row_sizes)) // unit)
            option = torch.full((width,), torch.inf, dtype=torch.float64, device="cpu")
            if extra < width:
                option[extra:] = best[: width - extra] + loss
            options.append((extra, option))
        table = torch.stack([option for _, option in options])
        best, index = table.min(dim=0)
        chosen.append((index, [extra for extra, _ in options]))
    answer, at = [], width - 1
    for index, extras in reversed(chosen):
        answer.append(int(index[at]))
        at -= extras[answer[-1]]
    return answer[::-1]
