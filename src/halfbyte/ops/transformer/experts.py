"""Mixtures of experts, each in one native call on a CPU.

`Mixture` multiplies by experts that somebody else's router chose (nn/modules/experts.py, decoder/offload). `Experts` is that part of a
decoder layer, with its norm, router and shared expert: `DecoderLayer` (decoder.py) takes it in place of an MLP, and GPU steps read it
(routing.py). The kernels are in kernels/cpu/transformer/experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.layers import MAX_ROUTED_ROWS, why_not_panels
from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import SCORES, RouterScores
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.experts import PREFIX
from halfbyte.ops.checks import FLOATS, device_name
from halfbyte.ops.transformer.sublayers import MLP, Norm, native_norm
from halfbyte.ops.transformer.weights import TensorAddresses, Weight

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import sublayers
    from halfbyte.kernels.cpu.transformer.experts import steps as kernel
    from halfbyte.kernels.cpu.transformer.experts.plan import Mixture as NativeMixture

CLAMPED = "(up + 1) * gate * sigmoid(alpha * gate)"  # the activation of `Clamped`, in words


class Clamped(NamedTuple):
    """The gated activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate).

    gate is clamped to at most `limit`, up to -limit … limit. The rows of `gate_up` alternate: a gate, its up, the next gate, …
    """

    alpha: float
    limit: float

    def native(self) -> kernel.Clamped:
        from halfbyte.kernels.cpu.transformer.experts import steps as kernel

        return kernel.Clamped(*self)


class Mixture:
    """y = sum over t of w[t] * (g[t] · Wdown[id[t]]ᵀ + bias[id[t]]),  g[t] = silu(gate) * up,
    gate, up = x · Wgate_up[id[t]]ᵀ + bias[id[t]]

    Everything between the products is float32.

    Args:
        gate_up: [E, 2 I, K]: the rows of gate, then those of up; biases [E, 2 I] or None.
        down: [E, K, I]; biases [E, K] or None.
        clamped: The activation in place of silu(gate) * up.

    Raises:
        ArgumentError: Weights do not fit together, or `why_no_mixture` refuses them.
    """

    def __init__(self, gate_up: Weight, down: Weight, clamped: Clamped | None = None) -> None:
        from halfbyte.kernels.cpu.transformer.experts import plan as experts_plan

        check_stacks(gate_up, down)
        if (reason := why_no_mixture(gate_up, down)) is not None:
            raise ArgumentError(f"these experts are not computed in one call: {reason}")
        self._experts, self._k, _ = down.packed.shape
        self._tensors = TensorAddresses()
        activation = None if clamped is None else clamped.native()
        self._products, self._activation = (self._tensors.product(gate_up), self._tensors.product(down)), activation
        shares = why_not(gate_up, down) is None
        self._of_few_rows = experts_plan.Mixture(*self._products, self._experts, activation) if shares else None

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the mixture, without gradients.

        Args:
            x: [M, K], float32, bfloat16 or float16.
            ids: [M, T], the experts of each row.
            weights: [M, T], theirs.

        Returns:
            y [M, K] in x's dtype.

        Raises:
            ArgumentError: Other shapes, or ids that are not in 0 … E - 1.
        """
        fits = x.dim() == ids.dim() == 2 and x.shape == (len(ids), self._k) and x.dtype in FLOATS and ids.numel() > 0
        if not fits or weights.shape != ids.shape or not (x.is_cpu and ids.is_cpu and weights.is_cpu):
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, ids, weights))
            raise ArgumentError(f"these experts take on the CPU x [M, {self._k}], and ids and weights [M, T] of it, got {got}")
        lowest, highest = (int(bound) for bound in ids.aminmax())
        if lowest < 0 or highest >= self._experts:
            raise ArgumentError(f"expert ids lie in 0 … {self._experts - 1}, got {lowest} … {highest}")
        self._tensors.refresh()
        operands = x.to(torch.float32).contiguous(), ids.to(torch.int64).contiguous(), weights.to(torch.float32).contiguous()
        if (few := self.for_few_rows(ids)) is not None:
            return few(*operands).to(x.dtype)
        from halfbyte.kernels.cpu.transformer.experts import items

        return items.run(self._products, *operands, self._activation).to(x.dtype)

    def for_few_rows(self, ids: Tensor) -> NativeMixture | None:
        """Return the kernel in which threads share the experts of rows, where it is the one to take; None: each has experts of its own."""
        return self._of_few_rows if ids.numel() <= MAX_ROUTED_ROWS else None

    def serve(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, flags: Tensor) -> None:
        """Compute y into `out` once a GPU has stored the rows (kernels/crossing.py); there is a kernel `for_few_rows`.

        Biases are as they were when this object was created.

        Args:
            x, out: float32 [M, K]. These and the others are contiguous, in memory that stays where it is.
            ids: int64 [M, T], each in 0 … E - 1, which is not checked.
            weights: float32 [M, T].
            flags: By which the GPU and the CPU tell each other what is stored.
        """
        from halfbyte.kernels.cpu.transformer.experts.plan import CrossingAddresses

        rows, top_k = ids.shape
        assert self._of_few_rows is not None
        self._of_few_rows.serve(rows, top_k, CrossingAddresses(*(tensor.data_ptr() for tensor in (flags, x, ids, weights, out))))


