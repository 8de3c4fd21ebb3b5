"""The ground truth: every operation by its definition, in float64 and slowly, and how far a kernel may be from it.

Shapes: x [..., K], weight codes of shape [N, K], bias [N], result [..., N], float64. Of a weight's block along K

    w = scale * q + o     o = 0 (no zero), -scale * point, or offset

The steps of the activation's quantization are float32 operations that kernels repeat bit for bit, so what remains between
a kernel and these functions is the rounding of float32 sums, which `error_bound` bounds, and of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Activation, Compute

MAX_BLOCK = 32768  # activations of a block: 32768 * 127 * 255 < 2^31, so that a block's int32 sum of products cannot overflow

_U = 2.0**-24  # unit roundoff of float32
_TINY = 2.0**-149  # more than a float32 operation whose result is subnormal is off by, whatever its operands


def spans(k: int, block: int) -> list[tuple[int, int]]:
    """First and last-plus-one element of each activation block: the weight's blocks of `block`, in pieces of at most MAX_BLOCK."""
    ends = [(start, min(start + block, k)) for start in range(0, k, block)]
    return [(at, min(at + MAX_BLOCK, end)) for start, end in ends for at in range(start, end, MAX_BLOCK)]


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedActivation:
    """Rows x [M, K] as  x ~ scale * q + offset.

    q       int8 [M, K], in [-127, 127]
    scale   float32 [M, blocks], or [M, 1] where the whole row has one; NaN where x is NaN or infinite
    offset  float32 in the shape of scale; 0 for the symmetric ways
    sums    int32 [M, blocks], the sum of q over each block (also where the row has one scale)
    """

    q: Tensor
    scale: Tensor
    offset: Tensor
    sums: Tensor


def quantize_activation(x: Tensor, block: int, activation: Activation) -> QuantizedActivation:
    """Quantizes activations [M, K] (float32, float16 or bfloat16) as the int8 computes do on the fly.

    block  elements of a block of the weight along K; blocks are cut as `spans` says, and the last may be short

    With fl the rounding to float32 and rne to the nearest integer, ties to even, of a block (or row) x:

        symmetric    amax  = max|x|
                     scale = fl(amax * fl(1/127))      inverse = fl(127 / amax)
                     q     = rne(x * inverse)
        with offset  lo, hi = min x, max x
                     offset = fl(fl(lo + hi) * 0.5)    half = fl(fl(hi - lo) * 0.5)
                     scale  = fl(half * fl(1/127))     inverse = fl(127 / half)
                     q      = clamp(rne(fl(x - offset) * inverse), -127, 127)

    Products that are rounded to integers are exact before. The inverse is 0 where amax (or half) is 0 or so small that the
    division overflows. A block whose scale or offset is not finite (NaN or Inf in it, or a range beyond float32) has the
    scale NaN and q = 0: every product of that row is NaN.
    """
    x = x.float()
    cuts = spans(x.shape[-1], block)
    whole_row = activation in ("row", "row_offset")
    with_offset = activation in ("block_offset", "row_offset")
    parts = [x] if whole_row else [x[:, start:end] for start, end in cuts]
    done = [_quantize_block(part, with_offset) for part in parts if part.shape[-1]]
    empty = x.new_zeros(x.shape[0], int(whole_row))
    q = torch.cat([d[0] for d in done], dim=-1) if done else x.to(torch.int8)
    scale = torch.stack([d[1] for d in done], dim=-1) if done else empty
    offset = torch.stack([d[2] for d in done], dim=-1) if done else empty
    sums = [q[:, start:end].sum(dim=-1, dtype=torch.int32) for start, end in cuts]
    return QuantizedActivation(q, scale, offset, torch.stack(sums, dim=-1) if sums else x.new_zeros(x.shape[0], 0, dtype=torch.int32))


