"""y = x · dequantize(W)ᵀ + bias + residual, clamped or through GELU, on the CPU: compiles what a call needs, plans its tiles, and runs it.

Conditions that the caller has checked: x is [M, K] with contiguous rows in float32, bfloat16 or float16; the packed weight
has layout `cpu_tiles` and its full size; a bias is contiguous float32 [N]; a residual is contiguous [M, N] in x's dtype; all are on
the CPU.

The same loops do yq = requantize(xq · codes(W)ᵀ): x is int8, and in the bias's place stands the table of `tile.RequantizingTile`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, KernelError
from halfbyte.formats.spec import Format
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elements import Kind, kind_of
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import AMXTiles
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.codegen.tuning import Tiling
from halfbyte.kernels.cpu.linear import activations, amx, bracketed, driver, expanded, tile
from halfbyte.kernels.cpu.linear.activations import RowSpec
from halfbyte.kernels.cpu.linear.block_end import HIGHEST_CODE, biasable, correction_point
from halfbyte.kernels.cpu.linear.expanded import PanelSpec
from halfbyte.kernels.cpu.linear.tile_spec import FIELDS, ActivationSpec, BlockSum, Inner, Schedule, TileSpec, WeightSpec
from halfbyte.kernels.cpu.plan_cache import PLANS, LinearCall
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import Activation, scaling_of
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL, Geometry
from halfbyte.memory import in_huge_pages

_GROUP_BYTES = 1 << 18  # weights that stay in a core's second-level cache while the row tiles pass
_READ_ONCE_BYTES = 1 << 20  # of a group whose panels all row tiles pass over one by one: where a group begins reading falters
_GROUPS_A_THREAD = 4
WORK_A_THREAD = 1 << 18  # products below which waking another thread costs more than it brings
ROWS_A_PASS = 4096
_MAPPED = 1 << 25  # bytes from which on glibc takes each block from the system anew (M_MMAP_THRESHOLD at its most)
_MOST_TEMPLATES = 64

pack_call = LINEAR.struct("counter", "clamp").pack_into
CALL = LINEAR.offset("counter")
_ZEROS = torch.zeros(PANEL * 8, dtype=torch.float32, device="cpu")  # for as many panels as tiles take at once


_numbers = itertools.count()


class LinearKernel:
    """The compiled product for one weight shape and format, activation dtype and arithmetic, for any M.

    zeroed   rows of x have zeros behind them, up to whole units
    gelu     outputs go through it, and are not clamped
    sparse   the weight is in the layout of 2:4 sparse ones
    isa      None for the one that is taken here
    """

    def __init__(
        self,
        fmt: Format,
        n: int,
        k: int,
        dtype: torch.dtype,
        inner: Inner,
        activation: Activation,
        *,
        zeroed: bool = False,
        gelu: Gelu = "",
        sparse: bool = False,
        isa: ISA | None = None,
    ) -> None:
        self.isa, self.geometry = isa or current(), Geometry(fmt, n, k, sparse)
        if sparse and not self.isa.spreads:
            raise KernelError(f"{self.isa.name} has no kernels for 2:4 sparse weights: unpack the codes and pack them on this machine")
        if fmt.packed_bits and not self.isa.reads_packed_bits:
            raise KernelError(f"{self.isa.name} has no kernels for codes of 5 and 6 bits: unpack the codes and pack them on this machine")
        geo = self.geometry
        self.dtype = dtype
        self.out_dtype = torch.float32 if dtype == torch.float16 and not self.isa.half_conversions else dtype
        self.inner = inner
        self.tile_spec, row_spec = specs(
            self.isa, geo, kind_of(dtype), kind_of(self.out_dtype), inner, activation, gelu=gelu, zeroed=zeroed
        )
        self.row_function = compiled(activations.build, row_spec, self.isa)
        self.unit, self.paired = row_spec.activation.unit, row_spec.paired
        self.run = runtime.runner()
        self.nbytes = geo.nbytes
        self.element_bytes = dtype.itemsize
        element = self.isa.activation_bytes(inner, fmt.code_bits)
        self.row_bytes = ((geo.blocks - 1) * geo.padded + geo.last_padded) * element + geo.blocks * 4 * FIELDS
        self.number = next(_numbers)
        self._of, self._zeroed = (fmt, n, k, dtype, inner, activation), zeroed
        self._templates: dict[tuple[int, int], tuple[bytes, int]] = {}

    def taking(self, m: int) -> LinearKernel:
        """The kernel that multiplies M rows: this one, or that of the matrix unit where it is faster."""
        return self if self.isa.taking(m, self.inner) is self.isa else self._on_matrix_unit

    @functools.cached_property
    def _on_matrix_unit(self) -> LinearKernel:
        return LinearKernel(*self._of, isa=self.isa.matrix, zeroed=self._zeroed, gelu=self.tile_spec.gelu)

    def __call__(self, x: Tensor, weights: int, bias: Tensor | None, low: float, high: float, residual: Tensor | None = None) -> Tensor:
        """x [..., K], or [M, K] with contiguous rows -> [..., N]; `weights` is the address of the packed bytes.

        `residual` [..., N] is added before the clamp, or multiplied with the GELU.

        Raises:
            ArgumentError: A clamp of a kernel with GELU, whose epilogue has none.
        """
        if self.tile_spec.gelu and (low > -math.inf or high < math.inf):
            raise ArgumentError(f"a product followed by GELU is not clamped, got clamp=({low}, {high}): clamp its result")
        *lead, k = x.shape
        m = math.prod(lead)
        out = x.new_empty((*lead, self.geometry.n), dtype=self.out_dtype)
        if out.nbytes >= _MAPPED:
            in_huge_pages(out)
        residual_offset = 0
        if residual is not None:
            residual = residual.to(self.out_dtype)
            residual_offset = residual.data_ptr() - out.data_ptr()  # the rows of both are as long
        if m <= ROWS_A_PASS:
            self._pass(x, m, weights, bias, low, high, out, residual_offset)
        else:
            rows = x if len(lead) == 1 else x.view(m, k)
            for some, part in zip(rows.split(ROWS_A_PASS), out.view(m, -1).split(ROWS_A_PASS), strict=True):
                self._pass(some, len(some), weights, bias, low, high, part, residual_offset)
        return out if self.out_dtype == self.dtype else out.to(self.dtype)

    def _pass(self, x: Tensor, m: int, weights: int, bias: Tensor | None, low: float, high: float, out: Tensor, residual: int = 0) -> None:
        """`residual`: bytes from `out` to what is added to it, or multiplied with it, 0 for nothing."""
        plans, available = PLANS, runtime.threads()
        call = plans.linear.get((self.number, m, available)) or self._prepare(m, available)
        _memory, address = plans.memory(call.scratch_bytes)
        # Asking for a stride costs three times what it costs to ask whether it is the usual one.
        stride = self.geometry.k * self.element_bytes if x.is_contiguous() else x.stride(0) * self.element_bytes
        pack_call(
            call.buffer,
            CALL,
            0,
            x.data_ptr(),
            stride,
            address,
            weights,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            residual,
            low,
            high,
        )
        self.run(call.address, call.threads)

    def _prepare(self, m: int, available: int) -> LinearCall:
        threads = self.threads(m, available)
        buffer, scratch_bytes = self.arguments(m, threads)
        call = LinearCall(buffer, ctypes.addressof(buffer), scratch_bytes, threads)
        PLANS.linear[self.number, m, available] = call
        return call

    def threads(self, m: int, available: int) -> int:
        """The number of available threads that are worth waking for M rows."""
        geo = self.geometry
        return max(1, min(available, m * geo.n * geo.k // WORK_A_THREAD, geo.panels))

    def arguments(self, m: int, threads: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
        """The arguments for M rows on so many threads, all but those of the call, and how many bytes of scratch memory it takes."""
        template, scratch_bytes = self._template(m, threads)
        return ctypes.create_string_buffer(template, len(template)), scratch_bytes

    def scratch_bytes(self, m: int) -> int:
        """Bytes of scratch memory that M rows take."""
        return m * self.taking(m).row_bytes

    def _template(self, m: int, threads: int) -> tuple[bytes, int]:
        """What all calls of so many rows begin with: every layer of a model takes a copy."""
        found = self._templates.get((m, threads))
        if found is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            found = self._templates[m, threads] = self._filled(m, threads).raw, self.scratch_bytes(m)
        return found

    def _filled(self, m: int, threads: int) -> ctypes.Array[ctypes.c_char]:
        geo, taken = self.geometry, self.taking(m)
        share = max(1, geo.panels // (threads * _GROUPS_A_THREAD))
        fields = taken.fields(m, share)
        tiles = fields["tiles"] + fields["lesser_tiles"]
        shares_prefetch = taken.asking(m, tiles)
        group_bytes = _READ_ONCE_BYTES if shares_prefetch or tiles == 1 or "panel_function" in fields else _GROUP_BYTES
        group = round_up(max(1, min(group_bytes // geo.panel_bytes, share)), fields["at_once"])
        groups = round_up(-(-geo.panels // group), threads)  # as many for each
        if shares_prefetch:
            fields |= {"prefetching_tiles": shares_prefetch if fields["at_once"] == 1 else 0, "together": fields["at_once"]}
        phases = driver.phases(self.isa)
        chunks = max(1, min(m * taken.row_bytes // taken.chunk_bytes(m), tiles))
        fields |= {"first_phase": phases["rows"], "second_phase": phases["panels"], "panel_groups": groups, "chunks": chunks}
        return LINEAR.buffer(fields)

    def asking(self, m: int, tiles: int) -> int:
        """How many of so many row tiles, the last ones, share the prefetch of the next panel; 0: none do."""
        prefetching, geo, size = self.isa.tuning.prefetching, self.geometry, self.geometry.panel_bytes
        near = m * self.row_bytes + 2 * size <= prefetching.sharing_bytes
        # A panel that is a group costs nothing more by itself, and codes of 8 bits come half as fast as a tile multiplies them.
        alone = self.inner == "int8" and geo.bits == 8 and not geo.sparse and 2 * size > _GROUP_BYTES
        shares = 0 < prefetching.sharing_tiles <= tiles and (near or alone or self._brackets(m))
        return min(tiles, prefetching.most_sharing) if shares else 0

    def tiling(self, m: int) -> Tiling:
        """How M rows are cut into tiles."""
        return self.isa.tuning.tile(m, self.inner, self.geometry, codes=self.tile_spec.out == "i8")

    def chunk_bytes(self, m: int) -> int:
        """Bytes of activations that pass over all panels before the next ones do."""
        tuning = self.isa.tuning
        if self._brackets(m):
            return m * self.row_bytes  # a panel's integers are made once for all
        return tuning.expansion.chunk_bytes if tuning.expansion is not None and self.tiling(m).expanded else tuning.chunk_bytes

    def _brackets(self, m: int) -> bool:
        """Whether M rows go through tiles of `bracketed.py`."""
        brackets = self.tile_spec.activation.block_sum == "bracketed"
        return brackets and m >= self.isa.tuning.bracketed_rows and self.geometry.blocks <= bracketed.MOST_BLOCKS

    def fields(self, m: int, most_at_once: int = 1) -> dict[str, int]:
        """The arguments that M fixes: cuts M into row tiles whose sizes differ by one at most, and compiles what they need.

        most_at_once   panels that a tile may take
        """
        geo, element = self.geometry, self.out_dtype.itemsize
        most, vectors, panels, expands = self.tiling(m)
        count = -(-m // most)
        rows, more = divmod(m, count)
        at_once = min(panels, most_at_once) if count == 1 else 1
        shares_prefetch = at_once == 1 and self.asking(m, count) > 0
        locality = self.isa.tuning.locality(m, self.inner, geo)
        most_rows = Schedule(rows + (more > 0), vectors, panels if at_once > 1 else 1, locality, shares_prefetch)
        build: Any = expanded.build if expands else amx.build if isinstance(self.isa, AMXTiles) else tile.build
        schedules = {"tile_function": most_rows, "lesser_tile_function": replace(most_rows, rows=rows)}
        tiles = {name: replace(self.tile_spec, schedule=schedule) for name, schedule in schedules.items()}
        return {
            **{name: compiled(build, one, self.isa) for name, one in tiles.items()},
            **(self._expansion(tiles) if expands else {}),
            **(self._bracketing(tiles) if self._brackets(m) else {}),
            "openmp": runtime.openmp_address(),
            "k": geo.k,
            "blocks": geo.blocks,
            "block": geo.block,
            "last": geo.last,
            "units": geo.padded // self.unit,
            "last_units": geo.last_padded // self.unit,
            "m": m,
            "row_bytes": self.row_bytes,
            "row_function": self.row_function,
            "tile_rows": rows + (more > 0),
            "tiles": more or count,
            "lesser_tiles": count - more if more else 0,
            "n": geo.n,
            "at_once": at_once,
            "together": geo.panels,
            "panel_bytes": geo.panel_bytes,
            "zeros": _ZEROS.data_ptr(),
            "out_stride": geo.n * element,
            "out_bytes": element,
            "table_stride": 4 * PANEL * geo.panels,
        }

    def _bracketing(self, tiles: Mapping[str, TileSpec]) -> dict[str, int]:
        functions = {f"bracketing_{name}": compiled(bracketed.build, one, self.isa) for name, one in tiles.items()}
        panel = replace(self.tile_spec, schedule=Schedule(1, tiles["tile_function"].schedule.vectors), out="f32", gelu="")
        return {**functions, "panel_function": compiled(bracketed.build_panel, panel, self.isa)}

    def _expansion(self, tiles: Mapping[str, TileSpec]) -> dict[str, int]:
        panel, expansion = PanelSpec.of(tiles["tile_function"]), self.isa.tuning.expansion
        assert expansion is not None
        expanding = {name: replace(one, schedule=replace(one.schedule, expands=True)) for name, one in tiles.items()}
        return {
            **{f"expanding_{name}": compiled(expanded.build, one, self.isa) for name, one in expanding.items()},
            "panel_function": compiled(expanded.build_panel, panel, self.isa),
            "expanded_blocks": max(1, expansion.record_bytes // panel.record_bytes(self.isa, self.geometry.padded)),
        }


def specs(
    isa: ISA, geo: Geometry, source: Kind, out: Kind, inner: Inner, activation: Activation, *, gelu: Gelu = "", zeroed: bool = False
) -> tuple[TileSpec, RowSpec]:
    """What tiles (of a row, and one vector of outputs) and the conversion of a row of `source` to their activations are compiled for.

    Raises KernelError for activations with an offset and a codebook without 0, where blocks are padded.
    """
    fmt, unit, integers = geo.format, isa.unit(geo, inner), inner == "int8"
    bits, quantizes = fmt.code_bits, integers and source != "i8"
    # Scales of x: one a row, which is multiplied at the end unless it has an offset, or one a block.
    whole_row, has_offset = scaling_of(activation) if integers else (False, False)
    if has_offset and fmt.codebook and fmt.codebook[fmt.pad_index] and (geo.padded, geo.last_padded) != (geo.block, geo.last):
        what = f"blocks of {geo.block} in rows of {geo.k} are padded, and {fmt} has no code for 0"
        raise KernelError(f"activation={activation!r} is not for this weight: {what}: use 'block' or 'row'")
    scaled_at_end = whole_row and not has_offset
    short = geo.padded <= isa.tuning.subtracts_points_up_to
    subtracts_points = quantizes and fmt.zero == "point" and bits == 4 and short and not (has_offset or geo.sparse)
    biased = quantizes and not whole_row and not has_offset and isa.tuning.biased and biasable(fmt, geo.padded)
    point = HIGHEST_CODE if subtracts_points else correction_point(isa, bits, fmt.zero, biased)
    correction = (isa.correction(bits, fmt.signed) if integers else 0) - point
    block_sum: BlockSum = "plain"
    if biased:
        block_sum = "biased"
    elif quantizes and not has_offset and isa.tuning.bracketed_rows > 0 and bracketed.fits(geo):
        block_sum = "bracketed"
    elif quantizes and not whole_row and not has_offset and bits == 4 and correction != 0 and isa.narrow_accumulators(bits):
        # Accumulators of 4-bit weights begin at 0, and nothing is gained by adding an integer correction at the end. That of 8 bits
        # may be far larger than what is left when it is subtracted: it stays an integer.
        block_sum = "folded"
    one_unit = geo.padded == geo.last_padded == unit and unit % 32 == 0
    laid_out = ActivationSpec(inner, unit, one_unit, has_offset, block_sum)
    sums: Literal["none", "codes", "values"] = "values"
    if fmt.zero == "none" or subtracts_points:
        sums = "none"
    elif integers and (fmt.zero == "point" or scaled_at_end or block_sum == "bracketed"):
        sums = "codes"
    row = RowSpec(
        source,
        laid_out,
        bits,
        paired=geo.pair_sums and integers and isa.multiplies_sums,
        by_row=whole_row or (integers and geo.blocks == 1),
        correction=correction,
        sums=sums,
        zeroed=zeroed and (geo.blocks == 1 or geo.block % unit == 0),
    )
    weight = WeightSpec(
        bits,
        kind_of(fmt.scale),
        fmt.zero,
        pair_sums=geo.pair_sums,
        sparse=geo.sparse,
        packed_bits=fmt.packed_bits,
        codebook=fmt.family if fmt.codebook else "",
        subtracts_points=subtracts_points,
    )
    return TileSpec(weight, laid_out, Schedule(1, 1), scaled_at_end, out, gelu), row


@functools.lru_cache(maxsize=1024)
def linear_kernel(
    fmt: Format, n: int, k: int, dtype: torch.dtype, inner: Inner, activation: Activation, *, gelu: Gelu = "", sparse: bool = False
) -> LinearKernel:
    return LinearKernel(fmt, n, k, dtype, inner, activation, gelu=gelu, sparse=sparse)
