"""Put the zeros back into the codes of a 2:4 sparse weight: from `layouts/gpu_sparse.py` to `layouts/gpu_tiles.py`, bit for bit.

`skinny_hopper` multiplies few rows by the stored codes. All other kernels read all codes, which `spread` writes to scratch memory before
them; that takes as long as to read and write the bytes.
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
    """Return codes, scales and zeros of `data`, uint8 [geo.nbytes], in the order of `gpu_tiles.py`, whether it is sparse or not."""
    views = gpu_tiles.views(data, geo)
    return spread(views, geo) if geo.sparse else views


def spread(sparse: Views, geo: Geometry) -> Views:
    """Return the sections of a sparse weight with its zeros put back; codes are in scratch memory, valid until the next call on the same
    stream."""
    dense = gpu_tiles.geometry(geo.format, (geo.n, geo.k))
    out = codes_workspace(sparse.codes.device, dense.codes_bytes)
    codes, positions = sparse.codes.split([geo.kept_bytes // 4, (geo.codes_bytes - geo.kept_bytes) // 4])
    # Not `early`: the kernels that follow read the codes without waiting for it.
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
def _spread(codes, positions, zero, out, n_padded, k_slabs, padded, BITS: tl.constexpr):
    """Write a K slab of a panel (`row_and_column`).

    codes, positions   the stored codes and their positions, 16-bit words in the order of `gpu_sparse.py`
    zero               zero points of the weight, or None
    out                the codes of `gpu_tiles.py`, as 32-bit words

    Of each quad, four neighbours along K, two codes are stored. A pair of code words, of k = 0 and k = 1, has the codes of 4 quads with
    4 bits, of 2 with 8. Codes are combined with XOR, so that one write of `zero_codes` fills all places and a stored code changes its own.
    """
    panel, slab = row_and_column(k_slabs)
    panel = panel.to(tl.int64)
    slab_index = panel * k_slabs + slab
    CODE_WORDS: tl.constexpr = 128 * BITS  # pairs of words of a slab
    QUADS: tl.constexpr = 16 // BITS  # quads of a pair of words
    e = tl.arange(0, CODE_WORDS)  # (with 8 bits half,) nt, row, k4, khalf, rowhalf
    k4, khalf, rowhalf = e // 4 % 4, e // 2 % 2, e % 2
    code_words = tl.load(codes + slab_index * CODE_WORDS + e)
    first, second = code_words & 0xFFFF, code_words >> 16 & 0xFFFF  # the first and the second stored code of each quad
    position_words = positions + slab_index * 512 + e % 512 // 16 * 16 + rowhalf
    zero_points = slab * 0
    if zero is not None:
        zero_points = zero + panel * 64 + e % 512 // 128 * 16 + rowhalf * 8 + e // 16 % 8
    if BITS == 4:
        # Nibble j: the quad's two positions, and the code that means zero, whose sign-less zero is 8
        quad_positions = tl.zeros_like(e)
        zero_codes = quad_positions + 0x8888 if zero is None else quad_positions
        for j in tl.static_range(QUADS):
            quad_positions |= (tl.load(position_words + (j % 2 * 2 + khalf) * 4 + j // 2 * 2) >> 4 * k4 & 15).to(tl.int32) << 4 * j
            if zero is not None:
                zero_codes |= tl.load(zero_points + ((slab * 128 + 32 * j) // padded).to(tl.int64) * n_padded).to(tl.int32) << 4 * j
        # Masks of whole nibbles from the bits of both positions: low and high bit of the first, then of the second
        low, high = (quad_positions & 0x1111) * 15, (quad_positions >> 1 & 0x1111) * 15
        low2, high2 = (quad_positions >> 2 & 0x1111) * 15, (quad_positions >> 3 & 0x1111) * 15
        first ^= zero_codes
        second ^= zero_codes
        w0 = zero_codes ^ (first & ~high & ~low) ^ (second & ~high2 & ~low2)
        w1 = zero_codes ^ (first & ~high & low) ^ (second & ~high2 & low2)
        w2 = zero_codes ^ (first & high & ~low) ^ (second & high2 & ~low2)
        w3 = zero_codes ^ (first & high & low) ^ (second & high2 & low2)
        #                                                               nt row k4 khalf rowhalf, place in the quad
        words = tl.reshape(tl.join(w0 | w1 << 16, w2 | w3 << 16), (4, 8, 2, 2, 2, 2, 2))
        words = tl.reshape(tl.permute(words, (4, 0, 1, 3, 6, 2, 5)), (1024,))
        tl.store(out + slab_index * 1024 + tl.arange(0, 1024), words)
    else:
        tl.static_assert(BITS == 8, "codes of other bits have no code for GPUs")
        half = e // 512
        words = ()
        for b in tl.static_range(QUADS):
            quad_positions = (tl.load(position_words + (b * 2 + khalf) * 4 + half * 2) >> 4 * k4 & 15).to(tl.int32)
            zero_codes = tl.zeros_like(e)
            if zero is not None:  # bytes with a zero point are stored as q - 128
                zero_codes = tl.load(zero_points + ((slab * 128 + 64 * half + 32 * b) // padded).to(tl.int64) * n_padded).to(tl.int32) ^ 128
            first_byte, second_byte = (first >> 8 * b & 255) ^ zero_codes, (second >> 8 * b & 255) ^ zero_codes
            words += ((zero_codes * 0x01010101 ^ first_byte << 8 * (quad_positions & 3) ^ second_byte << 8 * (quad_positions >> 2)),)
        #                                               half nt row k4 khalf rowhalf b
        words = tl.reshape(tl.join(words[0], words[1]), (2, 4, 8, 4, 2, 2, 2))
        words = tl.reshape(tl.permute(words, (1, 5, 2, 0, 6, 4, 3)), (64, 32))
        row_start = (panel * 64 + tl.arange(0, 64))[:, None] * (k_slabs * 32)
        tl.store(out + row_start + slab * 32 + tl.arange(0, 32)[None, :], words)
