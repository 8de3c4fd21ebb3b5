"""A decoder layer on a GPU: the launches of a decode step and of a prefill.

One new token of each sequence:

    qkv  = normed_linear(x, norm, q | k | v)                 queries, keys and values: a product for each weight
    a    = attend(qkv, …)                                    qk norms, rope, the cache's new entry, attention; two kernels
    h    = linear(a, o, residual=x)                          or, where a norm follows: h, z = add_normed(linear(a, o), x, norm, …)
    g    = normed_linear(h, norm, gate | up, gates)          f(gate) * up, or f(up) where there are no gates
    y    = linear(g, down, residual=h)                       or add_normed(linear(g, down), h, norm)
    y    = add_experts(h, …)                                 in place of these two for a mixture of experts
    y    = add_normed(linear(f(linear(y, gate)) * e, …), y)  after these, where a layer has an input e of its own

Many tokens of each sequence: the same with norms and gates in kernels of their own, `apply_rope` (qk norms, rope and the cache's new
entries) and
`attend_many`. An op that a GPU has no kernel for is that op in torch (`ops`). All launches of a layer are replayed together, once layers
with the same launches have made them twice (`replay_layer`): one by one they take the host longer than the GPU.

Called by `lower_gpu.py` with layers of a specification, and by `integrations` with those of live modules.
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

Rotary = tuple[Tensor, Tensor] | None  # cosines and sines


class Projection(Protocol):
    """A linear layer whose output goes to the residual stream."""

    def __call__(self, x: Tensor) -> Tensor:
        """linear(x)"""

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + linear(x)"""


class PackedProjection(NamedTuple):
    """`Projection` of a packed weight: factor * linear(x)."""

    weight: Weight
    factor: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.packed, self.weight.bias, **_how(self.weight))

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.factor != 1:
            return residual + self(x) * self.factor
        return linear(x, self.weight.packed, self.weight.bias, residual=residual, **_how(self.weight))


class KeyValues(NamedTuple):
    """The KV cache of a layer as kernels take it.

    Attributes:
        keys, values: [B, Hkv, T, D], written from `length` on: of the activations' type, or int8 codes.
        length: int64, one number: tokens in the cache before the new ones; None: 0.
        scales: Of keys and of values that are codes, bfloat16 [B, Hkv, T, ceil(D / 32)].
    """

    keys: Tensor
    values: Tensor
    length: Tensor | None
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """A decoder layer, as its kernels read it.

    Attributes:
        attention: Its attention.
        mlp: Its MLP or mixture of experts; None where the caller computes these.
        o_proj, down_proj: The linear layers that add to the residual stream; `down_proj` is None for experts.
        per_layer: What it does with an input of its own, and the linear layer that adds; None where it has none.
        launch_id: Equal for layers that launch the same kernels; None: the launches of a layer are not replayed together.
        operands: Tensors that kernels read in addition to x, rope, mask and cache; only of layers with a `launch_id`.
    """

    attention: Attention
    mlp: MLP | Experts | None
    o_proj: Projection
    down_proj: Projection | None
    per_layer: tuple[PerLayerInput, Projection] | None = None
    launch_id: int | None = None
    operands: tuple[Tensor, ...] = ()

    def linked(self) -> GpuLayer:
        """Return the layer with `launch_id` and `operands`, which must not change from then on."""
        parts = [*parts_of((self.attention, self.mlp, None if self.per_layer is None else self.per_layer[0]))]
        tensors = [one.data if isinstance(one, Packed) else one for one in parts if isinstance(one, Packed | Tensor)]
        if len(self.attention.qkv) > 1 or any(tensor.data_ptr() % 16 or not tensor.is_contiguous() for tensor in tensors):
            return self  # products that torch joins, and tensors that kernels copy first
        if any(isinstance(one, Weight) and one.compute == "int8" for one in parts):
            return self
        if any(isinstance(one, PackedProjection) and one.factor != 1 for one in (self.o_proj, self.down_proj)):
            return self  # which torch multiplies
        first = dict[int, int]()
        same_as = [first.setdefault(tensor.data_ptr(), index) for index, tensor in enumerate(tensors)]  # a tensor is one operand
        launch_id = _launch_id((*map(_kind_of, parts), *same_as))
        return replace(self, launch_id=launch_id, operands=tuple(tensors[index] for index in first.values()))


