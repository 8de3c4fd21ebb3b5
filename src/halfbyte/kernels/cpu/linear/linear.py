"""y = x · dequantize(W)ᵀ + bias + residual, clamped or through GELU, on the CPU: compiles what a call needs, plans its tiles, and runs it.

`linear_kernel` returns a `LinearKernel`, which `ops/cpu.py` calls; fused layers (`steps.py`, `transformer`, `conv`) take the `arguments` of
one and run them among others. A call is one native call of `driver.py` on a block of LINEAR arguments:

    specs(format, dtype, …)       what tiles and the layout of rows are compiled for, whatever M is
    LinearKernel.fields(m)        compiles the tiles for M, and returns the arguments that M fixes
    LinearKernel._template(m)     these and the shares of threads, cached
    LinearKernel._pass(x, …)      the addresses of one call, in a copy of the template that its thread keeps

The caller checks: x is [M, K] with contiguous rows in float32, bfloat16 or float16; the packed weight has layout `cpu_tiles` and its full
size; a bias is contiguous float32 [N]; a residual is contiguous [M, N] in x's dtype; all are on the CPU.

The same kernels compute yq = requantize(xq · codes(W)ᵀ): x is int8, and the bias is the table of `epilogue.RequantizingEpilogue`.
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

_GROUP_BYTES = 1 << 18  # weights of a group of panels, which stays in a core's second-level cache while the row tiles pass over it
_READ_ONCE_BYTES = 1 << 20  # of a group whose panels are read from memory once: reads are slow where a group begins
_GROUPS_A_THREAD = 4
WORK_A_THREAD = 1 << 18  # products for which another thread is worth waking
ROWS_A_PASS = 4096  # rows of one native call, which bounds its scratch memory
_MAPPED = 1 << 25  # bytes from which on glibc takes each block from the system anew (M_MMAP_THRESHOLD at its most)
_MOST_TEMPLATES = 64

pack_call = LINEAR.struct("counter", "clamp").pack_into
CALL = LINEAR.offset("counter")
_MOST_PANELS = 8  # of one call of a tile
_ZEROS = torch.zeros(PANEL * _MOST_PANELS, dtype=torch.float32, device="cpu")  # the bias of a tile where there is none

_numbers = itertools.count()


class LinearKernel:
    """The compiled product for one weight shape and format, activation dtype and arithmetic, for any M.

    Attributes:
        isa, geometry, dtype, inner: What the kernel is for.
        out_dtype: Dtype that tiles write; outputs are converted to `dtype` where it differs.
        tile_spec: Of its tiles, but for their schedule.
        unit, paired: Elements of K that tiles take at a time; whether they take products of sums.
        row_function: Address of the function that lays out a row of x.
        row_bytes: Bytes of a laid-out row.
        nbytes: Bytes of the packed weight.
        run: `runtime.runner()`.
        number: Identifies the kernel in caches.
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
        """Compile what does not depend on M.

        Args:
            fmt, n, k: Format and shape of the weight.
            dtype: Of x and of the outputs.
            inner: Type of the products' operands.
            activation: How int8 activations are scaled.
            zeroed: Rows of x have zeros behind them, up to whole units.
            gelu: Outputs go through it, and are not clamped.
            sparse: The weight is in the layout of 2:4 sparse ones.
            isa: None: the current one.

        Raises:
            KernelError: The instruction set has no kernels for the weight, or `activation` is not for it.
        """
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
        self._problem, self._zeroed = (fmt, n, k, dtype, inner, activation), zeroed
        self._templates: dict[tuple[int, int], tuple[bytes, int]] = {}

    def for_rows(self, m: int) -> LinearKernel:
        """Return the kernel that multiplies M rows: this one, or that of the matrix unit where it is faster."""
        return self if self.isa.for_rows(m, self.inner) is self.isa else self._on_matrix_unit

    @functools.cached_property
    def _on_matrix_unit(self) -> LinearKernel:
        return LinearKernel(*self._problem, isa=self.isa.matrix, zeroed=self._zeroed, gelu=self.tile_spec.gelu)

    def __call__(self, x: Tensor, weights: int, bias: Tensor | None, low: float, high: float, residual: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: [..., K] contiguous, or [M, K] with contiguous rows.
            weights: Address of the packed bytes.
            bias: [N] float32, or the table of a requantizing kernel.
            low, high: The outputs are clamped to them; infinite with GELU.
            residual: [..., N] Added before the clamp, or multiplied with the GELU.

        Returns:
            [..., N] in x's dtype.

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
            residual_offset = residual.data_ptr() - out.data_ptr()  # from an output to its residual: both are contiguous
        if m <= ROWS_A_PASS:
            self._pass(x, m, weights, bias, low, high, out, residual_offset)
        else:
            rows = x if len(lead) == 1 else x.view(m, k)
            for pass_x, pass_out in zip(rows.split(ROWS_A_PASS), out.view(m, -1).split(ROWS_A_PASS), strict=True):
                self._pass(pass_x, len(pass_x), weights, bias, low, high, pass_out, residual_offset)
        return out if self.out_dtype == self.dtype else out.to(self.dtype)

    def _pass(self, x: Tensor, m: int, weights: int, bias: Tensor | None, low: float, high: float, out: Tensor, residual: int = 0) -> None:
        """Multiply at most ROWS_A_PASS rows, in one native call. `residual`: bytes from `out` to its residual; 0: there is none."""
        plans, available = PLANS, runtime.threads()
        call = plans.linear.get((self.number, m, available)) or self._prepare(m, available)
        _memory, address = plans.memory(call.scratch_bytes)
        # `is_contiguous` takes a third of the time of `stride`.
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
        """Return the number of available threads that are worth waking for M rows."""
        geo = self.geometry
        return max(1, min(available, m * geo.n * geo.k // WORK_A_THREAD, geo.panels))

    def arguments(self, m: int, threads: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
        """Return the arguments for M rows on so many threads, without those of the call, and how many bytes of scratch memory it takes."""
        template, scratch_bytes = self._template(m, threads)
        return ctypes.create_string_buffer(template, len(template)), scratch_bytes

    def scratch_bytes(self, m: int) -> int:
        """Return the bytes of scratch memory that M rows take."""
        return m * self.for_rows(m).row_bytes

    def _template(self, m: int, threads: int) -> tuple[bytes, int]:
        """Return `arguments`, cached: every layer of a model takes a copy."""
        template = self._templates.get((m, threads))
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[m, threads] = self._filled(m, threads).raw, self.scratch_bytes(m)
        return template

    def _filled(self, m: int, threads: int) -> ctypes.Array[ctypes.c_char]:
        """Return the arguments for M rows on so many threads: cuts the panels into groups, and the row tiles into chunks."""
        geo, kernel = self.geometry, self.for_rows(m)
        share = max(1, geo.panels // (threads * _GROUPS_A_THREAD))  # panels of a group, where threads have as many groups as they should
        fields = kernel.fields(m, share)
        tiles, panels_per_tile = fields["tiles"] + fields["lesser_tiles"], fields["panels_per_tile"]
        sharing_tiles = kernel.sharing_tiles(m, tiles)
        reads_once = sharing_tiles > 0 or tiles == 1 or "panel_function" in fields
        group_bytes = _READ_ONCE_BYTES if reads_once else _GROUP_BYTES
        group = round_up(max(1, min(group_bytes // geo.panel_bytes, share)), panels_per_tile)
        groups = round_up(-(-geo.panels // group), threads)  # as many for each thread
        if sharing_tiles:
            fields |= {"prefetching_tiles": sharing_tiles if panels_per_tile == 1 else 0, "panels_per_pass": panels_per_tile}
        phases = driver.phases(self.isa)
        chunks = max(1, min(m * kernel.row_bytes // kernel.chunk_bytes(m), tiles))
        fields |= {"first_phase": phases["rows"], "second_phase": phases["panels"], "panel_groups": groups, "chunks": chunks}
        return LINEAR.buffer(fields)

    def sharing_tiles(self, m: int, tiles: int) -> int:
        """Return how many of so many row tiles, the last ones, share the prefetch of the next panel; 0: none do.

        All row tiles then take one panel before the next one. That pays where both panels and all activations fit the second-level cache,
        where a group would be one panel anyway and memory delivers 8-bit codes at half the rate at which a tile multiplies them, and in
        `bracketed.py`.
        """
        prefetching, geo, size = self.isa.tuning.prefetching, self.geometry, self.geometry.panel_bytes
        fits_cache = m * self.row_bytes + 2 * size <= prefetching.sharing_bytes
        is_whole_group = self.inner == "int8" and geo.bits == 8 and not geo.sparse and 2 * size > _GROUP_BYTES
        shares = 0 < prefetching.sharing_tiles <= tiles and (fits_cache or is_whole_group or self._is_bracketed(m))
        return min(tiles, prefetching.most_sharing) if shares else 0

    def tiling(self, m: int) -> Tiling:
        """Return how M rows are cut into tiles."""
        return self.isa.tuning.tile(m, self.inner, self.geometry, codes=self.tile_spec.out == "i8")

    def chunk_bytes(self, m: int) -> int:
        """Return the bytes of activations that pass over all panels before the next ones do."""
        tuning = self.isa.tuning
        if self._is_bracketed(m):
            return m * self.row_bytes  # a panel's integers are computed once for all rows
        return tuning.expansion.chunk_bytes if tuning.expansion is not None and self.tiling(m).expanded else tuning.chunk_bytes

    def _is_bracketed(self, m: int) -> bool:
        """Return whether M rows go through tiles of `bracketed.py`."""
        brackets = self.tile_spec.activation.block_sum == "bracketed"
        return brackets and m >= self.isa.tuning.bracketed_rows and self.geometry.blocks <= bracketed.MOST_BLOCKS

    def fields(self, m: int, most_panels: int = 1) -> dict[str, int]:
        """Return the arguments that M fixes: cuts M into row tiles whose sizes differ by one at most, and compiles what they need.

        Args:
            m: Rows, at least 1.
            most_panels: Panels that one call of a tile may take.
        """
        geo, element = self.geometry, self.out_dtype.itemsize
        most_rows, vectors, panels, expands = self.tiling(m)
        count = -(-m // most_rows)
        lesser_rows, larger_tiles = divmod(m, count)  # without larger tiles, all have the lesser number of rows
        rows = lesser_rows + (larger_tiles > 0)
        panels_per_tile = min(panels, most_panels) if count == 1 else 1
        assert panels_per_tile <= _MOST_PANELS, f"a bias of {_MOST_PANELS} panels stands for none, and a tile takes {panels_per_tile}"
        shares_prefetch = panels_per_tile == 1 and self.sharing_tiles(m, count) > 0
        locality = self.isa.tuning.locality(m, self.inner, geo)
        schedule = Schedule(rows, vectors, panels if panels_per_tile > 1 else 1, locality, shares_prefetch)
        build: Any = expanded.build if expands else amx.build if isinstance(self.isa, AMXTiles) else tile.build
        schedules = {"tile_function": schedule, "lesser_tile_function": replace(schedule, rows=lesser_rows)}
        tiles = {name: replace(self.tile_spec, schedule=schedule) for name, schedule in schedules.items()}
        return {
            **{name: compiled(build, spec, self.isa) for name, spec in tiles.items()},
            **(self._expansion(tiles) if expands else {}),
            **(self._bracketing(tiles) if self._is_bracketed(m) else {}),
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
            "tile_rows": rows,
            "tiles": larger_tiles or count,
            "lesser_tiles": count - larger_tiles if larger_tiles else 0,
            "n": geo.n,
            "panels_per_tile": panels_per_tile,
            "panels_per_pass": geo.panels,
            "panel_bytes": geo.panel_bytes,
            "zeros": _ZEROS.data_ptr(),
            "out_stride": geo.n * element,
            "out_bytes": element,
            "table_stride": 4 * PANEL * geo.panels,
        }

    def _bracketing(self, tiles: Mapping[str, TileSpec]) -> dict[str, int]:
        """Return the functions of `bracketed.py` for tiles, by the names of their fields."""
        functions = {f"bracketing_{name}": compiled(bracketed.build, spec, self.isa) for name, spec in tiles.items()}
        panel = replace(self.tile_spec, schedule=Schedule(1, tiles["tile_function"].schedule.vectors), out="f32", gelu="")
        return {**functions, "panel_function": compiled(bracketed.build_panel, panel, self.isa)}

    def _expansion(self, tiles: Mapping[str, TileSpec]) -> dict[str, int]:
        """Return the functions and sizes of `expanded.py` for tiles, by the names of their fields."""
        panel, expansion = PanelSpec.of(tiles["tile_function"]), self.isa.tuning.expansion
        assert expansion is not None, f"the tuning of {self.isa.name} expands codes, and does not say how"
        expanding = {name: replace(spec, schedule=replace(spec.schedule, expands=True)) for name, spec in tiles.items()}
        return {
            **{f"expanding_{name}": compiled(expanded.build, spec, self.isa) for name, spec in expanding.items()},
            "panel_function": compiled(expanded.build_panel, panel, self.isa),
            "expanded_blocks": max(1, expansion.record_bytes // panel.record_bytes(self.isa, self.geometry.padded)),
        }


def specs(
    isa: ISA, geo: Geometry, source: Kind, out: Kind, inner: Inner, activation: Activation, *, gelu: Gelu = "", zeroed: bool = False
) -> tuple[TileSpec, RowSpec]:
    """Return what tiles and the conversion of a row of x are compiled for.

    Args:
        isa: The instruction set.
        geo: Format and shape of the weight.
        source, out: Types of x, "i8" for codes, and of the outputs.
        inner: Type of the products' operands.
        activation: How int8 activations are scaled.
        gelu, zeroed: As of LinearKernel.

    Returns:
        The specification of a tile of one row and one vector of outputs, whose schedule is yet to be chosen, and that of the row.

    Raises:
        KernelError: Activations have an offset, blocks are padded, and the format's codebook has no 0.
    """
    fmt, unit, integers = geo.format, isa.unit(geo, inner), inner == "int8"
    bits, quantizes = fmt.code_bits, integers and source != "i8"
    # One scale of a row, by which totals are multiplied at the end unless it has an offset; else one of each block.
    whole_row, has_offset = scaling_of(activation) if integers else (False, False)
    if has_offset and fmt.codebook and fmt.codebook[fmt.pad_index] and (geo.padded, geo.last_padded) != (geo.block, geo.last):
        what = f"blocks of {geo.block} in rows of {geo.k} are padded, and {fmt} has no code for 0"
        raise KernelError(f"activation={activation!r} is not for this weight: {what}: use 'block' or 'row'")
    scaled_at_end = whole_row and not has_offset
    is_short = geo.padded <= isa.tuning.subtracts_points_up_to
    subtracts_points = quantizes and fmt.zero == "point" and bits == 4 and is_short and not (has_offset or geo.sparse)
    biased = quantizes and not whole_row and not has_offset and isa.tuning.biased and biasable(fmt, geo.padded)
    point = HIGHEST_CODE if subtracts_points else correction_point(isa, bits, fmt.zero, biased)
    correction = (isa.correction(bits, fmt.signed) if integers else 0) - point
    block_sum: BlockSum = "plain"
    if biased:
        block_sum = "biased"
    elif quantizes and not has_offset and isa.tuning.bracketed_rows > 0 and bracketed.fits(geo):
        block_sum = "bracketed"
    elif quantizes and not whole_row and not has_offset and bits == 4 and correction != 0 and isa.narrow_accumulators(bits):
        # Accumulators of 4-bit weights begin at 0, so that an integer correction would be one more addition at the block's end. That of
        # 8 bits may be far larger than the difference from the sum, which float32 would round: it stays an integer.
        block_sum = "folded"
    one_unit = geo.padded == geo.last_padded == unit and unit % 32 == 0
    activations_spec = ActivationSpec(inner, unit, one_unit, has_offset, block_sum)
    sums: Literal["none", "codes", "values"] = "values"
    if fmt.zero == "none" or subtracts_points:
        sums = "none"
    elif integers and (fmt.zero == "point" or scaled_at_end or block_sum == "bracketed"):
        sums = "codes"
    row = RowSpec(
        source,
        activations_spec,
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
    return TileSpec(weight, activations_spec, Schedule(1, 1), scaled_at_end, out, gelu), row


@functools.lru_cache(maxsize=1024)
def linear_kernel(
    fmt: Format, n: int, k: int, dtype: torch.dtype, inner: Inner, activation: Activation, *, gelu: Gelu = "", sparse: bool = False
) -> LinearKernel:
    """Return the kernel of a product on the current instruction set, cached."""
    return LinearKernel(fmt, n, k, dtype, inner, activation, gelu=gelu, sparse=sparse)
