"""`choose` on both devices, and that `explain` says what the ops run: kernels are compared by what the ops call."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.dispatch.candidate import Candidate, Option, decide
from halfbyte.dispatch.choose import choose, forget
from halfbyte.dispatch.cpu import CPU_LINEAR
from halfbyte.dispatch.cpu_conv import CPU_CONV
from halfbyte.dispatch.explain_shapes import ShapeExplanation
from halfbyte.dispatch.gpu_conv import GPU_CONV
from halfbyte.dispatch.layers import CPU_ATTENTION, GPU_ATTENTION, GPU_NORMED
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats import as_format
from halfbyte.kernels.cpu.codegen.isas import current, native
from halfbyte.kernels.problem import AttentionProblem, ConvProblem, NormedProblem, Problem, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import GPUS
from halfbyte.ops import cuda
from halfbyte.ops.conv import cpu as cpu_conv
from halfbyte.ops.conv import cuda as cuda_conv
from halfbyte.ops.transformer import attend as attend_op
from halfbyte.ops.transformer import attention as whole_attention
from halfbyte.ops.transformer import prefill_ops
from halfbyte.ops.transformer.experts import Mixture
from halfbyte.ops.transformer.sublayers import Heads
from halfbyte.ops.transformer.weights import Weight

# (channels, outputs, kernel, groups, stride, size), x of 7 x size numbers or a little more: kernels of all lists
CONVS = [
    (64, 64, 3, 1, 1, 9),
    (24, 40, 1, 1, 1, 8),
    (16, 16, 3, 16, 1, 8),
    (3, 16, 5, 1, 2, 12),
    (32, 32, 3, 2, 1, 6),
    (64, 128, 1, 1, 1, 9),
    (64, 64, 3, 1, 1, 32),
]
CPU_KERNELS = {
    "ConvKernel": "gathered", "MatrixConvKernel": "amx",
    "WinogradKernel": "winograd", "WinogradScalingKernel": "winograd",
    "ArrangedConvKernel": "arranged", "UnsignedConvKernel": "unsigned", "DepthwiseKernel": "depthwise",
    "DepthwiseDotKernel": "depthwise_dot",
}  # fmt: skip


def shape_of(conv: tuple[int, ...]) -> hb.ConvShape:
    channels, outputs, kernel, groups, stride, size = conv
    image, weight = (2, channels, size, size), (outputs, channels // groups, kernel, kernel)
    return hb.ConvShape(image, weight, stride, kernel // 2, groups=groups)


def explained(*args: Any, **settings: Any) -> ShapeExplanation:
    """What is said, of which each candidate that is not taken has a reason, and which is a document."""
    found = hb.explain(*args, **settings)
    assert isinstance(found, ShapeExplanation)
    assert all(found.choice.reasons.values())
    assert json.loads(json.dumps(found.to_json()))["kernel"] == found.kernel
    assert all(f"not {name}: {reason}" in str(found) for name, reason in found.choice.reasons.items())
    return found


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@pytest.mark.parametrize("activation", ["block", "image"])
@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_convolutions_on_a_cpu_are_explained_as_they_run(
    conv: tuple[int, ...], activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.int8 and activation == "image":
        pytest.skip("codes are not quantized again")
    channels, outputs, kernel, groups, stride, size = conv
    ran: list[str] = []
    kernel_of = cpu_conv._kernel_of

    def noted(*args: Any, **settings: Any) -> Any:
        found = kernel_of(*args, **settings)
        ran.append(CPU_KERNELS[type(getattr(found[0], "codes", found[0])).__name__])
        return found

    monkeypatch.setattr(cpu_conv, "_kernel_of", noted)
    codes = hb.quantize_conv(torch.randn(outputs, channels // groups, kernel, kernel), "int8_channel")
    packed, x = hb.pack_conv(codes, kernel, groups), torch.randn(2, channels, size, size)
    said = explained(shape_of(conv), format="int8_channel", dtype=dtype, activation=activation)
    if dtype == torch.int8:
        hb.qconv2d(x.to(torch.int8), packed, None, stride, kernel // 2, in_scale=1.0, in_zero=0, out_scale=9.0, out_zero=0)
    else:
        hb.conv2d(x, packed, None, stride, kernel // 2, activation=activation)
    assert ran == [said.kernel] or (said.fallback is not None and ran == [said.fallback])
    assert {*said.choice.reasons, said.kernel} == {candidate.name for candidate in CPU_CONV}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize(("compute", "activation"), [("float", "block"), ("int8", "row"), ("auto", "image")])
@pytest.mark.parametrize("conv", [*CONVS, (1024, 256, 1, 1, 1, 14), (256, 256, 3, 1, 1, 14), (64, 64, 3, 1, 1, 48)], ids=str)
def test_convolutions_on_a_gpu_are_explained_as_they_run(
    conv: tuple[int, ...], compute: str, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' launches are noted, not made."""
    pytest.importorskip("triton", exc_type=ImportError)
    channels, outputs, kernel, groups, stride, size = conv
    ran: list[str] = []

    def note(name: str, result: Any = None) -> Any:
        return lambda *args, **settings: (ran.append(name), result(*args) if result else None)[1]

    rows = 2 * (-(-size // stride)) ** 2
    written = torch.empty(rows, outputs, dtype=dtype)
    for candidate in GPU_CONV:
        if candidate.home:
            monkeypatch.setattr(candidate.module, "launch", note(candidate.name, None if candidate.replayable else lambda *_: written))
    monkeypatch.setattr(cuda, "linear", note("linear", lambda *_: written))
    monkeypatch.setattr(cuda, "qlinear", note("linear", lambda *_: written))
    monkeypatch.setattr(cuda, "on", lambda tensor: nullcontext())
    monkeypatch.setattr(cuda_conv, "gpu", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(cuda_conv, "replayed", lambda steps, *_, **__: steps())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stem = pytest.importorskip("halfbyte.kernels.gpu.conv.stem")
    monkeypatch.setattr(stem, "write", lambda *_: None)
    fmt = "int8_channel"
    codes = hb.quantize_conv(torch.randn(outputs, channels // groups, kernel, kernel), fmt)
    packed = cuda_conv.pack(codes, convolution.filter_of(codes, (kernel, kernel), groups))
    x = torch.randn(2, channels, size, size).to(dtype).contiguous(memory_format=torch.channels_last)
    window = Window((stride, stride), (kernel // 2,) * 4).numbers
    said = explained(shape_of(conv), format=fmt, dtype=dtype, compute=compute, activation=activation, device="sm_90")
    if dtype == torch.int8:
        table = cuda_conv.table(torch.zeros(3, outputs), torch.zeros(outputs, kernel * kernel, dtype=torch.int32), packed.sizes, 0)
        cuda_conv.packed_qconv2d(x, packed, table, window, 0, (-128, 127))
    else:
        cuda_conv.packed_conv2d(x, packed, None, None, window, compute, activation, -math.inf, math.inf)
    assert ran == [said.kernel]
    assert {*said.choice.reasons, said.kernel} == {candidate.name for candidate in GPU_CONV}
    assert (said.products != ()) == (said.kernel == "linear")


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_every_convolution_has_a_kernel_or_a_reason(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    for conv in CONVS:
        for compute, activation in (("auto", "block"), ("int8", "row_offset"), ("auto", "image")):
            said = explained(shape_of(conv), format="int8_channel", dtype=dtype, compute=compute, activation=activation, device=arch)
            assert said.kernel != "torch"
            assert {*said.choice.reasons, said.kernel} == {candidate.name for candidate in GPU_CONV}


@pytest.mark.parametrize("isa", native(), ids=lambda isa: isa.name)
def test_every_convolution_has_a_kernel_on_every_cpu(isa: Any) -> None:
    """One that this CPU need not be able to run: nothing is compiled. One of them takes all weights."""
    for channels, outputs, kernel, groups, stride, size in CONVS:
        sizes = Filter(as_format("int8_channel"), outputs, channels // groups, (kernel, kernel), groups)
        for dtype in (torch.int8, torch.float32):
            window = Window((stride, stride), (kernel // 2,) * 4)
            choice = choose(ConvProblem(sizes, window, 2, (size, size), dtype, "auto"), isa)
            assert {*choice.reasons, choice.options[0].candidate.name} == {candidate.name for candidate in CPU_CONV}
            assert all(choice.reasons.values())
            assert any(not option.candidate.rearranges for option in choice.options)


@pytest.mark.parametrize("sizes", [(4, 2, 64), (4, 2, 34), (6, 3, 64), (71, 1, 64), (4, 2, 1024)], ids=str)
@pytest.mark.parametrize("cache", ["float", "int8"])
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_attention_on_a_gpu_is_explained_as_it_runs(
    sizes: tuple[int, int, int], cache: Any, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = pytest.importorskip("halfbyte.kernels.gpu.transformer.attend", exc_type=ImportError)
    many = pytest.importorskip("halfbyte.kernels.gpu.transformer.attend_many", exc_type=ImportError)
    heads, kv_heads, dim = sizes
    ran: list[str] = []
    for ops in (attend_op, prefill_ops):
        monkeypatch.setattr(ops, "gpu", lambda index: GPUS[arch])
        monkeypatch.setattr(ops, "on", lambda tensor: nullcontext())
        monkeypatch.setattr(ops, "replayed", lambda steps, *_, **__: steps())
    monkeypatch.setattr(attend, "launch", lambda *_, **__: ran.append("attend"))
    monkeypatch.setattr(many, "launch", lambda *_, **__: ran.append("attend_many"))
    monkeypatch.setattr(attend_op, "_attend_in_torch", lambda *_: ran.append("torch"))
    monkeypatch.setattr(attend_op, "OPS", SimpleNamespace(attend=SimpleNamespace(default=attend_op._attend_on_gpu)))
    said = explained(hb.AttentionShape(2, heads, kv_heads, dim, cache=cache), dtype=torch.bfloat16, device=arch)
    assert {*said.choice.reasons, said.kernel} - {"torch"} == {candidate.name for candidate in GPU_ATTENTION}
    entry = torch.zeros(2, kv_heads, 8, dim, dtype=torch.int8 if cache == "int8" else torch.bfloat16)
    scales = torch.zeros(2, kv_heads, 8, -(-dim // 32), dtype=torch.bfloat16)
    qkv = torch.zeros(2, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    length = torch.zeros(1, dtype=torch.int64)
    both = (scales, scales.clone()) if cache == "int8" else None
    attend_op.attend(qkv, None, entry, entry.clone(), length, None, Heads(heads, kv_heads, dim, 1.0), scales=both)
    assert ran == [said.kernel]
    prompt = explained(hb.AttentionShape(2, heads, kv_heads, dim, tokens=5), dtype=torch.bfloat16, device=arch)
    why = prefill_ops.why_not_many(Heads(heads, kv_heads, dim, 1.0), torch.bfloat16, GPUS[arch])
    assert (prompt.kernel, prompt.choice.reasons.get("attend_many")) == ("attend_many" if why is None else "torch", why)


@pytest.mark.parametrize("dim", [6, 8, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_a_cpu_is_explained_as_it_runs(dim: int, dtype: torch.dtype) -> None:
    for kv_heads in (4, 2):
        said = explained(hb.AttentionShape(1, 4, kv_heads, dim, tokens=9, cache=None), dtype=dtype)
        query, key = torch.zeros(1, 4, 9, dim, dtype=dtype), torch.zeros(1, kv_heads, 9, dim, dtype=dtype)
        assert (said.kernel == "attend_whole") == whole_attention.supports(query, key, key, None)
        cached = explained(hb.AttentionShape(1, 4, kv_heads, dim), dtype=dtype)
        assert cached.kernel == ("attend" if dim % 8 == 0 and dtype == torch.float32 else "torch")
        assert {candidate.name for candidate in CPU_ATTENTION} == {*cached.choice.reasons, cached.kernel} - {"torch"}


@pytest.mark.parametrize(("rows", "kernel"), [(1, "one_call"), (32, "one_call"), (33, "items")])
def test_experts_on_a_cpu_are_explained_as_they_run(rows: int, kernel: str) -> None:
    said = explained(hb.ExpertsShape(rows, 8, 2, 64, 96), format="q4_0")
    first, second = (Weight(hb.pack(hb.quantize(torch.randn(8, n, k), "q4_0")), None, "int8", "block") for n, k in ((192, 64), (64, 96)))
    assert (Mixture(first, second).for_few_rows(torch.zeros(rows, 2)) is None) == (kernel == "items")
    assert said.kernel == kernel
    assert [name for name, _ in said.products] == ["gate_up", "down"]
    assert explained(hb.ExpertsShape(1, 8, 2, 64, 40), format="q4_0").choice.reasons == {"one_call": "40 gates are not whole panels of 32"}


@pytest.mark.parametrize(
    ("experts", "compute", "reason"), [(8, "float", ""), (8, "int8", "in int8"), (2000, "float", "2000 experts are more")]
)
def test_experts_on_a_gpu(experts: int, compute: str, reason: str) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    shape = hb.ExpertsShape(4, experts, 2, 1024, 512)
    said = explained(shape, format="int4_g128", dtype=torch.bfloat16, compute=compute, device="sm_90")
    assert said.kernel == ("torch" if reason else "routing")
    assert reason in said.choice.reasons.get("routing", "")
    found = hb.explain(8, 1024, 1024, "int4_g128", dtype=torch.bfloat16, compute=compute, device="sm_90", experts=experts)
    assert dict(said.products)["gate_up"].options[0].candidate.name == found.to_json()["kernel"]


def test_measured_times_come_before_predicted_ones() -> None:
    @dataclass(frozen=True)
    class Known(Candidate[int, None]):
        seconds: float = 1.0
        measured: str = ""

        def supports(self, problem: int, machine: None) -> str | None:
            return "it is odd" if problem % 2 else None

        def options(self, problem: int, machine: None) -> tuple[list[Option[Any]], list[str]]:
            return [Option(self, None, self.seconds, self.measured)], ["another failed"] if self.measured else []

    predicted, measured = Known("predicted", "", seconds=1.0), Known("measured", "", seconds=2.0, measured="here")
    choice = decide((predicted, measured), 2, None, by_time=True)
    assert [option.candidate.name for option in choice.options] == ["measured", "predicted"]
    assert choice.reasons == {"measured": "another failed", "predicted": "1.00 s predicted; what was measured comes first"}
    assert decide((predicted, measured), 2, None).options[0].candidate is predicted
    assert decide((predicted, measured), 3, None).reasons == {"predicted": "it is odd", "measured": "it is odd"}
    assert decide((predicted, measured), 3, None).taken is None


def test_products_with_a_norm_and_gates() -> None:
    """Three ways, each of which some problem takes, and torch's operations where norms are too long."""
    pytest.importorskip("triton", exc_type=ImportError)
    product = Problem("linear", 1, 4096, 4096, as_format("int4_g128"), torch.bfloat16)
    names = set()
    wide = NormedProblem(replace(product, m=4, n=28672), gated=True)
    for gpu in (GPUS["sm_90"], GPUS["sm_80"]):
        for problem in (wide, NormedProblem(product), NormedProblem(product, gated=True, biased=True)):
            choice = choose(problem, gpu)
            names.add(choice.options[0].candidate.name)
            assert {*choice.reasons, choice.options[0].candidate.name} == {candidate.name for candidate in GPU_NORMED}
            assert choose(problem, gpu) is choice
    forget()
    assert choose(problem, gpu) is not choice
    assert names == {candidate.name for candidate in GPU_NORMED}
    assert choose(NormedProblem(product), GPUS["gfx942"]).taken is None
    with pytest.raises(UnsupportedError, match="NormedProblem has kernels on GPUs alone"):
        choose(NormedProblem(product), current())  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match="kind of problem"):
        choose(product.format, current())  # type: ignore[call-overload]


@pytest.mark.parametrize("isa", native(), ids=lambda isa: isa.name)
def test_linear_layers_on_every_cpu(isa: Any) -> None:
    problem = Problem("linear", 7, 64, 96, as_format("q4_0"), torch.bfloat16, "auto")
    choice = choose(problem, isa)
    assert (choice.problem.compute, choice.options[0].candidate.name) == ("int8", "int8")
    assert {*choice.reasons, "int8"} == {candidate.name for candidate in CPU_LINEAR}
    assert choose(Problem("qlinear", 7, 64, 96, as_format("q4_0"), torch.int8, "int8"), isa).options[0].candidate.name == "int8"


def test_sums_that_are_too_long_are_torchs() -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    shape = hb.ConvShape((1, 7312, 4, 4), (8, 7312, 3, 3))
    for device in ("cpu", "sm_90"):
        said = explained(shape, format="int8_channel", dtype=torch.int8, device=device)
        assert said.kernel == "torch"
        assert "kernel  none: torch's operations" in str(said)


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    ("weight", "settings"),
    [
        ((32, 16, 3, 3, 3), {"padding": 1}),
        ((32, 16, 3, 3, 3), {"stride": (2, 1, 1), "padding": (0, 1, 1)}),
        ((32, 16, 3, 1, 1), {"dilation": (2, 1, 1)}),
        ((24, 16, 1, 2, 2), {"stride": (1, 2, 2)}),  # patches
        ((32, 8, 3, 3, 3), {"groups": 2}),
        ((16, 1, 3, 3, 3), {"groups": 16}),  # depthwise
    ],
)
def test_3d_convolutions_are_those_of_images(weight: tuple[int, ...], settings: dict[str, Any], device: str) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    image = (2, 16, 5, 8, 6)
    layer: Any = torch.nn.Conv3d(16, weight[0], weight[2:], **settings)
    small: Any = hb.quantize_(torch.nn.Sequential(layer), "int8_channel")[0]
    said = explained(hb.ConvShape(image, weight, **settings), format="int8_channel", device=device)
    assert str(said).startswith("conv3d  [2, 16, 5, 8, 6] * ")
    problem: Any = said.choice.problem
    assert replace(problem.sizes, format=small.packed.sizes.format) == small.packed.sizes
    assert problem.m == layer(torch.empty(image)).numel() // weight[0]


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        (hb.ConvShape((1, 8, 4, 4, 4), (8, 8, 3, 3)), {"format": "q8_0"}, r"an image \[B, C, H, W\]"),
        (hb.ConvShape((1, 8, 4, 4, 4), (8, 4, 3, 3, 3)), {"format": "q8_0"}, r"videos \[B, C, D, H, W\] and a weight"),
        (hb.ConvShape((1, 8, 2, 4, 4), (8, 8, 3, 3, 3)), {"format": "q8_0"}, "takes a video at least as large"),
        (hb.ConvShape((1, 8, 4, 4, 4), (8, 8, 3, 3, 3), padding="same"), {"format": "q8_0"}, "the padding of a 3-D convolution is a whole"),
        (hb.ConvShape((1, 8, 4, 4), (8, 8, 3, 3)), {}, 'pass format="int8_channel"'),
        (hb.ConvShape((1, 8, 4, 4), (8, 4, 3, 3)), {"format": "q8_0"}, "takes 4 channels, got an image with 8"),
        (hb.ConvShape((8, 4, 4), (8, 4, 3, 3)), {"format": "q8_0"}, r"an image \[B, C, H, W\]"),
        (hb.ConvShape((1, 8, 2, 2), (8, 8, 3, 3)), {"format": "q8_0"}, "image at least as large"),
        (hb.ConvShape((1, 8, 4, 4), (8, 8, 3, 3)), {"format": "q8_0", "activation": "image"}, "a scale per channel"),
        (hb.ConvShape((1, 8, 4, 4), (8, 8, 3, 3), stride=0), {"format": "q8_0"}, "stride and dilation are 1 or more"),
        (hb.ConvShape((1, 8, 4, 4), (8, 8, 3, 3)), {"format": "q8_0", "n": 3}, "leave them out"),
        (hb.AttentionShape(1, 0, 1, 8), {}, "sizes of at least 1"),
        (hb.AttentionShape(1, 4, 1, 8, cache="int4"), {}, "got 'int4'"),  # type: ignore[arg-type]
        (hb.AttentionShape(1, 30, 8, 128), {}, "got 8 of keys for 30"),
        (hb.AttentionShape(True, 4, 1, 8), {}, "attention are whole numbers, got True"),
        (hb.ExpertsShape(1, 4, 2, 64.0, 64), {"format": "q4_0"}, "experts are whole numbers, got 64.0"),  # type: ignore[arg-type]
        (hb.ConvShape((1, 8.0, 4, 4), (8, 8, 3, 3)), {"format": "q8_0"}, "whole numbers, got 8.0"),  # type: ignore[list-item]
        (True, {"n": 64, "k": 64, "format": "q8_0"}, "a product are whole numbers, got True"),
        (1, {"n": 64.0, "k": 64, "format": "q8_0"}, "a product are whole numbers, got 64.0"),
        (1, {"n": 64, "k": 64, "format": "q8_0", "experts": 2.0}, "whole numbers, got 2.0"),
        (hb.AttentionShape(1, 4, 1, 8), {"dtype": torch.int8}, "float32, bfloat16 or float16"),
        (hb.AttentionShape(1, 4, 1, 8), {"activation": "image"}, "unknown activation scaling 'image'"),
        (hb.ExpertsShape(1, 2, 3, 64, 64), {"format": "q4_0"}, "at least top_k experts"),
        (hb.ExpertsShape(1, 4, 2, 64, 64), {"format": "q4_0", "compute": "guess"}, "'guess'"),
        (3, {}, "pass all four"),
        (torch.nn.Linear(3, 3), {"format": "q8_0"}, r"got torch.Linear: for a model call hb.report"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained(shape: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        hb.explain(shape, **settings)


def test_where_a_gpu_has_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.dispatch import gpu_conv

    missing = "Triton is not installed: install triton>=3.6"
    monkeypatch.setattr(gpu_conv, "why_no_triton", lambda: missing)
    forget()
    sizes, pixels = Filter(as_format("int8_channel"), 8, 8, (3, 3)), Filter(as_format("int8_channel"), 8, 8, (1, 1))
    here = GPUS["sm_90"]
    assert choose(ConvProblem(sizes, Window(), 1, (5, 5), torch.float32), here).taken is None
    assert choose(ConvProblem(pixels, Window(), 1, (5, 5), torch.float32), here).options[0].candidate.reads == "pixels"
    with pytest.raises(UnsupportedError, match=f"{missing}, or use compute='float'"):
        choose(ConvProblem(sizes, Window(), 1, (5, 5), torch.float32, "int8"), here)
    with pytest.raises(UnsupportedError, match=f"qconv2d needs Triton: {missing}, or use the CPU"):
        choose(ConvProblem(sizes, Window(), 1, (5, 5), torch.int8), here)
    forget()


def test_attention_of_other_heads_has_reasons() -> None:
    isa = current()
    choice = choose(AttentionProblem("decode", 1, 1, 4, 2, 12, torch.float32), isa)
    assert (choice.taken, choice.reasons["attend"]) == (None, "heads of 12 are not a multiple of 8")
