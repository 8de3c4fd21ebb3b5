"""Pruning: which weights become 0, chosen by magnitude, by their contribution to the output, or with error compensation.

A weight W [N, K] is multiplied by inputs with the second moments H = sum(x x^T) [K, K].

    magnitude   the smallest |w| become 0
    wanda       the smallest |w| * sqrt(H[k, k]) of each row become 0: Sun, Liu, Bair, Kolter, arXiv:2306.11695, 2023
    sparsegpt   column by column as in `gptq.py`, with its U: the weights of the least (w / U[k, k])^2 become 0, and the later columns
                compensate, W[:, j] -= w_k / U[k, k] * U[k, j]: Frantar, Alistarh, arXiv:2301.00774, 2023

Either n of m neighbours along K are kept ("2:4"; a short group at the end of a row keeps as many, if it has them), or a fraction of all
becomes 0: of the whole weight by magnitude, of each row by wanda, of each 128 columns by sparsegpt, as in the papers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, unreachable
from halfbyte.quantizers.check import check_finite, check_weight
from halfbyte.quantizers.gptq import inverse_factor

SparseMethod = Literal["magnitude", "wanda", "sparsegpt"]
SPARSE_METHODS: tuple[SparseMethod, ...] = get_args(SparseMethod)
_COLUMNS = 128  # among which sparsegpt chooses
_GRAMMAR = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sparsity:
    """N:M sparsity: at most `keep` of every `of` neighbours along K are not 0; with `of` 0 the fraction `zeros` of all weights is 0."""

    keep: int = 0
    of: int = 0
    zeros: float = 0.0

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}" if self.of else f"{self.zeros:g}"


def as_sparsity(value: str | float | Sparsity) -> Sparsity:
    """Parse "2:4" (2 of 4 are kept) or 0.5 (half become 0)."""
    if isinstance(value, Sparsity):
        return value
    match = _GRAMMAR.fullmatch(value) if isinstance(value, str) else None
    if match is not None and int(match[1]) < int(match[2]):
        return Sparsity(int(match[1]), int(match[2]))
    if isinstance(value, float) and 0 < value < 1:
        return Sparsity(zeros=value)
    raise ArgumentError(f'a sparsity is "n:m", n of m weights kept, such as "2:4", or the fraction of zeros, 0 < … < 1, got {value!r}')


@torch.no_grad()
def prune(
    weight: Tensor, sparsity: Sparsity, method: SparseMethod, moments: Tensor | None = None, *, damping: float = 0.01, name: str = "weight"
) -> Tensor:
    """`weight` [N, K] (float32, float16 or bfloat16) pruned, in its dtype.

    Args:
        weight: float32, float16 or bfloat16 [N, K].
        sparsity: How many weights become 0, and among which.
        method: How they are chosen.
        moments: H times any positive number, float [K, K]; None for "magnitude".
        damping: As in GPTQ, for "sparsegpt".
        name: The tensor's name in error messages.

    Raises ArgumentError for NaN or infinity, or moments that do not fit.
    """
    check_weight(weight, name)
    check_finite(weight, name)
    if method == "magnitude":
        return weight.masked_fill(_least(weight.float().abs(), sparsity, rows=False), 0)
    k = weight.shape[-1]
    if moments is None or weight.dim() != 2 or tuple(moments.shape) != (k, k):
        got = "none" if moments is None else str(list(moments.shape))
        raise ArgumentError(f"{method} takes a weight [N, K] and moments [K, K], got {name} {list(weight.shape)} and {got}")
    check_finite(moments, f"the input moments of {name}")
    match method:
        case "wanda":
            scores = weight.float().abs() * moments.diagonal().float().clamp_min(0).sqrt()
            return weight.masked_fill(_least(scores, sparsity, rows=True), 0)
        case "sparsegpt":
            if not bool((moments.diagonal() > 0).any()):  # all inputs are 0: every weight matters as little
                return weight.masked_fill(_least(weight.float().abs(), sparsity, rows=False), 0)
            return _sparsegpt(weight.double(), sparsity, inverse_factor(moments, damping, name)).to(weight.dtype)
        case _:
            raise unreachable(method, "the method of pruning,")


def _least(scores: Tensor, sparsity: Sparsity, *, rows: bool) -> Tensor:
    """bool [N, K]: which become 0, exactly as many as the sparsity says; which of equal ones is undefined."""
    n, k = scores.shape
    if sparsity.of:
        short = -k % sparsity.of
        groups = torch.nn.functional.pad(scores, (0, short), value=-1.0).unflatten(-1, (-1, sparsity.of))
        gone = torch.ones_like(groups, dtype=torch.bool)
        gone.scatter_(-1, groups.topk(sparsity.keep, dim=-1).indices, value=False)
        return gone.flatten(-2)[:, :k]
    flat = scores if rows else scores.reshape(1, -1)
    order = flat.argsort(dim=-1, stable=True)[:, : math.floor(sparsity.zeros * flat.shape[1])]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, value=True).reshape(n, k)


def _sparsegpt(w: Tensor, sparsity: Sparsity, upper: Tensor) -> Tensor:
    """Prunes w, float64 [N, K], in place; `upper` is U."""
    group = sparsity.of or _COLUMNS
    step = group * max(1, _COLUMNS // group)
    for first in range(0, w.shape[1], step):
        last = min(first + step, w.shape[1])
        near, u = w[:, first:last], upper[first:last, first:last]
        errors = torch.zeros_like(near)
        gone = torch.zeros_like(near, dtype=torch.bool)
        for i in range(last - first):
            if i % group == 0:
                part = slice(i, min(i + group, last - first))
                gone[:, part] = _least((near[:, part] / u.diagonal()[part]).square(), sparsity, rows=False)
            errors[:, i] = torch.where(gone[:, i], near[:, i] / u[i, i], 0)
            near[:, i:] -= errors[:, i : i + 1] * u[i, i:]
        near.masked_fill_(gone, 0)  # only rounding errors are left there
        w[:, last:] -= errors @ upper[first:last, last:]
    return w
