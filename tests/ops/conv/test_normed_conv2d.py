"""A norm with SiLU before a convolution: the same as both one after the other, in floating point and on codes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.ops.conv.functions import window_numbers
from halfbyte.ops.conv.group_norm import NormedConv, NormedConvs


def parts(channels: int = 32, outputs: int = 48) -> tuple[Tensor, nn.GroupNorm, hb.PackedConv, Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = nn.GroupNorm(4, channels).requires_grad_(False)
    norm.weight.copy_(torch.randn(channels, generator=generator))
    norm.bias.copy_(torch.randn(channels, generator=generator))
    packed = hb.pack_conv(hb.quantize_conv(torch.randn(outputs, channels, 3, 3, generator=generator), "int8_channel"), 3)
    return torch.randn(2, channels, 9, 7, generator=generator), norm, packed, torch.randn(outputs, generator=generator)


NUMBERS = window_numbers((3, 3), 1, 1, 1)


def normed(
    norm: nn.GroupNorm,
    packed: hb.PackedConv,
    bias: Tensor | None,
    compute: str = "float",
    activation: str = "block",
    *,
    activated: bool = True,
) -> NormedConvs:
    of_norm = norm.num_groups, norm.eps, norm.weight, norm.bias
    return NormedConvs([NormedConv(*of_norm, packed, bias, NUMBERS, compute, activation)], activated=activated)


def neighbours(x: Tensor, packed: hb.PackedConv, activation: str) -> Tensor:
    """How far results may be apart if each code of x that is near a tie is its neighbour: [B, Co, H, W].

    A norm is computed in float32, by torch and by the kernel in another order: of some 80 steps the errors, 2^-24 each, add up to less
    than 2^-19 of the largest y, the scale's to as much of a code: so near to a tie is 127 * 2^-18 of a code.
    """
    patches = functional.unfold(x.double(), 3, padding=1)
    scale = patches.abs().amax((1, 2) if activation == "image" else 1, keepdim=True) / 127
    codes = patches / scale
    near = (codes - codes.floor() - 0.5).abs() < 127 * 2.0**-18
    return (hb.dequantize(packed).double().abs().flatten(1) @ (near * scale)).view(len(x), -1, *x.shape[2:]).float()


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("activation", ["block", "image"])
@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("last", [False, True])
def test_the_same_as_one_after_the_other(activated: bool, activation: str, compute: str, last: bool) -> None:
    x, norm, packed, bias = parts()
    x = x.to(memory_format=torch.channels_last) if last else x
    added, residual = torch.randn(1, 32), torch.randn(2, 48, 9, 7)
    y = norm(x + added[:, :, None, None])
    middle = functional.silu(y) if activated else y
    wanted = hb.conv2d(middle, packed, bias, padding=1, residual=residual, compute=compute, activation=activation)
    convs = normed(norm, packed, bias, compute, activation, activated=activated)
    assert convs.fits(x, added)
    y = convs(x, added, residual)
    assert y is not None
    assert y.is_contiguous(memory_format=torch.channels_last)
    bound = 1e-5 * wanted.abs().amax()  # sums in another order
    if compute == "int8" or activation == "image":
        bound = bound + neighbours(middle, packed, activation)
    assert bool(((y - wanted).abs() <= bound).all())
    exact = functional.conv2d(middle.double(), hb.dequantize(packed).double(), bias.double(), padding=1) + residual
    if compute == "float":
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 16), (3, 32), (2, 31)])
def test_an_added_tensor_of_another_shape(shape: tuple[int, int]) -> None:
    """The kernel would read beyond it."""
    x, norm, packed, bias = parts()
    with pytest.raises(RuntimeError, match="expand"):
        normed(norm, packed, bias)(x, torch.randn(shape))


def test_what_is_left_to_torch() -> None:
    x, norm, packed, bias = parts()
    convs = normed(norm, packed, bias)
    assert convs.fits(x)
    assert not convs.fits(x[:, :16])
    assert not convs.fits(x[:0])
    assert not convs.fits(x.clone().requires_grad_())
    assert convs(x.double()) is None
    assert convs(x, residual=torch.randn(2, 48, 9, 1)) is None
    with torch.autocast("cpu"):
        assert not convs.fits(x)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("activation", ["block", "image"])
@pytest.mark.parametrize("side", [3, 40])  # norms of 1 thread, or of all
def test_two_stages_are_one_after_the_other(side: int, activation: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever the number of threads, again with other tensors."""
    monkeypatch.setattr(runtime, "threads", lambda: threads)
    _, norm, packed, bias = parts()
    _, other_norm, other_packed, _ = parts(48, 32)
    stages = [(norm, packed, bias), (other_norm, other_packed, None)]
    first, second = (normed(*stage, "int8", activation) for stage in stages)
    both = NormedConvs([*first._stages, *second._stages], activated=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x, added = (torch.randn(2, 32, side, side).to(memory_format=torch.channels_last) for _ in range(2))
        middle = first(x)
        assert middle is not None
        wanted, found = second(middle, None, added), both(x, None, added)
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, wanted)