def _kind_of(part: object) -> Hashable:
    """What a part of a layer has in common with that of another one whose kernels read other addresses alone."""
    if isinstance(part, Packed):
        return part.name, part.shape, _kind_of(part.data)
    if isinstance(part, Tensor):
        return part.shape, part.dtype, part.get_device()
    return (type(part), len(part)) if isinstance(part, tuple) else part


_launch_ids = itertools.count()


@functools.lru_cache(maxsize=4096)
def _launch_id(launches: Hashable) -> int:
    """Return a number that tells `launches` from all others. One that is forgotten is not given again: later layers get another."""
    return next(_launch_ids)


def packed_layer(attention: Attention, mlp: MLP | Experts | None, per_layer_input: PerLayerInput | None = None) -> GpuLayer:
    """Make a layer of packed weights, without `launch_id`; `per_layer_input`: what it does with an input of its own."""
    o_factor, down_factor = 1.0, 1.0
    if (
        attention.residual_multiplier != 1 and attention.o_proj.bias is not None
    ):  # kernels multiply what the products read, which a bias does not follow
        attention, o_factor = attention._replace(residual_multiplier=1.0), attention.residual_multiplier
    o_proj = PackedProjection(attention.o_proj, o_factor)
    if not isinstance(mlp, MLP):
        return GpuLayer(attention, mlp, o_proj, None)
    if mlp.residual_multiplier != 1 and mlp.down_proj.bias is not None:
        mlp, down_factor = mlp._replace(residual_multiplier=1.0), mlp.residual_multiplier
    per_layer = None if per_layer_input is None else (per_layer_input, PackedProjection(per_layer_input.projection))
    return GpuLayer(attention, mlp, o_proj, PackedProjection(mlp.down_proj, down_factor), per_layer)


def replay_layer(
    name: str,
    layer: GpuLayer,
    steps: Callable[[], Sequence[Tensor]],
    x: Tensor,
    others: Sequence[Tensor | None],
    *settings: Hashable,
    undo: Callable[[], object] | None = None,
) -> Sequence[Tensor]:
    """The results of steps that depend on x, others and settings, from one replay of all recorded launches where possible."""
    if layer.launch_id is not None and x.is_cuda and plain(x):
        with on(x):
            how = name, layer.launch_id, *settings
            return replayed(steps, (x, *others), *how, constants=layer.operands, undo=undo, verify=True)
    return steps()


# One token of each sequence


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
    """Compute a layer's output for one new token of each sequence, which enters the cache.

    Args:
        layer: The layer.
        x: [B, 1, K]
        rotary: Cosines and sines of the tokens' positions, each [B or 1, R / 2], as `ops.transformer.attend.attend` takes them.
        cache: Its KV cache.
        mask: bool [B or 1, T]: which tokens of the cache may be seen; None: all that are there.
        per_layer_input: [B, 1, P], if the layer has one.
        advance: 0 or 1, added to the cache's length.
    """
    length = cache.length
    assert length is not None

    def steps() -> list[Tensor]:
        return [add_per_layer_input(layer, _decoded(layer, x, rotary, cache, mask, advance), per_layer_input)]

    others = mask, *(rotary or (None, None)), cache.keys, cache.values, length, *(cache.scales or (None, None)), per_layer_input
    (y,) = replay_layer("token", layer, steps, x, others, advance, undo=lambda: length.sub_(advance))
    return y


