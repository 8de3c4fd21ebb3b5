"""What the kernels of a decoder layer read on a GPU, kept from call to call, and how a call makes all of their launches.

`parts` looks a layer through once, and later only whether all is as it was. `chain` makes a layer's launches by one call once layers alike
have made them twice: one by one they take the host longer than the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from halfbyte.bounded import Bounded
from halfbyte.decoder.family import MoEFamily
from halfbyte.integrations.families import known, nearest, other, per_layer_of
from halfbyte.integrations.frozen import Frozen
from halfbyte.integrations.hooked import is_capturing, watched
from halfbyte.integrations.live_layers import halves_of, has_own_norms, linears_of, third_of, why_not_shared
from halfbyte.integrations.mixtures import parts_of as modules_of_experts
from halfbyte.integrations.mixtures import routed_of
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added, part_of
from halfbyte.ops.cuda import is_replayed, on
from halfbyte.ops.decoder import Attention, Dense, Norm, PerLayer
from halfbyte.ops.decoding import normed_linear
from halfbyte.ops.experts import Experts
from halfbyte.ops.layers import Weight
from halfbyte.ops.library import plain
from halfbyte.ops.norms import add_normed
from halfbyte.ops.prompt import activated
from halfbyte.ops.replay import MOST_REPLAYS, whole

_ATTENTIONS = ("sdpa", "halfbyte", "eager")  # of transformers: what these compute, and by which masks, is known


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a layer, as they are now: what its halves compute, and the linear layers that add, the second one None where there are experts.

    third        what it does with an input of its own, and the linear layer that adds; None where it has none
    for_token    whether one token takes few kernels; for_prompts: whether many do, unless `why_not_many` has a reason
    alike        equal for layers that launch the same kernels; None where they do something else besides
    tensors      what these kernels read, beside x, positions, mask and cache
    """

    first: Attention
    second: Dense | Experts
    o: QuantLinear
    down: QuantLinear | None
    for_token: bool
    for_prompts: bool
    third: tuple[PerLayer, QuantLinear] | None = None
    alike: int | None = None
    tensors: tuple[Tensor | None, ...] = ()

    @property
    def weights(self) -> list[Weight]:
        """Of all products but experts'."""
        dense = [self.second.gate_up, self.second.down] if isinstance(self.second, Dense) else []
        own = [] if self.third is None else [self.third[0].gate, self.third[0].projection]
        return [*self.first.qkv, self.first.o, *dense, *own]


_kept: WeakKeyDictionary[nn.Module, tuple[Parts, Frozen]] = WeakKeyDictionary()


def parts(layer: Any) -> Parts | None:
    """Of a layer that `shorten_` has changed; None where parts have hooks, or were replaced by what is computed otherwise."""
    if torch.compiler.is_compiling():
        return None if linears_of(layer) is None else _found(layer)
    if is_capturing():
        return None
    kept = _kept.get(layer)
    if kept is None or not kept[1].is_unchanged():
        if any(map(_is_changed, (part for part in layer.modules() if part is not layer))):
            return None
        if linears_of(layer) is None or not has_own_norms(layer) or other(layer) is not None:
            return None
        found = _found(layer)
        kept = _kept[layer] = found if is_distributed(layer) else _linked(found), Frozen(layer)
    return kept[0]


def _is_changed(part: nn.Module) -> bool:
    return watched(part) or ("forward" in vars(part) and part_of(part) is None)


def _found(layer: Any) -> Parts:
    linears = linears_of(layer)
    assert linears is not None
    first, second = halves(layer)
    of_attention = why_not_attention(layer, linears, first) is None
    of_dense = not isinstance(second, Dense) or why_not_dense(first, second) is None
    of_experts = isinstance(second, Dense) or _why_not_experts(layer, first, second) is None
    for_prompts = of_attention and of_dense and not is_distributed(layer)
    down = linears[2][-1] if isinstance(second, Dense) else None
    third, own = third_of(layer), per_layer_of(layer)
    of_own_input = None if third is None or own is None else (third, own[1])
    return Parts(first, second, linears[1], down, of_attention and of_dense and of_experts, for_prompts, of_own_input)


