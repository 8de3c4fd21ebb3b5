"""GPTQ of networks on int8 codes: the moments are those of a layer's patches, in the order of its codes, and codes of less error follow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.errors import FormatError
from halfbyte.formats.spec import as_format
from halfbyte.nn.static.bias_correction import Layer
from halfbyte.nn.static.moments import InputMoments, _patches

INT8, INT4 = as_format("int8_channel"), as_format("int4_channel")


def _layers() -> list[tuple[Layer, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(3, 8, 11, 9) + torch.randn(1, 8, 1, 1)
    return [
        (nn.Linear(8, 6), images.movedim(1, -1)),
        (nn.Conv2d(8, 6, 1), images),
        (nn.Conv2d(8, 6, (3, 2), (2, 1), (1, 0), (1, 2)), images),
        (nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False), images),
        (nn.Conv2d(8, 12, 3, padding=1, groups=4), images[0]),
        (nn.Conv1d(8, 6, 4, 2, 3), images[..., 0]),
    ]


def _weight(layer: Layer, moments: InputMoments) -> Tensor:
    """The dequantized weight by GPTQ, in the layer's order."""
    codes = moments.codes(layer, INT4, "weight").dequantize()
    if isinstance(layer, nn.Linear):
        return codes
    return codes.reshape(layer.weight.shape[0], *layer.kernel_size, -1).movedim(-1, 1)


@pytest.mark.parametrize(("layer", "x"), _layers(), ids=lambda value: str(value) if isinstance(value, nn.Module) else "")
@torch.no_grad()
def test_codes_have_less_error_in_outputs_than_the_nearest(layer: Layer, x: Tensor) -> None:
    moments = InputMoments()
    moments.add(layer, x)
    assert moments.second is not None
    spatial = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    y = layer(x) if layer.bias is None else layer(x) - layer.bias.view(-1, *[1] * spatial)
    # Fewer than 1024 places: all patches count, so W H W^T of each group has the squares of the outputs on its diagonal.
    groups = len(moments.second)
    matrix = layer.weight if isinstance(layer, nn.Linear) else layer.weight.movedim(1, -1)
    rows = matrix.reshape(groups, -1, moments.second.shape[1]).double()
    energy = torch.einsum("gnk,gkl,gnl->gn", rows, moments.second.double(), rows).flatten()
    outputs = y.movedim(-1 - spatial, 0).flatten(1).double().square().sum(1)
    torch.testing.assert_close(energy, outputs, rtol=1e-4, atol=0)  # float32 sums of some hundred products
    assert moments.count == y.numel() // y.shape[-1 - spatial]

    def error(weight: Tensor) -> float:
        rounded = copy.deepcopy(layer)
        rounded.weight.copy_(weight)
        return float((rounded(x) - layer(x)).norm())

    nearest = layer.weight.flatten(1)
    step = nearest.abs().amax(1, keepdim=True) / 7
    assert error(_weight(layer, moments)) < 0.9 * error(((nearest / step).round() * step).view_as(layer.weight))


@torch.no_grad()
def test_a_channel_of_zeros_and_a_scale_per_tensor() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    layer.weight[1] = 0
    moments = InputMoments()
    moments.add(layer, torch.zeros(1, 4, 5, 5))  # no input at all: the nearest codes
    codes = moments.codes(layer, INT8, "weight")
    assert not codes.values()[1].any()
    assert torch.equal(codes.values(), hb.quantize_conv(layer.weight, INT8).values())
    with pytest.raises(FormatError, match="4 groups, takes a scale per channel"):
        moments.codes(layer, as_format("int8_tensor"), "weight")


@torch.no_grad()
def test_a_network_is_nearer_to_float() -> None:
    """Correlated channels, as behind a convolution with few inputs, are what GPTQ makes use of."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Flatten()
    ).eval()  # fmt: skip
    images, others = torch.randn(2, 16, 3, 24, 24)
    error = {}
    for method in ("absmax", "gptq"):
        config = hb.Config("int4_channel", method, activations="static")
        network = hb.quantize_(copy.deepcopy(model), config, iter(images.split(8)))  # an iterator gives each batch once
        error[method] = float((network(others) - model(others)).norm())
    assert error["gptq"] < 0.9 * error["absmax"]


@torch.no_grad()
def test_patches_of_large_images_are_of_all_columns() -> None:
    """Every 64th of 256 x 256 places would be of four columns, the padded border's among them."""
    columns = torch.arange(256.0).expand(1, 1, 256, 256)
    (patches,) = _patches(nn.Conv2d(1, 1, 1), columns)
    assert patches.shape == (1, 1, 1024)
    assert len(patches.unique()) > 200  # of 256 columns, 251 are expected among 1024 random places
