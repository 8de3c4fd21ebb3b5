"""Mixtures of experts of transformers' models, whose experts' weights are stacked in two parameters of one module,

    gate_up_proj [E, 2 I, K]     gates before up projections; of experts without a gate: up_proj [E, I, K]
    down_proj    [E, K, I]

for E experts, hidden states of K and inner states of I elements. gpt-oss has them inputs first, [E, K, 2 I] and [E, I, K], and biases,
gate_up_proj_bias and down_proj_bias. For each token, with router weights r of its top T experts e,

    y = sum over e of r[e] * (W_down[e] · act(W_gate[e] · x) * (W_up[e] · x))

`expand_` (expanded.py) puts a `MixtureOfExperts` in the place of such a module: each stack is then the `weight` of a child, a
`StackedExperts`, which is quantized, saved and loaded like a Linear; quantized it is a `QuantExperts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.bounded import by_object
from halfbyte.layouts.base import Packed
from halfbyte.nn.described import check_compute
from halfbyte.nn.modules.quantized import PART, QuantModule, has_hooks, why_not_hooks
from halfbyte.nn.modules.transposed import transposed_parameter
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer.experts import Clamped, Mixture, why_no_mixture
from halfbyte.ops.transformer.weights import Weight

_DOWN = "down_proj"
_GATED_HALVES = "_default_apply_gate"  # transformers' method: act_fn(first half) * second half
_SILU = "SiLUActivation", "SiLU"  # names of classes: transformers', torch's
_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts"  # its gates are `Clamped`


# transformers' module of experts


def stack_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's stacked weights, the up projections' before the down projections'; () for any module but one of
    experts."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):  # attributes of all experts of transformers
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", _DOWN)


def up_stack_of(name: str, names: Iterable[str]) -> str | None:
    """Return the up projections, one of `names`, of the experts whose down projections are called `name`; None where they are not among
    them, or `name` is another stack."""
    prefix, _, last_part = name.rpartition(".")
    return next((n for n in names if last_part == _DOWN and n in (f"{prefix}.gate_up_proj", f"{prefix}.up_proj")), None)


def why_not_experts(module: nn.Module) -> str | None:
    """Return why a module with `stack_names` does not compute what `MixtureOfExperts` does; None where it does."""
    tensors = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have norms"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are on several devices"
    if tensors != set(_parameter_names(module)):
        return "it has other tensors than two stacks of weights and their biases"
    if "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    return why_not_hooks(module)


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a module of experts: the stacks and, if it has them, their biases."""
    names = stack_names(module)
    return (*names, *(f"{name}_bias" for name in names)) if module.has_bias else names


# What replaces it


