"""What tests of the floating-point linear kernels share: run one on a problem, and compare with the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from samples import random_codes
from torch import Tensor

from halfbyte.formats import Codes, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.runtime import scratch
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}


def launched(launch: Callable[[Tensor], object], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `launch` writes to an output full of NaN, with scratch memory full of them: on a GPU twice, with the same bits. (In an
    interpreter programs always take the same turns.) Locks are left as they were found."""
    found = []
    for _ in range(2 if device.type == "cuda" else 1):
        for buffers in scratch._devices.values():
            for workspace in buffers.workspaces.values():
                workspace.fill_(255)
        launch(out := torch.full(shape, torch.nan, dtype=dtype, device=device))
        found.append(out.cpu())
    assert torch.equal(found[0].view(torch.uint8), found[-1].view(torch.uint8)), "the second run gave other bits"
    locks = [lock for buffers in scratch._devices.values() for lock in buffers.locks.values()]
    assert not any(bool(lock.any()) for lock in locks), "a lock was left behind"
    return found[0]


def check_linear(
    module: ModuleType,
    config: Any,
    problem: Problem,
    device: torch.device,
    *,
    interpreted: bool,
    epilogue: bool = False,
    weight_rounded: bool = False,
    point_rounded: bool = False,
    x_offset: int = 0,
) -> None:
    """What is `launched` is near the reference.

    How near: `reference.error_bound` is that of float32 sums, twice because matrix units align products before they add and cut what is
    below (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021); where the kernel rounds the weight to x's type, two
    roundings (the scale, the product) of each weight besides, and where it rounds the zero point's product with the scale, that one. The
    interpreter cuts float32 to bfloat16, where a GPU rounds.
    """
    fmt, dtype = as_format(problem.format), problem.dtype
    codes = random_codes(fmt, (problem.n, problem.k))
    packed = gpu_tiles.pack(codes, paired=problem.paired)
    views = gpu_tiles.views(packed.data.to(device), gpu_tiles.geometry(fmt, codes.shape, paired=problem.paired))
    x = torch.randn(problem.m, problem.k + x_offset).to(dtype)[:, x_offset:]
    bias = torch.randn(problem.n) if epilogue else None
    residual = torch.randn(problem.m, problem.n).to(dtype) if epilogue else None
    low, high = (-1.5, 2.5) if epilogue else (-torch.inf, torch.inf)
    ends = Epilogue(None if bias is None else bias.to(device), None if residual is None else residual.to(device), low, high)
    padded = torch.full((problem.m, problem.k + x_offset), torch.nan, dtype=dtype, device=device)
    padded[:, x_offset:] = x.to(device)
    y = launched(lambda out: module.launch(problem, config, padded[:, x_offset:], views, out, ends), (problem.m, problem.n), dtype, device)
    expected, error = reference.linear(x, codes, bias), 2 * reference.error_bound(x, codes, bias)
    if residual is not None:
        expected = expected + residual.double()
        error = error + 2.0**-22 * (expected.abs() + residual.double().abs())
    if weight_rounded:
        error = error + 2 * UNIT[dtype] * (x.double().abs() @ codes.dequantize(torch.float64).abs().T)
    if point_rounded and codes.zero is not None:
        points = codes.spread(codes.zero.double() * codes.scale.double()).abs()
        error = error + UNIT[dtype] * (x.double().abs() @ points.T)
    if interpreted and dtype == torch.bfloat16:
        error = error + UNIT[dtype] * (expected.abs() + error)
        if weight_rounded:
            error = error + 2 * UNIT[dtype] * (x.double().abs() @ terms(codes).T)
    expected = expected.clamp(*torch.tensor([low, high]).double().tolist())
    wrong = ~reference.agrees(y, expected, error)
    worst = float(((y.double() - expected).abs() / error).nan_to_num(nan=torch.inf).max())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off by up to {worst:.2f} times the bound"


def terms(codes: Codes) -> Tensor:
    """|scale * u| + |offset| of each weight: what the interpreter's cut products are relative to."""
    q = codes.values().double() - codes.format.q_min
    offset = 0 if codes.zero is None else codes.spread(codes.zero.double()).abs()
    return q * codes.spread(codes.scale.double()) + offset
