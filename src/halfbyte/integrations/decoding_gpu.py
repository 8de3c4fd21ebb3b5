"""Decoder layers of optimized models on a GPU: one new token of each sequence, with a static cache, by the kernels of
`decoder/gpu_layer.py`.

What a family's layer computes is what `families.py` says of it, as on a CPU. Where the mlp is beside attention, both read one norm of x,
which has a kernel. With several sequences norms have separate kernels before the products, as layer norms always have, and gates may have
one after theirs, as f(up) always has; on Hopper the norm before the gates has one, too, where the product with gates is `skinny_hopper`'s.
A factor of what is added (Granite) is multiplied before the product, one of all of a layer's output with the last norm. Layers may read
keys and values of an earlier one (Gemma 4), with the new token's. A window of attention is a ring (`rings.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from halfbyte.decoder.gpu_layer import KeyValues, decode
from halfbyte.integrations.families import borrows, known, lender, lends, mlp_of, shared_as
from halfbyte.integrations.kv_place import SharedStates
from halfbyte.integrations.layer_gpu import Parts, halves, is_eager, own_input, routed
from halfbyte.integrations.live_layers import all_norms, groups_of, third_of
from halfbyte.integrations.replaced import products_of
from halfbyte.integrations.rings import Later, Ring
from halfbyte.integrations.static_codes import IN_CODES, scales_or_none
from halfbyte.kernels.problem import Problem
from halfbyte.machine import Gpu
from halfbyte.nn.modules import QuantLinear
from halfbyte.ops.decoder import Attention, Dense, Norm
from halfbyte.ops.decoding import NormedPlan, normed_plan, why_not_attend
from halfbyte.ops.experts import Experts
from halfbyte.ops.functions import sparse_on
from halfbyte.ops.layers import Weight
from halfbyte.ops.library import in_mode
from halfbyte.ops.norms import why_not_norm
from halfbyte.ops.routing import describe, why_not_experts

DEVICES = ("cuda",)
_CACHES = (StaticLayer, Ring, *IN_CODES)
_TORCH = "torch's operations"


def token(
    layer: Any,
    found: Parts,
    x: Tensor,
    mask: Tensor | None,
    layers: list[Any],
    rotary: tuple[Tensor, Tensor],
    own: Tensor | None,
    shared: SharedStates,
) -> Tensor | None:
    """The layer's output for one token of each sequence, x [B, 1, K]; None if that is not supported.

    Args:
        layer, found: The layer, and what its kernels read.
        x: The tokens' hidden states.
        mask: As transformers makes it.
        layers: Of the cache.
        rotary: Cosines and sines.
        own: The layer's own input [B, 1, P], if it has one.
        shared: Keys and values that layers reuse.
    """
    reads = borrows(layer)
    number = lender(layer) if reads else layer.self_attn.layer_idx
    if number is None or (reads and shared_as(layer) not in shared):
        return None
    index: int = number
    if not _fits(x, layers, index) or not found.for_token or not _is_mask(layer, mask, layers[index].keys.shape[2]):
        return None
    own = own_input(own)
    if (own is None) != (found.layer.per_layer is None):
        return None
    heads = found.layer.attention.heads
    if not heads.turns_by(rotary[0].shape[2]) or not layer.self_attn.is_causal:
        return None
    kept = layers[index]
    turns = (rotary[0][:, 0], rotary[1][:, 0]) if heads.turned else None
    seen, length, ring = None if mask is None else mask[:, 0, 0], kept.cumulative_length, isinstance(kept, Ring)
    cache = KeyValues(kept.keys, kept.values, length, scales_or_none(kept), ring)
    y = decode(found.layer, x, turns, cache, seen, own, advance=0 if index == 0 or reads else 1)
    if reads:
        return y
    if index == 0:
        # The first layer's length makes masks and positions. torch.compile reads it for these when it likes, unless it knows of a change.
        length.add_(1)
    if ring:
        kept.cumulative_length_int += 1
    if lends(layer):
        shared[shared_as(layer)] = _lent(kept)
    return y


def _lent(kept: Any) -> Any:
    """Keys and values as other layers take them: what is to be computed is when somebody reads it."""
    if type(kept) is StaticLayer:
        return kept.keys, kept.values
    return Later(kept.in_floats if type(kept) in IN_CODES else kept.in_order)


def _is_parallel(half: Dense | Experts) -> bool:
    """Whether it reads what attention reads."""
    return isinstance(half, Dense) and half.parallel


def _is_mask(layer: Any, mask: Tensor | None, size: int) -> bool:
    """Whether `attend` does with it what the layer's attention does. Eager attention without one sees places where no token is."""
    if mask is None:
        return not is_eager(layer)
    return mask.shape[1:] == (1, 1, size) and (mask.is_floating_point() if is_eager(layer) else mask.dtype == torch.bool)


