"""The mixture of experts of a decoder layer, with its norm and residual connection: the custom op `halfbyte::add_experts`.

    y = x + sum over t of w[t] * expert[id[t]](z) + shared_expert(z),  z = pre_norm(x),  ids and w by the router of z

On an NVIDIA GPU five or six kernels compute it for decoding, some more for prompts, and those of the shared expert; elsewhere torch's
operations with `halfbyte::grouped_linear`. `route`, `mixed` and `shared_output` are its parts, for experts on another device
(decoder/offload). What experts consist of is in experts.py, which also computes few rows on a CPU in one native call.

The op takes `Experts` as a flat list of arguments (`_OpArguments`), which torch requires. The functions here take `Experts`, except for the
op's implementations.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.layers import why_not_router
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import RouterScores, scores_in_torch
from halfbyte.kernels.problem import Activation, ExpertsProblem
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.experts import PREFIX
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.checks import check_bytes, packed_bytes
from halfbyte.ops.cuda import on
from halfbyte.ops.grouped import check_stack
from halfbyte.ops.registration import OPS
from halfbyte.ops.tensors import aligned
from halfbyte.ops.transformer.experts import Clamped, Experts, SharedExpert, check_scores, check_stacks, many_rows
from halfbyte.ops.transformer.normed_linear import activated_in_torch, normed_linear
from halfbyte.ops.transformer.norms import norm_in_torch
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight

if TYPE_CHECKING:
    from halfbyte.dispatch.candidate import Choice
    from halfbyte.dispatch.layers import ExpertsCandidate

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "add_experts(Tensor x, Tensor norm, float eps, bool unit_offset, Tensor router, Tensor? bias, int top_k, bool norm_topk, "
    "str scores, Tensor? correction, float scaling_factor, Tensor gate_up, str gate_up_format, Tensor? gate_up_bias, Tensor down, "
    "str down_format, Tensor? down_bias, int inner, float[]? clamped, Tensor? shared_gate, Tensor? shared_up, str shared_up_format, "
    "Tensor? shared_up_bias, Tensor? shared_down, str shared_down_format, Tensor? shared_down_bias, int shared_inner, str compute, "
    "str activation) -> Tensor"
)


def add_experts(x: Tensor, mixture: Experts) -> Tensor:
    """Compute y = x + mixture(norm(x)) for x [..., K], in x's dtype; no gradients.

    Each product computes as its weight says, on a GPU in floating point unless it says int8: in one op where all say the same.

    Raises:
        ArgumentError: Shapes and dtypes do not fit, or the norm is a LayerNorm.
    """
    _check_mixture(mixture)
    if _has_one_compute(mixture):
        return OPS.add_experts.default(x, *_op_arguments(mixture))  # type: ignore[no-any-return]
    return _add_in_parts(x, _route(x, mixture), mixture)


def _has_one_compute(mixture: Experts) -> bool:
    """Return whether all products compute in one way."""
    shared = mixture.shared_expert
    weights = mixture.gate_up, mixture.down_proj, *(() if shared is None else (shared.gate_up, shared.down_proj))
    return len({(weight.compute, weight.activation) for weight in weights}) == 1


class Routed(NamedTuple):
    """Rows and their experts, as `route` chooses them and `mixed` and `add_mixed` take them.

    Attributes:
        z: The normed rows [M, K].
        ids, weights: Experts of each row and their weights, float32, [M, T].
        shared_logits: float32 [M], of the shared expert's gate; None: it has none.
    """

    z: Tensor
    ids: Tensor
    weights: Tensor
    shared_logits: Tensor | None


def route(x: Tensor, mixture: Experts) -> Routed:
    """Norm rows x [..., K] and choose their experts, which themselves may be on another device.

    Raises:
        ArgumentError: As `add_experts`.
    """
    _check_mixture(mixture)
    return _route(x, mixture)


def _route(x: Tensor, mixture: Experts) -> Routed:
    """Return what `route` does, by kernels where there are some."""
    _check(x, mixture)
    if x.is_cuda and x.numel():
        here, (experts, k) = gpu(x.get_device()), mixture.router.shape
        if why_not_router(experts, k, here) is None:
            return _route_on_gpu(x, mixture, here)
    return _route_in_torch(x, mixture)


def mixed(z: Tensor, ids: Tensor, weights: Tensor, mixture: Experts) -> Tensor:
    """Return the sum of the routed experts of normed rows by their weights, float32 [M, K].

        y[m] = sum over t of  weights[m, t] * expert[ids[m, t]](z[m])

    Args:
        z: [M, K]
        ids, weights: [M, T]
        mixture: The experts. All is on one device.

    Raises:
        ArgumentError: Shapes do not fit, or the norm is a LayerNorm.
    """
    _check_mixture(mixture)
    if ids.dim() != 2 or z.shape != (len(ids), mixture.k) or weights.shape != ids.shape:
        got = f"z {list(z.shape)}, ids {list(ids.shape)} and weights {list(weights.shape)}"
        raise ArgumentError(f"these experts take z [M, {mixture.k}], and ids and weights [M, T] of its rows, got {got}: flatten the tokens")
    return _mixed(z, ids, weights, mixture)


def _mixed(z: Tensor, ids: Tensor, weights: Tensor, mixture: Experts) -> Tensor:
    """Return what `mixed` does, without its checks."""
    if z.is_cpu and 0 not in (z.numel(), ids.numel(), mixture.inner):
        gate_up, down = (_checked_stack(weight, z, ids) for weight in (mixture.gate_up, mixture.down_proj))
        return many_rows(gate_up, down, z, ids, weights, mixture.clamped)
    inner = _gated(_grouped(z, ids, mixture.gate_up), mixture.clamped).to(z.dtype)
    return (_grouped(inner, ids, mixture.down_proj).float() * weights.unsqueeze(-1)).sum(1)


def shared_output(routed: Routed, mixture: Experts) -> Tensor | None:
    """Return what the shared expert adds to rows, float32 [M, K]; None where there is none.

    Raises:
        ArgumentError: Shapes do not fit, or the norm is a LayerNorm.
    """
    if mixture.shared_expert is None:
        return None
    _check_mixture(mixture)
    return _shared_output(routed, mixture.shared_expert)


def _shared_output(routed: Routed, shared: SharedExpert) -> Tensor:
    """Return what `shared_output` does, without its checks."""
    y = _shared_without_gate(routed.z, shared).float()
    return y if routed.shared_logits is None else torch.sigmoid(routed.shared_logits).unsqueeze(-1) * y


def add_mixed(x: Tensor, y: Tensor) -> Tensor:
    """Return x [..., K] + y float32 [M, K], in x's dtype."""
    return (x + y.view(x.shape)).to(x.dtype)


