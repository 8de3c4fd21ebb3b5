"""Quantizers: absmax against its definition element by element, mse never worse than it, and what both refuse."""

import math
import sys
from threading import current_thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.quantizers import METHODS, absmax, builder, check, check_finite, mse

SCALES = (torch.float16, torch.bfloat16, torch.float32)
int_formats = st.builds(
    Format,
    st.sampled_from([4, 8]),
    st.sampled_from([1, 5, 32, "channel", "tensor"]),
    st.sampled_from(["none", "point", "offset"]),
    st.sampled_from(SCALES),
)
any_formats = st.one_of(int_formats, st.sampled_from(list(PRESETS.values())))
shapes = st.tuples(st.integers(0, 4), st.integers(0, 70))


@st.composite
def weights(draw: st.DrawFn, magnitudes: tuple[float, ...] = (1, 4e3, 1e-3, 1e-6, 1e-30, 1e-37, 1e-40, 0)) -> torch.Tensor:
    """float32 [N, K]: rows of different kinds and sizes, shifted, sparse or of few distinct values, to make ties."""
    n, k = draw(shapes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    w = rng.standard_normal((n, k))
    for row in w:
        kind = draw(st.integers(0, 4))
        if kind == 1:
            row += 10
        elif kind == 2:
            row[:] = np.round(row * 2) / 2
        elif kind == 3:
            row[rng.random(k) < 0.7] = 0
        elif kind == 4:
            row[:] = np.abs(row) if k % 2 else row[:1]
        row *= draw(st.sampled_from(magnitudes))
    return torch.from_numpy(w.astype(np.float32))


def block_slices(fmt: Format, shape: torch.Size) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """(index of the scale, place of the block) of each block of a weight [N, K]."""
    if fmt.block == "tensor":
        return [((0, 0), (slice(None), slice(None)))]
    size = fmt.block_size(shape[1])
    return [((n, i), (slice(n, n + 1), slice(i * size, i * size + size))) for n in range(shape[0]) for i in range(-(-shape[1] // size))]


def rounded(x: np.float32, dtype: torch.dtype) -> np.float32:
    return np.float32(torch.tensor(x).to(dtype).float().item())


def reference(x: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.float32, np.float32]:
    """Codes, scale and zero of one block x (float32) by the rules of the "int" family: float32 steps in numpy."""
    lo, hi = x.min(), x.max()
    q_max = np.float32(fmt.q_max)
    if fmt.zero == "point":
        lo, hi = min(lo, np.float32(0)), max(hi, np.float32(0))
    with np.errstate(all="ignore"):
        scale = rounded(np.abs(x).max() / q_max if fmt.zero == "none" else (hi - lo) / q_max, fmt.scale)
        inverse = np.float32(1) / scale
        if not np.isfinite(inverse):
            inverse = np.float32(0)
        zero = start = np.float32(0)
        if fmt.zero == "point":
            zero = np.clip(np.rint(-lo * inverse), 0, q_max)
        elif fmt.zero == "offset":
            exact = (hi - lo) / q_max
            vanishes = inverse == 0 and lo < 0 and -lo < exact * q_max
            zero = start = np.float32(0) if vanishes else rounded(lo, fmt.scale)
        q = np.clip(np.rint((x - start) * inverse) + (zero if fmt.zero == "point" else 0), fmt.q_min, fmt.q_max)
    assert q.dtype == np.float32
    return q, scale, zero


@given(weights(), int_formats)
def test_absmax_is_its_definition(w: torch.Tensor, fmt: Format) -> None:
    codes = absmax(w, fmt)
    values = codes.values().numpy()
    if not w.numel():
        return
    for at, place in block_slices(fmt, w.shape):
        q, scale, zero = reference(w[place].numpy(), fmt)
        assert np.array_equal(values[place], q)
        assert codes.scale[at].item() == scale
        if codes.zero is not None:
            assert codes.zero[at].item() == zero


@given(weights(), any_formats, st.sampled_from(SCALES), st.sampled_from(list(METHODS)))
def test_every_weight_gives_codes_that_dequantize_to_finite_values(w: torch.Tensor, fmt: Format, dtype: torch.dtype, method: str) -> None:
    w = w.clamp(-6e4, 6e4).to(dtype)
    codes = METHODS[method](w, fmt)
    assert codes.format == fmt
    assert codes.shape == tuple(w.shape)
    assert torch.isfinite(codes.dequantize(torch.float64)).all()
    # The same numbers in another dtype or other strides are the same weight.
    other = METHODS[method](w.float().T.contiguous().T, fmt)
    assert all(torch.equal(a, b) for a, b in zip(codes.tensors().values(), other.tensors().values(), strict=True))


@given(weights((1, 1e3, 1e-2)))
def test_mxfp4_is_what_the_standard_says(w: torch.Tensor) -> None:
    """OCP Microscaling Formats 1.0, 6.3: a shared power of two, elements rounded to nearest even in their own format, saturated."""
    w = torch.nn.functional.pad(w, (0, -w.shape[-1] % 32)).reshape(-1, 32).double()
    scale = torch.exp2(w.abs().amax(1, keepdim=True).log2().floor() - 2)
    x = torch.where(scale > 0, w.abs() / scale, 0.0)
    step = torch.exp2(x.log2().floor().clamp(min=0) - 1)  # of one bit of mantissa; below 1 they are as far apart as above
    rounded = torch.where(scale > 0, torch.round(x / step).mul(step).clamp(max=6) * scale * w.sign(), 0.0)
    assert torch.equal(absmax(w.float(), as_format("mxfp4")).dequantize(torch.float64), rounded)


@given(weights((1, 1e3, 1e-2)), st.sampled_from(["nvfp4", "fp4_g20_f32", "iq4_g32_f32", "iq4_channel"]))
def test_each_weight_goes_to_the_nearest_of_a_table(w: torch.Tensor, name: str) -> None:
    fmt = as_format(name)
    codes = absmax(w, fmt)
    steps = torch.tensor(fmt.codebook).double() * codes.spread(codes.scale.double()).unsqueeze(-1)
    nearest = (steps - w.double().unsqueeze(-1)).abs().amin(-1)
    # 2^-20: x * (1 / scale) in float32, below 2^7.
    assert ((codes.dequantize(torch.float64) - w).abs() <= nearest + 2.0**-16 * codes.spread(codes.scale.double()).abs()).all()


@given(weights((1, 1e3, 1e-2)), int_formats)
def test_the_error_of_absmax_is_half_a_step(w: torch.Tensor, fmt: Format) -> None:
    if not w.numel():
        return
    codes = absmax(w, fmt)
    weight = codes.dequantize(torch.float64)
    unit = torch.finfo(fmt.scale).eps / 2
    for at, place in block_slices(fmt, w.shape):
        x, step = w[place].double(), float(codes.scale[at])
        # Half a step; the ends of the grid move by the rounding of the scale (and of the offset), which codes are clamped to;
        # a rounded point moves the whole grid by half a step more. 2^-20: the float32 steps of x * (1 / scale), whose codes are
        # below 2^8. Scales that are subnormal in float16 have an absolute error, 2^-25, that counts q_max - q_min times.
        bound = step * (0.5 + 2**-14 + (0.5 if fmt.zero == "point" else 0)) + 2 * unit * float(x.abs().max() + x.max() - x.min())
        bound += (fmt.q_max - fmt.q_min + 1) * 2**-25 if fmt.scale == torch.float16 else 0
        assert (weight[place] - x).abs().max() <= bound


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", [*PRESETS, "int4_g32", "int4_g7_zp", "int8_channel_offset", "int8_tensor", "int4_tensor_zp", "int8_tensor_offset"]
)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1e-7, 2**-149])
def test_constant_blocks(method: str, name: str, value: float) -> None:
    fmt = as_format(name)
    w = torch.full((3, 64), value)
    codes = METHODS[method](w, fmt)
    weight = codes.dequantize(torch.float64)
    assert torch.isfinite(weight).all()
    if value == 0:
        assert not weight.any()
    elif fmt.zero == "offset":
        assert (weight == float(torch.tensor(value).to(fmt.scale))).all()
    elif abs(value) >= 1:
        # One code of the largest magnitude: the constant, but for the rounding of the scale and the float32 division.
        assert (weight - value).abs().max() <= abs(value) * (torch.finfo(fmt.scale).eps / 2 + 2**-23)
    else:  # a scale that may be subnormal: it is off by 2^-25 (float16) or 2^-150 (float32) at most, times the code
        assert (weight - value).abs().max() <= abs(value) * 2**-11 + (128 * 2**-25 if fmt.scale == torch.float16 else 128 * 2**-150)


@given(weights(), st.sampled_from([4, 8]), st.sampled_from([3, 32, "channel", "tensor"]))
def test_zero_is_exact_in_formats_with_a_point(w: torch.Tensor, bits: int, block: int) -> None:
    weight = absmax(w, Format(bits, block, "point")).dequantize()
    assert not weight[w == 0].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "int4_g4_zp", "int8_channel", "int8_tensor", "int4_tensor_offset", "int4_g5"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 0, 4), (2, 3, 35), (7,), (0,)])