def is_distributed(layer: Any) -> bool:
    """Whether a process has a part of its products' weights."""
    qkv, o, second = linears_of(layer) or ((), None, ())
    shared = () if routed_of(layer) is None else modules_of_experts(layer, routed(layer))
    own = (per_layer_of(layer) or ())[:2]
    return any(isinstance(part, QuantLinear) and part_of(part) is not None for part in (*qkv, o, *second, *shared, *own))


def _linked(found: Parts) -> Parts:
    """With `alike` and `tensors`."""
    first, second, weights = found.first, found.second, found.weights
    heads = first.heads
    of_heads = (heads.norms or ())[: 1 if heads.made == "q" else 2]  # where keys are another layer's, theirs is that of queries again
    norms = [first.before, first.after, *of_heads]
    tensors: list[Tensor | None] = [heads.sinks]
    of_second: Hashable
    if isinstance(second, Dense):
        norms += [None if second.parallel else second.before, second.after]  # a tensor stands once
        tensors.append(second.scale)
        of_second = second.factor, second.gates, second.gated, second.parallel
    else:
        weights += [second.gate_up, second.down]
        tensors += [second.router, second.bias, second.correction]
        norms.append(second.before)
        if second.shared is not None:
            weights += second.shared[:2]
            tensors.append(second.shared.gate)
        of_second = second.chosen, second.normalized, second.clamped, second.shared is None, second.scores, second.factor
    if found.third is not None:
        norms.append(found.third[0].after)
        tensors.append(found.third[0].scale)
    of_third = None if found.third is None else found.third[0].function
    tensors += [t for weight in weights for t in (weight.packed.data, weight.bias)]
    tensors += [t for norm in norms for t in ((None, None) if norm is None else (norm.weight, norm.shift))]
    if len(first.qkv) > 1 or any(t is not None and (t.data_ptr() % 16 or not t.is_contiguous()) for t in tensors):
        return found  # what is joined by torch, or lies where kernels leave it to themselves
    numbers = heads._replace(norms=None, sinks=None), first.factor, of_second, of_third
    of_norms = [None if norm is None else norm[1:4] for norm in norms]
    names = [(weight.packed.name, *weight.packed.shape) for weight in weights]
    kinds = [None if t is None else (t.shape, t.dtype, t.get_device()) for t in tensors]
    alike = _numbers.setdefault((numbers, *of_norms, *names, *kinds), len(_numbers))
    return replace(found, alike=alike, tensors=tuple(tensors))


_numbers: dict[Hashable, int] = {}  # of layers that are alike
_chained = Bounded[Hashable, bool](MOST_REPLAYS)  # whether all products' launches can be made again


def chain(
    name: str,
    parts: Parts,
    steps: Callable[[], Sequence[Tensor]],
    x: Tensor,
    others: Sequence[Tensor | None],
    *settings: Hashable,
    undo: Callable[[], object] | None = None,
) -> Sequence[Tensor]:
    """The results of steps that depend on x, others and settings, where that is possible by one call (`replay.whole`)."""
    operands = x, *others
    if parts.alike is not None and x.is_cuda and plain(x) and all(t is None or t.data_ptr() % 16 == 0 for t in operands):
        kinds = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
        key = name, parts.alike, x.get_device(), *settings, *kinds
        if _is_chained(key, parts, x):
            with on(x):
                return whole(key, steps, (*operands, *parts.tensors), undo=undo)
    return steps()


def _is_chained(key: Hashable, parts: Parts, x: Tensor) -> bool:
    found = _chained.get(key)
    if found is None:
        rows = x.shape[0] * x.shape[1]
        found = _chained[key] = all(is_replayed(rows, weight.packed, x.dtype) for weight in parts.weights)
    return found