def _add_in_parts(x: Tensor, routed: Routed, mixture: Experts) -> Tensor:
    """Return x + mixture(z) for routed rows; all is on one device."""
    total, shared = _mixed(routed.z, routed.ids, routed.weights, mixture), mixture.shared_expert
    return add_mixed(x, total if shared is None else total.add_(_shared_output(routed, shared)))


def _check_mixture(mixture: Experts) -> None:
    """Raise ArgumentError for what the arguments of the op do not say: a LayerNorm, and weights whose shapes do not fit together."""
    if mixture.pre_norm.layer_norm:
        raise ArgumentError("the norm before experts is an RMS norm, got a layer norm: compute this layer in torch")
    check_stacks(mixture.gate_up, mixture.down_proj)
    if mixture.router.shape != (shape := mixture.down_proj.packed.shape)[:2]:
        raise ArgumentError(
            f"stacks {list(shape)} take a router {list(shape[:2])}, got {list(mixture.router.shape)}: pass that of their layer"
        )
    if (shared := mixture.shared_expert) is not None:
        up, down = shared.gate_up.packed.shape, shared.down_proj.packed.shape
        if down[:1] != shape[1:2] or up != (2 * down[1], mixture.k):
            expected = f"[2 I, {mixture.k}] and [{mixture.k}, I]"
            raise ArgumentError(f"the shared expert has weights {expected}, got {list(up)} and {list(down)}: pass those of its layer")


