"""Which kernel convolves on a GPU: the literal list, the rules, and why each may not be taken.

The rules follow what was measured on an H100 and an H200 (`benchmarks/conv.py --device cuda`).
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from halfbyte.errors import UnsupportedError
from halfbyte.kernels.gpu.conv import few as conv_few
from halfbyte.kernels.gpu.conv import hopper as conv_hopper
from halfbyte.kernels.gpu.conv import implicit_gemm as conv
from halfbyte.kernels.gpu.conv import library as conv_library
from halfbyte.kernels.gpu.conv import teams as conv_teams
from halfbyte.kernels.gpu.conv.tile import Convolution
from halfbyte.machine import Gpu

_LEAST_WRITTEN = 4096  # patches from which on to write a weight out pays
_FEW_ROWS = 64  # up to which linear layers have a kernel of their own


class ConvChoice(NamedTuple):
    """The kernel's file, its config (None: there is nothing to choose), and the reasons against the others, by their names."""

    name: str
    module: ModuleType
    config: Any
    rejected: tuple[tuple[str, str], ...]


@lru_cache(maxsize=4096)
def choose_gpu_conv(problem: Convolution, gpu: Gpu) -> ConvChoice:
    """The kernel for `problem` on `gpu`. Raises UnsupportedError where none can solve it."""
    rejected: list[tuple[str, str]] = []
    overlap = "its pixels overlap" if problem.overlap else None
    for name, reason, module in (
        ("conv_teams", overlap or _against_teams(problem, gpu), conv_teams),
        ("conv_few", overlap or _against_few(problem, gpu), conv_few),
        ("conv_hopper", overlap or _against_hopper(problem, gpu), conv_hopper),
        ("conv_library", overlap or _against_library(problem, gpu), conv_library),
        ("conv", conv.supports(problem, gpu), conv),
    ):
        if reason is None:
            config = None if module is conv_library else module.configs(problem, gpu)[0]
            return ConvChoice(name, module, config, tuple(rejected))
        rejected.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise UnsupportedError(f"no kernel on {gpu.name} solves {problem} ({reasons}): use the CPU")


@lru_cache(maxsize=4096)
def beats_linear(problem: Convolution, gpu: Gpu) -> bool:
    """Whether a kernel of one tap, which is a linear layer of pixels, takes less time as a convolution in floating point."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return False
    if _against_teams(problem, gpu) is None and problem.m > _FEW_ROWS:
        return True
    many = problem.m >= _LEAST_WRITTEN or problem.window.stride != (1, 1)  # whose pixels would be copied before
    if _against_few(problem, gpu) is None or (many and _against_hopper(problem, gpu) is None):
        return True
    # 196 pixels of 1024 channels and bytes with one scale take 7.4 us on an H100, as a linear layer 9.0.
    fmt = problem.sizes.format
    return fmt.bits == 8 and not isinstance(fmt.block, int) and problem.m <= _LEAST_WRITTEN


def _against_teams(problem: Convolution, gpu: Gpu) -> str | None:
    if reason := conv_teams.supports(problem, gpu):
        return reason
    tiles = conv_teams.tiles(problem, conv_teams.configs(problem, gpu)[0])
    return None if tiles <= gpu.sms else f"its {tiles} tiles are more than {gpu.sms} multiprocessors compute at once"


def _against_few(problem: Convolution, gpu: Gpu) -> str | None:
    if reason := conv_few.supports(problem, gpu):
        return reason
    if not conv_few.wins(problem, gpu):
        return f"{problem.m} x {problem.n} sums of {problem.sizes.k} are too many for blocks that run at once, or too short to share"
    return None


def _against_hopper(problem: Convolution, gpu: Gpu) -> str | None:
    if reason := conv_hopper.supports(problem, gpu):
        return reason
    if problem.dtype == torch.int8 and problem.sizes.taps > 1 and problem.window.stride != (1, 1):
        return "integers of several taps with a stride take longer there: what lies outside of the image is added pixel by pixel"
    if problem.sizes.channels % 64 and problem.m < _LEAST_WRITTEN:
        return f"{problem.sizes.channels} channels are not a multiple of 64, and {problem.m} patches few: from {_LEAST_WRITTEN} on"
    tiles = conv_hopper.configs(problem, gpu)[0].tiles(problem)
    return None if 2 * tiles >= gpu.sms else f"its {tiles} tiles leave most of {gpu.sms} multiprocessors idle"


def _against_library(problem: Convolution, gpu: Gpu) -> str | None:
    if reason := conv_library.supports(problem, gpu):
        return reason
    if problem.m < _LEAST_WRITTEN:
        return f"to write the weight out takes longer than to convolve {problem.m} patches: from {_LEAST_WRITTEN} on"
    return None
