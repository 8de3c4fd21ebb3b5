"""Half-quadratic quantization: scales and zeros that minimise a norm of the error in which outliers count little. No data is needed.

For each block of weights x it searches for the grid that minimises

    sum(|x - dequantize(q)|^p),  p = 0.7,

in which the few weights that a fine grid clips cost less than in a squared error. The paper splits this with one auxiliary
variable e for each weight, sum(|e|^p) + beta/2 * (e - (x - dequantize(q)))^2, and alternates

    e      <-  shrink(x - dequantize(q)),    shrink(v) = sign(v) * max(0, |v| - |v|^(p-1) / beta)
    grid   <-  least squares of dequantize(q) against x - e, the codes q held fixed; then new codes

while beta grows. Errors are measured in steps of the block's grid, so that beta means the same for every weight. The paper fixes
the scale and updates only the zero; here least squares also updates the scale, which is all there is where a format has no zero.
An integer zero point is updated by the paper's rule and rounded. The search starts from `absmax`'s grid and, for symmetric 4-bit
codes, which reach from -8 to 7, also from the one that puts the largest weight on -8. (Started from a grid that clips, it would end
at grids that clip much, which are good by this norm and bad for language models.) Of all grids on the way the best by the first
equation, with scale and zero as stored, is kept.

Source: Badri, Shaji: Half-Quadratic Quantization of Large Machine Learning Models (Mobius Labs, 2023), with its p, beta and
growth of beta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax_grid, decode, encode, stored_grid
from halfbyte.quantizers.builder import Builder, Grid, as_blocks
from halfbyte.quantizers.mse import Blocks, refit
from halfbyte.quantizers.threads import each

_P = 0.7
_BETA, _GROWTH = 10.0, 1.01
_ROUNDS = 20


@torch.no_grad()
def hqq(weight: Tensor, fmt: Format, name: str = "weight") -> Codes:
    """Quantize `weight` to `fmt` by the rules above.

    Arguments, result and errors as for `absmax`; about a hundred times its work. Memory beyond the result: a few MB.
    """
    builder = Builder(weight, fmt, name)
    starts = ((group, absmax_grid(builder, group)) for group in builder)
    for group, best in each(lambda start: (start[0], _search(Blocks(fmt, start[0]), start[1])), starts, builder.rows.device):
        builder.add(group, best, (encode(fmt, as_blocks(rows, fmt), best) for rows in group))
    return builder.codes()


def _search(blocks: Blocks, plain: Grid) -> Grid:
    best = plain
    least = torch.full(plain.scale.shape, torch.inf, dtype=torch.float64, device=plain.scale.device)
    for grid in _starts(blocks, plain):
        going = torch.ones_like(least, dtype=torch.bool)  # blocks stop independently of each other
        for step in range(_ROUNDS):
            loss, moved = _round(blocks, grid, _BETA * _GROWTH**step)
            better = going & (loss < least)  # False where a scale overflowed
            best, least = grid.where(better, best), torch.where(better, loss, least)
            going = better if step else going & loss.isfinite()  # from a grid that overflows, only ones that clip much follow
            if not bool(going.any()):
                break
            grid = moved
    return best


def shrink(v: Tensor, beta: float) -> Tensor:
    """The e that approximately minimises |e|^p + beta/2 * (e - v)^2: the generalized soft threshold of the paper."""
    return v.sign() * (v.abs() - v.abs().pow(_P - 1) / beta).clamp_min(0)


def _starts(blocks: Blocks, plain: Grid) -> Iterator[Grid]:
    """Grids that clip nothing, or next to nothing."""
    yield plain
    fmt = blocks.fmt
    if fmt.zero == "none" and fmt.bits == 4:
        yield stored_grid(fmt, torch.where(-blocks.lo > blocks.hi, blocks.lo, blocks.hi) / fmt.q_min, None)


def _round(blocks: Blocks, grid: Grid, beta: float) -> tuple[Tensor, Grid]:
    """sum(|x - dequantize(q)|^p) of each block of a group on a grid, float64 [r, nb], and the grid after one round."""
    loss = torch.zeros(grid.scale.shape, dtype=torch.float64, device=grid.scale.device)
    scale, lo = refit(_targets(blocks, grid, beta, loss), grid, blocks.unit)
    if blocks.fmt.zero == "point" and grid.zero is not None:
        # The paper's z = mean(q - (x - e) / s): with the codes held fixed, the zero point for this scale.
        total, count = torch.zeros_like(scale), torch.zeros_like(scale)
        for target, q, times in _targets(blocks, grid, beta):
            total += times(q - target / scale.unsqueeze(-1)).sum(dim=-1)
            count += times(torch.ones_like(q[:1])).sum(dim=-1)
        lo = -scale * (total / count)
    return loss, stored_grid(blocks.fmt, torch.nan_to_num(scale), None if lo is None else torch.nan_to_num(lo))


def _targets(
    blocks: Blocks, grid: Grid, beta: float, loss: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]:
    """`Blocks.encoded` of x - e. Adds sum(|x - dequantize(q)|^p) to `loss`."""
    step = grid.scale.float().abs().unsqueeze(-1)
    for x, q, times in blocks.encoded(grid):
        error = x - decode(blocks.fmt, q, grid)
        if loss is not None:
            loss += times(error.abs().pow_(_P)).sum(dim=-1).double()
        yield x - torch.nan_to_num(shrink(error / step, beta) * step), q, times
