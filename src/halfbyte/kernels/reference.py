"""The reference: every operation by its definition, in float64, without regard to speed, and bounds of the error of a kernel.

Shapes: x [..., K], weight codes of shape [N, K], bias [N], result [..., N], float64. Of a weight's block along K

    w = scale * q + o     o = 0 (no zero), -scale * point, or offset

The steps of the activation's quantization are float32 operations that kernels repeat bit for bit, so what remains between
a kernel and these functions is the rounding of float32 sums, which `error_bound` bounds, and that of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError, unreachable
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Activation, Compute, scaling_of
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK as MAX_BLOCK
from halfbyte.layouts.cpu_tiles import piece

_U = 2.0**-24  # unit roundoff of float32
_LEAST = 2.0**-126  # exceeds the underflow error of a float32 operation, even with subnormal numbers flushed to 0


# Activations


def spans(k: int, block: int) -> list[tuple[int, int]]:
    """(first, one past the last) element of each activation block: the weight's blocks of `block`, or their pieces (`piece`)."""
    size = piece(block, k)
    return [(start, min(start + size, k)) for start in range(0, k, size)]


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
    """Quantizes activations [M, K] (float32, float16 or bfloat16) as int8 compute does on the fly.

    block  elements of a block of the weight along K; see `spans`; the last may be short

    With fl the rounding to float32 and rne to the nearest integer, ties to even, of a block (or row) x:

        symmetric    amax   = max|x|
                     scale  = fl(amax * fl(1/127))     inverse = fl(127 / amax)
                     q      = rne(x * inverse)
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
    whole_row, with_offset = scaling_of(activation)
    parts = [x] if whole_row else [x[:, start:end] for start, end in cuts]
    done = [quantize_block(part, with_offset) for part in parts if part.shape[-1]]
    empty = x.new_zeros(x.shape[0], int(whole_row))
    q = torch.cat([d[0] for d in done], dim=-1) if done else x.to(torch.int8)
    scale = torch.stack([d[1] for d in done], dim=-1) if done else empty
    offset = torch.stack([d[2] for d in done], dim=-1) if done else empty
    sums = [q[:, start:end].sum(dim=-1, dtype=torch.int32) for start, end in cuts]
    return QuantizedActivation(q, scale, offset, torch.stack(sums, dim=-1) if sums else empty[:, :0].int())


def quantize_block(x: Tensor, with_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., B], scale [...] and offset [...] of blocks of float32 activations [..., B], by the steps of `quantize_activation`."""
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


# linear


