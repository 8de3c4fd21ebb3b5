"""Reorder and negate int8 codes so that AVX2's products of bytes, summed as int16, never saturate; `arranged.py` multiplies by them.

`vpmaddubsw` computes a*v + b*w of unsigned bytes a, b and signed bytes v, w, and saturates to int16. It is exact for all a, b in 0 … 255
if and only if the positive ones of v, w sum to at most 128 = floor((2**15 - 1) / 255), and the magnitudes of the negative ones, too. Of
weights that are scaled to ±127 some adjacent pairs exceed that. Two things can be chosen to avoid it:

    order   Activations pass a shuffle of bytes, which permutes lanes of 16 codes along K at no further cost.
    sign    w * x = w * (x + 128) - 128 * w = -w * (127 - x) + 127 * w. Activations are made unsigned by x ^ 0x80 = x + 128; the mask 0x7F
            gives 127 - x instead, and negates the code. The constants are summed to a `correction` of each output.

All outputs of a tile share one order. Of the 16 codes of a lane the search makes 8 pairs, and of these 4 couples: two pairs whose sums
obey the bound together and are added as int16, before `vpmaddwd` widens them to int32. A chunk is what is multiplied together:

    slot     0  1 | 2  3 | 4  5 | 6  7 || 8  9 | 10 11 | 12 13 | 14 15
    pair       p0 |   q0 |   p1 |   q1 ||   r0 |    s0 |    r1 |    s1       couples p = p0 + p1, q, r, s
    half       0                       || 1

A half is coupled if both of its couples obey the bound, and else its four pairs are widened one by one. A lane with a pair that exceeds the
bound is split into two chunks of 8 codes, each paired with a zero.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

LANE = 16
ZERO_BYTE = 0x80  # in a shuffle: the slot is 0
COUPLED_HALVES = (2, 1, 0)  # of a chunk, in the order of a group's chunks
_SPLIT = -1  # in their place: the lane takes two chunks
_ABSENT = -2  # in their place: the second chunk of a lane that takes one
_TRIALS = 3
_NOISE = 8  # added to costs, times the number of the trial
_LANES_AT_ONCE = 1 << 10  # so that the costs stay in the cache
_UNAVAILABLE = 1 << 10  # a cost above all others with their noise, whose product with LANE is an int16


class Arranged(NamedTuple):
    """Chunks of each group of outputs, those with more coupled halves first; groups with fewer chunks than others end with zeros.

    Attributes:
        counts: int64 [groups, 3] Chunks with as many coupled halves as COUPLED_HALVES has there.
        corrections: int32 [groups, rows] To be added to the sums of products, so that they are those of signed codes.
        lanes: int64 [groups, chunks] The lane of each chunk.
        xor_mask: uint8 [groups, chunks, 16] 0x80 or 0x7F for each code of the lane, before the shuffle.
        shuffle: uint8 [groups, chunks, 16] The code of the lane for each slot, or ZERO_BYTE.
        weights: int8 [groups, chunks, 4, rows, 4] By quads of slots.
    """

    counts: Tensor
    corrections: Tensor
    lanes: Tensor
    xor_mask: Tensor
    shuffle: Tensor
    weights: Tensor


class _Chunks(NamedTuple):
    """Chunks of groups: lane and coupled halves [groups, chunks], shuffle and signs (±1) by slots [groups, chunks, 16], all int64."""

    lane: Tensor
    coupled_halves: Tensor
    shuffle: Tensor
    signs: Tensor


def arrange(codes: Tensor) -> Arranged:
    """Order the codes of each lane so that sums of two products of bytes are exact.

    Args:
        codes: int8 [groups, rows, lanes, 16]: the weights of `rows` outputs each; padded with 0.

    Returns:
        The codes as chunks, some of them negated, and the masks and corrections that undo it. With x int8 [lanes, 16], and
        u = (x[lanes] ^ xor_mask) as unsigned bytes, shuffled: sum(u * weights) + corrections = sum(x * codes).
    """
    assert codes.dtype == torch.int8, f"-128 is the bound of int8, and codes are {codes.dtype}"
    groups, rows, lanes, _ = codes.shape
    by_lane = codes.to(torch.int16).transpose(1, 2).reshape(groups * lanes, rows, LANE)
    # -128 has no negative in int8. With it, all lanes obey a bound that it exceeds, so that it is in none but split lanes.
    bound = 127 if (codes == -128).any() else 128
    orders = [_search(some, bound) for some in by_lane.split(_LANES_AT_ONCE)]
    order, signs, coupled_halves = (torch.cat(tensors).view(groups, lanes, -1) for tensors in zip(*orders, strict=True))
    chunks = _chunks(order, signs, coupled_halves.squeeze(-1))
    weights = _weights(by_lane.view(groups, lanes, rows, LANE), chunks)
    # A code multiplies x + 128, or 127 - x where it was negated.
    corrections = -(weights * (127 + (chunks.signs > 0)).unsqueeze(-1)).sum((1, 2), dtype=torch.int32)
    return Arranged(
        torch.stack([(chunks.coupled_halves == halves).sum(1) for halves in COUPLED_HALVES], 1),
        corrections,
        chunks.lane,
        _xor_mask(chunks),
        chunks.shuffle.to(torch.uint8),
        weights.view(groups, -1, 4, 4, rows).transpose(-1, -2).to(torch.int8).contiguous(),
    )


def _weights(by_lane: Tensor, chunks: _Chunks) -> Tensor:
    """int16 [groups, lanes, rows, 16] -> int16 [groups, chunks, 16, rows]: codes with their signs by slots, 0 in empty ones."""
    shape = *chunks.shuffle.shape, by_lane.shape[2]
    weights = by_lane.transpose(-1, -2).gather(1, chunks.lane.view(*shape[:2], 1, 1).expand(shape))
    weights = weights.gather(2, (chunks.shuffle % LANE).unsqueeze(-1).expand(shape))
    return weights * (chunks.signs * (chunks.shuffle < LANE)).unsqueeze(-1).to(torch.int16)


def _xor_mask(chunks: _Chunks) -> Tensor:
    """uint8 [groups, chunks, 16]: by codes of the lane, where signs are by slots."""
    mask = torch.full((*chunks.lane.shape, LANE + 1), 0x80, dtype=torch.uint8, device="cpu")  # the last one is for empty slots
    mask.scatter_(2, chunks.shuffle.clamp(max=LANE), torch.where(chunks.signs > 0, 0x80, 0x7F).to(torch.uint8))
    return mask[..., :LANE].contiguous()


def _chunks(order: Tensor, signs: Tensor, coupled_halves: Tensor) -> _Chunks:
    """Chunks of lanes, split where they have to be, and sorted by coupled halves; arguments are as `_search` returns them, by group."""
    groups, lanes = coupled_halves.shape
    split, chunks_per_lane = coupled_halves == _SPLIT, 1
    if split.any():
        chunks_per_lane = 2
        eight_codes = torch.full((2, LANE), ZERO_BYTE, device="cpu")
        eight_codes[:, ::2] = torch.arange(LANE, device="cpu").view(2, -1)
        one_chunk = torch.stack((order, torch.full_like(order, ZERO_BYTE)), 2)
        order = torch.where(split.view(groups, lanes, 1, 1), eight_codes, one_chunk).flatten(1, 2)
        signs = torch.where(split.unsqueeze(-1), 1, signs).repeat_interleave(2, 1)
        coupled_halves = torch.stack((coupled_halves.clamp(min=0), torch.where(split, 0, _ABSENT)), -1).flatten(1)
    coupled_halves, place = coupled_halves.sort(dim=1, descending=True, stable=True)
    present = coupled_halves > _ABSENT
    most = int(present.sum(1).max())
    coupled_halves, place, present = (tensor[:, :most] for tensor in (coupled_halves, place, present))
    slots = place.unsqueeze(-1).expand(-1, -1, LANE)
    shuffle = order.gather(1, slots).where(present.unsqueeze(-1), torch.tensor(ZERO_BYTE, device="cpu"))
    return _Chunks(place // chunks_per_lane, coupled_halves, shuffle, signs.gather(1, slots))


# The search. Lanes are the last dimension of all tensors but the results, so that operations on all of them are contiguous.


def _search(w: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find an order of each lane with as many coupled halves as possible: int16 [n, rows, 16] -> codes and signs (±1) by slots, int64
    [n, 16], and coupled halves or _SPLIT, int64 [n].

    Pairs are chosen greedily, and couples exhaustively. Lanes that are not fully coupled are tried again, with noise in the costs of pairs.
    """
    n, noise = len(w), torch.Generator().manual_seed(0)
    order, signs = torch.arange(LANE, device="cpu").repeat(n, 1), torch.ones(n, LANE, dtype=torch.int64, device="cpu")
    coupled_halves = torch.full((n,), _SPLIT, device="cpu")
    remaining, w = torch.arange(n, device="cpu"), w.permute(2, 1, 0).contiguous()
    cost, opposite = _pair_costs(w)
    for trial in range(_TRIALS):
        more = torch.randint(0, _NOISE * trial + 1, (LANE, LANE, len(remaining)), generator=noise, dtype=torch.int16, device="cpu")
        first, second = _match_pairs(cost + more + more.transpose(0, 1))
        new_order, new_signs, new_halves = _couple_pairs(w, first, second, opposite, bound)
        better = new_halves > coupled_halves[remaining]
        improved = remaining[better]
        order[improved], signs[improved], coupled_halves[improved] = new_order[better], new_signs[better], new_halves[better]
        again = coupled_halves[remaining] < 2
        if not again.any():
            break
        remaining = remaining[again]
        w, cost, opposite = (tensor[..., again] for tensor in (w, cost, opposite))
    return order, signs, coupled_halves


