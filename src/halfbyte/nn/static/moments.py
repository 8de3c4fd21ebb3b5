"""GPTQ of networks on int8 codes: second moments of the inputs of their layers, and the codes for them.

A convolution is a product of its weight [Co, K] with patches x [K] of its input, K = taps * Ci / groups in the order of the codes, so GPTQ
applies with H_g = sum(x x^T) over the patches of each group g (`quantizers/gptq.py`). The groups' rows are independent of each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.layouts import convolution
from halfbyte.nn.calibration.runs import Moments
from halfbyte.nn.static.bias_correction import Layer
from halfbyte.ops.conv import functions as conv
from halfbyte.quantizers.absmax import absmax
from halfbyte.quantizers.gptq import gptq

_DAMPING = 0.01  # as GPTQ's own
_PLACES = 1024  # of an image whose patches are taken


class InputMoments:
    """Moments of the inputs of one layer: sum(x x^T), float32 [groups, K, K], over `count` inputs or patches of them."""

    def __init__(self) -> None:
        self.second: Tensor | None = None
        self.count = 0

    @torch.no_grad()
    def add(self, layer: Layer, x: Tensor) -> None:
        """x: the input of `layer`, [..., K] or images [B, C, H, W], [B, C, W], [C, W], [C, H, W]."""
        for rows in [x.reshape(-1, x.shape[-1]).T[None]] if isinstance(layer, nn.Linear) else _patches(layer, x):
            rows = rows.float()
            second = rows @ rows.transpose(1, 2)
            self.second = second if self.second is None else self.second.add_(second)
            self.count += rows.shape[2]

    def codes(self, layer: Layer, fmt: Format, name: str) -> Codes:
        """The codes of the weight of `layer` by GPTQ. Raises FormatError for one scale per tensor where there are several groups."""
        assert self.second is not None
        weight = layer.weight.detach()
        matrix = weight if isinstance(layer, nn.Linear) else convolution.channels_last(weight, fmt)
        groups = len(self.second)
        if groups > 1 and fmt.block == "tensor":
            raise FormatError(f"GPTQ of {name}, a convolution of {groups} groups, takes a scale per channel, got {fmt}: use int8_channel")
        if groups == 1:
            moments = Moments(matrix.shape[1], matrix.device)
            moments.second, moments.count = self.second[0], self.count
            return gptq(matrix, fmt, moments.expected(), name=name)
        grid = absmax(matrix, fmt, name)
        assert grid.scale is not None
        return Codes.from_values(fmt, _sweep(matrix, grid.scale, self.second, fmt), grid.scale, grid.zero)


def _sweep(weight: Tensor, scale: Tensor, second: Tensor, fmt: Format) -> Tensor:
    """Codes [Co, K] of all groups at a time, as there are hundreds of few weights: `quantizers/gptq.py` with these scales [Co, 1]."""
    groups, k, _ = second.shape
    h = second.double() + 0.0  # a copy
    diagonal = h.diagonal(dim1=1, dim2=2)
    diagonal += _DAMPING * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    w, step = weight.double().reshape(groups, -1, k).clone(), scale.double().reshape(groups, -1)
    step = torch.where(step == 0, torch.inf, step)
    codes = torch.empty_like(w)
    for i in range(k):
        codes[..., i] = (w[..., i] / step).round().clamp(fmt.q_min, fmt.q_max)
        error = (w[..., i] - torch.where(step.isinf(), 0.0, codes[..., i] * step)) / upper[:, i, i, None]
        w[..., i + 1 :] -= error[..., None] * upper[:, i, None, i + 1 :]
    return codes.reshape(-1, k).to(torch.int16)


def random_places(count: int, most: int, device: torch.device) -> slice | Tensor:
    """Return at most `most` indices below `count`, always the same ones; all as a slice if there are no more.

    Not each n-th one: where n and the width of images have a common factor, these would be of a few columns, such as the padded border.
    """
    if count <= most:
        return slice(None)
    return torch.randint(count, (most,), generator=torch.Generator().manual_seed(0), device="cpu").to(device)


def _patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> list[Tensor]:
    """The patches of some places of each image: [groups, K, places], K as in codes."""
    if isinstance(layer, nn.Conv1d):
        x = x.unsqueeze(-2)
    window, (kernel_h, kernel_w) = conv.module_window(layer), (1, *layer.kernel_size)[-2:]
    top, bottom, left, right = window.padding
    images = functional.pad(x.reshape(-1, *x.shape[-3:]), (left, right, top, bottom))
    results = []
    for image in images.split(1):
        rows = functional.unfold(image, (kernel_h, kernel_w), window.dilation, 0, window.stride)[0]  # [C * taps, places]
        rows = rows[:, random_places(rows.shape[1], _PLACES, rows.device)].unflatten(0, (layer.groups, -1, kernel_h * kernel_w))
        results.append(rows.transpose(1, 2).flatten(1, 2))
    return results
