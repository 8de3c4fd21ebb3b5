"""Convolutional networks of well-known architectures with random weights, to time whole models.

ResNet (He et al., Deep residual learning for image recognition, CVPR 2016), with its strides in the 3 x 3 convolutions, and MobileNetV2
(Sandler et al., MobileNetV2: inverted residuals and linear bottlenecks, CVPR 2018). Besides, two parts of networks: the causal 3-D
convolutions of a video VAE's block, and the transposed convolutions of a UNet's upsampling.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples" / "efficientnet-lite0"))
import efficientnet_lite0

SIDE = 224
CLASSES = 1000


def _convolution(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out), *([] if act is None else [act])]


class _Residual(nn.Module):
    """act(body(x) + beside(x)); `act` may do nothing."""

    def __init__(self, body: list[nn.Module], shortcut: list[nn.Module], act: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = nn.Sequential(*body), nn.Sequential(*shortcut), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(x) + self.shortcut(x))
        return out


def _resnet(depths: tuple[int, ...], *, bottleneck: bool) -> nn.Sequential:
    layers = [*_convolution(3, 64, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        out = 4 * width if bottleneck else width
        for block in range(depth):
            stride = 2 if stage and not block else 1
            if bottleneck:
                body = _convolution(channels, width, 1, act=nn.ReLU()) + _convolution(width, width, 3, stride, act=nn.ReLU())
                body += _convolution(width, out, 1)
            else:
                body = _convolution(channels, width, 3, stride, act=nn.ReLU()) + _convolution(width, width, 3)
            shortcut = _convolution(channels, out, 1, stride) if stride > 1 or channels != out else []
            layers.append(_Residual(body, shortcut, nn.ReLU()))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def _mobilenet_v2() -> nn.Sequential:
    layers, channels = _convolution(3, 32, 3, 2, act=nn.ReLU6()), 32
    for expansion, out, depth, first in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(depth):
            stride, width = first if not block else 1, expansion * channels
            body = _convolution(channels, width, 1, act=nn.ReLU6()) if expansion > 1 else []
            body += [*_convolution(width, width, 3, stride, width, nn.ReLU6()), *_convolution(width, out, 1)]
            layers += [_Residual(body, [], nn.Identity())] if stride == 1 and channels == out else body
            channels = out
    layers += [*_convolution(channels, 1280, 1, act=nn.ReLU6()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES)]
    return nn.Sequential(*layers)


def _video_block() -> nn.Module:
    past = nn.ConstantPad3d((0, 0, 0, 0, 2, 0), 0.0)
    return nn.Sequential(*(m for _ in range(2) for m in (past, nn.Conv3d(64, 64, 3, padding=(0, 1, 1)), nn.SiLU())))


def _upsampling() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(128, 64, 2, 2), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU())


FOLDED = {"video_block": (_video_block, (64, 5, 60, 104)), "upsampling": (_upsampling, (128, 64, 64))}  # and an image's shape
NETWORKS = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "mobilenet_v2": _mobilenet_v2,
    "efficientnet_lite0": efficientnet_lite0.network,
    **{name: build for name, (build, _) in FOLDED.items()},
}


def network(name: str) -> nn.Module:
    """One of NETWORKS in evaluation, float32, with random weights whose results keep their size from layer to layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name]()
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, _Residual | efficientnet_lite0.Residual):
                body = module.body if isinstance(module, _Residual) else module
                norm = next(m for m in reversed(list(body)) if isinstance(m, nn.BatchNorm2d))
                nn.init.constant_(norm.weight, 0.3)  # or each block would add to the size
    return model.eval()


def images(batch: int, seed: int = 1, name: str = "resnet18") -> Tensor:
    """float32 [batch, 3, 224, 224], or what the network called `name` takes, channels_last."""
    shape = FOLDED[name][1] if name in FOLDED else (3, SIDE, SIDE)
    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=memory_format(name))


def memory_format(name: str) -> torch.memory_format:
    """That of the images of a network."""
    return torch.channels_last_3d if name in FOLDED and len(FOLDED[name][1]) == 4 else torch.channels_last
