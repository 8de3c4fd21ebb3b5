"""Decoder layers on a CPU: native calls that compute one layer, or several consecutive ones, for the newest tokens of each sequence.

`DecoderLayer` is a layer ready to compute, made of the parts in sublayers.py and experts.py; `run_layers` computes layers one after the
other and is what decoder/lower_cpu.py and integrations/transformers call for prompts. whole_model_decode.py runs a whole model for one
token. The kernels are in kernels/cpu/transformer/decoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts.records import record_bytes
from halfbyte.ops.checks import FLOATS
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.sublayers import MLP, Attention, PerLayerInput
from halfbyte.ops.transformer.weights import TensorAddresses

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import decoder

MOST_SEQUENCES = 64
_CACHE_DTYPES = (*FLOATS, torch.int8)

Rotary = tuple[Tensor, Tensor]  # cosines and sines
Entry = tuple[Tensor, Tensor, int]  # keys and values in a cache, and the number of tokens in it


class DecoderLayer:
    """y = feed_forward(attention(x)), or per_layer(feed_forward(attention(x)), e) with a per-layer input e

    Everything between the products is float32.

    Args:
        attention: Computed first.
        feed_forward: The MLP or mixture of experts.
        per_layer: What a layer with a per-layer input does last.

    Attributes:
        k: Elements of a row of x and y.
        heads: The heads of attention.
        most_rows: Rows of x, at most, for which one native call computes the experts; None: any number, as the layer has none.
        per_layer_width: P, the elements of a per-layer input; None: there is none.
        experts: The mixture of experts, if the layer has one.
        tensors: Addresses of the weights.
        native, native_attention: The layer, and its attention alone, which read the weights by these addresses.

    Raises:
        ArgumentError: Weights do not fit together, or `why_not` refuses them.
    """

    def __init__(self, attention: Attention, feed_forward: MLP | Experts, per_layer: PerLayerInput | None = None) -> None:
        from halfbyte.kernels.cpu.transformer import decoder

        attention.check()
        feed_forward.check()
        self.heads, self.k = attention.heads, attention.o_proj.packed.shape[0]
        if feed_forward.k != self.k:
            raise ArgumentError(f"attention and MLP of a decoder layer have one width, got {self.k} and {feed_forward.k}")
        if per_layer is not None:
            per_layer.check(self.k)
        if (reason := why_not(attention, feed_forward, per_layer)) is not None:
            raise ArgumentError(f"this layer is not computed in one call: {reason}")
        self.per_layer_width = None if per_layer is None else per_layer.width
        self.tensors = tensors = TensorAddresses()
        native_attention = attention.native(tensors)
        self.native = decoder.Layer(
            native_attention, feed_forward.native(tensors), None if per_layer is None else per_layer.native(tensors)
        )
        self.native_attention = decoder.Layer(native_attention, None)
        self.experts = feed_forward if isinstance(feed_forward, Experts) else None
        self.most_rows = None if self.experts is None else self.experts.most_rows

    @property
    def rotary(self) -> int:
        """R, the elements of a head that rope rotates."""
        return self.heads.rotary_width

    def fits(self, rows: int) -> bool:
        """Whether one native call computes so many rows: more rows need `run_layers` of this layer alone."""
        return self.most_rows is None or rows <= self.most_rows

    def __call__(
        self,
        x: Tensor,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
        length: int,
        mask: Tensor | None = None,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer by `run_layers`, with the cache entry keys, values, length."""
        return run_layers((self,), x, rotary, [(keys, values, length)], mask, per_layer_input)

    def check(self, x: Tensor, rotary: Rotary, entry: Entry, mask: Tensor | None) -> None:
        """Raise ArgumentError for arguments that `run_layers` does not take for this layer."""
        if self._fits(x, rotary, *entry) and (mask is None or _fits_mask(mask, x, entry[2])):
            return
        tensors = (x, *rotary, *entry[:2], *(() if mask is None else (mask,)))
        got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
        raise ArgumentError(
            f"this layer takes on the CPU x [B, t, {self.k}] with B in 1 … {MOST_SEQUENCES} and t > 0, cosines and sines "
            f"[B, t, {self.rotary}], a cache [B, {self.heads.num_kv_heads}, T, {self.heads.head_dim}] with room for t tokens from "
            f"{entry[2]} on and a mask bool [B, 1, t, T], got {got}"
        )

    def _fits(self, x: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, length: int) -> bool:
        if x.dim() != 3 or keys.dim() != 4 or not (x.is_cpu and keys.is_cpu and values.is_cpu):
            return False
        (b, t, k), size, heads = x.shape, keys.shape[2], self.heads
        if k != self.k or x.dtype not in FLOATS or not 0 < b <= MOST_SEQUENCES or t == 0:
            return False
        width = heads.head_dim if keys.dtype != torch.int8 else record_bytes(heads.head_dim)
        if keys.dtype not in _CACHE_DTYPES or keys.shape != (b, heads.num_kv_heads, size, width) or not 0 <= length <= size - t:
            return False
        if values.dtype != keys.dtype or values.shape != keys.shape or keys.stride(3) != 1 or values.stride(3) != 1:
            return False
        cos, sin = rotary
        if cos.shape != sin.shape or cos.dim() != 3 or not (cos.is_cpu and sin.is_cpu):
            return False
        return cos.shape[0] in (1, b) and cos.shape[1] == t and heads.accepts_rope_of(cos.shape[2])


