"""The mixture of experts of a decoder layer, with its norm and residual connection: the custom op `halfbyte::add_experts`.

    y = x + sum over t of w[t] * expert[id[t]](z) + shared_expert(z),  z = pre_norm(x),  ids and w by the router of z

On an NVIDIA GPU five or six kernels compute it for decoding, some more for prompts, and those of the shared expert; elsewhere torch's
operations with `halfbyte::grouped_linear`. `route`, `mixed` and `shared_output` are its parts, for experts on another device
(decoder/offload). What experts consist of is in experts.py, which also computes few rows on a CPU in one native call.
"""

from __future__ import annotations

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
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.experts import PREFIX
from halfbyte.machine import Gpu, gpu
from halfbyte.ops.checks import check_bytes, packed_bytes
from halfbyte.ops.cuda import on
from halfbyte.ops.grouped import check_stack
from halfbyte.ops.registration import OPS
from halfbyte.ops.tensors import aligned
from halfbyte.ops.transformer.experts import CLAMPED, Clamped, Experts, check_scores, many_rows
from halfbyte.ops.transformer.normed_linear import activated_in_torch
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
    if _has_one_compute(mixture):
        return OPS.add_experts.default(x, *_op_arguments(mixture))  # type: ignore[no-any-return]
    routed = route(x, mixture)
    total, of_shared = mixed(routed.z, routed.ids, routed.weights, mixture), shared_output(routed, mixture)
    return add_mixed(x, total if of_shared is None else total.add_(of_shared))


def _has_one_compute(mixture: Experts) -> bool:
    """Return whether all products compute in one way."""
    shared = mixture.shared_expert
    weights = mixture.gate_up, mixture.down_proj, *(() if shared is None else (shared.gate_up, shared.down_proj))
    return len({(weight.compute, weight.activation) for weight in weights}) == 1


def _computing_as(mixture: Experts, weight: Weight) -> Experts:
    """Return `mixture` with the compute and activation of one of its weights for all."""
    return mixture._replace(gate_up=mixture.gate_up._replace(compute=weight.compute, activation=weight.activation))


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
    """Norm rows x [..., K] and choose their experts, which themselves may be on another device."""
    a = _arguments(x, mixture)
    a.check()
    if x.is_cuda and x.numel():
        here, (experts, k) = gpu(x.get_device()), a.router.shape
        if why_not_router(experts, k, here) is None:
            return _route_on_gpu(a, here)
    return _route_in_torch(a)


def mixed(z: Tensor, ids: Tensor, weights: Tensor, mixture: Experts) -> Tensor:
    """Return the sum of the routed experts of normed rows by their weights, float32 [M, K].

        y[m] = sum over t of  weights[m, t] * expert[ids[m, t]](z[m])

    Args:
        z: [M, K]
        ids, weights: [M, T]
        mixture: The experts. All is on one device.
    """
    a, down = _arguments(z, mixture), _arguments(z, _computing_as(mixture, mixture.down_proj))
    return a.mixed(z, ids, weights, down)


def shared_output(routed: Routed, mixture: Experts) -> Tensor | None:
    """Return what the shared expert adds to rows, float32 [M, K]; None where there is none."""
    if mixture.shared_expert is None:
        return None
    weights = mixture.shared_expert.gate_up, mixture.shared_expert.down_proj
    up, down = (_arguments(routed.z, _computing_as(mixture, weight)) for weight in weights)
    return _shared_in_torch(up, routed, down)


def _shared_in_torch(a: _Arguments, routed: Routed, down: _Arguments | None = None) -> Tensor | None:
    """`down`: with the compute of the second product, if it has another."""
    if a.shared_up is None:
        return None
    y = a.of_shared(routed.z, down).float()
    return y if routed.shared_logits is None else torch.sigmoid(routed.shared_logits).unsqueeze(-1) * y


def _arguments(x: Tensor, mixture: Experts) -> _Arguments:
    a = _Arguments(x, *_op_arguments(mixture))  # type: ignore[arg-type]
    return a._replace(compute="float") if a.compute == "auto" and x.is_cuda else a


