"""The public operations on a GPU: values, refusals, gradients, CUDA graphs, torch.compile, modules that move."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.cli.shared.selftest import checks
from halfbyte.dispatch.gpu import packs_code_pairs
from halfbyte.errors import ArgumentError, FormatError
from halfbyte.kernels import reference
from halfbyte.kernels.problem import Activation
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import gpu
from halfbyte.nn.modules.quantized import QuantLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N, K = 70, 200
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ("q4_0", "q4_1", "q8_0", "int4_g128", "int4_g128_zp", "int4_g48_offset", "int8_channel", "int8_g33_zp", "int4_tensor")


def packed_weight(fmt: str = "q4_0", n: int = N, k: int = K) -> hb.Packed:
    return hb.pack(hb.quantize(torch.randn(n, k), fmt), "cuda")


def bound(x: Tensor, codes: hb.Codes, bias: Tensor | None = None, compute: str = "float", activation: Activation = "block") -> Tensor:
    """The reference's, and what rounding to x's type adds: of weights, eps |x| |W|, twice where scales are rounded too; of the bias.
    Integers in short blocks or with an offset may be multiplied as floats: see `test_rounded.py`."""
    error = reference.error_bound(x, codes, bias, compute, activation)  # type: ignore[arg-type]
    integers = codes.format.block_size(codes.shape[-1]) > 64 and not activation.endswith("offset")
    if x.dtype == torch.float32 or (compute == "int8" and integers):
        return error
    eps = torch.finfo(x.dtype).eps
    if compute == "int8":
        error = error + 2 * reference.error_bound(x, codes, bias)
    if bias is not None:
        error = error + eps * bias.double().abs()
    return error + 2 * eps * (x.double().abs() @ codes.dequantize(torch.float64).abs().T)


def assert_right(
    x: Tensor, packed: hb.Packed, bias: Tensor | None = None, compute: str = "float", activation: Activation = "block"
) -> None:
    y = hb.linear(x, packed, bias, compute=compute, activation=activation).cpu()
    codes, x, bias = hb.unpack(packed).to("cpu"), x.cpu(), None if bias is None else bias.cpu()
    expected = reference.linear(x, codes, bias, compute, activation)  # type: ignore[arg-type]
    right = reference.agrees(y, expected, bound(x, codes, bias, compute, activation))
    assert right.all(), f"{int((~right).sum())} of {right.numel()} are wrong"


# Each new combination is compiled, which takes seconds: those that differ in nothing but their size are few.
CASES = [
    *((fmt, torch.float16, m, "float") for fmt in FORMATS for m in (1, 33)),
    *((fmt, torch.float32, 7, "float") for fmt in ("q4_0", "int8_channel")),
    *(("int4_g128_zp", torch.bfloat16, m, "float") for m in (1, 2, 7, 16, 65, 130, 300)),
    *((fmt, torch.bfloat16, 5, "int8") for fmt in FORMATS),
    *(("int4_channel", torch.float16, m, "int8") for m in (1, 70, 300)),
]


@pytest.mark.parametrize(("fmt", "dtype", "m", "compute"), CASES)
def test_linear_equals_the_reference(fmt: str, dtype: torch.dtype, m: int, compute: str) -> None:
    packed, bias = packed_weight(fmt), torch.randn(N, device="cuda")
    for _ in range(3):  # the second and third time go the short ways
        assert_right(torch.randn(m, K, device="cuda").to(dtype), packed, bias, compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["q8_0", "int4_g32", "int4_g128", "int8_channel"])
def test_integers_of_aligned_rows(fmt: str, dtype: torch.dtype) -> None:
    """Widths of small models: less than a K slab, and a few of them."""
    for m, n, k in ((1, 64, 32), (2, 64, 64), (24, 64, 64), (1, 70, 128), (64, 256, 384), (300, 384, 1536)):
        packed = packed_weight(fmt, n, k)
        for activation in ("block", "row"):
            for _ in range(3):
                assert_right(torch.randn(m, k, device="cuda").to(dtype), packed, None, "int8", activation)


@pytest.mark.parametrize("activation", ["block", "row", "block_offset", "row_offset"])
def test_activation_scales(activation: Activation) -> None:
    for fmt, m in (("q4_0", 5), ("int4_g128_zp", 1), ("int8_channel", 65)):
        assert_right(torch.randn(m, K, device="cuda"), packed_weight(fmt), None, "int8", activation)


@pytest.mark.parametrize("fmt", ["q4_0", "int4_g128_zp", "int8_channel"])
def test_doctor_finds_no_fault(fmt: str) -> None:
    assert [check.run().fault for check in checks() if check.device != "cpu" and (check.op, check.format) == ("linear", fmt)] == [None]


@pytest.mark.parametrize(
    ("dtype", "lead"), [(torch.float16, (3,)), (torch.bfloat16, (2, 5)), (torch.float32, ()), (torch.bfloat16, (300,))]
)
def test_epilogue(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    packed = packed_weight("int4_g128")
    codes = hb.unpack(packed).to("cpu")
    for with_bias, with_residual in itertools.product((False, True), (False, True)):
        for clamp in (None, (-0.5, 6.0)):
            for _ in range(3):
                x = torch.randn(*lead, K).to(dtype)
                bias = torch.randn(N).to(dtype) if with_bias else None
                residual = torch.randn(*lead, N).to(dtype) if with_residual else None
                on = [None if t is None else t.cuda() for t in (bias, residual)]
                y = hb.linear(x.cuda(), packed, on[0], residual=on[1], clamp=clamp).cpu()
                expected = reference.linear(x, codes, bias)
                error = bound(x, codes, bias)
                if residual is not None:
                    expected, error = expected + residual.double(), error + torch.finfo(dtype).eps * residual.double().abs()
                if clamp is not None:
                    expected = expected.clamp(*clamp)
                assert y.shape == (*lead, N)
                assert reference.agrees(y, expected, error).all(), (lead, with_bias, with_residual, clamp)


def test_a_residual_that_is_the_input() -> None:
    packed = packed_weight("q8_0", K, K)
    x = torch.randn(3, K, device="cuda")
    other = torch.randn(3, K, device="cuda")
    plain = hb.linear(x, packed)
    assert torch.allclose(hb.linear(x, packed, residual=x), plain + x, rtol=1e-5, atol=1e-4)
    assert torch.allclose(hb.linear(x, packed, residual=other), plain + other, rtol=1e-5, atol=1e-4)
    assert torch.allclose(hb.linear(x, packed, residual=x), plain + x, rtol=1e-5, atol=1e-4)


def test_strides_and_addresses() -> None:
    packed, x = packed_weight(), torch.randn(K, 6, device="cuda", dtype=torch.float16)
    rows = hb.linear(x.T.contiguous(), packed)
    assert torch.equal(hb.linear(x.T, packed), rows)
    odd = torch.empty(6 * K + 1, device="cuda", dtype=torch.float16)[1:].view(6, K).copy_(x.T)
    assert odd.data_ptr() % 16
    assert torch.allclose(hb.linear(odd, packed).float(), rows.float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(hb.linear(x.T.contiguous(), packed), rows)


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (3, 0, K), (3, N, 0)])
def test_nothing_times_something(m: int, n: int, k: int) -> None:
    packed, bias = packed_weight("q8_0", n, k), torch.linspace(-1, 1, n, device="cuda")
    y = hb.linear(torch.randn(m, k, device="cuda"), packed, bias, clamp=(-0.5, 0.5))
    assert torch.equal(y, bias.clamp(-0.5, 0.5).expand(m, n))
    assert hb.dequantize(packed).shape == (n, k)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_go_there_and_back(fmt: str) -> None:
    weight = torch.randn(N, K)
    codes = hb.quantize(weight, fmt)
    for name, tensor in hb.quantize(weight.cuda(), fmt).tensors().items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), codes.tensors()[name]), name
    packed = hb.pack(codes, "cuda")
    paired = packs_code_pairs(packed.format, packed.shape, gpu(0))
    assert packed.layout == (gpu_tiles.PAIRED if paired else gpu_tiles.NAME)
    for name, tensor in hb.unpack(packed).tensors().items():
        assert torch.equal(tensor.cpu(), codes.tensors()[name]), name
    for dtype in DTYPES:
        assert torch.equal(hb.dequantize(packed, dtype).cpu(), hb.dequantize(hb.pack(codes), dtype))
        ids = torch.tensor([[3, 0], [N - 1, 3]], dtype=torch.int32)
        assert torch.equal(hb.embedding(ids.cuda(), packed, dtype).cpu(), hb.embedding(ids, hb.pack(codes), dtype))
    one = torch.arange(6).view(2, 3)[:, 1:2]  # flattened it is a view whose numbers do not follow each other
    assert torch.equal(hb.embedding(one.cuda(), packed), hb.embedding(one.contiguous().cuda(), packed))


def test_ids_outside_give_nan() -> None:
    rows = hb.embedding(torch.tensor([0, -1, N, 5], device="cuda"), packed_weight())
    assert rows.isnan().all(dim=1).tolist() == [False, True, True, False]


def test_qlinear_equals_the_reference() -> None:
    scales = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.1, "out_zero": -4}
    for fmt in ("int8_channel", "int4_channel"):
        packed, bias = packed_weight(fmt), torch.randn(N)
        for lead in ((2, 5), (1,), (130,)):
            x = torch.randint(-128, 128, (*lead, K), dtype=torch.int8)
            y = hb.qlinear(x.cuda(), packed, bias.cuda(), **scales, clamp=(-4, 127))  # type: ignore[arg-type]
            expected = reference.qlinear(x, hb.unpack(packed).to("cpu"), bias, **scales, clamp=(-4, 127))  # type: ignore[arg-type]
            assert expected.agrees(y.cpu()).all()


def test_refusals() -> None:
    packed, x = packed_weight(), torch.randn(2, K, device="cuda")
    with pytest.raises(FormatError, match=r"packed bytes on the GPU.* on cpu"):
        hb.linear(x, hb.Packed(packed.format, packed.shape, packed.layout, packed.data.cpu()))
    hb.linear(x, packed)
    with pytest.raises(FormatError, match=r"packed bytes on the GPU.* on cpu"):
        hb.linear(x, hb.Packed(packed.format, packed.shape, packed.layout, packed.data.cpu()))
    with pytest.raises(FormatError, match="packed bytes on the CPU"):
        hb.linear(x.cpu(), packed)
    with pytest.raises(ArgumentError, match=r"bias of .* on the GPU"):
        hb.linear(x, packed, torch.randn(N))
    with pytest.raises(ArgumentError, match="residual"):
        hb.linear(x, packed, residual=torch.randn(2, N))
    with pytest.raises(ArgumentError, match="takes activations"):
        hb.linear(x[:, 1:], packed)


def test_gradients() -> None:
    packed = packed_weight("int4_g33_zp")
    x, bias = torch.randn(2, 3, K, device="cuda", requires_grad=True), torch.randn(N, device="cuda", requires_grad=True)
    dy = torch.randn(2, 3, N, device="cuda")
    hb.linear(x, packed, bias).backward(dy)
    assert x.grad is not None
    assert bias.grad is not None
    expected = reference.linear_gradient(dy.cpu(), hb.unpack(packed).to("cpu"))
    assert torch.allclose(x.grad.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(bias.grad, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_results_are_the_same_bits_each_time() -> None:
    packed = packed_weight("int4_g128", 512, 4096)
    for m, compute in ((1, "float"), (64, "float"), (300, "float"), (1, "int8"), (300, "int8")):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        first = hb.linear(x, packed, compute=compute)
        assert all(torch.equal(hb.linear(x, packed, compute=compute), first) for _ in range(5))


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("m", [1, 16, 200])
def test_captured_in_a_graph(m: int, compute: str) -> None:
    packed, other = packed_weight("int4_g128", 512, 4096), packed_weight("int4_g128", 4096, 512)
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)

    def model(x: Tensor) -> Tensor:
        return hb.linear(hb.linear(x, packed, compute=compute), other, compute=compute, residual=x)

    model(x)
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        out = model(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, model(x))


def test_two_graphs_at_once() -> None:
    """Each has its own scratch memory: replayed side by side on two streams they don't disturb each other."""
    weights = [packed_weight("int4_g128", 1024, 8192) for _ in range(2)]
    xs = [torch.randn(1, 8192, device="cuda", dtype=torch.float16) for _ in weights]
    expected = [hb.linear(x, weight) for x, weight in zip(xs, weights, strict=True)]
    graphs, outs = [], []
    for x, weight in zip(xs, weights, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                out = hb.linear(x, weight)
        graphs.append(graph)
        outs.append(out)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))


