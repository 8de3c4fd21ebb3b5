"""What the kernels of a live decoder layer read on a GPU (`decoder/gpu_layer.py`), and why they do not compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from halfbyte.decoder.family import MoEFamily
from halfbyte.decoder.gpu_layer import GpuLayer
from halfbyte.integrations.families import known, nearest, per_layer_of
from halfbyte.integrations.hooked import watched
from halfbyte.integrations.live_layers import halves_of, linears_of, third_of, why_not_known, why_not_shared
from halfbyte.integrations.mixtures import parts_of as modules_of_experts
from halfbyte.integrations.mixtures import routed_of
from halfbyte.nn.modules import QuantLinear
from halfbyte.nn.parallel import linear_added, part_of
from halfbyte.ops.decoder import Attention, Dense
from halfbyte.ops.experts import Experts

_ATTENTIONS = ("sdpa", "halfbyte", "eager")  # of transformers: what these compute, and by which masks, is known


class _LiveProjection(NamedTuple):
    """`Projection` of a live module, which may be distributed over processes."""

    module: QuantLinear

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return linear_added(self.module, x, residual)


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a layer, as they are now.

    layer        as kernels read it
    for_token    whether one token takes few kernels; for_prompts: whether many do, unless `why_not_many` has a reason
    """

    layer: GpuLayer
    for_token: bool
    for_prompts: bool

    @property
    def launch_id(self) -> int | None:
        return self.layer.launch_id


def traced_parts_of(layer: Any) -> Parts | None:
    """`parts_of` within torch.compile, for a layer that was known when it was optimized."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    return None if hooked or linears_of(layer) is None else _found(layer)


def parts_of(layer: Any) -> Parts | None:
    """What the kernels of a layer read; None where parts have hooks, or were replaced by what is computed otherwise."""
    if any(map(_is_changed, layer.modules())) or why_not_known(layer) is not None or linears_of(layer) is None:
        return None
    found = _found(layer)
    return found if is_distributed(layer) else replace(found, layer=found.layer.linked())


def _is_changed(part: nn.Module) -> bool:
    return watched(part) or ("forward" in vars(part) and part_of(part) is None)


def _found(layer: Any) -> Parts:
    linears = linears_of(layer)
    assert linears is not None
    first, second = halves(layer)
    of_attention = why_not_attention(layer, linears, first) is None
    of_dense = not isinstance(second, Dense) or why_not_dense(first, second) is None
    of_experts = isinstance(second, Dense) or _why_not_experts(layer, first, second) is None
    for_token, for_prompts = of_attention and of_dense and of_experts, of_attention and of_dense and not is_distributed(layer)
    third, own = third_of(layer), per_layer_of(layer)
    computed = GpuLayer(
        first._replace(heads=first.heads._replace(cap=None)),  # which transformers' sdpa does not have
        second if of_experts else None,
        _LiveProjection(linears[1]),
        _LiveProjection(linears[2][-1]) if isinstance(second, Dense) else None,
        None if third is None or own is None else (third, _LiveProjection(own[1])),
    )
    return Parts(computed, for_token, for_prompts)


def is_distributed(layer: Any) -> bool:
    """Whether a process has a part of its products' weights."""
    qkv, o, second = linears_of(layer) or ((), None, ())
    shared = () if routed_of(layer) is None else modules_of_experts(layer, routed(layer))
    own = (per_layer_of(layer) or ())[:2]
    return any(isinstance(part, QuantLinear) and part_of(part) is not None for part in (*qkv, o, *second, *shared, *own))


def own_input(given: Tensor | None) -> Tensor | None:
    """A layer's own input as kernels read it: its rows lie equally far apart."""
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
