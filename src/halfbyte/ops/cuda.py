"""The custom ops on GPUs: no call waits for the device, so all of them may be captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.checks import check_bias, check_ids, check_linear, check_out_dtype, check_packed, check_qlinear, check_residual


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    n: int,
    k: int,
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    check_linear(x, weight, format, n, k, activation, low, high)
    if bias is not None:
        check_bias(bias, n, x.device)
    if residual is not None:
        check_residual(residual, x, n)
    if compute == "int8":
        raise UnsupportedError("there are no int8 kernels for GPUs in this version: use compute='float'")
    y = x.float() @ dequantize(weight, format, n, k, torch.float32).T
    if bias is not None:
        y += bias.float()
    if residual is not None:
        y += residual.float()
    return y.clamp(low, high).to(x.dtype)


def qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    check_qlinear(x, weight, table, format, n, k, low, high)
    raise UnsupportedError("there is no qlinear for GPUs in this version: use the CPU")


def embedding(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, ids.device)
    check_ids(ids)
    check_out_dtype(dtype)
    if n == 0 or k == 0:
        return weight.new_full((*ids.shape, k), torch.nan, dtype=dtype)
    rows = dequantize(weight, format, n, k, dtype)[ids.clamp(0, n - 1).long()]
    return torch.where(((ids >= 0) & (ids < n)).unsqueeze(-1), rows, torch.nan)


def dequantize(weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, weight.device)
    check_out_dtype(dtype)
    return gpu_tiles.unpack(Packed(as_format(format), (n, k), gpu_tiles.NAME, weight)).dequantize(dtype)