def _check(x: Tensor, mixture: Experts) -> None:
    """Raise ArgumentError where tensors do not fit x; `halfbyte::grouped_linear` checks the bytes and biases of the stacks."""
    norm, router, shared = mixture.pre_norm.weight, mixture.router, mixture.shared_expert
    shared_gate = None if shared is None else shared.gate
    fits = x.dim() > 0 and router.dim() == 2 and x.shape[-1:] == router.shape[1:] == norm.shape
    fits = fits and x.device == router.device == norm.device
    experts, k = router.shape[:1], router.shape[1:]
    for part, shape in ((mixture.router_bias, experts), (mixture.correction_bias, experts), (shared_gate, k)):
        if part is not None:
            fits = fits and part.shape == shape and part.is_floating_point() and part.device == x.device
    if not fits or norm.dtype != x.dtype or not router.is_floating_point() or not 0 < mixture.top_k <= len(router):
        tensors = x, norm, router, mixture.router_bias, mixture.correction_bias, shared_gate
        got = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors if t is not None)
        raise ArgumentError(
            "experts take x [..., K], a norm [K] of its type, a router [E, K], its bias and a correction [E] and a gate [K] of what is "
            f"shared, all on one device, and 1 to E of them, got {got}, {mixture.top_k}"
        )
    check_scores(mixture.scores, mixture.correction_bias)


# The products


def _grouped(x: Tensor, ids: Tensor, stack: Weight) -> Tensor:
    """Multiply rows by the weights of their experts -> [M, T, N]."""
    packed = stack.packed
    y: Tensor = OPS.grouped_linear.default(x, packed.data, ids, stack.bias, packed.name, *packed.shape, stack.compute, stack.activation)
    return y


def _checked_stack(stack: Weight, x: Tensor, ids: Tensor) -> Weight:
    """Return a stack on a CPU with aligned bytes. Raise ArgumentError where it does not fit, or ids are out of range."""
    packed, (experts, n, k) = stack.packed, stack.packed.shape
    check_stack(x, packed.data, ids, stack.bias, packed.name, experts, n, k, stack.compute, stack.activation)
    data = aligned(packed.data)
    return stack if data is packed.data else stack._replace(packed=replace(packed, data=data))


def _gated(both: Tensor, clamped: Clamped | None) -> Tensor:
    """Return the gated activation of gate and up, [..., 2 I] -> float32 [..., I]."""
    both = both.float()
    if clamped is None:
        gate, up = both.chunk(2, -1)
        return functional.silu(gate) * up
    gate, up = both[..., ::2].clamp(max=clamped.limit), both[..., 1::2].clamp(-clamped.limit, clamped.limit)
    y: Tensor = (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)
    return y


def _shared_without_gate(z: Tensor, shared: SharedExpert) -> Tensor:
    """Return the shared expert of z [M, K] -> [M, K], without its gate."""
    up = shared.gate_up
    if z.is_cuda and up.compute != "int8":
        inner = normed_linear(z, None, up.packed, up.bias, gates="silu")
    else:
        inner = activated_in_torch(_linear(z, up), "silu", 1.0, gated=True)
    return _linear(inner, shared.down_proj)


def _linear(x: Tensor, weight: Weight) -> Tensor:
    packed = weight.packed
    settings = packed.name, *packed.shape, weight.compute, weight.activation, None, None
    y: Tensor = OPS.linear.default(x, packed.data, weight.bias, None, *settings)
    return y


# Torch's operations: the norm in float32, rounded once, and all between the products in float32


def _route_in_torch(x: Tensor, mixture: Experts) -> Routed:
    z = norm_in_torch(x, mixture.pre_norm).view(-1, x.shape[-1])
    logits = z.float() @ mixture.router.float().T
    if mixture.router_bias is not None:
        logits += mixture.router_bias.float()
    gate = None if mixture.shared_expert is None else mixture.shared_expert.gate
    return Routed(z, *_choose_experts(logits, mixture), None if gate is None else z.float() @ gate.float())


def _choose_experts(logits: Tensor, mixture: Experts) -> tuple[Tensor, Tensor]:
    """Return ids and weights [M, T] by the router's logits [M, E]."""
    top_k = mixture.top_k
    if not mixture.scores:
        top_logits, ids = logits.topk(top_k, -1)
        weights = top_logits.softmax(-1) if mixture.norm_topk else logits.softmax(-1).gather(1, ids)
        return ids, weights * mixture.scaling_factor
    scores, correction = scores_in_torch(logits, mixture.scores), mixture.correction_bias
    ids = (scores if correction is None else scores + correction.float()).topk(top_k, -1).indices
    weights = scores.gather(1, ids)
    if mixture.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # the sum may be 0
    return ids, weights * mixture.scaling_factor


# GPU kernels


