"""Decoder layers from their parts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm
from halfbyte.ops.transformer.weights import Weight


class Sizes(NamedTuple):
    """Heads of queries and of keys, elements of each, of an activation, and of what is between gate_up and down."""

    heads: int
    kv_heads: int
    dim: int
    k: int
    inner: int


def check(
    name: str,
    sizes: Sizes,
    shapes: Sequence[tuple[int, int]],
    running: Callable[[list[Tensor]], AbstractContextManager[None]],
    kind: torch.dtype = torch.float32,
) -> None:
    """Whether a layer made and called in `running(tensors)` gives what its parts give; `shapes`: [B, t] of tokens; `kind`: of caches.
    `name`: of the format, or of two with a +, the second that of values.

    Only the order of sums in norms and attention differs, which is a unit of the quantized activations at most where a code is just
    between two.
    """
    torch.manual_seed(3)
    heads, kv_heads, dim, k, inner = sizes
    width, both = heads * dim, (heads + 2 * kv_heads) * dim
    name, *values = name.split("+")
    cut = both - kv_heads * dim if values else both
    shapes_of_weights = ((cut, k), (both - cut, k), (k, width), (2 * inner, k), (k, inner))
    named = [(n, c, fmt) for (n, c), fmt in zip(shapes_of_weights, (name, *(values or [name]), *[name] * 3), strict=True) if n]
    packed = [ops.pack(ops.quantize(torch.randn(n, c) / c**0.5, fmt)) for n, c, fmt in named]
    *qkv, o, gate_up, down = packed
    bias = torch.randn(both)
    biases = *bias.split([p.shape[0] for p in qkv]), torch.randn(k), None, None
    *first, last, gates, downs = (Weight(p, b, "auto", "block") for p, b in zip(packed, biases, strict=True))
    norms = torch.rand(k) + 0.5, torch.rand(k) + 0.5

    def norm(x: Tensor, i: int) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + (1e-5, 1e-6)[i]).rsqrt() * norms[i]

    def apply_rope(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * rotary[0] + torch.cat((-second, first), -1) * rotary[1]

    calls = []
    for b, t in shapes:
        angles, cache = torch.randn(1, t, dim // 2).repeat(1, 1, 2), [torch.randn(b, kv_heads, t + 9, dim).to(kind) for _ in range(2)]
        calls.append((torch.randn(b, t, k), (angles.cos(), angles.sin()), *cache, 9))
    tensors = [p.data for p in packed] + [*biases[:-2], *norms]
    tensors += [tensor for x, rotary, keys, values, _ in calls for tensor in (x, *rotary, keys, values)]
    with running(tensors):
        attention = Attention(tuple(first), last, Norm(norms[0], 1e-5), Heads(heads, kv_heads, dim, dim**-0.5))
        layer = DecoderLayer(attention, MLP(gates, downs, Norm(norms[1], 1e-6)))
        found = [layer(*call) for call in calls]
    for y, (x, rotary, keys, values, _) in zip(found, calls, strict=True):
        b, t, _ = x.shape
        built = [ops.linear(norm(x, 0), weight, part) for weight, part in zip(qkv, biases, strict=False)]
        projected = torch.cat(built, -1).view(b, t, heads + 2 * kv_heads, dim).transpose(1, 2)
        seen = torch.ones(t, t + 9, dtype=torch.bool).tril(9)
        queries = apply_rope(projected, rotary)[:, :heads]
        a = torch.nn.functional.scaled_dot_product_attention(queries, keys.float(), values.float(), seen, enable_gqa=True)
        h = ops.linear(a.transpose(1, 2).reshape(b, t, width), o, biases[-3], residual=x)
        gate, up = ops.linear(norm(h, 1), gate_up).chunk(2, -1)
        expected = ops.linear(torch.nn.functional.silu(gate) * up, down, residual=h)
        # A code that flips moves an output by 1/127 of the largest activation times a weight, of which there are few.
        assert float((y - expected).norm()) <= 2e-3 * float(expected.norm()), (b, t)
