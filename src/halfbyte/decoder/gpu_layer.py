"""One decoder layer on a GPU: `decode` for one new token of each sequence, `prefill` for many.

`decode`, x [B, 1, K]:

    qkv  = normed_linear(x, pre_norm, qkv weights)                  one product where q, k and v are fused, else three
    a    = attend(qkv, rope, KV cache)                              qk norms, rope, append to the cache, attention: two kernels
    h    = linear(a, o_proj, residual=x)                            with a post norm: h, z = add_normed(linear(a, o_proj), x, norms)
    g    = normed_linear(h, pre_norm, gate_up, gates)               act(gate) * up, or act(up) without gates
    y    = linear(g, down_proj, residual=h)                         with a post norm: add_normed(linear(g, down_proj), h, norm)
    y    = add_experts(h, experts)                                  in place of g and y for a mixture of experts
    y    = add_normed(linear(act(linear(y, gate)) * e, proj), y)    after these, for a layer with a per-layer input e

`prefill` computes the same with norms and gates in kernels of their own, `apply_rope` (qk norms, rope, append to the cache) and
`attend_many`. The functions of `halfbyte.ops` compute an op in torch where the GPU has no kernel for it.

Launched one by one, the kernels of a layer take the host longer than the GPU. So the second time that layers make the same launches these
are recorded, and replayed from then on (`replay_layer`).

`lower_gpu.py` calls this with layers of a specification, `integrations/transformers/decoder/gpu_run.py` with those of live modules.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from halfbyte.decoder.spec import parts_of
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import GateFunction
from halfbyte.layouts.base import Packed
from halfbyte.ops.cuda import on
from halfbyte.ops.functions import linear
from halfbyte.ops.modes import plain
from halfbyte.ops.replay import replayed
from halfbyte.ops.transformer.attend import attend
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.normed_linear import activated, normed_linear
from halfbyte.ops.transformer.norms import add_normed, normed
from halfbyte.ops.transformer.prefill_ops import apply_rope, attend_many
from halfbyte.ops.transformer.routing import add_experts
from halfbyte.ops.transformer.sublayers import MLP, Attention, Norm, PerLayerInput
from halfbyte.ops.transformer.weights import Weight

Rotary = tuple[Tensor, Tensor] | None  # cosines and sines of the tokens' positions; None: heads are not rotated


class Projection(Protocol):
    """A linear layer whose output goes to the residual stream."""

    def __call__(self, x: Tensor) -> Tensor:
        """linear(x)"""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + multiplier * linear(x)"""


class PackedProjection(NamedTuple):
    """`Projection` of a packed weight.

    Attributes:
        weight: The weight, with its bias.
        multiplier: Of the output, where torch multiplies it; 1 where another kernel does, or nothing.
    """

    weight: Weight
    multiplier: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.packed, self.weight.bias, **_compute_of(self.weight))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.multiplier != 1:
            return residual + self(x) * self.multiplier
        return linear(x, self.weight.packed, self.weight.bias, residual=residual, **_compute_of(self.weight))


