"""The ground truth itself: against plain real-number definitions, and against float32 arithmetic done in the ways that kernels do it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import ArgumentError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.problem import Problem
from halfbyte.quantizers import absmax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("block", "row", "block_offset", "row_offset")
formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 5, 32, "channel", "tensor"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from(DTYPES),
    ),
    st.sampled_from(list(PRESETS.values())),
)
sizes = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 70))
activations = st.sampled_from(ACTIVATIONS)
seeds = st.integers(0, 2**32)


def random_rows(m: int, k: int, seed: int) -> torch.Tensor:
    """Rows of different sizes, some shifted, some sparse."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * rng.choice([1e-3, 1, 50], (m, 1)) + rng.choice([0, 0, 3], (m, 1))
    x[rng.random((m, k)) < 0.1] = 0
    return torch.from_numpy(x.astype(np.float32))


# Activations


def test_spans() -> None:
    assert reference.spans(0, 32) == []
    assert reference.spans(70, 32) == [(0, 32), (32, 64), (64, 70)]
    assert reference.spans(70000, 70000) == [(0, 32768), (32768, 65536), (65536, 70000)]
    assert reference.spans(70000, 40000) == [(0, 20000), (20000, 40000), (40000, 60000), (60000, 70000)]


def scalar_steps(x: np.ndarray, with_offset: bool) -> tuple[list[int], np.float32, np.float32]:
    """The definition of one block, with numpy's float32 scalars and Python's exact fractions."""
    f = np.float32
    with np.errstate(all="ignore"):
        offset = f(f(x.min() + x.max()) * f(0.5)) if with_offset else f(0)
        reach = f(f(x.max() - x.min()) * f(0.5)) if with_offset else np.abs(x).max()
        scale, inverse = f(reach * f(1 / 127)), f(127) / reach
    if not np.isfinite(inverse):
        inverse = f(0)
    q = [round(Fraction(float(f(v - offset))) * Fraction(float(inverse))) for v in x]  # round() of a Fraction: ties to even
    return [max(-127, min(127, v)) for v in q], scale, offset


# The largest factor leaves the sum of two activations finite: 300 is more than any of random_rows.
@given(sizes, st.sampled_from([1, 3, 32, 70]), activations, seeds, st.sampled_from([1.0, 1e-30, 1e-37, 1e-42, 3e38 / 2 / 300, 0.0]))
def test_activations_are_quantized_by_their_definition(
    size: tuple[int, int, int], block: int, activation: str, seed: int, factor: float
) -> None:
    x = random_rows(size[0], size[2], seed)
    if seed % 3 == 0:
        x = x.round(decimals=1)  # ties of magnitude and of rounding
    x = x * factor
    xq = reference.quantize_activation(x, block, activation)
    cuts = reference.spans(size[2], block)
    parts = [(0, size[2])] if activation.startswith("row") else cuts
    assert xq.scale.shape == xq.offset.shape == (size[0], len(parts))
    assert xq.sums.shape == (size[0], len(cuts))
    for m in range(size[0]):
        for i, (start, end) in enumerate(parts):
            if start < end:
                q, scale, offset = scalar_steps(x[m, start:end].numpy(), activation.endswith("offset"))
                assert xq.q[m, start:end].tolist() == q
                assert (xq.scale[m, i].item(), xq.offset[m, i].item()) == (scale, offset)
        assert xq.sums[m].tolist() == [sum(xq.q[m, start:end].tolist()) for start, end in cuts]


