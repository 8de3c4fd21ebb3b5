"""A norm with SiLU before a convolution: the same as both one after the other, in floating point and on codes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfbyte as hb
from halfbyte.ops.conv.functions import window_numbers
from halfbyte.ops.conv.group_norm import normed_conv2d, supports


def parts(channels: int = 32, outputs: int = 48) -> tuple[Tensor, nn.GroupNorm, hb.PackedConv, Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = nn.GroupNorm(4, channels).requires_grad_(False)
    norm.weight.copy_(torch.randn(channels, generator=generator))
    norm.bias.copy_(torch.randn(channels, generator=generator))
    packed = hb.pack_conv(hb.quantize_conv(torch.randn(outputs, channels, 3, 3, generator=generator), "int8_channel"), 3)
    return torch.randn(2, channels, 9, 7, generator=generator), norm, packed, torch.randn(outputs, generator=generator)


NUMBERS = window_numbers((3, 3), 1, 1, 1)


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
    normed = norm(x + added[:, :, None, None])
    normed = functional.silu(normed) if activated else normed
    how = {"compute": compute, "activation": activation}
    wanted = hb.conv2d(normed, packed, bias, padding=1, residual=residual, compute=compute, activation=activation)
    assert supports(x, norm, added=added) is None
    y = normed_conv2d(x, norm, packed, bias, NUMBERS, activated=activated, added=added, residual=residual, **how)
    assert y.is_contiguous(memory_format=torch.channels_last)
    bound = 1e-5 * wanted.abs().amax()  # sums in another order
    if compute == "int8" or activation == "image":
        bound = bound + neighbours(normed, packed, activation)
    assert bool(((y - wanted).abs() <= bound).all())
    exact = functional.conv2d(normed.double(), hb.dequantize(packed).double(), bias.double(), padding=1) + residual
    if compute == "float":
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 16), (3, 32), (2, 31)])
def test_an_added_tensor_of_another_shape(shape: tuple[int, int]) -> None:
    """The kernel would read beyond it."""
    x, norm, packed, bias = parts()
    with pytest.raises(RuntimeError, match="expand"):
        normed_conv2d(x, norm, packed, bias, NUMBERS, activated=True, added=torch.randn(shape), compute="float", activation="block")


def test_what_is_left_to_torch() -> None:
    x, norm, _, _ = parts()
    assert "channels" in (supports(x[:, :16], norm) or "")
    assert "images on a CPU" in (supports(x[:0], norm) or "")
    assert "gradients" in (supports(x.clone().requires_grad_(), norm) or "")
    assert "no weights" in (supports(x, nn.GroupNorm(4, 32, affine=False)) or "")
    assert "no conversion" in (supports(x.double(), norm) or "")
    with torch.autocast("cpu"):
        assert "autocast" in (supports(x, norm) or "")
