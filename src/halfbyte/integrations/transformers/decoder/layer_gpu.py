"""Live decoder layers, lowered for a GPU (`decoder/gpu_layer.py`), and why kernels do not compute one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from halfbyte.decoder.family import PER_LAYER_MODULES
from halfbyte.decoder.gpu_layer import GpuLayer, packed_layer
from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.decoder.live_layer import (
    family_of,
    is_distributed,
    is_eager,
    needs_eager,
    query_scale_from,
    traced_spec,
)
from halfbyte.integrations.transformers.optimize.hooked import watched
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.parallel.parallelize import linear_added, part_of
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.sublayers import MLP, Attention
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_ATTENTIONS = ("sdpa", "halfbyte", "eager")  # of transformers: what these compute, and by which masks, is known


class _DistributedProjection(NamedTuple):
    """`Projection` of a live module whose weight is distributed over processes."""

    module: QuantLinear

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return linear_added(self.module, x, residual)


@dataclass(frozen=True, slots=True)
class LoweredLayer:
    """A live layer, lowered for a GPU.

    Attributes:
        spec: Its specification.
        layer: As kernels read it.
        decodes: Whether kernels compute one token of each sequence.
        prefills: Whether they compute many tokens, unless `why_not_many` has a reason.
    """

    spec: LayerSpec
    layer: GpuLayer
    decodes: bool
    prefills: bool


def lower_layer(layer: Part, spec: LayerSpec | str) -> LoweredLayer | None:
    """Lower a layer; None where it has no specification, or parts with hooks."""
    if isinstance(spec, str) or any(map(_is_changed, layer.modules())):
        return None
    found = _lowered(layer, spec)
    return found if is_distributed(layer) else replace(found, layer=found.layer.replayable())


def lower_traced(layer: Part) -> LoweredLayer | None:
    """`lower_layer` within torch.compile, for a layer that had a specification when it was optimized."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    return None if hooked else _lowered(layer, traced_spec(layer))


def _is_changed(part: nn.Module) -> bool:
    return watched(part) or ("forward" in vars(part) and part_of(part) is None)


def _lowered(layer: Part, spec: LayerSpec) -> LoweredLayer:
    attention, mlp = spec.attention, spec.mlp
    attends = _why_no_attention(layer, spec) is None
    has_mlp = _why_no_mlp(layer, spec) is None
    distributed = is_distributed(layer)
    lowered = packed_layer(attention, mlp if has_mlp or isinstance(mlp, MLP) else None, spec.per_layer_input)
    if distributed:
        lowered = _with_modules(layer, spec, replace(lowered, attention=attention, mlp=mlp if lowered.mlp is not None else None))
    prefills = attends and not distributed and (has_mlp or not isinstance(mlp, MLP))
    return LoweredLayer(spec, lowered, attends and has_mlp, prefills)


def _with_modules(layer: Part, spec: LayerSpec, lowered: GpuLayer) -> GpuLayer:
    """A layer whose projections are those of its modules, which sum over processes."""
    family = family_of(layer)
    assert family is not None
    o_proj = _DistributedProjection(getattr(layer.self_attn, family.o_proj))
    down_proj, per_layer = lowered.down_proj, lowered.per_layer
    if isinstance(spec.mlp, MLP):
        down_proj = _DistributedProjection(getattr(getattr(layer, family.mlp), family.down_proj))
    if per_layer is not None:
        per_layer = per_layer[0], _DistributedProjection(getattr(layer, PER_LAYER_MODULES[1]))
    return replace(lowered, o_proj=o_proj, down_proj=down_proj, per_layer=per_layer)


# Reasons


def why_not_decoded(layer: Part, spec: LayerSpec) -> str | None:
    """Why kernels do not compute one token of each sequence in a layer; None if they do."""
    if query_scale_from(layer) is not None:
        return "queries of its attention have a factor that depends on their positions, but in `generate` of short texts"
    return _why_no_attention(layer, spec) or _why_no_mlp(layer, spec)