def test_compiled_whole() -> None:
    packed, bias = packed_weight(), torch.randn(N, device="cuda", dtype=torch.bfloat16)

    def model(x: Tensor) -> Tensor:
        return hb.linear(x.relu(), packed, bias, clamp=(0, 6)) * 2

    compiled = torch.compile(model, fullgraph=True)
    for m in (4, 9):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(compiled(x), model(x))


def test_modules_move() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 33))
    hb.quantize_(model, "q4_0")
    x = torch.randn(4, K)
    here = model(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    there = copy.deepcopy(model).to("cuda")
    assert all(module.packed.layout == "gpu_tiles" for module in there.modules() if isinstance(module, QuantLinear))
    assert torch.allclose(there(x.cuda()).cpu(), here, rtol=0.1, atol=0.1)  # the CPU rounds activations to int8
    for name, tensor in there.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name]), name
    assert torch.equal(there.to("cpu")(x), here)
    half = copy.deepcopy(model).to("cuda", torch.float16)
    assert half(x.cuda().half()).dtype == torch.float16
    with torch.no_grad():
        compiled = torch.compile(half, fullgraph=True)
        assert torch.equal(compiled(x.cuda().half()), half(x.cuda().half()))


def test_a_checkpoint_loads_onto_the_gpu(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(40, K), nn.Linear(K, N), nn.Linear(N, 33))
    hb.quantize_(model, hb.Config("int8_channel", compute="float"))
    hb.save(model, tmp_path / "model")
    there = hb.load(tmp_path / "model", device="cuda", model=nn.Sequential(nn.Embedding(40, K), nn.Linear(K, N), nn.Linear(N, 33)))
    ids = torch.tensor([[1, 2, 39]])
    assert torch.allclose(there(ids.cuda()).cpu(), model(ids), rtol=1e-4, atol=1e-4)
    on_gpu = nn.Sequential(nn.Linear(K, N)).cuda()
    hb.quantize_(on_gpu, "q4_0")
    assert on_gpu(torch.randn(2, K, device="cuda")).is_cuda


