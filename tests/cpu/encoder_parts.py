"""What encoder layers are made of beside products, in float64, with bounds of what float32 may be off by."""

import ctypes
from collections.abc import Callable

import torch
from support import poisoned
from torch import Tensor

from halfbyte.kernels.cpu import chain, runtime
from halfbyte.kernels.cpu.chain import NORM, Step
from halfbyte.kernels.cpu.exponential import BOUND
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.kernel import arguments, compiled

EPS = 2.0**-24


def heads(batch: int, count: int, tokens: int, dim: int) -> list[Tensor]:
    """Queries, keys and values as a fused product leaves them: [B, H, T, D] whose tokens lie far apart, with NaN between them."""
    memory = torch.full((batch, tokens, 3, count * dim + 3), torch.nan)
    memory[..., : count * dim] = torch.randn(batch, tokens, 3, count * dim)
    return [memory[:, :, i, : count * dim].unflatten(2, (count, dim)).transpose(1, 2) for i in range(3)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    errors: tuple[Tensor, ...] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y in float64 and a bound of the kernel's error, where q, k and v are off by as much as `errors`."""
    q, k, v = q.double(), k.double(), v.double()
    of_q, of_k, of_v = errors or (torch.zeros(()),) * 3
    scores, sizes = scale * q @ k.mT, abs(scale) * q.abs() @ k.abs().mT
    if bias is not None:
        scores, sizes = scores + bias.double(), sizes + bias.double().abs()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0)
    dim, tokens = q.shape[-1], q.shape[-2]
    before = abs(scale) * ((q.abs() + of_q) @ (k.abs() + of_k).mT) - sizes if errors else sizes * 0
    # A score: dim roundings, one of the scale and bias, one of the difference to the largest score (at most twice the largest); of its
    # exponential as much relatively, and `exp`'s own. The sums of exponentials and of outputs: a rounding for each token; a quotient and a
    # product.
    sizes, before = (x if mask is None else x.masked_fill(~mask, 0) for x in (sizes, before))
    largest = sizes.amax(-1, keepdim=True)
    relative = ((dim + 2) * EPS * (sizes + largest) + 2 * EPS * largest + BOUND + before + before.amax(-1, keepdim=True)) * 1.01
    total = (p * relative).sum(-1, keepdim=True) + (2 * tokens + 4) * EPS
    error = (p * relative) @ v.abs() + total * (p @ v.abs()) + (p * 1.01) @ (v * 0 + of_v)
    return (p @ v).transpose(1, 2), error.transpose(1, 2) + 1e-30


def layer_norm(x: Tensor, weight: Tensor, shift: Tensor, eps: float, error: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """y in float64 and a bound of the kernel's error, where x is off by as much as `error`.

    The mean: a rounding of each of k additions and of the quotient. A difference: that of x and of the mean, and one. The mean of squares:
    twice that of differences, k roundings, and the quotient; its root half of it relatively, and three of sum, root and quotient. A value:
    that of difference and root, a product, and the last multiply-add.
    """
    x, weight, shift, k = x.double(), weight.double(), shift.double(), x.shape[-1]
    error = x * 0 + error
    of_mean = (error.mean(-1, keepdim=True) + (k + 1) * EPS * x.abs().mean(-1, keepdim=True)) * 1.01
    d = x - x.mean(-1, keepdim=True)
    of_d = (error + of_mean + EPS * d.abs()) * 1.01
    variance = d.square().mean(-1, keepdim=True)
    of_variance = (2 * d.abs() * of_d + of_d.square()).mean(-1, keepdim=True) + (k + 1) * EPS * variance
    relative = (of_variance / (2 * (variance + eps)) + 4 * EPS) * 1.01 / (1 - (of_variance / (variance + eps)).clamp(max=0.9))
    root = (variance + eps).rsqrt()
    y = d * root * weight + shift
    size = d.abs() * root
    return y, (((of_d * root + size * (relative + 2 * EPS)) * weight.abs()) * (1 + relative) + EPS * (y.abs() + shift.abs())) * 1.01


# Runs the kernel of a norm with these arguments; the bytes from the address that an argument is.
Launch = Callable[[dict[str, int | tuple[float, float]], dict[str, int]], None]


def native(isa: ISA, threads: int) -> Launch:
    def launch(fields: dict[str, int | tuple[float, float]], _: dict[str, int]) -> None:
        block = arguments(NORM, compiled(chain.build, Step("norm", centred=True), isa), fields)
        runtime.runner()(ctypes.addressof(block), threads)

    return launch


def check_norm(k: int, rows: int, launch: Launch) -> None:
    """Whether what `launch` computes of such rows is the layer norm of float64."""
    torch.manual_seed(k)
    x = torch.full((rows, k + 3), torch.nan)
    x[:, :k] = torch.randn(rows, k) * torch.logspace(-3, 3, rows)[:, None] + torch.tensor([0.0, 100.0, -3.0])[: rows % 4].sum()
    x[-1, :k] = 0.5  # no variance
    weight, shift, eps = torch.randn(k), torch.randn(k), 1e-12 if k % 2 else 1e-5
    out, untouched = poisoned(rows, k, dtype=torch.float32)
    normed(launch, x, out, weight, shift, eps)
    wanted, error = layer_norm(x[:, :k], weight, shift, eps)
    assert bool(((out.double() - wanted).abs() <= error + 1e-30).all()), k
    assert untouched()


def normed(launch: Launch, x: Tensor, out: Tensor, weight: Tensor, shift: Tensor, eps: float) -> None:
    """out [rows, k] = norm of the first k of x [rows, k or more]."""
    rows, k = out.shape
    sizes = {"x": 4 * ((rows - 1) * x.stride(0) + k), "out": out.nbytes, "weight": weight.nbytes, "shift": shift.nbytes}
    fields: dict[str, int | tuple[float, float]] = {
        **{name: t.data_ptr() for name, t in (("x", x), ("out", out), ("weight", weight), ("shift", shift))},
        "x_stride": 4 * x.stride(0),
        "out_stride": 4 * k,
        "rows": rows,
        "k": k,
        "eps": (eps, 0.0),
    }
    launch(fields, sizes)
