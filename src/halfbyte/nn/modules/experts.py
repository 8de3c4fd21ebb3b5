"""Mixtures of experts as transformers builds them: the weights of a layer's experts are stacked in two parameters of one module,

    gate_up_proj [experts, 2 * inner, hidden]     (without a gate: up_proj [experts, inner, hidden])
    down_proj    [experts, hidden, inner]

gpt-oss has them inputs first, [experts, hidden, 2 * inner] and [experts, inner, hidden], and biases, gate_up_proj_bias and down_proj_bias.

`expanded` (expanded.py) replaces each stack by a module, so that it is quantized, saved and loaded like other modules with a `weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.bounded import by_object
from halfbyte.dispatch.layers import MAX_ROUTED_ROWS
from halfbyte.layouts.base import Packed
from halfbyte.nn.described import check_compute
from halfbyte.nn.modules.quantized import PART, QuantModule, has_hooks, why_not_hooks
from halfbyte.nn.modules.transposed import transposed_parameter
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.experts import Clamped, Mixture
from halfbyte.ops.transformer.experts import why_not as why_not_one_call
from halfbyte.ops.transformer.weights import Weight

_DOWN = "down_proj"
_SPLIT_GATE = "_default_apply_gate"  # of transformers: act_fn(gate) * up, gates before what they are for
_SILU = "SiLUActivation", "SiLU"
_CLAMPED = "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts"


class Gated(NamedTuple):
    """What `ops.transformer.experts.Mixture` takes."""

    gate_up: Weight
    down: Weight
    clamped: Clamped | None

    def are(self, other: Gated) -> bool:
        """Whether these are the same tensors and settings."""
        weights = zip((*self.gate_up, *self.down), (*other.gate_up, *other.down), strict=True)
        return all(a is b for a, b in weights) and self.clamped == other.clamped


class StackedExperts(nn.Module):
    """Linear layers of experts in floating point: weight [E, N, K].

    transposed   whether it is a view of a parameter that is inputs first
    """

    def __init__(self, weight: nn.Parameter, transposed: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.transposed = transposed

    def forward(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """`halfbyte.grouped_linear`, expert by expert."""
        rows = x if x.dim() > expert_ids.dim() else x.unsqueeze(1).expand(*expert_ids.shape, -1)
        y = rows.new_empty((*expert_ids.shape, self.weight.shape[1]))
        for e in expert_ids.unique().tolist():
            y[expert_ids == e] = nn.functional.linear(rows[expert_ids == e], self.weight[e], None if bias is None else bias[e])
        return y

    def extra_repr(self) -> str:
        return "experts={}, out_features={}, in_features={}".format(*self.weight.shape)


class QuantExperts(QuantModule):
    """Linear layers of experts with quantized weights.

    Args:
        packed: [E, N, K].
        compute: See QuantLinear; on GPUs `halfbyte.grouped_linear`.
        activation: See `compute`.
        dtype: Of the float weights that they replace.
        error: As in QuantModule.

    Example:
        >>> experts = hb.QuantExperts(hb.pack(hb.quantize(torch.randn(4, 8, 32), "q8_0")))
        >>> experts.packed.shape
        (4, 8, 32)
    """

    kind = "Experts"
    dimensions = 3
    packed: Packed

    def __init__(
        self,
        packed: Packed,
        compute: str = "auto",
        activation: str = "block",
        *,
        dtype: torch.dtype = torch.float32,
        error: float | None = None,
    ) -> None:
        super().__init__(packed, dtype, error)
        check_compute(compute, activation)
        self.compute = compute
        self.activation = activation

    def forward(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] or [M, T, K], expert_ids [M, T], bias [E, N] -> [M, T, N]; see `halfbyte.grouped_linear`."""
        return ops.grouped_linear(x, self.packed, expert_ids, bias, compute=self.compute, activation=self.activation)

    def extra_repr(self) -> str:
        experts, n, k = self.packed.shape
        return f"experts={experts}, out_features={n}, in_features={k}, format={self.packed.codes_format}"


