"""Prefetches of weights, unit by unit.

near   a tile's own, so far ahead; near a panel's end, those that the thread reads next
far    where several row tiles pass over the same panel: each prefetches a share of the next one, so that memory is read all the time
"""

from __future__ import annotations

from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.tuning import LONG_PANEL

_LINE = 64  # bytes


class Prefetcher:
    """What a tile prefetches.

    panels        most that it takes at once
    shares_prefetch  whether `tile_count` may be any
    ahead         bytes from its weights to those that come next, which may lie before them; 0: none do
    record        bytes of a block, where they are equal and few rows read them as fast as memory delivers: of a long panel that comes next
                  each fourth is from another quarter
    locality      of what is near, as `Tuning.locality` has it
    tile_index, tile_count  its number among the row tiles that share the prefetch of the next panel; where none do, or unless
                  `Prefetching.all_tiles`, tile 0 alone prefetches the current panel
    """

    def __init__(
        self,
        isa: ISA,
        f: Function,
        panel_bytes: Value,
        panels: int,
        shares_prefetch: bool,
        record: int,
        locality: int | None,
        ahead: Value,
        tile_index: Value,
        tile_count: Value,
    ) -> None:
        self.f, self.panel_bytes, self.record, self.ahead, self.tile_count = f, panel_bytes, record, ahead, tile_count
        self.shares_prefetch, self.locality = shares_prefetch, locality or 0
        tuned = isa.tuning.prefetching
        self.distance = 0 if locality is None else tuned.stream_distance if panels > 1 else tuned.distance
        self.asks = tile_index.equals(0) | (tile_count > 0) if tuned.all_tiles else tile_index.equals(0)  # near
        self.left = f.variable(tile_index)
        self.near, self.far, self.next = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0)), f.variable(ahead)
        self.side: tuple[Value, int] | None = None  # which of how many tiles of a panel: each asks for a share

    def begin_block(self, b: Value, blocks: Value, done: Value) -> None:
        """Block b of so many, which is so many bytes behind the panel's beginning."""
        if self.record and self.shares_prefetch:
            quarter = blocks >> 2
            other = (b < quarter * 4).select((b & 3) * quarter + (b >> 2), b)
            far = (self.panel_bytes > LONG_PANEL - 1) & self.ahead.differs(0)
            self.next.value = far.select((other - b) * self.record, 0) + self.ahead
        if self.distance:
            near = self.f.value("i64", self.distance)
            next_panel = (self.panel_bytes < done + near) & self.ahead.differs(0)
            near = next_panel.select(self.ahead - self.panel_bytes, 0) + near
            self.near.value = self.asks.select(near, 0)

    def begin_unit(self) -> None:
        if self.shares_prefetch:
            due = self.left.value.equals(0)
            self.left.value = due.select(self.tile_count, self.left.value) - 1
            self.far.value = (due & (self.tile_count > 0)).select(self.next.value, 0)

    def issue(self, weights: Value, size: int) -> None:
        """For what is ahead of so many bytes."""
        ways = [(self.near, self.locality)] * (self.distance > 0) + [(self.far, 2)] * self.shares_prefetch
        if self.side is not None:
            side, sides = self.side
            size = -(-size // (_LINE * sides)) * _LINE
            weights = weights + side * size
        for distance, locality in ((asked.value, locality) for asked, locality in ways):
            with self.f.when(distance.differs(0)):
                for line in range(0, size, _LINE):
                    self.f.prefetch(weights + distance + line, locality)


class SharingPrefetcher(Prefetcher):
    """One whose share of what comes next lies side by side, not in every second, third, … unit: it asks for as much of it with each unit.

    size, weights   of a panel; what its tile reads, of one panel at a time
    """

    def __init__(
        self, isa: ISA, f: Function, size: Value, locality: int | None, weights: Value, ahead: Value, tile_index: Value, tile_count: Value
    ) -> None:
        super().__init__(isa, f, size, 1, False, 0, locality, ahead, tile_index, tile_count)
        asks = (tile_count > 0) & ahead.differs(0)
        lines, tiles = size // _LINE, asks.select(tile_count, 1)
        self.coming, self.part = weights + ahead, f.value("i64", 1 << 32) // tiles  # of 2^32: dividing with each unit would take long
        self.line, self.stop = f.variable(lines * tile_index // tiles), asks.select(lines * (tile_index + 1) // tiles, 0)

    def issue(self, weights: Value, size: int) -> None:
        first, lines = self.line.value, -(-size // _LINE)
        count = (first < self.stop).select((self.part * lines + (2**32 - 1)) >> 32, 0)
        for n in self.f.loop(count):
            self.f.prefetch(self.coming + (first + n) * _LINE, 2)
        self.line.value = first + count
        super().issue(weights, size)
