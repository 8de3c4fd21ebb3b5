"""Weights in 4-bit floating point (e2m1: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and a sign) <- MXFP4 and NVFP4, as Codes.

Codes are twice the values:

    MXFP4  w = 2^(e - 127) value = 2^(e - 128) q     e uint8, for each 32 weights                 mxfp4, exact
    NVFP4  w = scale g value = (scale g / 2) q       scale float8_e4m3fn, for each 16; g float32  nvfp4, a scale rounded once

Two values are in a byte, the first in the low nibble, as in Codes.

Sources: OCP Microscaling Formats (MX) 1.0; transformers, integrations/mxfp4.py; compressed-tensors, compressors/nvfp4 and mxfp4, which
divide by weight_global_scale; NVIDIA's TensorRT Model Optimizer, which multiplies by weight_scale_2
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.io.weights.float8 import numbers_of

MX, NV = as_format("mxfp4"), as_format("nvfp4")


def read_mx(data: Tensor, exponents: Tensor, where: str) -> Codes:
    """uint8 [..., K/2] and uint8 [..., K/32] -> Codes [..., K]."""
    shape = shape_of(data, exponents, MX, (torch.uint8, torch.float8_e8m0fnu), where)
    scale = numbers_of(exponents) / 2
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{where} has a scale that is not finite: the checkpoint is damaged")
    return Codes(MX, shape, data.contiguous(), scale.to(torch.bfloat16))


def read_nv(data: Tensor, scale: Tensor, factor: Tensor, where: str, *, divide: bool) -> Codes:
    """uint8 [..., K/2], float8_e4m3fn [..., K/16] and a float32 factor of the scales, or with `divide` divisor -> Codes [..., K]."""
    shape = shape_of(data, scale, NV, (torch.float8_e4m3fn,), where)
    if factor.dtype != torch.float32 or factor.numel() != 1:
        raise CheckpointError(f"{where} has a factor {factor.dtype} {list(factor.shape)}, not one float32: the checkpoint is damaged")
    g = factor.reshape(())
    scales = scale.float() / 2
    return Codes(NV, shape, data.contiguous(), scales / g if divide else scales * g)


def shape_of(data: Tensor, scale: Tensor, fmt: Format, dtypes: tuple[torch.dtype, ...], where: str) -> tuple[int, ...]:
    """The shape [..., N, K] of packed values with these scales; raises CheckpointError where the two do not fit together."""
    sound = data.dtype == torch.uint8 and data.dim() > 1 and scale.dtype in dtypes
    shape = (*data.shape[:-1], 2 * data.shape[-1]) if data.dim() else ()
    if not sound or (*shape[:-1], shape[-1] // int(fmt.block)) != tuple(scale.shape) or shape[-1] % int(fmt.block):
        got = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)} with scales {str(scale.dtype).removeprefix('torch.')}"
        what = f"{got} {list(scale.shape)}, no 4-bit floats with a scale for each {fmt.block}"
        raise CheckpointError(f"{where} is {what}: the checkpoint is damaged")
    return shape