@given(sizes, activations, seeds)
def test_quantized_activations_are_half_a_step_off(size: tuple[int, int, int], activation: str, seed: int) -> None:
    x = random_rows(size[0], size[2], seed)
    xq = reference.quantize_activation(x, 70, activation)
    back = xq.scale.double() * xq.q + xq.offset.double()
    # Half a step, and the float32 roundings of scale, inverse and x - offset: 4 u of a reach of 127 steps.
    assert ((back - x).abs() <= xq.scale * (0.5 + 127 * 4 * 2.0**-24) + xq.offset.abs() * 2.0**-23).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_activation_makes_its_own_scale_nan(activation: str, bad: float) -> None:
    x = torch.randn(3, 64)
    clean = reference.quantize_activation(x, 32, activation)
    x[1, 40] = bad
    xq = reference.quantize_activation(x, 32, activation)
    wrong = torch.zeros_like(clean.scale, dtype=torch.bool)
    wrong[1, -1] = True
    assert torch.equal(xq.scale.isnan(), wrong)
    assert torch.equal(xq.scale[~wrong], clean.scale[~wrong])
    assert torch.equal(xq.q[[0, 2]], clean.q[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_any_dtype_are_their_float32_values(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40).to(dtype)
    a, b = (reference.quantize_activation(t, 32, "block_offset") for t in (x, x.float()))
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.scale, b.scale)


# linear


@given(sizes, formats, activations, seeds)
def test_the_four_terms_are_the_product_of_what_both_sides_stand_for(
    size: tuple[int, int, int], fmt: Format, activation: str, seed: int
) -> None:
    m, n, k = size
    x, codes = random_rows(m, k, seed), random_codes(fmt, (n, k), seed % 1000)
    y = reference.linear(x, codes, None, "int8", activation)
    assert y.shape == (m, n)
    assert y.dtype == torch.float64
    xq = reference.quantize_activation(x, fmt.block_size(k), activation)
    if xq.scale.shape[1] > 1:
        at = torch.tensor([i for i, (start, end) in enumerate(reference.spans(k, fmt.block_size(k))) for _ in range(start, end)])
        scale, offset = xq.scale[:, at], xq.offset[:, at]
    else:
        scale, offset = (t.expand(m, k) if t.numel() else t.new_zeros(m, k) for t in (xq.scale, xq.offset))
    x_back, w = scale.double() * xq.q + offset.double(), codes.dequantize(torch.float64)
    # float64 rounding of at most 4 terms for each k, of which the largest is below (|scale q| + |offset|) (|scale q| + |zero|).
    w_size = codes.spread(codes.scale.double().abs()) * (codes.values().double().abs() + 255)
    if fmt.zero == "offset" and codes.zero is not None:
        w_size = w_size + codes.spread(codes.zero.double().abs())
    x_size = scale.double() * xq.q.abs() + offset.double().abs()
    assert ((y - x_back @ w.T).abs() <= (4 * k + 8) * 2.0**-52 * (x_size @ w_size.T) + 1e-300).all()


@given(sizes, formats, seeds)
def test_float_is_the_product_with_the_dequantized_weight(size: tuple[int, int, int], fmt: Format, seed: int) -> None:
    m, n, k = size
    x, codes, bias = random_rows(m, k, seed), random_codes(fmt, (n, k), seed % 1000), torch.randn(n)
    y = reference.linear(x, codes, bias)
    w = codes.dequantize(torch.float64)
    for i in range(m):
        for j in range(n):
            terms = [float(a) * float(b) for a, b in zip(x[i].tolist(), w[j].tolist(), strict=True)] + [float(bias[j])]
            assert float(y[i, j]) == pytest.approx(math.fsum(terms), rel=0, abs=(k + 2) * 2.0**-52 * math.fsum(map(abs, terms)))


@pytest.mark.parametrize("compute", ["float", "int8"])
def test_bias_clamp_and_leading_dimensions(compute: str) -> None:
    codes, x, bias = random_codes(as_format("q4_1"), (5, 64)), torch.randn(2, 3, 64), torch.randn(5)
    plain = reference.linear(x, codes, None, compute)
    assert plain.shape == (2, 3, 5)
    whole = reference.linear(x, codes, bias, compute, "row", (-0.1, math.inf))
    low = float(np.float32(-0.1))
    assert torch.equal(whole, (reference.linear(x, codes, None, compute, "row") + bias.double()).clamp(min=low))
    assert (whole == low).any()


@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_in_its_row(compute: str, activation: str) -> None:
    x, codes = torch.randn(3, 70), random_codes(as_format("int4_g32_offset"), (4, 70))
    clean = reference.linear(x, codes, None, compute, activation)
    x[1, 69] = math.nan
    y = reference.linear(x, codes, None, compute, activation, (0.0, 6.0))
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]].clamp(0, 6))


