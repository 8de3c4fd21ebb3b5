"""A product of low rank that takes the outliers of a weight, so that the rest fits few bits (SVDQuant, Li and others, arXiv:2411.05007).

    W [N, K] = B A + R,  B [N, r], A [r, K]

B A is close to the best approximation of rank r (Eckart and Young), found by subspace iteration on a random start (Halko, Martinsson and
Tropp, arXiv:0909.4061, algorithm 4.4); the same weight always gets the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXTRA = 8  # dimensions of the subspace beyond the rank
_STEPS = 4


def low_rank(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [N, r] and A [r, K] of a weight [N, K] in float32; both have the same norm in each of the r directions."""
    n, k = weight.shape
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(k, min(rank + _EXTRA, n, k), generator=generator, dtype=torch.float32, device="cpu")
    basis = _orthogonal(weight @ start.to(weight.device))
    for _ in range(_STEPS):
        basis = _orthogonal(weight @ _orthogonal(weight.mT @ basis))
    u, sizes, v = torch.linalg.svd(basis.mT @ weight, full_matrices=False)
    root = sizes[:rank].sqrt()
    return basis @ u[:, :rank] * root, root[:, None] * v[:rank]


def _orthogonal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def balancing_scale(inputs: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Compute the scale s [K] of inputs x * s and weights W / s that moves outliers from one to the other (SmoothQuant, Xiao and others,
    arXiv:2211.10438).

        s = max|w|^(1 - alpha) / max|x|^alpha, divided by its geometric mean

    Args:
        inputs: max |x| of each channel [K].
        weight: [N, K].
        alpha: 0: the weight's channels have equal ranges then; 1: the inputs' have; 1/2: each channel has the same range in both.
    """
    ranges = weight.abs().amax(0)
    known = (ranges > 0) & (inputs > 0) & (ranges / inputs).isfinite()
    exponent = (1 - alpha) * torch.where(known, ranges, 1.0).log() - alpha * torch.where(known, inputs, 1.0).log()
    mean = exponent[known].mean() if known.any() else 0.0
    return torch.where(known, exponent - mean, 0.0).clamp(-7, 7).exp()
