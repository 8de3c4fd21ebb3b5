"""3-D and transposed convolutions on a GPU: they agree with the same layers on the CPU."""

import copy

import pytest
import torch
from torch import nn

import halfbyte as hb

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LAYERS = {
    "causal": (nn.Conv3d(32, 24, 3, padding=(0, 1, 1)), (2, 32, 4, 7, 5)),
    "strided": (nn.Conv3d(32, 24, (2, 3, 3), (2, 1, 2), (1, 0, 2), (1, 2, 1), padding_mode="replicate"), (2, 32, 5, 8, 7)),
    "patches": (nn.Conv3d(16, 24, (1, 2, 2), (1, 2, 2)), (2, 16, 3, 7, 6)),
    "pixels": (nn.Conv3d(32, 24, 1), (1, 32, 3, 4, 5)),
    "depthwise": (nn.Conv3d(20, 20, 3, padding=1, groups=20), (2, 20, 3, 4, 5)),
    "upsampling": (nn.ConvTranspose2d(32, 16, 2, 2), (2, 32, 5, 3)),
    "overlapping": (nn.ConvTranspose2d(32, 16, 4, 2, 1), (2, 32, 5, 3)),
    "dilated": (nn.ConvTranspose2d(32, 16, 3, 2, 1, 1, dilation=3, groups=2), (2, 32, 5, 3)),
    "lines": (nn.ConvTranspose1d(32, 16, 16, 8, 4), (2, 32, 5)),
    "volumes": (nn.ConvTranspose3d(32, 16, (3, 2, 2), (1, 2, 2), (1, 0, 0)), (1, 32, 3, 3, 4)),
    "bilinear": (nn.ConvTranspose2d(20, 20, 4, 2, 1, groups=20), (2, 20, 5, 3)),
}


@pytest.mark.parametrize("format", ["int8_channel", "q4_0"])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers(name: str, format: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model, x = hb.quantize_(nn.Sequential(copy.deepcopy(layer)), hb.Config(format, compute="float")), torch.randn(shape).half()
    exact = copy.deepcopy(layer).double()
    exact.weight.data = model[0].weight.clone().double()
    wanted, sizes = exact(x.double()), copy.deepcopy(exact)
    sizes.weight.data.abs_()
    sizes.bias.data.abs_()
    # The weight may be rounded twice to float16, the scale and the product, the sums of cuDNN once, and the result once.
    bound = 4 * 2.0**-11 * sizes(x.double().abs()) + 2.0**-24
    on_gpu = copy.deepcopy(model).cuda()
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    for image in (x.cuda(), *(x.cuda().contiguous(memory_format=last) for _ in range(3))):  # one call is like another
        y = on_gpu(image)
        assert y.shape == wanted.shape
        assert bool(((y.cpu().double() - wanted).abs() <= bound).all()), float(((y.cpu().double() - wanted).abs() / bound).max())
    assert torch.equal(on_gpu.cpu().state_dict()["0.weight.data"], model.state_dict()["0.weight.data"])


@torch.no_grad()
def test_captured() -> None:
    model, x = (
        hb.quantize_(nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.ConvTranspose3d(64, 16, 2, 2)), "int8_channel").cuda(),
        torch.randn(1, 64, 3, 8, 8),
    )
    x = x.cuda().half()
    wanted = model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, wanted)
