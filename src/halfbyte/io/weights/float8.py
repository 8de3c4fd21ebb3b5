"""Weights in 8-bit floating point with scales -> floats. Codes cannot hold them: 4 bits of exponent exceed the range of 8-bit integers.

    w = scale * weight     weight float8_e4m3fn or float8_e5m2 [..., N, K]

The scale is one number; one for each row, [N] or [N, 1]; for each expert of a stack, [E]; or [..., R, C], for each of R by C rectangles,
usually of 128 x 128, of which the last ones may be smaller. It is a float, or an exponent e (float8_e8m0fnu, or uint8) for 2^(e - 127).

Sources: DeepSeek-V3, inference/kernel.py (weight_scale_inv, which is the scale in spite of its name); transformers,
integrations/finegrained_fp8.py; compressed-tensors, compressors/naive_quantized and mxfp8 (weight_scale)
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_CHUNK = 1 << 20  # weights that are multiplied at a time


def read(weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype, where: str) -> Tensor:
    """The weight in `dtype`, its products computed in float32. `block`: the sizes of the rectangles, if a config gives them."""
    rows_of, columns_of = rectangle(tuple(weight.shape), tuple(scale.shape), scale.dtype, block, where)
    n, k = weight.shape[-2:]
    numbers = numbers_of(scale)
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(f"{where} has a scale that is not finite: the checkpoint is damaged")
    out = torch.empty(weight.shape, dtype=dtype, device="cpu")
    if not out.numel():
        return out
    numbers = numbers.reshape(-1, -(-n // rows_of), -(-k // columns_of))
    matrices, outputs = weight.reshape(-1, n, k), out.view(-1, n, k)
    step = max(1, _CHUNK // max(1, k))
    for i in range(len(matrices)):
        per_row = numbers[i if len(numbers) > 1 else 0]
        for first in range(0, n, step):
            last = min(n, first + step)
            row_scales = per_row[torch.arange(first, last, device="cpu") // rows_of]
            outputs[i, first:last] = matrices[i, first:last].float() * row_scales.repeat_interleave(columns_of, dim=1)[:, :k]
    return out


def numbers_of(scale: Tensor) -> Tensor:
    """Scales as float32; the exponent 255 is NaN."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float()


def rectangle(
    shape: tuple[int, ...], scale: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int] | None, where: str
) -> tuple[int, int]:
    """Rows and columns that share a scale; raises CheckpointError where these shapes do not fit."""
    n, k = shape[-2:] if len(shape) > 1 else (0, 0)
    rows, columns = None, None
    if len(shape) > 1 and dtype in (*_SCALES, *_EXPONENTS):
        if scale in ((), (1,), (1,) * len(shape)) or scale == shape[:-2]:
            rows, columns = n, k
        elif scale == (n,):
            rows, columns = 1, k
        elif len(scale) == len(shape) and scale[:-2] in (shape[:-2], (1,) * (len(shape) - 2)):
            rows, columns = _run(n, scale[-2], block and block[0]), _run(k, scale[-1], block and block[1])
    if rows is None or columns is None:
        what = f"{str(dtype).removeprefix('torch.')} {list(scale)}"
        remedy = "halfbyte reads one for all, for each row or for each block, start from the float model"
        raise CheckpointError(f"{where} of shape {list(shape)} has scales {what}, which do not fit it: {remedy}")
    return max(1, rows), max(1, columns)


def _run(size: int, count: int, usual: int | None) -> int | None:
    """How many rows or columns share one of `count` scales; None where sizes do not fit."""
    if usual is not None and -(-size // usual) == count:
        return usual
    return size // count if 0 < count <= size and size % count == 0 else None
