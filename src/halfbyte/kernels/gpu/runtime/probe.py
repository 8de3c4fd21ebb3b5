"""The memory bandwidth of a GPU, measured by kernels that read bytes and do nothing else: the ceiling of memory-bound kernels.

`bench/gpu.py` and the scripts of `benchmarks/` time `read_launches` and take the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.runtime import launch
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu


class _Config(NamedTuple):
    """How a launch reads: `block` words of 4 bytes at a time in a program of so many warps, `programs_per_sm` programs on each SM."""

    block: int
    warps: int
    programs_per_sm: int


_CONFIGS = _Config(1024, 4, 4), _Config(2048, 4, 4), _Config(4096, 8, 2), _Config(4096, 4, 4), _Config(8192, 8, 4)
_UNROLLED = 1, 4  # blocks that are loaded together


@triton.jit
def _read(x, out, words, words_per_program, BLOCK: tl.constexpr, UNROLLED: tl.constexpr):
    """Read int32 x [words]: program p the words from p * words_per_program on."""
    start = tl.program_id(0).to(tl.int64) * words_per_program
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in tl.range(0, words_per_program, BLOCK * UNROLLED):
        for step in tl.static_range(UNROLLED):
            k = at + step * BLOCK + i
            total ^= tl.load(x + start + k, mask=(k < words_per_program) & (start + k < words), other=0)
    # A use of the total, so that the compiler keeps the loads; random bytes hardly ever make it this number.
    tl.store(out + i, total, mask=total == 0x5A5A5A5A)


def read_launches(data: Sequence[Tensor], gpu: Gpu) -> dict[str, list[Callable[[], object]]]:
    """Return launches that read memory, of which the fastest shows what the GPU can do.

    Args:
        data: uint8 tensors of one size on the GPU, of which whole words of 4 bytes are read.
        gpu: The GPU.

    Returns:
        For each way to read, by its description: a function for each of `data` that launches it.
    """
    sizes = {tensor.numel() for tensor in data}
    assert len(sizes) == 1, f"tensors of one size are compared, got {sorted(sizes)} bytes"
    words = sizes.pop() // 4
    views = [tensor[: 4 * words].view(torch.int32) for tensor in data]
    out = torch.zeros(max(config.block for config in _CONFIGS), dtype=torch.int32, device=data[0].device)
    launches: dict[str, list[Callable[[], object]]] = {}
    for block, warps, programs_per_sm in _CONFIGS:
        programs = max(1, min(gpu.sms * programs_per_sm, -(-words // block)))
        words_per_program = round_up(-(-words // programs), block)
        for unrolled in _UNROLLED:
            name = f"{block} words, {warps} warps, {programs_per_sm} programs per SM, {unrolled} blocks together"
            read = partial(launch.run, _read, (programs,), BLOCK=block, UNROLLED=unrolled, num_warps=warps)
            launches[name] = [partial(read, view, out, words, words_per_program) for view in views]
    return launches
