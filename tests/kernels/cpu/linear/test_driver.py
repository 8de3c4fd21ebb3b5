"""The loops around the micro-kernel: what each tile is called with, and which of them ask for the next panel."""

import ctypes

import pytest
import torch
from support import RUNNABLE, call

from halfbyte.formats import as_format
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.prefetch import SharingPrefetcher
from halfbyte.machine import machine

TILES = 5


def recorder(isa: ISA) -> Module:
    """A module with tile(…), as `tile.build` makes it, whose output is its turn, and of how many."""
    module = Module(isa.attributes)
    f = module.function("tile", [*["ptr"] * 5, *["i64"] * 4])
    _args, _weights, _activations, out, _bias, _columns, _ahead, rope, rope_cache = f.parameters
    out.store(rope)
    out.store(rope_cache, 8)
    return module


@pytest.mark.parametrize("asking", range(TILES + 2))
def test_the_last_tiles_ask_in_turn(asking: int) -> None:
    isa = RUNNABLE[0]
    tile = jit.load("tile", recorder, isa)["tile"]
    said = torch.full((TILES, 2), -1, dtype=torch.int64)
    some = {
        "tile_rows": 1,
        "tiles": TILES,
        "n": 32,
        "panel_groups": 1,
        "chunks": 1,
        "panels_per_tile": 1,
        "panels_per_pass": 1,
        "prefetching_tiles": asking,
    }
    block = LINEAR.buffer({"tile_function": tile, "out": said.data_ptr(), "out_stride": 16, **some})
    panels = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(jit.load("driver", driver.build, isa)["panels"])
    panels(ctypes.addressof(block), 0, 1)
    rope_cache = min(asking, TILES)
    # The first tile, which reads weights from memory where they are not there yet, has number 0.
    assert said.tolist() == [[t, 0] for t in range(TILES - rope_cache)] + [[t, rope_cache] for t in range(rope_cache)]


@pytest.mark.parametrize("tiles", [1, 2, 3, 8, 13])
def test_shares_of_a_panel_are_all_of_it(tiles: int) -> None:
    units, lines = 6, 17
    panel = units * lines
    asked = torch.zeros(tiles + 1, 3 * panel, 64, dtype=torch.uint8)  # of each tile, and of one that does not ask, in three panels

    def body(f: Function, start: Value) -> None:
        f.prefetch = lambda at, _locality=3: at.store(f.value("i8", 1))  # type: ignore[method-assign]
        for tile in range(tiles + 1):
            weights = start + tile * 3 * panel * 64
            numbers = [f.value("i64", number) for number in (64 * panel, 64 * panel, tile, tiles * (tile < tiles))]
            prefetcher = SharingPrefetcher(RUNNABLE[0], f, numbers[0], 3, weights, *numbers[1:])
            for unit in f.loop(units):
                prefetcher.issue(weights + unit * (lines * 64), lines * 64)

    call(body, asked)
    by_tile = asked[:, :, 0].view(tiles + 1, 3, panel)
    assert not by_tile[:, 0].any()
    assert not by_tile[-1].any()
    assert by_tile[:, 1].any(0).all()
    assert by_tile[:, 1:].sum() <= panel + tiles * lines  # few twice


@pytest.mark.skipif(machine().arch != "x86_64" or AVX512VNNI("zen5").missing() is not None, reason="for AVX-512 VNNI")
def test_who_asks_on_zen_5() -> None:
    def asking(name: str, k: int, m: int) -> int:
        kernel = LinearKernel(as_format(name), 4096, k, torch.float32, "int8", "block", isa=AVX512VNNI("zen5"))
        return kernel.sharing_tiles(m, -(-m // kernel.tiling(m).rows))

    assert [asking("q4_0", 4096, m) for m in (8, 16, 40, 64, 128)] == [0, 3, 7, 8, 0]
    assert [asking("int8_channel", 4096, m) for m in (8, 16, 96, 128, 512)] == [0, 2, 8, 8, 8]
    assert [asking("q8_0", 2048, m) for m in (64, 512)] == [8, 0]  # of short panels a group holds several
    assert [asking("int8_g128", 14336, m) for m in (14, 16, 24)] == [0, 2, 3]
    assert [asking(name, 14336, 24) for name in ("int4_g128", "int5_g32", "mxfp4")] == [0, 0, 0]
