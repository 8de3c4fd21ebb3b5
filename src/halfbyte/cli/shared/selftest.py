"""Tests of this machine's kernels against the float64 reference, on small shapes that are not multiples of tiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from halfbyte import env, ops
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import HalfbyteError
from halfbyte.formats import Codes, as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.problem import Activation, Window
from halfbyte.ops.conv import functions as conv
from halfbyte.quantizers import absmax

FORMATS = (
    *("q4_0", "q4_1", "q8_0", "inferllm_q4_0", "mxfp4", "nvfp4", "iq4_nl", "int5_g32_offset", "int6_g16"),
    *("int4_g128_zp", "int4_g48_offset", "int4_channel", "int8_g64_zp", "int8_channel", "int8_tensor"),
)
# Formats tested with all dtypes and activation scales, which do not interact with other properties of formats.
_THOROUGH = ("q4_0", "int4_g128_zp", "int8_channel")
_CONVOLVED = ("q4_0", "int8_channel")
_N, _K = 70, 200
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """A call with its description, and the function that tells which elements of its result are right."""

    what: str
    call: Callable[[], Any]
    right: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Result:
    """The result of testing one operation on one format.

    device "cpu", "cuda:0", …
    cases  how many calls were compared
    fault  the first failure, described; None if there is none
    ms     total: compiling, if not done before, running, and the reference
    """

    op: str
    format: str
    device: str
    cases: int
    fault: str | None
    ms: float

    @property
    def passed(self) -> bool:
        return self.fault is None

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Check:
    """A test of one operation on one format."""

    op: str
    format: str
    device: str
    cases: Callable[[Codes, str], Iterator[Case]]

    def run(self) -> Result:
        start, count, fault = time.perf_counter(), 0, None
        try:
            for case in self._cases():
                count += 1
                right = case.right(case.call())
                if fault is None and not bool(right.all()):
                    fault = f"{case.what}: {int((~right).sum())} of {right.numel()} elements are wrong"
        except (HalfbyteError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
        return Result(self.op, self.format, self.device, count, fault, (time.perf_counter() - start) * 1e3)

    def call(self) -> None:
        """Makes its calls without judging the results, as `run` does."""
        with suppress(HalfbyteError, RuntimeError):
            for case in self._cases():
                with suppress(HalfbyteError, RuntimeError):
                    case.call()

    def _cases(self) -> Iterator[Case]:
        weight = torch.randn(_N, _K, generator=torch.Generator().manual_seed(0))
        return self.cases(absmax(weight, as_format(self.format)), self.device)


def run(checks: Sequence[Check]) -> Iterator[Result]:
    """The results, those of the CPU first: meanwhile other threads compile the kernels for the first GPU. (Other GPUs find most of them in
    the cache on disk.)"""
    on_cpu, on_gpus = ([check for check in checks if (check.device == "cpu") == cpu] for cpu in (True, False))
    with _compiling([check for check in on_gpus if check.device == "cuda:0"]):
        for check in on_cpu:
            yield check.run()
    for check in on_gpus:
        yield check.run()


@contextmanager
def _compiling(checks: Sequence[Check]) -> Iterator[None]:
    """A context that compiles the kernels of some checks for the current GPU; they can run only after it ends."""
    if not checks or why_no_triton() is not None or env.tune():
        yield
        return
    from halfbyte.kernels.gpu.runtime import launch

    with launch.compiling(torch.device("cuda", 0)):
        for check in checks:
            check.call()
        yield


def checks() -> list[Check]:
    """All tests; `run()` takes from milliseconds to seconds each, depending on what must be compiled."""
    kinds = {"quantize": _quantize, "layout": _layout, "dequantize": _dequantize, "embedding": _embedding, "linear": _linear}
    channelwise = [name for name in FORMATS if (fmt := as_format(name)).zero == "none" and not isinstance(fmt.block, int)]
    kinds_and_formats = [*itertools.product(kinds.items(), FORMATS), *((("qlinear", _qlinear), name) for name in channelwise)]
    kinds_and_formats += [
        *((("grouped_linear", _grouped_linear), name) for name in _THOROUGH),
        *((("conv2d", _conv2d), name) for name in _CONVOLVED),
    ]
    kinds_and_formats += [(("qconv2d", _qconv2d), name) for name in channelwise]
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [Check(op, name, device, cases) for device in devices for (op, cases), name in kinds_and_formats]


def _dtypes(codes: Codes, device: str) -> tuple[torch.dtype, ...]:
    """Fewer on a GPU, where each must be compiled."""
    return _FLOATS if device == "cpu" or str(codes.format) in _THOROUGH else _FLOATS[:1]


def _quantize(codes: Codes, device: str) -> Iterator[Case]:
    weight = torch.randn(_N, _K, generator=torch.Generator().manual_seed(3))
    for dtype in _dtypes(codes, device):
        w = weight.to(dtype)
        yield Case(f"from {dtype}", partial(ops.quantize, w.to(device), codes.format), partial(_quantized_equally, w))


def _quantized_equally(weight: Tensor, found: Codes) -> Tensor:
    return _same_codes(absmax(weight, found.format), found)


def _same_codes(wanted: Codes, found: Codes) -> Tensor:
    return torch.cat([(found.tensors()[name].cpu() == tensor).flatten() for name, tensor in wanted.tensors().items()])


def _layout(codes: Codes, device: str) -> Iterator[Case]:
    yield Case("pack and unpack", lambda: ops.unpack(ops.pack(codes, device)), partial(_same_codes, codes))


def _dequantize(codes: Codes, device: str) -> Iterator[Case]:
    packed, wanted = ops.pack(codes, device), reference.dequantize(codes)
    for dtype in _dtypes(codes, device):
        yield Case(str(dtype), partial(ops.dequantize, packed, dtype), lambda found: found.cpu() == wanted.to(found.dtype))


def _embedding(codes: Codes, device: str) -> Iterator[Case]:
    ids = torch.tensor([[_N - 1, 0, 3], [3, 31, 32]])
    call = partial(ops.embedding, ids.to(device), ops.pack(codes, device))
    yield Case("6 rows", call, lambda found: found.cpu() == reference.embedding(ids, codes).float())


def _linear(codes: Codes, device: str) -> Iterator[Case]:
    packed, generator = ops.pack(codes, device), torch.Generator().manual_seed(1)
    bias = torch.randn(_N, generator=generator)
    for m, compute, activation, dtype in _ways(str(codes.format), device):
        x = torch.randn(m, _K, generator=generator).to(dtype)
        call = partial(ops.linear, x.to(device), packed, bias.to(device), compute=compute, activation=activation)
        yield Case(f"M={m}, {compute}, {activation}, {dtype}", call, partial(_linear_right, codes, x, bias, compute, activation))


def _linear_right(codes: Codes, x: Tensor, bias: Tensor, compute: Any, activation: Any, y: Tensor) -> Tensor:
    expected = reference.linear(x, codes, bias, compute, activation)
    bound = reference.error_bound(x, codes, bias, compute, activation)
    if y.device.type != "cpu" and (compute == "float" or _may_be_floats(codes, activation)):
        bound += _rounded(x, codes.dequantize(torch.float64), bias)
        if compute == "int8":
            bound += 2 * reference.error_bound(x, codes, bias)  # float32 sums of all products
    return reference.agrees(y.cpu(), expected, bound)


def _may_be_floats(codes: Codes, activation: str) -> bool:
    """Whether some GPUs multiply such integers as floats of x's type (`kernels/gpu/linear/rounded.py`): short blocks, and offsets."""
    return codes.format.block_size(codes.shape[-1]) <= 64 or activation.endswith("offset")


