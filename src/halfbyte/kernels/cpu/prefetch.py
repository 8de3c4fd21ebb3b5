"""Prefetches of weights, unit by unit.

near   a tile's own, so far ahead; near a panel's end, those that it begins with when it is called next
far    where row tiles take turns: each a share of what all of them pass over next, so that memory is read all the time
"""

from __future__ import annotations

from halfbyte.kernels.cpu.ir import Function, Value
from halfbyte.kernels.cpu.isa import ISA


class Prefetcher:
    """What a tile prefetches.

    panels        most that it takes at once
    ahead         bytes from its weights to those that come next; 0: none do
    turn, turns   its number, and of how many that ask in turn for what comes next; of none, number 0 alone asks for its own
    """

    def __init__(self, isa: ISA, f: Function, panel_bytes: Value, panels: int, ahead: Value, turn: Value, turns: Value) -> None:
        self.f, self.panel_bytes, self.ahead, self.turns = f, panel_bytes, ahead, turns
        self.several = panels > 1
        self.in_turn = isa.asks_in_turn and not self.several
        self.distance = isa.streams_ahead if self.several else isa.ahead
        self.asks = turn.equals(0) | (turns > 0)  # near
        self.left = f.variable(turn)
        self.near, self.far = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0))
        self.side: Value | None = None  # of the panel, where it takes several tiles: the first one asks

    def begin_block(self, done: Value) -> None:
        """A block that is so many bytes behind the panel's beginning."""
        if self.distance:
            near = self.f.value("i64", self.distance)
            if self.several:
                next_panel = (self.panel_bytes < done + near) & (self.ahead > 0)
                near = next_panel.select(self.ahead - self.panel_bytes, 0) + near
            self.near.value = self.asks.select(near, 0)

    def begin_unit(self) -> None:
        if self.in_turn:
            mine = self.left.value.equals(0)
            self.left.value = mine.select(self.turns, self.left.value) - 1
            self.far.value = (mine & (self.turns > 0)).select(self.ahead, 0)

    def issue(self, weights: Value, size: int) -> None:
        """For what is ahead of so many bytes."""
        ways = [(self.near, 3)] * (self.distance > 0) + [(self.far, 2)] * self.in_turn
        for distance, locality in ((asked.value, locality) for asked, locality in ways):
            if self.side is not None:
                distance = self.side.equals(0).select(distance, 0)
            with self.f.when(distance.differs(0)):
                for line in range(0, size, 64):
                    self.f.prefetch(weights + distance + line, locality)
