"""GPTQ: the columns of a weight are rounded one after the other, and the error that a column's rounding causes in the layer's output
is compensated, as far as possible, by the columns that are not rounded yet.

For a weight W [N, K] and the second moments H = sum(x x^T) [K, K] of its inputs x, the error to minimise is tr(D H D^T),
D = dequantize(codes) - W. With U the upper Cholesky factor of (H + damping * mean(diag(H)) * I)^-1:

    for each column k in order:
        w_k  ->  its nearest codes
        W[:, j] -= (w_k - dequantize(codes_k)) / U[k, k] * U[k, j]      for every j > k

Columns are processed in blocks, and these in smaller ones; the columns after a block are updated when it is done. The grid of a block of
the format is fixed when its first column is reached, from the weights at that moment, or before anything is rounded (static groups).
Everything is computed in float64.

On a CPU rows, which are independent of each other, and columns of the inverse have threads of their own (threads.py says why).

With J the reversal of the order, J H J = L L^T makes U = J L^-1 J: one Cholesky factor and the inverse of a triangle.

A weight that is 0 counts as pruned: its code means 0 too, and the error of that is compensated like any other. Formats with offsets
have no code for 0; there it is a weight like any other.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ (arXiv:2210.17323, 2022). Act-order and static groups are the options of
the authors' code, github.com/IST-DASLab/gptq.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, unreachable
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.absmax import absmax, nearest
from halfbyte.quantizers.check import check_finite, check_weight
from halfbyte.quantizers.mse import mse
from halfbyte.quantizers.threads import at_most, each

GridMethod = Literal["mse", "absmax"]
GRIDS: tuple[GridMethod, ...] = get_args(GridMethod)
_CHUNK = 1 << 24  # weights processed at a time, by all threads together
_ROWS = 512  # of a weight, at least, for a thread: with fewer, Python takes longer than the arithmetic
_NEAR = 16  # columns of the smaller blocks: rows that fit the nearest cache while each column is subtracted from those after it
_SHARE_OF_MOMENTS = 1 << 22  # moments to factor, for each of the threads that share operations
_COLUMNS = 256  # of the inverse of a triangle


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Options of GPTQ (Frantar et al., arXiv:2210.17323).

    Attributes:
        act_order: Columns are rounded in the order of decreasing diag(H) instead of their own. The codes are stored in the original order:
            neither the checkpoint nor the kernels need a permutation.
        static_groups: Scales and zeros come from the weights before any column is rounded.
        damping: Fraction of the mean of diag(H) that is added to it.
        columns: Processed as one block.
        grid: How scales are found: "mse" (with H) or "absmax" (the paper's).

    Example:
        >>> hb.Calibration(torch.zeros(1, 32, dtype=torch.int64), gptq=hb.GPTQ(damping=0.05)).gptq.damping
        0.05
    """

    act_order: bool = True
    static_groups: bool = False
    damping: float = 0.01
    columns: int = 128
    grid: GridMethod = "mse"

    def __post_init__(self) -> None:
        if not 0 < self.damping < float("inf"):
            raise ArgumentError(
                f"the damping of GPTQ is a positive fraction of the mean of the Hessian's diagonal, got {self.damping}: use 0.01"
            )
        if self.columns < 1:
            raise ArgumentError(f"GPTQ takes 1 or more columns at a time, got {self.columns}: use 128")
        if self.grid not in GRIDS:
            raise ArgumentError(f"the grid of GPTQ is one of {', '.join(GRIDS)}, got {self.grid!r}")


