"""Kernels on weights alone: dequantize, embedding rows, and quantize, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_codes
from support import RUNNABLE, examples
from torch import Tensor

from halfbyte.errors import HalfbyteError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.quantize import dequantize as dequantize_module
from halfbyte.kernels.cpu.quantize import quantize as quantize_module
from halfbyte.kernels.cpu.quantize.dequantize import dequantize
from halfbyte.kernels.cpu.quantize.quantize import quantize, supports
from halfbyte.layouts.cpu_tiles import geometry, pack
from halfbyte.quantizers.absmax import absmax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
blocks = st.sampled_from([1, 20, 32, 33, 64, 300, "channel", "tensor"])
formats = st.builds(Format, st.sampled_from([4, 8]), blocks, st.sampled_from(["none", "point", "offset"]), st.sampled_from(SCALES))
isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)


@pytest.fixture(autouse=True)
def _shared_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads share even the smallest weight, and new memory is full of NaN (or of 0x25)."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        memory = empty(*args, **kwargs)
        return memory.fill_(torch.nan if memory.is_floating_point() else 0x25)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(runtime, "threads", lambda: 2)
    monkeypatch.setattr(dequantize_module, "_ELEMENTS_A_THREAD", 1)
    monkeypatch.setattr(quantize_module, "_ELEMENTS_A_THREAD", 1)


def use(isa: ISA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@isas
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(isa: ISA, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use(isa, monkeypatch)

    @settings(max_examples=examples(isa, 40))
    @given(formats, st.integers(1, 70), st.integers(1, 330), st.lists(st.integers(0, 10**6), max_size=10), st.integers(0, 2**16))
    def sweep(fmt: Format, n: int, k: int, picks: list[int], seed: int) -> None:
        codes = random_codes(fmt, (n, k), seed)
        geo, data = geometry(fmt, (n, k)), pack(codes).data
        # One fused multiply-add in float32 is what float64 rounds to float32 (but for the rare sum that is inexact in float64 too).
        wanted = codes.dequantize(torch.float32).to(dtype)
        assert torch.equal(dequantize(data, geo, dtype), wanted)
        ids = torch.tensor(picks, dtype=torch.int64) % n
        assert torch.equal(dequantize(data, geo, dtype, ids), wanted[ids])

    sweep()


def test_one_rounding_where_there_is_no_offset() -> None:
    for name in ("int4_g32", "int8_g32_zp", "int8_channel_bf16"):
        codes = random_codes(as_format(name), (65, 70))
        for dtype in DTYPES:
            assert torch.equal(dequantize(pack(codes).data, geometry(codes.format, codes.shape), dtype), codes.dequantize(dtype))


@isas
def test_one_rounding_where_there_is_an_offset(isa: ISA, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2^-24 + 2^-54 is nearest to 1 + 2^-23; float64 rounds it to the middle between that and 1 first."""
    use(isa, monkeypatch)
    fmt = as_format("int8_g32_offset_f32")
    codes = Codes(fmt, (1, 32), torch.full((1, 32), 130, dtype=torch.uint8), torch.full((1, 1), 16519105 * 2.0**-55), torch.ones(1, 1))
    assert (2**31 + 2) == 130 * 16519105
    assert torch.equal(dequantize(pack(codes).data, geometry(fmt, (1, 32)), torch.float32), torch.full((1, 32), 1 + 2.0**-23))
    assert torch.equal(codes.dequantize(torch.float32), torch.ones(1, 32))


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """[..., N, K] of ordinary numbers, with blocks of zeros, of one number, of huge, tiny, subnormal and tied ones; perhaps strided."""
    n, k, lead = draw(st.integers(1, 6)), draw(st.integers(1, 200)), draw(st.sampled_from([(), (2,)]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    w = torch.randn(*lead, n, k, generator=rng)
    for _ in range(draw(st.integers(0, 4))):
        start, size = draw(st.integers(0, k - 1)), draw(st.integers(1, 80))
        part = w[..., draw(st.integers(0, n - 1)), start : start + size]
        value = draw(st.sampled_from([0.0, -0.0, 1.0, -3.5, 1e-45, 1e-39, 1e-37, 1e-7, 0.5, 60000.0]))
        part[...] = value if draw(st.booleans()) else torch.randint(-8, 9, part.shape, generator=rng) * value
    w = w.to(draw(st.sampled_from(DTYPES)))
    stride = draw(st.sampled_from([0, 5]))
    wide = torch.full((*w.shape[:-1], k + stride), torch.nan, dtype=w.dtype)
    wide[..., :k] = w
    return wide[..., :k]


small_formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 20, 32, 33, 64, "channel"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from(SCALES),
    ),
    st.sampled_from(list(PRESETS.values())),
)


@isas
def test_quantize_is_absmax(isa: ISA, monkeypatch: pytest.MonkeyPatch) -> None:
    use(isa, monkeypatch)

    @settings(max_examples=examples(isa, 200))
    @given(small_formats, weights())
    def sweep(fmt: Format, weight: Tensor) -> None:
        if reason := supports(weight, fmt):
            assert reason == "generic has no instruction that rounds to float16"
            return
        got = quantize(weight, fmt)
        try:
            wanted = absmax(weight, fmt)
        except HalfbyteError:  # a value or a scale that is not finite
            assert got is None
            return
        assert isinstance(got, Codes)
        assert (got.format, got.shape) == (wanted.format, wanted.shape)
        for name, tensor in wanted.tensors().items():
            assert bits_equal(got.tensors()[name], tensor), name

    sweep()


@isas
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "int4_g20_zp_f32", "int8_channel_offset", "inferllm_q4_0", "int4_g64_bf16"])
def test_what_is_not_finite_is_left_to_the_slow_path(isa: ISA, name: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use(isa, monkeypatch)
    for row, column in ((0, 0), (4, 70), (2, 64)):
        weight = torch.randn(5, 71)
        weight[row, column] = bad
        if supports(weight, as_format(name)) is None:
            assert quantize(weight, as_format(name)) is None


def test_a_scale_that_overflows_is_left_to_the_slow_path() -> None:
    for name in ("q4_0", "int8_g32", "int4_g32_zp", "int4_g32_offset"):
        weight = torch.randn(3, 64)
        weight[1, 40] = 1e8
        if supports(weight, as_format(name)) is None:
            assert quantize(weight, as_format(name)) is None
            weight[1, 40] = 1e5
            assert quantize(weight, as_format(name)) is not None or name == "int4_g32_offset"


def test_what_it_does_not_support() -> None:
    assert supports(torch.zeros(2, 3), as_format("int4_tensor")) == "one scale for a whole tensor takes two passes over it"
    assert supports(torch.zeros(2, 3, dtype=torch.float64), as_format("q4_0")) == "it takes float32, bfloat16 or float16, not torch.float64"
    assert supports(torch.zeros(2, 3, dtype=torch.int8), as_format("q4_0")) == "it takes float32, bfloat16 or float16, not torch.int8"
    assert supports(torch.zeros(2, 3, device="meta"), as_format("q4_0")) == "the weight is not on the CPU"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3)])
def test_empty_weights(shape: tuple[int, ...]) -> None:
    for name in ("q4_0", "int8_channel_zp_f32"):
        fmt = as_format(name)
        if supports(torch.zeros(shape), fmt) is None:
            got, wanted = quantize(torch.zeros(shape), fmt).tensors(), absmax(torch.zeros(shape), fmt).tensors()
            assert {name: t.shape for name, t in got.items()} == {name: t.shape for name, t in wanted.items()}