def _why_no_attention(layer: Part, spec: LayerSpec) -> str | None:
    """Why kernels do not compute what comes before the MLP."""
    for name, weight in _linears(spec):
        if weight.compute not in ("auto", "float"):
            return f"its {name} is to compute in {weight.compute}"
    kind, heads = layer.self_attn.config._attn_implementation, spec.attention.heads
    if kind not in _ATTENTIONS:
        return f"its attention is {kind}, not {' or '.join(_ATTENTIONS)}"
    if needs_eager(heads) and not is_eager(layer):
        return "its attention is not transformers' eager one, which alone has caps of scores and sinks"
    if any(norm.layer_norm for norm in (spec.attention.post_norm, *(heads.qk_norm or ())) if norm is not None):
        return "the norm of what its attention adds or of its heads is a layer norm"
    if is_distributed(layer) and _needs_whole_rows(layer, over_all_heads=heads.qk_norm_whole or heads.sinks is not None):
        return "its weights are distributed over processes in a way that takes steps between products"
    return None


def _linears(spec: LayerSpec) -> Iterator[tuple[str, Weight]]:
    """Yield the linear layers of a layer, without experts, by the names that programs have for them."""
    yield from zip(["qkv"] if len(spec.attention.qkv) == 1 else [f"{part}_proj" for part in "qkv"], spec.attention.qkv, strict=False)
    yield "o_proj", spec.attention.o_proj
    if isinstance(spec.mlp, MLP):
        yield "gate_up" if spec.mlp.gated else "up_proj", spec.mlp.gate_up
        yield "down_proj", spec.mlp.down_proj
    if spec.per_layer_input is not None:
        yield "per_layer_input_gate", spec.per_layer_input.gate
        yield "per_layer_projection", spec.per_layer_input.projection


def _needs_whole_rows(layer: Part, *, over_all_heads: bool) -> bool:
    """Whether processes exchange something before the last linear layers of attention and MLP."""
    family = family_of(layer)
    assert family is not None
    mlp = getattr(layer, family.mlp)
    linears = [getattr(layer.self_attn, name, None) for name in family.qkv] + [getattr(mlp, name, None) for name in family.gate_up]
    parts = [part_of(linear) for linear in linears if linear is not None]
    return any(part is not None and (part.cut.before or part.cut.after or over_all_heads) for part in parts)


def _why_no_mlp(layer: nn.Module, spec: LayerSpec) -> str | None:
    """Why kernels do not compute the MLP, or the mixture of experts."""
    if isinstance(spec.mlp, Experts):
        return _why_no_experts(layer, spec.attention, spec.mlp)
    if spec.mlp.post_norm is not None and spec.mlp.post_norm.layer_norm:
        return "the norm of what its mlp adds is a layer norm"
    if (
        is_distributed(layer)
        and spec.attention.residual_multiplier != 1
        and (spec.attention.o_proj.bias is not None or spec.mlp.down_proj.bias is not None)
    ):
        return "what it adds has a factor and a bias"
    return None


def _why_no_experts(layer: nn.Module, attention: Attention, experts: Experts) -> str | None:
    if experts.pre_norm.layer_norm:
        return "the norm before its experts is a layer norm"
    for weight in (experts.gate_up, experts.down_proj, *([] if experts.shared_expert is None else experts.shared_expert[:2])):
        if weight.compute not in ("auto", "float"):
            return f"its experts are to compute in {weight.compute}"
    family = family_of(layer)
    assert family is not None
    if is_distributed(getattr(layer, family.mlp)):
        return "the expert that its tokens share is distributed over processes"
    if attention.post_norm is not None or (attention.residual_multiplier != 1 and attention.o_proj.bias is not None):
        return "what its attention adds has a norm, or a factor and a bias, and what follows are experts"
    return None