def many_rows(gate_up: Weight, down: Weight, x: Tensor, ids: Tensor, weights: Tensor, clamped: Clamped | None = None) -> Tensor:
    """Compute what `Mixture` does, for weights of any sizes and at least one row, without its checks -> float32 [M, K].

    Args:
        gate_up, down: As in `Mixture`, on the CPU.
        x, ids, weights: Rows, their experts, each in 0 … E - 1, and the weights of these.
        clamped: As in `Mixture`.
    """
    from halfbyte.kernels.cpu.transformer.experts import items

    tensors = TensorAddresses()
    products = tensors.product(gate_up), tensors.product(down)
    operands = x.to(torch.float32).contiguous(), ids.to(torch.int64).contiguous(), weights.to(torch.float32).contiguous()
    return items.run(products, *operands, None if clamped is None else clamped.native())


class SharedExpert(NamedTuple):
    """The shared expert: sigmoid(x · gate) * down_proj(silu(g) * u),  g, u = gate_up(x)

    Attributes:
        gate_up: [2 I, K]
        down_proj: [K, I]
        gate: [K]; None: there is no such factor.
    """

    gate_up: Weight
    down_proj: Weight
    gate: Tensor | None

    def as_mlp(self, pre_norm: Norm) -> MLP:
        """Return its products as an MLP, whose checks they share."""
        return MLP(self.gate_up, self.down_proj, pre_norm)


