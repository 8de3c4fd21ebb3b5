"""Dequantize weights of layout `gpu_tiles` (layouts/gpu_tiles.py): packed codes -> floats [N, K].

    w = scale * code,   scale * (code - zero point)   or   scale * code + offset,   by the kind of the format's zero

    dequantize, write    the whole weight: `ops.dequantize`, and kernels that multiply a weight in floating point
    embedding            some rows of it: `ops.embedding`
    write_sums           sums of w over pieces of K, which integer products need for activations with offsets

Arithmetic: float32 with one rounding (the product of a code and a scale of 11 bits is exact, and a sum is fused), then rounded to the
result's type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.arithmetic import INTERPRETED, row_and_column
from halfbyte.kernels.gpu.decode import e2m1_codes
from halfbyte.kernels.gpu.quantize import spread
from halfbyte.kernels.gpu.runtime.launch import flat_grid, run
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_number
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.gpu_tiles import RECORD

_SLABS_PER_PROGRAM = 8  # most K slabs of a row that a program of `embedding` dequantizes


def dequantize(data: Tensor, geo: gpu_tiles.Geometry, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the weight [n, k] of `data`, uint8 [geo.nbytes], in `out`, contiguous, or a new tensor of `dtype`."""
    out = torch.empty(geo.n, geo.k, dtype=dtype, device=data.device) if out is None else out
    if out.numel():
        write(spread.sections(data, geo), geo, out)
    return out