def _rounded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The tolerance for GPU kernels, which round each weight, and its scale before, or the bias, to the activations' dtype (what is left
    of 2 eps covers activations that were quantized, made floats again and rounded once)."""
    eps = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    return eps * bias.double().abs() + 2 * eps * (x.double().abs() @ weight.abs().mT)


def _grouped_linear(codes: Codes, device: str) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(4)
    stack = absmax(torch.randn(3, _N, _K, generator=generator), codes.format)
    packed, bias = ops.pack(stack, device), torch.randn(3, _N, generator=generator)
    for m, dtype in ((1, torch.float32), (9, torch.bfloat16)):
        x, ids = torch.randn(m, _K, generator=generator).to(dtype), torch.randint(0, 3, (m, 2), generator=generator)
        call = partial(ops.grouped_linear, x.to(device), packed, ids.to(device), bias.to(device), compute="float")
        yield Case(f"M={m}, {dtype}", call, partial(_grouped_right, stack, x, ids, bias))


def _grouped_right(stack: Codes, x: Tensor, ids: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    expected, bound = (f(x, stack, ids, bias) for f in (reference.grouped_linear, reference.grouped_error_bound))
    if y.device.type != "cpu":
        weight = stack.dequantize(torch.float64)
        rows = [[_rounded(row, weight[e], bias[e]) for e in some] for row, some in zip(x, ids.tolist(), strict=True)]
        bound = bound + torch.stack([torch.stack(row) for row in rows])
    return reference.agrees(y.cpu(), expected, bound)


def _ways(format: str, device: str) -> list[tuple[int, str, str, torch.dtype]]:
    """(M, compute, scales of activations, their dtype) to test. Fewer on a GPU, where each must be compiled."""
    f32, bf16, f16 = _FLOATS
    if device != "cpu":
        ways = [(7, "float", "block", f32)]
        if as_format(format).family != "fp4":  # which are multiplied by floats of 16 bits alone
            ways += [(7, "int8", "block", f32)]
        if format in _THOROUGH:
            ways += [(1, "float", "block", f16), (130, "float", "block", bf16), (1, "int8", "row", bf16), (130, "int8", "row", f16)]
            ways += [(7, "int8", activation, f32) for activation in get_args(Activation)[2:]]
        return ways
    kinds = [("float", "block", f32), ("int8", "block", f32)]
    if format in _THOROUGH:
        kinds += [("float", "block", bf16), ("float", "block", f16)]
        kinds += [("int8", activation, f32) for activation in get_args(Activation)[1:]]
    return [(m, *kind) for m in (1, 7) for kind in kinds]


def _qlinear(codes: Codes, device: str) -> Iterator[Case]:
    packed, generator = ops.pack(codes, device), torch.Generator().manual_seed(2)
    bias = torch.randn(_N, generator=generator)
    for m in (1, 7):
        xq = torch.randint(-128, 128, (m, _K), dtype=torch.int8, generator=generator)
        scales: dict[str, Any] = {"in_scale": 0.05, "in_zero": 3, "out_scale": 0.5, "out_zero": -7}
        expected = reference.qlinear(xq, codes, bias, **scales)
        yield Case(f"M={m}", partial(ops.qlinear, xq.to(device), packed, bias.to(device), **scales), partial(_right_codes, expected))


def _right_codes(expected: reference.Requantized, found: Tensor) -> Tensor:
    right: Tensor = expected.agrees(found.cpu())
    return right


def _convolutions(codes: Codes) -> Iterator[tuple[str, Tensor, Codes, int, Tensor]]:
    """Convolutions with 3 x 3 taps, one of them depthwise: name, images, weight, groups and bias."""
    generator = torch.Generator().manual_seed(5)
    for name, channels, groups in (("3 x 3", 40, 1), ("depthwise", 24, 24)):
        weight = torch.randn(24, channels // groups, 3, 3, generator=generator)
        images, bias = torch.randn(2, channels, 9, 11, generator=generator), torch.randn(24, generator=generator)
        yield name, images, conv.quantize_conv(weight, codes.format), groups, bias


def _conv2d(codes: Codes, device: str) -> Iterator[Case]:
    window = Window((2, 1), (1, 1, 1, 1))
    for name, x, weight, groups, bias in _convolutions(codes):
        packed = conv.pack_conv(weight, 3, groups, device)
        for compute in ("float",) if groups > 1 else ("float", "int8"):
            call = partial(conv.conv2d, x.to(device), packed, bias.to(device), window.stride, 1, compute=compute)
            yield Case(f"{name}, {compute}", call, partial(_conv_right, (x, weight, (3, 3), window, bias, groups, compute)))


def _conv_right(of: tuple[Tensor, Codes, tuple[int, int], Window, Tensor, int, Any], y: Tensor) -> Tensor:
    return reference.agrees(y.cpu(), conv_reference.conv2d(*of), conv_reference.error_bound(*of))


def _qconv2d(codes: Codes, device: str) -> Iterator[Case]:
    scales: dict[str, Any] = {"in_scale": 0.05, "in_zero": 3, "out_scale": 0.5, "out_zero": -7}
    for name, x, weight, groups, bias in _convolutions(codes):
        xq = (40 * x).round().clamp(-128, 127).to(torch.int8)
        packed = conv.pack_conv(weight, 3, groups, device)
        expected = conv_reference.qconv2d(xq, weight, (3, 3), Window((1, 1), (1, 1, 1, 1)), bias, groups=groups, **scales)
        call = partial(conv.qconv2d, xq.to(device), packed, bias.to(device), padding=1, **scales)
        yield Case(name, call, partial(_right_codes, expected))