def test_k_of_zero_is_the_bias() -> None:
    for name in ("q4_0", "int8_channel_zp", "int8_tensor"):
        codes, bias = random_codes(as_format(name), (3, 0)), torch.randn(3)
        for compute in ("float", "int8"):
            for activation in ACTIVATIONS:
                assert torch.equal(reference.linear(torch.zeros(2, 0), codes, bias, compute, activation), bias.double().expand(2, 3))
                assert not reference.error_bound(torch.zeros(2, 0), codes, None, compute, activation).any()


def test_long_blocks_are_cut_so_that_integers_fit() -> None:
    k = 2 * reference.MAX_BLOCK + 10
    codes = random_codes(as_format("int8_channel_zp"), (2, k))
    x = torch.ones(1, k)
    x[:, reference.MAX_BLOCK :] = 1e-3
    y = reference.linear(x, codes, None, "int8")  # a scale of its own for each piece: nothing of the small ones is lost
    exact = reference.linear(x, codes)
    assert torch.allclose(y, exact, rtol=1e-6)


def test_shapes_that_do_not_match_are_refused() -> None:
    codes = random_codes(as_format("q8_0"), (5, 64))
    for x in (torch.zeros(2, 63), torch.tensor(1.0)):
        with pytest.raises(ArgumentError, match=r"weight \[5, 64\]"):
            reference.linear(x, codes)
    with pytest.raises(ArgumentError, match=r"weight \[2, 5, 64\]"):
        reference.linear(torch.zeros(2, 64), random_codes(as_format("q8_0"), (2, 5, 64)))


def test_the_gradient_is_that_of_the_dequantized_weight() -> None:
    codes, x = random_codes(as_format("int4_g32_zp"), (5, 70)), torch.randn(2, 3, 70, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 3, 5)
    (x @ codes.dequantize(torch.float64).T).backward(dy.double())
    assert x.grad is not None
    assert torch.allclose(reference.linear_gradient(dy, codes), x.grad, rtol=1e-13, atol=1e-13)


def test_embedding_and_dequantize_are_the_weight() -> None:
    codes = random_codes(as_format("int4_g32"), (5, 70))
    ids = torch.tensor([[4, 0], [0, 2]])
    assert torch.equal(reference.dequantize(codes), codes.dequantize(torch.float64))
    assert torch.equal(reference.embedding(ids, codes), codes.dequantize(torch.float64)[ids])


# error_bound and agrees: float32 arithmetic in the ways of kernels keeps within, and what is wrong does not


def float_kernel(x: torch.Tensor, codes: Codes, split: bool) -> torch.Tensor:
    """float32 sums, one product after another: of weights made first, or by blocks of the codes as stored."""
    k, fmt = codes.shape[1], codes.format
    eight = 8 if fmt.signed and fmt.bits == 4 else 0
    q, scale = codes.values().float() + eight, codes.scale.float()
    zero = -eight * scale if codes.zero is None else -scale * codes.zero.float() if fmt.zero == "point" else codes.zero.float()
    y = torch.zeros(len(x), codes.shape[0])
    if not split:
        w = codes.spread(scale) * q + codes.spread(zero)
        for i in range(k):
            y = y + x[:, i : i + 1] * w[:, i]
        return y
    block = fmt.block_size(k)
    for b, start in enumerate(range(0, k, block)):
        b = min(b, scale.shape[1] - 1)
        products, values = torch.zeros_like(y), torch.zeros(len(x), 1)
        for i in range(start, min(start + block, k)):
            products = products + x[:, i : i + 1] * q[:, i]
            values = values + x[:, i : i + 1]
        y = y + products * scale[:, b] + values * zero[:, b]
    return y


