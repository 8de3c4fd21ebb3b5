"""The loops around the micro-kernel, for every format and instruction set: rows in phase 0, panels in phase 1.

Rows of activations are cut into tiles whose sizes differ by one at most, so that no tail of M costs more than its share.
Threads share the rows evenly and draw groups of panels from a counter: a thread that is held up costs a group, not its
half of the work. A group's weights stay in the core's own cache while row tiles pass over them; where the rate of products is so
high that the activations, too, must come from there, it is a chunk of the row tiles at a time that all groups pass over.

Row and tile functions come as addresses in the arguments (`arguments.LINEAR`), so this code is compiled once.
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
    """The addresses of both."""
    return jit.load("driver", build, isa)


def _rows(f: Function) -> None:
    args, thread, threads = f.parameters
    function, x, scratch = (LINEAR.load(args, field, "ptr") for field in ("row_function", "x", "scratch"))
    stride, row_bytes, m = (LINEAR.load(args, field) for field in ("x_stride", "row_bytes", "m"))
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    split = big * count  # rows in the tiles of the larger size
    for r in f.loop((thread + 1) * m // threads, thread * m // threads):
        first_kind = r.below(split)
        rows = first_kind.select(big, big - 1)
        inside = first_kind.select(r, r - split) % rows
        f.call_pointer(function, args, x + r * stride, scratch + (r - inside) * row_bytes, rows, inside)


def _panels(f: Function) -> None:
    """Draws items: a group of panels times a chunk of the row tiles, chunk by chunk."""
    args = f.parameters[0]
    groups, chunks, counter = LINEAR.load(args, "panel_groups"), LINEAR.load(args, "chunks"), args + LINEAR.offset("counter")
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    tiles = count + LINEAR.load(args, "lesser_tiles")
    a, out, weights, bias = (LINEAR.load(args, name, "ptr") for name in ("scratch", "out", "weights", "bias"))
    panels = (LINEAR.load(args, "n") + (PANEL - 1)) // PANEL
    at_once = LINEAR.load(args, "at_once")
    sets = (panels + (at_once - 1)) // at_once
    upcoming = f.variable(f.fetch_add(counter))  # drawn before it is due: row tiles ask for its weights while they compute

    def draw() -> Value:
        item = upcoming.value
        upcoming.value = f.fetch_add(counter)
        return item

    def begin(group: Value) -> Value:
        return f.umin(group * sets // groups * at_once, panels)  # sizes differ by one at most, so that none makes threads wait

    for item in f.draw(draw, groups * chunks):
        chunk, group = item // groups, item % groups
        first, stop = chunk * tiles // chunks, (chunk + 1) * tiles // chunks
        row = big * f.umin(first, count) + (big - 1) * (first - f.umin(first, count))
        at = a + row * LINEAR.load(args, "row_bytes"), out + row * LINEAR.load(args, "out_stride")
        following = (upcoming.value < groups * chunks).select(begin(upcoming.value % groups), panels)
        multiply(f, args, (first, stop), (begin(group), begin(group + 1)), *at, weights, bias, following)


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
    then: Value | None = None,
) -> None:
    """Row tiles first … stop - 1 over panels first … stop - 1. `a` and `out` belong to the first of these tiles and to panel 0.

    following   the panel that this thread goes on with, if that is known; none if it is beyond all
    then        instead of it, the address of what this thread reads next, which may belong to other weights
    """
    big, count = LINEAR.load(args, "tile_rows"), LINEAR.load(args, "tiles")
    row_bytes, out_stride = LINEAR.load(args, "row_bytes"), LINEAR.load(args, "out_stride")
    panel_bytes, zeros = LINEAR.load(args, "panel_bytes"), LINEAR.load(args, "zeros", "ptr")
    no_bias = bias.is_null()
    several = LINEAR.load(args, "at_once")
    at_once = several.equals(0).select(f.value("i64", 1), several)
    out_bytes, n = LINEAR.load(args, "out_bytes"), LINEAR.load(args, "n")
    function, lesser = LINEAR.load(args, "tile_function", "ptr"), LINEAR.load(args, "lesser_tile_function", "ptr")

    def of_panel(p: Value, stop: Value) -> tuple[Value, Value, Value, Value]:
        """Its weights, offset among outputs, bias and columns, also those of the panels behind it up to `stop`."""
        panel_bias = no_bias.select(zeros, bias + p * (4 * PANEL))
        return weights + p * panel_bytes, p * out_bytes * PANEL, panel_bias, f.umin(n, stop * PANEL) - p * PANEL

    plain = LINEAR.load(args, "panel_function").equals(0)
    with f.when(plain.equals(0)):
        for p in f.loop(panels[1], panels[0]):
            panel, at_out, panel_bias, columns = of_panel(p, p + 1)
            after = p + 1 if following is None else (p + 1 < panels[1]).select(p + 1, following)
            numbers = columns, *tiles, weights + after * panel_bytes
            f.call_pointer(LINEAR.load(args, "panel_function", "ptr"), args, panel, a, out + at_out, panel_bias, *numbers)
    together, all_panels = LINEAR.load(args, "together"), (n + (PANEL - 1)) // PANEL
    asking = tiles[1] - f.umin(LINEAR.load(args, "prefetching_tiles"), tiles[1] - tiles[0])  # from this tile on they share the prefetch
    some = f.variable(panels[0])

    def draw() -> Value:
        return some.value

    for first in f.draw(draw, plain.select(panels[1], panels[0])):
        stop = f.umin(first + together, panels[1])
        next_panel = stop.equals(panels[1]).select(all_panels if following is None else following, stop)
        row = f.variable(f.value("i64", 0))
        for t in f.loop(tiles[1], tiles[0]):
            first_kind, asks = t.below(count), t > asking - 1
            tile = first_kind.select(function, lesser)
            tile_index, tile_count = t - asks.select(asking, tiles[0]), asks.select(tiles[1] - asking, 0)
            for step in f.loop((stop - first + (at_once - 1)) // at_once):
                p = first + step * at_once
                after = ((p + at_once) < stop).select(p + at_once, next_panel)
                ahead = (after < all_panels).select((after - p) * panel_bytes, 0)
                panel, at_out, panel_bias, columns = of_panel(p, f.umin(p + at_once, stop))
                if then is not None:
                    ahead = (p + at_once).below(panels[1]).select(ahead, panel.distance(then))
                at = a + row.value * row_bytes, out + row.value * out_stride + at_out
                f.call_pointer(tile, args, panel, *at, panel_bias, columns, ahead, tile_index, tile_count)
            row.value = row.value + first_kind.select(big, big - 1)
        some.value = stop