def test_any_number_of_dimensions_and_no_elements(method: str, name: str, shape: tuple[int, ...]) -> None:
    w = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    codes = METHODS[method](w, as_format(name))
    assert codes.shape == shape
    assert codes.dequantize().shape == shape
    if w.dim() == 3:  # leading dimensions are rows like any other
        flat = METHODS[method](w.reshape(-1, shape[-1]), as_format(name))
        assert torch.equal(codes.data.reshape(flat.data.shape), flat.data)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["q4_0", "int4_g24_zp", "int8_tensor", "int4_tensor_offset", "int8_channel_offset"])
def test_the_pieces_that_a_weight_is_walked_in_do_not_show(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 101, generator=torch.Generator().manual_seed(0))
    whole = METHODS[method](w, as_format(name))
    monkeypatch.setattr(builder, "_CHUNK", 250)
    pieces = METHODS[method](w, as_format(name))
    if method == "absmax" or pieces.format.block != "tensor":
        assert all(torch.equal(a, b) for a, b in zip(whole.tensors().values(), pieces.tensors().values(), strict=True))
    else:  # sums of errors over the pieces are rounded in another order
        assert torch.allclose(whole.dequantize(), pieces.dequantize(), atol=float(whole.scale.float().max()))


@pytest.mark.parametrize("method", ["mse", "hqq"])
def test_pieces_have_threads_of_their_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 101, generator=torch.Generator().manual_seed(0), requires_grad=True)
    monkeypatch.setattr(builder, "_CHUNK", 250)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = METHODS[method](w, as_format("int4_g24"))
        torch.set_num_threads(3)
        seen = set()
        place = sys.modules[METHODS[method].__module__]
        search = vars(place)["_search"]
        monkeypatch.setattr(place, "_search", lambda *args: (seen.add((current_thread(), torch.get_num_threads())), search(*args))[1])
        codes = METHODS[method](w, as_format("int4_g24"))
        assert len(seen) > 3
        assert {threads for thread, threads in seen if thread is not current_thread()} == {1}
        assert torch.get_num_threads() == 3
        assert all(torch.equal(a, b) for a, b in zip(alone.tensors().values(), codes.tensors().values(), strict=True))
        with pytest.raises(FormatError, match=r"w: the scale of row 20, block 2 is"), torch.no_grad():
            METHODS[method](w.index_put((torch.tensor(20), torch.tensor(50)), torch.tensor(3e9)), as_format("int4_g24"), "w")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_and_the_weight_itself_are_left_alone(method: str) -> None:
    w = torch.randn(4, 64, requires_grad=True)
    before = w.detach().clone()
    codes = METHODS[method](w, as_format("int4_g32_zp"))
    assert not codes.scale.requires_grad
    assert torch.equal(w.detach(), before)


