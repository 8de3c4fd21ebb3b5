"""Weights of AWQ, GPTQ and compressed-tensors checkpoints, as vLLM has loaded them, as codes. Needs no vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import packs_code_pairs
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu

# Kernels by rows of activations, in decoding and in prefill, that were as fast as Marlin and Machete or faster in benchmarks/gpu.py.
_MEASURED_KERNELS = {1: ("skinny", "skinny_hopper"), 1024: ("gemm_hopper",)}


def weight_only_format(bits: int, group_size: int, *, zero_points: bool, scale: torch.dtype) -> Format:
    """Return the format of weights whose blocks have `group_size` inputs, or all of them where it is -1."""
    return Format(bits, "channel" if group_size == -1 else group_size, "point" if zero_points else "none", scale)


def weight_only_codes(fmt: Format, stored: Tensor, scale: Tensor, zero: Tensor | None) -> Codes:
    """Return the codes of a weight [N, K].

    Args:
        stored: Unsigned integers [N, K], those of symmetric weights with an offset of half their range.
        scale: [N, blocks]
        zero: Unsigned integers in the shape of `scale`, or None.
    """
    if zero is not None:
        return Codes.from_values(fmt, stored, scale.contiguous(), zero.to(torch.uint8).contiguous())
    return Codes.from_values(fmt, stored - (1 << (fmt.bits - 1)), scale.contiguous())


def why_not_on_gpu(fmt: Format, shape: tuple[int, int], dtype: torch.dtype, gpu: Gpu) -> str | None:
    """Return the reason why a weight-only layer [N, K] is left to vLLM's kernels on a GPU; None where halfbyte's are expected to be faster.

    Args:
        fmt: The weight's format.
        dtype: Of the activations.
        gpu: The GPU that the layer is on.
    """
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"halfbyte's kernels were measured against vLLM's on Hopper GPUs (sm_90), not on {gpu.name}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"halfbyte was measured against vLLM's kernels with activations in bfloat16 and float16, not {dtype}"
    paired = packs_code_pairs(fmt, shape, gpu)
    for rows, measured in _MEASURED_KERNELS.items():
        taken = choose(Problem("linear", rows, *shape, fmt, dtype, paired=paired), gpu).taken
        name = "torch" if taken is None else taken.candidate.name
        if name not in measured:
            return f"halfbyte multiplies {rows} rows by {fmt} {list(shape)} with {name}, which was not measured against vLLM's kernels"
    return None


def half_scale(scale: Tensor) -> Tensor:
    """Return scales in float16, in which kernels for Hopper read them fastest: exact from 2^-14 on, else with an error of 2^-25 at most.

    Raises UnsupportedError where one is too large. (vLLM converts scales to the dtype of the activations, mostly bfloat16.)
    """
    half = scale.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise UnsupportedError("a scale of the checkpoint is above 65504, float16's largest number: set HALFBYTE_VLLM_KERNELS=0")
    return half


def int8_codes(weight: Tensor, scale: Tensor, widths: list[int]) -> Codes:
    """Return the codes of an int8 weight [N, K] with a scale for each row.

    Args:
        scale: [N, 1] or [N], or one for each of the parts of a fused layer.
        widths: Rows of the parts.
    """
    n = len(weight)
    if scale.numel() != n:
        scale = scale.flatten().repeat_interleave(torch.tensor(widths, device=scale.device)) if scale.numel() > 1 else scale.expand(n)
    return Codes.from_values(Format(8, "channel", "none", torch.float32), weight, scale.float().reshape(n, 1).contiguous())
