"""The contenders of the CPU benchmark: halfbyte in the requested formats, and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.bench import ggml_peer, integer, onnxruntime_peer, openvino_peer, torch_peers
from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.cpu.isas import current

Peak = Literal["dot_peak", "fma_peak"]


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a contender.

    error   x [M, K] -> the bound of ‖y - reference‖ / ‖reference‖
    peak    the ceiling of its multiplications; None where none is probed
    """

    error: Callable[[Tensor], float]
    peak: Peak | None


def _step_error(levels: float, x: Tensor) -> float:
    """Each activation is off by at most half a step of max|x| / levels, whatever block the scale spans."""
    return float(x.abs().max() / x.square().mean().sqrt()) / (2 * levels)


# A sum of K products, each rounded to 24 bits: a random walk of sqrt(K) half units, times 8 for the order of summing.
_FLOAT32 = Arithmetic(lambda x: 8 * math.sqrt(x.shape[-1]) * 2**-24, "fma_peak")
# Weights, activations and results rounded to 8 bits of mantissa, at most 2^-9 each, which rarely point the same way.
_BFLOAT16 = Arithmetic(lambda x: 2**-8, None)
_INT8 = Arithmetic(partial(_step_error, 127), "dot_peak")
# max - min spans at most 2 max|x|, in 127 steps.
_INT7 = Arithmetic(partial(_step_error, 63.5), "dot_peak")
# Activations and results in bfloat16, products in float32; halfbyte's `float` may do so where the CPU multiplies bfloat16 faster.
_FLOAT = Arithmetic(_BFLOAT16.error, "fma_peak")


@dataclass(frozen=True)
class Contender:
    """One row of the table: `build` prepares its weights; `weights` describes how they are stored."""

    name: str
    label: str
    weights: str
    arithmetic: Arithmetic
    build: Callable[[Workload], Built]
    peer: bool = True


def halfbyte_linear(work: Workload, format: str, compute: str, dtype: torch.dtype) -> Built:
    """`ops.linear` on activations of `dtype`."""
    slab = work.codes(format)
    copy_bytes = work.take(slab, 0).nbytes
    weights = [ops.pack(work.take(slab, copy)) for copy in range(work.copies(copy_bytes))]

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        x = x.to(dtype)
        return lambda: (ops.linear(x, weight, compute=compute) for weight in weights)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(weights), bind, dtype)


PEERS = (
    Contender("torch_fp32", "torch fp32", "float32", _FLOAT32, partial(torch_peers.dense, dtype=torch.float32)),
    Contender("torch_bf16", "torch bf16", "bfloat16", _BFLOAT16, partial(torch_peers.dense, dtype=torch.bfloat16)),
    Contender("torch_int4", "torch int4pack g128", "int4_g128", _FLOAT, partial(torch_peers.int4pack, format="int4_g128")),
    Contender("torch_int8", "torch dynamic int8", "int8_channel", _INT7, partial(torch_peers.dynamic_int8, format="int8_channel")),
    Contender("ort_int4_g32", "ONNX Runtime int4 g32", "q4_0", _INT8, partial(onnxruntime_peer.matmul_nbits, format="q4_0")),
    Contender("ort_int4_g128", "ONNX Runtime int4 g128", "int4_g128", _INT8, partial(onnxruntime_peer.matmul_nbits, format="int4_g128")),
    Contender("ov_int4_g32", "OpenVINO u4 g32", "int4_g32_zp", _INT8, partial(openvino_peer.compressed, format="int4_g32_zp")),
    Contender("ov_int4_g128", "OpenVINO u4 g128", "int4_g128_zp", _INT8, partial(openvino_peer.compressed, format="int4_g128_zp")),
    Contender("ov_int8", "OpenVINO i8", "int8_channel", _INT8, partial(openvino_peer.compressed, format="int8_channel")),
    Contender("ggml_q4_0", "ggml q4_0", "q4_0", _INT8, partial(ggml_peer.mul_mat, format="q4_0")),
    Contender("ggml_q8_0", "ggml q8_0", "q8_0", _INT8, partial(ggml_peer.mul_mat, format="q8_0")),
)
# int8 codes in, int8 codes out: the peers and halfbyte's own.
_CODES = Arithmetic(lambda x: integer.ERROR, "dot_peak")
# On x86 without VNNI both saturate where two products together pass 2^15.
_SATURATED = Arithmetic(lambda x: 3 * integer.ERROR, "dot_peak")
QLINEAR = (
    Contender("halfbyte_qlinear", "halfbyte qlinear", "int8_channel", _CODES, partial(integer.qlinear, format="int8_channel"), peer=False),
    Contender("onednn_qlinear", "oneDNN qlinear", "int8_channel", _SATURATED, partial(integer.onednn, format="int8_channel")),
    Contender(
        "ort_qlinear", "ONNX Runtime qlinear", "int8_channel", _SATURATED, partial(integer.onnxruntime_qlinear, format="int8_channel")
    ),
)
_PEERS = {peer.name: peer for peer in (*PEERS, *QLINEAR)}
# The ways in which halfbyte multiplies. The rate of bfloat16 products is not probed.
_OWN = {"": _INT8, "float": _FLOAT, "bf16": _BFLOAT16}


def contender(name: str) -> Contender:
    """The contender of a name: a peer's, or `halfbyte:<format>` with `:float` behind it for float compute, `:bf16` for that on bfloat16.

    Raises ArgumentError or FormatError if there is none.
    """
    if name in _PEERS:
        return _PEERS[name]
    own_name, _, rest = name.partition(":")
    format, _, compute = rest.partition(":")
    if own_name != "halfbyte" or compute not in _OWN:
        ways = ", ".join(f"halfbyte:<format>{':' if way else ''}{way}" for way in _OWN)
        raise ArgumentError(f"there is no contender {name!r}: use one of {', '.join(_PEERS)}, {ways}")
    fmt, arithmetic = str(as_format(format)), _OWN[compute]
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    build = partial(halfbyte_linear, format=fmt, compute="float" if compute else "auto", dtype=dtype)
    return Contender(name, " ".join(filter(None, ("halfbyte", fmt, compute))), fmt, arithmetic, build, peer=False)


def select(formats: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Names of the contenders, halfbyte's first. Raises ArgumentError or FormatError for an unknown name."""
    ways = ("", ":float", ":bf16") if current().bf16_dot and current().bf16_pays else ("", ":float")
    own_names = [f"halfbyte:{fmt}{way}" for fmt in formats for way in ways]
    return [contender(name).name for name in (*own_names, *peers)]