def test_opcheck() -> None:
    packed = packed_weight()
    x = torch.randn(2, 3, K, device="cuda", requires_grad=True)
    torch.library.opcheck(
        torch.ops.halfbyte.linear.default, (x, packed.data, None, None, "q4_0", N, K, "auto", "block", -math.inf, math.inf)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_give_the_dtype_of_autocast(dtype: torch.dtype) -> None:
    """x and the result are rounded."""
    weight, bias, x = packed_weight("q8_0", 64, 64), torch.randn(64, device="cuda"), torch.randn(4, 64, device="cuda")
    conv = hb.pack_conv(hb.quantize_conv(torch.randn(64, 16, 3, 3), "int8_channel"), 3, device="cuda")
    stack, ids = hb.pack(hb.quantize(torch.randn(3, 64, 64), "q8_0"), "cuda"), torch.tensor([0, 2, 1, 1], device="cuda")
    image = torch.randn(2, 16, 8, 8, device="cuda")
    for f, given in (
        (lambda x: hb.linear(x, weight, bias, residual=x), x),
        (lambda x: hb.conv2d(x, conv, bias), image),
        (lambda x: hb.grouped_linear(x, stack, ids), x),
    ):
        exact, leaf = f(given), given.clone().requires_grad_()
        with torch.autocast("cuda", dtype):
            y = f(leaf)
            with torch.no_grad():
                assert torch.equal(f(given), y)
        assert y.dtype == dtype
        assert torch.allclose(y.float(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps * float(exact.abs().max()))
        y.float().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32


def test_forward_mode() -> None:
    weight, x = packed_weight("q8_0", 64, 64), torch.randn(4, 64, device="cuda")
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.unpack_dual(hb.linear(torch.autograd.forward_ad.make_dual(x, x), weight)).tangent
    assert torch.allclose(tangent, x @ hb.dequantize(weight).T, rtol=1e-2, atol=1e-2)  # torch multiplies in TF32, if it is told to
    assert torch.allclose(torch.func.jvp(lambda x: hb.linear(x, weight), (x,), (x,))[1], tangent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8_channel", "int8_tensor"])
def test_compiled_rows_are_quantized_by_inductor(name: str, dtype: torch.dtype) -> None:
    """Next to a norm, GELU and a residual; rows of whole tiles. Codes may differ where x * inverse is within a rounding of k + 1/2."""
    torch.manual_seed(0)
    up, down = (
        QuantLinear(packed_weight(name, *shape), compute="int8", activation="row", dtype=dtype) for shape in ((512, 256), (256, 512))
    )
    model = hb.fuse_(nn.Sequential(nn.LayerNorm(256), up, nn.GELU(approximate="tanh"), down).cuda().to(dtype))
    x = torch.randn(2, 256, 256, device="cuda", dtype=dtype)
    assert up.packed.layout == gpu_tiles.NAME
    torch.compiler.reset()
    with torch.no_grad():
        y, eager = torch.compile(model, fullgraph=True)(x), model(x)
    assert float((y.double() - eager.double()).norm() / eager.double().norm()) < 0.02
