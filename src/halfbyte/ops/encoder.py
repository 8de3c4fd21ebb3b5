"""Whole encoder layers of BERT and its like, for whole sequences, in one call on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.ops.layers import Addresses, LayerNorm, Weight, exactly, given, why_not_packed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EncoderLayer:
    """y = norms[1](h + down(gelu(up(h)))),  h = norms[0](x + o(attention(qkv(x))))

    or, where norms come `before`,  y = h + down(gelu(up(norms[1](h)))),  h = x + o(attention(qkv(norms[0](x))))

    weights  qkv [3 * H * D, K]: queries, keys and values, heads after heads; o [K, H * D]; up [I, K]; down [K, I]
    heads    H; D follows
    scale    what scores are multiplied by

    GELU is the exact one. Everything between the products is float32. Raises ArgumentError for weights that do not fit together or that
    `why_not` refuses.
    """

    def __init__(
        self, weights: tuple[Weight, Weight, Weight, Weight], norms: tuple[LayerNorm, LayerNorm], heads: int, scale: float, *, before: bool
    ) -> None:
        from halfbyte.kernels.cpu import encoder

        _check_weights(weights, norms, heads)
        if (reason := why_not(weights, heads)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        qkv, o, up, down = weights
        self.k, self.heads = qkv.packed.shape[1], heads
        self._tensors = tensors = Addresses()
        products = tensors.product(qkv), tensors.product(o), tensors.product(up, gelu=True), tensors.product(down)
        first, second = (encoder.Norm(tensors.of(norm.weight), tensors.of(norm.bias), norm.eps) for norm in norms)
        self._layer = encoder.Layer(*products, (first, second), before, heads, o.packed.shape[1] // heads, scale)
        self.size = *(weight.packed.shape for weight in weights), heads, before

    def __call__(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """x [B, T, K] -> y [B, T, K]. No gradients.

        mask  bool [B or 1, 1, T or 1, T]: which tokens each token may see; None: all
        bias  [B or 1, H or 1, T or 1, T]: what is added to scores
        """
        return run_layers((self,), x, mask, bias)[0]

    def fits(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> bool:
        """Whether it takes these."""
        if x.dim() != 3 or x.shape[2] != self.k or not x.numel():
            return False
        if x.dtype not in _DTYPES or not x.is_cpu:
            return False
        if mask is not None and not (mask.dtype == torch.bool and _are_scores(mask, x, 1)):
            return False
        return bias is None or (bias.dtype in _DTYPES and _are_scores(bias, x, self.heads))

    def _refreshed(self) -> Any:
        self._tensors.refresh()
        return self._layer


def run_layers(layers: Sequence[EncoderLayer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """What each of the layers, which are of one `size`, gives, one after the other; everything else as in a call."""
    from halfbyte.kernels.cpu import encoder

    if not layers[0].fits(x, mask, bias) or any(layer.size != layers[0].size for layer in layers):
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, mask, bias) if t is not None)
        raise ArgumentError(
            f"layers of one size take on the CPU x [B, T, {layers[0].k}] with B > 0 and T > 0, a mask bool "
            f"[B or 1, 1, T or 1, T] and a bias [B or 1, {layers[0].heads} or 1, T or 1, T], got {len({layer.size for layer in layers})} "
            f"sizes, {got}"
        )
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    if bias is not None:
        bias = bias.float() if bias.stride(3) == 1 else bias.float().contiguous()
    outputs = encoder.run([layer._refreshed() for layer in layers], exactly(x), mask, bias)
    if x.dtype != torch.float32:
        most = torch.finfo(x.dtype).max  # more becomes that, not infinite, as in Whisper's layers
        outputs = [y.clamp(-most, most) for y in outputs]
    return given(outputs, x.dtype)


def _are_scores(scores: Tensor, x: Tensor, heads: int) -> bool:
    """Whether they are of each token, of up to so many heads, for each other."""
    batch, tokens, _ = x.shape
    if not scores.is_cpu or scores.dim() != 4 or scores.shape[3] != tokens:
        return False
    return scores.shape[0] in (1, batch) and scores.shape[1] in (1, heads) and scores.shape[2] in (1, tokens)


def why_not(weights: Sequence[Weight], heads: int) -> str | None:
    """Why `EncoderLayer` does not take these; None where it does."""
    dim = weights[1].packed.shape[1] // heads
    return f"heads of {dim} are not a multiple of 4" if dim % 4 else why_not_packed([weight.packed for weight in weights])


def _check_weights(weights: Sequence[Weight], norms: Sequence[LayerNorm], heads: int) -> None:
    shapes = [tuple(weight.packed.shape) for weight in weights]
    k, width, inner = shapes[0][1], shapes[1][1], shapes[2][0]
    expected = [(3 * width, k), (k, width), (inner, k), (k, inner)]
    small = [t for norm in norms for t in norm[:2]], [weight.bias for weight in weights if weight.bias is not None]
    sizes = [(k,)] * 4, [(n,) for (n, _), weight in zip(expected, weights, strict=True) if weight.bias is not None]
    got = [[tuple(t.shape) for t in some] for some in small]
    if shapes != expected or got != list(sizes) or heads < 1 or width % heads or not all(t.is_cpu for some in small for t in some):
        raise ArgumentError(
            f"an encoder layer takes weights {expected}, norms and biases of {[size for some in sizes for (size,) in some]} elements on "
            f"the CPU and a divisor of {width} heads, got {shapes}, {got[0] + got[1]} and {heads}"
        )
