"""Transformer blocks in one native call against the same layers one by one in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.transformer import attend_bf16, cross_block
from halfbyte.ops.transformer.cross_block import CrossBlock
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight

K, WIDTH, CONTEXT, INNER, HEADS = 36, 40, 24, 64, 2
SHAPES = ((3 * WIDTH, K), (K, WIDTH), (WIDTH, K), (2 * WIDTH, CONTEXT), (K, WIDTH), (2 * INNER, K), (K, INNER))


def parts(compute: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> tuple[list[Weight], list[Norm]]:
    generator = torch.Generator().manual_seed(2)
    weights = list[Weight]()
    for i, (n, k) in enumerate(shapes):
        packed = hb.pack(hb.quantize(torch.randn(n, k, generator=generator) / k**0.5, "int8_channel"))
        weights.append(Weight(packed, torch.randn(n, generator=generator) if i % 2 else None, compute, "block"))
    norms = [Norm(1 + 0.1 * torch.randn(K, generator=generator), 1e-5, layer_norm=True, bias=torch.randn(K)) for _ in range(3)]
    return weights, norms


def block(weights: list[Weight], norms: list[Norm], heads: int = HEADS) -> CrossBlock:
    qkv, o, q, kv, cross_o, up_gate, down = weights
    return CrossBlock((qkv, o), (q, kv, cross_o), (up_gate, down), norms, heads)


def reference(x: Tensor, context: Tensor, weights: list[Weight], norms: list[Norm]) -> Tensor:
    def product(x: Tensor, weight: Weight) -> Tensor:
        bias = None if weight.bias is None else weight.bias.double()
        return functional.linear(x, hb.dequantize(hb.unpack(weight.packed)).double(), bias)

    def normed(x: Tensor, norm: Norm) -> Tensor:
        assert norm.bias is not None
        return functional.layer_norm(x, (K,), norm.weight.double(), norm.bias.double(), norm.eps)

    def attention(*qkv: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x, context = x.double(), context.double()
    qkv, o, q, kv, cross_o, up_gate, down = weights
    h = x + product(attention(*product(normed(x, norms[0]), qkv).chunk(3, -1)), o)
    r = h + product(attention(product(normed(h, norms[1]), q), *product(context, kv).chunk(2, -1)), cross_o)
    up, gate = product(normed(r, norms[2]), up_gate).chunk(2, -1)
    return r + product(up * functional.gelu(gate), down)


@pytest.mark.parametrize(("batch", "tokens", "length"), [(1, 1, 1), (2, 35, 9), (3, 70, 40)])
@pytest.mark.parametrize("threads", [1, 2])
def test_against_float64(batch: int, tokens: int, length: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "threads", lambda: threads)
    monkeypatch.setattr(cross_block, "WORK_A_THREAD", 1)
    x, context = torch.randn(batch, tokens, K), torch.randn(batch, length, CONTEXT)
    weights, norms = parts("float")
    native = block(weights, norms)
    assert native.fits(x, context)
    found = native(x, context)
    wanted = reference(x, context, weights, norms)
    # Weights in float32 are exact; each of seven sums and three norms rounds by a few 2^-24 of what it adds.
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-20
    assert torch.equal(native(x, context), found)


def test_products_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is by pairs of bfloat16, where there are such, beside products in int8 alone."""
    built: list[int] = []
    sizes = attend_bf16.sizes

    def counted(length: int, dim: int) -> tuple[int, int]:
        built.append(dim)
        return sizes(length, dim)

    monkeypatch.setattr(attend_bf16, "sizes", counted)
    x, context = torch.randn(2, 33, K), torch.randn(2, 9, CONTEXT)
    for compute in ("float", "int8"):
        weights, norms = parts(compute)
        found, wanted = block(weights, norms)(x, context), reference(x, context, weights, norms)
        # Codes of a row err by 1/254 of its largest number, which is about three times its root mean square.
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-6
        assert bool(built) == (compute == "int8" and current().bf16_dot)