# mse


def block_errors(codes: Codes, w: torch.Tensor) -> list[float]:
    """Squared error of each block, each summed exactly enough: float64."""
    square = (codes.dequantize(torch.float64) - w.double()).square()
    return [float(square[place].sum()) for _, place in block_slices(codes.format, w.shape)] if w.numel() else []


@given(weights(), any_formats)
def test_mse_is_never_worse_than_absmax(w: torch.Tensor, fmt: Format) -> None:
    plain, best = block_errors(absmax(w, fmt), w), block_errors(mse(w, fmt), w)
    # 2^-45: float64 sums of up to 280 terms, here and in the quantizer.
    assert all(b <= a * (1 + 2**-45) for a, b in zip(plain, best, strict=True))


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("q4_0", 0.92),
        ("q4_1", 0.86),
        ("q8_0", 0.97),
        ("int4_g128", 0.78),
        ("int4_g128_zp", 0.93),
        ("int4_g128_offset", 0.88),
        ("int4_channel", 0.62),
        ("int4_tensor", 0.4),
    ],
)
def test_mse_gains_on_normal_weights(name: str, ratio: float) -> None:
    w = torch.randn(128, 1024, generator=torch.Generator().manual_seed(1))
    fmt = as_format(name)
    assert sum(block_errors(mse(w, fmt), w)) <= ratio * sum(block_errors(absmax(w, fmt), w))


