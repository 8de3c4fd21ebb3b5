"""Convolutions to time: one layer in the hands of halfbyte and of each peer, all with the same codes.

Images are int8 codes with a zero point (what a ReLU leaves), weights symmetric int8 codes with a scale per channel, outputs int8
codes again; contenders in floating point get the numbers that the codes stand for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from onnx_graph import model
from torch import Tensor

from halfbyte import ops
from halfbyte.formats.codes import Codes
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import PackedConv, channels_first
from halfbyte.ops.conv import functions as conv

IN_SCALE, IN_ZERO = 0.02, -128  # in [0, 5.1]: behind a ReLU


@dataclass(frozen=True)
class Layer:
    """A convolution of a square image, with a square kernel."""

    channels: int
    size: int
    out: int
    kernel: int
    stride: int = 1
    groups: int = 1
    batch: int = 1

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def operations(self) -> int:
        side = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        return 2 * self.batch * side * side * self.out * self.channels // self.groups * self.kernel**2

    def __str__(self) -> str:
        text = f"{self.channels}x{self.size}², {self.kernel}x{self.kernel}→{self.out}"
        more = (f"/{self.stride}" if self.stride > 1 else "") + (f", {self.groups} groups" if self.groups > 1 else "")
        return text + more + (f", batch {self.batch}" if self.batch > 1 else "")

    @cached_property
    def codes(self) -> Codes:
        """Of the weight: int8 with a scale per channel."""
        rng = torch.Generator().manual_seed(0)
        weight = torch.randn(self.out, self.channels // self.groups, self.kernel, self.kernel, generator=rng)
        return conv.quantize_conv(weight * (2 / weight[0].numel()) ** 0.5, "int8_channel")

    @cached_property
    def weight(self) -> Tensor:
        """What the codes stand for, float32 [Co, Ci/groups, K, K]."""
        return ops.dequantize(self.packed)

    @cached_property
    def packed(self) -> PackedConv:
        return conv.pack_conv(self.codes, self.kernel, self.groups)

    @cached_property
    def image(self) -> Tensor:
        """int8 codes [B, C, H, W], channels_last."""
        rng = torch.Generator().manual_seed(1)
        real = torch.randn(self.batch, self.channels, self.size, self.size, generator=rng).clamp_(0, 5)
        return (real / IN_SCALE + IN_ZERO).round().to(torch.int8).contiguous(memory_format=torch.channels_last)

    @cached_property
    def floats(self) -> Tensor:
        return (self.image.float() - IN_ZERO) * IN_SCALE

    @cached_property
    def wanted(self) -> Tensor:
        """float64: what every contender comes near to."""
        return torch.nn.functional.conv2d(self.floats.double(), self.weight.double(), None, self.stride, self.padding, 1, self.groups)

    @cached_property
    def out_scale(self) -> float:
        return float(self.wanted.abs().max()) / 127


@dataclass(frozen=True)
class Ready:
    """A layer in place: `run` does it once; `result` is what it gave as float; `error` the most it may be off by."""

    run: Callable[[], object]
    result: Callable[[], Tensor]
    error: float


def _halfbyte_int8(layer: Layer) -> Ready:
    scales = {"in_scale": IN_SCALE, "in_zero": IN_ZERO, "out_scale": layer.out_scale, "out_zero": 0}
    table = conv.conv_requantization_table(layer.packed, None, **scales)  # type: ignore[arg-type]
    window = Window((layer.stride,) * 2, (layer.padding,) * 4).numbers

    def run() -> Tensor:
        return conv.qconv2d_with(layer.image, layer.packed, table, window, IN_ZERO)

    return Ready(run, lambda: run().float() * layer.out_scale, 1.001 * layer.out_scale)


def _halfbyte_floats(layer: Layer, compute: str, activation: str = "block") -> Ready:
    def run() -> Tensor:
        return conv.conv2d(layer.floats, layer.packed, None, layer.stride, layer.padding, compute=compute, activation=activation)

    # An activation is off by half of a 127th of the largest; sums of many such errors of either sign stay far below this.
    return Ready(run, run, 1e-4 if compute == "float" else (15 if activation == "image" else 5) / 127)


def _torch_dense(layer: Layer, dtype: torch.dtype) -> Ready:
    weight = layer.weight.to(dtype).contiguous(memory_format=torch.channels_last)
    x = layer.floats.to(dtype)

    def run() -> Tensor:
        return torch.nn.functional.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups)

    return Ready(run, lambda: run().float(), 1e-4 if dtype == torch.float32 else 0.1)


def _torch_int8(layer: Layer) -> Ready:
    torch.backends.quantized.engine = "onednn"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        zeros = torch.zeros(layer.out, dtype=torch.int64)
        codes = channels_first(layer.codes.data, (layer.kernel, layer.kernel)).contiguous()
        weight = torch._make_per_channel_quantized_tensor(codes, layer.codes.scale.flatten().double(), zeros, 0)
        settings = [layer.stride] * 2, [layer.padding] * 2, [1, 1], layer.groups
        packed = torch.ops.quantized.conv2d_prepack(weight, None, *settings)
        unsigned = (layer.image.int() + 128).to(torch.uint8)
        x = torch._make_per_tensor_quantized_tensor(unsigned, IN_SCALE, IN_ZERO + 128)

    def run() -> Tensor:
        return torch.ops.quantized.conv2d(x, packed, layer.out_scale, 128)  # type: ignore[no-any-return]

    return Ready(run, lambda: run().dequantize(), 1.001 * layer.out_scale)


def _onnxruntime_int8(layer: Layer) -> Ready:
    """QLinearConv, unsigned images and signed weights: what ONNX Runtime's quantizer makes for x86."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(_qlinearconv(layer), options, providers=["CPUExecutionProvider"])
    x = (layer.image.int() + 128).to(torch.uint8).contiguous().numpy()
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    out = torch.empty(layer.wanted.shape, dtype=torch.uint8)
    binding.bind_output("y", "cpu", 0, out.numpy().dtype, tuple(out.shape), out.data_ptr())

    def result() -> Tensor:
        session.run_with_iobinding(binding)
        return (out.float() - 128) * layer.out_scale

    return Ready(lambda: session.run_with_iobinding(binding), result, 1.001 * layer.out_scale)


