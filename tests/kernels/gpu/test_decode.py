"""Codes to floating point: identical bits for every code, every plane and every point, by PTX and by plain Triton."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from halfbyte.formats.spec import CODEBOOKS
from halfbyte.kernels.gpu import decode
from halfbyte.kernels.gpu.runtime import launch

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def decode_words(words, points, out, SIZE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    row, plane, column = tl.arange(0, 32)[:, None, None], tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    i = tl.program_id(0) * 1024 + row * 32 + column
    planes = decode.nibbles(tl.load(words + i), DTYPE, ASM)
    point = None
    if points is not None:
        point = tl.load(points + i)
    tl.store(out + plane * SIZE + i, decode.minus(planes, point, 4, ASM))


@triton.jit
def decode_bytes(q, points, out, PAIRS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 256)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if PAIRS:
        words = tl.load(q.to(tl.pointer_type(tl.int16)) + (tl.program_id(0) * 512 + tl.arange(0, 512)))
        values = decode.int8_pairs(tl.reshape(words, (256, 1, 2)), DTYPE, ASM)
        i = (
            tl.program_id(0) * 1024
            + tl.arange(0, 256)[:, None, None] * 4
            + tl.arange(0, 2)[None, None, :] * 2
            + tl.arange(0, 2)[None, :, None]
        )
    else:
        values = decode.int8_values(tl.load(q + i), DTYPE, ASM)
    point = None
    if points is not None:
        point = tl.load(points + i)
    tl.store(out + i, decode.minus(values, point, 8, ASM))


@triton.jit
def decode_floats(words, out, SIZE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    row, plane, column = tl.arange(0, 32)[:, None, None], tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    i = tl.program_id(0) * 1024 + row * 32 + column
    tl.store(out + plane * SIZE + i, decode.e2m1(tl.load(words + i), DTYPE, ASM))


def ways(interpreted: bool) -> list[bool]:
    return [False] if interpreted or torch.version.hip else [False, True]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_nibble_and_point(dtype: torch.dtype, device: torch.device, interpreted: bool) -> None:
    words = (torch.arange(1 << 12, dtype=torch.int32, device=device) * 0x1357).to(torch.int16)
    u = torch.stack([words.int() >> 4 * j & 15 for j in range(4)])
    assert all(len(plane.unique()) == 16 for plane in u)
    points = (torch.arange(1 << 12, dtype=torch.int32, device=device) * 7 >> 3 & 15).to(torch.uint8)
    for asm in ways(interpreted):
        for point in (None, points):
            out = torch.full((4, 1 << 12), torch.nan, dtype=dtype, device=device)
            launch.run(decode_words, (4,), words, point, out, SIZE=1 << 12, DTYPE=TYPES[dtype], ASM=asm)
            expected = (u - (8 if point is None else point.int())).to(dtype)
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_4_bit_float(dtype: torch.dtype, device: torch.device, interpreted: bool) -> None:
    words = (torch.arange(1 << 12, dtype=torch.int32, device=device) * 0x1357).to(torch.int16)
    expected = torch.tensor(CODEBOOKS["fp4"], dtype=dtype, device=device)[torch.stack([words.int() >> 4 * j & 15 for j in range(4)])]
    for asm in ways(interpreted):
        out = torch.full((4, 1 << 12), torch.nan, dtype=dtype, device=device)
        launch.run(decode_floats, (4,), words, out, SIZE=1 << 12, DTYPE=TYPES[dtype], ASM=asm)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_byte_and_point(dtype: torch.dtype, pairs: bool, device: torch.device, interpreted: bool) -> None:
    stored = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int8)
    points = (torch.arange(1 << 16, dtype=torch.int32, device=device) >> 8).to(torch.uint8)
    for asm in ways(interpreted):
        for point in (None, points):
            out = torch.full((1 << 16,), torch.nan, dtype=dtype, device=device)
            launch.run(decode_bytes, (64,), stored, point, out, PAIRS=pairs, DTYPE=TYPES[dtype], ASM=asm)
            q = stored.int()  # with a point, u - 128 is stored
            expected = (q if point is None else q + 128 - point.int()).to(dtype)
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