def added(
    half: Attention | Dense | PerLayer, linear: QuantLinear, x: Tensor, residual: Tensor, then: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """h = residual + norm(linear(x)), or times the factor of the output, and then(h) where that takes no further kernel."""
    if half.after is None:
        return linear_added(linear, x, residual), None
    return add_normed(linear(x), residual, half.after, then, None if isinstance(half, Attention) else half.scale)


def with_own_input(found: Parts, h: Tensor, beside: Tensor | None) -> Tensor:
    """The output of a layer that has an input of its own, of what the others of its steps give, or that."""
    if found.third is None:
        return h
    assert beside is not None
    third, projection = found.third
    weight, bias = third.gate[:2]
    if torch.compiler.is_compiling():
        inner = normed_linear(h, None, weight, bias, gates=third.function, gated=False) * beside
    else:
        inner = activated(normed_linear(h, None, weight, bias), third.function, gated=False, beside=beside)
    return added(third, projection, inner, h)[0]


def own_input(found: Parts, settings: dict[str, Any]) -> Tensor | None:
    """As kernels read it: its rows lie equally far apart."""
    given: Tensor | None = None if found.third is None else settings.get("per_layer_input")
    if given is None or (given.stride(2) == 1 and given.stride(0) == given.stride(1) * given.shape[1]):
        return given
    return given.contiguous()


# Reasons


def why_not_few_kernels(layer: Any) -> str | None:
    """Why one token does not take few kernels in a layer that has `linears_of`; None if it does."""
    linears = linears_of(layer)
    assert linears is not None
    return _why_not(layer, linears, *halves(layer))


def _why_not(layer: Any, linears: Any, first: Attention, last: Dense | Experts) -> str | None:
    if (reason := why_not_attention(layer, linears, first)) is not None:
        return reason
    return why_not_dense(first, last) if isinstance(last, Dense) else _why_not_experts(layer, first, last)


def why_not_attention(layer: Any, linears: Any, first: Attention) -> str | None:
    """Of all linear layers, and of what comes before the mlp."""
    qkv, o, second = linears
    for linear in (*qkv, o, *second, *(per_layer_of(layer) or ())[:2]):
        if linear.compute not in ("auto", "float"):
            return f"its {_name_of(layer, linear)} is to compute in {linear.compute}"
    kind = layer.self_attn.config._attn_implementation
    if kind not in _ATTENTIONS:
        return f"its attention is {kind}, not {' or '.join(_ATTENTIONS)}"
    if nearest(layer) is not None:
        return "queries of its attention have a factor that depends on their positions"
    if is_eager(layer) and first.heads.cap is not None:
        return "scores of its attention, transformers' eager one, have a cap"
    if first.heads.sinks is not None and not is_eager(layer):
        return "its attention is not transformers' eager one, which alone has its sinks"
    if any(norm.centred for norm in (first.after, *(first.heads.norms or ())) if norm is not None):
        return "the norm of what its attention adds or of its heads is a layer norm"
    if (reason := why_not_shared(layer)) is not None:
        return reason
    of_all = first.heads.rows or first.heads.sinks is not None  # what belongs to all heads
    here = [part_of(linear) for linear in (*qkv, *second[:-1])]
    if any(part is not None and (part.cut.before or part.cut.after or of_all) for part in here):
        return "its weights are distributed over processes in a way that takes steps between products"
    return None


def why_not_dense(first: Attention, last: Dense) -> str | None:
    if last.after is not None and last.after.centred:
        return "the norm of what its mlp adds is a layer norm"
    if first.factor != 1 and (first.o.bias is not None or last.down.bias is not None):
        return "what it adds has a factor and a bias"
    return None


def _why_not_experts(layer: Any, first: Attention, last: Experts) -> str | None:
    if last.before.centred:
        return "the norm before its experts is a layer norm"
    for weight in (last.gate_up, last.down, *([] if last.shared is None else last.shared[:2])):
        if weight.compute not in ("auto", "float"):
            return f"its experts are to compute in {weight.compute}"
    if any(isinstance(part, QuantLinear) and part_of(part) is not None for part in modules_of_experts(layer, routed(layer))):
        return "the expert that its tokens share is distributed over processes"
    if first.after is not None or (first.factor != 1 and first.o.bias is not None):
        return "what its attention adds has a norm, or a factor and a bias, and what follows are experts"
    return None


def halves(layer: Any) -> tuple[Attention, Dense | Experts]:
    first, second = halves_of(layer)
    assert isinstance(second, Dense | Experts)
    return first, second


def routed(layer: Any) -> MoEFamily:
    routed = known(layer).moe
    assert routed is not None
    return routed


def _name_of(layer: Any, linear: QuantLinear) -> str:
    names: list[str] = [name for name, part in layer.named_modules() if part is linear]
    return names[0].rpartition(".")[2]


def is_eager(layer: Any) -> bool:
    """Whether masks are added to scores."""
    return bool(layer.self_attn.config._attn_implementation == "eager")
