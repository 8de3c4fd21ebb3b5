"""Tensors where kernels want them, and the results of operations where there is nothing to multiply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that kernels read from: on a CPU a multiple of 64, on a GPU of 16."""
    if tensor.is_contiguous() and not tensor.data_ptr() % (64 if tensor.is_cpu else 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def empty_sum(x: Tensor, shape: Sequence[int], *terms: Tensor | None) -> Tensor:
    """The sums of products of x where a size is 0, float32 of `shape`: only the terms that are there."""
    total = x.new_zeros(shape, dtype=torch.float32)
    for term in terms:
        total = total if term is None else total.add_(term)
    return total


def empty_sum_codes(x: Tensor, table: Tensor, n: int, low: int, high: int) -> Tensor:
    """`qlinear` of x [..., 0]: the same as one code that is 0, int8 [..., N]."""
    return table[0, :n].round().clamp(low, high).to(torch.int8).expand(*x.shape[:-1], n).clone()


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu(x, approximate="tanh") = x * sigmoid(2 t), t = sqrt(2 / pi) * (x + 0.044715 * x³).

    Inductor computes it twice where it quantizes rows, once for their maximum: sigmoid takes a third of tanh's instructions.
    """
    y = x.float()
    return (y * torch.sigmoid(y * (1.5957691216057308 + 0.07135481627260025 * y * y))).to(x.dtype)


def geglu(y: Tensor) -> Tensor:
    """y[..., : N / 2] * gelu(y[..., N / 2 :]), as diffusers computes it."""
    up, gate = y.chunk(2, dim=-1)
    return up * functional.gelu(gate)
