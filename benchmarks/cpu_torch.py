"""What torch itself offers for codes on CPUs: its int4 kernel, and dynamic int8 through oneDNN."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import UnsupportedError


def int4pack(work: Workload, format: str) -> Built:
    """`_weight_int4pack_mm_for_cpu` on bfloat16 activations: w = (q - 8) * scale + offset, both bfloat16, the offset zero."""
    slab = work.codes(format)
    group = slab.format.block_size(work.k)
    if work.n % 16 or work.k % group or group not in (32, 64, 128, 256):
        raise UnsupportedError(f"torch's int4 kernel wants N % 16 == 0 and K % {group} == 0, got N={work.n}, K={work.k}")
    convert, multiply = torch.ops.aten._convert_weight_to_int4pack_for_cpu, torch.ops.aten._weight_int4pack_mm_for_cpu
    scale = slab.scale.bfloat16()
    copy_bytes = work.n * work.k // 2 + work.n * (work.k // group) * 2 * scale.itemsize
    weights = []
    for copy in range(work.copies(copy_bytes)):
        values = work.take(slab, copy).values() + 8
        by_group = scale[work.rows(copy)].T
        weights.append((convert(values.int(), 1), torch.stack((by_group, torch.zeros_like(by_group)), dim=-1).contiguous()))

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        x = x.bfloat16()
        return lambda: (multiply(x, codes, group, scales) for codes, scales in weights)

    weight = slab.values().double() * slab.spread(scale.double())
    return Built(weight, copy_bytes, len(weights), bind, torch.bfloat16)


def dynamic_int8(work: Workload, format: str) -> Built:
    """`torch.ao.nn.quantized.dynamic.Linear`, weights per channel, activations per call (7 bits, as torch narrows them)."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        raise UnsupportedError("this torch has no oneDNN engine for int8")
    torch.backends.quantized.engine = "onednn"
    slab = work.codes(format)
    zeros = torch.zeros(work.n, dtype=torch.int64)
    copy_bytes = work.take(slab, 0).nbytes
    modules: list[nn.Module] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        for copy in range(work.copies(copy_bytes)):
            codes = work.take(slab, copy)
            weight = torch._make_per_channel_quantized_tensor(codes.data, codes.scale.flatten().double(), zeros, 0)
            module = torch.ao.nn.quantized.dynamic.Linear(work.k, work.n, bias_=False)
            module.set_weight_bias(weight, None)
            modules.append(module)

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        return lambda: (module(x) for module in modules)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(modules), bind)
