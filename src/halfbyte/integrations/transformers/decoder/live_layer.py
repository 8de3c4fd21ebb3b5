"""Live decoder layers of transformers: the specification of one, built as that of a checkpoint's is (`decoder/build_layer.py`), or the
reason why it is none.

`cpu_run.py` lowers specifications for CPUs, `layer_gpu.py` for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from halfbyte.decoder.build_layer import build_layer, joined
from halfbyte.decoder.families import FAMILIES, family_of_layer
from halfbyte.decoder.family import ACTIVATIONS, PER_LAYER_MODULES, SHARED_KV_LAYERS, Family, MoEFamily
from halfbyte.decoder.spec import LayerSpec
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.transformers.optimize.calls import CACHE, Understood, any_value, is_true, unset, why_unknown
from halfbyte.integrations.transformers.optimize.hooked import why_hooked
from halfbyte.integrations.transformers.optimize.replaced import name_in_transformers, original, products_of, why_not_fused
from halfbyte.kernels.layer_kinds import GateFunction, Projections, num_kv_projections, projections_of
from halfbyte.nn.modules.experts import MixtureOfExperts
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.parallel.parallelize import part_of
from halfbyte.ops.transformer.experts import Clamped
from halfbyte.ops.transformer.sublayers import Heads, Norm
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

NAMES = sorted(family.layer_class for family in FAMILIES.values())
_NORMS = ("torch.", "transformers.")  # modules of the classes of norms that the table of families means
_ACTIVATION_MODULES = ("act_fn", "activation_fn", "act")  # names within an MLP

# Arguments of a decoder layer's call. Some families name few of them as parameters; all get what the model was called with.
LAYER_ARGUMENTS: Understood = {
    **dict.fromkeys(("hidden_states", "attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings"), any_value),
    **dict.fromkeys(("per_layer_input", "shared_kv_states", "return_shared_kv_states"), any_value),  # Gemma 4
    **dict.fromkeys(("cache_position", "token_type_ids", "mm_token_type_ids"), any_value),  # the mask tells what they do
    **dict.fromkeys(("output_hidden_states", "num_items_in_batch", "return_dict"), any_value),  # concern the model around the layers
    **dict.fromkeys(("output_attentions", "output_router_logits"), unset),
    "is_causal": is_true,
}


def family_of(layer: nn.Module) -> Family | None:
    """Return the family of a decoder layer; None where it is in none."""
    return family_of_layer(name_in_transformers(layer))


class SharedKV(NamedTuple):
    """How a layer shares keys and values with others (Gemma 4).

    Attributes:
        reuses: Whether it attends to keys and values of an earlier layer.
        provides: Whether others may attend to its own.
        kind: Key of what it reads, or of what others read, in `shared_kv_states`.
        source: Index of the layer that it reads from; None where no layer has what it reads.
    """

    reuses: bool = False
    provides: bool = False
    kind: str | None = None
    source: int | None = None


def shared_kv(layer: Part) -> SharedKV:
    """Return how a layer of a known family shares keys and values."""
    family = family_of(layer)
    if family is None or not family.kv_sharing:
        return SharedKV()
    attention = layer.self_attn
    kind: str = attention.layer_type
    kinds, modes = attention.config.layer_types, getattr(attention.config, "kv_sharing_modes", None)
    if modes is None:  # the last layers reuse
        count = len(kinds) - getattr(attention.config, SHARED_KV_LAYERS)
        candidates = [i for i in range(count) if kinds[i] == kind][-1:]
    else:
        candidates = [i for i in range(len(kinds)) if kinds[i] == kind and modes[i] == "store"]
    source = candidates[0] if candidates else None
    return SharedKV(bool(attention.is_kv_shared_layer), bool(attention.store_full_length_kv), kind, source)


def query_scale_from(layer: Part) -> int | None:
    """Return the position from which on queries have a factor of their own (Llama 4); None where they have none."""
    family = family_of(layer)
    name = None if family is None else family.query_scale_from
    return None if name is None else int(layer.self_attn.config.rope_parameters[name])


def is_eager(layer: Part) -> bool:
    """Whether the layer's attention is transformers' eager one, whose masks are added to scores."""
    return bool(layer.self_attn.config._attn_implementation == "eager")


def needs_eager(heads: Heads) -> bool:
    """Whether eager attention alone computes what these heads do in transformers: soft caps of scores, and sinks."""
    return heads.softcap is not None or heads.sinks is not None


def has_experts(layer: nn.Module) -> bool:
    """Whether the MLP of a layer of a known family is a mixture of experts."""
    family = family_of(layer)
    return family is not None and hasattr(getattr(layer, family.mlp), "experts")


def is_distributed(layer: nn.Module) -> bool:
    """Whether a process has only a part of the weights of a layer's linear layers."""
    return any(isinstance(part, QuantLinear) and part_of(part) is not None for part in layer.modules())