@pytest.mark.parametrize("name", ["int4_g128", "int4_channel", "int8_tensor", "inferllm_q4_0"])
def test_mse_finds_nearly_the_best_scale(name: str) -> None:
    fmt = as_format(name)
    w = torch.randn(16, 512, generator=torch.Generator().manual_seed(2))
    x = w.reshape(-1, w.numel() if fmt.block == "tensor" else fmt.block_size(512)).double()
    best = torch.full((len(x),), math.inf, dtype=torch.float64)
    for factor in np.linspace(0.3, 1.02, 1000):
        scale = (x.abs().amax(-1, keepdim=True) * factor / fmt.q_max).to(fmt.scale).double()
        error = ((x / scale).round().clamp(fmt.q_min, fmt.q_max) * scale - x).square().sum(-1)
        best = torch.minimum(best, error)
    # A thousand scales against a dozen and three refits, which may end in a neighbouring minimum.
    assert sum(block_errors(mse(w, fmt), w)) <= 1.05 * float(best.sum())


def correlated(tokens: int, k: int) -> torch.Tensor:
    """Inputs with a common direction, whose channels differ in size."""
    rng = torch.Generator().manual_seed(3)
    return (torch.randn(tokens, k, generator=rng) + torch.randn(k, generator=rng)) * torch.rand(k, generator=rng).add(0.1)


@pytest.mark.parametrize("name", ["int4_g24", "q4_0", "int4_g32_zp", "q4_1", "int8_g32_offset", "int4_channel", "int4_g1"])
def test_mse_by_the_moments_of_the_inputs_lowers_the_error_of_each_blocks_outputs(name: str) -> None:
    x, w, fmt = correlated(300, 80), torch.randn(16, 80, generator=torch.Generator().manual_seed(4)), as_format(name)

    def output_errors(codes: Codes) -> torch.Tensor:
        d, size = codes.dequantize(torch.float64) - w.double(), fmt.block_size(80)
        parts = [x[:, i : i + size].double() @ d[:, i : i + size].T for i in range(0, 80, size)]
        return torch.stack([part.square().sum(0) for part in parts])  # [blocks, rows]

    plain, blind, found = (output_errors(codes) for codes in (absmax(w, fmt), mse(w, fmt), mse(w, fmt, "w", x.T @ x)))
    # The quantizer has the moments in float32: 2^-24 of the sum of magnitudes, of which cancellation leaves less than all.
    assert bool((found <= plain * (1 + 2**-12) + 1e-6 * plain.max()).all())
    assert float(found.sum()) <= (1 if name == "int4_g1" else 0.97) * float(blind.sum())