def linear(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None = None,
    compute: Compute = "float",
    activation: Activation = "block",
    clamp: tuple[float, float] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """y = clamp(x W^T + bias + residual), float64 [..., N]; the clamp's ends are rounded to float32 first. residual is [..., N].

    float  x times the dequantized weight.
    int8   x quantized by `quantize_activation`, the weight as stored: over each block i of K_i elements, with the
           integers C = sum(qA * qB), sumA = sum(qA), sumB = sum(qB),

               y = sum over i of  sA*sB*C + sA*oB*sumA + oA*sB*sumB + K_i*oA*oB

    A NaN in a row makes that row NaN, and no other; so does an infinity in int8.
    """
    rows, n = _rows(x, codes), codes.shape[0]
    match compute:
        case "float":
            y = rows.double() @ codes.dequantize(torch.float64).T
        case "int8":
            y = torch.zeros(len(rows), n, dtype=torch.float64, device="cpu")
            for terms in _int8_terms(rows, codes, _affine(codes), activation):
                y += terms.sum(dim=0)
        case _:
            raise unreachable(compute, "the compute of a linear layer,")
    if bias is not None:
        y = y + bias.double()
    if residual is not None:
        y = y + residual.double().reshape(len(rows), n)
    if clamp is not None:
        low, high = torch.tensor(clamp, dtype=torch.float32, device="cpu").double()
        y = y.clamp(low, high)
    return y.reshape(*x.shape[:-1], n)


def linear_gradient(dy: Tensor, codes: Codes) -> Tensor:
    """dX = dY W with the dequantized W, whatever the compute of the forward: dy [..., N] -> float64 [..., K]."""
    return dy.double() @ codes.dequantize(torch.float64)


def grouped_linear(x: Tensor, codes: Codes, expert_ids: Tensor, bias: Tensor | None = None, **settings: object) -> Tensor:
    """Each row with the weight of its expert: codes [E, N, K], bias [E, N], expert_ids [M] with x [M, K] -> float64 [M, N], or
    [M, T] with x [M, K] (shared) or [M, T, K] -> [M, T, N]. `settings` are compute and activation, as for `linear`.
    """
    return _by_expert(linear, x, codes, expert_ids, bias, settings)


def grouped_error_bound(x: Tensor, codes: Codes, expert_ids: Tensor, bias: Tensor | None = None, **settings: object) -> Tensor:
    """The error bound of a kernel for `grouped_linear`: that of `linear` with each expert."""
    return _by_expert(error_bound, x, codes, expert_ids, bias, settings)


def _by_expert(
    function: Callable[..., Tensor], x: Tensor, codes: Codes, ids: Tensor, bias: Tensor | None, settings: dict[str, object]
) -> Tensor:
    experts, n, k = codes.shape
    rows = x.unsqueeze(1).expand(*ids.shape, k) if x.dim() == ids.dim() == 2 else x
    if rows.shape != (*ids.shape, k) or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts):
        raise ArgumentError(
            f"x {list(x.shape)} and ids {list(ids.shape)} do not fit experts of shape {list(codes.shape)}, or ids lie outside"
        )
    y = torch.zeros(*ids.shape, n, dtype=torch.float64, device="cpu")
    for e in ids.unique().tolist():
        y[ids == e] = function(rows[ids == e], codes.select(e), None if bias is None else bias[e], **settings)
    return y


class _Affine(NamedTuple):
    """A weight as  scale * q + o,  float64: q [N, K], the others in the shape of the codes' scales."""

    q: Tensor
    scale: Tensor
    o: Tensor


def _affine(codes: Codes, stored: bool = False) -> _Affine:
    """`stored`: q in its stored representation, q + 8 for signed 4-bit codes, so that o is 8 scales less."""
    q, scale = codes.values().double(), codes.scale.double()
    if codes.zero is None:
        o = torch.zeros_like(scale)
        return _Affine(q + 8, scale, o - 8 * scale) if stored and codes.format.bits == 4 else _Affine(q, scale, o)
    match codes.format.zero:
        case "point":
            return _Affine(q, scale, -scale * codes.zero.double())
        case "offset":
            return _Affine(q, scale, codes.zero.double())
        case "none":
            raise FormatError(f"{codes.format} codes have no zero, got a tensor of shape {list(codes.zero.shape)}")
        case _:
            raise unreachable(codes.format.zero, "the zero of a format")


