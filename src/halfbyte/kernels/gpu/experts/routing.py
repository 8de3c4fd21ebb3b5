"""Router, top-k choice and weighted sum of a mixture of experts. With h [M, K], in float32:

    z = norm(h), rounded to its type           norm(h) = h / sqrt(mean(h²) + eps) * weight, or * (1 + weight)
    logits = z · routerᵀ + bias                [M, E]
    ids, weights                               the T largest logits of a row, the first of equal ones, and their softmax: among them, or
                                               their share of that of all; or the T largest of scores + correction, and scores of them, or
                                               their share of these, where scores are the sigmoid or the softmax of logits; times a factor
    y = h + sum over t of weights[t] * of_experts[t] + sigmoid(z · shared_gate) * of_shared, rounded once
                                               the last part where all tokens share an expert, which the same kernels make room for; it may
                                               have no gate, which is a factor of 1

What takes time with the few rows of a decoding step is that one kernel waits for another: a block has the logit of one expert, whose row
of the router it reads while the kernel before is still running, and finds the norm of the whole row by itself. Of many rows, as in prompts,
the norm has a kernel, and a block has the logits of some rows and experts, by tensor cores.
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
_WIDE = 512
_MANY, _FEWER = 64, 1024  # rows: from these on blocks have several, and below these fewer
_STEP = 64  # columns of a row that are multiplied at once


class Router(NamedTuple):
    """weight [E, K], bias [E] or None, contiguous. shared_gate: [K], contiguous, of the gate of an expert that all tokens share, and where
    its logits go, float32 [M]; or None."""

    weight: Tensor
    bias: Tensor | None = None
    shared_gate: tuple[Tensor, Tensor] | None = None


def launch_logits(gpu: Gpu, x: Tensor, norm: tuple[Tensor, float, bool], router: Router, z: Tensor, logits: Tensor) -> None:
    """x, z [M, K], logits float32 [M, E], contiguous; norm: its weight [K], eps, whether 1 + weight is multiplied by."""
    weight, eps, unit_offset = norm
    m, k = x.shape
    if m >= _MANY:
        norms.launch(gpu, x, norm, z)
        _launch_many(gpu, z, router.weight, router.bias, logits)
        if router.shared_gate is not None:
            _launch_many(gpu, z, router.shared_gate[0].view(1, k), None, router.shared_gate[1].view(m, 1))
        return
    pdl, wide = launcher.starts_early(gpu), triton.next_power_of_2(k)
    warps = 4 if wide <= 4096 else 8 if wide <= 8192 else 16
    grid = m, len(router.weight) + (router.shared_gate is not None)
    launcher.run(_logits, grid, x, weight, eps, tuple(router), z, logits, k, wide, unit_offset, pdl, num_warps=warps, early=pdl)


class Choice(NamedTuple):
    """normalized: weights add up to 1, before their factor; the rest as in `ops.transformer.experts.Experts`, contiguous."""

    normalized: bool
    scores: RouterScores = ""
    correction: Tensor | None = None
    factor: float = 1.0


def _launch_many(gpu: Gpu, z: Tensor, router: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """z [M, K], router [E, K], bias [E] or None, logits [M, E]."""
    (m, k), experts = z.shape, len(router)
    rows, columns, pdl = 16 if m < _FEWER else 64, min(64, max(16, triton.next_power_of_2(experts))), launcher.starts_early(gpu)
    grid, tile = (-(-m // rows), -(-experts // columns)), (rows, columns, _STEP)
    launcher.run(_logits_of_many, grid, z, router, bias, logits, m, experts, k, *tile, pdl, num_warps=4, num_stages=4, early=pdl)


def launch_choice(gpu: Gpu, logits: Tensor, ids: Tensor, weights: Tensor, choice: Choice) -> None:
    """logits [M, E], E at most MOST_EXPERTS -> ids int32 and weights float32 [M, T], contiguous."""
    (m, experts), chosen = logits.shape, ids.shape[1]
    normalized, scores, *given = choice
    sizes, pdl = (triton.next_power_of_2(experts), triton.next_power_of_2(chosen)), launcher.starts_early(gpu)
    how = *sizes, normalized, scores, pdl
    launcher.run(_choose, (m,), logits, *given, ids, weights, experts, chosen, *how, num_warps=1, early=pdl)


def launch_sum(
    gpu: Gpu, y: Tensor, weights: Tensor, residual: Tensor, out: Tensor, shared: tuple[Tensor | None, Tensor] | None = None
) -> None:
    """y [M * T, K], weights float32 [M, T], residual, out [M, K], contiguous; shared: logits float32 [M] of what all tokens share, or None,
    and what it gives [M, K]."""
    (m, k), pdl = out.shape, launcher.starts_early(gpu)
    grid = launcher.flat_grid(m, -(-k // _WIDE))
    launcher.run(_sum, grid, y, weights, residual, *(shared or (None, None)), out, k, weights.shape[1], _WIDE, pdl, num_warps=4, early=pdl)


@triton.jit
def _logits(x, weight, eps, router, z, logits, K, WIDE: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, WIDE)
    inside = i < K
    experts = tl.num_programs(1)
    of_router = inside
    if router[2] is not None:
        experts -= 1
        of_router = inside & (expert < experts)
    router_row = tl.load(router[0] + expert.to(tl.int64) * K + i, mask=of_router, other=0.0)
    factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1
    if PDL:
        gdc_wait()
    if router[2] is not None:  # not before: it may have been dequantized
        shared_gate = tl.load(router[2][0] + i, mask=inside & (expert == experts), other=0.0)
        router_row = router_row.to(tl.float32) + shared_gate.to(tl.float32)
    v = tl.load(x + row * K + i, mask=inside, other=0.0).to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v) / K + eps) * factor).to(z.dtype.element_ty)
    if expert == 0:
        tl.store(z + row * K + i, y, mask=inside)
    logit = tl.sum(y.to(tl.float32) * router_row.to(tl.float32))
    if router[1] is not None:
        logit += tl.load(router[1] + expert, mask=expert < experts, other=0.0).to(tl.float32)
    if router[2] is None:
        tl.store(logits + row * experts + expert, logit)
    else:
        tl.store(logits + row * experts + expert, logit, mask=expert < experts)
        tl.store(router[2][1] + row, logit, mask=expert == experts)


@triton.jit(do_not_specialize=["M", "E"])
def _logits_of_many(z, router, bias, logits, M, E, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    of_rows, of_experts = z + row.to(tl.int64)[:, None] * K, router + expert.to(tl.int64)[None, :] * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PDL:
        gdc_wait()
    for start in range(0, K, STEP):
        inside = start + i < K
        a = tl.load(of_rows + (start + i)[None, :], mask=(row < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(of_experts + (start + i)[:, None], mask=(expert < E)[None, :] & inside[:, None], other=0.0)
        if a.dtype != b.dtype:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = dot(a, b, total)
    if bias is not None:
        total += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    tl.store(logits + row.to(tl.int64)[:, None] * E + expert[None, :], total, mask=(row < M)[:, None] & (expert < E)[None, :])


@triton.jit
def _choose(
    logits,
    correction,
    factor,
    ids,
    weights,
    experts,
    CHOSEN: tl.constexpr,
    WIDE: tl.constexpr,
    SOME: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SCORES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i, t = tl.arange(0, WIDE), tl.arange(0, SOME)
    if PDL:
        gdc_wait()
    left = tl.load(logits + row * experts + i, mask=i < experts, other=float("-inf"))
    largest = tl.max(left, axis=0)
    shares = tl.exp(left - largest)
    total = tl.sum(shares, axis=0)
    if SCORES != "":
        tl.static_assert(SCORES == "softmax" or SCORES == "sigmoid", "scores that have no code for GPUs")  # noqa: PLR1714
        scores = shares / total if SCORES == "softmax" else times_sigmoid(1.0, left)
        total = tl.where(total == total, 1.0, total)  # noqa: PLR0124
        left = scores
        if correction is not None:
            left += tl.load(correction + i, mask=i < experts, other=0.0).to(tl.float32)
        left = tl.where(i < experts, left, float("-inf"))
    best = tl.full((SOME,), float("-inf"), tl.float32)
    at = tl.zeros((SOME,), tl.int32)
    for step in tl.static_range(CHOSEN):
        value, place = tl.max(left, axis=0, return_indices=True)
        if SCORES != "":
            value = tl.sum(tl.where(i == place, scores, 0.0), axis=0)
        best = tl.where(t == step, value, best)
        at = tl.where(t == step, place, at)
        left = tl.where(i == place, float("-inf"), left)
    if SCORES != "":
        share = tl.where(t < CHOSEN, best, 0.0)
        least = 1e-20  # the sum may be 0
    else:
        share = tl.exp(best - largest)
        least = 0.0
    if NORMALIZED:  # but where a logit is NaN all weights are, as torch's are
        total = tl.where(total == total, tl.sum(share, axis=0) + least, total)  # noqa: PLR0124
    tl.store(ids + row * CHOSEN + t, at, mask=t < CHOSEN)
    tl.store(weights + row * CHOSEN + t, share / total * factor, mask=t < CHOSEN)


@triton.jit
def _sum(y, weights, residual, gate, shared, out, K, CHOSEN: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row, column = row_and_column(tl.cdiv(K, WIDE))
    row, i = row.to(tl.int64), column * WIDE + tl.arange(0, WIDE)
    inside = i < K
    if PDL:
        gdc_wait()
    total = tl.zeros((WIDE,), tl.float32)
    for t in tl.static_range(CHOSEN):
        weight = tl.load(weights + row * CHOSEN + t)
        expert_output = tl.load(y + (row * CHOSEN + t) * K + i, mask=inside, other=0.0).to(tl.float32)
        total += weight * tl.where(weight == 0, 0.0, expert_output)  # an output that is left out may be infinite
    if shared is not None:
        shared_output = tl.load(shared + row * K + i, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            shared_output = times_sigmoid(shared_output, tl.load(gate + row))
        total += shared_output
    total += tl.load(residual + row * K + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + i, total.to(out.dtype.element_ty), mask=inside)