def test_mse_by_moments_that_say_nothing_is_mse() -> None:
    w = torch.randn(8, 80, generator=torch.Generator().manual_seed(5))
    for name in ("int4_g32", "int4_g32_zp", "int4_tensor", "int8_channel"):
        codes = [mse(w, as_format(name), "w", moments) for moments in (None, torch.eye(80), torch.ones(80), 4 * torch.eye(80))]
        for other in codes[1:]:  # sums may be rounded in another order: scales of equal worth
            assert torch.allclose(codes[0].dequantize(), other.dequantize(), atol=float(codes[0].scale.max()))
            assert sum(block_errors(other, w)) == pytest.approx(sum(block_errors(codes[0], w)), rel=1e-4)


def test_a_column_that_counts_for_nothing_may_be_clipped() -> None:
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(6))
    w[:, 7] = 10
    counts = torch.ones(32)
    counts[7] = 0
    fmt = as_format("int4_channel")
    others = torch.arange(32) != 7
    error = (mse(w, fmt, "w", counts).dequantize() - w)[:, others].square().sum()
    assert float(error) < 0.2 * float((mse(w, fmt).dequantize() - w)[:, others].square().sum())


wide_formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([5, 32, "channel"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from([torch.bfloat16, torch.float32]),
    ),
    st.sampled_from([as_format(name) for name in ("mxfp4", "nvfp4", "iq4_g32_f32", "int5_g32_offset_f32", "int6_g16_bf16")]),
)


@given(wide_formats, st.sampled_from(list(METHODS)), st.integers(0, 99), st.lists(st.integers(-112, 118), min_size=3, max_size=3))
def test_scales_of_the_same_weights_in_other_powers_of_two_are_the_same(fmt: Format, method: str, seed: int, powers: list[int]) -> None:
    """Rows times 2^p, from near the smallest scale with a reciprocal to near the largest float32: nothing is rounded by that."""
    rng = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 64, generator=rng) * torch.where(torch.rand(3, 64, generator=rng) < 0.05, 3, 1) + seed % 3
    factors = torch.tensor(powers, dtype=torch.float64).exp2().unsqueeze(-1)
    codes, scaled = METHODS[method](w, fmt, "w"), METHODS[method]((w * factors).float(), fmt, "w")
    assert torch.equal(codes.values(), scaled.values())
    assert torch.equal(codes.scale * factors, scaled.scale.double())
    if codes.zero is not None and scaled.zero is not None:
        assert torch.equal(codes.zero * (factors if fmt.zero == "offset" else 1), scaled.zero.double())


@pytest.mark.parametrize("power", [-105, 115])
def test_moments_count_the_same_times_any_positive_number(power: int) -> None:
    x, w = correlated(100, 64), torch.randn(8, 64, generator=torch.Generator().manual_seed(8))
    for moments in (x.T @ x, (x.T @ x).diagonal()):
        for name in ("int4_g32_f32", "int4_g32_offset_f32", "int4_channel"):
            one, other = (mse(w, as_format(name), "w", moments * factor) for factor in (1, 2.0**power))
            assert torch.equal(one.data, other.data)
            assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize(("shape", "value"), [((32,), math.nan), ((31, 31), 1.0), ((31,), 1.0), ((32, 32), math.inf), ((4, 32), 1.0)])
def test_moments_that_do_not_fit_are_refused(shape: tuple[int, ...], value: float) -> None:
    with pytest.raises(ArgumentError, match=r"the input moments of fc"):
        mse(torch.randn(4, 32), as_format("q4_0"), "fc", torch.full(shape, value))


def test_mse_may_turn_the_sign_of_a_q4_0_block() -> None:
    w = torch.tensor([[-8.001, *range(-7, 8), *[8] * 16]])  # -8.001 decides absmax's sign, and costs sixteen 8s that become 7s
    fmt = as_format("q4_0")
    assert absmax(w, fmt).scale.item() > 0
    assert mse(w, fmt).scale.item() < 0