def _op_arguments(mixture: Experts) -> tuple[object, ...]:
    """Return the arguments of `halfbyte::add_experts` after x."""
    if mixture.pre_norm.layer_norm:
        raise ArgumentError("the norm before experts is an RMS norm, got a layer norm: compute this layer in torch")
    router = mixture.router, mixture.router_bias, mixture.top_k, mixture.norm_topk
    scores = mixture.scores, mixture.correction_bias, mixture.scaling_factor
    stacks = *_weight_arguments(mixture.gate_up), *_weight_arguments(mixture.down_proj)
    inner, clamped = mixture.down_proj.packed.shape[2], None if mixture.clamped is None else [*mixture.clamped]
    shared: tuple[object, ...] = (None, *_weight_arguments(None), *_weight_arguments(None), 0)
    if (expert := mixture.shared_expert) is not None:
        products = *_weight_arguments(expert.gate_up), *_weight_arguments(expert.down_proj)
        shared = (expert.gate, *products, expert.down_proj.packed.shape[1])
    norm = mixture.pre_norm.weight, mixture.pre_norm.eps, mixture.pre_norm.unit_offset
    return *norm, *router, *scores, *stacks, inner, clamped, *shared, mixture.gate_up.compute, mixture.gate_up.activation


def _weight_arguments(weight: Weight | None) -> tuple[Tensor | None, str, Tensor | None]:
    return (None, "", None) if weight is None else (weight.packed.data, weight.packed.name, weight.bias)


class _Arguments(NamedTuple):
    """The arguments of `halfbyte::add_experts`, as its schema names them; those of `Experts`, spelled out."""

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
    shared_gate: Tensor | None  # of the shared expert, if it has one; the next six are its weights, if there is one
    shared_up: Tensor | None
    shared_up_format: str
    shared_up_bias: Tensor | None
    shared_down: Tensor | None
    shared_down_format: str
    shared_down_bias: Tensor | None
    shared_inner: int
    compute: str  # of all products, as in `ops.linear`
    activation: Activation

    @property
    def pre_norm(self) -> Norm:
        return Norm(self.norm, self.eps, self.unit_offset)

    def check(self) -> None:
        """Raise ArgumentError where shapes or dtypes do not fit; `halfbyte::grouped_linear` checks the stacks."""
        x, router = self.x, self.router
        fits = x.dim() > 0 and router.dim() == 2 and x.shape[-1:] == router.shape[1:] == self.norm.shape
        fits = fits and x.device == router.device == self.norm.device
        for part, shape in ((self.bias, router.shape[:1]), (self.correction, router.shape[:1]), (self.shared_gate, router.shape[1:])):
            if part is not None:
                fits = fits and part.shape == shape and part.is_floating_point() and part.device == x.device
        if not fits or self.norm.dtype != x.dtype or not router.is_floating_point() or not 0 < self.top_k <= len(router):
            tensors = x, self.norm, router, self.bias, self.correction, self.shared_gate
            got = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors if t is not None)
            raise ArgumentError(
                "experts take x [..., K], a norm [K] of its type, a router [E, K], its bias and a correction [E] and a gate [K] of what is "
                f"shared, all on one device, and 1 to E of them, got {got}, {self.top_k}"
            )
        check_scores(self.scores, self.correction)

    def problem(self) -> ExpertsProblem:
        """Return the problem that `dispatch` chooses a kernel for."""
        formats = as_format(self.gate_up_format), as_format(self.down_format)
        experts, k = self.router.shape
        kinds = self.compute, self.activation
        sizes = self.x.numel() // k, experts, self.top_k, k, self.inner
        clamped, biased = self.clamped is not None, self.gate_up_bias is not None
        return ExpertsProblem(*sizes, *formats, self.x.dtype, *kinds, clamped=clamped, biased=biased)  # type: ignore[arg-type]

    def stack(self, *, down: bool) -> tuple[Tensor, Tensor | None, tuple[str, int, int, int, str, str]]:
        """Return the weight and bias of the `gate_up` or `down` stacks, and the settings of `halfbyte::grouped_linear` after them."""
        experts, k = self.router.shape
        computes = self.compute, self.activation
        if down:
            return self.down, self.down_bias, (self.down_format, experts, k, self.inner, *computes)
        return self.gate_up, self.gate_up_bias, (self.gate_up_format, experts, 2 * self.inner, k, *computes)

    def product(self, x: Tensor, ids: Tensor, *, down: bool) -> Tensor:
        """Multiply rows by the `gate_up` or `down` stacks of their experts -> [M, T, N]."""
        weight, bias, settings = self.stack(down=down)
        y: Tensor = OPS.grouped_linear.default(x, weight, ids, bias, *settings)
        return y

    def gated(self, x: Tensor) -> Tensor:
        """Return the gated activation of gate and up, x [..., 2 I] -> float32 [..., I]."""
        if self.clamped is None:
            gate, up = x.float().chunk(2, -1)
            return functional.silu(gate) * up
        alpha, limit = self.clamped
        both = x.float()
        gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2]
        y: Tensor = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
        return y

    def choose_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights [M, T] by the router's logits [M, E]."""
        if not self.scores:
            top_logits, ids = logits.topk(self.top_k, -1)
            weights = top_logits.softmax(-1) if self.norm_topk else logits.softmax(-1).gather(1, ids)
            return ids, weights * self.scaling_factor
        scores = scores_in_torch(logits, self.scores)
        ids = (scores if self.correction is None else scores + self.correction.float()).topk(self.top_k, -1).indices
        weights = scores.gather(1, ids)
        if self.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # the sum may be 0
        return ids, weights * self.scaling_factor

    def experts(self, z: Tensor, ids: Tensor, down: _Arguments | None = None) -> Tensor:
        """Return the outputs of the experts of rows, [M, T, K]; `down`: with the compute of the second product, if it has another."""
        return (down or self).product(self.gated(self.product(z, ids, down=False)).to(z.dtype), ids, down=True)

    def mixed(self, z: Tensor, ids: Tensor, weights: Tensor, down: _Arguments | None = None) -> Tensor:
        """Return the sum of the routed experts by their weights, float32 [M, K]; `down` as for `experts`."""
        if z.is_cpu and 0 not in (z.numel(), ids.numel(), self.inner):
            return self._mixed_on_cpu(z, ids, weights, down or self)
        return (self.experts(z, ids, down).float() * weights.unsqueeze(-1)).sum(1)

    def _mixed_on_cpu(self, z: Tensor, ids: Tensor, weights: Tensor, of_down: _Arguments) -> Tensor:
        up, down = (a.stack_as_weight(z, ids, down=is_down) for a, is_down in ((self, False), (of_down, True)))
        return many_rows(up, down, z, ids, weights, None if self.clamped is None else Clamped(*self.clamped))

    def stack_as_weight(self, x: Tensor, ids: Tensor, *, down: bool) -> Weight:
        """Return the `gate_up` or `down` stacks on a CPU. Raise ArgumentError where they do not fit, or ids are out of range."""
        weight, bias, settings = self.stack(down=down)
        check_stack(x, weight, ids, bias, *settings)
        name, *shape, compute, _ = settings
        return Weight(Packed(as_format(name), tuple(shape), PREFIX + cpu_tiles.NAME, aligned(weight)), bias, compute, self.activation)

    def of_shared(self, z: Tensor, down: _Arguments | None = None) -> Tensor:
        """Return the shared expert of z [M, K] -> [M, K], without its gate; `down` as for `experts`."""
        k = z.shape[1]
        up = self.shared_up, self.shared_up_bias, self.shared_up_format, 2 * self.shared_inner, k
        if self.compute == "float":
            inner = OPS.normed_linear.default(z, None, 0.0, False, *up, "silu", True, 1.0)
        else:
            weight, bias, *sizes = up
            both = OPS.linear.default(z, weight, bias, None, *sizes, self.compute, self.activation, None, None)
            inner = activated_in_torch(both, "silu", 1.0, gated=True)
        second, of_down = down or self, (self.shared_down, self.shared_down_bias, None, self.shared_down_format, k, self.shared_inner)
        y: Tensor = OPS.linear.default(inner, *of_down, second.compute, second.activation, None, None)
        return y


