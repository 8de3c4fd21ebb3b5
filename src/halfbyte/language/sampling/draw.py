"""Draws tokens from rows of scores, on their device and without a branch on what they hold.

    q    = softmax of the scores / temperature that top_k, top_p and min_p keep
    id   = the first token, in the order of candidates, at which the cumulative sum of q exceeds a uniform number

With top_k or top_p the candidates are the largest scores in decreasing order, `most` of them at most; otherwise all tokens in the order of
their ids. Called by `Sampler` and `BatchSampler` (sampler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

MOST_CANDIDATES = 1024
NOT_FINITE, UNDECIDED = -1, -2  # in place of a token
_BLOCK = 64  # elements

Draw = Callable[[Tensor, Tensor], Tensor]  # scores [B, N] and `DrawSettings` [B, 5] -> tokens, int64 [B]


class DrawSettings(NamedTuple):
    """How the token of a row of N scores is drawn.

    Attributes:
        temperature: Scores are divided by it; 0: the largest score is taken.
        top_k: At most N.
        top_p: Infinite to keep all tokens: a sum of probabilities may be rounded to 1 before the last one.
        log_min_p: Natural logarithm of min_p; -inf to keep all tokens.
        uniform: A number in [0, 1), at which the cumulative distribution is inverted.
    """

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float
    uniform: float


def choose_rows(scores: Tensor, settings: Sequence[DrawSettings], most: int = MOST_CANDIDATES) -> Tensor:
    """Choose a token of each row of scores.

    Args:
        scores: [B, N], float32, after penalties.
        settings: Of each row.
        most: Candidates that are looked at with top_k or top_p.

    Returns:
        Ids int64 [B] on the device of the scores: NOT_FINITE where the row is not finite, UNDECIDED where it may have more candidates.
    """
    has_min_p = any(of_row.log_min_p > -math.inf for of_row in settings)  # else passes over all tokens are spared
    from_the_largest, from_all = partial(_from_the_largest, most=most), partial(_from_all, has_min_p=has_min_p)
    by_kind: dict[Draw, list[int]] = {}
    for row, of_row in enumerate(settings):
        is_ranked = of_row.top_k < scores.shape[1] or of_row.top_p < 1
        draw: Draw = _greedy if not of_row.temperature else from_the_largest if is_ranked else from_all
        by_kind.setdefault(draw, []).append(row)
    numbers = torch.tensor(settings, dtype=torch.float64, device="cpu").to(scores.device, non_blocking=True)
    if len(by_kind) == 1:
        (draw,) = by_kind
        return draw(scores, numbers)
    ids = torch.empty(len(settings), dtype=torch.int64, device=scores.device)
    for draw, rows in by_kind.items():
        where = torch.tensor(rows, dtype=torch.int64, device="cpu").to(scores.device, non_blocking=True)
        ids[where] = draw(scores[where], numbers[where])
    return ids


def _greedy(scores: Tensor, settings: Tensor) -> Tensor:
    from halfbyte.decoder.gpu_step import finite_likeliest  # not at the top: a CPU's `Sampler` needs none of it

    return finite_likeliest(scores)


def _from_the_largest(scores: Tensor, settings: Tensor, most: int) -> Tensor:
    ids, weights, is_decided = largest(scores, settings, most)
    at, _ = _inverse_cumulative(weights, settings[:, 4:], relative=True)
    chosen = ids.gather(1, at).masked_fill(~is_decided, UNDECIDED)
    return chosen.where(weights[:, :1].isfinite(), NOT_FINITE)[:, 0]


def largest(scores: Tensor, settings: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the tokens that top_k, top_p and min_p keep, among the `most` largest scores C.

    Returns:
        Ids [B, C] in decreasing order of their scores, their probabilities [B, C], 0 of those that are not kept, and whether all that are
        kept are among them, bool [B, 1].
    """
    temperature, top_k, top_p, min_p, _ = settings.unsqueeze(2).unbind(1)
    count, whole = min(most, scores.shape[1]), scores.shape[1]
    values, ids = _top(scores, count)
    values, is_limited = values / temperature.float(), top_k < whole
    kept = (values >= values.gather(1, top_k.long().clamp(max=count) - 1)) | ~is_limited
    total = _masked(values, kept).logsumexp(1, True)
    if not (scores.is_cpu and is_limited.all()):  # a GPU's host would have to wait for the answer
        total = torch.where(is_limited, total, (scores / temperature.float()).logsumexp(1, True))
    probabilities = (values - total).exp().double() * kept
    kept &= probabilities.cumsum(1) - probabilities < top_p
    kept[:, 0] = True
    kept &= values >= values[:, :1] + min_p
    is_decided = ~(kept[:, -1:] | (is_limited & (top_k > count))) if count < whole else torch.ones_like(kept[:, :1])
    return ids, _masked(values, kept).softmax(1), is_decided


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores [B, count] in decreasing order, and their ids.

    On a CPU, where topk of many scores takes long, it is that of the `count` blocks with the largest maxima, which have them all.
    """
    rows, whole = scores.shape
    if not scores.is_cpu or 4 * _BLOCK * count >= whole:
        return scores.topk(count)
    blocks = nn.functional.pad(scores, (0, -whole % _BLOCK), value=-math.inf).view(rows, -1, _BLOCK)
    numbers = blocks.amax(2).topk(count).indices
    values, at = blocks.gather(1, numbers[..., None].expand(-1, -1, _BLOCK)).flatten(1).topk(count)
    return values, numbers.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


def _from_all(scores: Tensor, settings: Tensor, *, has_min_p: bool) -> Tensor:
    """Draw from all tokens that min_p keeps: first a block of them, then one of it."""
    weights = of_all(scores, settings, has_min_p=has_min_p)
    blocks = (nn.functional.pad(weights, (0, gap)) if (gap := -weights.shape[1] % _BLOCK) else weights).unflatten(1, (-1, _BLOCK))
    block, rest = _inverse_cumulative(blocks.sum(2), settings[:, 4:], relative=True)
    inside, _ = _inverse_cumulative(blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0], rest, relative=False)
    return (block * _BLOCK + inside).where(weights[:, :1].isfinite(), NOT_FINITE)[:, 0]


def of_all(scores: Tensor, settings: Tensor, *, has_min_p: bool = True) -> Tensor:
    """Return the probabilities [B, N] of all tokens, 0 of those that min_p does not keep; NaN in rows that are not finite."""
    scores = scores / settings[:, :1].float()
    if not has_min_p:
        return scores.softmax(1)
    return _masked(scores, scores >= scores.amax(1, True) + settings[:, 3:4]).softmax(1)


def _masked(scores: Tensor, kept: Tensor) -> Tensor:
    return scores.masked_fill(~kept, -math.inf)


def _inverse_cumulative(weights: Tensor, target: Tensor, *, relative: bool) -> tuple[Tensor, Tensor]:
    """Return the element [B, 1] at which the cumulative sum of weights [B, C], in float64, exceeds a target [B, 1], and how far in it the
    target is.

    A relative target is a fraction of the sum. An element of weight 0 is never chosen.
    """
    cumulative = weights.double().cumsum(1)
    if relative:
        target = target * cumulative[:, -1:]
    columns = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, columns, 0).amax(1, True)  # sums are rounded
    at = torch.searchsorted(cumulative, target, right=True).minimum(last)
    return at, target - (cumulative - weights).gather(1, at)