def _route_on_gpu(x: Tensor, mixture: Experts, here: Gpu) -> Routed:
    from halfbyte.kernels.gpu.experts import routing

    def empty_floats(*shape: int) -> Tensor:
        return output(torch.empty(shape, dtype=torch.float32, device=x.device))

    (weight, eps, unit_offset), shared = mixture.pre_norm[:3], mixture.shared_expert
    bias, correction = (None if t is None else t.contiguous() for t in (mixture.router_bias, mixture.correction_bias))
    x = x.contiguous().view(-1, x.shape[-1])
    m, z = len(x), output(torch.empty_like(x))
    logits, weights = empty_floats(m, len(mixture.router)), empty_floats(m, mixture.top_k)
    ids = output(torch.empty(m, mixture.top_k, dtype=torch.int32, device=x.device))
    with on(x):
        shared_gate = None if shared is None or shared.gate is None else (shared.gate.contiguous(), empty_floats(m))
        router = routing.Router(mixture.router.contiguous(), bias, shared_gate)
        routing.launch_logits(here, x, (weight.contiguous(), eps, unit_offset), router, z, logits)
        choice = routing.Choice(mixture.norm_topk, mixture.scores, correction, mixture.scaling_factor)
        routing.launch_choice(here, logits, ids, weights, choice)
    return Routed(z, ids, weights, None if shared_gate is None else shared_gate[1])


def _add_routed_on_gpu(x: Tensor, routed: Routed, mixture: Experts, choice: Choice[ExpertsProblem, ExpertsCandidate]) -> Tensor:
    """Return x + mixture(z) for routed rows, by the kernels that were chosen."""
    from halfbyte.kernels.gpu.experts import grouped, routing
    from halfbyte.kernels.gpu.transformer import gates

    assert choice.taken is not None
    here, (z, ids, weights, shared_logits), stack = gpu(x.get_device()), routed, mixture.gate_up.packed
    rows = x.contiguous().view(z.shape)
    m, k = z.shape
    routed_rows = m * mixture.top_k
    out, inner = output(torch.empty_like(rows)), output(rows.new_empty(routed_rows, mixture.inner))
    with on(x):
        if (config := choice.taken.config) is not None:
            experts, n, _ = stack.shape
            nbytes = experts * packed_bytes(stack.name, n, k, "cuda")
            check_bytes(stack.data, nbytes, x.device, f"{stack.name} of shape {list(stack.shape)}")
            grouped.launch(choice.problem.first, config, z, aligned(stack.data), ids.view(-1), inner, None, gates="silu")
        else:
            both = _grouped(z, ids, mixture.gate_up).view(routed_rows, -1)
            if mixture.clamped is None:
                gates.launch(here, both, inner)
            else:
                gates.launch_clamped(here, both, inner, *mixture.clamped)
        y = _grouped(inner.view(m, mixture.top_k, -1), ids, mixture.down_proj)
        shared = None if mixture.shared_expert is None else (shared_logits, _shared_without_gate(z, mixture.shared_expert))
        routing.launch_sum(here, y.view(routed_rows, k), weights, rows, out, shared)
    return out.view(x.shape)


# The op


