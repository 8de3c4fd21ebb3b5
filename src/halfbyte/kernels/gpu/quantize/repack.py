"""Weights in a CPU's layout -> the same weights in a GPU's, on the GPU: experts cross the link as they lie in main memory.

The layouts are those of `layouts/cpu_tiles.py` and `layouts/gpu_tiles.py`. Each code is moved on its own: a program computes where the
codes of a record of the GPU's layout (64 rows by 128 padded k) lie in the CPU's records, one for each block of 32 rows. Scales and zeros
are moved as they are.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.errors import lookup
from halfbyte.formats.spec import Format
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.gpu_tiles import RECORD

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of a scale or zero


def why_not(source: cpu_tiles.Geometry, target: gpu_tiles.Geometry) -> str | None:
    """Return why `repack` does not take a weight [n, k] from one layout to the other; None if it does."""
    if source.sparse or target.sparse or target.paired:
        return "its zeros are left out, or its codes lie in pairs"
    if source.blocks != target.blocks:
        return f"blocks longer than {cpu_tiles.LONGEST_BLOCK} elements are split on a CPU"
    if target.format != (source.format.integers if target.format.bits == 8 else source.format):
        return f"{target.format} does not hold the codes of {source.format} as they are"
    return None


def repack(data: Tensor, source: cpu_tiles.Geometry, target: gpu_tiles.Geometry, out: Tensor, experts: int = 1) -> None:
    """Write weights that `why_not` takes, and that have elements, in the GPU's layout; bytes between its sections are left as they are.

    Args:
        data: uint8 [experts * source.nbytes] on the GPU.
        source, target: Geometries of each weight.
        out: uint8 [experts * target.nbytes], beginning at a multiple of 256 bytes.
        experts: Weights, one after the other.
    """
    fmt, sections = source.format, gpu_tiles.views(out[: target.nbytes], target)
    scale, zero = (None if part is None else part.view(_INTEGERS[part.element_size()]) for part in (sections.scale, sections.zero))
    strides = tuple(0 if part is None else target.nbytes // part.element_size() for part in (sections.codes, scale, zero))
    sizes = target.n, target.k, target.n_padded, target.block, target.padded, source.panels, source.blocks
    record = source.record_bytes(source.padded)
    data_bytes = [cpu_tiles.data_bytes(source.bits, padded, sparse=False) for padded in (source.padded, source.last_padded)]
    run(
        _repack,
        (target.records, target.panels, experts),
        data,
        sections.codes,
        scale,
        zero,
        _values(fmt, data.device) if fmt.codebook and target.format.bits == 8 else None,
        strides,
        source.nbytes,
        source.panel_bytes,
        record,
        *data_bytes,
        *sizes,
        fmt.pad_index if target.format.bits == 4 else target.format.pad_index ^ 128,
        _bias(fmt),
        CODE=source.bits,
        BITS=target.format.bits,
        UNIT=source.unit,
        HIGH=cpu_tiles.plane_groups(fmt.packed_bits) if fmt.packed_bits else 0,
        G=min(target.padded, RECORD),
        num_warps=8,
    )


def _bias(fmt: Format) -> int:
    """Return what is subtracted from a code as a CPU's layout stores it, to give the byte of a GPU's."""
    return 1 << fmt.packed_bits - 1 if fmt.packed_bits and fmt.signed else lookup({4: 0, 8: 128}, fmt.bits, "codes of so many bits,")


@cache
def _values(fmt: Format, device: torch.device) -> Tensor:
    """Return the integers that the indices of a format with a codebook stand for, int8 [16]. Nothing can change them."""
    return torch.tensor(fmt.codebook, dtype=torch.int8, device=device)


@triton.jit
def _code(panel, row, i, CODE: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr):
    """Return the stored codes of elements i of rows of a record at `panel` (tensors of pointers and integers that broadcast)."""
    at = 4 * row + i % 4
    if CODE == 8:
        return tl.load(panel + 128 * (i // 4) + at).to(tl.int32)
    if HIGH == 0:
        return tl.load(panel + 128 * (i // 8) + at).to(tl.int32) >> i // 4 % 2 * 4 & 15
    unit = panel + i // UNIT * (UNIT // 8 * CODE * 32)  # 128 bytes hold 4 bits of 8 k of 32 rows
    within = i % UNIT
    group = within // 4
    low = tl.load(unit + 128 * (within // 8) + at).to(tl.int32) >> group % 2 * 4 & 15
    high = tl.load(unit + 128 * (UNIT // 8 + group // HIGH) + at).to(tl.int32) >> group % HIGH * (CODE - 4)
    return low | (high & (1 << CODE - 4) - 1) << 4


@triton.jit
def _repack(
    data, codes, scale, zero, values, strides, weight_bytes, panel_bytes, record_bytes, data_bytes, last_data_bytes,
    N, K, NP, block, padded, panels, blocks, pad_code, bias,
    CODE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Move record program_id(0) of panel program_id(1) of expert program_id(2).

    strides            elements between experts in codes, scale and zero
    values             int8 [16] that the codes are indices of; None: they are numbers
    data_bytes         of codes in a record of the CPU's layout; of the last one `last_data_bytes`
    NP, panels         rows with padding of the GPU's layout; panels of the CPU's
    block, padded      elements of a block without and with the GPU's padding
    CODE, BITS         bits of a stored code on the CPU and on the GPU
    UNIT, HIGH         elements whose planes of 4 and of the higher bits lie together; groups of 4 k in a byte of the latter, 0: no planes
    G                  elements of a record that have one scale
    """
    r = tl.program_id(0)
    panel = tl.program_id(1)
    expert = tl.program_id(2).to(tl.int64)
    data += expert * weight_bytes
    codes += expert * strides[0]
    if BITS == 4:
        # the order of the words: kt, nt, row, k4, khalf, rowhalf, k
        w = tl.arange(0, 2048)
        n = panel * 64 + w // 256 % 4 * 16 + w // 2 % 2 * 8 + w // 32 % 8
        kq = w // 1024 * 16 + w // 4 % 2 * 8 + w // 8 % 4 * 2 + w % 2
        word = tl.zeros([2048], tl.int32)
        for j in tl.static_range(4):
            k = r * 128 + 32 * j + kq
            b = k // padded
            i = k % padded
            exists = (n < N) & (i < block) & (b * block + i < K)
            source = data + (tl.minimum(n // 32, panels - 1).to(tl.int64) * panel_bytes + tl.minimum(b, blocks - 1) * record_bytes)
            u = _code(source, n % 32, tl.where(exists, i, 0), CODE, UNIT, HIGH)
            word |= tl.where(exists, u, pad_code) << 4 * j
        tl.store(codes + (panel.to(tl.int64) * tl.num_programs(0) + r) * 2048 + w, word.to(tl.int16))
    else:
        n = (panel * 64 + tl.arange(0, 64))[:, None]
        k = (r * 128 + tl.arange(0, 128))[None, :]
        b = k // padded
        i = k % padded
        exists = (n < N) & (i < block) & (b * block + i < K)
        source = data + (tl.minimum(n // 32, panels - 1).to(tl.int64) * panel_bytes + tl.minimum(b, blocks - 1) * record_bytes)
        u = _code(source, n % 32, tl.where(exists, i, 0), CODE, UNIT, HIGH)
        u = u - bias if values is None else tl.load(values + u).to(tl.int32)
        at = n.to(tl.int64) * (tl.num_programs(0) * 128) + k
        tl.store(codes + at, tl.where(exists, u, pad_code).to(tl.int8))
    n = (panel * 64 + tl.arange(0, 64))[:, None]
    b = ((r * (128 // G) + tl.arange(0, 128 // G)) * G // padded)[None, :]
    exists = (n < N) & (b < blocks)
    source = data + (tl.minimum(n // 32, panels - 1).to(tl.int64) * panel_bytes + tl.minimum(b, blocks - 1) * record_bytes)
    source += tl.where(b == blocks - 1, last_data_bytes, data_bytes)
    to = b.to(tl.int64) * NP + n
    s = source.to(tl.pointer_type(scale.dtype.element_ty)) + n % 32
    tl.store(scale + expert * strides[1] + to, tl.load(s, mask=exists, other=0))
    if zero is not None:
        source += 32 * (scale.dtype.element_ty.primitive_bitwidth // 8)
        z = source.to(tl.pointer_type(zero.dtype.element_ty)) + n % 32
        tl.store(zero + expert * strides[2] + to, tl.load(z, mask=exists, other=0))
