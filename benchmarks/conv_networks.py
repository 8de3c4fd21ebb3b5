"""Whole convolutional networks to time: in the hands of halfbyte, of torch, and, on the same codes, of ONNX Runtime."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from conv_contenders import Ready
from networks import FOLDED, images, memory_format, network
from torch import Tensor, fx, nn

from halfbyte.deploy.onnx_model import export_onnx
from halfbyte.nn.config import Config
from halfbyte.nn.convert import quantize_
from halfbyte.nn.fused import fuse_
from halfbyte.nn.static.batchnorm import fold_batch_norms_

CALIBRATION = 8  # images
PEER = "ONNX Runtime int8"


@dataclass(frozen=True)
class Inference:
    """A network of `networks.NETWORKS` and the images that it is given."""

    name: str
    batch: int = 1

    @cached_property
    def model(self) -> nn.Module:
        """With its batch norms folded."""
        model = network(self.name)
        fold_batch_norms_(model)
        return model.to(memory_format=memory_format(self.name))  # type: ignore[call-overload,no-any-return]

    @cached_property
    def images(self) -> Tensor:
        return images(self.batch, name=self.name)

    @cached_property
    def on_codes(self) -> fx.GraphModule:
        if self.name in FOLDED:
            raise ValueError("3-D and transposed convolutions stay in floating point in a network on codes")
        config = Config("int8_channel", activations="static")
        built = quantize_(copy.deepcopy(self.model), config, [images(CALIBRATION, seed=2)])
        assert isinstance(built, fx.GraphModule)
        return built

    @cached_property
    def wanted(self) -> Tensor:
        with torch.inference_mode():
            return self.model(self.images).double()  # type: ignore[no-any-return]

    def error(self, result: Tensor) -> float:
        """||result - float result|| / ||float result||."""
        return float((result.double() - self.wanted).norm() / self.wanted.norm())


# What codes cost in a network of random weights, loosely: wrong kernels are off by 1 and more. Sums of pairs that saturate cost more.
EIGHT_BITS, FOUR_BITS, _SATURATING = 0.2, 0.5, 0.5


def _run(work: Inference, model: nn.Module, error: float) -> Ready:
    return Ready(lambda: model(work.images), lambda: model(work.images), error)


def _quantized(work: Inference, config: Config, error: float) -> Ready:
    return _run(work, fuse_(quantize_(copy.deepcopy(work.model), config)), error)


def _onnxruntime(work: Inference) -> Ready:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    x = work.images.contiguous()
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(work.on_codes, Path(folder, "network.onnx"), [x])
        session = onnxruntime.InferenceSession(Path(folder, "network.onnx"), options, providers=["CPUExecutionProvider"])

    def run() -> Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])

    return Ready(run, run, _SATURATING)


def _torch_bf16(work: Inference) -> Ready:
    model, x = copy.deepcopy(work.model).bfloat16(), work.images.bfloat16()
    return Ready(lambda: model(x), lambda: model(x), EIGHT_BITS)


CONTENDERS: dict[str, Callable[[Inference], Ready]] = {
    "halfbyte int8 static": lambda work: _run(work, work.on_codes, EIGHT_BITS),
    "halfbyte int8, a scale an image": lambda work: _quantized(work, Config("int8_channel", activation="image"), EIGHT_BITS),
    "halfbyte int8, a scale a patch": lambda work: _quantized(work, Config("int8_channel"), EIGHT_BITS),
    "halfbyte q4_0": lambda work: _quantized(work, Config("q4_0"), FOUR_BITS),
    "torch fp32": lambda work: _run(work, work.model, 1e-5),
    "torch bf16": _torch_bf16,
    PEER: _onnxruntime,
}
