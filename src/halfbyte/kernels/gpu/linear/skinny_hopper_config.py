"""The dispatch side of `skinny_hopper.py`: which problems it supports, tiles and numbers of programs, estimated times, and what it is
compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

import torch
import triton

from halfbyte.kernels.gpu.hopper.ring import why_not_hopper
from halfbyte.kernels.gpu.hopper.skinny_tile import Static
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_MOST_COLUMNS = 64  # rows of x per tile
_RESERVED_BYTES = 10 << 10  # of shared memory outside of the stages
_MOST_POLLED = 64  # columns of sums that a program polls for at most: they are in registers
_EVEN_COUNTS = 3  # numbers of programs per tile that are tried: the largest ones, in addition to 1 and 2

# Microseconds with up to 64 rows of x, where each panel of the weight has a program. Fitted to 509 times on an H200, of 16 weights of 4
# and 8 bits: the first config takes 1 % longer than the fastest one.
_STAGE_US, _FEW_REST_US = 0.058, 1.51
_SLAB_US = {4: 0.06, 8: 0.132}  # of 64 rows, by bits
_COLUMN_US = {True: 0.0015, False: 0.0031}  # of a slab's sums: with wgmma, with mma
_X_US = 0.0016  # a row of x that is read for a slab
_READ, _BANDWIDTH = 0.73, 4.8e12  # the share of the bandwidth that is reached; an H200's bandwidth, if a GPU's is unknown
_READ_REPEAT = 0.96  # how much longer reading takes for each further tile of the same weight
_POLL_US, _POLL_COLUMN_US = 0.75, 0.028  # to poll for programs of the same tile; for a column of two sums, more for more of them
_REDUCTION_US = 2.2  # with an arrival counter; twice where some tiles have more programs than others
_REDUCTION_COLUMN_US = 0.015

# With more rows than a tile of x has: microseconds of a K slab of 64 rows of the weight, by panels, and of the rest; 8 bits take longer.
# Fitted to 144 times of q4_0 on an H200, 17 shapes.
_MANY_SLAB_US, _MANY_REST_US, _BYTES_FACTOR = {1: 0.255, 2: 0.22, 4: 0.29}, 3.3, 1.3


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight by `columns` of x; `stages` in flight, in each of which a partition has `each` K slabs.

    With two partitions instead of four a program takes half of a multiprocessor. `programs` share the tiles of the same rows of x: if M
    is more than `columns`, each `columns` rows have as many. Tables of measured times have configs as text: their fields keep their names.
    """

    columns: int
    panels: int
    each: int
    stages: int
    programs: int
    partitions: int = 4


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why the kernel does not compute `problem`, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    most = _MOST_COLUMNS * (1 if problem.sparse else max(1, gpu.sms // geo.panels))  # with which each tile has a program
    if reason := why_not(problem, gpu, most):
        return reason
    scaled = compiled_for(problem, Config(_columns(problem.m), 1, 1, 1, 1), clamp=False).scaled
    if problem.dtype == torch.float32 or (scaled and problem.dtype == torch.float16 != problem.format.scale):
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    if problem.sparse and geo.padded < 32:
        return f"a sparse matrix instruction multiplies 32 elements of K, and {problem.format} has a scale for fewer"
    return None


def why_not(problem: Problem, gpu: Gpu, most: int) -> str | None:
    """Return the reason why neither floats nor integers of `problem` are computed, for `most` rows of x at most, or None."""
    if reason := why_not_hopper(gpu):
        return reason
    if problem.format.zero == "offset":
        return f"it takes points off codes, and {problem.format} has offsets"
    if problem.m > most:
        return f"it multiplies {most} rows of x at most where N is {problem.n}, and there are {problem.m}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if geo.panels * geo.records * gpu.sms >= 1 << 31:
        return f"it counts steps in 32 bits, and there are {geo.panels} x {geo.records} for each multiprocessor"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first, from measurements on an H200."""
    words = problem.format.bits == 4
    if problem.m <= _MOST_COLUMNS and problem.compute == "float" and not problem.sparse and -(-problem.n // gpu_tiles.PANEL) <= gpu.sms:
        # Tiles of four panels were never the fastest ones.
        return tuple(sorted(_few(problem, gpu), key=lambda config: (config.panels == 4, _few_us(problem, config, gpu))))
    if problem.m <= 16:
        tiles = [(1, 2), (2, 2), (4, 2), (1, 1), (2, 1), (4, 1), (4, 4)] if words else [(1, 1), (2, 1), (4, 1), (1, 2)]  # panels, each
    elif problem.m <= 32:
        tiles = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)] if words or problem.sparse else [(2, 1), (1, 1), (4, 1), (4, 2)]
    else:
        tiles = [(2, 1), (4, 1), (4, 2), (1, 1)]
        if problem.sparse and problem.n < 128 * gpu.sms:
            tiles.insert(0, tiles.pop())
    if problem.m > _MOST_COLUMNS:
        every = [config for panels, slabs in tiles for config in _configs(problem, gpu, panels, slabs, 0.0) if config.stages > 1]
        return tuple(sorted(dict.fromkeys(every), key=lambda config: seconds(problem, config) or 0.0)[:6])
    many = problem.n >= 8 * 64 * gpu.sms  # panels: large tiles leave no program without one, and equal shares have one cut in several
    if many:
        tiles.sort(key=lambda tile: tile[0] != 4)
    candidates = [_configs(problem, gpu, panels, slabs, 1.0 if many else _REDUCTION_US) for panels, slabs in tiles]
    if problem.compute == "float" and not problem.sparse and (many or (problem.m <= 16 and 64 * gpu.sms < problem.n <= 2 * 64 * gpu.sms)):
        half = _configs(problem, gpu, 2 if many else 1, 1 if many or not words else 2, 0.0, partitions=2)
        candidates.insert(0, half)
    best, others = [of_tile[0] for of_tile in candidates], [config for of_tile in candidates for config in of_tile[1:]]
    return tuple(dict.fromkeys(config for config in best + others if config.stages > 1))


def seconds(problem: Problem, config: Config) -> float | None:
    """Estimate the time with more rows of x than a tile has; None with fewer, where the time is spent on reading."""
    if problem.m <= _MOST_COLUMNS:
        return None
    tiles, programs = -(-problem.n // (64 * config.panels)), config.programs
    share = config.panels * tiles * gpu_tiles.geometry(problem.format, (problem.n, problem.k)).records / programs
    us = share * _MANY_SLAB_US[config.panels] * (_BYTES_FACTOR if problem.format.bits == 8 else 1.0)
    reduction = 0.0 if tiles % programs == 0 else 0.45 + 0.6 * (programs // tiles) if programs % tiles == 0 else 4.2
    return 1e-6 * (_MANY_REST_US + us + reduction)


def _few(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return configs for at most as many rows as a tile has, or for two tiles of half as many if all fit at once."""
    words, columns, panels = problem.format.bits == 4, _columns(problem.m), -(-problem.n // gpu_tiles.PANEL)
    tiles = [(columns, *tile) for tile in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)) if tile[1] == 1 or words]
    if columns > 8 and -(-problem.m // (columns // 2)) * panels <= gpu.sms:
        tiles += [(columns // 2, 1, slabs) for slabs in ((1, 2) if words else (1,))]
    candidates = [
        config for columns, panels, slabs in tiles for config in _configs(problem, gpu, panels, slabs, _REDUCTION_US, columns=columns)
    ]
    return [config for config in dict.fromkeys(candidates) if config.stages > 1]


def _few_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Estimate the microseconds of one of these."""
    geo, static = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), compiled_for(problem, config, clamp=False)
    tiles, steps = -(-problem.n // static.rows), -(-geo.records // static.stage_slabs)
    together, repeats = programs_of_tile(problem, config), row_tiles(problem, config) - 1
    if together:
        stages, reduction = -(-steps // together), _POLL_US + _POLL_COLUMN_US * (1 + log2(together - 1)) * config.columns
    elif tiles % config.programs == 0:
        stages, reduction = tiles // config.programs * steps, 0.0
    else:
        stages, others = -(-tiles * steps // config.programs), max(1.0, config.programs / tiles - 1)
        reduction = _REDUCTION_US * (1 if config.programs % tiles == 0 else 2) + _REDUCTION_COLUMN_US * others * config.columns
    column_us = _COLUMN_US[static.use_wgmma] + _X_US / config.panels
    rate = _READ * (gpu.bandwidth or _BANDWIDTH) / (1 + _READ_REPEAT * repeats)
    read_us = 1e6 * config.programs * geo.nbytes / (geo.panels * geo.records) / rate
    slab_us = max(_SLAB_US[static.bits] + column_us * config.columns, read_us)
    return _FEW_REST_US + stages * (_STAGE_US + config.partitions * config.each * slab_us) + reduction


def _configs(
    problem: Problem, gpu: Gpu, panels: int, slabs: int, reduction_us: float, partitions: int = 4, columns: int | None = None
) -> list[Config]:
    """Return configs with different numbers of programs, the best first: by the K slabs of 64 rows per program, and whether programs
    share tiles."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    columns = columns or _columns(problem.m)
    static = compiled_for(problem, Config(columns, panels, slabs, 1, 1, partitions), clamp=False)
    together = 4 // partitions  # programs on a multiprocessor
    bytes_per_program = (gpu.shared - (together - 1) * 1024 - _RESERVED_BYTES) // together
    stages = min(12, (bytes_per_program - (partitions - panels) * 256 * columns) // static.stage_bytes)
    tiles, steps, most = -(-problem.n // static.rows), -(-geo.records // static.stage_slabs), gpu.sms // -(-problem.m // columns)
    whole = -(-tiles // -(-tiles // (together * most)))
    if partitions == 2:
        return [Config(columns, panels, slabs, stages, whole, partitions)]
    # Integers: measured on an H200 with 16 to 64 rows.
    slab_us = (0.015 + 0.00035 * columns) * static.bits if static.integers else 0.10 + 0.0016 * columns
    shared_us = 3 * reduction_us if static.integers else reduction_us

    def us(programs: int) -> float:
        reduction = 0.0 if tiles % programs == 0 else shared_us if programs % tiles == 0 else 2 * shared_us
        return panels * tiles * geo.records / programs * slab_us + reduction

    # Even numbers per tile, where one program more saves each a step.
    even = [number for number in range(2, min(most // tiles, steps) + 1) if -(-steps // number) < -(-steps // (number - 1))]
    counts = whole, *(tiles * number for number in {*even[:1], *even[-_EVEN_COUNTS:]}), min(most, tiles * steps)
    programs = sorted({count for count in counts if count <= most}, key=us)
    return [Config(columns, panels, slabs, stages, count) for count in programs]


def _columns(m: int) -> int:
    """Return the rows of x per tile."""
    return next((size for size in (8, 16, 32) if m <= size), _MOST_COLUMNS)


def row_tiles(problem: Problem, config: Config) -> int:
    """Return the tiles along M."""
    return -(-problem.m // config.columns)


def gated(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """Return `config` as a gated epilogue needs it: whole tiles of two panels of gates and two of the up projection, for about half of
    the multiprocessors or more; None where shape or format do not allow it."""
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    if problem.m > config.columns or problem.n % (4 * gpu_tiles.PANEL) or short or config.panels != 4:
        return None
    if 9 * problem.n < 4 * 4 * gpu_tiles.PANEL * gpu.sms:
        return None
    static = compiled_for(problem, config, clamp=False, gates="silu")
    stages = min(config.stages, (gpu.shared - _RESERVED_BYTES - 2 * 256 * config.columns) // static.stage_bytes)
    return replace(config, stages=stages, programs=min(config.programs, problem.n // static.rows)) if stages > 1 else None


def compiled_for(problem: Problem, config: Config, *, clamp: bool, gates: str = "") -> Static:
    """Return what the kernel is compiled for: floats or integers, as the problem computes."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    blocks = max(1, gpu_tiles.RECORD // geo.padded)
    floats = problem.compute == "float" and not problem.sparse
    use_wgmma = config.columns >= (16 if blocks == 1 else 32) and not problem.sparse
    # Whether a slab has fewer weights to scale than sums; with blocks of 16 a plane of 32 has two scales, so that weights are scaled.
    fewer = blocks == 8 or (blocks > 1 and geo.format.bits == 8) or (use_wgmma and blocks * config.columns > 32)
    sharing, integers = programs_of_tile(problem, config), problem.compute == "int8"
    return Static(
        columns=config.columns,
        panels=config.panels,
        slabs=config.each,
        stages=config.stages,
        bits=geo.format.bits,
        blocks_per_slab=blocks,
        slabs_per_block=1 if geo.block_rows == 1 else max(1, geo.padded // gpu_tiles.RECORD),
        one_block=integers or geo.block_rows == 1,
        zero=zero_of(geo.format),
        scale_bytes=geo.format.scale.itemsize,
        use_wgmma=use_wgmma,
        scaled=floats and geo.block_rows > 1 and fewer,
        subnormal=floats and geo.format.code_bits == 4 and problem.dtype == torch.bfloat16,
        integers=integers,
        clamp=clamp,
        partitions=config.partitions,
        float_codes=has_floats(geo.format),
        gates=gates,
        sparse=problem.sparse,
        paired=problem.paired,
        polled=0 if gates or not sharing else triton.next_power_of_2(sharing - 1),
    )


def programs_of_tile(problem: Problem, config: Config) -> int:
    """Return how many programs each tile has, the last of which polls for the others; 0 if none does: tiles have different numbers of
    programs, or it would read more than `_MOST_POLLED` columns."""
    together, more = divmod(config.programs, -(-problem.n // (64 * config.panels)))
    return together if config.partitions == 4 and not more and 0 < (together - 1) * config.columns <= _MOST_POLLED else 0


def workspace_bytes(problem: Problem, config: Config) -> int:
    """Return the bytes of memory for partial sums, if some tiles have more programs than others; 0 if none are shared."""
    shared = config.partitions == 4 and -(-problem.n // (64 * config.panels)) % config.programs != 0
    if not shared or programs_of_tile(problem, config):
        return 0
    return 8 * config.programs * 64 * config.panels * config.columns * row_tiles(problem, config)
