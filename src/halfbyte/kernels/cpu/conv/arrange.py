"""The order of a weight's codes in which products of bytes are summed as int16 exactly: no sum saturates, whatever the activations are.

`vpmaddubsw` sums two products of an unsigned and a signed byte, a*v + b*w, and saturates where the sum is not an int16. With any a, b in
0 … 255 it is exact if and only if the positive ones of v, w sum to at most 128, and so do the negative ones. Of weights that are scaled to
127 some adjacent pairs exceed this; in another order of a patch's codes hardly any are. And a column of the weight may be negated, since

    w * x = w * (x + 128) - 128 * w = -w * (127 - x) + 127 * w,            both x + 128 and 127 - x in 0 … 255

so the code that writes activations negates them with the same instruction that makes them unsigned. Where two sums of two still obey the
bound together, they are added as int16 before they are widened.

Each group of outputs (a tile's width) has an order of its own. Codes move within lanes of 16, the reach of a shuffle of bytes:

    pairs   each channel with the one that fits it best; the channel that is hardest to place chooses first
    sets    of two pairs each, the best of all 105 ways

with some noise, a few times, until all four sets of a lane obey the bound. A lane becomes a chunk, 16 bytes that are multiplied together,
or two. Its `kind` says what may be added as int16:

    2 WHOLE    four sets
    1 HALF     two sets and four pairs
    0 PAIRS    eight pairs
    -1 SPLIT   not even all pairs: the lane is two chunks, with a zero next to each code
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

LANE = 16
WHOLE, HALF, PAIRS, SPLIT = 2, 1, 0, -1
ABSENT = -2  # the second chunk of a lane that has one, where other lanes are split
ZERO_BYTE = 0x80  # in `take`: a shuffle of bytes puts 0 there
_TRIALS = 3
_NOISE = 8  # more of it in each trial
_LANES_AT_ONCE = 1 << 10  # so that the costs stay in the cache
_TAKEN = 1 << 10  # a cost above all others with their noise, whose product with LANE is an int16


class Arranged(NamedTuple):
    """Groups of `rows` outputs, each a number of chunks of 16 bytes.

    counts       int64 [groups, 3]: chunks of WHOLE, HALF and PAIRS, which come in this order
    corrections  int32 [groups, rows]: what the sums of products of the bytes lack
    sources      int64 [groups, chunks]: the lane that a chunk is made of
    flip         uint8 [groups, chunks, 16]: what the codes of it are combined with by xor
    take         uint8 [groups, chunks, 16]: which of them are in its slots then, or ZERO_BYTE
    weights      int8 [groups, chunks, 4, rows, 4]
    """

    counts: Tensor
    corrections: Tensor
    sources: Tensor
    flip: Tensor
    take: Tensor
    weights: Tensor


def arrange(codes: Tensor) -> Arranged:
    """Order the codes of each lane so that sums of two products are exact.

    Args:
        codes: int8 [groups, rows, lanes, 16], 0 where there are none.

    Returns:
        The codes in that order, some of them negated, and what activations and sums need for it.
    """
    groups, rows, lanes, _ = codes.shape
    wide = codes.to(torch.int16)
    by_lane = wide.transpose(1, 2).reshape(groups * lanes, rows, LANE)
    limit = (
        127 if codes.numel() and int(codes.min()) == -128 else 128
    )  # -128 can't be negated as int8; all lanes get the stricter bound then
    # The order, signs and kind of each lane; then of each chunk, and chunks of a group by their kinds.
    parts = [_search(part, limit) for part in by_lane.split(_LANES_AT_ONCE)]
    order, signs, kind = (torch.cat(tensors).view(groups, lanes, -1) for tensors in zip(*parts, strict=True))
    take, signs, kind = _chunks(order, signs, kind.squeeze(-1))
    kind, place = kind.sort(dim=1, descending=True, stable=True)
    there = kind > ABSENT
    chunks = int(there.sum(1).max())
    kind, place, there = (tensor[:, :chunks] for tensor in (kind, place, there))
    sources = place // (take.shape[1] // lanes)  # by the chunks of a lane, 1 or 2
    each = place.unsqueeze(-1).expand(-1, -1, LANE)
    take = take.gather(1, each).where(there.unsqueeze(-1), torch.tensor(ZERO_BYTE, device="cpu"))
    signs = signs.gather(1, each)
    # Codes by slots of chunks, with their signs; zeros where a slot has none.
    by_slot = wide.permute(0, 2, 3, 1)  # [groups, lanes, 16, rows]
    by_slot = by_slot.gather(1, sources.view(groups, chunks, 1, 1).expand(-1, -1, LANE, rows))
    by_slot = by_slot.gather(2, (take % LANE).unsqueeze(-1).expand(-1, -1, -1, rows))
    shorts = by_slot * (signs * (take < LANE)).unsqueeze(-1).to(torch.int16)
    corrections = -(shorts * (127 + (signs > 0)).unsqueeze(-1)).sum((1, 2), dtype=torch.int32)
    # x ^ 0x80 is x + 128, and x ^ 0x7F is 127 - x, of which the bytes are read as unsigned. An empty slot's flip goes to a 17th place.
    flip = torch.full((groups, chunks, LANE + 1), 0x80, dtype=torch.uint8, device="cpu")
    flip.scatter_(2, take.clamp(max=LANE), torch.where(signs > 0, 0x80, 0x7F).to(torch.uint8))
    return Arranged(
        torch.stack([(kind == which).sum(1) for which in (WHOLE, HALF, PAIRS)], 1),
        corrections,
        sources,
        flip[..., :LANE].contiguous(),
        take.to(torch.uint8),
        shorts.view(groups, chunks, 4, 4, rows).transpose(-1, -2).to(torch.int8).contiguous(),
    )


def _chunks(order: Tensor, signs: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[groups, lanes, 16] each and [groups, lanes] -> `take`, signs and kind of chunks, one of each lane, or two where any is split."""
    split = kind == SPLIT
    if not split.any():
        return order, signs, kind
    groups, lanes = kind.shape
    halves = torch.full((2, LANE), ZERO_BYTE, device="cpu")
    halves[:, ::2] = torch.arange(LANE, device="cpu").view(2, -1)
    one = torch.stack((order, torch.full_like(order, ZERO_BYTE)), 2)
    take = torch.where(split.view(groups, lanes, 1, 1), halves, one)
    plain = torch.where(split.unsqueeze(-1), 1, signs)
    kinds = torch.stack((kind.clamp(min=PAIRS), torch.where(split, PAIRS, ABSENT)), -1)
    return take.flatten(1, 2), torch.stack((plain, plain), 2).flatten(1, 2), kinds.flatten(1)


