"""Prefetches of weights that a tile issues unit by unit. `tile.py` chooses the prefetcher, `driver.py` passes what is read next.

near    a tile's own weights, `Prefetching.distance` bytes ahead; near a panel's end, the first ones of what the thread reads next
shared  where several row tiles pass over the same panel, each prefetches a share of the next panel, so that memory is read all the time
"""

from __future__ import annotations

from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.tuning import LONG_PANEL

_LINE = 64  # bytes of a cache line
_SHARED_LOCALITY = 2  # of shared prefetches, as of `llvm.prefetch`: the second-level cache
_QUARTERS = 4  # of a long panel that the shares of one tile come from in turn


class Prefetcher:
    """Prefetches near weights, and every `tile_count`-th unit of the next panel.

    Attributes:
        slice: Number among the slices of a panel that are computed in turn, and how many: each prefetches its share of a unit. None: one.
    """

    def __init__(
        self,
        isa: ISA,
        f: Function,
        panel_bytes: Value,
        panels: int,
        shares_prefetch: bool,
        record_bytes: int,
        locality: int | None,
        ahead: Value,
        tile_index: Value,
        tile_count: Value,
    ) -> None:
        """Prepare to emit.

        Args:
            isa: Its tuning has the distances.
            f: Emits the instructions.
            panel_bytes: Bytes of a packed panel.
            panels: Most panels that the tile takes in turn.
            shares_prefetch: `tile_count` may be other than 0.
            record_bytes: Bytes of a block where all are equal and the tile waits for memory: units of a next panel of LONG_PANEL bytes or
                more are then prefetched from its four quarters in turn. 0: they are prefetched in their order.
            locality: Where near weights go, as `Tuning.locality` has it.
            ahead: Bytes from the tile's weights to those that the thread reads next, positive or negative; 0: none.
            tile_index, tile_count: Number among the row tiles that share the prefetch of the next panel. tile_count is 0 where none do:
                then, and unless `Prefetching.all_tiles`, tile 0 alone prefetches near weights.
        """
        self.f, self.panel_bytes, self.record_bytes, self.ahead, self.tile_count = f, panel_bytes, record_bytes, ahead, tile_count
        self.shares_prefetch, self.locality = shares_prefetch, locality or 0
        tuned = isa.tuning.prefetching
        self.distance = 0 if locality is None else tuned.stream_distance if panels > 1 else tuned.distance
        self.prefetches_near = tile_index.equals(0) | (tile_count > 0) if tuned.all_tiles else tile_index.equals(0)
        self.units_to_share = f.variable(tile_index)  # units until the next one whose counterpart in the next panel is prefetched
        # Bytes from the unit that is read to the prefetched ones, 0 for none; `next_panel` is that to the counterpart.
        self.near, self.shared = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0))
        self.next_panel = f.variable(ahead)
        self.slice: tuple[Value, int] | None = None

    def begin_block(self, b: Value, blocks: Value, done: Value) -> None:
        """Emit the distances of block b of so many, `done` bytes behind the panel's beginning."""
        if self.record_bytes and self.shares_prefetch:
            quarter = blocks >> 2
            source = (b < quarter * _QUARTERS).select((b & _QUARTERS - 1) * quarter + (b >> 2), b)
            is_long = (self.panel_bytes > LONG_PANEL - 1) & self.ahead.differs(0)
            self.next_panel.value = is_long.select((source - b) * self.record_bytes, 0) + self.ahead
        if self.distance:
            near = self.f.value("i64", self.distance)
            leaves_panel = (self.panel_bytes < done + near) & self.ahead.differs(0)
            near = leaves_panel.select(self.ahead - self.panel_bytes, 0) + near
            self.near.value = self.prefetches_near.select(near, 0)

    def begin_unit(self) -> None:
        """Emit the choice of whether this unit's counterpart in the next panel is in the tile's share."""
        if self.shares_prefetch:
            is_due = self.units_to_share.value.equals(0)
            self.units_to_share.value = is_due.select(self.tile_count, self.units_to_share.value) - 1
            self.shared.value = (is_due & (self.tile_count > 0)).select(self.next_panel.value, 0)

    def issue(self, weights: Value, size: int) -> None:
        """Emit the prefetches of what is ahead of `size` bytes at `weights`."""
        kinds = [(self.near, self.locality)] * (self.distance > 0) + [(self.shared, _SHARED_LOCALITY)] * self.shares_prefetch
        if self.slice is not None:
            slice_index, slices = self.slice
            size = -(-size // (_LINE * slices)) * _LINE
            weights = weights + slice_index * size
        for distance, locality in ((variable.value, locality) for variable, locality in kinds):
            with self.f.when(distance.differs(0)):
                for line in range(0, size, _LINE):
                    self.f.prefetch(weights + distance + line, locality)


class SharingPrefetcher(Prefetcher):
    """Prefetches near weights, and a contiguous share of the next panel, as many of its lines with each unit."""

    def __init__(
        self,
        isa: ISA,
        f: Function,
        panel_bytes: Value,
        locality: int | None,
        weights: Value,
        ahead: Value,
        tile_index: Value,
        tile_count: Value,
    ) -> None:
        """Prepare to emit for a tile that takes one panel at a time.

        Args:
            isa, f, panel_bytes, locality, ahead, tile_index, tile_count: As of Prefetcher.
            weights: Address of the tile's panel.
        """
        super().__init__(isa, f, panel_bytes, 1, False, 0, locality, ahead, tile_index, tile_count)
        shares = (tile_count > 0) & ahead.differs(0)
        lines, tiles = panel_bytes // _LINE, shares.select(tile_count, 1)
        # The share of each line of a unit, as a fraction of 2^32: a division for each unit would take long.
        self.next_weights, self.fraction = weights + ahead, f.value("i64", 1 << 32) // tiles
        self.line, self.stop = f.variable(lines * tile_index // tiles), shares.select(lines * (tile_index + 1) // tiles, 0)

    def issue(self, weights: Value, size: int) -> None:
        first, lines = self.line.value, -(-size // _LINE)
        count = (first < self.stop).select((self.fraction * lines + (2**32 - 1)) >> 32, 0)
        for n in self.f.loop(count):
            self.f.prefetch(self.next_weights + (first + n) * _LINE, _SHARED_LOCALITY)
        self.line.value = first + count
        super().issue(weights, size)
