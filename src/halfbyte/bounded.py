"""A dict of bounded size, for results that later calls with the same arguments reuse."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict of at most `most` entries: setting one more removes all others first. Look-ups take as long as those of a plain dict."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
