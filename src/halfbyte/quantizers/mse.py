"""Scales that minimise the squared error of each block, sum((dequantize(q) - x)^2), found by a search.

The largest magnitude of a block is rarely the best end of its grid: clipping a few outliers makes the steps finer for all the
other weights. For each block this tries, in order,

    1. the grid of `absmax`;
    2. grids with a clipped range: both ends scaled by a common factor and, for formats with a zero, then either end alone,
       starting from the best of the former; symmetric 4-bit codes, which reach from -8 to 7, with both signs of the scale;
    3. a few refits: with the codes of the best grid so far held fixed, the scale (and offset) of least squares, then new
       codes; each such step can only lower the error, except for the rounding of the scale.

Each grid is judged with its scale and zero as they will be stored, and the best is kept. Finally the result is compared with
`absmax` in float64, so that no block comes out worse than that.

With the second moments H = sum(a a^T) of the layer's inputs a, the error of a block is d H d^T instead, d = dequantize(q) - x: the
squared error of the outputs, without the correlations between blocks. (For blocks of more than 512 columns it is
sum(diag(H) * d^2).)

Sources: the range search is the clipping search of "Optimal clipping and magnitude-aware differentiation" (OCTAV, Sakr et
al., ICML 2022) done by enumeration; factors and refits follow ggml's make_qx_quants and make_qkx2_quants (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax_grid, decode, encode, limits, steps, stored_grid
from halfbyte.quantizers.builder import Builder, Grid, as_blocks
from halfbyte.quantizers.check import check_finite
from halfbyte.quantizers.threads import each

_FACTORS = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3)  # of a symmetric range
_CUTS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4)  # fractions of a range clipped at one end or both
_REFITS = 3
_LARGEST = 512  # columns of a block up to which correlations within it count: the work grows with them


@torch.no_grad()
def mse(weight: Tensor, fmt: Format, name: str = "weight", moments: Tensor | None = None) -> Codes:
    """Quantize `weight` to `fmt` with the least squared error that the search above finds.

    Args:
        moments: float [K, K]: sum(a a^T) over inputs a, times any positive number, or [K]: its diagonal; None: the error of the weights.

    Otherwise arguments, result and errors are those of `absmax`; ArgumentError also for moments of a wrong shape. About thirty times
    its work, with moments a hundred times and more. Memory beyond the result: a few MB.
    """
    if moments is not None:
        k = weight.shape[-1] if weight.dim() else 0
        if tuple(moments.shape) not in ((k, k), (k,)):
            raise ArgumentError(f"the input moments of {name} {list(weight.shape)} are [{k}, {k}] or [{k}], got {list(moments.shape)}")
        check_finite(moments, f"the input moments of {name}")
    builder = Builder(weight, fmt, name)
    metric = None if moments is None or not builder.rows.numel() else _metric(moments.to(builder.rows.device), fmt)

    def best(start: tuple[list[Tensor], Grid]) -> tuple[list[Tensor], Grid]:
        group, plain = start
        blocks = Blocks(fmt, group, metric)
        found = _search(blocks, plain)
        better = squared_error(blocks, found, torch.float64) < squared_error(blocks, plain, torch.float64)
        return group, found.where(better, plain)

    starts = ((group, absmax_grid(builder, group)) for group in builder)
    for group, grid in each(best, starts, builder.rows.device):
        builder.add(group, grid, (encode(fmt, as_blocks(rows, fmt), grid) for rows in group))
    return builder.codes()


def _metric(moments: Tensor, fmt: Format) -> Tensor:
    """The diagonal blocks of the moments, float32 [nb, B, B], a short last one padded with 0; their diagonal [K] for too long blocks."""
    k = len(moments)
    size = fmt.block_size(k)
    if moments.dim() == 1 or size > _LARGEST or fmt.block == "tensor":
        diagonal = (moments if moments.dim() == 1 else moments.diagonal()).float()
        return diagonal * power_of_two(diagonal.abs().amax())
    metric = torch.zeros(-(-k // size), size, size, device=moments.device, dtype=torch.float32)
    for block, start in zip(metric, range(0, k, size), strict=True):
        part = moments[start : start + size, start : start + size]
        block[: len(part), : len(part)] = part
    return metric * power_of_two(metric.abs().amax(dim=(1, 2), keepdim=True))


def power_of_two(largest: Tensor) -> Tensor:
    """Return the power of two by which magnitudes up to `largest` (float32, any shape) come to [1/2, 1); 1 where that is 0.

    Squares and products of numbers near 1 neither overflow nor vanish in float32. A power of two changes no digit of them. Its exponent
    is at most 126, so that it is a normal number.
    """
    return torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent.clamp(-126, 126))


class Blocks:
    """A group of row slices as blocks, and the metric M by which their errors d are measured, d M d^T.

    Attributes:
        metric: [nb, B, B]: M of each block;  [K]: its diagonal;  None: the identity.
        unit: The factor of each block's errors, float32 [r, nb]: by it the block's largest magnitude comes to [1/2, 1).
    """

    def __init__(self, fmt: Format, group: Sequence[Tensor], metric: Tensor | None = None) -> None:
        self.fmt, self.group, self.metric = fmt, group, metric
        self.lo, self.hi = limits(fmt, group)
        self.unit = power_of_two(torch.maximum(self.lo.abs(), self.hi.abs()))

    def encoded(self, grid: Grid) -> Iterator[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]:
        """Piece by piece: weights x, their codes q, both float32 [r, nb, B], and the product with M of something of that shape."""
        for rows in self.group:
            x = as_blocks(rows, self.fmt)
            yield x, encode(self.fmt, x, grid), partial(_times, self._counts(rows, x))

    def _counts(self, rows: Tensor, x: Tensor) -> Tensor | None:
        """M for a piece: [nb, B, B], its diagonal [1, nb, B], or None for the identity. The padding of a short last block counts 0."""
        short = 0 if self.fmt.block == "tensor" else x.shape[1] * x.shape[2] - rows.shape[-1]
        if self.metric is None and not short:
            return None
        if self.metric is not None and self.metric.dim() == 3:
            return self.metric
        counts = x.new_ones(rows.shape[-1]) if self.metric is None else self.metric
        if self.fmt.block == "tensor":
            return counts.repeat(len(rows)).reshape(1, 1, -1)
        return torch.nn.functional.pad(counts, (0, short)).reshape(1, *x.shape[1:])


def _times(metric: Tensor | None, v: Tensor) -> Tensor:
    if metric is None:
        return v
    if metric.shape[0] == 1 and metric.shape[1:] == v.shape[1:]:
        return v * metric.to(v.dtype)
    return (v.transpose(0, 1) @ metric.to(v.dtype)).transpose(0, 1)


def squared_error(blocks: Blocks, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """d M d^T, d = (dequantize(q) - x) * unit, of each block of a group on a grid, float64 [r, nb]; its terms computed in `dtype`."""
    total = torch.zeros(grid.scale.shape, dtype=torch.float64, device=grid.scale.device)
    for x, q, times in blocks.encoded(grid):
        d = decode(blocks.fmt, q, grid, dtype).sub_(x).mul_(blocks.unit.unsqueeze(-1))
        total += (times(d) * d).sum(dim=-1).double()
    return total


class _Best:
    """The best grid of each block so far."""

    def __init__(self, blocks: Blocks, grid: Grid) -> None:
        self.blocks, self.grid = blocks, grid
        self.error = squared_error(blocks, grid)

    def offer(self, scale: Tensor, lo: Tensor | None) -> Tensor:
        """Take over the grid of these scales and lower ends (float32 [r, nb]) where it is better; return where (bool [r, nb])."""
        grid = stored_grid(self.blocks.fmt, scale, lo)
        error = squared_error(self.blocks, grid)
        better = error < self.error  # False where the scale overflowed: the error is then infinite or NaN
        self.grid, self.error = grid.where(better, self.grid), torch.where(better, error, self.error)
        return better


def _search(blocks: Blocks, plain: Grid) -> Grid:
    fmt, best, lo, hi = blocks.fmt, _Best(blocks, plain), blocks.lo, blocks.hi
    if fmt.zero == "none":
        amax = torch.maximum(lo.abs(), hi.abs())
        signs = (1, -1) if fmt.bits == 4 else (1,)  # with 8 bits one more code at an end hardly matters
        for factor in _FACTORS:
            for sign in signs:
                best.offer(amax * (sign * factor / fmt.q_max), None)
    else:
        if fmt.zero == "point":
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        for ends in ((1, 1), (1, 0), (0, 1)):
            lo, hi = _draw_in(best, lo, hi, ends)
    for _ in range(_REFITS):
        best.offer(*refit(blocks.encoded(best.grid), best.grid, blocks.unit))
    return best.grid


def _draw_in(best: _Best, lo: Tensor, hi: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Offers grids clipped at the lower, the upper or both ends; returns the best ends so far of each block."""
    span, best_lo, best_hi = hi - lo, lo, hi
    for cut in _CUTS:
        low, high = lo + span * (cut * ends[0]), hi - span * (cut * ends[1])
        if best.blocks.fmt.zero == "point":
            low, high = low.clamp(max=0), high.clamp(min=0)
        better = best.offer((high - low) / best.blocks.fmt.q_max, low)
        best_lo, best_hi = torch.where(better, low, best_lo), torch.where(better, high, best_hi)
    return best_lo, best_hi