def write(sections: gpu_tiles.Views, geo: gpu_tiles.Geometry, out: Tensor, experts: int = 1, early: bool = False) -> None:
    """Dequantize a weight that has elements.

    Args:
        sections: Codes, scales and zeros of the weight, or of the first of several experts, which lie one after the other.
        geo: Geometry of one expert's weight.
        out: [n, k], or [experts, n, k], contiguous.
        experts: Number of experts.
        early: Start before the preceding kernel has ended, and write meanwhile: `out` is from `scratch.double_buffer`.
    """
    early = early and not INTERPRETED
    expert_strides = tuple(0 if section is None else geo.nbytes // section.element_size() for section in sections)
    run(
        _dequantize,
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
    """Write the sums of the weight's elements over each granule of K: an integer product with x = scale * code + offset adds offset * sum.

    Args:
        weight: Sections of a weight with integer codes.
        geo: Its geometry.
        granule: Elements of a granule, with padding, as in `activations.Plan`.
        block: Elements of a block, or of a piece of it, without padding and with it.
        sums: float32 [granules, N padded].

    Raises:
        KernelError: The weight has 4-bit floats.
    """
    if has_floats(geo.format):
        raise KernelError(f"sums for integer products are those of integer codes, got {geo.format}: compute it in floating point")
    sizes = geo.k, geo.n_padded, geo.records, max(1, geo.padded // granule), *block
    codes, number = weight.codes.view(torch.int8), zero_number(geo.format)
    grid = flat_grid(geo.panels, geo.records)
    run(_sums, grid, codes, weight.scale, weight.zero, sums, *sizes, BITS=geo.format.bits, ZERO=number, G=granule)


def embedding(ids: Tensor, data: Tensor, geo: gpu_tiles.Geometry, dtype: torch.dtype) -> Tensor:
    """Return rows `ids`, int64 or int32 [count], contiguous, of the weight: [count, k]. A row out of bounds is NaN."""
    out = torch.empty(len(ids), geo.k, dtype=dtype, device=data.device)
    if out.numel():
        codes, scale, zero = spread.sections(data, geo) if geo.nbytes else (None, None, None)
        slabs = min(_SLABS_PER_PROGRAM, triton.next_power_of_2(geo.records))
        run(
            _dequantize_rows,
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
    """Return k, n_padded, k_slabs, block and padded as all kernels here take them."""
    return geo.k, geo.n_padded, geo.records, geo.block, geo.padded


# The kernels. Arguments that they share:
#
#   codes, scale, zero    sections of the weight; zero is None with ZERO == 0
#   k, n_padded, k_slabs  K, rows with padding, and slabs of 128 elements in the padded K
#   block, padded         elements of a block, without and with padding
#   BITS, PAIRED          4 or 8 bits; the layout `gpu_tiles_paired`
#   ZERO                  the kind of zero, as `weight_kinds.zero_number`: 0 none, 1 zero points, 2 offsets
#   FLOAT_CODES           codes are 4-bit floats
#   G                     elements of a K slab that have one scale
#
# Comments of a permutation name the dimensions as `gpu_tiles.py` does: k = 32 * plane + 16 * kt + 8 * khalf + 2 * k4 + k within a slab, and
# n = 16 * nt + 8 * rowhalf + row within a panel.


@triton.jit
def _dequantize(
    codes, scale, zero, out, k, n_padded, k_slabs, block, padded, n, expert_strides,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr, PAIRED: tl.constexpr, G: tl.constexpr, CONTIGUOUS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Dequantize a K slab of a panel (`row_and_column`) of expert program_id(1); CONTIGUOUS: blocks have no padding."""
    if EARLY:
        gdc_launch_dependents()
    panel, slab = row_and_column(k_slabs)
    panel = panel.to(tl.int64)
    expert = tl.program_id(1).to(tl.int64)
    codes += expert * expert_strides[0]
    scale += expert * expert_strides[1]
    if ZERO != 0:
        zero += expert * expert_strides[2]
    out += expert * n * k
    # The slab's stored codes [64, 128]
    if BITS == 4:
        words = tl.load(codes + (panel * k_slabs + slab) * 2048 + tl.arange(0, 2048)).to(tl.int32)
        stored = tl.join(tl.join(words & 15, words >> 8 & 15), tl.join(words >> 4 & 15, words >> 12 & 15))
        # kt, nt, row, k4, khalf, rowhalf, k, plane // 2, plane % 2 -> nt, rowhalf, row, planes, kt, khalf, k4, k
        stored = tl.reshape(stored, (2, 4, 8, 4, 2, 2, 2, 2, 2))
        stored = tl.permute(stored, (1, 5, 2, 7, 8, 0, 4, 3, 6))
        stored = tl.reshape(stored, (64, 128))
    else:
        row_start = (panel * 64 + tl.arange(0, 64))[:, None] * (k_slabs * 128)
        stored = tl.load(codes + row_start + slab * 128 + tl.arange(0, 128)[None, :]).to(tl.int32)
        if PAIRED:  # …, k4, khalf, k -> …, khalf, k4, k
            stored = tl.reshape(tl.permute(tl.reshape(stored, (64, 8, 4, 2, 2)), (0, 1, 3, 2, 4)), (64, 128))
    # Their values, a scale for each group of G
    GROUPS: tl.constexpr = 128 // G
    group = slab * GROUPS + tl.arange(0, GROUPS)
    rn = panel * 64 + tl.arange(0, 64)
    scale_at = (group * G // padded).to(tl.int64)[None, :] * n_padded + rn[:, None]
    s = tl.load(scale + scale_at)[:, :, None]
    z = tl.load(zero + scale_at)[:, :, None] if ZERO != 0 else s
    values = _values(tl.reshape(stored, (64, GROUPS, G)), s, z, BITS, ZERO, FLOAT_CODES)
    if CONTIGUOUS:  # the compiler sees that elements are neighbours, and stores 16 bytes at a time
        column = slab * 128 + tl.arange(0, 128)
        exists = column < k
    else:
        column, exists = _column((group * G)[:, None], tl.arange(0, G)[None, :], k, block, padded)
        column = tl.reshape(column, (128,))
        exists = tl.reshape(exists, (128,))
    values = tl.reshape(values, (64, 128)).to(out.dtype.element_ty)
    tl.store(out + rn[:, None] * k + column[None, :], values, mask=(rn < n)[:, None] & exists[None, :])
    if EARLY:
        gdc_wait()  # a kernel that waits for this one waits for earlier ones, too


@triton.jit
def _dequantize_rows(
    ids, codes, scale, zero, out, k, n_padded, k_slabs, block, padded, n,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr, PAIRED: tl.constexpr, G: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """Dequantize SLABS K slabs, from number * SLABS on, of row ids[out_row] (`row_and_column`)."""
    out_row, number = row_and_column(tl.cdiv(k_slabs, SLABS))
    out_row = out_row.to(tl.int64)
    row = tl.load(ids + out_row).to(tl.int64)
    valid = (row >= 0) & (row < n)
    row = tl.where(valid, row, 0)
    slab = (number * SLABS + tl.arange(0, SLABS))[:, None, None]
    # Elements [slabs, pieces of a slab, elements of a piece]; a piece has one scale, and its codes are in one plane of nibbles.
    PIECE: tl.constexpr = 16 if G == 16 else 32
    piece = tl.arange(0, 128 // PIECE)[None, :, None]
    kq = tl.arange(0, PIECE)[None, None, :]  # k within the plane of 32
    plane = piece
    if G == 16:
        plane = piece // 2
        kq = piece % 2 * 16 + kq
    if BITS == 4:
        lane = ((kq // 16 * 4 + row % 64 // 16) * 8 + row % 8) * 4 + kq // 2 % 4  # kt, nt, row, k4
        word = lane * 8 + kq // 8 % 2 * 4 + row // 8 % 2 * 2 + kq % 2  # khalf, rowhalf, k
        words = tl.load(codes + (row // 64 * k_slabs + slab) * 2048 + word, mask=slab < k_slabs, other=0).to(tl.int32)
        stored = words >> 4 * plane & 15
    else:
        byte = kq // 16 * 16 + kq // 2 % 4 * 4 + kq // 8 % 2 * 2 + kq % 2 if PAIRED else kq
        stored = tl.load(codes + row * (k_slabs * 128) + slab * 128 + plane * 32 + byte, mask=slab < k_slabs, other=0).to(tl.int32)
    group_start = slab * 128 + piece * PIECE // G * G
    scale_at = (group_start // padded).to(tl.int64) * n_padded + row
    s = tl.load(scale + scale_at, mask=slab < k_slabs, other=0)
    z = tl.load(zero + scale_at, mask=slab < k_slabs, other=0) if ZERO != 0 else s
    values = _values(stored, s, z, BITS, ZERO, FLOAT_CODES)
    values = tl.where(valid, values, float("nan")).to(out.dtype.element_ty)
    column, exists = _column(group_start, piece * PIECE % G + (kq % 16 if G == 16 else kq), k, block, padded)
    tl.store(out + out_row * k + column, values, mask=exists & (slab < k_slabs))


@triton.jit
def _values(stored, s, z, BITS: tl.constexpr, ZERO: tl.constexpr, FLOAT_CODES: tl.constexpr):
    """Return the float32 values of stored codes, int32: u of `gpu_tiles.py`, or bytes. Scales s and zeros z broadcast to them."""
    tl.static_assert(ZERO < 3, "a zero that has no code for GPUs")
    if FLOAT_CODES:
        return e2m1_codes(stored).to(tl.float32) * s.to(tl.float32)
    elif ZERO == 0:
        return (stored - 8 if BITS == 4 else stored).to(tl.float32) * s.to(tl.float32)
    q = stored if BITS == 4 else stored + 128
    if ZERO == 1:
        return (q - z.to(tl.int32)).to(tl.float32) * s.to(tl.float32)
    elif INTERPRETED:  # its fma rounds twice
        return (q.to(tl.float64) * s.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(q.to(tl.float32), tl.broadcast_to(s.to(tl.float32), q.shape), tl.broadcast_to(z.to(tl.float32), q.shape))


@triton.jit
def _column(start, i, k, block, padded):
    """Return the columns of elements `start` + i of the padded K, and the mask of those that are not padding. `start` begins a piece of one
    block."""
    within = start % padded + i
    column = start // padded * block + within
    return column, (within < block) & (column < k)


@triton.jit
def _sums(
    codes, scale, zero, sums, k, n_padded, k_slabs, granules_per_block, block, padded,
    BITS: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Write the sums of all granules, of G elements, of a K slab of a panel (`row_and_column`), for codes as int8."""
    tl.static_assert(ZERO < 3, "a zero that has no code for GPUs")
    panel, slab = row_and_column(k_slabs)
    rn = panel * 64 + tl.arange(0, 64)
    for j in tl.static_range(128 // G):
        granule = slab * (128 // G) + j
        start = granule * G
        within = start % padded
        count = tl.minimum(block - within, k - start // padded * block - within)
        count = tl.minimum(tl.maximum(count, 0), G).to(tl.float32)  # elements of the granule that are not padding
        scale_at = (granule // granules_per_block).to(tl.int64) * n_padded + rn
        s = tl.load(scale + scale_at).to(tl.float32)
        # The sum of codes q, int32 [64]
        if BITS == 4:
            # kt, nt, row, k4, khalf, rowhalf, k -> nt, rowhalf, row, the rest; padding is u = 8 or, with a zero, u = 0
            word = (panel.to(tl.int64) * k_slabs + slab) * 2048 + tl.arange(0, 2048)
            words = tl.load(codes.to(tl.pointer_type(tl.int16)) + word).to(tl.int32)
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
            byte = rn[:, None].to(tl.int64) * (k_slabs * 128) + start + tl.arange(0, G)[None, :]
            stored = tl.load(codes + byte).to(tl.int32)
            total = tl.sum(stored if ZERO == 0 else stored + 128, axis=1)
        if ZERO == 1:
            value = (total.to(tl.float32) - tl.load(zero + scale_at).to(tl.float32) * count) * s
        elif ZERO == 2:
            value = total.to(tl.float32) * s + tl.load(zero + scale_at).to(tl.float32) * count
        else:
            value = total.to(tl.float32) * s
        tl.store(sums + granule.to(tl.int64) * n_padded + rn, value)