def _quantize_block(x: Tensor, with_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [M, B], scale [M] and offset [M] of float32 activations [M, B]."""
    if with_offset:
        lo, hi = torch.aminmax(x, dim=-1)
        offset, reach = (lo + hi) * 0.5, (hi - lo) * 0.5
        x = x - offset.unsqueeze(-1)
    else:
        reach = x.abs().amax(dim=-1)
        offset = torch.zeros_like(reach)
    scale = reach * torch.full_like(reach, 1 / 127)
    inverse = torch.full_like(reach, 127) / reach
    inverse = torch.where(torch.isfinite(inverse), inverse, 0.0)
    good = torch.isfinite(scale) & torch.isfinite(offset)
    q = torch.round(x.double() * inverse.double().unsqueeze(-1)).clamp(-127, 127)
    q = torch.where(good.unsqueeze(-1), q, 0.0).to(torch.int8)
    return q, torch.where(good, scale, torch.nan), torch.where(good, offset, 0.0)


def linear(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None = None,
    compute: Compute = "float",
    activation: Activation = "block",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """y = clamp(x . W^T + bias), float64 [..., N]; the clamp's ends are rounded to float32 first.

    float  x [..., K] times the dequantized weight.
    int8   x as `quantize_activation` makes it, the weight as stored: over each block i of K_i elements, with
           C = sum(qA * qB), sumA = sum(qA), sumB = sum(qB), which are integers,

               y = sum over i of  sA*sB*C + sA*oB*sumA + oA*sB*sumB + K_i*oA*oB

    A row with a NaN is NaN throughout, and so is one with an infinity in int8; no other row is touched by it.
    """
    rows = _rows(x, codes)
    if compute == "float":
        y = rows.double() @ codes.dequantize(torch.float64).T
    else:
        y = rows.new_zeros(len(rows), codes.shape[0], dtype=torch.float64)
        for terms in _int8_terms(rows, codes, activation):
            y += terms.sum(dim=0)
    if bias is not None:
        y = y + bias.double()
    if clamp is not None:
        low, high = (float(torch.tensor(end, dtype=torch.float32)) for end in clamp)
        y = y.clamp(low, high)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def _rows(x: Tensor, codes: Codes) -> Tensor:
    if len(codes.shape) != 2 or x.shape[-1] != codes.shape[1]:
        raise ArgumentError(f"x [..., K] and a weight [N, K] are multiplied, got x {list(x.shape)} and a weight {list(codes.shape)}")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _weight_zero(codes: Codes) -> Tensor:
    """o of every block, float64, in the shape of the scales."""
    scale = codes.scale.double()
    if codes.zero is None:
        return torch.zeros_like(scale)
    return -scale * codes.zero.double() if codes.format.zero == "point" else codes.zero.double()


def _int8_terms(rows: Tensor, codes: Codes, activation: Activation) -> Iterator[Tensor]:
    """Of each block, the four terms of the int8 compute, float64 [4, M, N]."""
    n, k = codes.shape
    block = codes.format.block_size(k)
    xq = quantize_activation(rows, block, activation)
    q_a, q_b = xq.q.double(), codes.values().double()  # float64 holds all sums of their products exactly
    s_b, o_b = (t.expand(n, -1) for t in (codes.scale.double(), _weight_zero(codes)))
    for i, (start, end) in enumerate(spans(k, block)):
        a, b = min(i, xq.scale.shape[1] - 1), min(start // block, s_b.shape[1] - 1)
        s_a, o_a = xq.scale[:, a : a + 1].double(), xq.offset[:, a : a + 1].double()
        sum_a, sum_b = q_a[:, start:end].sum(dim=-1, keepdim=True), q_b[:, start:end].sum(dim=-1)
        products = q_a[:, start:end] @ q_b[:, start:end].T
        yield torch.stack(
            (s_a * s_b[:, b] * products, s_a * sum_a * o_b[:, b], o_a * (s_b[:, b] * sum_b), o_a * (end - start) * o_b[:, b])
        )


def error_bound(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None = None,
    compute: Compute = "float",
    activation: Activation = "block",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How far a float32 kernel's result in `dtype` may be from `linear`, element by element: float64 [..., N].

    A sum whose every term goes through at most n roundings, products and additions in any order, is off by no more than
    gamma(n) * sum|terms|, gamma(n) = n*u / (1 - n*u), u = 2^-24  (Higham, Accuracy and Stability of Numerical Algorithms,
    2nd ed., section 3.1 and lemma 8.4).

    float  A kernel may multiply dequantized weights, fl(fl(scale * q) + o), or, block by block, sum first:
           scale * sum(v * x) + z * sum(x). Here v is the code as stored, so z = o - 8 * scale for signed 4-bit codes, which are stored
           as q + 8. In either form the terms are scale*v*x and z*x. Roundings of a term: 1 of z; 2 products; additions: of up to K
           within blocks, then 2 for each block; 1 of the bias. n = K + 2 * blocks + 4.
    int8   Sums of integers are exact. The four terms of each block: 1 rounding of the integer when it becomes float32, 1 of o, and 2
           products, 3 for K_i*oA*oB; additions of 4 terms for each block, and 1 of the bias. n = 4 * blocks + 6. As above, C and sumB
           may be of the codes as stored, which adds a term 8*sA*sB*sumA.

    Then one rounding to `dtype`, if it is not float32. Operations with a subnormal result lose at most 2^-149 each, times what they
    are multiplied with afterwards. Results beyond what `dtype` holds are infinite, see `agrees`.
    """
    rows = _rows(x, codes)
    n, k = codes.shape
    scale = codes.scale.double().abs()
    q, o = codes.values().double(), _weight_zero(codes)
    if codes.format.signed and codes.format.bits == 4:
        q, o = q + 8, o - 8 * codes.scale.double()
    top_scale = 1 + (float(scale.max()) if scale.numel() else 0)
    if compute == "float":
        blocks = codes.scale.shape[-1]
        w = codes.spread(scale) * q.abs() + codes.spread(o.abs())
        size = rows.double().abs() @ w.expand(n, k).T
        roundings, lost = k + 2 * blocks + 4, (k + 4 * blocks) * top_scale
    else:
        size = rows.new_zeros(len(rows), n, dtype=torch.float64)
        for terms in _int8_terms(rows, Codes.from_values(codes.format, codes.values(), codes.scale, codes.zero), activation):
            size += terms.abs().sum(dim=0)
        blocks = len(spans(k, codes.format.block_size(k)))
        roundings, lost = 4 * blocks + 6, 12 * blocks * top_scale
    if bias is not None:
        size = size + bias.double().abs()
    error = roundings * _U / (1 - roundings * _U) * size + lost * _TINY
    return error.reshape(*x.shape[:-1], n)
