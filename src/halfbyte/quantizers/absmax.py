"""Scales from the largest magnitude (or from both ends) of each block: the plain, fast method.

Every step is one float32 operation, rounded to nearest even, with no fused multiply-add, so that any kernel can repeat
it bit for bit. Of a block of weights x (converted to float32 first, which is exact):

    lo = min(x)   hi = max(x)   amax = max(|x|)   (each +0 where it is a zero of either sign)
    inverse(s) = 1 / s, or 0 where s = 0 or where 1 / s overflows
    rne(v)  rounds to nearest, ties to even;  away(v)  rounds to nearest, ties away from zero (C's roundf)
    clamp   is to the format's [q_min, q_max]

"int", no zero   scale  = amax / q_max, rounded to the scale dtype
                 q      = clamp(rne(x * inverse(scale)))
"int", point     lo, hi = min(lo, 0), max(hi, 0), so that zero is exact
                 scale  = (hi - lo) / q_max, rounded to the scale dtype
                 point  = clamp(rne(-lo * inverse(scale)))
                 q      = clamp(rne(x * inverse(scale)) + point)
"int", offset    scale  = (hi - lo) / q_max, rounded to the scale dtype;  offset = lo, rounded to it too, but 0 where inverse(scale)
                 is 0 and lo < 0 < hi (as lo < 0 and -lo < (hi - lo) / q_max * q_max): such a block becomes zeros
                 q      = clamp(rne((x - offset) * inverse(scale)))
ggml q4_0        peak   = the x of largest magnitude, the first of several
                 d      = peak / -8;  id = 1 / d, or 0 where d = 0
                 q      = clamp(trunc(x * id + 8.5) - 8), and -8 where id overflows
ggml q4_1        d      = (hi - lo) / 15
                 q      = clamp(trunc((x - lo) * inverse(d) + 0.5))                    offset = lo
ggml q8_0, q8_1, inferllm
                 d      = amax / q_max
                 q      = clamp(away(x * inverse(d)))
"fp4", bfloat16  scale  = 2^(floor(log2(amax)) - 3), at least 2^-128, and 0 where amax is 0
"fp4", others    scale  = amax / 12, rounded to the scale dtype
"iq4"            scale  = peak / -127, rounded to the scale dtype, 0 where inverse(scale) is, as none of its codes is 0;
                 peak   = lo where -lo > hi, else hi
both             q      = the nearest of the table to x * inverse(scale); of two that of the even index (fp4), the greater one (iq4)

In the families but ggml's and InferLLM's codes are computed with the scale as stored; these compute them with the unrounded float32 d
(and lo), and round these to the scale dtype afterwards. A block whose scale underflows to 0 in the scale dtype, or so far that its
reciprocal overflows (below 2^-128), becomes all zeros (or its offset). A scale that overflows is an error, and so is a weight of which
all scales are that small (check.py).

Sources: ggml's quantize_row_q4_0_ref, q4_1_ref, q8_0_ref (ggml-quants.c), of which the `gguf` package's quants.py has a
bit-exact copy (it differs from this only where the lo of a q4_1 block is -0: whether that sign is stored there depends on the
order of its comparisons; the dequantized weights are the same); InferLLM's quantize_row_q4_0_reference and q8_0
(src/kern/naive/quantize.h); OCP Microscaling Formats (MX) 1.0, section 6.3, for fp4 with bfloat16 scales, which is mxfp4: codes are
twice the values, and scales half of the standard's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfbyte.errors import lookup, unreachable
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.quantizers.builder import Builder, Grid, as_blocks

# Where a number lies in the middle between two codes of a codebook: whether it goes to the greater one, by the family and the lower code.
_TIES_UP: dict[str, Callable[[Format, int], bool]] = {
    "fp4": lambda fmt, low: fmt.codebook.index(low) % 2 == 1,
    "iq4": lambda fmt, low: True,
}


@torch.no_grad()
def absmax(weight: Tensor, fmt: Format, name: str = "weight") -> Codes:
    """Quantize `weight` to `fmt` by the rules above.

    Args:
        weight: float32, float16 or bfloat16 [..., N, K], any strides, any device; N or K may be 0.
        fmt: The format of the codes.
        name: The tensor's name in error messages.

    Returns:
        The codes, on the weight's device. Memory beyond them: a few MB.

    Raises:
        ArgumentError: The weight has another dtype, or a value that is NaN or infinite.
        FormatError: A scale or an offset overflows the format's scale dtype.
    """
    builder = Builder(weight, fmt, name)
    for group in builder:
        grid = absmax_grid(builder, group)
        builder.add(group, grid, (encode(fmt, as_blocks(rows, fmt), grid) for rows in group))
    return builder.codes()


def absmax_grid(builder: Builder, group: Sequence[Tensor]) -> Grid:
    """The grid of a group of row slices; raises as `absmax` does."""
    fmt = builder.fmt
    if fmt.family == "ggml" and fmt.bits == 4 and fmt.zero == "none":
        return _ggml_q4_0(builder, as_blocks(group[0], fmt))
    lo, hi = limits(fmt, group)
    match fmt.zero:
        case "none":
            exact, zero = _symmetric_scale(fmt, lo, hi), None
        case "point":
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
            exact, zero = _divide(hi - lo, fmt.q_max), lo
        case "offset":
            exact, zero = _divide(hi - lo, fmt.q_max), lo
        case _:
            raise unreachable(fmt.zero, "the zero of a format")
    grid = stored_grid(fmt, exact, zero)
    builder.check("scale", exact, grid.scale)
    if fmt.zero == "offset" and zero is not None and grid.zero is not None:
        builder.check("offset", zero, grid.zero)
    return Grid(grid.scale, grid.zero, _inverse(exact), zero) if _encodes_unrounded(fmt) else grid


def _symmetric_scale(fmt: Format, lo: Tensor, hi: Tensor) -> Tensor:
    """The scales of blocks from `lo` to `hi` of a format without a zero, before they are rounded."""
    amax = torch.maximum(lo.abs(), hi.abs())
    match fmt.family:
        case "iq4":
            return _divide(torch.where(-lo > hi, lo, hi), fmt.q_min)
        case "fp4" if fmt.scale == torch.bfloat16:
            power = torch.ldexp(torch.ones_like(amax), (torch.frexp(amax).exponent - 4).clamp(min=-128))
            return torch.where((amax > 0) & torch.isfinite(amax), power, amax)  # a NaN or an infinity stays one, which `check` refuses
        case "fp4" | "int" | "int5" | "int6" | "ggml" | "inferllm":
            return _divide(amax, fmt.q_max)
        case _:
            raise unreachable(fmt.family, "the scale of the family")


def _encodes_unrounded(fmt: Format) -> bool:
    """Whether codes are computed with the float32 scale and offset, which are rounded for storage only afterwards."""
    match fmt.family:
        case "ggml" | "inferllm":
            return True
        case "int" | "int5" | "int6" | "fp4" | "iq4":
            return False
        case _:
            raise unreachable(fmt.family, "the rounding of the family")


def limits(fmt: Format, group: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each block, float32 [r, nb]; a zero is +0."""
    extremes = [torch.aminmax(as_blocks(rows, fmt), dim=-1) for rows in group]
    lo, hi = extremes[0].min, extremes[0].max
    for pair in extremes[1:]:
        lo, hi = torch.minimum(lo, pair.min), torch.maximum(hi, pair.max)
    return lo + 0.0, hi + 0.0