def refit(encoded: Iterator[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]], grid: Grid, unit: Tensor) -> tuple[Tensor, Tensor | None]:
    """The least-squares scale and lower end for targets x and their codes, as `Blocks.encoded` yields them, float32 [r, nb].

    With (a, b) = sum(a * (b M)):
    x ~ s * u, u = q or q - point:   s = (x, u) / (u, u)
    x ~ s * q + o:                   s and o from (x - s * q - o, q) = 0 = (x - s * q - o, 1)

    Sums are of x * unit, [r, nb] as `Blocks.unit`.
    """
    xu = torch.zeros(grid.scale.shape, dtype=torch.float64, device=grid.scale.device)
    n, sx, su, uu = torch.zeros_like(xu), torch.zeros_like(xu), torch.zeros_like(xu), torch.zeros_like(xu)
    start = None if grid.start is None else grid.start.unsqueeze(-1)
    for x, q, times in encoded:
        u = steps(q, grid)
        y = (x if start is None else x - start) * unit.unsqueeze(-1)  # relative to the offset, so that the sums cancel little
        mu = times(u)
        xu += (y * mu).sum(dim=-1).double()
        uu += (u * mu).sum(dim=-1).double()
        if start is not None:
            ones = times(torch.ones_like(x[:1]))
            n += ones.sum(dim=-1).double()
            sx += (y * ones).sum(dim=-1).double()
            su += mu.sum(dim=-1).double()
    xu, sx = xu / unit, sx / unit
    if grid.start is not None:
        scale = (xu - sx * su / n) / (uu - su * su / n)
        return scale.float(), ((sx - scale * su) / n + grid.start.double()).float()
    scale = xu / uu
    if grid.zero is None:
        return scale.float(), None
    return scale.float(), (-scale * grid.zero.double()).float()