class MixtureOfExperts(nn.Module):
    """Replaces transformers' module of experts: its weights become modules with the parameters' names, its biases stay parameters.

    The activation between them is computed by the float module, which is kept, but not as a child that torch would see.

    few_in_one_call   whether one native call may compute few rows on a CPU, which rounds differently from the steps that it replaces
    """

    few_in_one_call = False

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._float = (module,)  # in a tuple, so that torch does not register it as a child
        self._up, _ = stacks(module)
        self.transposed: bool = module.is_transposed
        self.biased: bool = module.has_bias
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            if name in stacks(module):
                self.add_module(name, StackedExperts(transposed_parameter(parameter) if self.transposed else parameter, self.transposed))
            else:
                self.register_parameter(name, parameter)
        self.train(module.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [M, H], the experts of each token and their weights [M, T] -> [M, H]."""
        module: Any = self._float[0]
        if self.few_in_one_call and _few(hidden_states, top_k_index, top_k_weights) and (mixture := self._in_one_call()) is not None:
            return mixture(hidden_states, top_k_index, top_k_weights)
        inner = self.get_submodule(self._up)(hidden_states, top_k_index, self._bias(self._up)).flatten(0, 1)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y = self.get_submodule(_DOWN)(inner.unflatten(0, top_k_index.shape), top_k_index, self._bias(_DOWN))
        out: Tensor = (y * top_k_weights.unsqueeze(-1)).sum(1)
        return out.to(hidden_states.dtype)

    def gated(self) -> Gated | str:
        """The quantized stacks, where nothing is computed but what `ops.transformer.experts.Mixture` does; or why that is not so."""
        module: Any = self._float[0]
        up, down = (self.get_submodule(name) for name in (self._up, _DOWN))
        if type(up) is not QuantExperts or type(down) is not QuantExperts:
            return "its experts are not quantized"
        if any(map(_is_changed, self.children())):
            return "its experts have hooks, or are distributed over processes"
        if not module.has_gate or "_apply_gate" in vars(module):
            return "its experts have other gates"
        clamped = None
        if self.gate_settings:
            clamped = Clamped(*(getattr(module, name) for name in self.gate_settings))
        elif type(module)._apply_gate.__name__ != _SPLIT_GATE:
            return "its experts have other gates"
        elif type(module.act_fn).__name__ not in _SILU or _is_changed(module.act_fn):
            return "the activation of its experts is not silu"
        first, last = (
            Weight(part.packed, self._bias(name), part.compute, part.activation)  # type: ignore[arg-type]
            for part, name in ((up, self._up), (down, _DOWN))
        )
        return Gated(first, last, clamped)

    @property
    def gate_settings(self) -> tuple[str, ...]:
        """The attributes of the float module that `Clamped` gates depend on; none where gates are others."""
        cls = type(self._float[0])
        return ("alpha", "limit") if f"{cls.__module__}.{cls.__qualname__}" == _CLAMPED else ()

    def _in_one_call(self) -> Mixture | None:
        """The experts in one, as they are now; None where they are computed otherwise."""
        stacks = self.gated()
        if isinstance(stacks, str):
            return None
        return _mixture_of(self, stacks)[1]

    def _bias(self, stack: str) -> Tensor | None:
        return self.get_parameter(f"{stack}_bias") if self.biased else None

    @property
    def float_module(self) -> nn.Module:
        """The module that this one replaces."""
        module: nn.Module = self._float[0]
        return module

    def release(self) -> None:
        """Remove the float module's parameters."""
        for name in _parameter_names(self._float[0]):
            self._float[0].register_parameter(name, None)

    def collapsed(self) -> nn.Module:
        """The float module again, with the current weights and biases."""
        module = self.float_module
        for name, child in self.named_children():
            if isinstance(child, StackedExperts) and not self.transposed:
                module.register_parameter(name, child.weight)
            elif isinstance(child, StackedExperts) and module._parameters[name] is None:  # otherwise the child's is a view of it
                module.register_parameter(name, nn.Parameter(child.weight.detach().mT.contiguous(), child.weight.requires_grad))
        for name, bias in self.named_parameters(recurse=False):
            module.register_parameter(name, bias)
        return module


@by_object(lambda mixture, stacks: stacks.are(mixture[0]))
def _mixture_of(module: MixtureOfExperts, stacks: Gated) -> tuple[Gated, Mixture | None]:
    """The stacks of `module`, and their product in one call; None where it is not computed in one."""
    return stacks, None if why_not_one_call(stacks.gate_up, stacks.down) is not None else Mixture(*stacks)


def _few(x: Tensor, ids: Tensor, weights: Tensor) -> bool:
    """Whether there are few enough rows for one call on a CPU, and no gradients or tensor subclasses are involved."""
    few = x.is_cpu and 0 < ids.numel() <= MAX_ROUTED_ROWS and x.dim() == 2
    return few and not torch.is_grad_enabled() and all(map(plain, (x, ids, weights)))


def _is_changed(part: nn.Module) -> bool:
    return has_hooks(part) or "forward" in vars(part) or hasattr(part, PART)


def stacks(module: nn.Module) -> tuple[str, ...]:
    """The names of the stacked weights of a module of experts: up, then down. Empty for any other module."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):  # attributes of all experts of transformers
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", _DOWN)


def stack_before(name: str, names: Iterable[str]) -> str | None:
    """The name of the up projections of the same experts as the down projections `name` ("….down_proj"), if it is among `names`."""
    prefix, _, last_part = name.rpartition(".")
    return next((n for n in names if last_part == _DOWN and n in (f"{prefix}.gate_up_proj", f"{prefix}.up_proj")), None)


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module of experts: its `stacks` and their biases, if any."""
    weights = stacks(module)
    return (*weights, *(f"{name}_bias" for name in weights)) if module.has_bias else weights


def why_not(module: nn.Module) -> str | None:
    """Why the experts of a module that has `stacks` cannot be multiplied by `grouped_linear`, or None."""
    reasons = {
        "its experts have norms": getattr(module, "has_post_expert_norm", False),
        "its experts are on several devices": getattr(module, "_is_expert_parallel", False),
    }
    direct_names = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    reasons |= {"it has other tensors than two stacks of weights and their biases": direct_names != set(_parameter_names(module))}
    reasons |= {f"{type(module).__name__} has a forward of its own": "forward" in vars(module)}
    return next((reason for reason, holds in reasons.items() if holds), None) or why_not_hooks(module)
