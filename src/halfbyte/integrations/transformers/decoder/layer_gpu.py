"""Live decoder layers, lowered for a GPU (`decoder/gpu_layer.py`), and why kernels do not compute one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from halfbyte.decoder.family import PER_LAYER_MODULES, Family
from halfbyte.decoder.gpu_layer import GpuLayer, PackedProjection, packed_layer
from halfbyte.decoder.kernels_gpu import why_not_layer
from halfbyte.decoder.spec import LayerSpec
from halfbyte.integrations.transformers.decoder.live_layer import (
    family_of,
    is_distributed,
    is_eager,
    needs_eager,
    query_scale_from,
    traced_spec,
)
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.parallel.parallelize import linear_added, part_of
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.sublayers import MLP

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


def lower_layer(layer: Part, spec: LayerSpec | str) -> GpuLayer | None:
    """Lower a layer; None where transformers computes it. One whose weights are distributed over processes is for decoding alone."""
    if isinstance(spec, str) or _why_not(layer, spec) is not None:
        return None
    lowered = _lowered(layer, spec)
    return lowered.replayable() if is_prefilled(lowered) else lowered


def lower_traced(layer: Part) -> GpuLayer | None:
    """`lower_layer` within torch.compile, for a layer that had a specification when it was optimized."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return None
    spec = traced_spec(layer)
    return _lowered(layer, spec) if _why_not(layer, spec) is None else None


def is_prefilled(layer: GpuLayer) -> bool:
    """Whether kernels compute many tokens in a lowered layer, unless `why_not_many` has a reason."""
    return isinstance(layer.o_proj, PackedProjection)


def _lowered(layer: Part, spec: LayerSpec) -> GpuLayer:
    lowered = packed_layer(spec.attention, spec.mlp, spec.per_layer_input)
    return _with_modules(layer, spec, replace(lowered, attention=spec.attention, mlp=spec.mlp)) if is_distributed(layer) else lowered


def _with_modules(layer: Part, spec: LayerSpec, lowered: GpuLayer) -> GpuLayer:
    """A layer whose projections are those of its modules, which sum over processes."""
    family = _family(layer)
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
    return _why_not(layer, spec)


def _why_not(layer: Part, spec: LayerSpec) -> str | None:
    """Why a layer is not lowered; None if it is."""
    kind, heads = layer.self_attn.config._attn_implementation, spec.attention.heads
    if kind not in _ATTENTIONS:
        return f"its attention is {kind}, not {' or '.join(_ATTENTIONS)}"
    if needs_eager(heads) and not is_eager(layer):
        return "its attention is not transformers' eager one, which alone has caps of scores and sinks"
    return why_not_layer(spec) or (_why_not_distributed(layer, spec) if is_distributed(layer) else None)


def _why_not_distributed(layer: Part, spec: LayerSpec) -> str | None:
    """Why kernels do not compute a layer whose weights are distributed over processes; None if they do."""
    heads, mlp = spec.attention.heads, spec.mlp
    if _needs_whole_rows(layer, over_all_heads=heads.qk_norm_whole or heads.sinks is not None):
        return "its weights are distributed over processes in a way that takes steps between products"
    if isinstance(mlp, Experts) and is_distributed(getattr(layer, _family(layer).mlp)):
        return "the expert that its tokens share is distributed over processes"
    has_bias = spec.attention.o_proj.bias is not None or (isinstance(mlp, MLP) and mlp.down_proj.bias is not None)
    return "what it adds has a factor and a bias" if has_bias and spec.attention.residual_multiplier != 1 else None


def _needs_whole_rows(layer: Part, *, over_all_heads: bool) -> bool:
    """Whether processes exchange something before the last linear layers of attention and MLP."""
    family = _family(layer)
    mlp = getattr(layer, family.mlp)
    linears = [getattr(layer.self_attn, name, None) for name in family.qkv] + [getattr(mlp, name, None) for name in family.gate_up]
    parts = [part_of(linear) for linear in linears if linear is not None]
    return any(part is not None and (part.cut.before or part.cut.after or over_all_heads) for part in parts)


def _family(layer: nn.Module) -> Family:
    family = family_of(layer)
    assert family is not None
    return family