def int8_kernel(x: torch.Tensor, codes: Codes, activation: str) -> torch.Tensor:
    """Integer sums of the codes as stored, then float32."""
    k, fmt = codes.shape[1], codes.format
    eight = 8 if fmt.signed and fmt.bits == 4 else 0
    q, scale = codes.values().long() + eight, codes.scale.float()
    zero = -eight * scale if codes.zero is None else -scale * codes.zero.float() if fmt.zero == "point" else codes.zero.float()
    xq = reference.quantize_activation(x, fmt.block_size(k), activation)
    y = torch.zeros(len(x), codes.shape[0])
    for i, (start, end) in enumerate(reference.spans(k, fmt.block_size(k))):
        a, b = min(i, xq.scale.shape[1] - 1), min(start // fmt.block_size(k), scale.shape[1] - 1)
        s_a, o_a, sum_a = xq.scale[:, a : a + 1], xq.offset[:, a : a + 1], xq.sums[:, i : i + 1].float()
        products = (xq.q[:, start:end].long() @ q[:, start:end].T).float()
        sum_b = q[:, start:end].sum(1).float()
        y = y + s_a * (products * scale[:, b]) + (s_a * sum_a + o_a * (end - start)) * zero[:, b] + o_a * (scale[:, b] * sum_b)
    return y


@given(sizes, formats, seeds, st.booleans(), st.sampled_from(DTYPES), st.sampled_from([1.0, 1e-20, 1e-40, 1e8]))
def test_float_kernels_keep_within_the_bound(
    size: tuple[int, int, int], fmt: Format, seed: int, split: bool, dtype: torch.dtype, factor: float
) -> None:
    m, n, k = size
    x, codes, bias = (random_rows(m, k, seed) * factor).to(dtype), random_codes(fmt, (n, k), seed % 1000), torch.randn(n)
    error = reference.error_bound(x, codes, bias)
    y = float_kernel(x.float(), codes, split) + bias
    expected = reference.linear(x, codes, bias)
    assert reference.agrees(y.to(dtype), expected, error).all()


@given(sizes, formats, seeds, activations, st.sampled_from(DTYPES), st.sampled_from([1.0, 1e-20, 1e-40, 1e8]))
def test_int8_kernels_keep_within_the_bound(
    size: tuple[int, int, int], fmt: Format, seed: int, activation: str, dtype: torch.dtype, factor: float
) -> None:
    m, n, k = size
    x, codes, bias = (random_rows(m, k, seed) * factor).to(dtype), random_codes(fmt, (n, k), seed % 1000), torch.randn(n)
    error = reference.error_bound(x, codes, bias, "int8", activation)
    y = int8_kernel(x.float(), codes, activation) + bias
    expected = reference.linear(x, codes, bias, "int8", activation)
    assert reference.agrees(y.to(dtype), expected, error).all()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "int4_g128_zp", "int8_channel"])
@pytest.mark.parametrize("compute", ["float", "int8"])
def test_one_wrong_code_is_beyond_the_bound(name: str, compute: str) -> None:
    x, codes = torch.randn(4, 512), absmax(torch.randn(8, 512), as_format(name))
    values = codes.values()
    values[3, 100] += 1 if values[3, 100] < codes.format.q_max else -1
    wrong = Codes.from_values(codes.format, values, codes.scale, codes.zero)
    x[:, 100] = 1.0
    error = reference.error_bound(x, codes, None, compute)
    y = reference.linear(x, wrong, None, compute).float()
    agrees = reference.agrees(y, reference.linear(x, codes, None, compute), error)
    assert not agrees[:, 3].any()
    assert agrees[:, :3].all()
    assert agrees[:, 4:].all()