def _decoded(layer: GpuLayer, x: Tensor, rotary: Rotary, cache: KeyValues, mask: Tensor | None, advance: int) -> Tensor:
    first, second, read = layer.attention, layer.mlp, x
    if _is_parallel(second) and first.pre_norm is not None:
        read, first, second = normed(x, first.pre_norm), first._replace(pre_norm=None), second._replace(pre_norm=None)
    products = [_product(read, first.pre_norm, weight) for weight in first.qkv]
    qkv = (torch.cat(products, -1) if len(products) > 1 else products[0]).view(len(x), -1)
    assert cache.length is not None
    how: dict[str, Any] = {"scales": cache.scales, "factor": first.residual_multiplier, "advance": advance}
    seen = attend(qkv, rotary, cache.keys, cache.values, cache.length, mask, first.heads, **how).unsqueeze(1)
    if not isinstance(second, MLP):
        h, _ = added(first, layer.o_proj, seen, x)
        return h if second is None else add_experts(h, second)
    assert layer.down_proj is not None
    h, z = added(first, layer.o_proj, seen, x, second.pre_norm)
    if not second.parallel_residual:
        read = h if z is None else z
    before = second.pre_norm if z is None else None
    inner = _product(read, before, second.gate_up, second.gate_function, second.residual_multiplier, gated=second.gated)
    return added(second, layer.down_proj, inner, h)[0]


def _is_parallel(sublayer: MLP | Experts | None) -> TypeGuard[MLP]:
    """Whether it reads what attention reads."""
    return isinstance(sublayer, MLP) and sublayer.parallel_residual


def _product(
    x: Tensor, norm: Norm | None, weight: Weight, gates: GateFunction | Literal[""] = "", factor: float = 1.0, *, gated: bool = True
) -> Tensor:
    """`normed_linear` as the weight computes."""
    if weight.compute != "int8":
        return normed_linear(x, norm, weight.packed, weight.bias, gates=gates, gated=gated, factor=factor)
    z = x if norm is None else normed(x, norm)
    y = linear(z, weight.packed, weight.bias, **_how(weight))
    return activated(y, gates, factor, gated=gated) if gates else y


def _how(weight: Weight) -> dict[str, Any]:
    """The compute of a weight on a GPU, as `linear` takes it."""
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
    """Compute a layer's output for many tokens of each sequence, which enter the cache.

    Args:
        layer: The layer; where it makes no keys and values of its own, these are in the cache already.
        x: [B, T, K]
        rotary: Cosines and sines of the tokens' positions, each [B or 1, T, R / 2], as `ops.transformer.prefill_ops.apply_rope` takes them.
        cache: Its KV cache, in floating point.
        mask: bool [B or 1, T, S]: which tokens of the cache each new one may see; None: all up to itself.
        per_layer_input: [B, T, P], if the layer has one.
        name: The name of the recorded launches.

    Returns:
        The output, or that of the attention where `layer.mlp` is None.
    """

    def steps() -> list[Tensor]:
        z, queries = _before(layer.attention, x, rotary, cache)
        return [_after(layer, x, z, queries, cache, mask, per_layer_input)]

    others = mask, *(rotary or (None, None)), cache.keys, cache.values, cache.length, per_layer_input
    (y,) = replay_layer(name, layer, steps, x, others)
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
    """`prefill` with a cache that takes new keys and values by a function, or with none.

    Args:
        layer, x, rotary, per_layer_input: As for `prefill`.
        update: New keys and values [B, Hkv, T, D] -> all that there are, [B, Hkv, S, D]; None: the new ones are all.
        mask: bool [B or 1, T, S or more].
        length: int64, one number: tokens before the new ones in what `update` returns; None: by the mask, or none.

    Returns:
        The output, and keys and values.
    """
    first, heads = layer.attention, layer.attention.heads

    def begin() -> list[Tensor]:
        keys, values = (output(x.new_empty(len(x), heads.num_kv_heads, x.shape[1], heads.head_dim)) for _ in range(2))
        z, queries = _before(first, x, rotary, KeyValues(keys, values, None))
        return [keys, values, queries, *(() if z is x else (z,))]

    keys, values, queries, *read = replay_layer("before", layer, begin, x, rotary or (None, None))
    z = read[0] if read else x
    if update is not None:
        keys, values = update(keys, values)
    seen = None if mask is None else mask[..., : keys.shape[2]]

    def end() -> list[Tensor]:
        return [_after(layer, x, z, queries, KeyValues(keys, values, length), seen, per_layer_input)]

    (y,) = replay_layer("after", layer, end, x, (None if z is x else z, queries, keys, values, length, seen, per_layer_input))
    return y, (keys, values)