# What is refused


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["q4_0", "q4_1", "q8_0", "int4_g32", "int8_channel_zp", "int8_tensor_offset", "int4_tensor", "mxfp4", "nvfp4", "iq4_nl"]
)
def test_not_a_number_is_named_with_its_place(value: float, dtype: torch.dtype, method: str, name: str) -> None:
    w = torch.randn(3, 5, 64).to(dtype)
    w[1, 2, 33] = value
    w[2, 0, 0] = math.nan
    with pytest.raises(ArgumentError, match=r"^layers\.3\.weight .*2 NaN or infinite values, the first \(.*\) at \[1, 2, 33\]") as error:
        METHODS[method](w, as_format(name), "layers.3.weight")
    assert f"({value})" in str(error.value)


def test_check_finite_finds_the_first_in_a_later_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_CHUNK", 100)
    w = torch.zeros(10, 37)
    check_finite(w, "w")
    check_finite(torch.full((3, 3), torch.finfo(torch.float32).max), "w")
    check_finite(torch.zeros(0, 4), "w")
    check_finite(torch.tensor(1.0), "w")
    w[7, 3] = math.inf
    with pytest.raises(ArgumentError, match=r"w \[10, 37\] holds 1 NaN or infinite value, the first \(inf\) at \[7, 3\]"):
        check_finite(w, "w")
    with pytest.raises(ArgumentError, match=r"at \[3, 7\]"):
        check_finite(w.T, "w")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "int4_g32", "int8_g32_zp", "int8_g32_offset"])
def test_a_scale_that_overflows_is_named_with_its_place_and_a_remedy(method: str, name: str) -> None:
    w = torch.randn(4, 96)
    w[2, 40] = 3e9
    message = r"^fc\.weight: the scale of row 2, block 1 is .*65504: use bfloat16 or float32 scales, for example \S+$"
    with pytest.raises(FormatError, match=message) as error:
        METHODS[method](w, as_format(name), "fc.weight")
    remedy = str(error.value).split()[-1]
    assert torch.isfinite(METHODS[method](w, as_format(remedy)).dequantize()).all()


def test_an_offset_that_overflows_is_named_with_its_place() -> None:
    w = torch.randn(4, 96) - 1e5
    with pytest.raises(FormatError, match=r"^weight: the offset of row 0, block 0 is -1000\d\d.*int8_g32_offset_bf16$"):
        absmax(w, as_format("int8_g32_offset"))


def test_a_range_that_overflows_float32_is_refused() -> None:
    w = torch.tensor([[3e38, -3e38]])
    with pytest.raises(FormatError, match=r"whole tensor is inf.*smaller factor"):
        absmax(w, as_format("int8_tensor_offset"))
    assert torch.isfinite(absmax(w, as_format("int8_tensor")).dequantize()).all()


def test_weights_near_the_largest_float32_are_refused_or_on_a_grid_that_holds_them() -> None:
    """Never on one that clips the largest weights by half, since that does not overflow."""
    w = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    w = w / w.abs().max() * torch.finfo(torch.float32).max
    for method in ("absmax", "hqq"):
        with pytest.raises(FormatError, match="largest float32"):
            hb.quantize(w, "int8_tensor", method)
    codes = hb.quantize(w, "int8_tensor", "mse")
    assert codes.dequantize().isfinite().all()
    # One step: half by rounding, and the search may move the ends of the grid by less than another half, or clipping would cost more.
    assert float((codes.dequantize(torch.float64) - w.double()).abs().max()) <= float(codes.scale)


@pytest.mark.parametrize("method", METHODS)
def test_other_dtypes_and_scalars_are_refused(method: str) -> None:
    with pytest.raises(ArgumentError, match=r"^w is torch\.float64.*\.float\(\)"):
        METHODS[method](torch.zeros(2, 32, dtype=torch.float64), as_format("q4_0"), "w")
    with pytest.raises(ArgumentError, match=r"^w is torch\.int8"):
        METHODS[method](torch.zeros(2, 32, dtype=torch.int8), as_format("q4_0"), "w")
    with pytest.raises(ArgumentError, match="no dimensions"):
        METHODS[method](torch.tensor(1.0), as_format("q4_0"))