def test_agrees_allows_one_rounding_and_no_more() -> None:
    exact, error = torch.tensor([1.0, 3.0, 1e-7], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for dtype in DTYPES:
        y = (exact * (1 + 0.4 * torch.finfo(dtype).eps)).to(dtype)
        assert reference.agrees(y, y.double(), error).all()
        more = torch.nextafter(y, torch.tensor(9.0)) if dtype == torch.float32 else y * 1.02
        assert not reference.agrees(more, exact, error)[:2].any()
    assert reference.agrees(torch.tensor([1.0]).half(), torch.tensor([1 + 2.0**-11]).double(), error[:1]).all()
    assert not reference.agrees(torch.tensor([1.0]).half(), torch.tensor([1 + 2.0**-10]).double(), error[:1]).any()


def test_agrees_on_what_is_not_finite() -> None:
    inf, nan = math.inf, math.nan

    def one(y: float, expected: float, error: float = 0.0, dtype: torch.dtype = torch.float16) -> bool:
        return bool(reference.agrees(torch.tensor([y], dtype=dtype), *(torch.tensor([v], dtype=torch.float64) for v in (expected, error))))

    assert one(nan, nan)
    assert not one(nan, 1.0)
    assert not one(1.0, nan)
    assert not one(inf, nan)
    assert one(inf, 65530.0)  # float16's own overflow
    assert one(-inf, -1e9)
    assert not one(-inf, 1e9)
    assert not one(inf, 60000.0)
    assert one(inf, 60000.0, 6000.0)
    assert not one(inf, 65530.0, dtype=torch.bfloat16)
    assert one(nan, inf)
    assert one(inf, inf)
    assert not one(65504.0, inf)
    assert one(nan, 1.0, inf)


def test_the_bound_is_infinite_where_float32_sums_may_overflow() -> None:
    codes = random_codes(as_format("q8_0"), (2, 32))
    x = torch.full((2, 32), 3e37)
    x[1] = 1
    error = reference.error_bound(x, codes)
    assert error[0].isinf().all()
    assert (error[1] < 1e-2).all()


# qlinear

Case = tuple[tuple[int, int, int], str, int, bool, int]
qlinear_formats = st.sampled_from(["int8_channel", "int4_channel_bf16", "int8_tensor", "int4_tensor_f16"])
qlinear_cases = st.tuples(sizes, qlinear_formats, seeds, st.booleans(), st.integers(-127, 127))


def qlinear_arguments(case: Case) -> tuple[torch.Tensor, Codes, torch.Tensor | None, dict[str, float]]:
    (m, n, k), name, seed, with_bias, zero = case
    rng = np.random.default_rng(seed)
    xq = torch.from_numpy(rng.integers(-128, 128, (m, k), dtype=np.int8))
    bias = torch.from_numpy(rng.standard_normal(n).astype(np.float32)) if with_bias else None
    # Powers of two now and then: then many results are ties.
    in_scale, out_scale = (2.0 ** int(rng.integers(-8, 3)) if rng.random() < 0.5 else float(rng.random() + 1e-3) for _ in range(2))
    codes = random_codes(as_format(name), (n, k), seed % 1000)
    if rng.random() < 0.3:
        codes = Codes.from_values(codes.format, codes.values(), torch.full_like(codes.scale, 0.0 if rng.random() < 0.3 else 0.25))
    return xq, codes, bias, {"in_scale": in_scale, "in_zero": -zero, "out_scale": out_scale * k or 1.0, "out_zero": zero // 2}


@given(qlinear_cases)
def test_qlinear_is_the_real_product_requantized(case: Case) -> None:
    xq, codes, bias, scales = qlinear_arguments(case)
    y = reference.qlinear(xq, codes, bias, **scales)
    assert y.q.shape == (xq.shape[0], codes.shape[0])
    w = codes.values().tolist()
    s_i, z_i, s_o, z_o = (Fraction(scales[name]) for name in ("in_scale", "in_zero", "out_scale", "out_zero"))
    for m, row in enumerate(xq.tolist()):
        for n in range(codes.shape[0]):
            s_w = Fraction(codes.scale.flatten()[n if codes.format.block == "channel" else 0].item()) if row else Fraction(0)
            b = Fraction(bias[n].item()) if bias is not None else Fraction(0)
            total = sum((Fraction(a) - z_i) * q for a, q in zip(row, w[n], strict=True))
            real = (s_i * s_w * total + b) / s_o + z_o  # dequantize, multiply, quantize
            if s_w:  # the fused form of it
                multiplier = s_i * s_w / s_o
                fused_bias = -z_i * sum(w[n]) + b / (s_i * s_w) + z_o / multiplier
                assert real == multiplier * (sum(a * q for a, q in zip(row, w[n], strict=True)) + fused_bias)
            found, size = float(y.real[m, n]), float(abs(s_i * s_w * total / s_o) + abs(b / s_o) + abs(z_o))
            assert found == pytest.approx(float(real), rel=0, abs=8 * 2.0**-52 * size)
            assert int(y.q[m, n]) == max(-128, min(127, round(Fraction(found))))


@given(qlinear_cases, st.sampled_from([(-128, 127), (0, 127), (-5, 3)]))
def test_float32_requantization_differs_at_ties_only(case: Case, clamp: tuple[int, int]) -> None:
    xq, codes, bias, scales = qlinear_arguments(case)
    y = reference.qlinear(xq, codes, bias, **scales, clamp=clamp)
    w = codes.values().long()
    total = (xq.long() @ w.T - scales["in_zero"] * w.sum(1)).float()
    s_w = codes.scale.double().flatten() if codes.shape[1] else torch.zeros(1).double()
    multiplier = (s_w * (scales["in_scale"] / scales["out_scale"])).float()
    constant = (torch.zeros(codes.shape[0]).double() if bias is None else bias.double()) / scales["out_scale"] + scales["out_zero"]
    exact = total.double() * multiplier.double() + constant.float().double()  # what a fused multiply-add rounds once, but for 2^-53
    kernel = exact.float().round().clamp(*clamp).to(torch.int8)
    assert y.agrees(kernel).all()
    assert (y.q == kernel)[(y.real - y.real.floor() - 0.5).abs() > y.error].all()


def test_requantized_agrees_excuses_nothing_else() -> None:
    y = reference.qlinear(
        torch.tensor([[1], [2], [3]], dtype=torch.int8),
        Codes.from_values(as_format("int8_tensor"), torch.tensor([[1]]), torch.tensor([[1.0]])),
        None,
        in_scale=0.5,
        in_zero=0,
        out_scale=1.0,
        out_zero=0,
    )
    assert y.real.flatten().tolist() == [0.5, 1.0, 1.5]
    assert y.q.flatten().tolist() == [0, 1, 2]  # ties to even
    assert y.agrees(torch.tensor([[1], [1], [1]], dtype=torch.int8)).all()
    assert y.agrees(torch.tensor([[2], [2], [3]], dtype=torch.int8)).flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["q8_0", "int8_channel_zp", "int8_tensor_offset", "int8_g32"])
def test_qlinear_takes_symmetric_codes_of_one_scale(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        reference.qlinear(torch.zeros(1, 64, dtype=torch.int8), random_codes(as_format(name), (2, 64)), None, 1.0, 0, 1.0, 0)


# Problem


def test_a_problem_is_hashable_and_its_sizes_are_checked() -> None:
    problem = Problem("linear", 1, 4096, 4096, as_format("q4_0"), torch.float32, "int8", "row")
    assert {problem: 1}[problem] == 1
    with pytest.raises(ArgumentError, match="m=-1"):
        Problem("linear", -1, 4096, 4096, as_format("q4_0"), torch.float32)
