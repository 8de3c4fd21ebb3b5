"""How `skinny_hopper.py` takes a problem: which it refuses, tiles and numbers of programs, what they take, and what the kernel is compiled
for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

import torch
import triton

from halfbyte.kernels.gpu.hopper.skinny_tile import Static
from halfbyte.kernels.gpu.hopper.stages import not_hopper
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_WIDEST = 64  # tile of x, in rows
_BESIDE = 10 << 10  # bytes of shared memory beside the stages
_AWAITED = 64  # columns of others' sums that a program waits for at most: they have registers
_ALIKE = 3  # numbers of programs for each tile that are tried, the largest ones, beside 1 and 2

# What up to 64 rows take where each panel of the weight has a program, in microseconds. Fitted to 509 times on an H200, of 16 weights of 4
# and 8 bits: the first config takes 1 % longer than the fastest one.
_STAGE_US, _FEW_REST_US = 0.058, 1.51
_RECORD_US = {4: 0.06, 8: 0.132}  # of 64 rows, by bits
_COLUMN_US = {True: 0.0015, False: 0.0031}  # of a record's sums: made by wgmma, or by each warp for itself
_X_US = 0.0016  # a row of x that is read for a record
_READ, _BANDWIDTH = 0.73, 4.8e12  # of which that share is reached; an H200's, where a GPU's is not known
_READ_AGAIN = 0.96  # how much longer it takes for each further tile of the same weight
_WAIT_US, _WAIT_COLUMN_US = 0.75, 0.028  # for programs of the same tile, and for a column of two sums, more for more of them
_MEETING_US = 2.2  # where arrivals are counted; twice where some tiles have more programs than others
_MEETING_COLUMN_US = 0.015

# With more rows than a tile of x has: microseconds of a record of 64 rows of the weight, by panels, and of all else; 8 bits take longer.
# Fitted to 144 times of q4_0 on an H200, 17 shapes.
_MANY_RECORD_US, _MANY_REST_US, _OF_BYTES = {1: 0.255, 2: 0.22, 4: 0.29}, 3.3, 1.3


@dataclass(frozen=True)
class Config:
    """Tiles of 64 * `panels` rows of the weight by `columns` of x; `stages` in flight, in each of which a partition has `each` records.
    With two partitions for four a program takes half of a multiprocessor. `programs` share the tiles of the same rows of x: where M is more
    than `columns`, each `columns` rows have as many."""

    columns: int
    panels: int
    each: int
    stages: int
    programs: int
    partitions: int = 4


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    most = _WIDEST * (1 if problem.sparse else max(1, gpu.sms // geo.panels))  # with which each tile has a program
    if reason := refused(problem, gpu, most):
        return reason
    scaled = compiled_for(problem, Config(_columns(problem.m), 1, 1, 1, 1), clamp=False).scaled
    if problem.dtype == torch.float32 or (scaled and problem.dtype == torch.float16 != problem.format.scale):
        return f"it makes the weight in 16 bits, and {problem.format} with activations of {problem.dtype} takes more"
    if not geo.contiguous or problem.k % 8:
        return f"TMA reads x in rows of a multiple of 8 elements and without gaps, not K = {problem.k} in blocks of {geo.block}"
    return None


def refused(problem: Problem, gpu: Gpu, most: int) -> str | None:
    """What integers are refused for, too."""
    if reason := not_hopper(gpu):
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
    """The best guess first, from measurements on an H200."""
    words = problem.format.bits == 4
    if problem.m <= _WIDEST and problem.compute == "float" and not problem.sparse and -(-problem.n // gpu_tiles.PANEL) <= gpu.sms:
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
    if problem.m > _WIDEST:
        every = [config for panels, each in tiles for config in _configs(problem, gpu, panels, each, 0.0) if config.stages > 1]
        return tuple(sorted(dict.fromkeys(every), key=lambda config: seconds(problem, config) or 0.0)[:6])
    many = problem.n >= 8 * 64 * gpu.sms  # panels: large tiles leave no program without one, and equal shares have one cut in several
    if many:
        tiles.sort(key=lambda tile: tile[0] != 4)
    found = [_configs(problem, gpu, panels, each, 1.0 if many else _MEETING_US) for panels, each in tiles]
    if problem.compute == "float" and not problem.sparse and (many or (problem.m <= 16 and 64 * gpu.sms < problem.n <= 2 * 64 * gpu.sms)):
        half = _configs(problem, gpu, 2 if many else 1, 1 if many or not words else 2, 0.0, partitions=2)
        found.insert(0, half)
    best, others = [of_tile[0] for of_tile in found], [config for of_tile in found for config in of_tile[1:]]
    return tuple(dict.fromkeys(config for config in best + others if config.stages > 1))


def seconds(problem: Problem, config: Config) -> float | None:
    """With more rows of x than a tile has; None with fewer, where it is reading that takes time."""
    if problem.m <= _WIDEST:
        return None
    tiles, programs = -(-problem.n // (64 * config.panels)), config.programs
    share = config.panels * tiles * gpu_tiles.geometry(problem.format, (problem.n, problem.k)).records / programs
    us = share * _MANY_RECORD_US[config.panels] * (_OF_BYTES if problem.format.bits == 8 else 1.0)
    meeting = 0.0 if tiles % programs == 0 else 0.45 + 0.6 * (programs // tiles) if programs % tiles == 0 else 4.2
    return 1e-6 * (_MANY_REST_US + us + meeting)


def _few(problem: Problem, gpu: Gpu) -> list[Config]:
    """Those for as many rows as a tile has, or two tiles of half as many where all have room at once."""
    words, columns, panels = problem.format.bits == 4, _columns(problem.m), -(-problem.n // gpu_tiles.PANEL)
    tiles = [(columns, *tile) for tile in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)) if tile[1] == 1 or words]
    if columns > 8 and -(-problem.m // (columns // 2)) * panels <= gpu.sms:
        tiles += [(columns // 2, 1, each) for each in ((1, 2) if words else (1,))]
    found = [config for columns, panels, each in tiles for config in _configs(problem, gpu, panels, each, _MEETING_US, columns=columns)]
    return [config for config in dict.fromkeys(found) if config.stages > 1]


def _few_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What one of these takes."""
    geo, static = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), compiled_for(problem, config, clamp=False)
    tiles, steps = -(-problem.n // static.rows), -(-geo.records // static.depth)
    together, again = programs_of_tile(problem, config), row_tiles(problem, config) - 1
    if together:
        stages, meeting = -(-steps // together), _WAIT_US + _WAIT_COLUMN_US * (1 + log2(together - 1)) * config.columns
    elif tiles % config.programs == 0:
        stages, meeting = tiles // config.programs * steps, 0.0
    else:
        stages, others = -(-tiles * steps // config.programs), max(1.0, config.programs / tiles - 1)
        meeting = _MEETING_US * (1 if config.programs % tiles == 0 else 2) + _MEETING_COLUMN_US * others * config.columns
    of_column = _COLUMN_US[static.together] + _X_US / config.panels
    rate = _READ * (gpu.bandwidth or _BANDWIDTH) / (1 + _READ_AGAIN * again)
    read_us = 1e6 * config.programs * geo.nbytes / (geo.panels * geo.records) / rate
    record_us = max(_RECORD_US[static.bits] + of_column * config.columns, read_us)
    return _FEW_REST_US + stages * (_STAGE_US + config.partitions * config.each * record_us) + meeting


def _configs(
    problem: Problem, gpu: Gpu, panels: int, each: int, meeting_us: float, partitions: int = 4, columns: int | None = None
) -> list[Config]:
    """Numbers of programs for a tile, the best first: by the records of 64 rows that each multiplies, and whether programs share tiles."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    columns = columns or _columns(problem.m)
    static = compiled_for(problem, Config(columns, panels, each, 1, 1, partitions), clamp=False)
    together = 4 // partitions  # programs on a multiprocessor
    room = (gpu.shared - (together - 1) * 1024 - _BESIDE) // together
    stages = min(12, (room - (partitions - panels) * 256 * columns) // static.stage_bytes)
    tiles, steps, most = -(-problem.n // static.rows), -(-geo.records // static.depth), gpu.sms // -(-problem.m // columns)
    whole = -(-tiles // -(-tiles // (together * most)))
    if partitions == 2:
        return [Config(columns, panels, each, stages, whole, partitions)]
    # Of integers as measured on an H200 with 16 to 64 rows.
    record_us = (0.015 + 0.00035 * columns) * static.bits if static.integers else 0.10 + 0.0016 * columns
    met_us = 3 * meeting_us if static.integers else meeting_us

    def us(programs: int) -> float:
        meeting = 0.0 if tiles % programs == 0 else met_us if programs % tiles == 0 else 2 * met_us
        return panels * tiles * geo.records / programs * record_us + meeting

    # For each tile as many, where one more spares each a step.
    alike = [number for number in range(2, min(most // tiles, steps) + 1) if -(-steps // number) < -(-steps // (number - 1))]
    counts = whole, *(tiles * number for number in {*alike[:1], *alike[-_ALIKE:]}), min(most, tiles * steps)
    programs = sorted({count for count in counts if count <= most}, key=us)
    return [Config(columns, panels, each, stages, count) for count in programs]


def _columns(m: int) -> int:
    return next((size for size in (8, 16, 32) if m <= size), _WIDEST)


def row_tiles(problem: Problem, config: Config) -> int:
    return -(-problem.m // config.columns)


def gated(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """`config` as gates need it: whole tiles of two panels of them and two of what they gate, for about half of the multiprocessors or
    more; None where the shape or the format has no such."""
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    if problem.m > config.columns or problem.n % (4 * gpu_tiles.PANEL) or short or config.panels != 4:
        return None
    if 9 * problem.n < 4 * 4 * gpu_tiles.PANEL * gpu.sms:
        return None
    static = compiled_for(problem, config, clamp=False, gates="silu")
    stages = min(config.stages, (gpu.shared - _BESIDE - 2 * 256 * config.columns) // static.stage_bytes)
    return replace(config, stages=stages, programs=min(config.programs, problem.n // static.rows)) if stages > 1 else None


def compiled_for(problem: Problem, config: Config, *, clamp: bool, gates: str = "") -> Static:
    """Of floats, or of integers: as the problem computes."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    groups = max(1, gpu_tiles.RECORD // geo.padded)
    floats = problem.compute == "float" and not problem.sparse
    together = config.columns >= (16 if groups == 1 else 32) and not problem.sparse
    fewer = (groups > 1 and geo.format.bits == 8) or (together and groups * config.columns > 32)  # scales of weights than of sums
    waiting = programs_of_tile(problem, config)
    return Static(
        columns=config.columns,
        panels=config.panels,
        each=config.each,
        stages=config.stages,
        bits=geo.format.bits,
        groups=groups,
        wide=1 if geo.block_rows == 1 else max(1, geo.padded // gpu_tiles.RECORD),
        whole=geo.block_rows == 1,
        point=zero_of(geo.format) == "point",
        scale_bytes=geo.format.scale.itemsize,
        together=together,
        scaled=floats and geo.block_rows > 1 and fewer,
        lifted=floats and geo.format.code_bits == 4 and problem.dtype == torch.bfloat16,
        integers=problem.compute == "int8",
        clamp=clamp,
        partitions=config.partitions,
        table=has_floats(geo.format),
        gates=gates,
        sparse=problem.sparse,
        paired=problem.paired,
        others=0 if gates or not waiting else triton.next_power_of_2(waiting - 1),
    )


def programs_of_tile(problem: Problem, config: Config) -> int:
    """How many programs each tile has of which the last one waits for the others; 0 where none does: not all tiles have as many, or it
    would read more than `_AWAITED` columns."""
    together, more = divmod(config.programs, -(-problem.n // (64 * config.panels)))
    return together if config.partitions == 4 and not more and 0 < (together - 1) * config.columns <= _AWAITED else 0


def beside(problem: Problem, config: Config) -> int:
    """Bytes of memory where the sums of programs that share tiles meet, some more tiles than others; 0 where none do."""
    shared = config.partitions == 4 and -(-problem.n // (64 * config.panels)) % config.programs != 0
    if not shared or programs_of_tile(problem, config):
        return 0
    return 8 * config.programs * 64 * config.panels * config.columns * row_tiles(problem, config)
