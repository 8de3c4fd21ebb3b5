"""GroupNorm with SiLU of images, and their codes, against float64."""

import ctypes

import pytest
import torch
from support import RUNNABLE, poisoned
from torch import Tensor
from torch.nn import functional

from halfbyte.kernels import conv_reference
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.quantize import group_norm as kernel

isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_ELEMENTS_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, added: Tensor | None, *, activated: bool, codes: bool
) -> tuple[Tensor, Tensor]:
    """y or its codes, and their scales."""
    call = kernel.prepare(x.shape, x.dtype, groups, eps, added=added is not None, activated=activated, codes=codes)
    out, scales = torch.empty_like(x, dtype=torch.int8 if codes else x.dtype), torch.empty(len(x))
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (x, out, weight, bias, added, scales))
    kernel.pack_tensors(call.buffer, kernel.TENSORS, *addresses)
    runtime.runner()(ctypes.addressof(call.buffer), call.threads)
    return out, scales


def image(batch: int, channels: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With means of channels that are far from 0, and differ."""
    x = torch.randn(batch, channels, height, width) + 8 * torch.randn(1, channels, 1, 1)
    return x.to(dtype).to(memory_format=torch.channels_last)


def reference(x: Tensor, groups: int, weight: Tensor, bias: Tensor, added: Tensor | None, *, activated: bool) -> tuple[Tensor, Tensor]:
    """y in float64, and a bound of its error: of sums, of x * factor + summand, and of SiLU, whose slope is at most 1.1."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    moved = x if added is None else x + added.double()[:, :, None, None]
    y = functional.group_norm(moved, groups, weight, bias, EPS)
    of_group = moved.unflatten(1, (groups, -1)).flatten(2)
    root = (of_group.var(2, unbiased=False) + EPS).rsqrt().repeat_interleave(x.shape[1] // groups, 1)[:, :, None, None]
    mean = of_group.mean(2).repeat_interleave(x.shape[1] // groups, 1)[:, :, None, None]
    # Each sum is of at most 64 + pixels / 64 + channels of a group steps, each of which adds 2^-24 of the sum of magnitudes.
    steps = 64 + x[0, 0].numel() / 64 + x.shape[1] / groups + 8
    sizes = (moved.abs() + mean.abs() + 1 / root) * root * weight.abs()[:, None, None] + bias.abs()[:, None, None]
    bound = steps * 2.0**-24 * sizes
    return (functional.silu(y), 1.1 * bound + 2.0**-20 * y.abs()) if activated else (y, bound)


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "channels", "groups", "height", "width"), [(1, 160, 32, 9, 7), (2, 48, 3, 5, 33), (3, 16, 1, 1, 1)])
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_against_float64(
    batch: int, channels: int, groups: int, height: int, width: int, activated: bool, adds: bool, dtype: torch.dtype, isa: ISA,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernel, "current", lambda: isa)
    assert kernel.supports(dtype, channels, isa) is None
    x, weight, bias = image(batch, channels, height, width, dtype), torch.randn(channels), torch.randn(channels)
    added = torch.randn(batch, channels) if adds else None
    wanted, error = reference(x, groups, weight, bias, added, activated=activated)
    out, untouched = poisoned(batch, height, width, channels, dtype=dtype)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: out.permute(0, 3, 1, 2))
        y, _ = group_norm(x, groups, weight, bias, EPS, added, activated=activated, codes=False)
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs() if dtype != torch.float32 else 0
    assert bool(((y.double() - wanted).abs() <= error * 1.01 + rounding).all())
    assert untouched()


@isas
@pytest.mark.parametrize(("batch", "channels", "groups", "size"), [(1, 160, 32, 9), (3, 48, 3, 4)])
@pytest.mark.parametrize("activated", [False, True])
def test_codes_are_those_of_the_image(
    batch: int, channels: int, groups: int, size: int, activated: bool, isa: ISA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale is the largest magnitude's, though no pass looks for it; SiLU as computed rises but for its last bits."""
    monkeypatch.setattr(kernel, "current", lambda: isa)
    x, weight, bias, added = (
        image(batch, channels, size, size),
        torch.randn(channels),
        torch.randn(channels) + 1,
        torch.randn(batch, channels),
    )
    settings = x, groups, weight, bias, EPS, added
    y, _ = group_norm(*settings, activated=activated, codes=False)
    codes, scales = group_norm(*settings, activated=activated, codes=True)
    wanted, wanted_scales = conv_reference.quantized_images(y)
    assert scales is not None
    assert codes.stride() == x.stride()
    torch.testing.assert_close(scales, wanted_scales, rtol=2.0**-20, atol=0)
    assert (codes.int() - wanted.int()).abs().max() <= 1
    assert (codes == wanted).float().mean() > 0.999


def test_a_small_image_has_a_scale_that_holds_the_least_of_silu() -> None:
    """Where SiLU may reach -0.2785, that counts as the largest magnitude."""
    x = image(1, 16, 4, 4)
    weight, bias = torch.full((16,), 0.2), torch.full((16,), -1.2784645)
    _, scales = group_norm(x, 1, weight, bias, EPS, None, activated=True, codes=True)
    assert scales is not None
    torch.testing.assert_close(scales, torch.tensor([0.2784645 / 127]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_images_with_nan_have_no_scale(bad: float) -> None:
    x = image(2, 32, 4, 4)
    x[1, 5, 2, 3] = bad
    y, _ = group_norm(x, 4, torch.ones(32), torch.zeros(32), EPS, None, activated=True, codes=False)
    codes, scales = group_norm(x, 4, torch.ones(32), torch.zeros(32), EPS, None, activated=True, codes=True)
    assert scales is not None
    assert bool(y[0].isfinite().all())
    assert bool(y[1, :8].isnan().all())  # its group
    assert scales.isnan().tolist() == [False, True]
    assert codes[0].any()


def test_zeros_have_zeros_for_codes() -> None:
    codes, scales = group_norm(image(1, 16, 2, 2), 1, torch.zeros(16), torch.zeros(16), EPS, None, activated=False, codes=True)
    assert scales is not None
    assert (codes.any().item(), scales.item()) == (False, 0.0)


def test_what_is_not_supported() -> None:
    isa = current()
    assert "not a multiple" in (kernel.supports(torch.float32, isa.lanes + 1, isa) or "")
    assert "no conversion" in (kernel.supports(torch.float64, 64, isa) or "")
    assert "no conversion" in (kernel.supports(torch.int8, 64, isa) or "")
