"""W8A8 on GPUs under torch.compile: rows are quantized by torch's operations, and one op multiplies their codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.layouts import gpu_tiles
from halfbyte.ops import functions, row_codes
from halfbyte.ops.registration import ends
from halfbyte.ops.tensors import gelu_tanh

N, K = 70, 256


def rows(m: int) -> Tensor:
    """Rows of many magnitudes."""
    torch.manual_seed(m)
    return torch.randn(m, K) * 3 ** torch.randn(m, 1)


def test_codes_are_those_of_the_reference() -> None:
    x = rows(64)
    x[0], x[1, 3], x[2, 4], x[3] = 0, torch.nan, -torch.inf, 1e-40
    x[4, :2] = torch.tensor([127.0, 0.5])
    codes, scale = row_codes.quantize_rows(x)
    wanted = reference.quantize_activation(x, K, "row")
    assert torch.equal(scale.nan_to_num(-1.0), wanted.scale[:, 0].nan_to_num(-1.0))
    assert scale.isnan().nonzero().flatten().tolist() == [1, 2]
    good = ~scale.isnan()
    difference = (codes.int() - wanted.q.int())[good].abs()
    assert difference.max() <= 1
    # They differ only where x * inverse, of at most 127, is within a rounding, 2^-18, of k + 1/2.
    exact = x[good].double() * (127.0 / x[good].abs().amax(1, keepdim=True)).double()
    to_tie = (exact.frac().abs() - 0.5).abs()
    assert (to_tie[difference > 0] <= 2**-18).all()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile's calls as on a GPU; the ops that are called."""
    called: list[str] = []

    def linear_codes(q: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        called.append("linear_codes")
        name, n, k, dtype, *bounds = settings
        geo = gpu_tiles.geometry_of(as_format(name), n, k, weight.numel())  # type: ignore[arg-type]
        w = gpu_tiles.unpack(hb.Packed(geo.format, (n, k), geo.layout, weight)).dequantize(torch.float64)  # type: ignore[arg-type]
        y = (q.double() * scale.double().unsqueeze(-1)) @ w.T
        y = y if bias is None else y + bias
        y = y if residual is None else y + residual
        return y.clamp(*ends(*bounds)).to(dtype)  # type: ignore[call-overload, no-any-return]

    for module in (functions, row_codes):
        monkeypatch.setattr(module, "fused_by_inductor", lambda x: torch.compiler.is_dynamo_compiling())
    library = torch.library.Library("halfbyte", "IMPL")
    library.impl("linear_codes", linear_codes, "CPU")
    torch.compiler.reset()
    yield called
    library._destroy()


def compiled(x: Tensor, packed: hb.Packed, **settings: object) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return ops.linear(x, packed, **settings)  # type: ignore[arg-type]

    return torch.compile(run, fullgraph=True, backend="aot_eager")(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "activation"), [("int8_channel", "row"), ("int8_channel", "block"), ("int8_tensor", "row")])
def test_traced_products(traced: list[str], name: str, activation: str) -> None:
    codes, x = hb.quantize(torch.randn(N, K), name), rows(256)
    bias, residual = torch.randn(N), torch.randn(256, N)
    packed = gpu_tiles.pack(codes)
    y = compiled(x, packed, bias=bias, residual=residual, compute="int8", activation=activation, clamp=(-9.0, 9.0))
    assert traced == ["linear_codes"]
    q, scale = row_codes.quantize_rows(x)
    expected = (q.double() * scale.double().unsqueeze(1)) @ codes.dequantize(torch.float64).T + bias + residual
    bound = reference.error_bound(x, codes, bias, "int8", "row", residual=residual)
    assert reference.agrees(y, expected.clamp(-9, 9), bound).all()