def _add_experts_in_torch(*args: *_Arguments) -> Tensor:
    """Compute the op by torch's operations: the norm in float32, rounded once, and all between the products in float32."""
    a = _Arguments(*args)
    a.check()
    routed = _route_in_torch(a)
    total = a.mixed(routed.z, routed.ids, routed.weights)
    shared = _shared_in_torch(a, routed)
    return add_mixed(a.x, total if shared is None else total.add_(shared))


def add_mixed(x: Tensor, y: Tensor) -> Tensor:
    """Return x [..., K] + y float32 [M, K], in x's dtype."""
    return (x + y.view(x.shape)).to(x.dtype)


def _route_in_torch(a: _Arguments) -> Routed:
    z = norm_in_torch(a.x, a.pre_norm).view(-1, a.x.shape[-1])
    logits = z.float() @ a.router.float().T
    if a.bias is not None:
        logits += a.bias.float()
    return Routed(z, *a.choose_experts(logits), None if a.shared_gate is None else z.float() @ a.shared_gate.float())


def _route_on_gpu(a: _Arguments, here: Gpu) -> Routed:
    from halfbyte.kernels.gpu.experts import routing

    experts, k = a.router.shape
    x = a.x.contiguous().view(-1, k)
    m, z = len(x), output(torch.empty_like(x))
    logits, weights = (output(torch.empty(m, n, dtype=torch.float32, device=x.device)) for n in (experts, a.top_k))
    ids = output(torch.empty(m, a.top_k, dtype=torch.int32, device=x.device))
    with on(x):
        shared_gate = (
            None if a.shared_gate is None else (a.shared_gate.contiguous(), output(torch.empty(m, dtype=torch.float32, device=x.device)))
        )
        router = routing.Router(a.router.contiguous(), None if a.bias is None else a.bias.contiguous(), shared_gate)
        routing.launch_logits(here, x, (a.norm.contiguous(), a.eps, a.unit_offset), router, z, logits)
        correction = None if a.correction is None else a.correction.contiguous()
        routing.launch_choice(here, logits, ids, weights, routing.Choice(a.norm_topk, a.scores, correction, a.scaling_factor))
    return Routed(z, ids, weights, None if shared_gate is None else shared_gate[1])


