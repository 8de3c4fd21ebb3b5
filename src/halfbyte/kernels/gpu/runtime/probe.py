"""What a GPU can do at the most: how long it takes to read bytes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.runtime import launch
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

_WAYS = ((1024, 4, 4), (2048, 4, 4), (4096, 8, 2), (4096, 4, 4), (8192, 8, 4))  # words of 4 bytes a step, warps, blocks an SM


@triton.jit
def _read(x, out, words, per, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * per
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in tl.range(0, per, BLOCK * STEPS):
        for step in tl.static_range(STEPS):
            k = at + step * BLOCK + i
            total ^= tl.load(x + start + k, mask=(k < per) & (start + k < words), other=0)
    # The sum is looked at, so that the reading is not left out; random bytes make it this number next to never.
    tl.store(out + i, total, mask=total == 0x5A5A5A5A)


def read_launches(data: Sequence[Tensor], gpu: Gpu) -> dict[str, list[Callable[[], object]]]:
    """Ways to read each of `data` (uint8, a multiple of 4 bytes is read); the fastest is what the GPU can do."""
    out = torch.zeros(8192, dtype=torch.int32, device=data[0].device)
    found: dict[str, list[Callable[[], object]]] = {}
    words = data[0].numel() // 4
    views = [tensor[: 4 * words].view(torch.int32) for tensor in data]
    for block, warps, blocks in _WAYS:
        programs = max(1, min(gpu.sms * blocks, -(-words // block)))
        per = round_up(-(-words // programs), block)
        for steps in (1, 4):
            name = f"{block} words, {warps} warps, {blocks} blocks, {steps} steps"
            found[name] = [
                partial(launch.run, _read, (programs,), view, out, words, per, BLOCK=block, STEPS=steps, num_warps=warps) for view in views
            ]
    return found
