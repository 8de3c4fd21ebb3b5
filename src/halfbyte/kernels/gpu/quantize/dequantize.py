"""The weight itself, or some rows of it: packed codes -> scale * (q - point) or scale * q + offset.

Computed in float32 with one rounding (products of a code and a scale of 11 bits are exact, sums are fused), then rounded to the
result's type. Layout: `layouts/gpu_tiles.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import INTERPRETED, row_and_column
from halfbyte.kernels.gpu.decode import e2m1_codes
from halfbyte.kernels.gpu.quantize import spread
from halfbyte.kernels.gpu.runtime.launch import flat_grid, run
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_number
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.gpu_tiles import RECORD


def dequantize(data: Tensor, geo: gpu_tiles.Geometry, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the weight [n, k] of `data`, uint8 [geo.nbytes]."""
    out = torch.empty(geo.n, geo.k, dtype=dtype, device=data.device) if out is None else out
    if out.numel():
        write(spread.sections(data, geo), geo, out)
    return out


def write(sections: gpu_tiles.Views, geo: gpu_tiles.Geometry, out: Tensor, experts: int = 1, early: bool = False) -> None:
    """Dequantize a weight that has elements.

    Args:
        sections: Codes, scales and zeros of the weight, or of the first of several experts, which lie one after the other.
        geo: Of one expert's weight.
        out: [n, k], or [experts, n, k].
        experts: Their number.
        early: Start before the preceding kernel has ended, and write meanwhile: `out` is from `scratch.double_buffer`.
    """
    early = early and not INTERPRETED
    expert_strides = tuple(0 if section is None else geo.nbytes // section.element_size() for section in sections)
    run(
        _whole,
        (*flat_grid(geo.panels, geo.records), experts),
        *sections,
        out,
        *_sizes(geo),
        geo.n,
        expert_strides,
        BITS=geo.format.bits,
        ZERO=zero_number(geo.format),
        FLOAT_CODES=has_floats(geo.format),
        G=min(geo.padded, RECORD),
        PAIRED=geo.paired,
        CONTIGUOUS=geo.contiguous,
        EARLY=early,
        num_warps=4,
        early=early,
    )


def write_sums(weight: gpu_tiles.Views, geo: gpu_tiles.Geometry, granule: int, block: tuple[int, int], sums: Tensor) -> None:
    """Write the sums of the weight's elements over each granule of K, which integer products with an x that has offsets need:
    scale * (sum(q) - point * count) or scale * sum(q) + offset * count.

    Args:
        weight: Its sections.
        geo: Of the weight.
        granule: Elements that are summed, with padding.
        block: Elements of a block, or of a piece of it, without padding and with it.
        sums: float32 [granules, N padded].
    """
    sizes = geo.k, geo.n_padded, geo.records, max(1, geo.padded // granule), *block
    codes, number = weight.codes.view(torch.int8), zero_number(geo.format)
    grid = flat_grid(geo.panels, geo.records)
    run(_sums, grid, codes, weight.scale, weight.zero, sums, *sizes, BITS=geo.format.bits, ZERO=number, G=granule)


def embedding(ids: Tensor, data: Tensor, geo: gpu_tiles.Geometry, dtype: torch.dtype) -> Tensor:
    """Return rows `ids`, int64 or int32 [count], of the weight: [count, k]. A row out of bounds is NaN."""
    out = torch.empty(len(ids), geo.k, dtype=dtype, device=data.device)
    if out.numel():
        codes, scale, zero = spread.sections(data, geo) if geo.nbytes else (None, None, None)
        slabs = min(8, triton.next_power_of_2(geo.records))
        run(
            _rows,
            flat_grid(len(ids), -(-geo.records // slabs)),
            ids,
            codes,
            scale,
            zero,
            out,
            *_sizes(geo),
            geo.n,
            BITS=geo.format.bits,
            ZERO=zero_number(geo.format),
            FLOAT_CODES=has_floats(geo.format),
            PAIRED=geo.paired,
            G=min(geo.padded, RECORD),
            SLABS=slabs,
            num_warps=max(1, slabs // 2),
        )
    return out


def _sizes(geo: gpu_tiles.Geometry) -> tuple[int, ...]:
    """Return K, N padded, K slabs, elements of a block without and with its padding."""
    return geo.k, geo.n_padded, geo.records, geo.block, geo.padded


@triton.jit
def _value(u, s, z, BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr):
    """Return the float32 values of stored codes u (int32); scales s and zeros z broadcast to u. ZERO: as `weight_kinds.zero_number`;
    FLOAT_CODES: codes are 4-bit floats."""
    if FLOAT_CODES:
        return e2m1_codes(u).to(tl.float32) * s.to(tl.float32)
    elif ZERO == 0:
        return (u - 8 if BITS == 4 else u).to(tl.float32) * s.to(tl.float32)
    q = u if BITS == 4 else u + 128
    if ZERO == 1:
        return (q - z.to(tl.int32)).to(tl.float32) * s.to(tl.float32)
    elif INTERPRETED:  # its fma rounds twice
        return (q.to(tl.float64) * s.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(q.to(tl.float32), tl.broadcast_to(s.to(tl.float32), q.shape), tl.broadcast_to(z.to(tl.float32), q.shape))


@triton.jit
def _place(start, i, k, block, padded):
    """Return the k of elements i after `start`, a padded k that begins a piece of one block, and the mask of those that are not padding."""
    within = start % padded + i
    at = start // padded * block + within
    return at, (within < block) & (at < k)


@triton.jit
def _whole(
    codes, scale, zero, out, k, NP, R, block, padded, N, expert_strides,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr, PAIRED: tl.constexpr, G: tl.constexpr, CONTIGUOUS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Dequantize a K slab of a panel, `row_and_column`, of expert program_id(1).

    NP, R          rows with padding, and K slabs
    G              elements of a K slab that have one scale
    CONTIGUOUS     blocks have no padding
    """
    if EARLY:
        gdc_launch_dependents()
    panel, r = row_and_column(R)
    panel = panel.to(tl.int64)
    expert = tl.program_id(1).to(tl.int64)
    codes += expert * expert_strides[0]
    scale += expert * expert_strides[1]
    if ZERO != 0:
        zero += expert * expert_strides[2]
    out += expert * N * k
    PIECES: tl.constexpr = 128 // G
    if BITS == 4:
        words = tl.load(codes + (panel * R + r) * 2048 + tl.arange(0, 2048)).to(tl.int32)
        u = tl.join(tl.join(words & 15, words >> 8 & 15), tl.join(words >> 4 & 15, words >> 12 & 15))
        # kt, nt, row, k4, khalf, rowhalf, k, plane // 2, plane % 2 -> nt, rowhalf, row, planes, kt, khalf, k4, k
        u = tl.reshape(u, (2, 4, 8, 4, 2, 2, 2, 2, 2))
        u = tl.permute(u, (1, 5, 2, 7, 8, 0, 4, 3, 6))
        u = tl.reshape(u, (64, 128))
    else:
        rows = (panel * 64 + tl.arange(0, 64))[:, None] * (R * 128)
        u = tl.load(codes + rows + r * 128 + tl.arange(0, 128)[None, :]).to(tl.int32)
        if PAIRED:  # …, k4, khalf, k -> …, khalf, k4, k
            u = tl.reshape(tl.permute(tl.reshape(u, (64, 8, 4, 2, 2)), (0, 1, 3, 2, 4)), (64, 128))
    piece = r * PIECES + tl.arange(0, PIECES)
    rn = panel * 64 + tl.arange(0, 64)
    at = (piece * G // padded).to(tl.int64)[None, :] * NP + rn[:, None]
    s = tl.load(scale + at)[:, :, None]
    z = tl.load(zero + at)[:, :, None] if ZERO != 0 else s
    v = _value(tl.reshape(u, (64, PIECES, G)), s, z, BITS, ZERO, FLOAT_CODES)
    if CONTIGUOUS:  # the compiler sees that elements are neighbours, and stores 16 bytes at a time
        column = r * 128 + tl.arange(0, 128)
        exists = column < k
    else:
        column, exists = _place((piece * G)[:, None], tl.arange(0, G)[None, :], k, block, padded)
        column = tl.reshape(column, (128,))
        exists = tl.reshape(exists, (128,))
    v = tl.reshape(v, (64, 128)).to(out.dtype.element_ty)
    tl.store(out + rn[:, None] * k + column[None, :], v, mask=(rn < N)[:, None] & exists[None, :])
    if EARLY:
        gdc_wait()  # a kernel that waits for this one waits for earlier ones, too


@triton.jit
def _rows(
    ids, codes, scale, zero, out, k, NP, R, block, padded, N,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr, PAIRED: tl.constexpr, G: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """Dequantize SLABS K slabs, from column * SLABS on, of row ids[row] (`row_and_column`). NP, R, G: as in `_whole`."""
    number, column = row_and_column(tl.cdiv(R, SLABS))
    number = number.to(tl.int64)
    n = tl.load(ids + number).to(tl.int64)
    valid = (n >= 0) & (n < N)
    n = tl.where(valid, n, 0)
    r = (column * SLABS + tl.arange(0, SLABS))[:, None, None]
    PIECE: tl.constexpr = 16 if G == 16 else 32
    piece = tl.arange(0, 128 // PIECE)[None, :, None]
    kq = tl.arange(0, PIECE)[None, None, :]
    plane = piece
    if G == 16:
        plane = piece // 2
        kq = piece % 2 * 16 + kq
    if BITS == 4:
        within = ((kq // 16 * 4 + n % 64 // 16) * 8 + n % 8) * 4 + kq // 2 % 4
        word = within * 8 + kq // 8 % 2 * 4 + n // 8 % 2 * 2 + kq % 2
        u = tl.load(codes + (n // 64 * R + r) * 2048 + word, mask=r < R, other=0).to(tl.int32) >> 4 * plane & 15
    else:
        at = kq // 16 * 16 + kq // 2 % 4 * 4 + kq // 8 % 2 * 2 + kq % 2 if PAIRED else kq
        u = tl.load(codes + n * (R * 128) + r * 128 + plane * 32 + at, mask=r < R, other=0).to(tl.int32)
    start = r * 128 + piece * PIECE // G * G
    at = (start // padded).to(tl.int64) * NP + n
    s = tl.load(scale + at, mask=r < R, other=0)
    z = tl.load(zero + at, mask=r < R, other=0) if ZERO != 0 else s
    v = _value(u, s, z, BITS, ZERO, FLOAT_CODES)
    v = tl.where(valid, v, float("nan")).to(out.dtype.element_ty)
    column, exists = _place(start, piece * PIECE % G + (kq % 16 if G == 16 else kq), k, block, padded)
    tl.store(out + number * k + column, v, mask=exists & (r < R))


@triton.jit
def _sums(
    codes, scale, zero, sums, K, NP, R, per_weight_block, block, padded, BITS: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """Write the sums of a K slab of a panel (`row_and_column`); BITS, ZERO, NP, R as in `_whole`."""
    panel, r = row_and_column(R)
    rn = panel * 64 + tl.arange(0, 64)
    for j in tl.static_range(128 // G):
        i = r * (128 // G) + j
        start = i * G
        within = start % padded
        count = tl.minimum(block - within, K - start // padded * block - within)
        count = tl.minimum(tl.maximum(count, 0), G).to(tl.float32)
        at = (i // per_weight_block).to(tl.int64) * NP + rn
        s = tl.load(scale + at).to(tl.float32)
        if BITS == 4:
            # kt, nt, row, k4, khalf, rowhalf, k; padding is u = 8 or, with a zero, u = 0
            place = (panel.to(tl.int64) * R + r) * 2048 + tl.arange(0, 2048)
            words = tl.load(codes.to(tl.pointer_type(tl.int16)) + place).to(tl.int32)
            words = tl.permute(tl.reshape(words, (2, 4, 8, 4, 2, 2, 2)), (1, 5, 2, 0, 3, 4, 6))
            words = tl.reshape(words, (64, 32))
            total = tl.zeros([64], tl.int32)
            for plane in tl.static_range(j * G // 32, ((j + 1) * G + 31) // 32):
                u = words >> 4 * plane & 15
                u = u - 8 if ZERO == 0 else u
                if G == 16:
                    u = tl.where(tl.arange(0, 32)[None, :] // 16 == j % 2, u, 0)
                total += tl.sum(u, axis=1)
        else:
            place = rn[:, None].to(tl.int64) * (R * 128) + start + tl.arange(0, G)[None, :]
            u = tl.load(codes + place).to(tl.int32)
            total = tl.sum(u if ZERO == 0 else u + 128, axis=1)
        if ZERO == 1:
            value = (total.to(tl.float32) - tl.load(zero + at).to(tl.float32) * count) * s
        elif ZERO == 2:
            value = total.to(tl.float32) * s + tl.load(zero + at).to(tl.float32) * count
        else:
            value = total.to(tl.float32) * s
        tl.store(sums + i.to(tl.int64) * NP + rn, value)
