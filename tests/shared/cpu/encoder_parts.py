"""Encoder layers, and what they are made of beside products, in float64, with bounds of what float32 may be off by."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from samples import random_codes
from support import poisoned
from torch import Tensor
from torch.nn import functional

from halfbyte import ops
from halfbyte.formats import Codes, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu import step_sequence
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.elementary import EXP_BOUND, GELU_BOUND
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.step_sequence import NORM, Step
from halfbyte.ops.transformer.encoder import EncoderLayer
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm
from halfbyte.ops.transformer.weights import Weight

EPS = 2.0**-24
HEADS, SCALE = 3, 0.3
SIZES = {"k": 33, "width": 24, "inner": 50}


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
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y in float64 and a bound of the kernel's error, where q, k and v are off by as much as `errors`. sinks [H]: of heads, scores of what
    adds nothing else."""
    q, k, v = q.double(), k.double(), v.double()
    of_q, of_k, of_v = errors or (torch.zeros(()),) * 3
    scores, sizes = scale * q @ k.mT, abs(scale) * q.abs() @ k.abs().mT
    if bias is not None:
        scores, sizes = scores + bias.double(), sizes + bias.double().abs()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0)
    if sinks is not None:
        sink_scores = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        p = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    dim, tokens = q.shape[-1], q.shape[-2]
    before = abs(scale) * ((q.abs() + of_q) @ (k.abs() + of_k).mT) - sizes if errors else sizes * 0
    # A score: dim roundings, one of the scale and bias, one of the difference to the largest score (at most twice the largest); of its
    # exponential as much relatively, and `exp`'s own. The sums of exponentials and of outputs: a rounding for each token; a quotient and a
    # product.
    sizes, before = (x if mask is None else x.masked_fill(~mask, 0) for x in (sizes, before))
    largest = sizes.amax(-1, keepdim=True)
    if sinks is not None:
        largest = largest.maximum(sink_scores.abs())
    relative = ((dim + 2) * EPS * (sizes + largest) + 2 * EPS * largest + EXP_BOUND + before + before.amax(-1, keepdim=True)) * 1.01
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
        block = arguments(NORM, compiled(step_sequence.build, Step("norm", layer_norm=True), isa), fields)
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


def codes_of(name: str, seed: int = 0) -> list[Codes]:
    k, width, inner = SIZES.values()
    shapes = (3 * width, k), (k, width), (inner, k), (k, inner)
    return [random_codes(as_format(name), shape, seed + i) for i, shape in enumerate(shapes)]


def parts_of(codes: list[Codes], compute: str, *, biased: bool = True) -> tuple[list[Weight], list[Norm]]:
    weights = [Weight(ops.pack(c), torch.randn(c.shape[0]) if biased else None, compute, "block") for c in codes]
    k = SIZES["k"]
    return weights, [Norm(torch.rand(k) + 0.5, 1e-5, layer_norm=True, bias=torch.randn(k)) for _ in range(2)]


def layer_of(codes: list[Codes], compute: str, *, before: bool, biased: bool = True) -> tuple[EncoderLayer, list[Weight], list[Norm]]:
    weights, norms = parts_of(codes, compute, biased=biased)
    return encoder_layer(weights, norms, before=before), weights, norms


def encoder_layer(
    weights: Sequence[Weight], norms: Sequence[Norm], *, before: bool, count: int = HEADS, scale: float = SCALE
) -> EncoderLayer:
    """A layer of the weights of qkv, o, up and down, and two norms."""
    qkv, o, up, down = weights
    first, second = norms
    (before1, before2), (after1, after2) = ((first, second), (None, None)) if before else ((None, None), (first, second))
    heads = Heads(count, count, o.packed.shape[1] // count, scale, rotary_dim=0)
    attention = Attention((qkv,), o, before1, heads, residual_norm=after1)
    return EncoderLayer(attention, MLP(up, down, before2, activation="gelu", gated=False, residual_norm=after2))


def check_layer(running: Callable[[list[Tensor]], AbstractContextManager[None]], *, before: bool, masked: bool) -> None:
    """Whether a layer that is made and called in `running(tensors)` gives what it gives in float64."""
    codes = [ops.quantize(torch.randn(c.shape) / 20, "q8_0") for c in codes_of("q8_0")]  # errors that do not multiply
    weights, norms = parts_of(codes, "float")
    x = torch.randn(3, 17, SIZES["k"])
    mask = (torch.arange(17) < torch.tensor([17, 9, 1])[:, None])[:, None, None] if masked else None

    def linear(x: Tensor, e: Tensor, i: int) -> tuple[Tensor, Tensor]:
        w, bias = codes[i].dequantize(torch.float64), weights[i].bias
        assert bias is not None
        # What it would be off by for x itself; x that is off by e is at most 1.01 times as large wherever that counts.
        bound = reference.error_bound(x.float(), codes[i], bias, "float")
        return x @ w.T + bias.double(), (bound + e @ w.abs().T) * 1.01

    def norm(x: Tensor, e: Tensor, i: int) -> tuple[Tensor, Tensor]:
        return layer_norm(x, norms[i].weight, norms[i].bias, norms[i].eps, e)

    def plus(x: Tensor, e: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x + y[0], (e + y[1] + EPS * (x + y[0]).abs()) * 1.01

    z, e = x.double(), x.double() * 0
    qkv, off = (t.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4) for t in linear(*(norm(z, e, 0) if before else (z, e)), 0))
    a, off = (t.flatten(2) for t in attention(*qkv, mask, SCALE, tuple(off)))
    h, e = plus(z, e, linear(a, off, 1))
    if not before:
        h, e = norm(h, e, 0)
    g, off = linear(*(norm(h, e, 1) if before else (h, e)), 2)
    g, off = functional.gelu(g), 1.13 * off + (GELU_BOUND + EPS) * (g.abs() + off)  # its slope is less than 1.13
    y, e = plus(h, e, linear(g, off, 3))
    if not before:
        y, e = norm(y, e, 1)
    operands = [*(w.packed.data for w in weights), *(w.bias for w in weights), *(t for n in norms for t in n[:2]), x]
    with running(operands if mask is None else [*operands, mask]):
        layer = encoder_layer(weights, norms, before=before)
        found, other = layer(x, mask).double(), layer(x * 1.001, mask).double()
    assert bool(((found - y).abs() <= e).all())
    assert float(e.max()) < 0.02 * float(y.abs().max()), "a bound that says nothing"
    assert not torch.equal(found, other)
