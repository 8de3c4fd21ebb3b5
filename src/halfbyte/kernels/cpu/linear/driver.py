"""The outer loops of a product, which call the micro-kernel tile by tile: the same for all formats and instruction sets.

    phase "rows":    for each row of x, shared evenly by the threads:       row_function     lays it out (`activations.py`)
    phase "panels":  for each chunk of row tiles, for each group of panels, which threads draw from a counter:      `multiply`
                         for each row tile of the chunk:
                             for each panel of the group:                   tile_function    multiplies (`tile.py`, `amx.py`)
                     or, with a panel_function (`expanded.py`, `bracketed.py`): for each panel, which loops over the row tiles itself

Row tiles: the first `tiles` ones have `tile_rows` rows, `lesser_tiles` more have one row less, so that no tail of M costs more than its
share. That threads draw groups makes a delayed thread cost a group, not its share of the work. A group's weights stay in the core's own
cache while row tiles pass over them. Where products are so fast that activations must come from there, too, there are several chunks.

`linear.py` fills in the arguments (`arguments.LINEAR`), functions as addresses, so that this code is compiled once.
`kernels/cpu/step_sequence.py` and `grouped.py` call `multiply` or the phases for products of their own.
"""

from __future__ import annotations

import functools

from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.layouts.cpu_tiles import PANEL


def build(isa: ISA) -> Module:
    """A module with the two phases: rows(arguments, thread, threads) and panels(arguments, thread, threads)."""
    module = Module(isa.attributes)
    _rows(module.function("rows", ["ptr", "i64", "i64"]))
    _panels(module.function("panels", ["ptr", "i64", "i64"]))
    return module


@functools.cache
def phases(isa: ISA) -> dict[str, int]:
    """Return the addresses of "rows" and "panels"."""
    return jit.load("driver", build, isa)


def _rows(f: Function) -> None:
    args = f.parameters[0]
    function, x, scratch = (LINEAR.load(args, field, "ptr") for field in ("row_function", "x", "scratch"))
    stride, row_bytes, m = (LINEAR.load(args, field) for field in ("x_stride", "row_bytes", "m"))
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    split = big * count  # the first row of the lesser tiles
    for r in f.share(m):
        is_large = r.below(split)
        rows = is_large.select(big, big - 1)
        inside = is_large.select(r, r - split) % rows
        f.call_pointer(function, args, x + r * stride, scratch + (r - inside) * row_bytes, rows, inside)


