"""Logits of several sequences → the next token of each, where the logits are: only token ids leave a GPU.

Tokens are those of `Sampler` (`sampler.py`), up to the rounding of sums, without a branch on what the logits hold, so the host does not
wait before the ids. A row with top-k or top-p is drawn from its largest scores; where more than `MOST_CANDIDATES` of them count, which
is rare, its `Sampler` draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from halfbyte.decoder.gpu_step import likeliest
from halfbyte.errors import non_finite_logits
from halfbyte.language.sampling.sampler import Choice, Sampler, Sampling

MOST_CANDIDATES = 1024
_NOT_FINITE, _UNDECIDED = -1, -2  # in place of a token
_BLOCK = 64  # elements

Draw = Callable[[Tensor, Tensor], Tensor]  # of scores [B, N] and settings [B, 5]; tokens, int64 [B]


class BatchSampler:
    """Chooses one token of each sequence.

    Example:
        chooser = BatchSampler(samplers)
        ids = chooser(logits)               # on the device of the logits
        tokens = chooser.accept(ids.tolist())
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Begin a step.

        Args:
            samplers: Of the sequences.
        """
        self._samplers = samplers

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose tokens.

        Args:
            logits: The model's logits [B, N], float32; not changed, and kept until `accept`.

        Returns:
            Ids int64 [B] on the same device; negative where `accept` has to decide.
        """
        self._logits, self._scores = logits, logits
        if any(sampler.changes_logits for sampler in self._samplers):
            self._scores = torch.stack([sampler.scores(row) for sampler, row in zip(self._samplers, logits, strict=True)])
        self._uniforms = [sampler.uniform() if sampler.draws else 0.0 for sampler in self._samplers]
        return choose_rows(self._scores, [sampler.sampling for sampler in self._samplers], self._uniforms)

    def accept(self, ids: Sequence[int]) -> list[int | Choice]:
        """Note which tokens were chosen.

        Args:
            ids: What the call has returned.

        Raises:
            CheckpointError: Logits are NaN or infinite.
        """
        chosen = []
        for row, (sampler, id, uniform) in enumerate(zip(self._samplers, ids, self._uniforms, strict=True)):
            if id == _NOT_FINITE:
                raise non_finite_logits(is_float16=sampler.is_float16)
            token = sampler.draw(self._scores[row].cpu(), uniform) if id == _UNDECIDED else id
            chosen.append(sampler.accept(token, self._logits[row]))
        return chosen


def choose_rows(scores: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Choose a token of each row of scores.

    Args:
        scores: [B, N], float32, after penalties.
        samplings: How the token of each row is chosen.
        uniforms: A number in [0, 1) for each row, at which its cumulative distribution is inverted.

    Returns:
        Ids int64 [B] on the device of the scores: -1 where the row is not finite, -2 where it has too many candidates.
    """
    by_kind: dict[Draw, list[int]] = {}
    for row, sampling in enumerate(samplings):
        by_kind.setdefault(_kind(sampling, scores.shape[1]), []).append(row)
    numbers = [_numbers(sampling, scores.shape[1], uniform) for sampling, uniform in zip(samplings, uniforms, strict=True)]
    settings = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(scores.device, non_blocking=True)
    if len(by_kind) == 1:
        (draw,) = by_kind
        return draw(scores, settings)
    ids = torch.empty(len(samplings), dtype=torch.int64, device=scores.device)
    for draw, rows in by_kind.items():
        where = torch.tensor(rows, dtype=torch.int64, device="cpu").to(scores.device, non_blocking=True)
        ids[where] = draw(scores[where], settings[where])
    return ids


def _kind(sampling: Sampling, count: int) -> Draw:
    if not sampling.temperature:
        return _greedy
    is_ranked = (sampling.top_k or count) < count or (sampling.top_p or 1) < 1
    return _from_the_largest if is_ranked else _from_all


def _numbers(sampling: Sampling, count: int, uniform: float) -> tuple[float, ...]:
    """Temperature, top_k, top_p, logarithm of min_p and the uniform number of a row."""
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return sampling.temperature, min(sampling.top_k or count, count), sampling.top_p or 1.0, least, uniform


def _greedy(scores: Tensor, settings: Tensor) -> Tensor:
    ids = likeliest(scores)
    return ids.where(scores.gather(1, ids[:, None])[:, 0].isfinite(), _NOT_FINITE)


def _from_the_largest(scores: Tensor, settings: Tensor) -> Tensor:
    """Draw where top-k or top-p leave few candidates, in decreasing order."""
    temperature, top_k, top_p, min_p, uniform = settings.unsqueeze(2).unbind(1)
    scores, whole = scores / temperature.float(), scores.shape[1]
    count = min(MOST_CANDIDATES, whole)
    values, ids = scores.topk(count)
    is_limited = top_k < whole
    kept = (values >= values.gather(1, top_k.long().clamp(max=count) - 1)) | ~is_limited
    total = torch.where(is_limited, _masked(values, kept).logsumexp(1, True), scores.logsumexp(1, True))
    probabilities = (values - total).exp().double() * kept
    kept &= probabilities.cumsum(1) - probabilities < top_p
    kept[:, 0] = True
    kept &= values >= values[:, :1] + min_p
    at, _ = _inverse_cumulative(_masked(values, kept).softmax(1), uniform, relative=True)
    chosen = ids.gather(1, at)
    if count < whole:
        chosen = chosen.masked_fill(kept[:, -1:] | (is_limited & (top_k > count)), _UNDECIDED)
    return chosen.where(values[:, :1].isfinite(), _NOT_FINITE)[:, 0]


def _from_all(scores: Tensor, settings: Tensor) -> Tensor:
    """Draw from all tokens that are likely enough, in the order of their ids: first a block of them, then one of it."""
    temperature, _, _, min_p, uniform = settings.unsqueeze(2).unbind(1)
    scores = scores / temperature.float()
    highest = scores.amax(1, True)
    probabilities = _masked(scores, scores >= highest + min_p).softmax(1)
    blocks = nn.functional.pad(probabilities, (0, -scores.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    block, rest = _inverse_cumulative(blocks.sum(2), uniform, relative=True)
    inside, _ = _inverse_cumulative(blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0], rest, relative=False)
    return (block * _BLOCK + inside).where(highest.isfinite(), _NOT_FINITE)[:, 0]


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