def stored_grid(fmt: Format, scale: Tensor, lo: Tensor | None) -> Grid:
    """The grid, rounded for storage, with these scales and, for a format with a zero, lower ends `lo`, float32 [r, nb]."""
    stored = scale.to(fmt.scale)
    if fmt.family == "iq4":
        stored = torch.where((_inverse(stored.float()) == 0) & stored.isfinite(), 0.0, stored)
    if lo is None:
        return grid_of(fmt, stored, None)
    if fmt.zero == "point":
        return grid_of(fmt, stored, torch.round(-lo * _inverse(stored.float())).clamp(0, fmt.q_max).to(torch.uint8))
    if not _encodes_unrounded(fmt):
        vanishes = (_inverse(stored.float()) == 0) & (lo < 0) & (-lo < scale * fmt.q_max)
        lo = torch.where(vanishes, 0.0, lo)
    return grid_of(fmt, stored, lo.to(fmt.scale))


def grid_of(fmt: Format, scale: Tensor, zero: Tensor | None) -> Grid:
    """The grid of stored scales and zeros [r, nb]."""
    start = zero.float() if zero is not None and fmt.zero == "offset" else None
    return Grid(scale, zero, _inverse(scale.float()), start)


def encode(fmt: Format, x: Tensor, grid: Grid) -> Tensor:
    """The codes of a piece x, float32 [r, nb, B], on a grid: float32 integers in the format's range."""
    if grid.start is not None:
        x = x - grid.start.unsqueeze(-1)
    v = x * grid.inverse.unsqueeze(-1)
    match fmt.family:
        case "fp4" | "iq4":
            return nearest(fmt, v)
        case "int" | "int5" | "int6":
            q = torch.round(v)
            if fmt.zero == "point" and grid.zero is not None:
                q = q + grid.zero.unsqueeze(-1).float()
        case "ggml" if fmt.bits == 4:
            half = 8.5 if fmt.signed else 0.5
            # On x86 ggml's cast to a byte turns the infinities and NaNs of an overflowed reciprocal into 0.
            q = torch.trunc(torch.nan_to_num(v + half, 0.0, 0.0, 0.0)) + fmt.q_min
        case "ggml" | "inferllm":
            whole = torch.trunc(v)
            q = whole + torch.where((v - whole).abs() >= 0.5, torch.sign(v), 0.0)
        case _:
            raise unreachable(fmt.family, "the rounding of the family")
    return q.clamp(fmt.q_min, fmt.q_max)