def _fits_mask(mask: Tensor, x: Tensor, length: int) -> bool:
    b, t, _ = x.shape
    if mask.dtype != torch.bool or not mask.is_cpu or mask.dim() != 4:
        return False
    return mask.shape[0] in (1, b) and mask.shape[1] == 1 and mask.shape[2] in (1, t) and mask.shape[3] >= length + t


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    rotary: Rotary,
    entries: Sequence[Entry],
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
) -> Tensor:
    """Compute consecutive layers for new tokens, which enter the cache. No gradients.

    All layers are one native call. Only a layer by itself that does not `fit` so many rows is one for attention and
    `halfbyte::add_experts` for its experts, in the dtype of their norm.

    Args:
        layers: The first one reads x, each other one the output before it.
        x: [B, t, K], B at most MOST_SEQUENCES, in any float dtype.
        rotary: Cosines and sines of the positions, each [B or 1, t, R / 2]; or of R elements, the first half once more behind it, or
            each twice where `Heads.rope_interleaved` is "repeated"; of any number where R is 0.
        entries: For each layer keys and values [B, Hkv, T, D] of one type, T >= length + t, and the length, the tokens before the new ones.
            Those of the new tokens are written, unless the layer reuses another one's. Int8 ones hold the records of
            `layouts/records.py` in place of D elements.
        mask: bool [B or 1, 1, t or 1, T or more]: which tokens of the cache may be seen, in addition to the causal mask.
        per_layer_input: [B, t, P], if the layer has one; for a single layer only.

    Returns:
        y [B, t, K], of the last layer, float32.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not fit.
    """
    for layer, entry in zip(layers, entries, strict=True):
        layer.check(x, rotary, entry, mask)
        _check_per_layer_input(layer, x, per_layer_input, len(layers))
    for layer in layers:
        layer.tensors.refresh()
    first = layers[0]
    if len(layers) > 1 or first.experts is None or first.fits(x.shape[0] * x.shape[1]):
        return _run([layer.native for layer in layers], x, rotary, entries, mask, per_layer_input)
    from halfbyte.ops.transformer.routing import add_experts

    h = _run([first.native_attention], x, rotary, entries, mask, None)
    return add_experts(h.to(first.experts.pre_norm.weight.dtype), first.experts).float()


def _run(
    native_layers: Sequence[decoder.Layer],
    x: Tensor,
    rotary: Rotary,
    entries: Sequence[Entry],
    mask: Tensor | None,
    per_layer_input: Tensor | None,
) -> Tensor:
    """Compute native layers in one call; arguments as for `run_layers`, which has checked them."""
    from halfbyte.kernels.cpu.transformer import decoder

    cos, sin = (t if t.dtype == torch.float32 and t.is_contiguous() else t.float().contiguous() for t in rotary)
    if mask is not None and mask.stride(3) != 1:
        mask = mask.contiguous()
    rows = None if per_layer_input is None else _in_rows(per_layer_input)
    cache = [decoder.Entry(*entry) for entry in entries]
    return decoder.run(native_layers, x.float().contiguous(), (cos, sin), cache, mask, rows)[-1]


def _check_per_layer_input(layer: DecoderLayer, x: Tensor, per_layer_input: Tensor | None, layers: int) -> None:
    wanted = None if layer.per_layer_width is None else (*x.shape[:2], layer.per_layer_width)
    got = None if per_layer_input is None else tuple(per_layer_input.shape)
    if got != wanted or (per_layer_input is not None and (layers > 1 or not per_layer_input.is_cpu)):
        raise ArgumentError(f"a per-layer input is on the CPU, for one layer that has one: expected {wanted}, got {got} for {layers}")


def _in_rows(per_layer_input: Tensor) -> Tensor:
    """Return [B, t, P] in float32, each row of P elements contiguous and all rows equally far apart."""
    wide = per_layer_input.float()
    return wide if wide.stride(2) == 1 and wide.stride(0) == wide.stride(1) * wide.shape[1] else wide.contiguous()


def why_not(attention: Attention, feed_forward: MLP | Experts, per_layer: PerLayerInput | None = None) -> str | None:
    """Return why `DecoderLayer` does not support these weights; None if it does."""
    reasons = (part.why_not() for part in (attention, feed_forward, per_layer) if part is not None)
    return next((reason for reason in reasons if reason is not None), None)
