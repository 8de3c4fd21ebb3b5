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
_BELOW_ONE = 1 - 2**-53  # times this, each float64 is smaller
_DTYPES = torch.float32, torch.int64, torch.float64, torch.float32, torch.float64  # of `DrawSettings`

Column = float | Tensor  # a number that all rows share, or [B, 1]
Draw = Callable[[Tensor, "Columns"], Tensor]  # scores [B, N] -> tokens, int64 [B]


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


class Columns(NamedTuple):
    """`DrawSettings` of the rows of scores [B, N]; None: of no row, so that nothing is computed for it.

    Attributes:
        temperature, top_k, top_p, log_min_p, uniform: As in `DrawSettings`.
        is_whole: Whether a row has top_p without top_k: its probabilities are those of all tokens.
    """

    temperature: Column
    top_k: Column | None
    top_p: Column | None
    log_min_p: Column | None
    uniform: Column
    is_whole: bool

    @classmethod
    def of(cls, settings: Sequence[DrawSettings], scores: Tensor) -> Columns:
        """Return the settings of rows; on the device of the scores, to which those that differ are copied."""
        whole, numbers = scores.shape[1], None
        columns: list[Column] = []
        for index, (values, dtype) in enumerate(zip(zip(*settings, strict=True), _DTYPES, strict=True)):
            if len(set(values)) == 1:
                columns.append(values[0])
                continue
            if numbers is None:
                numbers = torch.tensor(settings, dtype=torch.float64, device="cpu").to(scores.device, non_blocking=True)
            columns.append(numbers[:, index : index + 1].to(dtype))
        temperature, top_k, top_p, log_min_p, uniform = columns
        return cls(
            temperature,
            None if all(row.top_k == whole for row in settings) else top_k,
            None if all(row.top_p == math.inf for row in settings) else top_p,
            None if all(row.log_min_p == -math.inf for row in settings) else log_min_p,
            uniform,
            any(row.top_k == whole and row.top_p < math.inf for row in settings),
        )


def choose_rows(scores: Tensor, settings: Sequence[DrawSettings], most: int = MOST_CANDIDATES) -> Tensor:
    """Choose a token of each row of scores.

    Args:
        scores: [B, N], float32, after penalties.
        settings: Of each row.
        most: Candidates that are looked at with top_k or top_p.

    Returns:
        Ids int64 [B] on the device of the scores: NOT_FINITE where the row is not finite, UNDECIDED where it may have more candidates.
    """
    from_the_largest = partial(_from_the_largest, most=most)
    from_all = _from_all_of_one if scores.is_cpu and len(scores) == 1 else _from_all
    by_kind: dict[Draw, list[int]] = {}
    for row, of_row in enumerate(settings):
        is_ranked = of_row.top_k < scores.shape[1] or of_row.top_p < 1
        draw: Draw = _greedy if not of_row.temperature else from_the_largest if is_ranked else from_all
        by_kind.setdefault(draw, []).append(row)
    if len(by_kind) == 1:
        return draw(scores, Columns.of(settings, scores))
    ids = torch.empty(len(settings), dtype=torch.int64, device=scores.device)
    for draw, rows in by_kind.items():
        where = torch.tensor(rows, dtype=torch.int64, device="cpu").to(scores.device, non_blocking=True)
        ids[where] = draw(scores[where], Columns.of([settings[row] for row in rows], scores))
    return ids


def _greedy(scores: Tensor, columns: Columns) -> Tensor:
    from halfbyte.decoder.gpu_step import finite_likeliest  # not at the top: a CPU's `Sampler` needs none of it

    return finite_likeliest(scores)


def _from_the_largest(scores: Tensor, columns: Columns, most: int) -> Tensor:
    ids, cumulative, last, is_undecided = largest(scores, columns, most)
    chosen = ids.gather(1, _exceeding(cumulative, cumulative.gather(1, last) * columns.uniform))
    if is_undecided is not None:
        chosen.masked_fill_(is_undecided, UNDECIDED)
    return chosen.masked_fill_(cumulative[:, :1].isnan(), NOT_FINITE)[:, 0]


