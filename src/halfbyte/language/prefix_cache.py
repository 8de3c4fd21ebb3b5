"""KV caches of earlier sequences, so that a prompt that begins like one of them is prefilled from where they differ.

Called by `Batch` (generate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfbyte.decoder.cache import Cache


class Prefix(NamedTuple):
    """The cache of one sequence.

    Attributes:
        ids: The `cache.length` token ids of the sequence.
        cache: Their keys and values.
    """

    ids: list[int]
    cache: Cache


class PrefixCache:
    """The KV caches of earlier sequences, so that a prompt that begins like one of them is prefilled from where they differ.

    Entries are whole caches; the least recently used ones are dropped beyond a number of bytes. A prompt that continues an entry takes it
    over, one that shares a part of it gets a copy, as long as both fit.

    Attributes:
        entries: The least recently used one first.
        limit: Bytes of all entries; the newest entry stays even if it is larger.
    """

    def __init__(self, limit: int = 0) -> None:
        """Make an empty cache. limit: bytes; 0: keep only the newest sequence."""
        self.limit, self.entries = limit, list[Prefix]()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.cache.nbytes for entry in self.entries)

    def clear(self) -> None:
        """Drop all entries."""
        self.entries = []

    def put(self, ids: Sequence[int], cache: Cache) -> None:
        """Keep the cache of a sequence, which the caller gives away, and drop entries that it makes useless or that no longer fit."""
        kept = list(ids[: cache.length])
        self.entries = [entry for entry in self.entries if entry.ids != kept[: len(entry.ids)] or not cache.can_cut(len(entry.ids))]
        self.entries.append(Prefix(kept, cache))
        used = self.nbytes
        while len(self.entries) > 1 and used > self.limit:
            used -= self.entries.pop(0).cache.nbytes

    def take(self, prompt: Sequence[int], most: int, least: int, switch: int | None) -> tuple[Cache, int] | None:
        """Return a cache with the longest prefix of a prompt that an entry has.

        Args:
            prompt: Token ids.
            most: Tokens of the prefix, at most.
            least: Tokens of the prefix, at least.
            switch: Length at which rope switches frequencies: a prompt on one side of it shares nothing with an entry on the other.

        Returns:
            The cache, which belongs to the caller, and its length; None where no entry has a prefix of `least` tokens.
        """
        if most < least:
            return None
        best, longest = self.find(prompt, most, least, switch)
        if best is None:
            if not self.limit:  # the cache that the caller makes replaces the newest sequence's: memory for both may not be there
                self.clear()
            return None
        self.entries.remove(best)
        if longest < best.cache.length and self.nbytes + 2 * best.cache.nbytes <= self.limit:
            self.entries.append(best)  # the most recently used one
            return best.cache.copy(longest), longest
        best.cache.cut(longest)
        return best.cache, longest

    def find(self, prompt: Sequence[int], most: int, least: int, switch: int | None) -> tuple[Prefix | None, int]:
        """Return the entry that `take` would use, and the tokens of the prefix."""
        ids, best, longest = list(prompt), None, max(least, 1) - 1
        for entry in self.entries:
            same_frequencies = switch is None or (entry.cache.length > switch) == (len(ids) > switch)
            same = common_prefix(entry.ids, ids, min(most, entry.cache.length))
            if same_frequencies and same > longest and entry.cache.can_cut(same):
                best, longest = entry, same
        return best, longest


def common_prefix(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """The number of tokens, at most so many, of the common prefix of two sequences."""
    most = min(most, len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(index for index in range(most) if one[index] != other[index])