def _qlinearconv(layer: Layer) -> bytes:
    from onnx import helper

    constants = {
        "x_scale": torch.tensor(IN_SCALE),
        "x_zero": torch.tensor(IN_ZERO + 128, dtype=torch.uint8),
        "w": channels_first(layer.codes.data, (layer.kernel, layer.kernel)).contiguous(),
        "w_scale": layer.codes.scale.float().flatten(),
        "w_zero": torch.zeros(layer.out, dtype=torch.int8),
        "y_scale": torch.tensor(layer.out_scale),
        "y_zero": torch.tensor(128, dtype=torch.uint8),
        "bias": torch.zeros(layer.out, dtype=torch.int32),
    }
    settings: dict[str, Any] = {"strides": [layer.stride] * 2, "pads": [layer.padding] * 4, "group": layer.groups}
    conv = helper.make_node("QLinearConv", ("x", *constants), ["y"], **settings)
    return model([conv], constants, [("x", "UINT8", layer.image.shape)], [("y", "UINT8", layer.wanted.shape)])


def _openvino_int8(layer: Layer) -> Ready:
    """A convolution of what unsigned codes and signed weights stand for, in whose place OpenVINO puts one of the codes."""
    import openvino
    import openvino.opset13 as opset

    def number(value: float) -> object:
        return opset.constant(torch.full((1, 1, 1, 1), value).numpy())

    def real(codes: object, scale: object) -> object:
        return opset.multiply(opset.convert(codes, openvino.Type.f32), scale)

    kernel, groups = [layer.kernel] * 2, layer.groups
    codes = channels_first(layer.codes.data, (layer.kernel, layer.kernel)).contiguous()
    weight = real(opset.constant(codes.numpy()), opset.constant(layer.codes.scale.float().view(-1, 1, 1, 1).numpy()))
    settings: Any = [layer.stride] * 2, [layer.padding] * 2, [layer.padding] * 2, [1, 1]
    x = opset.parameter(list(layer.image.shape), openvino.Type.u8)
    if groups == 1:
        y = opset.convolution(real(x, number(IN_SCALE)), weight, *settings)
    else:
        unmerged = opset.reshape(weight, opset.constant([groups, layer.out // groups, layer.channels // groups, *kernel]), False)
        y = opset.group_convolution(real(x, number(IN_SCALE)), unmerged, *settings)
    quantized = opset.fake_quantize(y, number(-128 * layer.out_scale), number(127 * layer.out_scale), number(0), number(255), 256)
    model = openvino.Model([opset.result(opset.convert(quantized, openvino.Type.u8))], [x])
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **threads}).create_infer_request()
    request.set_input_tensor(openvino.Tensor((layer.image.int() + 128).to(torch.uint8).contiguous().numpy()))

    def result() -> Tensor:
        request.infer()
        return (torch.from_numpy(request.get_output_tensor(0).data).float() - 128) * layer.out_scale

    return Ready(request.infer, result, 1.001 * layer.out_scale)


CONTENDERS: dict[str, Callable[[Layer], Ready]] = {
    "halfbyte int8→int8": _halfbyte_int8,
    "halfbyte fp32, int8 weight, a scale an image": lambda layer: _halfbyte_floats(layer, "int8", "image"),
    "halfbyte fp32, int8 weight, a scale a patch": lambda layer: _halfbyte_floats(layer, "int8"),
    "halfbyte fp32, int8 weight, float": lambda layer: _halfbyte_floats(layer, "float"),
    "torch fp32": lambda layer: _torch_dense(layer, torch.float32),
    "torch bf16": lambda layer: _torch_dense(layer, torch.bfloat16),
    "torch oneDNN int8→int8": _torch_int8,
    "ONNX Runtime QLinearConv": _onnxruntime_int8,
    "OpenVINO int8→int8": _openvino_int8,
}
INTEGER = ("halfbyte int8→int8", "torch oneDNN int8→int8", "ONNX Runtime QLinearConv", "OpenVINO int8→int8")