@torch.no_grad()
def gptq(weight: Tensor, fmt: Format, moments: Tensor, options: GPTQ | None = None, name: str = "weight") -> Codes:
    """Quantize `weight` to `fmt` so that its outputs for inputs with these `moments` change little.

    Args:
        weight: float32, float16 or bfloat16 [N, K].
        moments: float [K, K]: sum(x x^T) over inputs x, times any positive number, on the weight's device.
        name: The tensor's name in error messages.

    Raises ArgumentError for another dtype or shape and for NaN or infinity in either, FormatError where a scale overflows.
    Memory: three times the moments and four times the weight (or 16 M elements of it) in float64.
    """
    options = options or GPTQ()
    check_weight(weight, name)
    if weight.dim() != 2 or tuple(moments.shape) != (weight.shape[1], weight.shape[1]):
        raise ArgumentError(f"GPTQ takes a weight [N, K] and moments [K, K], got {name} {list(weight.shape)} and {list(moments.shape)}")
    check_finite(weight, name)
    check_finite(moments, f"the input moments of {name}")
    energy = moments.diagonal().float().clone()
    n, k = weight.shape
    if not weight.numel() or not bool((energy > 0).any()):
        return _grid(weight, fmt, energy, options, name)
    order = energy.argsort(descending=True, stable=True) if options.act_order else torch.arange(k, device=weight.device)
    upper = inverse_factor(moments[order][:, order], options.damping, name)
    # The cost of an error in each column once all later columns have compensated for it as far as possible.
    energy[order] = upper.diagonal().square().reciprocal().float()
    static = _grid(weight, fmt, energy, options, name) if options.static_groups or not isinstance(fmt.block, int) else None
    threads = 1 if weight.is_cuda else max(1, min(torch.get_num_threads(), _CHUNK // (_ROWS * k)))

    def swept(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sweep = _Sweep(weight[rows], fmt, energy, options, name)
        if static is not None:
            take = slice(None) if fmt.block == "tensor" else rows
            sweep.fix(static.scale[take], None if static.zero is None else static.zero[take])
        return sweep.run(upper, order)

    size = min(max(_ROWS, -(-n // threads)), max(1, _CHUNK // (k * threads)))
    with at_most(threads if n > size else 1):
        parts = list(each(swept, torch.arange(n, device=weight.device).split(size), weight.device))
    values = torch.cat([part[0] for part in parts])
    if static is not None:
        return Codes.from_values(fmt, values, static.scale, static.zero)
    zero = None if fmt.zero_dtype is None else torch.cat([part[2] for part in parts]).to(fmt.zero_dtype)
    return Codes.from_values(fmt, values, torch.cat([part[1] for part in parts]).to(fmt.scale), zero)


def inverse_factor(moments: Tensor, damping: float, name: str) -> Tensor:
    """U, upper triangular with U^T U = (H + damping * mean(diag(H)) * I)^-1: float64 [K, K]."""
    h = moments.double().flip(0, 1)
    h.diagonal().add_(damping * h.diagonal().mean())
    with at_most(h.numel() // _SHARE_OF_MOMENTS):
        lower, info = torch.linalg.cholesky_ex(h)
    if int(info):
        raise ArgumentError(
            f"the input moments of {name} are not positive definite with a damping of {damping}: use a larger one, such as 0.1"
        )
    inverse = h.zero_()

    def invert(columns: Tensor) -> None:
        first, width = int(columns[0]), len(columns)
        ones = torch.eye(len(h) - first, width, dtype=h.dtype, device=h.device)
        inverse[first:, first : first + width] = torch.linalg.solve_triangular(lower[first:, first:], ones, upper=False)

    with at_most(len(h) // _COLUMNS):
        list(each(invert, torch.arange(len(h), device="cpu").split(_COLUMNS), h.device))
    return inverse.flip(0, 1)


def _grid(weight: Tensor, fmt: Format, energy: Tensor, options: GPTQ, name: str) -> Codes:
    match options.grid:
        case "mse":
            return mse(weight, fmt, name, energy)
        case "absmax":
            return absmax(weight, fmt, name)
        case _:
            raise unreachable(options.grid, "the grid of GPTQ,")


class _Sweep:
    """One pass over the columns of some rows. Columns are kept as rows here, so that each is contiguous."""

    def __init__(self, rows: Tensor, fmt: Format, energy: Tensor, options: GPTQ, name: str) -> None:
        self.fmt, self.energy, self.options, self.name = fmt, energy, options, name
        self.w = rows.double().T.contiguous()  # [K, n]
        self.size = fmt.block_size(len(self.w))
        blocks = -(-len(self.w) // self.size)
        self.scale = self.w.new_zeros(blocks, self.w.shape[1])  # per block, as stored
        self.zero = torch.zeros_like(self.scale)
        self.step = torch.full_like(self.scale, torch.inf)  # the scale, or infinite where it is 0: all codes are then 0
        self.known = [False] * blocks
        zeros = self.w == 0 if fmt.zero != "offset" else None
        self.pruned = zeros if zeros is not None and bool(zeros.any()) else None

    def fix(self, scale: Tensor, zero: Tensor | None) -> None:
        """Set the grids of all blocks, [n, blocks] or [1, 1]."""
        self.scale.copy_(scale.T)
        if zero is not None:
            self.zero.copy_(zero.T)
        self.step = torch.where(self.scale == 0, torch.inf, self.scale)
        self.known = [True] * len(self.known)

    def run(self, upper: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, int16 [n, K], scales and zeros, float64 [n, blocks], for columns rounded in this order, which `upper` has too."""
        w = self.w[order]
        codes = torch.empty_like(w, dtype=torch.int16)
        places = order.argsort().split(self.size)  # where the columns of each block stand in the order
        blocks = (order // self.size).tolist()
        for first in range(0, len(w), self.options.columns):
            last = min(first + self.options.columns, len(w))
            near, errors = w[first:last].clone(), w.new_zeros(last - first, w.shape[1])
            for i in range(last - first):
                block, factor = blocks[first + i], upper[first + i]
                if not self.known[block]:
                    self._decide(block, w[places[block]] - upper[first : first + i, places[block]].T @ errors[:i])
                begin, end = i // _NEAR * _NEAR, min((i // _NEAR + 1) * _NEAR, last - first)
                q = self._encode(near[i], block)
                if self.pruned is not None:
                    q = torch.where(self.pruned[order[first + i]], self.zero[block], q)
                codes[first + i] = q.to(torch.int16)
                errors[i] = (near[i] - self._decode(q, block)) / factor[first + i]
                near[i + 1 : end].addr_(factor[first + i + 1 : first + end], errors[i], alpha=-1)
                if i + 1 == end:
                    near[end:].addmm_(upper[first + begin : first + end, first + end : last].T, errors[begin:end], alpha=-1)
            w[last:].addmm_(upper[first:last, last:].T, errors, alpha=-1)
        return codes[order.argsort()].T.contiguous(), self.scale.T, self.zero.T

    def _decide(self, block: int, columns: Tensor) -> None:
        """Fixes the grid of a block from its columns, [B, n]."""
        inputs = slice(block * self.size, block * self.size + len(columns))
        energy = self.energy[inputs]
        if self.pruned is not None:
            columns = columns.masked_fill(self.pruned[inputs], 0)
        codes = _grid(columns.T.float(), self.fmt, energy, self.options, self.name)
        self.scale[block] = codes.scale[:, 0]
        if codes.zero is not None:
            self.zero[block] = codes.zero[:, 0]
        self.step[block] = torch.where(self.scale[block] == 0, torch.inf, self.scale[block])
        self.known[block] = True

    def _encode(self, column: Tensor, block: int) -> Tensor:
        zero = self.zero[block]
        if self.fmt.zero == "offset":
            return ((column - zero) / self.step[block]).round_().clamp_(self.fmt.q_min, self.fmt.q_max)
        q = column / self.step[block]
        if self.fmt.codebook:
            return nearest(self.fmt, q).to(q.dtype)
        q.round_()
        return (q.add_(zero) if self.fmt.zero == "point" else q).clamp_(self.fmt.q_min, self.fmt.q_max)

    def _decode(self, q: Tensor, block: int) -> Tensor:
        if self.fmt.zero == "offset":
            return torch.addcmul(self.zero[block], q, self.scale[block])
        return (q - self.zero[block] if self.fmt.zero == "point" else q) * self.scale[block]
