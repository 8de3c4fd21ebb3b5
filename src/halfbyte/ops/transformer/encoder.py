"""Whole encoder layers (BERT and others) for whole sequences in one native call on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.ops.checks import FLOATS
from halfbyte.ops.transformer.decoder import MLP, Attention, Heads, Norm, native_norm
from halfbyte.ops.transformer.unrounded import rounded, unrounded
from halfbyte.ops.transformer.weights import TensorAddresses, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import encoder

_NORMS = 2  # of a layer


class EncoderLayer:
    """y = norm(h + down(gelu(up(h)))),  h = norm(x + o(attention(qkv(x))))          with `residual_norm` of both halves

    or y = h + down(gelu(up(norm(h)))),  h = x + o(attention(qkv(norm(x))))          with the norms `before` both

    Attention is to all tokens, GELU the exact one; norms are layer norms. Everything between the products is float32.

    Raises:
        ArgumentError: The weights do not fit together, or `why_not` has a reason.
    """

    def __init__(self, attention: Attention, mlp: MLP) -> None:
        from halfbyte.kernels.cpu.transformer import encoder

        _check_weights(attention, mlp)
        if (reason := why_not(attention, mlp)) is not None:
            raise ArgumentError(f"native calls do not compute this layer: {reason}")
        (qkv,), heads = attention.qkv, attention.heads
        before, norms = _norms_of(attention, mlp)
        self.k, self.heads = qkv.packed.shape[1], heads.num_heads
        self._tensors = tensors = TensorAddresses()
        products = (
            tensors.product(qkv),
            tensors.product(attention.o_proj),
            tensors.product(mlp.gate_up, gelu="none"),
            tensors.product(mlp.down_proj),
        )
        first, second = (native_norm(tensors, norm) for norm in norms)
        self._layer = encoder.Layer(*products, (first, second), before, heads.num_heads, heads.head_dim, heads.scale)
        self.size = *(weight.packed.shape for weight in (qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)), heads.num_heads, before

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
        if x.dtype not in FLOATS or not x.is_cpu:
            return False
        if mask is not None and not (mask.dtype == torch.bool and _are_scores(mask, x, 1)):
            return False
        return bias is None or (bias.dtype in FLOATS and _are_scores(bias, x, self.heads))

    def _refreshed(self) -> encoder.Layer:
        self._tensors.refresh()
        return self._layer


def run_layers(layers: Sequence[EncoderLayer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """What each of the layers, which are of one `size`, gives, one after the other; everything else as in a call."""
    from halfbyte.kernels.cpu.transformer import encoder

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
    outputs = encoder.run([layer._refreshed() for layer in layers], unrounded(x), mask, bias)
    if x.dtype != torch.float32:
        most = torch.finfo(x.dtype).max  # more becomes that, not infinite, as in Whisper's layers
        outputs = [y.clamp(-most, most) for y in outputs]
    return rounded(outputs, x.dtype)


def _are_scores(scores: Tensor, x: Tensor, heads: int) -> bool:
    """Whether they are of each token, of up to so many heads, for each other."""
    batch, tokens, _ = x.shape
    if not scores.is_cpu or scores.dim() != 4 or scores.shape[3] != tokens:
        return False
    return scores.shape[0] in (1, batch) and scores.shape[1] in (1, heads) and scores.shape[2] in (1, tokens)


def why_not(attention: Attention, mlp: MLP) -> str | None:
    """Why `EncoderLayer` does not compute these; None where it does."""
    heads = attention.heads
    if len(attention.qkv) > 1 or heads._replace(scale=1.0) != Heads(heads.num_heads, heads.num_heads, heads.head_dim, 1.0, rotary_dim=0):
        return "its attention has several products, or heads with norms or rope"
    if mlp.activation != "gelu" or mlp.gated or mlp.parallel_residual:
        return "its MLP is no down(gelu(up(x)))"
    if (
        any(half.post_norm is not None or half.residual_multiplier != 1 for half in (attention, mlp))
        or len(_norms_of(attention, mlp)[1]) != _NORMS
    ):
        return "it has other norms than two before its halves, or two of the sums with the residual"
    if heads.head_dim % 4:
        return f"heads of {heads.head_dim} are not a multiple of 4"
    return why_not_packed([weight.packed for weight in (*attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)])


def _norms_of(attention: Attention, mlp: MLP) -> tuple[bool, list[Norm]]:
    """Whether norms come before the products, and the layer norms of both halves."""
    before = attention.pre_norm is not None
    found = [attention.pre_norm, mlp.pre_norm] if before else [attention.residual_norm, mlp.residual_norm]
    return before, [norm for norm in found if norm is not None and norm.layer_norm and not norm.unit_offset]


def _check_weights(attention: Attention, mlp: MLP) -> None:
    weights, count = [*attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj], attention.heads.num_heads
    shapes = [tuple(weight.packed.shape) for weight in weights]
    k, width, inner = shapes[0][1], attention.o_proj.packed.shape[1], mlp.gate_up.packed.shape[0]
    expected = [(3 * width, k), (k, width), (inner, k), (k, inner)]
    norms = [norm for half in (attention, mlp) for norm in (half.pre_norm, half.residual_norm) if norm is not None]
    small = [(t, k) for norm in norms for t in (norm.weight, norm.bias) if t is not None]
    small += [(weight.bias, n) for (n, _), weight in zip(expected, weights, strict=False) if weight.bias is not None]
    fits = shapes == expected and count > 0 and width == count * attention.heads.head_dim
    if not fits or any(t.shape != (size,) or not t.is_cpu for t, size in small):
        raise ArgumentError(
            f"an encoder layer takes weights {expected}, norms and biases of {[size for _, size in small]} elements on the CPU and a "
            f"divisor of {width} heads, got {shapes}, {[tuple(t.shape) for t, _ in small]} and {count}"
        )