def _rows(x: Tensor, codes: Codes) -> Tensor:
    if len(codes.shape) != 2 or x.dim() < 1 or x.shape[-1] != codes.shape[1]:
        raise ArgumentError(f"x [..., K] and a weight [N, K] are multiplied, got x {list(x.shape)} and a weight {list(codes.shape)}")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _int8_terms(rows: Tensor, codes: Codes, weight: _Affine, activation: Activation) -> Iterator[Tensor]:
    """For each activation block, the four terms of int8 compute, float64 [4, M, N]."""
    n, k = codes.shape
    block = codes.format.block_size(k)
    xq = quantize_activation(rows, block, activation)
    q_a = xq.q.double()  # float64 holds the sums of products of codes exactly
    s_b, o_b = weight.scale.expand(n, -1), weight.o.expand(n, -1)
    for i, (start, end) in enumerate(spans(k, block)):
        a, b = min(i, xq.scale.shape[1] - 1), min(start // block, s_b.shape[1] - 1)
        s_a, o_a = xq.scale[:, a : a + 1].double(), xq.offset[:, a : a + 1].double()
        s, o, part_a, part_b = s_b[:, b], o_b[:, b], q_a[:, start:end], weight.q[:, start:end]
        sum_a = xq.sums[:, i : i + 1].double()
        yield torch.stack((s_a * s * (part_a @ part_b.T), s_a * sum_a * o, o_a * (s * part_b.sum(dim=-1)), o_a * (end - start) * o))


# Error bounds


def low_rank_linear(
    x: Tensor,
    codes: Codes,
    into: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    compute: Compute = "float",
    scale: Tensor | None = None,
) -> Tensor:
    """y = z R^T + (z A^T) B^T + bias, float64 [..., N], z = x * scale rounded to the dtype of x.

    codes of R [N, K]; into: A [r, K]; out: B [N, r]; scale [K].
    """
    z = x if scale is None else x * scale
    return linear(z, codes, bias, compute, residual=z.double() @ into.double().mT @ out.double().mT)


def error_bound(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None = None,
    compute: Compute = "float",
    activation: Activation = "block",
    residual: Tensor | None = None,
) -> Tensor:
    """The bound of the error of a kernel's float32 sums, element by element, float64 [..., N]; `agrees` adds the rounding to the result's
    dtype.

    Where every term of a sum goes through at most n roundings, by products and additions in any order, with or without fused
    ones, the sum is off by at most gamma(n) * sum|terms|, gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., sections 3.1 and 3.4). The terms here are those of the codes as they are stored, from which a
    kernel may start: signed 4-bit codes as q + 8 with o = -8 * scale. Those of a kernel that subtracts the 8 first are no larger.

    float  A kernel may multiply by weights made in registers, sum((scale * q + o) * x), or take sums first, block by block,
           scale * sum(q * x) + o * sum(x). In both the terms are scale*q*x and o*x. Roundings of one: o, 1; products, 2; additions,
           less than K in blocks, then 2 for each block; bias and residual, 2. n = K + 2 * blocks + 5.
    int8   Integer sums are exact. The terms are the four of each block. Roundings of one: an integer as float32, 1; o, 1; products,
           up to 3; additions, 4 for each block; bias and residual, 2. n = 4 * blocks + 7.
           Beside blocks of 65 to 128 and one scale a row of x, for 16-bit floats, a float32 sum may hold up to 2^24 scales (2^20 of 4-bit
           codes) of a block that are taken off again, in 5 roundings: 5 products of codes at the most (5/16), of which rounding x loses
           tens.

    An operation that underflows loses less than 2^-126, times all factors applied afterwards. Infinite where a float32 sum of the terms
    might overflow.
    """
    rows = _rows(x, codes).double()
    n, k = codes.shape
    q, scale, o = _affine(codes, stored=True)
    if compute == "float":
        blocks = codes.scale.shape[-1]
        w = q.abs() * codes.spread(scale.abs()) + codes.spread(o.abs())
        size = rows.abs() @ w.T
        roundings, operations = k + 2 * blocks + 5, 2 * k + 4 * blocks
        factor: float = codes.format.block_size(k) * 255
    else:
        size = torch.zeros(len(rows), n, dtype=torch.float64, device="cpu")
        for terms in _int8_terms(_rows(x, codes), codes, _Affine(q, scale, o), activation):
            size += terms.abs().sum(dim=0)
        blocks = len(spans(k, codes.format.block_size(k)))
        roundings, operations = 4 * blocks + 7, 12 * blocks
        factor = MAX_BLOCK * 127 * 255
    if bias is not None:
        size = size + bias.double().abs()
    if residual is not None:
        size = size + residual.double().abs().reshape(len(rows), n)
    lost = torch.zeros_like(size)
    if k:
        of_row, of_scale, of_zero = (t.abs().amax(dim=-1).clamp(min=1) for t in (rows, scale, o))
        lost += operations * _LEAST * factor * of_row.unsqueeze(-1) * of_scale * of_zero
        if compute == "int8" and activation == "row" and 64 < codes.format.block_size(k) <= 128 < k and x.dtype != torch.float32:
            of_x = quantize_activation(rows.float(), k, activation).scale.double()
            lost += of_x * scale.abs().sum(dim=-1) * (5 / 16 if codes.format.bits == 4 else 5)
    error = roundings * _U / (1 - roundings * _U) * size + lost
    error = torch.where(size + error < torch.finfo(torch.float32).max, error, torch.inf)
    return error.reshape(*x.shape[:-1], n)


def agrees(y: Tensor, reference: Tensor, error: Tensor) -> Tensor:
    """Whether a kernel's y (float32, float16 or bfloat16) equals the reference within `error` and one rounding to y's dtype: bool [..., N].

    A NaN must be NaN, and an infinity (of float compute) not finite. A result that may be beyond the dtype may be infinite.
    """
    info = torch.finfo(y.dtype)
    unit = 0.0 if y.dtype == torch.float32 else info.eps / 2  # the last rounding of float32 is one of `error`'s
    size = reference.abs() + error
    near = (y.double() - reference).abs() <= error + unit * size + info.smallest_normal * info.eps / 2
    over = (size >= info.max) & (y.double() == reference.sign() * torch.inf)
    finite = near | over | torch.isinf(error)
    return torch.where(torch.isnan(reference), torch.isnan(y), torch.where(torch.isinf(reference), ~torch.isfinite(y), finite))


# Integers in, integers out


class Requantized(NamedTuple):
    """q int8 [..., N]; real, its value before rounding and clamping, float64; error, the bound of a kernel's error of that value."""

    q: Tensor
    real: Tensor
    error: Tensor

    def agrees(self, q: Tensor) -> Tensor:
        """Where a kernel's q is this one, or differs by 1 because the real value is within the kernel's error of a tie: bool."""
        tie = ((self.real - torch.floor(self.real)) - 0.5).abs() <= self.error
        difference = (q.int() - self.q.int()).abs()
        return (difference == 0) | (tie & (difference == 1))


def qlinear(
    xq: Tensor,
    codes: Codes,
    bias: Tensor | None,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    clamp: tuple[int, int] = (-128, 127),
) -> Requantized:
    """int8 [..., K] -> int8 [..., N] with symmetric codes of one scale sW per channel or tensor:

        O = clamp(rne(M * (acc + fused_bias)))       acc = sum(xq * Wq),  M = sI * sW / sO
        fused_bias = -zI * sum(Wq) + bias / (sI * sW) + zO / M

    computed as M * (acc - zI * sum(Wq)) + (bias / sO + zO), the same where sW = 0. A kernel rounds to float32 the integer, M, the
    constant and the fused multiply-add of the three, from which `error` follows. (Jacob et al., Quantization and training of
    neural networks for efficient integer-arithmetic-only inference, CVPR 2018.)
    """
    rows, n = _rows(xq, codes), codes.shape[0]
    if codes.format.zero != "none" or isinstance(codes.format.block, int):
        raise ArgumentError(f"qlinear takes symmetric codes with one scale per channel or tensor, got {codes.format}")
    w = codes.values().double()
    total = rows.double() @ w.T - in_zero * w.sum(dim=-1)
    scale = codes.scale.double().sum(dim=-1) if codes.shape[1] else torch.zeros(1, dtype=torch.float64, device="cpu")
    multiplier = in_scale * scale / out_scale
    constant = torch.full((n,), float(out_zero), dtype=torch.float64, device="cpu")
    if bias is not None:
        constant += bias.double() / out_scale
    real = multiplier * total + constant
    product = (multiplier * total).abs()
    # 2.001 u: the integer and M, both rounded, multiplied. What underflow takes from M, its integer multiplies.
    before = 2.001 * _U * product + _U * constant.abs() + (total.abs() + 2) * _LEAST
    error = before + _U * (real.abs() + before)
    shape = (*xq.shape[:-1], n)
    q = torch.round(real).clamp(*clamp).to(torch.int8)
    return Requantized(q.reshape(shape), real.reshape(shape), error.reshape(shape))


# The weight itself


def dequantize(codes: Codes) -> Tensor:
    """The weight, float64: a kernel's is this rounded once to its dtype, exactly."""
    return codes.dequantize(torch.float64)


def embedding(ids: Tensor, codes: Codes) -> Tensor:
    """Rows `ids` (integers [...]) of the weight [N, K], float64 [..., K]."""
    return dequantize(codes)[ids]
