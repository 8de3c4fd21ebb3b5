"""Encoder layers (BERT, ViT and others) of whole sequences: one native call computes one or more on a CPU.

`EncoderLayer` takes the same descriptions as a decoder layer (decoder.py), of which it supports other settings. Called by
integrations/transformers/encoder; the kernels are in kernels/cpu/transformer/encoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.ops.checks import FLOATS
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm, native_norm
from halfbyte.ops.transformer.weights import TensorAddresses, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import encoder

_NORMS = 2  # of a layer


class EncoderLayer:
    """y = norm(h + down(gelu(up(h)))),  h = norm(x + o(attention(qkv(x))))          with `residual_norm` of both halves

    or y = h + down(gelu(up(norm(h)))),  h = x + o(attention(qkv(norm(x))))          with `pre_norm` of both halves

    Attention is to all tokens, GELU the exact one; norms are layer norms. Everything between the products is float32.

    Args:
        attention: With one product for queries, keys and values, without rope.
        mlp: Not gated.

    Attributes:
        k: Elements of a row of x and y.
        heads: Number of heads.
        kind: Equal for layers that `run_layers` computes together: sizes of weights, heads and the place of norms.

    Raises:
        ArgumentError: The weights do not fit together, or `why_not` has a reason.
    """

    def __init__(self, attention: Attention, mlp: MLP) -> None:
        from halfbyte.kernels.cpu.transformer import encoder

        _check_weights(attention, mlp)
        if (reason := why_not(attention, mlp)) is not None:
            raise ArgumentError(f"native calls do not compute this layer: {reason}")
        (qkv,), heads = attention.qkv, attention.heads
        has_pre_norms, norms = _norms_of(attention, mlp)
        self.k, self.heads = qkv.packed.shape[1], heads.num_heads
        self._tensors = tensors = TensorAddresses()
        products = (
            tensors.product(qkv),
            tensors.product(attention.o_proj),
            tensors.product(mlp.gate_up, gelu="none"),
            tensors.product(mlp.down_proj),
        )
        attention_norm, mlp_norm = (native_norm(tensors, norm) for norm in norms)
        native_norms = attention_norm, mlp_norm
        self._native = encoder.Layer(*products, native_norms, has_pre_norms, heads.num_heads, heads.head_dim, heads.scale)
        shapes = (weight.packed.shape for weight in (qkv, attention.o_proj, mlp.gate_up, mlp.down_proj))
        self.kind = *shapes, heads.num_heads, has_pre_norms

    def __call__(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Compute the layer, without gradients.

        Args:
            x: [B, T, K].
            mask: bool [B or 1, 1, T or 1, T]: which tokens each token may see; None: all.
            bias: [B or 1, H or 1, T or 1, T]: added to attention scores.

        Returns:
            y [B, T, K], float32
        """
        return run_layers((self,), x, mask, bias)

    def fits(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> bool:
        """Whether a call takes these arguments."""
        if x.dim() != 3 or x.shape[2] != self.k or not x.numel():
            return False
        if x.dtype not in FLOATS or not x.is_cpu:
            return False
        if mask is not None and not (mask.dtype == torch.bool and _broadcasts_to_scores(mask, x, 1)):
            return False
        return bias is None or (bias.dtype in FLOATS and _broadcasts_to_scores(bias, x, self.heads))

    def refreshed(self) -> encoder.Layer:
        """Return the native layer, whose copies of norms and biases are up to date."""
        self._tensors.refresh()
        return self._native


def run_layers(layers: Sequence[EncoderLayer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return the output of consecutive layers of one `kind`; x, mask and bias are as in a call of a layer."""
    from halfbyte.kernels.cpu.transformer import encoder

    if not layers[0].fits(x, mask, bias) or any(layer.kind != layers[0].kind for layer in layers):
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, mask, bias) if t is not None)
        raise ArgumentError(
            f"layers of one size take on the CPU x [B, T, {layers[0].k}] with B > 0 and T > 0, a mask bool "
            f"[B or 1, 1, T or 1, T] and a bias [B or 1, {layers[0].heads} or 1, T or 1, T], got {len({layer.kind for layer in layers})} "
            f"sizes, {got}"
        )
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    if bias is not None:
        bias = bias.float() if bias.stride(3) == 1 else bias.float().contiguous()
    return encoder.run([layer.refreshed() for layer in layers], x.float().contiguous(), mask, bias)[-1]


def _broadcasts_to_scores(tensor: Tensor, x: Tensor, heads: int) -> bool:
    """Whether a tensor on the CPU is [B or 1, heads or 1, T or 1, T] for x [B, T, K]."""
    batch, tokens, _ = x.shape
    if not tensor.is_cpu or tensor.dim() != 4 or tensor.shape[3] != tokens:
        return False
    return tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads) and tensor.shape[2] in (1, tokens)


def why_not(attention: Attention, mlp: MLP) -> str | None:
    """Return why `EncoderLayer` does not compute these; None where it does."""
    heads = attention.heads
    if len(attention.qkv) > 1 or heads._replace(scale=1.0) != Heads(heads.num_heads, heads.num_heads, heads.head_dim, 1.0, rotary_dim=0):
        return "its attention has several products, or heads with norms or rope"
    if mlp.activation != "gelu" or mlp.gated or mlp.parallel_residual:
        return "its MLP is no down(gelu(up(x)))"
    has_post_norms = any(part.post_norm is not None or part.residual_multiplier != 1 for part in (attention, mlp))
    if has_post_norms or len(_norms_of(attention, mlp)[1]) != _NORMS:
        return "it has other norms than two before its halves, or two of the sums with the residual"
    if heads.head_dim % 4:
        return f"heads of {heads.head_dim} are not a multiple of 4"
    return why_not_packed([weight.packed for weight in (*attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj)])


def _norms_of(attention: Attention, mlp: MLP) -> tuple[bool, list[Norm]]:
    """Return whether norms come before the products, and the layer norms of both halves."""
    has_pre_norms = attention.pre_norm is not None
    norms = [attention.pre_norm, mlp.pre_norm] if has_pre_norms else [attention.residual_norm, mlp.residual_norm]
    return has_pre_norms, [norm for norm in norms if norm is not None and norm.layer_norm and not norm.unit_offset]


def _check_weights(attention: Attention, mlp: MLP) -> None:
    """Raise ArgumentError for tensors that do not fit together, or are not on the CPU."""
    weights, count = [*attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj], attention.heads.num_heads
    shapes = [tuple(weight.packed.shape) for weight in weights]
    k, width, inner = shapes[0][1], attention.o_proj.packed.shape[1], mlp.gate_up.packed.shape[0]
    expected = [(3 * width, k), (k, width), (inner, k), (k, inner)]
    norms = [norm for part in (attention, mlp) for norm in (part.pre_norm, part.residual_norm) if norm is not None]
    vectors = [(t, k) for norm in norms for t in (norm.weight, norm.bias) if t is not None]
    vectors += [(weight.bias, n) for (n, _), weight in zip(expected, weights, strict=False) if weight.bias is not None]
    fits = shapes == expected and count > 0 and width == count * attention.heads.head_dim
    if not fits or any(t.shape != (size,) or not t.is_cpu for t, size in vectors):
        raise ArgumentError(
            f"an encoder layer takes weights {expected}, norms and biases of {[size for _, size in vectors]} elements on the CPU and a "
            f"divisor of {width} heads, got {shapes}, {[tuple(t.shape) for t, _ in vectors]} and {count}"
        )