def _search(w: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """int16 [n, rows, 16] -> the channel in each slot and its sign, int64 [n, 16], and the kind, int64 [n]."""
    n, noise = len(w), torch.Generator().manual_seed(0)
    order, signs = torch.arange(LANE, device="cpu").repeat(n, 1), torch.ones(n, LANE, dtype=torch.int64, device="cpu")
    kind = torch.full((n,), SPLIT, device="cpu")
    left, some = torch.arange(n, device="cpu"), w.permute(2, 1, 0).contiguous()  # lanes last: what is done to one is done to its neighbours
    cost, opposite = _pair_costs(some)
    for trial in range(_TRIALS):
        more = torch.randint(0, _NOISE * trial + 1, (LANE, LANE, len(left)), generator=noise, dtype=torch.int16, device="cpu")
        first, second = _matched(cost + more + more.transpose(0, 1))
        new_order, new_signs, new_kind = _sets(some, first, second, opposite, limit)
        better = new_kind > kind[left]
        at = left[better]
        order[at], signs[at], kind[at] = new_order[better], new_signs[better], new_kind[better]
        again = kind[left] < WHOLE
        if not again.any():
            break
        left = left[again]
        some, cost, opposite = (tensor[..., again] for tensor in (some, cost, opposite))
    return order, signs, kind


def _pair_costs(w: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [16, 16, n]: of two channels a, b the largest |a + b| in any row, or |a - b| if that is less; and whether it is.

    It is no more than what the bound is on: weights of two signs always obey it, and are subtracted here.
    """
    n = w.shape[-1]
    cost = torch.full((LANE, LANE, n), _TAKEN, dtype=torch.int16, device="cpu")
    opposite = torch.zeros(LANE, LANE, n, dtype=torch.bool, device="cpu")
    for step in range(1, LANE):
        a, b = w[:-step], w[step:]
        same, other = (a + b).abs_().amax(1), (a - b).abs_().amax(1)
        first = torch.arange(LANE - step, device="cpu")
        cost[first, first + step] = cost[first + step, first] = torch.minimum(same, other)
        opposite[first, first + step] = opposite[first + step, first] = other < same
    return cost, opposite


def _matched(cost: Tensor) -> tuple[Tensor, Tensor]:
    """int16 [16, 16, n] -> eight pairs, int64 [8, n] each: again and again that channel whose best partner fits it worst, with it."""
    number = torch.arange(LANE, dtype=torch.int16, device="cpu")
    key = cost.clamp_(max=_TAKEN) * LANE + number.view(1, -1, 1)  # its low bits say whose it is
    pairs = list[Tensor]()
    for _ in range(LANE // 2):
        best = key.amin(1)  # of each channel: the least cost, and in its low bits the partner's number
        # The largest of these costs, and in its low bits the number of the channel; the first one of several.
        worst = torch.where(best < _TAKEN * LANE, best | LANE - 1, -1) - (LANE - 1 - number).view(-1, 1)
        first = (worst.amax(0) & LANE - 1).long().unsqueeze(0)
        second = best.gather(0, first).long() & LANE - 1
        pairs += [first, second]
        for taken in (first, second):
            each = taken.unsqueeze(1)
            key.scatter_(0, each.expand(1, LANE, -1), _TAKEN * LANE)
            key.scatter_(1, each.expand(LANE, 1, -1), _TAKEN * LANE)
    return torch.cat(pairs[::2]), torch.cat(pairs[1::2])


def _sets(w: Tensor, first: Tensor, second: Tensor, opposite: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best four sets of eight pairs: the slots' channels and signs, and the kind."""
    _, rows, n = w.shape
    negated = opposite.view(LANE * LANE, n).gather(0, first * LANE + second)
    a, b = (w.gather(0, which.unsqueeze(1).expand(-1, rows, -1)) for which in (first, second))
    b = torch.where(negated.unsqueeze(1), -b, b)
    up = a.clamp(min=0) + b.clamp(min=0)
    down = up - (a + b)
    fits = torch.maximum(up, down).amax(1) <= limit
    same, other = list[Tensor](), list[Tensor]()
    for step in range(1, 8):  # in the order of `_couples`
        same.append(torch.maximum(up[:-step] + up[step:], down[:-step] + down[step:]).amax(1))
        other.append(torch.maximum(up[:-step] + down[step:], down[:-step] + up[step:]).amax(1))
    couples = torch.tensor(_couples(), device="cpu")
    flipped = torch.cat(other) < torch.cat(same)
    fit = torch.minimum(torch.cat(same), torch.cat(other)) <= limit
    right = fit | fits[couples].all(1)
    ways = _ways()
    count = sum((fit[of].to(torch.int8) for of in ways.unbind(1)), torch.tensor(0, dtype=torch.int8, device="cpu"))
    for of in ways.unbind(1):
        count = torch.where(right[of], count, -1)
    found, way = count.max(0)
    chosen = ways[way]  # [n, 4] sets
    chosen = chosen.gather(1, fit.T.gather(1, chosen).to(torch.int8).argsort(dim=1, descending=True, stable=True))
    # Slots of 16 bits: both sets of a half are adjacent, their second pairs follow.
    slots = couples[chosen].view(n, 2, 2, 2).transpose(2, 3).reshape(n, 8)
    sign = torch.stack((torch.ones_like(chosen), torch.where(flipped.T.gather(1, chosen), -1, 1)), -1)
    sign = sign.view(n, 2, 2, 2).transpose(2, 3).reshape(n, 8, 1)
    within = torch.stack((torch.ones_like(slots), torch.where(negated.T.gather(1, slots), -1, 1)), -1)
    order = torch.stack((first, second), -1).transpose(0, 1).gather(1, slots.unsqueeze(-1).expand(-1, -1, 2)).flatten(1)
    return order, (sign * within).flatten(1), torch.where(found < 0, SPLIT, found.clamp(min=0).long() // 2)


@functools.cache
def _couples() -> list[tuple[int, int]]:
    """All couples of eight pairs, by how far they are apart."""
    return [(first, first + step) for step in range(1, 8) for first in range(8 - step)]


@functools.cache
def _ways() -> Tensor:
    """int64 [105, 4]: all ways to make four couples of eight pairs, by their numbers in `_couples`."""
    number = {couple: i for i, couple in enumerate(_couples())}

    def ways(left: tuple[int, ...]) -> list[list[int]]:
        if not left:
            return [[]]
        first, *rest = left
        return [[number[first, other], *more] for other in rest for more in ways(tuple(n for n in rest if n != other))]

    return torch.tensor(ways(tuple(range(8))), device="cpu")