class LiveLayer:
    """A live layer of a known family, as `build_layer` reads it."""

    def __init__(self, layer: Part) -> None:
        family = family_of(layer)
        assert family is not None
        self.family, self._layer, self._attention = family, layer, layer.self_attn
        name = family.residual_multiplier
        self.residual_multiplier = 1.0 if name is None else float(getattr(layer, name))

    @property
    def activation(self) -> GateFunction:
        name = getattr(self._attention.config, self.family.activation)
        if name not in ACTIVATIONS:
            raise UnsupportedError(f"its activation is {name}, not {' or '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def heads(self, qkv: Sequence[Weight], o_proj: Weight) -> Heads:
        attention, family, projections = self._attention, self.family, self.projections
        shared, dim = shared_kv(self._layer), attention.head_dim
        if shared.reuses and shared.source is None:
            raise UnsupportedError("no layer has the keys and values that it reads")
        if shared.reuses != (projections == "q"):
            raise UnsupportedError("it has keys of its own, and reads those of another layer")
        value_norm = None if family.v_norm is None else getattr(attention, family.v_norm, None)
        if value_norm is not None:
            _check_norm(value_norm)
            if _eps(value_norm) != _eps(attention.q_norm):
                raise UnsupportedError("the norm of its values has another eps than those of its heads")
        query = o_proj.packed.shape[1] // dim  # counts follow from the weights: a process may have a part of the heads
        if projections == "q":
            key = query // attention.num_key_value_groups
        else:
            key = (sum([weight.packed.shape[0] for weight in qkv]) // dim - query) // num_kv_projections(projections)
        softcap = None if family.softcap is None else getattr(attention, family.softcap)
        return Heads(
            query, key, dim, attention.scaling, rotary_dim=self._rotary_dim, softcap=softcap, rope_interleaved=family.rope_interleaved
        )

    @property
    def projections(self) -> Projections:
        """Some configs of a family leave out values, or keys and values."""
        names = self.family.qkv
        return "qkv" if len(names) == 1 else projections_of(sum(getattr(self._attention, name, None) is not None for name in names))

    @property
    def _rotary_dim(self) -> int:
        attention, rope_layers = self._attention, self.family.rope_layers
        if rope_layers is not None and not rope_layers.rotates(*[getattr(attention, name) for name in rope_layers.attributes]):
            return 0
        dim: int = attention.head_dim
        rope = getattr(attention.config, "rope_parameters", None) or {}
        return int(dim * rope.get("partial_rotary_factor", 1.0)) if self.family.partial_rotary else dim

    def router_settings(self, moe: MoEFamily) -> tuple[int, bool, float]:
        router = _get(self._layer, f"{self.family.mlp}.{moe.router}")
        scaling_factor = 1.0 if moe.scaling_factor is None else float(getattr(router, moe.scaling_factor))
        return router.top_k, moe.norm_topk is None or bool(getattr(router, moe.norm_topk)), scaling_factor

    def has_experts(self) -> bool:
        return has_experts(self._layer)

    def has_per_layer_input(self) -> bool:
        return hasattr(self._layer, PER_LAYER_MODULES[0])

    def has(self, name: str) -> bool:
        owner, _, last = name.rpartition(".")
        return getattr(_get(self._layer, owner), last, None) is not None

    def linear(self, names: Sequence[str]) -> Weight:
        linears = [self._linear(name) for name in names]
        if len(linears) == 1:
            if type(linears[0]) is not QuantLinear:
                raise UnsupportedError(f"its {joined(names)} is a {type(linears[0]).__name__}")
            return weight_of(linears[0])
        weights = self._products(names, linears)
        if len(weights) > 1:
            raise UnsupportedError(f"{joined(names)} are not computed together, which fuse_ does where their formats are the same")
        return weights[0]

    def qkv(self, names: Sequence[str]) -> tuple[Weight, ...]:
        return self._products(names, [self._linear(name) for name in names])

    def _products(self, names: Sequence[str], linears: Sequence[QuantLinear]) -> tuple[Weight, ...]:
        """The weights of linear layers, those that are computed together as one."""
        together = joined(names)
        products = products_of(together, linears)
        if products is None:
            raise UnsupportedError(why_not_fused(together, linears) or f"{together} are computed otherwise")
        return tuple([weight_of(linear) for linear in products.values()])

    def _linear(self, name: str) -> QuantLinear:
        linear = _get(self._layer, name)
        if not isinstance(linear, QuantLinear):
            raise UnsupportedError(f"its {joined([name])} is a {type(linear).__name__}, which is not quantized")
        return linear

    def experts(self, name: str) -> tuple[Weight, Weight, Clamped | None]:
        experts = _get(self._layer, name)
        if not isinstance(experts, MixtureOfExperts):
            raise UnsupportedError("its experts are not quantized")
        stacks = experts.gated_stacks()
        if isinstance(stacks, str):
            raise UnsupportedError(stacks)
        return stacks.gate_up, stacks.down, stacks.clamped

    def norm(self, name: str, size: int | None = None) -> Norm:
        norm = _get(self._layer, name)
        _check_norm(norm)
        return norm_of(norm, self.family)

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        owner, _, last = name.rpartition(".")
        module = _get(self._layer, owner)
        found: Tensor = getattr(module, last)
        if type(module) is QuantLinear:
            return found.to(torch.float32, copy=True)
        return found.detach() if isinstance(found, nn.Parameter) else found


def layer_spec(layer: nn.Module, rope: int = 0, window: int | None = None) -> LayerSpec | str:
    """Build the specification of a layer, or say why it is not computed as its family says.

    Args:
        layer: The live layer.
        rope: Index of its rotary embedding among those of its stack.
        window: Its sliding window.
    """
    part = cast("Part", layer)
    if (reason := _why_not_of_family(part)) is not None:
        return reason
    try:
        spec = traced_spec(part, rope, window)
    except UnsupportedError as e:
        return str(e)
    return why_hooked(layer) or spec


def traced_spec(layer: Part, rope: int = 0, window: int | None = None) -> LayerSpec:
    """Build the specification of a layer that has one, without checks: torch.compile traces this."""
    shared = shared_kv(layer)
    return build_layer(LiveLayer(layer), rope, window, shared.source if shared.reuses else None)


def _why_not_of_family(layer: Part) -> str | None:
    """Why a layer is none of a known family, or a variant of it that computes something else; None where it is."""
    family = family_of(layer)
    if family is None:
        return f"a {original(layer).__name__} is none of {', '.join(NAMES)}"
    if (reason := why_unknown(original(layer), LAYER_ARGUMENTS)) is not None:
        return reason
    if getattr(layer, "self_attn", None) is None:
        return "it has no self_attn"
    if (setting := family.other_setting(partial(getattr, layer.self_attn.config))) is not None:
        return f"its config has {setting}"
    if has_experts(layer) and family.moe is not None:
        return _why_not_routed(getattr(layer, family.mlp), family.moe)
    if missing := [name for name in (*family.gate_up, family.down_proj) if not hasattr(getattr(layer, family.mlp), name)]:
        return f"its {family.mlp} has no {missing[0]}"
    return _why_other_activation(layer, family)


def _why_other_activation(layer: Part, family: Family) -> str | None:
    """Why the activation between the linear layers of an MLP is not that of the config; None where it is."""
    mlp, name = getattr(layer, family.mlp), getattr(layer.self_attn.config, family.activation)
    found = [getattr(mlp, attribute) for attribute in _ACTIVATION_MODULES if hasattr(mlp, attribute)]
    if name in ACTIVATIONS and any(type(module) is not type(ACT2FN[name]) for module in found):
        return f"its activation was replaced by a {type(found[0]).__name__}"
    return None


def _why_not_routed(mlp: Part, moe: MoEFamily) -> str | None:
    """Why a mixture of experts has other parts than its family says; None where it has these."""
    router = getattr(mlp, moe.router)
    tensors = {name for name, _ in (*router.named_parameters(), *router.named_buffers())}
    router_tensors = {*_tensors_of_router(router, moe), *(("bias",) if moe.router_bias else ())}
    if moe.correction is not None and moe.correction.startswith(prefix := f"{moe.router}."):
        router_tensors.add(moe.correction.removeprefix(prefix))
    settings = [name for name in ("top_k", moe.norm_topk, moe.scaling_factor, moe.groups) if name is not None]
    if tensors != router_tensors or not all(hasattr(router, name) for name in settings):
        return "its router has other parts than a weight and how many experts it chooses"
    if moe.groups is not None and getattr(router, moe.groups) != 1:
        return "its router chooses among groups of experts"
    if moe.shared is None:
        return None
    expert, gate = moe.shared
    if (shared := getattr(mlp, expert)) is None:
        return f"it has no {expert}"
    if shared.gate_proj.bias is not None:
        return f"its {expert} is no down(silu(gate) * up)"
    row = None if gate is None else getattr(mlp, gate)
    is_row = row is None or (type(row) in (nn.Linear, QuantLinear) and row.bias is None)
    return None if is_row else f"its {gate} is no linear layer without a bias"


def _tensors_of_router(router: Any, moe: MoEFamily) -> Iterator[str]:
    """Yield the names of the tensors of a router's weight, which may be that of a Linear within it, quantized or not."""
    name = moe.router_weight.rpartition(".")[0]
    if not name:
        yield moe.router_weight
        return
    linear = router.get_submodule(name)
    if type(linear) in (nn.Linear, QuantLinear) and linear.bias is None:
        yield from (f"{name}.{tensor_name}" for tensor_name, _ in (*linear.named_parameters(), *linear.named_buffers()))


def weight_of(linear: QuantLinear) -> Weight:
    """Return the weight of a quantized linear layer, or of those that it is fused with."""
    packed, bias = linear.together
    return Weight(packed, bias, linear.compute, linear.activation)  # type: ignore[arg-type]


def norm_of(norm: Part, family: Family) -> Norm:
    """Return a live norm."""
    shift = getattr(norm, "bias", None) if family.layer_norm else None
    return Norm(norm.weight, _eps(norm), family.unit_offset, family.layer_norm, shift)


def _eps(norm: Part) -> float:
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


def _check_norm(norm: object) -> None:
    """Raise UnsupportedError for a norm that was replaced by what computes something else, as adapters do."""
    if not type(norm).__module__.startswith(_NORMS):
        raise UnsupportedError("one of its norms was replaced")


def _get(owner: Part, path: str) -> Any:
    """The attribute of an attribute … of a module; the module itself for an empty path."""
    for name in path.split(".") if path else ():
        owner = getattr(owner, name)
    return owner
