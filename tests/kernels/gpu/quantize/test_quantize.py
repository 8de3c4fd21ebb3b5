"""Weights quantized and dequantized on the GPU: the codes of `quantizers.absmax`, and the values of the codes, bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from samples import random_codes
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.formats import Codes, as_format
from halfbyte.kernels.gpu.quantize import dequantize, quantize
from halfbyte.layouts import gpu_tiles
from halfbyte.quantizers.absmax import absmax

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = (
    "q4_0", "q4_1", "q8_0", "inferllm_q4_0", "inferllm_q8_0", "int4_g32", "int4_g20_zp", "int4_g128_offset", "int8_g33_offset",
    "int8_g64_zp_f32", "int8_channel_offset", "int4_channel", "int8_channel_zp", "int4_g128_bf16",
    "int8_g16", "int4_g12_zp",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of what is meant here: infinities and NaN."""
    with np.errstate(all="ignore"):
        yield


def weights(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Large and small values, zeros of both signs, ties, equal extremes of both signs, and values near the ends of the type."""
    rng = torch.Generator().manual_seed(n + k)
    w = torch.randn(n, k, generator=rng) * 10 ** torch.randn(n, k, generator=rng).clamp(-3, 1)
    w[torch.rand(n, k, generator=rng) < 0.2] = -0.0
    w[0] = (torch.arange(k) % 15 - 7) * 0.5
    w[1] = torch.where(torch.arange(k) % 2 == 0, 3.0, -3.0)
    w[2] = 0
    w[3] *= 1e-7
    w[4] = -w[4].abs()
    # The reciprocals of scales overflow. None is subnormal, of which Triton's interpreter converts those of bfloat16 wrongly.
    w[5:7] = (torch.rand(2, k, generator=rng) + 0.2) * 1e-37
    w[5, ::2] *= -1
    return w.to(dtype)


def same(a: Codes, b: Codes) -> bool:
    pairs = [(t.cpu(), b.tensors()[name].cpu()) for name, t in a.tensors().items()]
    return a.shape == b.shape and all(torch.equal(s, t) and s.dtype == t.dtype for s, t in pairs)


def _skip_bfloat16(dtype: torch.dtype, interpreted: bool) -> None:
    if interpreted and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates where it should round to bfloat16")


@pytest.mark.parametrize("name", FORMATS)
def test_codes(name: str, device: torch.device, interpreted: bool) -> None:
    fmt = as_format(name)
    _skip_bfloat16(fmt.scale, interpreted)
    for dtype, k in zip(DTYPES, (300, 129, 32), strict=True):
        w = weights(9, k, dtype)
        if reason := quantize.supports(w.to(device), fmt):
            assert "two blocks" in reason
            continue
        codes = quantize.quantize(w.to(device), fmt)
        assert codes is not None
        assert same(codes, absmax(w, fmt))


def test_strides_leading_dimensions_and_nothing(device: torch.device) -> None:
    fmt = as_format("int4_g32_zp")
    w = torch.randn(5, 64, 6).to(device).mT
    codes = quantize.quantize(w, fmt)
    assert codes is not None
    assert same(codes, absmax(w.cpu(), fmt))
    for shape in ((0, 8), (3, 0)):
        codes = quantize.quantize(torch.empty(shape, device=device), fmt)
        assert codes is not None
        assert codes.shape == shape


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_can_not_be_quantized_is_seen(value: float, device: torch.device) -> None:
    w = torch.randn(5, 100)
    w[3, 77] = value
    for name in ("int4_g32", "q4_1", "int8_channel_f16"):
        assert quantize.quantize(w.to(device), as_format(name)) is None


def test_refusals() -> None:
    w = torch.empty(2, 100)
    assert "two blocks" in str(quantize.supports(w, as_format("int4_g33")))
    assert "two passes" in str(quantize.supports(w, as_format("int4_tensor")))
    assert "float64" in str(quantize.supports(w.double(), as_format("q4_0")))
    assert "32768" in str(quantize.supports(torch.empty(1, 40000), as_format("int8_channel")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "int8_g200_offset", "int4_g384_zp", "int4_tensor", "int8_tensor_offset"])
def test_values(name: str, dtype: torch.dtype, device: torch.device, interpreted: bool) -> None:
    _skip_bfloat16(dtype, interpreted)
    codes = random_codes(as_format(name), (70, 300))
    data, geo = gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(codes.format, codes.shape)
    out = torch.full(codes.shape, torch.nan, dtype=dtype, device=device)
    wanted = codes.dequantize(dtype)
    assert torch.equal(dequantize.dequantize(data, geo, dtype, out).cpu(), wanted)
    ids = torch.tensor([69, 0, 17, 17, 63, 64], dtype=torch.int32 if dtype == torch.float32 else torch.int64)
    assert torch.equal(dequantize.embedding(ids.to(device), data, geo, dtype).cpu(), wanted[ids.long()])


def test_a_row_that_is_not_there_is_nan(device: torch.device) -> None:
    codes = random_codes(as_format("q4_0"), (10, 64))
    data, geo = gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(codes.format, codes.shape)
    y = dequantize.embedding(torch.tensor([3, 10, -1]).to(device), data, geo, torch.float32)
    assert torch.isnan(y).all(dim=1).tolist() == [False, True, True]
    assert dequantize.embedding(torch.empty(0, dtype=torch.int64, device=device), data, geo, torch.float32).shape == (0, 64)


def test_sums_of_4_bit_floats_are_refused(device: torch.device) -> None:
    geo = gpu_tiles.geometry(as_format("nvfp4"), (64, 128))
    views = gpu_tiles.views(torch.zeros(geo.nbytes, dtype=torch.uint8, device=device), geo)
    with pytest.raises(KernelError, match="integer codes, got nvfp4"):
        dequantize.write_sums(views, geo, 16, (16, 16), torch.empty(8, 64, device=device))
