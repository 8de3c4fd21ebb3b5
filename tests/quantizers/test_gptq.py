"""GPTQ: equal to a plain loop, better than rounding on correlated inputs, for every format and order."""

from __future__ import annotations

import math
import sys
from threading import get_ident

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats import Codes, Format, as_format
from halfbyte.quantizers import absmax
from halfbyte.quantizers.gptq import GPTQ, gptq, inverse_factor

FORMATS = (
    "int4_g32", "int4_g24_zp", "int4_g32_offset", "int4_channel", "int4_channel_zp", "int8_channel_offset", "int4_tensor", "int4_tensor_zp",
    "q4_0", "q4_1", "q8_0", "inferllm_q4_0", "int4_g40_bf16",
)  # fmt: skip
OPTIONS = [GPTQ(act_order=order, static_groups=static, columns=16) for order in (False, True) for static in (False, True)]


def layer(n: int = 24, k: int = 80, tokens: int = 500) -> tuple[Tensor, Tensor]:
    """A weight and inputs whose channels depend on each other and differ in size, as those of language models do."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(k, k, generator=generator) / math.sqrt(k) + torch.randn(k, 1, generator=generator)
    x = torch.randn(tokens, k, generator=generator) @ mix.T * torch.rand(k, generator=generator).add(0.1)
    return torch.randn(n, k, generator=generator), x


def output_error(w: Tensor, codes: Codes, x: Tensor) -> float:
    return float((x.double() @ (codes.dequantize(torch.float64) - w.double()).T).square().sum())


def textbook(w: Tensor, x: Tensor, fmt: Format, options: GPTQ) -> Tensor:
    """Section 3 of Frantar and others (arXiv:2210.17323), column by column, without blocks, in float64: the dequantized weight.

    After each column the inverse of what is left of H is taken afresh, instead of a Cholesky factor's rows.
    """
    n, k = w.shape
    h = x.double().T @ x.double()
    h += options.damping * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    order = (x.double().square().sum(0)).argsort(descending=True, stable=True) if options.act_order else torch.arange(k)
    size = k if fmt.block == "tensor" else fmt.block_size(k)
    w, out = w.double().clone(), torch.zeros(n, k, dtype=torch.float64)
    grids: dict[int, tuple[Tensor, Tensor | float]] = {}

    def decide(block: int, columns: Tensor) -> None:
        codes = absmax(columns.float(), fmt)
        grids[block] = codes.scale[:, 0].double(), 0.0 if codes.zero is None else codes.zero[:, 0].double()

    if options.static_groups or fmt.block == "tensor":
        for block in range(-(-k // size)):
            decide(block, w[:, block * size : (block + 1) * size])
    left = order.tolist()
    for column in order.tolist():
        block = column // size
        if block not in grids:
            decide(block, w[:, block * size : (block + 1) * size])
        scale, zero = grids[block]
        x0 = w[:, column]
        q = (x0 - zero) / scale if fmt.zero == "offset" else x0 / scale
        q = q.round() + (zero if fmt.zero == "point" else 0)
        q = q.clamp(fmt.q_min, fmt.q_max)
        out[:, column] = q * scale + zero if fmt.zero == "offset" else (q - zero) * scale
        inverse = torch.linalg.inv(h[left][:, left])
        w[:, left] -= ((x0 - out[:, column]) / inverse[0, 0]).outer(inverse[0])
        left = left[1:]
    return out


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: f"{'act' if o.act_order else 'plain'}-{'static' if o.static_groups else 'moving'}"
)
@pytest.mark.parametrize("name", FORMATS)
def test_equal_to_the_plain_loop(name: str, options: GPTQ) -> None:
    w, x = layer()
    options = GPTQ(options.act_order, options.static_groups, columns=options.columns, grid="absmax")
    fmt = as_format(name)
    codes = gptq(w, fmt, x.double().T @ x.double(), options)
    expected = textbook(w, x, fmt, options)
    # The same float64 arithmetic in another order: a column might round the other way only within 2^-30 of a tie.
    assert torch.equal(codes.dequantize(torch.float64), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("grid", ["absmax", "mse"])
def test_the_output_error_is_far_below_that_of_rounding(name: str, grid: str) -> None:
    w, x = layer()
    fmt = as_format(name)
    plain = output_error(w, absmax(w, fmt), x)
    for options in OPTIONS:
        found = output_error(w, gptq(w, fmt, x.T @ x, GPTQ(options.act_order, options.static_groups, grid=grid)), x)
        # Rounding errors add up along the inputs' common direction; GPTQ takes most of that back.
        assert found < 0.5 * plain


def test_uncorrelated_inputs_leave_plain_rounding() -> None:
    w, _ = layer()
    fmt = as_format("int4_g32")
    codes = gptq(w, fmt, torch.eye(80), GPTQ(grid="absmax"))
    plain = absmax(w, fmt)
    assert torch.equal(codes.values(), plain.values())
    assert torch.equal(codes.scale, plain.scale)


def test_rows_do_not_depend_on_how_many_are_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = layer()
    for name in ("int4_g32_zp", "int4_tensor"):
        whole = gptq(w, as_format(name), x.T @ x)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["halfbyte.quantizers.gptq"], "_CHUNK", 5 * 80)
            parts = gptq(w, as_format(name), x.T @ x)
        assert torch.equal(whole.data, parts.data)
        assert torch.equal(whole.scale, parts.scale)


def test_small_weights_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = layer()
    module = sys.modules["halfbyte.quantizers.gptq"]
    seen = []
    factor = ((torch.linalg, "cholesky_ex"), (torch.linalg, "solve_triangular"))
    for place, name in (*factor, (module._Sweep, "run"), (module, "_grid")):  # type: ignore[attr-defined]
        whole = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, whole=whole, **more: (seen.append(torch.get_num_threads()), whole(*args, **more))[1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        gptq(w, as_format("int4_g40"), x.T @ x)
        assert seen == [1] * 5  # the factor, its inverse, the sweep, and in it the grids of two blocks
        assert torch.get_num_threads() == 3
        with pytest.raises(ArgumentError, match="not positive definite"):
            gptq(w, as_format("int4_g40"), 2 - torch.eye(80))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_rows_of_large_weights_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation is shared, which waits for the last of its threads; and no code changes."""
    torch.manual_seed(0)
    w, x = torch.randn(1100, 300), torch.randn(700, 300)
    module = sys.modules["halfbyte.quantizers.gptq"]
    seen = []
    for place, name in ((torch.linalg, "cholesky_ex"), (torch.linalg, "solve_triangular"), (module._Sweep, "run")):  # type: ignore[attr-defined]
        whole = getattr(place, name)
        monkeypatch.setattr(
            place,
            name,
            lambda *args, whole=whole, name=name, **more: (seen.append((name, get_ident(), torch.get_num_threads())), whole(*args, **more))[
                1
            ],
        )
    before, codes = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.clear()
            codes.append(gptq(w, as_format("int4_g128"), x.T @ x))
            assert {count for _, _, count in seen} == {1}
        assert len({thread for name, thread, _ in seen if name == "run"}) == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(codes[0].data, codes[1].data)
    assert torch.equal(codes[0].scale, codes[1].scale)