def _fits(x: Tensor, layers: list[Any], index: int) -> bool:
    """Whether the call is for one token of each sequence, with a cache that `attend` supports."""
    return (
        x.device.type in DEVICES
        and x.shape[1] == 1
        and index < len(layers)
        and type(layers[0]) in _CACHES
        and type(layers[index]) in _CACHES
        and layers[index].is_initialized
        and (layers[index].floats if type(layers[index]) in IN_CODES else layers[index].keys.dtype) == x.dtype
        and layers[index].keys.device == x.device
        and not torch.is_grad_enabled()
        and not in_mode()
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A product or the attention of a layer of an optimized model. `kernel` computes it; a `reason` tells why torch's operations do
    (partly)."""

    name: str
    kernel: str
    reason: str | None = None


def remarks(layer: Any, here: Gpu) -> list[str]:
    """Which steps of a layer torch's operations compute, and why."""
    return [f"{step.name}: {step.reason}" for step in steps(layer, here) if step.reason]


def steps(layer: Any, here: Gpu, rows: int = 1) -> tuple[Step, ...]:
    """How a layer computes one new token of each of `rows` sequences with a static cache on a GPU, which need not be present."""
    first, second = halves(layer)
    dtype = all_norms(layer)[0].weight.dtype
    qkv, gates = groups_of(layer)
    names = [*(products_of(*qkv) or {})]
    of_layer = known(layer).norms
    found, before = _norm_apart(of_layer[0], first.before, here, shared=_is_parallel(second))
    found += [_product(name, weight, before, rows, dtype, here) for name, weight in zip(names, first.qkv, strict=True)]
    heads = first.heads
    widest = heads.query * heads.dim if heads.rows else None
    reason = why_not_attend(heads.query, heads.key, heads.dim, dtype, here, widest)
    of_all = ", after a kernel of the norms" if heads.rows else ""
    of_others = " to keys and values of another layer" if heads.made == "q" else ""
    found.append(Step("attention", f"attend{of_others}{of_all}" if reason is None else _TORCH, reason))
    if isinstance(second, Experts):
        lost, where = why_not_experts(second, here), routed(layer)
        gate = None if where.shared is None else where.shared[1]
        own = "" if gate is None else f" and {gate}"
        if gate is not None and isinstance(getattr(mlp_of(layer), gate), QuantLinear):
            own += ", which is dequantized before"
        router = f"with the norm{own}, then a kernel of the choice" if lost is None else _TORCH
        found += [Step(known(layer).o_proj, _how_added(first)), Step(where.router, router, lost)]
        if second.shared is not None and where.shared is not None:
            up = _product(where.shared[0], second.shared.gate_up, None, rows, dtype, here, gates="silu")
            found.append(replace(up, kernel=f"gate_proj+up_proj {up.kernel}, then down_proj"))
        experts = describe(second, rows, dtype, here) if lost is None else "the products alone"
        return *found, Step("experts", experts, lost)
    found.append(Step(known(layer).o_proj, _how_added(first, second.before)))
    before = None if second.parallel or first.after is not None else second.before
    apart, before = _norm_apart(of_layer[2], before, here)
    name = "+".join(products_of(*gates) or {})
    product = _product(name, second.gate_up, before, rows, dtype, here, gates=second.gates, gated=second.gated)
    return *found, *apart, product, Step(known(layer).down_proj, _how_added(second)), *_of_own_input(layer)


def _of_own_input(layer: Any) -> tuple[Step, ...]:
    """The steps of an input of the layer's own, if it has one."""
    third, names = third_of(layer), known(layer).per_layer_input
    if third is None or names is None:
        return ()
    gate = f"the product alone, then a kernel of {third.function.removesuffix('_tanh')}, times the layer's own input"
    return Step(names[0], gate), Step(names[1], "before a kernel of the norm, with the residual added")


def _norm_apart(name: str | None, norm: Norm | None, here: Gpu, *, shared: bool = False) -> tuple[list[Step], Norm | None]:
    """The step of a norm that has a kernel of its own in any case, as layer norms have and what several products read; and the norm that
    remains for the product."""
    if norm is None or not (norm.centred or shared):
        return [], norm
    assert name is not None
    reason = why_not_norm(len(norm.weight), here)
    return [Step(name, "norm" if reason is None else _TORCH, reason)], None


def _product(
    name: str,
    weight: Weight,
    norm: Norm | None,
    rows: int,
    dtype: torch.dtype,
    here: Gpu,
    *,
    gates: str = "",
    gated: bool = True,
) -> Step:
    packed = weight.packed
    n, k = packed.shape
    if norm is None and not gates:
        return Step(name, "the product alone")
    problem = Problem("linear", rows, n, k, packed.format, dtype, sparse=sparse_on(packed, here))
    plan = normed_plan(problem, here, normed=norm is not None, gated=bool(gates) and gated, biased=weight.bias is not None)
    function = gates.removesuffix("_tanh")
    if isinstance(plan, str):
        parts = " and ".join(part for part, there in (("norm", norm), ("gates" if gated else function, gates)) if there)
        return Step(name, "the product alone", f"{parts} in {_TORCH}: {plan}")
    if not gated:
        product = "the product alone" if norm is None else _described(plan, "", normed=True)
        return Step(name, f"{product}, then a kernel of {function}")
    return Step(name, _described(plan, f"{function}(gate) * up" if gates else "", normed=norm is not None))


def _described(plan: NormedPlan, gated: str, *, normed: bool) -> str:
    """Describes the computation of a product after a norm. The kernel of a plain linear layer is not named here, but before."""
    if plan.norm_inside:
        return f"{plan.kernel} with the norm{f' and {gated}' if gated else ''}"
    after = "after a kernel of the norm" if normed else ""
    if plan.config is None:
        kernel = "one" if after else "a kernel"
        return ", ".join(part for part in (after, f"before {kernel} of {gated}" if gated else "") if part)
    product = f"{plan.kernel}{f' with {gated}' if gated else ''}"
    return f"{product}, {after}" if after else product


def _how_added(half: Attention | Dense, then: Norm | None = None) -> str:
    factor = "" if half.factor == 1 else f", times {half.factor:g}"
    if half.after is None:
        return f"with the residual added{factor}"
    return f"before a kernel of the norm, with the residual added{' and the next norm' if then is not None else ''}"