def nearest(fmt: Format, v: Tensor) -> Tensor:
    """The codebook entry nearest to each v, float32."""
    codes, ends = (torch.tensor(numbers, dtype=torch.float32, device=v.device) for numbers in _levels(fmt))
    return codes[torch.bucketize(v.float(), ends)]


@functools.cache
def _levels(fmt: Format) -> tuple[list[int], list[float]]:
    """The codes of a format with a table, ascending, and the greatest numbers that go to each but the last."""
    codes = sorted({*fmt.codebook})
    middles = [(low + high) / 2 for low, high in itertools.pairwise(codes)]
    ties_up = lookup(_TIES_UP, fmt.family, "the rounding of the codebook")
    ups = [ties_up(fmt, low) for low in codes[:-1]]
    return codes, [middle - 2.0**-20 * up for middle, up in zip(middles, ups, strict=True)]


def decode(fmt: Format, q: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that codes q, float32 [r, nb, B], represent on a grid: computed in `dtype`, [r, nb, B]."""
    w = steps(q, grid).to(dtype) * grid.scale.to(dtype).unsqueeze(-1)
    if grid.zero is not None and fmt.zero == "offset":
        w += grid.zero.to(dtype).unsqueeze(-1)
    return w


def steps(q: Tensor, grid: Grid) -> Tensor:
    """Codes minus their zero point, where there is one."""
    return q - grid.zero.unsqueeze(-1) if grid.zero is not None and grid.zero.dtype == torch.uint8 else q


def _ggml_q4_0(builder: Builder, x: Tensor) -> Grid:
    peak = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)  # argmax gives the first of equals
    d = peak / -8  # exact, or one rounding where d is subnormal
    stored = d.to(builder.fmt.scale)
    builder.check("scale", d, stored)
    return Grid(stored, None, torch.where(d == 0, 0.0, d.reciprocal()))


def _divide(x: Tensor, by: int) -> Tensor:
    return x / torch.full_like(x, by)  # by a tensor: division by a Python number may become a multiplication on a GPU


def _inverse(scale: Tensor) -> Tensor:
    inverse = scale.reciprocal()
    return torch.where(torch.isfinite(inverse), inverse, 0.0)