class KeyValues(NamedTuple):
    """The KV cache of a layer, as kernels read and write it.

    Attributes:
        keys, values: [B, Hkv, T, D], in the dtype of activations or int8 codes. New tokens are written from index `length` on.
        length: int64 [1] on the GPU: tokens in the cache before the new ones; None: 0.
        scales: Of the codes of keys and of values, bfloat16 [B, Hkv, T, ceil(D / 32)]; None: keys and values are not codes.
    """

    keys: Tensor
    values: Tensor
    length: Tensor | None
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """A decoder layer, as `decode` and `prefill` read it.

    Attributes:
        attention: The attention sublayer.
        mlp: The MLP or mixture of experts; None: the output is that of the attention sublayer, and the caller computes the rest.
        o_proj: The output projection of attention, with its addition to the residual stream.
        down_proj: That of the MLP; None where `mlp` is none.
        per_layer: How the per-layer input is added, and its last projection; None: the layer has no per-layer input.
        launch_id: Equal for layers that differ in nothing but the addresses of `operands`, so that they replay the same recorded
            launches; None: launches of this layer are not replayed together.
        operands: All tensors of the layer that kernels read; () without `launch_id`.
    """

    attention: Attention
    mlp: MLP | Experts | None
    o_proj: Projection
    down_proj: Projection | None
    per_layer: tuple[PerLayerInput, Projection] | None = None
    launch_id: int | None = None
    operands: tuple[Tensor, ...] = ()

    def replayable(self) -> GpuLayer:
        """Return the layer with `launch_id` and `operands`, or as it is where its launches cannot be replayed together. From then on its
        tensors must not move."""
        parts = [*parts_of((self.attention, self.mlp, None if self.per_layer is None else self.per_layer[0]))]
        tensors = [part.data if isinstance(part, Packed) else part for part in parts if isinstance(part, Packed | Tensor)]
        if len(self.attention.qkv) > 1:  # torch concatenates their products
            return self
        if any(tensor.data_ptr() % 16 or not tensor.is_contiguous() for tensor in tensors):  # kernels copy these first
            return self
        if any(isinstance(part, Weight) and part.compute == "int8" for part in parts):
            return self
        if any(isinstance(part, PackedProjection) and part.multiplier != 1 for part in (self.o_proj, self.down_proj)):  # by torch
            return self
        first_index = dict[int, int]()  # by address
        same_as = [first_index.setdefault(tensor.data_ptr(), index) for index, tensor in enumerate(tensors)]
        launch_id = _launch_id((*map(_launch_key, parts), *same_as))
        return replace(self, launch_id=launch_id, operands=tuple(tensors[index] for index in first_index.values()))


def _launch_key(part: object) -> Hashable:
    """Everything of a part of a layer that decides which kernels are launched, and how: all but the addresses of tensors."""
    if isinstance(part, Packed):
        return part.name, part.shape, _launch_key(part.data)
    if isinstance(part, Tensor):
        return part.shape, part.dtype, part.get_device()
    return (type(part), len(part)) if isinstance(part, tuple) else part


_launch_ids = itertools.count()


@functools.lru_cache(maxsize=4096)
def _launch_id(key: Hashable) -> int:
    """Return a number for a key of launches, unique even after the key was evicted: then the key gets a new number."""
    return next(_launch_ids)


def packed_layer(attention: Attention, mlp: MLP | Experts | None, per_layer_input: PerLayerInput | None = None) -> GpuLayer:
    """Make a layer, without `launch_id`, from its sublayers of packed weights."""
    o_proj, down_proj = PackedProjection(attention.o_proj), None
    # Kernels scale the input of a projection instead of its output. A bias would not be scaled: torch scales the output then.
    if attention.residual_multiplier != 1 and attention.o_proj.bias is not None:
        o_proj = PackedProjection(attention.o_proj, attention.residual_multiplier)
        attention = attention._replace(residual_multiplier=1.0)
    if isinstance(mlp, MLP):
        down_proj = PackedProjection(mlp.down_proj)
        if mlp.residual_multiplier != 1 and mlp.down_proj.bias is not None:
            down_proj = PackedProjection(mlp.down_proj, mlp.residual_multiplier)
            mlp = mlp._replace(residual_multiplier=1.0)
    per_layer = None if per_layer_input is None else (per_layer_input, PackedProjection(per_layer_input.projection))
    return GpuLayer(attention, mlp, o_proj, down_proj, per_layer)


def replay_layer(
    name: str,
    layer: GpuLayer,
    compute: Callable[[], Sequence[Tensor]],
    x: Tensor,
    inputs: Sequence[Tensor | None],
    *settings: Hashable,
    undo: Callable[[], object] | None = None,
) -> Sequence[Tensor]:
    """Return what a function computes, by one replay of its recorded launches where the layer has a `launch_id`.

    Args:
        name: Of the function: launches of different functions are not the same.
        layer: The layer.
        compute: Launches the kernels, which depend on nothing but the other arguments.
        x, inputs: All tensors that the kernels read or write but the layer's own.
        settings: Everything else that `compute` depends on.
        undo: Undoes what `compute` changes in place, so that the check of the recording can compute once more.
    """
    if layer.launch_id is not None and x.is_cuda and plain(x):
        with on(x):
            return replayed(compute, (x, *inputs), name, layer.launch_id, *settings, constants=layer.operands, undo=undo, verify=True)
    return compute()


