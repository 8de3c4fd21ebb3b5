"""The contenders of the GPU benchmark: halfbyte, and torch's own products. Those of other packages are in `benchmarks/`.

A contender puts copies of one weight in memory, as many as exceed the caches, and gives for x [M, K] the launches of y = x W^T, one
for each copy. What it cannot do it says with Absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats.codes import Codes, pack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.kernels.gpu.runtime.clock import copies
from halfbyte.machine import Gpu

Launches = list[Callable[[], Tensor]]
Bind = Callable[[Tensor], Launches]


class Absent(Exception):
    """Why a contender does not take part."""


@dataclass(frozen=True)
class GpuWork:
    """One weight [n, k] in `format`; activations in `dtype`; how halfbyte computes."""

    gpu: Gpu
    n: int
    k: int
    format: Format
    dtype: torch.dtype
    compute: str
    activation: str

    @cached_property
    def codes(self) -> Codes:
        generator = torch.Generator("cuda").manual_seed(0)
        return ops.quantize(torch.randn(self.n, self.k, generator=generator, device="cuda") * 0.02, self.format)

    @cached_property
    def weight(self) -> Tensor:
        """Dequantized, float32 [n, k]."""
        return self.codes.dequantize()

    def rotate(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Copies of a weight's tensors at different addresses, together larger than the caches."""
        return [tuple(t.clone() for t in tensors) for _ in range(copies(sum(t.nbytes for t in tensors), self.gpu.l2))]

    @property
    def group(self) -> int:
        return self.format.block_size(self.k)

    def needs(self, sound: bool, what: str) -> None:
        if not sound:
            raise Absent(f"takes {what}")


def halfbyte(work: GpuWork) -> Bind:
    packed = ops.pack(work.codes, "cuda")
    weights = [type(packed)(packed.format, packed.shape, packed.layout, data) for (data,) in work.rotate(packed.data)]

    def bind(x: Tensor) -> Launches:
        return [partial(ops.linear, x, weight, compute=work.compute, activation=work.activation) for weight in weights]

    return bind


def cublas(work: GpuWork) -> Bind:
    work.needs(work.dtype != torch.float32, "activations of 16 bits")
    weights = work.rotate(work.weight.to(work.dtype))
    return lambda x: [partial(torch.nn.functional.linear, x, w) for (w,) in weights]


def tinygemm(work: GpuWork) -> Bind:
    """torch's int4 kernel: w = scale * (u - 8) + zero in bfloat16."""
    fmt = work.format
    work.needs(work.dtype == torch.bfloat16, "bfloat16 activations")
    work.needs(fmt.bits == 4 and work.group in (32, 64, 128, 256) and work.k % work.group == 0, "4 bits in blocks of 32 to 256 that fill K")
    work.needs(work.n % 8 == 0 and work.k % 128 == 0, "N % 8 = 0 and K % 128 = 0")
    work.needs(fmt.zero != "offset", "points")
    u = (work.codes.values() - fmt.q_min).to(torch.uint8)
    scale = work.codes.scale.float()
    zero = torch.zeros_like(scale) if work.codes.zero is None else scale * (8 - work.codes.zero.float())
    nibbles = pack_nibbles(u.view(work.n, -1, 2).flip(-1).view(work.n, -1))
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
    scales = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)
    weights = work.rotate(packed, scales)
    return lambda x: [partial(torch.ops.aten._weight_int4pack_mm, x, w, work.group, s) for w, s in weights]


@dataclass(frozen=True)
class GpuContender:
    """One line of the plot."""

    name: str
    label: str
    bind: Callable[[GpuWork], Bind]
    peer: bool = True


HALFBYTE = GpuContender("halfbyte", "halfbyte", halfbyte, peer=False)
PEERS: Sequence[GpuContender] = (
    GpuContender("cublas", "cuBLAS 16-bit", cublas),
    GpuContender("tinygemm", "torch int4pack", tinygemm),
)
