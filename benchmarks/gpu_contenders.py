"""The contenders of the GPU benchmark beside those of halfbyte.bench: cuBLAS's int8 product, gemlite and vLLM where they are installed."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.gpu_contenders import PEERS, Absent, Bind, GpuContender, GpuWork, Launches


def int_mm(work: GpuWork) -> Bind:
    """cuBLAS's int8 product by itself: int8 in, int32 out."""
    work.needs(work.compute == "int8", "int8 compute")
    work.needs(work.k % 8 == 0 and work.n % 8 == 0, "N % 8 = 0 and K % 8 = 0")
    weights = work.rotate(torch.randint(-127, 128, (work.n, work.k), dtype=torch.int8, device="cuda"))

    def bind(x: Tensor) -> Launches:
        work.needs(x.shape[0] > 16, "more than 16 rows")
        xq = torch.randint(-127, 128, x.shape, dtype=torch.int8, device="cuda")
        return [partial(torch._int_mm, xq, w.t()) for (w,) in weights]

    return bind


# vLLM

# Its ScalarType.id: mantissa, bias, IEEE NaNs.
_UINT4B8, _UINT8B128, _UINT4 = 4 << 8 | 8 << 17 | 1 << 50, 8 << 8 | 128 << 17 | 1 << 50, 4 << 8 | 1 << 50


def _vllm(folder: str | None) -> Any:
    """The ops of vLLM's libraries, loaded without vLLM itself. `folder` holds the libraries where it is not installed."""
    if folder is None:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            raise Absent("vLLM is not installed")
        folder = str(Path(spec.origin).parent)
    for name in ("_C", "_C_stable_libtorch"):
        for path in Path(folder).glob(f"{name}.*so"):
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise Absent(f"{path} cannot be loaded: {error}") from error
    return torch.ops._C