@pytest.mark.parametrize(
    ("name", "m", "settings"),
    [
        ("int8_channel", 255, {"activation": "row"}),  # a tile that is not whole
        ("int8_channel", 256, {"activation": "row_offset"}),
        ("int8_channel_zp", 256, {"activation": "row"}),
        ("int8_g128", 256, {"activation": "row"}),
        ("int4_channel", 256, {"activation": "row"}),
        ("int8_channel", 256, {"activation": "row", "compute": "float"}),
    ],
)
def test_others_are_not(name: str, m: int, settings: dict[str, str]) -> None:
    packed = gpu_tiles.pack(hb.quantize(torch.randn(N, K), name))
    asked: list[bool] = []

    def run(x: Tensor) -> Tensor:
        asked.append(row_codes.takes_codes(x, packed, None, None, **{"compute": "int8", **settings}))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_codes, "fused_by_inductor", lambda x: True)
        run(rows(m))
        assert asked == [False]
        asked.clear()
        packed = gpu_tiles.pack(hb.quantize(torch.randn(N, K), "int8_channel"))
        settings = {"activation": "row"}
        run(rows(256))
        assert asked == [True]
        packed = gpu_tiles.pack(hb.quantize(torch.randn(N, K), "int8_channel"), paired=True)
        run(rows(256))
        run(rows(256).requires_grad_())
        assert asked == [True, False, False]
        ordered = ops.in_order(packed)
        assert (ordered.layout, torch.equal(ops.unpack(ordered).data, ops.unpack(packed).data)) == (gpu_tiles.NAME, True)
        assert ops.in_order(ordered) is ordered
        assert ops.in_order(replace(packed, sparse=False)).sparse is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.randn(128, 2 * K)},  # as many numbers as 256 rows have
        {"x": torch.randn(256, K, dtype=torch.float64)},
        {"residual": torch.randn(1, N)},  # of which rows beyond the first would be read
        {"residual": torch.randn(N, 256)},
        {"residual": torch.randn(256, N, dtype=torch.float64)},
        {"bias": torch.randn(N - 1)},
        {"bias": torch.ones(N, dtype=torch.int32)},
    ],
    ids=lambda wrong: ", ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in wrong.items()),
)
def test_operands_that_do_not_fit(wrong: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by `linear`, which checks them: `linear_codes` would read beyond them."""
    monkeypatch.setattr(row_codes, "fused_by_inductor", lambda x: True)
    packed = gpu_tiles.pack(hb.quantize(torch.randn(N, K), "int8_channel"))
    fitting = {"x": rows(256), "bias": torch.randn(N), "residual": torch.randn(256, N)}
    asked = [row_codes.takes_codes(packed=packed, compute="int8", activation="row", **given) for given in (fitting, fitting | wrong)]
    assert asked == [True, False]


def test_gelu_is_visible(traced: list[str]) -> None:
    """The GELU of one product becomes part of the activations of the next one."""
    torch.manual_seed(0)
    first, second = (gpu_tiles.pack(hb.quantize(torch.randn(K, K) / 16, "int8_channel")) for _ in range(2))
    x, seen = rows(256), list[str]()

    def run(x: Tensor) -> Tensor:
        settings = {"compute": "int8", "activation": "row"}
        hidden = ops.linear_gelu(x, first, approximate="tanh", **settings)  # type: ignore[arg-type]
        return ops.linear_geglu(ops.linear(hidden, second, **settings), second, **settings)  # type: ignore[arg-type]

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(run, fullgraph=True, backend=backend)(x)
    assert traced == ["linear_codes"] * 3
    assert not [name for name in seen if name.startswith("halfbyte.") and "linear_codes" not in name]
    assert (sum("sigmoid" in name for name in seen), sum("gelu" in name for name in seen)) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_by_sigmoid(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4097), torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, torch.nan])]).to(dtype)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
    # Some ten float32 roundings of an argument of at most 2 * 12 * 9, whose sigmoid is at most as steep as 1 / 4 and decays with it.
    assert torch.allclose(gelu_tanh(x).double(), exact, rtol=torch.finfo(dtype).eps / 2 + 2**-19, atol=2**-24, equal_nan=True)
