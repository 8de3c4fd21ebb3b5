"""The router of a mixture of experts, the choice of experts and their weighted sum, for h [M, K], E experts and T chosen ones (`top_k`).

    launch_logits   z = norm(h), rounded to its type       norm(h) = h / sqrt(mean(h²) + eps) * weight, or * (1 + weight)
                    logits = z · routerᵀ + bias            float32 [M, E]
                    shared_logits = z · shared_gate        float32 [M], the gate of an expert that all tokens share, where there is one
    launch_choice   ids, weights [M, T] of the logits l, by `RouterScores` (kernels/layer_kinds.py):
                    ""                     the T largest l; their softmax among all experts, or among themselves if normalized
                    "softmax", "sigmoid"   the T largest of s + correction with s = softmax(l) or sigmoid(l); s, or s / sum of the T if
                                           normalized
                    all weights times a factor; of equal ones the first is chosen
    launch_sum      y = h + sum over t of weights[t] * expert_outputs[t] + sigmoid(shared_logits) * shared_output, rounded once;
                    the last term if there is a shared expert, and without the sigmoid if it has no gate

Arithmetic: float32. Called by `ops.transformer.routing`; between the launches are the products of the experts.

For the few rows of a decode step the time is that for which kernels wait for each other. So a thread block of `_logits` has one logit: it
loads its row of the router while the preceding kernel still runs, and computes the norm of the whole row by itself. For many rows, as in
prompts, the norm has a kernel of its own (transformer/norm.py), and a block of `_logits_of_many` multiplies rows on tensor cores.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import dot, row_and_column
from halfbyte.kernels.gpu.epilogue import times_sigmoid
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.transformer import norm as norms
from halfbyte.kernels.layer_kinds import RouterScores
from halfbyte.machine import Gpu

MOST_EXPERTS = 1024  # logits of a row in the registers of a warp
_SUM_COLUMNS = 512  # of a thread block of `_sum`
_MANY_ROWS = 64  # from these on `_logits_of_many`
_LARGE_TILE_ROWS = 1024  # from these on its tiles have 64 rows, not 16
_STEP = 64  # columns of a row that it multiplies at once


class Router(NamedTuple):
    """The weights of a router, contiguous.

    Attributes:
        weight: [E, K].
        bias: [E], or None.
        shared_gate: The weight [K] of a shared expert's gate, and where its logits are written, float32 [M]; None: there is no gate.
    """

    weight: Tensor
    bias: Tensor | None = None
    shared_gate: tuple[Tensor, Tensor] | None = None


class Choice(NamedTuple):
    """How experts are chosen.

    Attributes:
        normalized: The weights add up to 1, before they are multiplied by the factor.
        scores, correction, factor: `scores`, `correction_bias` [E], contiguous, and `scaling_factor` of `ops.transformer.experts.Experts`.
    """

    normalized: bool
    scores: RouterScores = ""
    correction: Tensor | None = None
    factor: float = 1.0


def launch_logits(gpu: Gpu, x: Tensor, norm: norms.Norm, router: Router, z: Tensor, logits: Tensor) -> None:
    """Launch z = norm(x), and the logits of the router and of the shared expert's gate.

    Args:
        gpu: The GPU.
        x: [M, K], contiguous.
        norm: An RMSNorm.
        router: The router's weights.
        z: [M, K], contiguous: written.
        logits: float32 [M, E], contiguous: written.
    """
    weight, eps, unit_offset = norm
    m, k = x.shape
    if m >= _MANY_ROWS:
        norms.launch(gpu, x, norm, z)
        _launch_many(gpu, z, router.weight, router.bias, logits)
        if router.shared_gate is not None:
            gate, shared_logits = router.shared_gate
            _launch_many(gpu, z, gate.view(1, k), None, shared_logits.view(m, 1))
        return
    pdl, wide = launcher.starts_early(gpu), triton.next_power_of_2(k)
    warps = 4 if wide <= 4096 else 8 if wide <= 8192 else 16
    grid = m, len(router.weight) + (router.shared_gate is not None)
    launcher.run(_logits, grid, x, weight, eps, tuple(router), z, logits, k, wide, unit_offset, pdl, num_warps=warps, early=pdl)


def _launch_many(gpu: Gpu, z: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """Launch logits [M, E] = z [M, K] · weightᵀ [E, K] + bias [E], or without a bias."""
    (m, k), experts = z.shape, len(weight)
    rows, columns, pdl = 16 if m < _LARGE_TILE_ROWS else 64, min(64, max(16, triton.next_power_of_2(experts))), launcher.starts_early(gpu)
    grid, tile = (-(-m // rows), -(-experts // columns)), (rows, columns, _STEP)
    launcher.run(_logits_of_many, grid, z, weight, bias, logits, m, experts, k, *tile, pdl, num_warps=4, num_stages=4, early=pdl)


def launch_choice(gpu: Gpu, logits: Tensor, ids: Tensor, weights: Tensor, choice: Choice) -> None:
    """Launch the choice of experts by logits float32 [M, E], E at most MOST_EXPERTS -> ids int32 and weights float32 [M, T], contiguous."""
    (m, experts), top_k = logits.shape, ids.shape[1]
    wide, top_k_wide, pdl = triton.next_power_of_2(experts), triton.next_power_of_2(top_k), launcher.starts_early(gpu)
    compiled_for = top_k, wide, top_k_wide, choice.normalized, choice.scores, pdl
    arguments = logits, choice.correction, choice.factor, ids, weights, experts
    launcher.run(_choose, (m,), *arguments, *compiled_for, num_warps=1, early=pdl)


def launch_sum(
    gpu: Gpu, y: Tensor, weights: Tensor, residual: Tensor, out: Tensor, shared: tuple[Tensor | None, Tensor] | None = None
) -> None:
    """Launch the weighted sum of experts with the residual connection.

    Args:
        gpu: The GPU.
        y: [M * T, K], contiguous: the outputs of the experts of each row.
        weights: float32 [M, T], contiguous.
        residual, out: [M, K], contiguous.
        shared: The logits float32 [M] of the shared expert's gate, or None, and its output [M, K]; None: there is no shared expert.
    """
    (m, k), top_k, pdl = out.shape, weights.shape[1], launcher.starts_early(gpu)
    gate, shared_output = shared or (None, None)
    grid = launcher.flat_grid(m, -(-k // _SUM_COLUMNS))
    launcher.run(_sum, grid, y, weights, residual, gate, shared_output, out, k, top_k, _SUM_COLUMNS, pdl, num_warps=4, early=pdl)


# The kernels. WIDE: a row's elements up to a power of two; PDL: they start before the preceding kernel has ended


@triton.jit
def _logits(x, norm_weight, eps, router, z, logits, K, WIDE: tl.constexpr, UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr):
    """Compute the logit of row program_id(0) for expert program_id(1), the last of which is the shared expert's gate if there is one. The
    block of expert 0 writes z. `router`: a `Router`, as a tuple."""
    weight, bias, shared_gate = router
    if PDL:
        gdc_launch_dependents()
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, WIDE)
    inside = i < K
    experts = tl.num_programs(1)
    of_router = inside
    if shared_gate is not None:
        experts -= 1
        of_router = inside & (expert < experts)
    router_row = tl.load(weight + expert.to(tl.int64) * K + i, mask=of_router, other=0.0)
    factor = tl.load(norm_weight + i, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1
    if PDL:
        gdc_wait()
    if shared_gate is not None:  # not before: it may have been dequantized
        gate_row = tl.load(shared_gate[0] + i, mask=inside & (expert == experts), other=0.0)
        router_row = router_row.to(tl.float32) + gate_row.to(tl.float32)
    v = tl.load(x + row * K + i, mask=inside, other=0.0).to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v) / K + eps) * factor).to(z.dtype.element_ty)
    if expert == 0:
        tl.store(z + row * K + i, y, mask=inside)
    logit = tl.sum(y.to(tl.float32) * router_row.to(tl.float32))
    if bias is not None:
        logit += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)
    if shared_gate is None:
        tl.store(logits + row * experts + expert, logit)
    else:
        tl.store(logits + row * experts + expert, logit, mask=expert < experts)
        tl.store(shared_gate[1] + row, logit, mask=expert == experts)


@triton.jit(do_not_specialize=["M", "E"])
def _logits_of_many(z, weight, bias, logits, M, E, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    """Compute the logits of ROWS rows for COLUMNS experts."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    z_rows, weight_rows = z + row.to(tl.int64)[:, None] * K, weight + expert.to(tl.int64)[None, :] * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PDL:
        gdc_wait()
    for start in range(0, K, STEP):
        inside = start + i < K
        a = tl.load(z_rows + (start + i)[None, :], mask=(row < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_rows + (start + i)[:, None], mask=(expert < E)[None, :] & inside[:, None], other=0.0)
        if a.dtype != b.dtype:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = dot(a, b, total)
    if bias is not None:
        total += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    tl.store(logits + row.to(tl.int64)[:, None] * E + expert[None, :], total, mask=(row < M)[:, None] & (expert < E)[None, :])


@triton.jit
def _choose(
    logits, correction, factor, ids, weights, experts,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, TOP_K_WIDE: tl.constexpr, NORMALIZED: tl.constexpr, SCORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of row program_id(0): TOP_K times the largest of `left`, which is then taken out.

    Without SCORES `left` are logits, and a weight is exp(logit - largest logit) / total. With SCORES `left` are the corrected scores, and a
    weight is a score, which is divided only if NORMALIZED.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i, t = tl.arange(0, WIDE), tl.arange(0, TOP_K_WIDE)
    if PDL:
        gdc_wait()
    left = tl.load(logits + row * experts + i, mask=i < experts, other=float("-inf"))
    largest = tl.max(left, axis=0)
    exponentials = tl.exp(left - largest)
    total = tl.sum(exponentials, axis=0)  # NaN where a logit is
    if SCORES != "":
        tl.static_assert(SCORES == "softmax" or SCORES == "sigmoid", "scores that have no code for GPUs")  # noqa: PLR1714
        scores = exponentials / total if SCORES == "softmax" else times_sigmoid(1.0, left)
        total = tl.where(total == total, 1.0, total)  # noqa: PLR0124
        left = scores
        if correction is not None:
            left += tl.load(correction + i, mask=i < experts, other=0.0).to(tl.float32)
        left = tl.where(i < experts, left, float("-inf"))
    chosen = tl.full((TOP_K_WIDE,), float("-inf"), tl.float32)  # logits, or scores without the correction
    chosen_ids = tl.zeros((TOP_K_WIDE,), tl.int32)
    for step in tl.static_range(TOP_K):
        value, expert = tl.max(left, axis=0, return_indices=True)
        if SCORES != "":
            value = tl.sum(tl.where(i == expert, scores, 0.0), axis=0)
        chosen = tl.where(t == step, value, chosen)
        chosen_ids = tl.where(t == step, expert, chosen_ids)
        left = tl.where(i == expert, float("-inf"), left)
    if SCORES != "":
        share = tl.where(t < TOP_K, chosen, 0.0)
        least = 1e-20  # the sum may be 0
    else:
        share = tl.exp(chosen - largest)
        least = 0.0
    if NORMALIZED:  # but where a logit is NaN all weights are, as torch's are
        total = tl.where(total == total, tl.sum(share, axis=0) + least, total)  # noqa: PLR0124
    tl.store(ids + row * TOP_K + t, chosen_ids, mask=t < TOP_K)
    tl.store(weights + row * TOP_K + t, share / total * factor, mask=t < TOP_K)


@triton.jit
def _sum(y, weights, residual, gate, shared, out, K, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Compute COLUMNS columns of a row of the sum; `gate` are the shared expert's logits and `shared` its output, or None."""
    if PDL:
        gdc_launch_dependents()
    row, column = row_and_column(tl.cdiv(K, COLUMNS))
    row, i = row.to(tl.int64), column * COLUMNS + tl.arange(0, COLUMNS)
    inside = i < K
    if PDL:
        gdc_wait()
    total = tl.zeros((COLUMNS,), tl.float32)
    for t in tl.static_range(TOP_K):
        weight = tl.load(weights + row * TOP_K + t)
        expert_output = tl.load(y + (row * TOP_K + t) * K + i, mask=inside, other=0.0).to(tl.float32)
        total += weight * tl.where(weight == 0, 0.0, expert_output)  # the output of an expert without weight may be infinite
    if shared is not None:
        shared_output = tl.load(shared + row * K + i, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            shared_output = times_sigmoid(shared_output, tl.load(gate + row))
        total += shared_output
    total += tl.load(residual + row * K + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + i, total.to(out.dtype.element_ty), mask=inside)
