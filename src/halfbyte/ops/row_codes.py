"""W8A8 on GPUs under torch.compile: torch's operations quantize the activations, and the product takes their codes.

Inductor fuses these operations into what computes the activations: LayerNorm with adaLN's modulation, GELU, GEGLU, gates and residuals. So
activations are neither written in 16 bits nor read again. Called by `functions.linear`; `cuda.linear_codes` multiplies.

    scale[m] = fl(max|x[m]| * fl(1 / 127))        q[m, k] = rne(fl(x[m, k] * fl(127 / max|x[m]|)))

as `reference.quantize_activation` has it, but that the product x * inverse is rounded to float32 before it is rounded to an integer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.checks import FLOATS

_INFINITE = float("inf")
_TILE = 256  # rows: fewer are padded by the kernel that quantizes
_LONGEST_SUM = (1 << 31) // (127 * 128)  # of products of codes in int32


def takes_codes(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor | None, compute: str, activation: str) -> bool:
    """Whether torch.compile traces a call whose weight and rows have one scale each, with whole tiles and nothing to differentiate.

    Operands that do not fit are left to `halfbyte::linear`, which says so.
    """
    if not fused_by_inductor(x):
        return False
    fmt, (n, k) = packed.format, packed.shape
    if x.dtype not in FLOATS or x.dim() == 0 or x.shape[-1] != k or packed.data.device != x.device:
        return False
    if bias is not None and (bias.shape != (n,) or bias.dtype not in FLOATS or bias.device != x.device):
        return False
    if residual is not None and (residual.shape != (*x.shape[:-1], n) or residual.dtype != x.dtype or residual.device != x.device):
        return False
    one_scale = activation == "row" or (activation == "block" and fmt.block_size(k) >= k)
    whole = fmt.bits == 8 and fmt.zero == "none" and not isinstance(fmt.block, int) and packed.layout == gpu_tiles.NAME
    if compute != "int8" or not one_scale or not whole or k % gpu_tiles.RECORD or not 0 < k < _LONGEST_SUM or n == 0:
        return False
    rows = x.numel() // k
    return _only_compiled(x, bias, residual) and rows > 0 and rows % _TILE == 0


def adds_low_rank(x: Tensor, bias: Tensor | None, compute: str, *branch: Tensor) -> bool:
    """Whether torch.compile traces, for a GPU, an int8 product to whose sums a branch of low rank is added (`cuda.linear_low_rank`)."""
    same = all(part.dtype == x.dtype and part.device == x.device for part in branch)
    return fused_by_inductor(x) and compute == "int8" and same and _only_compiled(x, bias, *branch)


def _only_compiled(*tensors: Tensor | None) -> bool:
    """Whether torch.compile neither exports nor differentiates, outside of autocast."""
    derived = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    # torch 2.11 traces is_exporting() as True in every compiled call.
    return not derived and not torch.is_autocast_enabled("cuda") and not torch.compiler._is_exporting_flag


def fused_by_inductor(x: Tensor) -> bool:
    """Whether torch.compile traces the call for a GPU, and fuses operations that are not within custom ops."""
    return torch.compiler.is_dynamo_compiling() and x.is_cuda


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes, int8 [..., K], and scales, float32 [...]; the scale of a row with a NaN or infinity is NaN."""
    # x is read twice in its own dtype: where Inductor stores it in between, that takes 2 bytes, not 4.
    reach = x.abs().amax(-1, keepdim=True).float()
    scale = reach * 0.007874015718698502  # the float32 nearest to 1/127
    inverse = 127.0 / torch.where(reach > 0, reach, _INFINITE)
    good = scale < _INFINITE
    inverse = torch.where(good & (inverse < _INFINITE), inverse, 0.0)
    codes = torch.round(torch.where(good, x.float(), 0.0) * inverse).to(torch.int8)
    return codes, torch.where(good, scale, torch.nan).squeeze(-1)