def _panels(f: Function) -> None:
    """Draws items: a group of panels times a chunk of the row tiles, chunk by chunk."""
    args = f.parameters[0]
    groups, chunks, counter = LINEAR.load(args, "panel_groups"), LINEAR.load(args, "chunks"), args + LINEAR.offset("counter")
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    tiles = count + LINEAR.load(args, "lesser_tiles")
    a, out, weights, bias = (LINEAR.load(args, name, "ptr") for name in ("scratch", "out", "weights", "bias"))
    panels = (LINEAR.load(args, "n") + (PANEL - 1)) // PANEL
    panels_per_tile = LINEAR.load(args, "panels_per_tile")
    sets = (panels + (panels_per_tile - 1)) // panels_per_tile  # of panels that a tile takes, which no group splits
    upcoming = f.variable(f.fetch_add(counter))  # drawn before it is due: row tiles prefetch its weights

    def draw() -> Value:
        item = upcoming.value
        upcoming.value = f.fetch_add(counter)
        return item

    def first_panel(group: Value) -> Value:
        return f.umin(group * sets // groups * panels_per_tile, panels)  # groups differ by one set at most

    for item in f.draw(draw, groups * chunks):
        chunk, group = item // groups, item % groups
        first, stop = chunk * tiles // chunks, (chunk + 1) * tiles // chunks
        row = big * f.umin(first, count) + (big - 1) * (first - f.umin(first, count))
        at = a + row * LINEAR.load(args, "row_bytes"), out + row * LINEAR.load(args, "out_stride")
        following = (upcoming.value < groups * chunks).select(first_panel(upcoming.value % groups), panels)
        multiply(f, args, (first, stop), (first_panel(group), first_panel(group + 1)), *at, weights, bias, following)


def multiply(
    f: Function,
    args: Value,
    tiles: tuple[Value, Value],
    panels: tuple[Value, Value],
    a: Value,
    out: Value,
    weights: Value,
    bias: Value,
    following: Value | None = None,
    next_weights: Value | None = None,
) -> None:
    """Emit the products of row tiles with panels.

    Args:
        f: Emits the instructions.
        args: Block of LINEAR. `panels_per_tile` 0 stands for 1.
        tiles: The first row tile, and the end.
        panels: The first panel, and the end.
        a, out: Addresses of the activations and outputs of the first of these tiles, `out` for panel 0.
        weights, bias: Addresses of the packed weight and of the bias, null for none.
        following: The panel that this thread computes next, any number beyond all panels for none; None: unknown.
        next_weights: Address of what this thread reads next, which may belong to another weight, in place of `following`.
    """
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    row_bytes, out_stride = LINEAR.load(args, "row_bytes"), LINEAR.load(args, "out_stride")
    panel_bytes, zeros = LINEAR.load(args, "panel_bytes"), LINEAR.load(args, "zeros", "ptr")
    no_bias = bias.is_null()
    loaded = LINEAR.load(args, "panels_per_tile")
    panels_per_tile = loaded.equals(0).select(f.value("i64", 1), loaded)
    out_bytes, n = LINEAR.load(args, "out_bytes"), LINEAR.load(args, "n")
    function, lesser = LINEAR.load(args, "tile_function", "ptr"), LINEAR.load(args, "lesser_tile_function", "ptr")

    def operands(p: Value, stop: Value) -> tuple[Value, Value, Value, Value]:
        """Return the weights, the offset in a row of outputs, and the bias of panel p, and the columns of the panels p … stop - 1."""
        panel_bias = no_bias.select(zeros, bias + p * (4 * PANEL))
        return weights + p * panel_bytes, p * out_bytes * PANEL, panel_bias, f.umin(n, stop * PANEL) - p * PANEL

    no_panel_function = LINEAR.load(args, "panel_function").equals(0)
    with f.when(no_panel_function.equals(0)):
        for p in f.loop(panels[1], panels[0]):
            panel, at_out, panel_bias, columns = operands(p, p + 1)
            next_panel = p + 1 if following is None else (p + 1 < panels[1]).select(p + 1, following)
            numbers = columns, *tiles, weights + next_panel * panel_bytes
            f.call_pointer(LINEAR.load(args, "panel_function", "ptr"), args, panel, a, out + at_out, panel_bias, *numbers)
    panels_per_pass, all_panels = LINEAR.load(args, "panels_per_pass"), (n + (PANEL - 1)) // PANEL
    first_sharing = tiles[1] - f.umin(
        LINEAR.load(args, "prefetching_tiles"), tiles[1] - tiles[0]
    )  # the first tile that shares the prefetch
    pass_start = f.variable(panels[0])

    def draw() -> Value:
        return pass_start.value

    for first in f.draw(draw, no_panel_function.select(panels[1], panels[0])):
        stop = f.umin(first + panels_per_pass, panels[1])
        after_pass = stop.equals(panels[1]).select(all_panels if following is None else following, stop)
        row = f.variable(f.value("i64", 0))
        for t in f.loop(tiles[1], tiles[0]):
            is_large, shares = t.below(count), t > first_sharing - 1
            tile = is_large.select(function, lesser)
            tile_index, tile_count = t - shares.select(first_sharing, tiles[0]), shares.select(tiles[1] - first_sharing, 0)
            for step in f.loop((stop - first + (panels_per_tile - 1)) // panels_per_tile):
                p = first + step * panels_per_tile
                next_panel = ((p + panels_per_tile) < stop).select(p + panels_per_tile, after_pass)
                ahead = (next_panel < all_panels).select((next_panel - p) * panel_bytes, 0)
                panel, at_out, panel_bias, columns = operands(p, f.umin(p + panels_per_tile, stop))
                if next_weights is not None:
                    ahead = (p + panels_per_tile).below(panels[1]).select(ahead, panel.distance(next_weights))
                at = a + row.value * row_bytes, out + row.value * out_stride + at_out
                f.call_pointer(tile, args, panel, *at, panel_bias, columns, ahead, tile_index, tile_count)
            row.value = row.value + is_large.select(big, big - 1)
        pass_start.value = stop
