"""The codes of a 2:4 sparse weight with their zeros put back: from `layouts/gpu_sparse.py` to `layouts/gpu_tiles.py`, bit for bit.

`skinny_hopper` multiplies few rows by the codes that are kept. All other kernels read all codes, which this writes to memory before them.
It takes as long as to move the bytes of both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import row_and_column
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.gpu.runtime.scratch import codes_workspace
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.gpu_tiles import Geometry, Views


def sections(data: Tensor, geo: Geometry) -> Views:
    """Return the sections that all kernels read, of any weight that has elements."""
    views = gpu_tiles.views(data, geo)
    return spread(views, geo) if geo.sparse else views


def spread(sparse: Views, geo: Geometry) -> Views:
    """Return the sections of a sparse weight with its zeros. Codes are valid until the next call on the same stream."""
    dense = gpu_tiles.geometry(geo.format, (geo.n, geo.k))
    out = codes_workspace(sparse.codes.device, dense.codes_bytes)
    codes, positions = sparse.codes.split([geo.kept_bytes // 4, (geo.codes_bytes - geo.kept_bytes) // 4])
    # It lets no kernel start early, as those that follow ask for codes at once.
    launch.run(
        _spread,
        launch.flat_grid(geo.panels, geo.records),
        codes,
        positions.view(torch.int16),
        sparse.zero,
        out.view(torch.int32),
        geo.n_padded,
        geo.records,
        geo.padded,
        BITS=geo.format.bits,
        num_warps=4,
    )
    return Views(gpu_tiles.codes_of(out, dense), sparse.scale, sparse.zero)


@triton.jit
def _spread(codes, positions, zero, out, NP, R, padded, BITS: tl.constexpr):
    """Write a panel's K slab. A lane has the codes of two of four neighbours: with 4 bits of four such groups, with 8 bits of two."""
    panel, r = row_and_column(R)
    panel = panel.to(tl.int64)
    slab = panel * R + r
    CODE_WORDS: tl.constexpr = 128 * BITS
    STEPS: tl.constexpr = 16 // BITS
    e = tl.arange(0, CODE_WORDS)  # of 8 bits half, then nt, row, k4, khalf, rowhalf
    k4, khalf, rowhalf = e // 4 % 4, e // 2 % 2, e % 2
    code_words = tl.load(codes + slab * CODE_WORDS + e)
    first, second = code_words & 0xFFFF, code_words >> 16 & 0xFFFF
    places = positions + slab * 512 + e % 512 // 16 * 16 + rowhalf
    points = r * 0
    if zero is not None:
        points = zero + panel * 64 + e % 512 // 128 * 16 + rowhalf * 8 + e // 16 % 8
    if BITS == 4:
        which = tl.zeros_like(e)
        zero_codes = which + 0x8888 if zero is None else which
        for j in tl.static_range(STEPS):
            which |= (tl.load(places + (j % 2 * 2 + khalf) * 4 + j // 2 * 2) >> 4 * k4 & 15).to(tl.int32) << 4 * j
            if zero is not None:
                zero_codes |= tl.load(points + ((r * 128 + 32 * j) // padded).to(tl.int64) * NP).to(tl.int32) << 4 * j
        # Bits of the positions, spread over the nibbles of codes.
        low, high = (which & 0x1111) * 15, (which >> 1 & 0x1111) * 15
        low2, high2 = (which >> 2 & 0x1111) * 15, (which >> 3 & 0x1111) * 15
        first ^= zero_codes
        second ^= zero_codes
        w0 = zero_codes ^ (first & ~high & ~low) ^ (second & ~high2 & ~low2)
        w1 = zero_codes ^ (first & ~high & low) ^ (second & ~high2 & low2)
        w2 = zero_codes ^ (first & high & ~low) ^ (second & high2 & ~low2)
        w3 = zero_codes ^ (first & high & low) ^ (second & high2 & low2)
        #                                                               nt row k4 khalf rowhalf of four
        words = tl.reshape(tl.join(w0 | w1 << 16, w2 | w3 << 16), (4, 8, 2, 2, 2, 2, 2))
        words = tl.reshape(tl.permute(words, (4, 0, 1, 3, 6, 2, 5)), (1024,))
        tl.store(out + slab * 1024 + tl.arange(0, 1024), words)
    else:
        half = e // 512
        words = ()
        for b in tl.static_range(STEPS):
            which = (tl.load(places + (b * 2 + khalf) * 4 + half * 2) >> 4 * k4 & 15).to(tl.int32)
            zero_codes = tl.zeros_like(e)
            if zero is not None:
                zero_codes = tl.load(points + ((r * 128 + 64 * half + 32 * b) // padded).to(tl.int64) * NP).to(tl.int32) ^ 128
            one, other = (first >> 8 * b & 255) ^ zero_codes, (second >> 8 * b & 255) ^ zero_codes
            words += ((zero_codes * 0x01010101 ^ one << 8 * (which & 3) ^ other << 8 * (which >> 2)),)
        #                                               half nt row k4 khalf rowhalf b
        words = tl.reshape(tl.join(words[0], words[1]), (2, 4, 8, 4, 2, 2, 2))
        words = tl.reshape(tl.permute(words, (1, 5, 2, 0, 6, 4, 3)), (64, 32))
        rows = (panel * 64 + tl.arange(0, 64))[:, None] * (R * 32)
        tl.store(out + rows + r * 32 + tl.arange(0, 32)[None, :], words)