def largest(scores: Tensor, columns: Columns, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Find the tokens that top_k, top_p and min_p keep, among the `most` largest scores C; one of top_k and top_p at least is given.

    Returns:
        Ids [B, C] in decreasing order of their scores, the cumulative sum of their probabilities relative to the first, float64 [B, C],
        NaN in rows that are not finite, the index of the last one that is kept, int64 [B, 1], and whether there may be more, bool [B, 1];
        None: there are not.
    """
    whole, top_k = scores.shape[1], columns.top_k
    count = min(most, whole)
    values, ids = _top(scores, count)
    values = values.float() / columns.temperature
    best = values[:, :1]
    cumulative = (values - best).exp_().cumsum(1, dtype=torch.float64)
    last: Tensor | None = None
    if isinstance(top_k, Tensor):
        last = _last(values, values.gather(1, top_k.clamp(max=count) - 1)).masked_fill_(top_k == whole, count - 1)
    elif top_k is not None:
        at = min(int(top_k), count)
        last = _last(values, values[:, at - 1 : at])
    if columns.top_p is not None:
        total = cumulative[:, -1:] if last is None else cumulative.gather(1, last)
        if columns.is_whole:
            of_best = (scores.float() / columns.temperature).softmax(1).gather(1, ids[:, :1]).double()
            whole_total = of_best.reciprocal()
            total = whole_total.where(top_k == whole, total) if isinstance(top_k, Tensor) else whole_total
        within = torch.searchsorted(cumulative, total * columns.top_p)
        last = within.clamp_(max=count - 1) if last is None else within.minimum(last)
    assert last is not None
    if columns.log_min_p is not None:
        last = last.minimum(_last(values, best + columns.log_min_p))
    if count == whole:
        return ids, cumulative, last, None
    is_undecided = last == count - 1
    if isinstance(top_k, Tensor):
        is_undecided |= (top_k > count) & (top_k < whole)
    elif top_k is not None and top_k > count:
        is_undecided.fill_(True)
    return ids, cumulative, last, is_undecided


def _last(values: Tensor, least: Tensor) -> Tensor:
    """Return the index [B, 1] of the last of decreasing values [B, C] that is not less; C - 1 where they are NaN."""
    return values.shape[1] - 1 - (values < least).sum(1, True)


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores [B, count] in decreasing order, and their ids.

    On a CPU, where topk of many scores takes long, it is that of the `count` blocks with the largest maxima, which have them all.
    """
    if not scores.is_cpu or 4 * _BLOCK * count >= scores.shape[1]:
        return scores.topk(count)
    blocks = _in_blocks(scores, -math.inf)
    numbers = blocks.amax(2).topk(count, sorted=False).indices
    values, at = blocks.gather(1, numbers[..., None].expand(-1, -1, _BLOCK)).flatten(1).topk(count)
    return values, numbers.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


def _from_all(scores: Tensor, columns: Columns) -> Tensor:
    """Draw from all tokens that min_p keeps: first a block of them, then one of it."""
    blocks = _in_blocks(of_all(scores, columns), 0)
    sums = blocks.sum(2)
    cumulative = sums.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = total * columns.uniform
    block = _exceeding(cumulative, target)
    rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(1, dtype=torch.float64)
    at = _exceeding(inside, rest.clamp_(min=0).minimum(inside[:, -1:] * _BELOW_ONE))  # sums are rounded
    return at.add_(block, alpha=_BLOCK).masked_fill_(total.isnan(), NOT_FINITE)[:, 0]


def _from_all_of_one(scores: Tensor, columns: Columns) -> Tensor:
    """`_from_all` of a single row on a CPU: a few numbers, not tensors of one, which take most of its time."""
    (blocks,) = _in_blocks(of_all(scores, columns), 0)
    sums = blocks.sum(1)
    cumulative = sums.cumsum(0, dtype=torch.float64)
    total = cumulative[-1].item()
    if math.isnan(total):
        return torch.tensor([NOT_FINITE], device="cpu")
    target = total * columns.uniform
    block = min(int(torch.searchsorted(cumulative, target, right=True)), len(sums) - 1)
    inside = blocks[block].cumsum(0, dtype=torch.float64)
    rest = target - (cumulative[block].item() - sums[block].item())
    at = int(torch.searchsorted(inside, min(max(rest, 0.0), inside[-1].item() * _BELOW_ONE), right=True))  # sums are rounded
    return torch.tensor([block * _BLOCK + min(at, _BLOCK - 1)], device="cpu")


def of_all(scores: Tensor, columns: Columns) -> Tensor:
    """Return the probabilities [B, N] of all tokens, 0 of those that min_p does not keep; NaN in rows that are not finite."""
    scores = scores.float() / columns.temperature
    if columns.log_min_p is not None:
        scores -= scores.amax(1, True)
        if isinstance(columns.log_min_p, Tensor):
            scores.masked_fill_(scores < columns.log_min_p, -math.inf)
        else:  # one pass over all tokens; 0 is above, with min_p = 1, too
            nn.functional.threshold(scores, columns.log_min_p - 2**-40, -math.inf, inplace=True)
    return scores.softmax(1)


def _in_blocks(values: Tensor, padding: float) -> Tensor:
    """Return values [B, N] as [B, blocks, _BLOCK]; a copy where N is no multiple."""
    missing = -values.shape[1] % _BLOCK
    whole = nn.functional.pad(values, (0, missing), value=padding) if missing else values
    return whole.reshape(len(values), -1, _BLOCK)


def _exceeding(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index [B, 1] of the first cumulative sum, float64 [B, C], above a target [B, 1]; the last where they are NaN.

    An element of weight 0 is never the first, where the target is at least 0 and a sum is above it, as with a fraction of a sum.
    """
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