class _OpArguments(NamedTuple):
    """The arguments of `halfbyte::add_experts`, as its schema names them: x, then `Experts`, spelled out."""

    x: Tensor
    norm: Tensor
    eps: float
    unit_offset: bool
    router: Tensor
    bias: Tensor | None
    top_k: int
    norm_topk: bool
    scores: RouterScores
    correction: Tensor | None
    scaling_factor: float
    gate_up: Tensor
    gate_up_format: str
    gate_up_bias: Tensor | None
    down: Tensor
    down_format: str
    down_bias: Tensor | None
    inner: int
    clamped: list[float] | None
    shared_gate: Tensor | None
    shared_up: Tensor | None
    shared_up_format: str
    shared_up_bias: Tensor | None
    shared_down: Tensor | None
    shared_down_format: str
    shared_down_bias: Tensor | None
    shared_inner: int
    compute: str  # of all products, as in `ops.linear`
    activation: Activation

    def checked_mixture(self) -> Experts:
        """Return the `Experts`. Raise ArgumentError where x and they do not fit."""
        experts, k = self.router.shape[:1], self.x.shape[-1:]
        shared = None
        if self.shared_up is not None and self.shared_down is not None:
            shared = SharedExpert(
                self._weight(self.shared_up, self.shared_up_format, self.shared_up_bias, (2 * self.shared_inner, *k)),
                self._weight(self.shared_down, self.shared_down_format, self.shared_down_bias, (*k, self.shared_inner)),
                self.shared_gate,
            )
        mixture = Experts(
            self._weight(self.gate_up, self.gate_up_format, self.gate_up_bias, (*experts, 2 * self.inner, *k)),
            self._weight(self.down, self.down_format, self.down_bias, (*experts, *k, self.inner)),
            self.router,
            self.top_k,
            self.norm_topk,
            Norm(self.norm, self.eps, self.unit_offset),
            shared,
            self.bias,
            None if self.clamped is None else Clamped(*self.clamped),
            self.scores,
            self.correction,
            self.scaling_factor,
        )
        _check(self.x, mixture)
        return mixture

    def _weight(self, data: Tensor, format: str, bias: Tensor | None, shape: tuple[int, ...]) -> Weight:
        layout = cpu_tiles.NAME if data.is_cpu else gpu_tiles.NAME
        packed = Packed(_format_of(format), shape, layout if len(shape) == 2 else PREFIX + layout, data, name=format)
        return Weight(packed, bias, self.compute, self.activation)


_format_of = functools.lru_cache(maxsize=64)(as_format)  # parsing a name takes longer than the checks


def _op_arguments(mixture: Experts) -> tuple[object, ...]:
    """Return the arguments of `halfbyte::add_experts` after x."""
    router = mixture.router, mixture.router_bias, mixture.top_k, mixture.norm_topk
    scores = mixture.scores, mixture.correction_bias, mixture.scaling_factor
    stacks = *_weight_arguments(mixture.gate_up), *_weight_arguments(mixture.down_proj)
    clamped = None if mixture.clamped is None else [*mixture.clamped]
    shared: tuple[object, ...] = (None, *_weight_arguments(None), *_weight_arguments(None), 0)
    if (expert := mixture.shared_expert) is not None:
        products = *_weight_arguments(expert.gate_up), *_weight_arguments(expert.down_proj)
        shared = (expert.gate, *products, expert.down_proj.packed.shape[1])
    computes = mixture.gate_up.compute, mixture.gate_up.activation
    return *mixture.pre_norm[:3], *router, *scores, *stacks, mixture.inner, clamped, *shared, *computes


def _weight_arguments(weight: Weight | None) -> tuple[Tensor | None, str, Tensor | None]:
    return (None, "", None) if weight is None else (weight.packed.data, weight.packed.name, weight.bias)


def _in_torch(*args: *_OpArguments) -> Tensor:
    a = _OpArguments(*args)
    mixture = a.checked_mixture()
    return _add_in_parts(a.x, _route_in_torch(a.x, mixture), mixture)


def _on_gpu(*args: *_OpArguments) -> Tensor:
    """Compute the op by kernels where there are some for its router and experts, else in torch's operations."""
    a = _OpArguments(*args)
    x, mixture, here = a.x, a.checked_mixture(), gpu(a.x.get_device())
    choice = choose(_problem(mixture, x), here) if x.numel() else None
    if choice is None or choice.taken is None:
        return _add_in_parts(x, _route_in_torch(x, mixture), mixture)
    return _add_routed_on_gpu(x, _route_on_gpu(x, mixture, here), mixture, choice)


def _problem(mixture: Experts, x: Tensor) -> ExpertsProblem:
    """Return the problem that `dispatch` chooses kernels for."""
    up, down, (experts, k) = mixture.gate_up, mixture.down_proj, mixture.router.shape
    sizes, kinds = (x.numel() // k, experts, mixture.top_k, k, mixture.inner), (up.compute, up.activation)
    clamped, biased = mixture.clamped is not None, up.bias is not None
    return ExpertsProblem(*sizes, up.packed.format, down.packed.format, x.dtype, *kinds, clamped=clamped, biased=biased)  # type: ignore[arg-type]


def _fake(*args: *_OpArguments) -> Tensor:
    a = _OpArguments(*args)
    a.checked_mixture()
    return a.x.new_empty(a.x.shape)


_library.impl("add_experts", _in_torch, "CPU")
_library.impl("add_experts", _on_gpu, "CUDA")
torch.library.register_fake("halfbyte::add_experts", _fake, lib=_library)