def _before(sublayer: Attention, x: Tensor, rotary: Rotary, cache: KeyValues) -> tuple[Tensor, Tensor]:
    """The input of the products, and queries; keys and values are written to the cache."""
    z = x if sublayer.pre_norm is None else normed(x, sublayer.pre_norm)
    products = [linear(z, weight.packed, weight.bias, **_how(weight)) for weight in sublayer.qkv]
    joined = torch.cat(products, -1) if len(products) > 1 else products[0]
    return z, apply_rope(joined, rotary, cache.keys, cache.values, cache.length, sublayer.heads)


def _after(
    layer: GpuLayer, x: Tensor, z: Tensor, queries: Tensor, cache: KeyValues, mask: Tensor | None, per_layer_input: Tensor | None
) -> Tensor:
    """The layer's output, or that of its attention sublayer."""
    first, second, heads = layer.attention, layer.mlp, layer.attention.heads
    how: dict[str, Any] = {"factor": first.residual_multiplier, "sinks": heads.sinks, "softcap": heads.softcap}
    read = attend_many(queries, cache.keys, cache.values, cache.length, mask, heads.scale, **how)
    if not isinstance(second, MLP):
        h, _ = added(first, layer.o_proj, read, x)
        return h if second is None else add_experts(h, second)
    assert layer.down_proj is not None
    h, then = added(first, layer.o_proj, read, x, None if second.parallel_residual else second.pre_norm)
    if not second.parallel_residual:
        z = then if then is not None else h if second.pre_norm is None else normed(h, second.pre_norm)
    product = linear(z, second.gate_up.packed, second.gate_up.bias, **_how(second.gate_up))
    y = added(second, layer.down_proj, activated(product, second.gate_function, second.residual_multiplier, gated=second.gated), h)[0]
    return add_per_layer_input(layer, y, per_layer_input)


# Both


def added(
    sublayer: Attention | MLP | PerLayerInput, projection: Projection, x: Tensor, residual: Tensor, then: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """h = residual + norm(projection(x)), or times the factor of the output, and then(h) where that takes no further kernel."""
    if sublayer.post_norm is None:
        return projection.added(x, residual), None
    scale = None if isinstance(sublayer, Attention) else sublayer.layer_scale
    if not sublayer.post_norm.layer_norm:
        then = None if then is not None and then.layer_norm else then
        return add_normed(projection(x), residual, sublayer.post_norm, then, scale)
    h = residual + normed(projection(x), sublayer.post_norm)
    return h if scale is None else h * scale, None


def add_per_layer_input(layer: GpuLayer, h: Tensor, per_layer_input: Tensor | None) -> Tensor:
    """The output of a layer that has an input of its own, from that of its other parts; or h."""
    if layer.per_layer is None:
        return h
    assert per_layer_input is not None
    third, projection = layer.per_layer
    weight, bias = third.gate[:2]
    if torch.compiler.is_compiling():
        inner = normed_linear(h, None, weight, bias, gates=third.activation, gated=False) * per_layer_input
    else:
        inner = activated(normed_linear(h, None, weight, bias), third.activation, gated=False, multiplier=per_layer_input)
    return added(third, projection, inner, h)[0]