class MixtureOfExperts(nn.Module):
    """Replaces transformers' module of experts. The stacks are children with the names of its parameters, biases stay parameters.

    The activation between the products is computed by the float module, which is kept, but not as a child that torch would see.

    Attributes:
        transposed: Whether the float module has its stacks inputs first.
        biased: Whether the experts have biases.
        fuses: Whether one native call on a CPU may compute the experts, which rounds otherwise than the operations that it replaces.
            `optimize_` sets it.
    """

    fuses = False

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._float = (module,)  # in a tuple, so that torch does not register it as a child
        self._up, _ = names = stack_names(module)
        self.transposed: bool = module.is_transposed
        self.biased: bool = module.has_bias
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            if name in names:
                self.add_module(name, StackedExperts(transposed_parameter(parameter) if self.transposed else parameter, self.transposed))
            else:
                self.register_parameter(name, parameter)
        self.train(module.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts that a router chose.

        Args:
            hidden_states: [M, K].
            top_k_index: [M, T], the experts of each token.
            top_k_weights: [M, T], the factors of their outputs.

        Returns:
            [M, K], in the dtype of `hidden_states`.
        """
        module: Any = self._float[0]
        if self.fuses and _fits_fused(hidden_states, top_k_index, top_k_weights):
            stacks = self.gated_stacks()
            if not isinstance(stacks, str) and (mixture := _fused(self, stacks)[1]) is not None:
                return mixture(hidden_states, top_k_index, top_k_weights)
        inner = self.get_submodule(self._up)(hidden_states, top_k_index, self._bias(self._up)).flatten(0, 1)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y = self.get_submodule(_DOWN)(inner.unflatten(0, top_k_index.shape), top_k_index, self._bias(_DOWN))
        out: Tensor = (y * top_k_weights.unsqueeze(-1)).sum(1)
        return out.to(hidden_states.dtype)

    def gated_stacks(self) -> GatedStacks | str:
        """Return the quantized stacks, as they are now, where the experts are gated by silu or as in gpt-oss; else why they are not."""
        module: Any = self._float[0]
        up, down = (self.get_submodule(name) for name in (self._up, _DOWN))
        if type(up) is not QuantExperts or type(down) is not QuantExperts:
            return "its experts are not quantized"
        if any(map(_is_overridden, self.children())):
            return "its experts have hooks, or are distributed over processes"
        if not module.has_gate or "_apply_gate" in vars(module):
            return "its experts have other gates"
        clamped = None
        if self.gate_settings:
            clamped = Clamped(*(getattr(module, name) for name in self.gate_settings))
        elif type(module)._apply_gate.__name__ != _GATED_HALVES:
            return "its experts have other gates"
        elif type(module.act_fn).__name__ not in _SILU or _is_overridden(module.act_fn):
            return "the activation of its experts is not silu"
        gate_up, down_proj = (
            Weight(part.packed, self._bias(name), part.compute, part.activation)  # type: ignore[arg-type]
            for part, name in ((up, self._up), (down, _DOWN))
        )
        return GatedStacks(gate_up, down_proj, clamped)

    @property
    def gate_settings(self) -> tuple[str, ...]:
        """The attributes of the float module that `Clamped` gates depend on; () where gates are others."""
        cls = type(self._float[0])
        return ("alpha", "limit") if f"{cls.__module__}.{cls.__qualname__}" == _GPT_OSS else ()

    def _bias(self, stack: str) -> Tensor | None:
        return self.get_parameter(f"{stack}_bias") if self.biased else None

    @property
    def float_module(self) -> nn.Module:
        """The module that this one replaces."""
        module: nn.Module = self._float[0]
        return module

    def release(self) -> None:
        """Remove the float module's parameters, whose values the children have."""
        for name in _parameter_names(self._float[0]):
            self._float[0].register_parameter(name, None)

    def collapsed(self) -> nn.Module:
        """Return the float module, with the current weights and biases."""
        module = self.float_module
        for name, child in self.named_children():
            if isinstance(child, StackedExperts) and not self.transposed:
                module.register_parameter(name, child.weight)
            elif isinstance(child, StackedExperts) and module._parameters[name] is None:  # otherwise the child's is a view of it
                module.register_parameter(name, nn.Parameter(child.weight.detach().mT.contiguous(), child.weight.requires_grad))
        for name, bias in self.named_parameters(recurse=False):
            module.register_parameter(name, bias)
        return module


class StackedExperts(nn.Module):
    """Linear layers of experts in floating point.

    Attributes:
        weight: [E, N, K].
        transposed: Whether it is a view of a parameter [E, K, N] of the float module.
    """

    def __init__(self, weight: nn.Parameter, transposed: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.transposed = transposed

    def forward(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute what `QuantExperts.forward` does, expert by expert."""
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
        """Multiply each token by its experts' weights.

        Args:
            x: [M, K], the same for all T experts of a token, or [M, T, K].
            expert_ids: [M, T].
            bias: [E, N] or None.

        Returns:
            [M, T, N], of x's dtype; see `halfbyte.grouped_linear`.
        """
        return ops.grouped_linear(x, self.packed, expert_ids, bias, compute=self.compute, activation=self.activation)

    def extra_repr(self) -> str:
        experts, n, k = self.packed.shape
        return f"experts={experts}, out_features={n}, in_features={k}, format={self.packed.codes_format}"


# Both products and the activation between them in one native call


class GatedStacks(NamedTuple):
    """Quantized stacks of gated experts: the arguments of `ops.transformer.experts.Mixture`.

    Attributes:
        gate_up: [E, 2 I, K], with its bias.
        down: [E, K, I], with its bias.
        clamped: The settings of gpt-oss' gates; None: gates are silu(gate) * up.
    """

    gate_up: Weight
    down: Weight
    clamped: Clamped | None

    def same_as(self, other: GatedStacks) -> bool:
        """Whether these are the same tensors, by identity, and the same settings."""
        pairs = zip((*self.gate_up, *self.down), (*other.gate_up, *other.down), strict=True)
        return all(part is other_part for part, other_part in pairs) and self.clamped == other.clamped


@by_object(lambda cached, stacks: stacks.same_as(cached[0]))
def _fused(module: MixtureOfExperts, stacks: GatedStacks) -> tuple[GatedStacks, Mixture | None]:
    """Return the stacks and the native call that computes them, cached for `module`; None where there is no such kernel."""
    return stacks, None if why_no_mixture(stacks.gate_up, stacks.down) is not None else Mixture(*stacks)


def _fits_fused(x: Tensor, ids: Tensor, weights: Tensor) -> bool:
    """Whether the native call takes a call: on a CPU, without gradients and tensor subclasses."""
    fits = x.is_cpu and x.dim() == 2 and ids.numel() > 0
    return fits and not torch.is_grad_enabled() and all(map(plain, (x, ids, weights)))


def _is_overridden(module: nn.Module) -> bool:
    """Whether a call of the module may compute something else than its class: by hooks, a forward of its own, or as a shard."""
    return has_hooks(module) or "forward" in vars(module) or hasattr(module, PART)
