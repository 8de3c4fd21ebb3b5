"""The feed-forward half of decoder layers with experts, as `ops.experts` computes it on a CPU."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.decoder.family import MoEFamily
from halfbyte.integrations.families import added_by, known, mlp_of
from halfbyte.integrations.replaced import products_of, why_not_fused
from halfbyte.nn.experts import MixtureOfExperts
from halfbyte.nn.modules import QuantLinear
from halfbyte.ops.decoder import Norm
from halfbyte.ops.experts import Experts, SharedExpert
from halfbyte.ops.layers import Weight


def routed_of(layer: Any) -> MoEFamily | None:
    """Where a layer of a known family has what belongs to experts; None where it has none."""
    return known(layer).moe if hasattr(mlp_of(layer), "experts") else None


def why_not_routed(layer: Any, routed: MoEFamily) -> str | None:
    """Why `half_of` does not take a layer's mlp; None if it does."""
    mlp = mlp_of(layer)
    if not isinstance(mlp.experts, MixtureOfExperts):
        return "its experts are not quantized"
    if isinstance(stacks := mlp.experts.gated(), str):
        return stacks
    gate = gate_of(layer, routed)
    tensors = {name for name, _ in (*gate.named_parameters(), *gate.named_buffers())}
    own = {*_tensors_of_router(gate, routed), *(("bias",) if routed.router_bias else ())}
    if routed.correction is not None and routed.correction.startswith(prefix := f"{routed.router}."):
        own.add(routed.correction.removeprefix(prefix))
    if tensors != own or any(not hasattr(owner, name) for owner, name in settings_of(layer, routed)):
        return "its router has other parts than a weight and how many experts it chooses"
    if routed.groups is not None and getattr(gate, routed.groups) != 1:
        return "its router chooses among groups of experts"
    return None if routed.shared is None else _why_not_shared(mlp, *routed.shared)


def _tensors_of_router(gate: Any, routed: MoEFamily) -> set[str]:
    """The names of the tensors of its weight, which may be that of a Linear within it, quantized or not."""
    name = routed.router_weight.rpartition(".")[0]
    if not name:
        return {routed.router_weight}
    linear = gate.get_submodule(name)
    if type(linear) not in (nn.Linear, QuantLinear) or linear.bias is not None:
        return set()
    return {f"{name}.{own}" for own, _ in (*linear.named_parameters(), *linear.named_buffers())}


def _why_not_shared(mlp: Any, expert: str, gate: str | None) -> str | None:
    shared = getattr(mlp, expert)
    if shared is None:
        return f"it has no {expert}"
    for name in ("gate_proj", "up_proj", "down_proj"):
        if not isinstance(getattr(shared, name), QuantLinear):
            return f"the {name} of its {expert} is not quantized"
    if (reason := why_not_fused("gate_proj+up_proj", (shared.gate_proj, shared.up_proj))) is not None:
        return f"in its {expert} {reason}"
    if type(shared.down_proj) is not QuantLinear or shared.gate_proj.bias is not None:
        return f"its {expert} is no down(silu(gate) * up)"
    if gate is None:
        return None
    linear = getattr(mlp, gate)
    return None if type(linear) in (nn.Linear, QuantLinear) and linear.bias is None else f"its {gate} is no linear layer without a bias"


def parts_of(layer: Any, routed: MoEFamily) -> tuple[Any, ...]:
    """Those whose weights are read."""
    mlp = mlp_of(layer)
    up, down = mlp.experts.get_submodule("gate_up_proj"), mlp.experts.get_submodule("down_proj")
    gate = gate_of(layer, routed)
    parts = [up, down, mlp.experts, gate, *gate.children()]
    if routed.correction is not None:
        parts.append(mlp.get_submodule(routed.correction.rpartition(".")[0]))
    if routed.shared is not None:
        expert, gate = routed.shared
        shared = getattr(mlp, expert)
        parts += shared.gate_proj, shared.down_proj, *(() if gate is None else (getattr(mlp, gate),))
    return tuple(parts)


def settings_of(layer: Any, routed: MoEFamily) -> list[tuple[Any, str]]:
    """Attributes that what is computed depends on."""
    gate = gate_of(layer, routed)
    experts = mlp_of(layer).experts
    of_gates = [(experts.float_module, name) for name in experts.gate_settings] if isinstance(experts, MixtureOfExperts) else []
    of_gate = [name for name in ("top_k", routed.norm_topk, routed.scaling_factor, routed.groups) if name is not None]
    return [*((gate, name) for name in of_gate), *of_gates]


def gate_of(layer: Any, routed: MoEFamily) -> Any:
    """The router."""
    return getattr(mlp_of(layer), routed.router)


def half_of(layer: Any, routed: MoEFamily, before: Norm) -> Experts:
    """Of a layer for which `why_not_routed` has no reason."""
    mlp = mlp_of(layer)
    stacks = mlp.experts.gated()
    assert not isinstance(stacks, str)
    gate = gate_of(layer, routed)
    weight: Tensor = attrgetter(routed.router_weight)(gate)
    shared, router = None, weight.detach() if isinstance(weight, nn.Parameter) else weight.to(torch.float32, copy=True)
    if routed.shared is not None:
        name, own = routed.shared
        expert = getattr(mlp, name)
        products = products_of("gate_proj+up_proj", (expert.gate_proj, expert.up_proj))
        assert products is not None
        (both,) = products.values()
        row = None if own is None else _row(getattr(mlp, own), router)
        shared = SharedExpert(weight_of(both), weight_of(expert.down_proj), row)
    normalized = routed.norm_topk is None or bool(getattr(gate, routed.norm_topk))
    gate_up, down, clamped = stacks
    bias = gate.bias.detach() if routed.router_bias else None
    correction = None if routed.correction is None else attrgetter(routed.correction)(mlp).detach().flatten()
    factor = added_by(layer) * (1.0 if routed.scaling_factor is None else float(getattr(gate, routed.scaling_factor)))
    choice = router, gate.top_k, normalized
    return Experts(gate_up, down, *choice, before, shared, bias, clamped, routed.scores, correction, factor)


def _row(gate: Any, router: Tensor) -> Tensor:
    """The weight [K] of a gate with one output."""
    weight: Tensor = gate.weight.detach()
    return weight[0] if type(gate) is nn.Linear else weight.to(router.dtype, copy=True)[0]


def weight_of(linear: QuantLinear) -> Weight:
    packed, bias = linear.together
    return Weight(packed, bias, linear.compute, linear.activation)  # type: ignore[arg-type]
