"""y = x · dequantize(W)ᵀ + bias on the CPU: compiles what a call needs, plans its tiles, and runs it.

Conditions that the caller has checked: x is [M, K] with contiguous rows in float32, bfloat16 or float16; the packed weight
has layout `cpu_tiles` and its full size; a bias is contiguous float32 [N]; all are on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu import activations, driver, jit, runtime, tile
from halfbyte.kernels.cpu.activations import RowSpec
from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.isa import current
from halfbyte.kernels.cpu.tile import FIELDS, Inner, TileSpec
from halfbyte.kernels.problem import Activation, Compute
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_GROUP_BYTES = 1 << 18  # weights that stay in a core's second-level cache while the row tiles pass
_GROUPS_A_THREAD = 4
_WORK_A_THREAD = 1 << 18  # products below which waking another thread costs more than it brings
_ROWS_A_PASS = 4096
_KEPT_SCRATCH = 1 << 24

_FORMAT = LINEAR.format
_pack_into = _FORMAT.pack_into
_local = threading.local()
_ZEROS = torch.zeros(PANEL)


class _Tiles(NamedTuple):
    """How M rows are cut, and the functions for them."""

    rows: int
    count: int
    lesser: int
    function: int
    lesser_function: int
    scratch_bytes: int
    group: int
    threads: int


def arguments_buffer() -> tuple[ctypes.Array[ctypes.c_char], int]:
    """This thread's block of arguments and its address."""
    try:
        return _local.arguments  # type: ignore[no-any-return]
    except AttributeError:
        buffer = ctypes.create_string_buffer(_FORMAT.size)
        _local.arguments = buffer, ctypes.addressof(buffer)
        return _local.arguments  # type: ignore[no-any-return]


def scratch(size: int) -> Tensor:
    """Bytes for one call on this thread; small ones are kept for the next."""
    kept: Tensor | None = getattr(_local, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = torch.empty(max(size, 1 << 16), dtype=torch.uint8)
        if size <= _KEPT_SCRATCH:
            _local.scratch = kept
    return kept


class LinearKernel:
    """The compiled product for one weight shape and format, activation dtype and arithmetic, for any M."""

    def __init__(self, fmt: Format, n: int, k: int, dtype: torch.dtype, compute: Compute, activation: Activation) -> None:
        self.isa, self.geometry = current(), Geometry(fmt, n, k)
        geo, kind = self.geometry, KINDS[dtype]
        inner: Inner = "int8"
        if compute == "float":
            inner = "bf16" if self.isa.bf16_dot and kind == "bf16" and fmt.bits == 4 else "float"
        single = geo.padded == 32 and geo.last_padded == 32 and geo.unit == 32
        shifted = inner == "int8" and activation.endswith("_offset")
        whole_row = inner == "int8" and activation.startswith("row")
        by_row = whole_row and not shifted
        sums = "none"
        if fmt.zero != "none":
            sums = "codes" if inner == "int8" and (fmt.zero == "point" or by_row) else "values"
        self.out_dtype = torch.float32 if kind == "f16" and not self.isa.half_conversions else dtype
        self.dtype = dtype
        self.tile_spec = TileSpec(
            inner, fmt.bits, KINDS[fmt.scale], fmt.zero, geo.unit, single, by_row, shifted, rows=1, vectors=1, out=KINDS[self.out_dtype]
        )
        correction = self.isa.correction(fmt.bits, fmt.signed) if inner == "int8" else 0
        row_spec = RowSpec(kind, inner, geo.unit, single, whole_row, shifted, correction, sums)
        self.row_function = jit.load(row_spec.name, functools.partial(activations.build, row_spec), self.isa)[row_spec.name]
        self.phases = jit.load("driver", driver.build, self.isa)
        self.run = runtime.runner()
        element = self.tile_spec.activation_bytes
        self.row_bytes = ((geo.blocks - 1) * geo.padded + geo.last_padded) * element + geo.blocks * 4 * FIELDS
        self.units = (geo.padded // geo.unit, geo.last_padded // geo.unit)
        self._tiles: dict[tuple[int, int], _Tiles] = {}

    @property
    def description(self) -> str:
        """What runs, for `explain`."""
        return f"{self.isa.name} {self.tile_spec.inner}"

    def tiles(self, m: int, threads: int) -> _Tiles:
        """Row tiles of at most the ISA's size whose sizes differ by one at most; their functions are compiled when first needed."""
        geo = self.geometry
        most, vectors = self.isa.tile(m, self.tile_spec.inner)
        count = -(-m // most)
        rows, more = divmod(m, count)
        function = _tile_function(self.tile_spec, rows + (more > 0), vectors)
        lesser = _tile_function(self.tile_spec, rows, vectors) if more else function
        threads = max(1, min(threads, m * geo.n * geo.k // _WORK_A_THREAD, geo.panels))
        group = max(1, min(_GROUP_BYTES // geo.panel_bytes, geo.panels // (threads * _GROUPS_A_THREAD)))
        sizes = (rows + 1, more, count - more) if more else (rows, count, 0)
        return _Tiles(*sizes, function, lesser, m * self.row_bytes + 64, group, threads)

    def __call__(self, x: Tensor, weights: int, bias: Tensor | None, low: float, high: float) -> Tensor:
        """x [M, K] -> [M, N]; `weights` is the address of the packed bytes."""
        m = x.shape[0]
        out = x.new_empty((m, self.geometry.n), dtype=self.out_dtype)
        for start in range(0, m, _ROWS_A_PASS):
            stop = min(m, start + _ROWS_A_PASS)
            self._pass(x[start:stop] if m > _ROWS_A_PASS else x, weights, bias, low, high, out[start:stop] if m > _ROWS_A_PASS else out)
        return out if self.out_dtype == self.dtype else out.to(self.dtype)

    def _pass(self, x: Tensor, weights: int, bias: Tensor | None, low: float, high: float, out: Tensor) -> None:
        geo, m, available = self.geometry, x.shape[0], runtime.threads()
        tiles = self._tiles.get((m, available))
        if tiles is None:
            if len(self._tiles) >= 4096:
                self._tiles.clear()
            tiles = self._tiles[m, available] = self.tiles(m, available)
        memory = scratch(tiles.scratch_bytes)
        buffer, address = arguments_buffer()
        element = out.element_size()
        _pack_into(
            buffer,
            0,
            self.phases["rows"],
            self.phases["panels"],
            0,
            runtime.openmp_address(),
            geo.k,
            geo.blocks,
            geo.block,
            geo.last,
            *self.units,
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            self.row_function,
            memory.data_ptr() + 63 & ~63,
            self.row_bytes,
            m,
            tiles.rows,
            tiles.count,
            tiles.lesser,
            tiles.function,
            tiles.lesser_function,
            geo.n,
            weights,
            geo.panel_bytes,
            tiles.group,
            0 if bias is None else bias.data_ptr(),
            _ZEROS.data_ptr(),
            out.data_ptr(),
            geo.n * element,
            element,
            low,
            high,
            0,
        )
        self.run(address, tiles.threads)


@functools.cache
def _tile_function(spec: TileSpec, rows: int, vectors: int) -> int:
    from dataclasses import replace

    sized = replace(spec, rows=rows, vectors=vectors)
    return jit.load(sized.name, functools.partial(tile.build, sized), current())[sized.name]


@functools.lru_cache(maxsize=1024)
def linear_kernel(fmt: Format, n: int, k: int, dtype: torch.dtype, compute: Compute, activation: Activation) -> LinearKernel:
    return LinearKernel(fmt, n, k, dtype, compute, activation)
