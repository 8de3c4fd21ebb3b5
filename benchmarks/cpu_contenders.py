"""The contenders of the CPU benchmark beside halfbyte and torch's dense products: torch's kernels for codes, other runtimes, and products
from int8 codes to int8 codes."""

from __future__ import annotations

from functools import partial

import cpu_codes
import cpu_ggml
import cpu_onnxruntime
import cpu_openvino
import cpu_torch

from halfbyte.bench.contenders import FLOAT, INT8, PEERS, Arithmetic, Contender, step_error

# max - min spans at most 2 max|x|, in 127 steps.
_INT7 = Arithmetic(partial(step_error, 63.5), "dot_peak")
TORCH = (
    Contender("torch_int4", "torch int4pack g128", "int4_g128", FLOAT, partial(cpu_torch.int4pack, format="int4_g128")),
    Contender("torch_int8", "torch dynamic int8", "int8_channel", _INT7, partial(cpu_torch.dynamic_int8, format="int8_channel")),
)
RUNTIMES = (
    Contender("ort_int4_g32", "ONNX Runtime int4 g32", "q4_0", INT8, partial(cpu_onnxruntime.matmul_nbits, format="q4_0")),
    Contender("ort_int4_g128", "ONNX Runtime int4 g128", "int4_g128", INT8, partial(cpu_onnxruntime.matmul_nbits, format="int4_g128")),
    Contender("ov_int4_g32", "OpenVINO u4 g32", "int4_g32_zp", INT8, partial(cpu_openvino.compressed, format="int4_g32_zp")),
    Contender("ov_int4_g128", "OpenVINO u4 g128", "int4_g128_zp", INT8, partial(cpu_openvino.compressed, format="int4_g128_zp")),
    Contender("ov_int8", "OpenVINO i8", "int8_channel", INT8, partial(cpu_openvino.compressed, format="int8_channel")),
    Contender("ggml_q4_0", "ggml q4_0", "q4_0", INT8, partial(cpu_ggml.mul_mat, format="q4_0")),
    Contender("ggml_q8_0", "ggml q8_0", "q8_0", INT8, partial(cpu_ggml.mul_mat, format="q8_0")),
)
# int8 codes in, int8 codes out: the peers and halfbyte's own.
_CODES = Arithmetic(lambda x: cpu_codes.ERROR, "dot_peak")
# On x86 without VNNI both saturate where two products together pass 2^15.
_SATURATED = Arithmetic(lambda x: 3 * cpu_codes.ERROR, "dot_peak")
QLINEAR = (
    Contender("halfbyte_qlinear", "halfbyte qlinear", "int8_channel", _CODES, partial(cpu_codes.qlinear, format="int8_channel"), False),
    Contender("onednn_qlinear", "oneDNN qlinear", "int8_channel", _SATURATED, partial(cpu_codes.onednn, format="int8_channel")),
    Contender(
        "ort_qlinear", "ONNX Runtime qlinear", "int8_channel", _SATURATED, partial(cpu_codes.onnxruntime_qlinear, format="int8_channel")
    ),
)
LINEAR = (*PEERS, *TORCH, *RUNTIMES)
ALL = (*LINEAR, *QLINEAR)