def _rows_of_words(work: GpuWork) -> Tensor:
    """Codes as GPTQ stores them: int32 [K * bits / 32, N], the first of each word's in its low bits."""
    bits = work.format.bits
    u = (work.codes.values() - work.format.q_min).to(torch.int64).T.unflatten(0, (-1, 32 // bits))
    shifts = torch.arange(0, 32, bits, device="cuda").view(1, -1, 1)
    words: Tensor = (u << shifts).sum(1)
    return words.to(torch.int32)


def _of_vllm(work: GpuWork, *, points: bool = False) -> int:
    """Checks what Marlin and Machete have in common, but for points of 4 bits; the id of their number type."""
    fmt = work.format
    if points and fmt.zero == "point" and fmt.bits == 4:
        kind = _UINT4
    else:
        work.needs(fmt.zero == "none", "symmetric weights")
        kind = _UINT4B8 if fmt.bits == 4 else _UINT8B128
    work.needs(fmt.block != "tensor", "scales for blocks or channels")
    work.needs(work.dtype != torch.float32, "activations of 16 bits")
    work.needs(work.compute == "float", "float compute")
    return kind


def marlin(work: GpuWork, folder: str | None) -> Bind:
    kind, vllm, n, k = _of_vllm(work, points=True), _vllm(folder), work.n, work.k
    work.needs(n % 64 == 0 and k % 128 == 0 and work.group in (32, 64, 128, k), "N % 64 = 0, K % 128 = 0, and blocks of 32, 64, 128 or K")
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    w = vllm.gptq_marlin_repack(_rows_of_words(work), none, k, n, work.format.bits, False)
    scale = work.codes.scale.T.to(work.dtype).contiguous()
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if work.group == k:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    scale = scale.reshape(-1, len(order))[:, order].reshape(-1, n).contiguous()
    locks = torch.zeros(4 * work.gpu.sms, dtype=torch.int32, device="cuda")
    tails: tuple[Tensor, ...] = (scale,)
    if work.codes.zero is not None:  # points in the order of scales, eight by eight in a word's order of nibbles
        u = work.codes.zero.T.to(torch.int64).reshape(-1, 64)[:, [i + 8 * j for i in range(8) for j in range(8)]]
        u = u.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1, n // 8, 8)
        words = (u << torch.arange(0, 32, 4, device="cuda")).sum(-1)
        tails += (torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),)
    weights = work.rotate(w, *tails)

    def bind(x: Tensor) -> Launches:
        m = x.shape[0]

        def product(w: Tensor, s: Tensor, zeros: Tensor | None = None) -> Tensor:
            before = (x, None, w, None, s, None, None, zeros, None, None, locks, kind, m, n, k)
            return vllm.marlin_gemm(*before, True, False, True, False)  # type: ignore[no-any-return]

        return [partial(product, *one) for one in weights]

    return bind


def machete(work: GpuWork, folder: str | None) -> Bind:
    kind, vllm = _of_vllm(work), _vllm(folder)
    work.needs(work.gpu.capability == (9, 0), "Hopper")
    work.needs(work.n % 128 == 0 and work.k % 64 == 0 and work.group in (64, 128, work.k), "N % 128 = 0, and blocks of 64, 128 or K")
    words = _rows_of_words(work).t().contiguous().t()
    w = vllm.machete_prepack_B(words, work.dtype, kind, work.dtype)
    scale = work.codes.scale.T.to(work.dtype).contiguous()
    weights = work.rotate(w.t(), scale)  # it is laid out by columns, which a plain copy keeps for its transpose

    def bind(x: Tensor) -> Launches:
        def product(w: Tensor, s: Tensor) -> Tensor:
            return vllm.machete_mm(x, w.t(), kind, work.dtype, s, None, work.group, None, None, None)  # type: ignore[no-any-return]

        return [partial(product, w, s) for w, s in weights]

    return bind


def cutlass(work: GpuWork, folder: str | None) -> Bind:
    """W8A8, a scale per channel and per token, with the quantization of the activations, which halfbyte's times hold too."""
    work.needs(work.compute == "int8" and work.format.zero == "none" and not isinstance(work.format.block, int), "int8 compute per channel")
    work.needs(work.dtype != torch.float32, "activations of 16 bits")
    work.needs(work.n % 16 == 0 and work.k % 16 == 0, "N % 16 = 0 and K % 16 = 0")
    vllm = _vllm(folder)
    scale = work.weight.abs().amax(1, keepdim=True) / 127
    q = (work.weight / scale).round().to(torch.int8)
    weights = work.rotate(q, scale)

    def bind(x: Tensor) -> Launches:
        xq = torch.empty(x.shape, dtype=torch.int8, device="cuda")
        sx = torch.empty(x.shape[0], 1, device="cuda")

        def product(w: Tensor, s: Tensor) -> Tensor:
            out = torch.empty(x.shape[0], work.n, dtype=work.dtype, device="cuda")
            vllm.dynamic_scaled_int8_quant(xq, x, sx, None)
            vllm.cutlass_scaled_mm(out, xq, w.t(), sx, s, None)
            return out

        return [partial(product, w, s) for w, s in weights]

    return bind


def gemlite(work: GpuWork) -> Bind:
    work.needs(work.format.zero == "none" and work.compute == "float" and work.dtype != torch.float32, "symmetric weights, 16 bits")
    if find_spec("gemlite") is None:
        raise Absent("gemlite is not installed")
    core = import_module("gemlite.core")
    if work.gpu.capability == (9, 0):  # its tuned configs go by the name, and the H100's are all that it has for Hopper
        core.GemLiteLinear.load_config(str(Path(str(core.__file__)).parent / "configs" / "h100.json"))
    kind = core.DType.FP16 if work.dtype == torch.float16 else core.DType.BF16
    layers = []
    u = (work.codes.values() - work.format.q_min).to(torch.uint8)
    for (scale,) in work.rotate(work.codes.scale.to(work.dtype)):
        layer = core.GemLiteLinearTriton(work.format.bits, work.group, work.k, work.n, kind, kind)
        layer.pack(u, scale.view(-1, 1), -work.format.q_min, None)
        layers.append(layer)
    return lambda x: [partial(layer, x) for layer in layers]


def contenders(vllm: str | None = None) -> tuple[GpuContender, ...]:
    """All of them; `vllm`: a folder with vLLM's libraries, where it is not installed."""
    return (
        *PEERS,
        GpuContender("int_mm", "torch._int_mm (product alone)", int_mm),
        GpuContender("gemlite", "gemlite", gemlite),
        GpuContender("marlin", "vLLM Marlin", partial(marlin, folder=vllm)),
        GpuContender("machete", "vLLM Machete", partial(machete, folder=vllm)),
        GpuContender("cutlass", "vLLM CUTLASS int8", partial(cutlass, folder=vllm)),
    )
