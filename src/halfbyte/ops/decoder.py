"""Whole decoder layers of Llama-like models in one call on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts.records import record_bytes
from halfbyte.ops.layers import Addresses, Weight, exactly, given, why_not_packed

MOST_SEQUENCES = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Heads(NamedTuple):
    """The heads of attention: H query heads, Hkv key-value heads, D elements each; the factor of scores; and the weights [D] of the RMS
    norms of queries and keys, if any."""

    query: int
    key: int
    dim: int
    scale: float
    norms: tuple[Tensor, Tensor] | None = None


class DecoderLayer:
    """y = h + down(silu(gate) * up),  gate, up = gate_up(norm(h)),  h = x + o(attention(qkv(norm(x))))

    qkv      [(H + 2 Hkv) * D, K]: queries, keys and values, one head after the other; or their rows in up to three weights
    o        [K, H * D]
    gate_up  [2 I, K]: gate, then up
    down     [K, I]
    norms    weights [K] of the RMS norms before qkv and before gate_up
    eps      of both, and of those of heads

    Everything between the products is float32. Raises ArgumentError for weights that do not fit together or that `why_not` refuses.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        norms: tuple[Tensor, Tensor],
        eps: tuple[float, float, float],
        heads: Heads,
    ) -> None:
        from halfbyte.kernels.cpu import decoder

        _check_weights(weights, norms, heads)
        if (reason := why_not(weights, heads)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        self._heads, self.k, self.dim = heads, weights[0].packed.shape[1], heads.dim
        self.tensors = tensors = Addresses()
        *qkv, o, gate_up, down = map(tensors.product, weights)
        before, between = map(tensors.of, norms)
        of_heads = (0, 0) if heads.norms is None else (tensors.of(heads.norms[0]), tensors.of(heads.norms[1]))
        numbers = heads.query, heads.key, heads.dim, heads.scale
        self.inner = decoder.Layer(tuple(qkv), o, gate_up, down, (before, between), of_heads, eps, *numbers)

    def __call__(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None = None
    ) -> Tensor:
        """Tokens x [B, t, K], appended to the cache at `length` -> y [B, t, K]; B is at most MOST_SEQUENCES. No gradients.

        rotary        cosines and sines of the positions, each [B or 1, t, D]
        keys, values  [B, Hkv, T, D] of one type, T >= length + t; those of the tokens are written; int8 ones hold the records of
                      `layouts/records.py` in the place of D elements
        mask          bool [B or 1, 1, t or 1, T or more]: which tokens of the cache may be seen, in addition to the causal mask
        """
        return run_layers((self,), x, rotary, [(keys, values, length)], mask)[0]

    def check(self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> None:
        """Raises ArgumentError for what a call does not take."""
        heads = self._heads
        fits = x.dim() == 3 and keys.dim() == 4 and keys.shape == values.shape and keys.dtype == values.dtype
        fits = fits and keys.dtype in (*_DTYPES, torch.int8)
        if fits:
            b, t, k = x.shape
            size, width = keys.shape[2], heads.dim if keys.dtype != torch.int8 else record_bytes(heads.dim)
            fits = k == self.k and 0 < b <= MOST_SEQUENCES and t > 0
            fits = fits and keys.shape == (b, heads.key, size, width) and 0 <= length <= size - t
            fits = fits and keys.stride(3) == 1 and values.stride(3) == 1 and x.dtype in _DTYPES
            fits = fits and all(r.dim() == 3 and r.shape[0] in (1, b) and r.shape[1:] == (t, heads.dim) for r in rotary)
            fits = fits and len(rotary[0]) == len(rotary[1]) and x.is_cpu and keys.is_cpu and values.is_cpu
        if fits and mask is not None:
            fits = mask.dtype == torch.bool and mask.is_cpu and mask.dim() == 4 and mask.shape[0] in (1, b) and mask.shape[1] == 1
            fits = fits and mask.shape[2] in (1, t) and mask.shape[3] >= length + t
        if not fits:
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, *rotary, keys, values, *(() if mask is None else (mask,))))
            raise ArgumentError(
                f"this layer takes on the CPU x [B, t, {self.k}] with B in 1 … {MOST_SEQUENCES} and t > 0, cosines and sines "
                f"[B, t, {heads.dim}], a cache [B, {heads.key}, T, {heads.dim}] with room for t tokens from {length} on and a mask bool "
                f"[B, 1, t, T], got {got}"
            )


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[tuple[Tensor, Tensor, int]],
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """The outputs of the layers, one after the other; `entries`: keys, values and length for each, the rest as in a call."""
    for layer, entry in zip(layers, entries, strict=True):
        layer.check(x, rotary, *entry, mask)
    from halfbyte.kernels.cpu import decoder

    cos, sin = (t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous() for t in rotary)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    for layer in layers:
        layer.tensors.refresh()
    inner, places = [layer.inner for layer in layers], [decoder.Entry(*entry) for entry in entries]
    return given(decoder.run(inner, exactly(x), (cos, sin), places, mask), x.dtype)


def why_not(weights: Sequence[Weight], heads: Heads) -> str | None:
    """Why `DecoderLayer` does not support these weights; None if it does."""
    from halfbyte.kernels.cpu import decoder

    if (reason := why_not_packed([weight.packed for weight in weights])) is not None:
        return reason
    return decoder.supports(weights[-2].packed.shape[0] // 2, heads.query, heads.key, heads.dim)


def _check_weights(weights: Sequence[Weight], norms: tuple[Tensor, Tensor], heads: Heads) -> None:
    shapes = [tuple(weight.packed.shape) for weight in weights]
    k, inner, both = shapes[0][1], shapes[-2][0] // 2, (heads.query + 2 * heads.key) * heads.dim
    expected = [(both, k), (k, heads.query * heads.dim), (2 * inner, k), (k, inner)]
    small = [*norms, *(heads.norms or ()), *(weight.bias for weight in weights if weight.bias is not None)]
    sizes = [k, k, *([heads.dim] * 2 if heads.norms else []), *(n for (n, _), w in zip(shapes, weights, strict=True) if w.bias is not None)]
    joined = [(sum(n for n, _ in shapes[:-3]), k), *shapes[-3:]] if {c for _, c in shapes[:-3]} == {k} else shapes
    if joined != expected or [tuple(t.shape) for t in small] != [(size,) for size in sizes] or not all(t.is_cpu for t in small):
        got = f"{shapes}, and {[list(t.shape) for t in small]}"
        raise ArgumentError(f"a decoder layer takes weights {expected} and norms and biases of {sizes} elements on the CPU, got {got}")
