"""Scales that minimise the squared error of each block, sum((dequantize(q) - x)^2), found by a search.

The largest magnitude of a block is rarely the best end of its grid: clipping a few outliers makes the steps finer for all the
other weights. Of each block this tries, in order,

    1. the grid of `absmax`;
    2. grids whose ends are drawn in: by common factors of both ends, and, for formats with a zero, then of either end alone,
       from the best of the former; q4_0, whose codes reach from -8 to 7, with both signs of the scale;
    3. a few refits: with the codes of the best grid so far held fixed, the scale (and offset) of least squares, then new
       codes; each such step can only lower the error but for the rounding of the scale.

Each grid is judged with its scale and zero as they will be stored, and the best is kept. Last, what was found is compared
with `absmax` in float64, so that no block comes out worse than that.

Sources: the drawn-in ends are the clipping search of "Optimal clipping and magnitude-aware differentiation" (OCTAV, Sakr et
al., ICML 2022) done by enumeration; factors and refits follow ggml's make_qx_quants and make_qkx2_quants (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax_grid, encode, limits, stored_grid
from halfbyte.quantizers.walk import Builder, Grid, as_blocks

_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3)  # of a symmetric range
_CUTS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4)  # parts of a range taken off one end or each
_REFITS = 3


@torch.no_grad()
def mse(weight: Tensor, fmt: Format, name: str = "weight") -> Codes:
    """Quantizes `weight` to `fmt` with the least squared error that the search above finds.

    Takes, returns and raises what `absmax` does; about thirty times its work. Memory beyond the result: a few MB.
    """
    builder = Builder(weight, fmt, name)
    for group in builder:
        plain = absmax_grid(builder, group)
        found = _search(fmt, group, plain)
        better = squared_error(fmt, group, found, torch.float64) < squared_error(fmt, group, plain, torch.float64)
        grid = found.where(better, plain)
        builder.add(group, grid, (encode(fmt, as_blocks(rows, fmt), grid) for rows in group))
    return builder.codes()


def squared_error(fmt: Format, group: Sequence[Tensor], grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """sum((dequantize(q) - x)^2) of each block of a group on a grid, float64 [r, nb]; its terms computed in `dtype`."""
    total = torch.zeros(grid.scale.shape, dtype=torch.float64, device=grid.scale.device)
    for x, q, count in _encoded(fmt, group, grid):
        w = _steps(q, grid).to(dtype) * grid.scale.to(dtype).unsqueeze(-1)
        if grid.zero is not None and fmt.zero == "offset":
            w += grid.zero.to(dtype).unsqueeze(-1)
        total += _sum(w.sub_(x).square_(), count).double()
    return total


class _Best:
    """The best grid of each block so far."""

    def __init__(self, fmt: Format, group: Sequence[Tensor], grid: Grid) -> None:
        self.fmt, self.group, self.grid = fmt, group, grid
        self.error = squared_error(fmt, group, grid)

    def offer(self, scale: Tensor, lo: Tensor | None) -> Tensor:
        """Takes the grid of these scales and lower ends (float32 [r, nb]) where it is better; True there."""
        grid = stored_grid(self.fmt, scale, lo)
        error = squared_error(self.fmt, self.group, grid)
        better = error < self.error  # False where the scale overflowed: the error is then infinite or NaN
        self.grid, self.error = grid.where(better, self.grid), torch.where(better, error, self.error)
        return better


def _search(fmt: Format, group: Sequence[Tensor], plain: Grid) -> Grid:
    best = _Best(fmt, group, plain)
    lo, hi = limits(fmt, group)
    if fmt.zero == "none":
        amax = torch.maximum(lo.abs(), hi.abs())
        signs = (1, -1) if fmt.family == "ggml" and fmt.bits == 4 else (1,)
        for factor in _FACTORS:
            for sign in signs:
                best.offer(amax * (sign * factor / fmt.q_max), None)
    else:
        if fmt.zero == "point":
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        for ends in ((1, 1), (1, 0), (0, 1)):
            lo, hi = _draw_in(best, lo, hi, ends)
    for _ in range(_REFITS):
        best.offer(*_refit(fmt, group, best.grid))
    return best.grid


def _draw_in(best: _Best, lo: Tensor, hi: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Offers grids with the lower, the upper or both ends drawn in; the best ends so far of each block."""
    span, best_lo, best_hi = hi - lo, lo, hi
    for cut in _CUTS:
        low, high = lo + span * (cut * ends[0]), hi - span * (cut * ends[1])
        if best.fmt.zero == "point":
            low, high = low.clamp(max=0), high.clamp(min=0)
        better = best.offer((high - low) / best.fmt.q_max, low)
        best_lo, best_hi = torch.where(better, low, best_lo), torch.where(better, high, best_hi)
    return best_lo, best_hi


def _refit(fmt: Format, group: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor | None]:
    """The scale and lower end of least squares for the codes that `grid` gives, float32 [r, nb].

    x ~ s * u, u = q or q - point:   s = sum(x*u) / sum(u^2)
    x ~ s * q + o:                   s = sum(y*v) / sum(v^2), o = mean(x) - s * mean(q), of y and v less their means
    """
    xu = torch.zeros(grid.scale.shape, dtype=torch.float64, device=grid.scale.device)
    n, sx, su, uu = torch.zeros_like(xu), torch.zeros_like(xu), torch.zeros_like(xu), torch.zeros_like(xu)
    start = None if grid.start is None else grid.start.unsqueeze(-1)
    for x, q, count in _encoded(fmt, group, grid):
        u = _steps(q, grid)
        y = x if start is None else x - start  # near the offset: the sums then cancel little
        xu += _sum(y * u, count).double()
        uu += _sum(u.square(), count).double()
        n += count
        if start is not None:
            sx += _sum(y, count).double()
            su += _sum(u, count).double()
    if grid.start is not None:
        scale = (xu - sx * su / n) / (uu - su * su / n)
        return scale.float(), ((sx - scale * su) / n + grid.start.double()).float()
    scale = xu / uu
    if grid.zero is None:
        return scale.float(), None
    return scale.float(), (-scale * grid.zero.double()).float()


def _encoded(fmt: Format, group: Sequence[Tensor], grid: Grid) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Piece by piece: weights x, their codes q, both float32 [r, nb, B], and how many of B are weights, [nb]."""
    for rows in group:
        x = as_blocks(rows, fmt)
        count = torch.full((x.shape[1],), x.shape[2], device=x.device)
        if fmt.block != "tensor":
            count[-1] -= x.shape[1] * x.shape[2] - rows.shape[-1]
        yield x, encode(fmt, x, grid), count


def _steps(q: Tensor, grid: Grid) -> Tensor:
    """Codes less their integer point, where there is one."""
    return q - grid.zero.unsqueeze(-1) if grid.zero is not None and grid.zero.dtype == torch.uint8 else q


def _sum(values: Tensor, count: Tensor) -> Tensor:
    """The sum of each block [r, nb, B] -> [r, nb], the filling of a short last block left out."""
    total = values.sum(dim=-1)
    if (last := int(count[-1])) < values.shape[-1]:
        total[:, -1] = values[:, -1, :last].sum(dim=-1)
    return total