# One new token of each sequence


def decode(
    layer: GpuLayer,
    x: Tensor,
    rotary: Rotary,
    cache: KeyValues,
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
    *,
    advance: int = 0,
) -> Tensor:
    """Compute a layer's output [B, 1, K] for one new token of each sequence, and append its keys and values to the cache.

    Args:
        layer: The layer.
        x: [B, 1, K]
        rotary: Each [B or 1, R / 2], as `ops.transformer.attend.attend` takes them.
        cache: Its KV cache.
        mask: bool [B or 1, T]: which tokens of the cache are attended to; None: all that are in it.
        per_layer_input: [B, 1, P], if the layer has one.
        advance: 0 or 1, added to the cache's length.
    """
    length = cache.length
    assert length is not None

    def compute() -> list[Tensor]:
        return [add_per_layer_input(layer, _decode(layer, x, rotary, cache, mask, advance), per_layer_input)]

    inputs = mask, *(rotary or (None, None)), cache.keys, cache.values, length, *(cache.scales or (None, None)), per_layer_input
    (y,) = replay_layer("token", layer, compute, x, inputs, advance, undo=lambda: length.sub_(advance))
    return y


def _decode(layer: GpuLayer, x: Tensor, rotary: Rotary, cache: KeyValues, mask: Tensor | None, advance: int) -> Tensor:
    """The launches of `decode`, without those of the per-layer input."""
    attention, mlp, z = layer.attention, _without_common_norm(layer), x
    if _is_parallel(mlp) and attention.pre_norm is not None:  # both sublayers read norm(x), which is computed once
        z, attention = normed(x, attention.pre_norm), attention._replace(pre_norm=None)
    products = [_product(z, attention.pre_norm, weight) for weight in attention.qkv]
    qkv = (torch.cat(products, -1) if len(products) > 1 else products[0]).view(len(x), -1)
    assert cache.length is not None
    settings: dict[str, Any] = {"scales": cache.scales, "factor": attention.residual_multiplier, "advance": advance}
    attended = attend(qkv, rotary, cache.keys, cache.values, cache.length, mask, attention.heads, **settings).unsqueeze(1)

    def gate_up(mlp: MLP, z: Tensor, norm: Norm | None) -> Tensor:
        return _product(z, norm, mlp.gate_up, mlp.gate_function, mlp.residual_multiplier, gated=mlp.gated)

    return _after_attention(layer, mlp, attended, x, z, gate_up)


def _is_parallel(mlp: MLP | Experts | None) -> TypeGuard[MLP]:
    """Whether it reads what attention reads."""
    return isinstance(mlp, MLP) and mlp.parallel_residual


def _product(
    x: Tensor, norm: Norm | None, weight: Weight, gates: GateFunction | Literal[""] = "", factor: float = 1.0, *, gated: bool = True
) -> Tensor:
    """Compute factor * act(linear(norm(x))), where a weight computes in floating point by `normed_linear`, in int8 by separate kernels."""
    if weight.compute != "int8":
        return normed_linear(x, norm, weight.packed, weight.bias, gates=gates, gated=gated, factor=factor)
    z = x if norm is None else normed(x, norm)
    y = linear(z, weight.packed, weight.bias, **_compute_of(weight))
    return activated(y, gates, factor, gated=gated) if gates else y


def _compute_of(weight: Weight) -> dict[str, Any]:
    """The arguments of `linear` that say how a weight computes; "auto" is "float" on a GPU."""
    return {"compute": "int8", "activation": weight.activation} if weight.compute == "int8" else {"compute": "float"}


