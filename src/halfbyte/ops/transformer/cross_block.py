"""Transformer blocks with self-attention, cross-attention and GEGLU, as UNets have them: one native call computes one on a CPU.

Called by nn/fused_transformers.py; the kernel is in kernels/cpu/transformer/cross_block.py, which is imported when a block is compiled, so
that `import halfbyte` does not import llvmlite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts import cpu_tiles
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.sublayers import Norm, native_norm
from halfbyte.ops.transformer.weights import TensorAddresses, Weight, why_not_packed


class CrossBlock:
    """y = r + ((n · Wupᵀ) * gelu(n · Wgateᵀ)) · Wdownᵀ,  n = norm3(r),  r = h + attention(norm2(h), c),  h = x + attention(norm1(x))

    Biases are left out. Scores are multiplied by 1 / sqrt(D); GELU is the exact one. Everything between the products is float32.

    Args:
        self_attention: Queries, keys and values in one product [3 H D, K]; then the output's [K, H D].
        cross_attention: Queries [H D, K]; keys and values in one product [2 H D, E]; then the output's [K, H D].
        feed_forward: Up and gate in one product [2 I, K], up first; then down [K, I].
        norms: Three layer norms of K.
        heads: H.

    Raises:
        ArgumentError: `why_not` has a reason.
    """

    def __init__(
        self,
        self_attention: tuple[Weight, Weight],
        cross_attention: tuple[Weight, Weight, Weight],
        feed_forward: tuple[Weight, Weight],
        norms: Sequence[Norm],
        heads: int,
    ) -> None:
        from halfbyte.kernels.cpu.transformer import cross_block

        if (reason := why_not(self_attention, cross_attention, feed_forward, norms, heads)) is not None:
            raise ArgumentError(f"a native call does not compute this block: {reason}")
        up, gate = _halves(feed_forward[0])
        self._tensors = tensors = TensorAddresses()
        qkv, o, q, kv, cross_o = (tensors.product(weight) for weight in (*self_attention, *cross_attention))
        feed = tensors.product(up), tensors.product(gate, gelu="none"), tensors.product(feed_forward[1])
        first, second, third = (native_norm(tensors, norm) for norm in norms)
        self._native = cross_block.CrossBlock(qkv, o, q, kv, cross_o, *feed, (first, second, third), heads)
        self._widths = self_attention[0].packed.shape[1], cross_attention[1].packed.shape[1]

    def fits(self, x: Tensor, context: Tensor) -> bool:
        """Whether a call takes x and context: plain float32 tensors on a CPU, not empty, of one batch size."""
        if not plain(x, context) or x.dim() != 3 or context.dim() != 3 or len(x) != len(context):
            return False
        on_cpu = all(t.is_cpu and t.dtype == torch.float32 and t.numel() for t in (x, context))
        return on_cpu and (x.shape[2], context.shape[2]) == self._widths

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        """Compute the block, without gradients: x [B, T, K], context [B, S, E] -> y [B, T, K]. The caller has asked `fits`."""
        self._tensors.refresh()
        return self._native(x.contiguous(), context.contiguous())


def why_not(
    self_attention: tuple[Weight, Weight],
    cross_attention: tuple[Weight, Weight, Weight],
    feed_forward: tuple[Weight, Weight],
    norms: Sequence[Norm],
    heads: int,
) -> str | None:
    """Return why `CrossBlock` does not compute these; None where it does. The arguments are those of `CrossBlock`."""
    weights = [weight.packed for weight in (*self_attention, *cross_attention, *feed_forward)]
    width, k = self_attention[0].packed.shape[0] // 3, self_attention[0].packed.shape[1]
    inner, context = feed_forward[1].packed.shape[1], cross_attention[1].packed.shape[1]
    wanted = [(3 * width, k), (k, width), (width, k), (2 * width, context), (k, width), (2 * inner, k), (k, inner)]
    if (shapes := [tuple(weight.shape) for weight in weights]) != wanted or any(norm.weight.shape != (k,) for norm in norms):
        return f"its weights are {shapes}, not {wanted} with norms of {k}"
    if width % heads or width // heads % 4:
        return f"{heads} heads of {width} outputs are not each a multiple of 4"
    if inner % cpu_tiles.PANEL:
        return f"halves of {inner} outputs are not whole panels of {cpu_tiles.PANEL}"
    return why_not_packed(weights)


def _halves(weight: Weight) -> tuple[Weight, Weight]:
    """Return the two halves of a product's outputs, whose panels follow each other."""
    packed, (n, k) = weight.packed, weight.packed.shape
    biases = (None, None) if weight.bias is None else weight.bias.tensor_split(2)
    parts = zip(packed.data.tensor_split(2), biases, strict=True)
    up, gate = (weight._replace(packed=replace(packed, shape=(n // 2, k), data=data), bias=bias) for data, bias in parts)
    return up, gate