class Experts(NamedTuple):
    """The mixture-of-experts sublayer: y = h + `Mixture`(x) + shared_expert(x),  x = pre_norm(h)

    The experts of a token are the `top_k` largest of router · x + router_bias, their weights the softmax of these, or their share of the
    softmax of all. With `scores`, experts are the `top_k` largest of scores + correction_bias, weights the scores of these, or
    their share of the sum of these. All weights are multiplied by `scaling_factor`.

    Attributes:
        gate_up, down_proj: Stacks, as in `Mixture`.
        router: [E, K]
        top_k: Number of experts of a token.
        norm_topk: Whether the weights of a token sum to 1, before `scaling_factor`.
        pre_norm: Norm of h.
        shared_expert: The expert that every token uses.
        router_bias: [E], or None.
        clamped: Gates as in `Mixture`.
        scores: Function of router · x + router_bias.
        correction_bias: Expert bias correction [E], or None (DeepSeek-V3).
        scaling_factor: Of the weights: the router's own, times the layer's residual multiplier.
    """

    gate_up: Weight
    down_proj: Weight
    router: Tensor
    top_k: int
    norm_topk: bool
    pre_norm: Norm
    shared_expert: SharedExpert | None = None
    router_bias: Tensor | None = None
    clamped: Clamped | None = None
    scores: RouterScores = ""
    correction_bias: Tensor | None = None
    scaling_factor: float = 1.0

    @property
    def k(self) -> int:
        return self.down_proj.packed.shape[1]

    @property
    def inner(self) -> int:
        return self.down_proj.packed.shape[2]

    @property
    def most_rows(self) -> int:
        return max(1, MAX_ROUTED_ROWS // self.top_k)

    def why_not(self) -> str | None:
        """Return why `DecoderLayer` does not support these weights; None if it does."""
        reason = why_not(self.gate_up, self.down_proj)
        return reason if reason is not None or self.shared_expert is None else self.shared_expert.as_mlp(self.pre_norm).why_not()

    def check(self) -> None:
        """Raise ArgumentError for tensors that do not fit together."""
        check_stacks(self.gate_up, self.down_proj)
        experts, k, _ = self.down_proj.packed.shape
        expected, got = [(experts, k), (k,)], [tuple(self.router.shape), tuple(self.pre_norm.weight.shape)]
        for tensor in (self.router_bias, self.correction_bias):
            if tensor is not None:
                expected, got = [*expected, (experts,)], [*got, tuple(tensor.shape)]
        if (shared := self.shared_expert) is not None:
            shared.as_mlp(self.pre_norm).check()
            gate = (k,) if shared.gate is None else tuple(shared.gate.shape)
            expected, got = [*expected, (k, k), (k,)], [*got, (shared.down_proj.packed.shape[0], k), gate]
        if expected != got or not 0 < self.top_k <= experts:
            raise ArgumentError(
                f"a row chooses 1 to {experts} of {experts} experts by a router, a norm, a bias, a correction and what is shared of shapes "
                f"{expected}, got {self.top_k} and {got}"
            )
        check_scores(self.scores, self.correction_bias)

    def native(self, tensors: TensorAddresses) -> sublayers.FeedForward:
        from halfbyte.kernels.cpu.codegen.elements import kind_of
        from halfbyte.kernels.cpu.transformer.experts import plan as experts_plan

        shared = self.shared_expert
        gate = None if shared is None else shared.gate
        # One kernel multiplies by the router and the shared expert's gate: they are read as they are stored if both have one dtype.
        matrices = [self.router, *([] if gate is None else [gate])]
        is_stored_so = self.router.dtype in FLOATS and all(each.dtype == self.router.dtype and each.is_contiguous() for each in matrices)
        address_of = tensors.as_stored if is_stored_so else tensors.as_float32
        correction = 0
        if self.scores:
            zeros = torch.zeros(len(self.router), dtype=torch.float32, device="cpu")
            correction = tensors.as_float32(zeros if self.correction_bias is None else self.correction_bias)
        router = experts_plan.Router(
            native_norm(tensors, self.pre_norm),
            address_of(self.router),
            kind_of(self.router.dtype) if is_stored_so else "f32",
            0 if self.router_bias is None else tensors.as_float32(self.router_bias),
            self.norm_topk,
            self.scores,
            correction,
            self.scaling_factor,
        )
        native_shared = None
        if shared is not None:
            gate_address = 0 if gate is None else address_of(gate)
            native_shared = experts_plan.SharedExpert(tensors.product(shared.gate_up), tensors.product(shared.down_proj), gate_address)
        return experts_plan.Experts(
            tensors.product(self.gate_up),
            tensors.product(self.down_proj),
            len(self.router),
            self.top_k,
            router,
            native_shared,
            None if self.clamped is None else self.clamped.native(),
        )


def why_not(gate_up: Weight, down: Weight) -> str | None:
    """Return why few rows are not computed by the kernel in which threads share experts; None if they are."""
    return why_no_mixture(gate_up, down) or why_not_panels(gate_up.packed.shape[1] // 2)


def why_no_mixture(gate_up: Weight, down: Weight) -> str | None:
    """Return why `Mixture` does not compute stacks; None if it does."""
    if any(weight.packed.layout != PREFIX + cpu_tiles.NAME for weight in (gate_up, down)):
        return "its experts are not packed for CPUs"
    if any(weight.packed.data.data_ptr() % 64 or not weight.packed.data.is_contiguous() for weight in (gate_up, down)):
        return "its packed experts do not begin at multiples of 64 bytes"
    return None


def check_scores(scores: str, correction: Tensor | None) -> None:
    """Raise ArgumentError for unknown scores, and for a correction bias without scores."""
    if scores not in SCORES or (correction is not None and not scores):
        raise ArgumentError(
            f"scores are {' or '.join(map(repr, SCORES))}, and what has a correction has scores, got {scores!r} "
            f"{'without' if correction is None else 'with'} a correction"
        )


def check_stacks(gate_up: Weight, down: Weight) -> None:
    """Raise ArgumentError for stacks and biases that do not fit together."""
    shapes = [tuple(weight.packed.shape) for weight in (gate_up, down)]
    fits = all(len(shape) == 3 and shape[0] > 0 for shape in shapes)
    if fits:
        experts, rows, k = shapes[0]
        fits = rows % 2 == 0 and shapes[1] == (experts, k, rows // 2)
    biases = [weight.bias for weight in (gate_up, down)]
    biases_and_shapes = [(bias, shape[:2]) for bias, shape in zip(biases, shapes, strict=True) if bias is not None]
    device = gate_up.packed.device
    if not fits or any(bias.shape != shape or bias.device != device for bias, shape in biases_and_shapes):
        got = f"{shapes} and {[None if bias is None else list(bias.shape) for bias in biases]}"
        where = device_name(device.type)
        raise ArgumentError(f"experts have stacks [E, 2 I, K] and [E, K, I] and biases [E, 2 I] and [E, K] on {where}, got {got}")