def test_the_factor_is_of_the_inverse_and_the_moments_stay() -> None:
    x = torch.randn(900, 600, dtype=torch.float64)
    h = x.T @ x
    given = h.clone()
    upper = inverse_factor(h, 0.01, "w")
    assert torch.equal(h, given)
    assert torch.equal(upper, upper.triu())
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(600, dtype=torch.float64)
    # A backward stable factor and inverse: some n u of the condition, which the damping keeps below 1000.
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(600, dtype=torch.float64), rtol=0, atol=600 * 2**-53 * 1000)


def test_channels_that_are_never_active_keep_their_weights() -> None:
    w, x = layer()
    x[:, 3] = 0
    fmt = as_format("int8_g16")
    codes = gptq(w, fmt, x.T @ x, GPTQ(grid="absmax"))
    # No error of another channel is moved here. Its own rounding is half a scale, and half an ulp of a quotient of at most 127.
    error = (codes.dequantize(torch.float64) - w.double())[:, 3].abs()
    assert bool((error <= codes.spread(codes.scale)[:, 3].double() * (0.5 + 127 * 2**-24)).all())
    silent = gptq(w, fmt, torch.zeros(80, 80), GPTQ(grid="absmax"))
    assert torch.equal(silent.dequantize(), absmax(w, fmt).dequantize())


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (1, 33)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, dtype=torch.bfloat16)
    x = torch.randn(50, shape[1])
    codes = gptq(w, as_format("int4_g32_zp"), x.T @ x)
    assert codes.shape == shape
    assert bool(codes.dequantize().isfinite().all())


def test_what_is_refused() -> None:
    w, x = layer()
    h = x.T @ x
    with pytest.raises(ArgumentError, match=r"moments \[K, K\], got fc \[24, 80\] and \[79, 79\]"):
        gptq(w, as_format("q4_0"), h[1:, 1:], name="fc")
    with pytest.raises(ArgumentError, match=r"the input moments of fc .* NaN"):
        gptq(w, as_format("q4_0"), h * math.nan, name="fc")
    with pytest.raises(ArgumentError, match=r"fc .* NaN"):
        gptq(w * math.nan, as_format("q4_0"), h, name="fc")
    with pytest.raises(ArgumentError, match=r"not positive definite.*larger"):
        gptq(w, as_format("q4_0"), 2 - torch.eye(80), name="fc")
    with pytest.raises(ArgumentError, match="float64"):
        gptq(w.double(), as_format("q4_0"), h)
    with pytest.raises(FormatError, match="fc: the scale"):
        gptq(w * 1e8, as_format("int4_g32"), h, name="fc")
    for bad in ({"damping": 0.0}, {"columns": 0}, {"grid": "best"}):
        with pytest.raises(ArgumentError, match="GPTQ"):
            GPTQ(**bad)  # type: ignore[arg-type]