def _pair_costs(w: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [16, rows, n] -> int16 [16, 16, n], of two codes a, b the largest |a + b| in any row, or |a - b| if that is less; and whether
    it is, so that one of them is to be negated.

    This is an estimate of what is bounded: it cancels codes of opposite signs, which count separately there and never exceed the bound.
    """
    n = w.shape[-1]
    cost = torch.full((LANE, LANE, n), _UNAVAILABLE, dtype=torch.int16, device="cpu")
    opposite = torch.zeros(LANE, LANE, n, dtype=torch.bool, device="cpu")
    for distance in range(1, LANE):
        a, b = w[:-distance], w[distance:]
        of_sum, of_difference = (a + b).abs_().amax(1), (a - b).abs_().amax(1)
        first = torch.arange(LANE - distance, device="cpu")
        second = first + distance
        cost[first, second] = cost[second, first] = torch.minimum(of_sum, of_difference)
        opposite[first, second] = opposite[second, first] = of_difference < of_sum
    return cost, opposite


def _match_pairs(cost: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [16, 16, n] -> eight pairs of codes, int64 [8, n] each.

    Greedily: the next pair is the code whose cheapest partner costs the most, and that partner.
    """
    number = torch.arange(LANE, dtype=torch.int16, device="cpu")
    key = cost.clamp_(max=_UNAVAILABLE) * LANE + number.view(1, -1, 1)  # cost, and in the low four bits the partner
    firsts, seconds = list[Tensor](), list[Tensor]()
    for _ in range(LANE // 2):
        cheapest = key.amin(1)
        # The available code with the highest cost; among equals the first, as 15 - number is in the low four bits.
        worst = torch.where(cheapest < _UNAVAILABLE * LANE, cheapest | LANE - 1, -1) - (LANE - 1 - number).view(-1, 1)
        first = (worst.amax(0) & LANE - 1).long().unsqueeze(0)
        second = cheapest.gather(0, first).long() & LANE - 1
        firsts.append(first)
        seconds.append(second)
        for code in (first, second):
            key.scatter_(0, code.unsqueeze(1).expand(1, LANE, -1), _UNAVAILABLE * LANE)
            key.scatter_(1, code.unsqueeze(1).expand(LANE, 1, -1), _UNAVAILABLE * LANE)
    return torch.cat(firsts), torch.cat(seconds)


def _couple_pairs(w: Tensor, first: Tensor, second: Tensor, opposite: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make four couples of eight pairs, as many as possible within the bound: w int16 [16, rows, n], pairs int64 [8, n] each, `opposite`
    from `_pair_costs` -> what `_search` returns."""
    _, rows, n = w.shape
    negated = opposite.view(LANE * LANE, n).gather(0, first * LANE + second)  # [8, n]: the second code of the pair is
    a, b = (w.gather(0, code.unsqueeze(1).expand(-1, rows, -1)) for code in (first, second))
    b = torch.where(negated.unsqueeze(1), -b, b)
    positive = a.clamp(min=0) + b.clamp(min=0)  # what is bounded, [8, rows, n]
    negative = positive - (a + b)
    pair_fits = torch.maximum(positive, negative).amax(1) <= bound
    couples = torch.tensor(_couples(), device="cpu")  # [28, 2]
    as_is, flipped = list[Tensor](), list[Tensor]()  # what is bounded of couples; if the second pair is negated as a whole
    for distance in range(1, 8):  # in the order of `_couples`
        a_positive, a_negative, b_positive, b_negative = (
            positive[:-distance], negative[:-distance], positive[distance:], negative[distance:],
        )  # fmt: skip
        as_is.append(torch.maximum(a_positive + b_positive, a_negative + b_negative).amax(1))
        flipped.append(torch.maximum(a_positive + b_negative, a_negative + b_positive).amax(1))
    couple_negated = torch.cat(flipped) < torch.cat(as_is)  # [28, n]
    couple_fits = torch.minimum(torch.cat(as_is), torch.cat(flipped)) <= bound
    couplings = _couplings()
    valid = couple_fits | pair_fits[couples].all(1)
    count = sum((couple_fits[which].to(torch.int8) for which in couplings.unbind(1)), torch.tensor(0, dtype=torch.int8, device="cpu"))
    for which in couplings.unbind(1):
        count = torch.where(valid[which], count, -1)
    fitting, best = count.max(0)
    chosen = couplings[best]  # [n, 4], of which those that fit come first
    chosen = chosen.gather(1, couple_fits.T.gather(1, chosen).to(torch.int8).argsort(dim=1, descending=True, stable=True))
    # Couples p, q of a half give its pairs p0 q0 p1 q1.
    pairs = couples[chosen].view(n, 2, 2, 2).transpose(2, 3).reshape(n, 8)
    pair_signs = torch.stack((torch.ones_like(chosen), torch.where(couple_negated.T.gather(1, chosen), -1, 1)), -1)
    pair_signs = pair_signs.view(n, 2, 2, 2).transpose(2, 3).reshape(n, 8, 1)
    code_signs = torch.stack((torch.ones_like(pairs), torch.where(negated.T.gather(1, pairs), -1, 1)), -1)
    order = torch.stack((first, second), -1).transpose(0, 1).gather(1, pairs.unsqueeze(-1).expand(-1, -1, 2)).flatten(1)
    return order, (pair_signs * code_signs).flatten(1), torch.where(fitting < 0, _SPLIT, fitting.clamp(min=0).long() // 2)


@functools.cache
def _couples() -> list[tuple[int, int]]:
    """All 28 couples of eight pairs, by how far they are apart."""
    return [(first, first + distance) for distance in range(1, 8) for first in range(8 - distance)]


@functools.cache
def _couplings() -> Tensor:
    """int64 [105, 4]: all ways to make four couples of eight pairs, by their numbers in `_couples`."""
    number = {couple: i for i, couple in enumerate(_couples())}

    def couplings(remaining: tuple[int, ...]) -> list[list[int]]:
        if not remaining:
            return [[]]
        first, *rest = remaining
        return [[number[first, second], *more] for second in rest for more in couplings(tuple(n for n in rest if n != second))]

    return torch.tensor(couplings(tuple(range(8))), device="cpu")