# Many tokens of each sequence


def prefill(
    layer: GpuLayer,
    x: Tensor,
    rotary: Rotary,
    cache: KeyValues,
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
    *,
    name: str = "prompt",
) -> Tensor:
    """Compute a layer's output [B, t, K] for t new tokens of each sequence, and write their keys and values to the cache.

    Args:
        layer: The layer. Where it reuses keys and values of another layer, these are in the cache already.
        x: [B, t, K]
        rotary: Each [B or 1, t, R / 2], as `ops.transformer.prefill_ops.apply_rope` takes them.
        cache: Its KV cache, in floating point.
        mask: bool [B or 1, t, T]: which tokens of the cache each new one attends to; None: all up to itself.
        per_layer_input: [B, t, P], if the layer has one.
        name: Of the recorded launches (`replay_layer`).

    Returns:
        The output, or that of the attention sublayer where `layer.mlp` is None.
    """

    def compute() -> list[Tensor]:
        z, queries = _queries(layer.attention, x, rotary, cache)
        return [_attend(layer, x, z, queries, cache, mask, per_layer_input)]

    inputs = mask, *(rotary or (None, None)), cache.keys, cache.values, cache.length, per_layer_input
    (y,) = replay_layer(name, layer, compute, x, inputs)
    return y


def prefill_with(
    layer: GpuLayer,
    x: Tensor,
    rotary: Rotary,
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    mask: Tensor | None,
    per_layer_input: Tensor | None = None,
    length: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`prefill` for a cache that kernels do not write to: new keys and values are computed, `update` appends them, then follows attention.

    Args:
        layer, x, rotary, per_layer_input: As for `prefill`.
        update: From new keys and values [B, Hkv, t, D] to those of all tokens, [B, Hkv, S, D]; None: there is no cache.
        mask: bool [B or 1, t, S or more], as for `prefill`.
        length: int64 [1]: tokens before the new ones in what `update` returns; None: the mask tells, or there are none.

    Returns:
        The output, and keys and values of all tokens.
    """
    attention, heads = layer.attention, layer.attention.heads

    def project() -> list[Tensor]:
        keys, values = (output(x.new_empty(len(x), heads.num_kv_heads, x.shape[1], heads.head_dim)) for _ in range(2))
        z, queries = _queries(attention, x, rotary, KeyValues(keys, values, None))
        return [keys, values, queries, *(() if z is x else (z,))]

    keys, values, queries, *normed_x = replay_layer("before", layer, project, x, rotary or (None, None))
    z = normed_x[0] if normed_x else x
    if update is not None:
        keys, values = update(keys, values)
    mask = None if mask is None else mask[..., : keys.shape[2]]

    def attend_and_mlp() -> list[Tensor]:
        return [_attend(layer, x, z, queries, KeyValues(keys, values, length), mask, per_layer_input)]

    inputs = None if z is x else z, queries, keys, values, length, mask, per_layer_input
    (y,) = replay_layer("after", layer, attend_and_mlp, x, inputs)
    return y, (keys, values)


def _queries(attention: Attention, x: Tensor, rotary: Rotary, cache: KeyValues) -> tuple[Tensor, Tensor]:
    """Return z = norm(x), and the queries after qk norms and rope; write keys and values to the cache."""
    z = x if attention.pre_norm is None else normed(x, attention.pre_norm)
    products = [linear(z, weight.packed, weight.bias, **_compute_of(weight)) for weight in attention.qkv]
    qkv = torch.cat(products, -1) if len(products) > 1 else products[0]
    return z, apply_rope(qkv, rotary, cache.keys, cache.values, cache.length, attention.heads)


def _attend(
    layer: GpuLayer, x: Tensor, z: Tensor, queries: Tensor, cache: KeyValues, mask: Tensor | None, per_layer_input: Tensor | None
) -> Tensor:
    """Return the layer's output from its queries and its cache. z: norm(x), which a parallel MLP reads."""
    attention, heads = layer.attention, layer.attention.heads
    settings: dict[str, Any] = {"factor": attention.residual_multiplier, "sinks": heads.sinks, "softcap": heads.softcap}
    attended = attend_many(queries, cache.keys, cache.values, cache.length, mask, heads.scale, **settings)

    def gate_up(mlp: MLP, z: Tensor, norm: Norm | None) -> Tensor:
        z = z if norm is None else normed(z, norm)
        product = linear(z, mlp.gate_up.packed, mlp.gate_up.bias, **_compute_of(mlp.gate_up))
        return activated(product, mlp.gate_function, mlp.residual_multiplier, gated=mlp.gated)

    return add_per_layer_input(layer, _after_attention(layer, _without_common_norm(layer), attended, x, z, gate_up), per_layer_input)


# Both


def _without_common_norm(layer: GpuLayer) -> MLP | Experts | None:
    """Return the layer's MLP; a parallel one without its norm where attention has that norm, as it reads the same norm(x) then."""
    mlp = layer.mlp
    return mlp._replace(pre_norm=None) if _is_parallel(mlp) and layer.attention.pre_norm is not None else mlp


def _after_attention(
    layer: GpuLayer,
    mlp: MLP | Experts | None,
    attended: Tensor,
    x: Tensor,
    z: Tensor,
    gate_up: Callable[[MLP, Tensor, Norm | None], Tensor],
) -> Tensor:
    """Compute the layer's output from that of attention, before its output projection.

    Args:
        layer: The layer.
        mlp: Its MLP, `_without_common_norm`.
        attended: [B, t, heads * D]
        x: The layer's input, [B, t, K].
        z: What a parallel MLP reads, norm(x) or x.
        gate_up: Computes act(gate(norm(z))) * up(norm(z)), or without norm(), for the MLP.
    """
    attention = layer.attention
    if not isinstance(mlp, MLP):
        h, _ = add_to_residual(attention, layer.o_proj, attended, x)
        return h if mlp is None else add_experts(h, mlp)
    assert layer.down_proj is not None
    h, normed_h = add_to_residual(attention, layer.o_proj, attended, x, None if mlp.parallel_residual else mlp.pre_norm)
    if not mlp.parallel_residual:
        z = h if normed_h is None else normed_h
    gated = gate_up(mlp, z, mlp.pre_norm if normed_h is None else None)
    return add_to_residual(mlp, layer.down_proj, gated, h)[0]


def add_to_residual(
    sublayer: Attention | MLP | PerLayerInput, projection: Projection, x: Tensor, residual: Tensor, next_norm: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute h = (residual + post_norm(projection(x))) * layer_scale, the post norm and the scale where the sublayer has them.

    Returns:
        h, and next_norm(h) where the kernel that computes h can compute that, too; else None.
    """
    if sublayer.post_norm is None:
        return projection.add_to(residual, x), None
    scale = None if isinstance(sublayer, Attention) else sublayer.layer_scale
    if not sublayer.post_norm.layer_norm:
        next_norm = None if next_norm is not None and next_norm.layer_norm else next_norm
        return add_normed(projection(x), residual, sublayer.post_norm, next_norm, scale)
    h = residual + normed(projection(x), sublayer.post_norm)
    return h if scale is None else h * scale, None


def add_per_layer_input(layer: GpuLayer, h: Tensor, per_layer_input: Tensor | None) -> Tensor:
    """Compute h + norm(projection(act(gate(h)) * per_layer_input)) for a layer with a per-layer input; h for others."""
    if layer.per_layer is None:
        return h
    assert per_layer_input is not None
    sublayer, projection = layer.per_layer
    if torch.compiler.is_compiling():
        gated = _product(h, None, sublayer.gate, sublayer.activation, gated=False) * per_layer_input
    else:
        gated = activated(_product(h, None, sublayer.gate), sublayer.activation, gated=False, multiplier=per_layer_input)
    return add_to_residual(sublayer, projection, gated, h)[0]