def _add_experts_on_gpu(*args: *_Arguments) -> Tensor:
    a = _Arguments(*args)
    a = a._replace(compute="float") if a.compute == "auto" else a
    a.check()
    here = gpu(a.x.get_device())
    choice = choose(a.problem(), here) if a.x.numel() else None
    if choice is None or choice.taken is None:
        return _add_experts_in_torch(*a)
    return _add_routed_on_gpu(a, _route_on_gpu(a, here), choice)


def _add_routed_on_gpu(a: _Arguments, routed: Routed, choice: Choice[ExpertsProblem, ExpertsCandidate]) -> Tensor:
    """Compute the op from the rows' experts, by the kernels that were chosen."""
    from halfbyte.kernels.gpu.experts import grouped, routing
    from halfbyte.kernels.gpu.transformer import gates

    assert choice.taken is not None
    here, (experts, k), (z, ids, weights, shared_logits) = gpu(a.x.get_device()), a.router.shape, routed
    x = a.x.contiguous().view(-1, k)
    m, routed_rows = len(x), len(x) * a.top_k
    out, inner = output(torch.empty_like(x)), output(x.new_empty(routed_rows, a.inner))
    with on(x):
        if (config := choice.taken.config) is not None:
            nbytes = experts * packed_bytes(a.gate_up_format, 2 * a.inner, k, "cuda")
            check_bytes(a.gate_up, nbytes, x.device, f"{a.gate_up_format} of shape [{experts}, {2 * a.inner}, {k}]")
            grouped.launch(choice.problem.first, config, z, aligned(a.gate_up), ids.view(-1), inner, None, gates="silu")
        elif a.clamped is None:
            gates.launch(here, a.product(z, ids, down=False).view(routed_rows, -1), inner)
        else:
            gates.launch_clamped(here, a.product(z, ids, down=False).view(routed_rows, -1), inner, *a.clamped)
        y = a.product(inner.view(m, a.top_k, -1), ids, down=True)
        shared = None if a.shared_up is None else (shared_logits, a.of_shared(z))
        routing.launch_sum(here, y.view(routed_rows, k), weights, x, out, shared)
    return out.view(a.x.shape)


def problem_of(mixture: Experts, rows: int, dtype: torch.dtype) -> ExpertsProblem:
    """Return the problem of `mixture` for so many rows that `dispatch` chooses a kernel for."""
    up, down = mixture.gate_up.packed, mixture.down_proj.packed
    kinds = mixture.gate_up.compute, mixture.gate_up.activation
    sizes = rows, up.shape[0], mixture.top_k, mixture.k, down.shape[2]
    clamped, biased = mixture.clamped is not None, mixture.gate_up.bias is not None
    return ExpertsProblem(*sizes, up.format, down.format, dtype, *kinds, clamped=clamped, biased=biased)  # type: ignore[arg-type]


def describe(mixture: Experts, rows: int, dtype: torch.dtype, here: Gpu) -> str:
    """Say which kernels compute `mixture` for so many rows, where none of its steps is left to torch."""
    if mixture.clamped is None:
        taken = choose(problem_of(mixture, rows, dtype), here).taken
        within = taken is not None and taken.config is not None
        gates = "with silu(gate) * up" if within else "before a kernel of silu(gate) * up"
    else:
        gates = f"before a kernel of {CLAMPED}"
    shared = "" if mixture.shared_expert is None else ", what is shared"
    return f"gate_up {gates}, then down, both of the routed experts, then a kernel of their sum by weights{shared} and the residual"


def _fake(*args: *_Arguments) -> Tensor:
    a = _Arguments(*args)
    a.check()
    return a.x.new_empty(a.x.shape)


_library.impl("add_experts", _add_experts_in_torch, "CPU")
_library.impl("add_experts", _add_experts_on_gpu, "CUDA")
torch.library.register_fake("halfbyte::add_experts", _fake, lib=_library)
