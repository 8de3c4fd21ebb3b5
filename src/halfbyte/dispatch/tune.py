"""Measured times of kernels: from tuning this machine (`halfbyte tune`, HALFBYTE_TUNE=1), or from a table in the package.

A table is JSON that people can read and edit: for each kind of weight, dtype and shape, by the number of rows, the seconds
that each candidate's configs took.

    {"gpu": "NVIDIA H200", "arch": "sm_90", "sms": 132, "bandwidth": 4.8e12,
     "linear": {"w4_none_b128 float16 float 14336x4096": {"1": {"skinny": {"Config(…)": 1.2e-05}}}}}

This machine's stands in the cache folder and is believed for this GPU alone, whose name it holds. Where there is no such folder, it
can't be written or what is there is damaged, times are known to the process that measured them, with one warning. The package's, in
dispatch/tables, serve GPUs of their architecture with as many multiprocessors, whose configs are the same: that of the nearest bandwidth
first. float16 and bfloat16 stand in for each other, and integers with the usual scale for codebooks and other scales. A number of rows
between two that were measured counts as the next power of two.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte import env
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import Format, usual_scale
from halfbyte.io.files import write_whole
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

Times = dict[str, dict[str, float]]  # candidate -> config -> seconds
_HALVES = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
_TABLES = Path(__file__).parent / "tables"
# Tables that could not be written, by the GPU's name, with one entry for each problem that this process has measured, until it ends: from
# the first on that could not be written, all are here. Threads that measure at the same time: the later table wins, as in the file.
_unsaved: dict[str, dict[str, object]] = {}


class Measured(NamedTuple):
    """Times, and the GPU that took them."""

    times: Times
    gpu: str


def measured(gpu: Gpu, problem: Problem, *, here: bool = False) -> Measured:
    """What is known of `problem` on `gpu`: candidate -> config -> seconds; only what was measured `here`. Nothing, as a rule."""
    rows, fmt = str(rows_class(problem.m)), problem.format
    dtypes = problem.dtype, _HALVES.get(problem.dtype, problem.dtype)
    formats = fmt, Format(fmt.bits, fmt.block, fmt.zero, usual_scale(fmt.block))
    keys = [kind(replace(problem, format=one, dtype=dtype)) for one in formats for dtype in dtypes]
    for table in (_local_table(gpu), *(() if here else map(_table, _shipped(gpu)))):
        for key in keys:
            times = table.get("linear", {}).get(key, {}).get(rows)
            if times is not None:
                return Measured(times, str(table.get("gpu", gpu.name)))
    return Measured({}, "")


def _local_table(gpu: Gpu) -> dict[str, object]:
    """This machine's table of a GPU, {} where there is none."""
    if (table := _unsaved.get(gpu.name)) is not None:
        return table
    path = table_path(gpu)
    return {} if path is None else _table(path, gpu.name)


@cache
def _shipped(gpu: Gpu) -> tuple[Path, ...]:
    """The package's tables that serve `gpu`, the one to be believed most first."""
    found = []
    for path in sorted(_TABLES.glob("*.json")):
        table = _table(path)
        if (table.get("arch"), table.get("sms")) == (gpu.arch, gpu.sms):
            bandwidth_distance = abs(math.log(gpu.bandwidth / table["bandwidth"])) if gpu.bandwidth else 0.0
            found.append((table["gpu"] != gpu.name, bandwidth_distance, path))
    return tuple(path for *_, path in sorted(found))


def kind(problem: Problem) -> str:
    """What problems of all M with the same times have in common."""
    fmt, geo = problem.format, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    scope = ("row" if geo.block_rows == 1 else f"b{geo.padded}") + "_2:4" * problem.sparse
    scale = "" if fmt.scale == usual_scale(fmt.block) else f"_{str(fmt.scale).removeprefix('torch.')}"
    codes = f"{fmt.family if fmt.codebook else f'w{fmt.bits}'}_{fmt.zero}"
    way = f"{problem.compute}_{problem.activation}" if problem.compute == "int8" else problem.compute
    return f"{codes}_{scope}{scale} {str(problem.dtype).removeprefix('torch.')} {way} {problem.n}x{problem.k}"


def rows_class(m: int) -> int:
    """The next power of two."""
    return 1 << max(0, m - 1).bit_length()


def table_path(gpu: Gpu) -> Path | None:
    """Where the times of this machine's GPU are kept; None where the user has no home folder and HALFBYTE_CACHE is not set."""
    root = env.cache()
    return None if root is None else root / "tune" / (re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-") + ".json")


def written(gpu: Gpu) -> Path | None:
    """The file with this machine's times, if it is there and none are known to this process alone."""
    path = table_path(gpu)
    return path if path is not None and gpu.name not in _unsaved and path.is_file() else None


def keep(gpu: Gpu, problem: Problem, times: Times, path: Path | None = None) -> None:
    """Add to this machine's table. Two processes or threads may do so at once: the later one wins, and the file is whole at any time.

    Where it can't be written, this process alone knows the times, and a warning says so once.
    """
    path = path or table_path(gpu)
    if gpu.name not in _unsaved:
        reason: object = env.NO_HOME
        try:
            if path is not None:
                _write(path, _with(dict(_read(path, gpu.name)), gpu, problem, times))
                return
        except (ArgumentError, OSError) as error:
            reason = error
        advice = "until HALFBYTE_CACHE names a usable folder, they are lost when the process ends"
        warnings.warn(f"measured times of {gpu.name} are not written ({reason}): {advice}", stacklevel=2)
    _unsaved[gpu.name] = _with(_unsaved.get(gpu.name, {}), gpu, problem, times)


def _with(table: dict[str, Any], gpu: Gpu, problem: Problem, times: Times) -> dict[str, object]:
    """A table with times added."""
    table = table or {"gpu": gpu.name, "arch": gpu.arch, "sms": gpu.sms, "bandwidth": gpu.bandwidth, "linear": {}}
    table["linear"].setdefault(kind(problem), {})[str(rows_class(problem.m))] = times
    return table


def _write(path: Path, table: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(table, indent=1).encode())
    _table.cache_clear()


@cache
def _table(path: Path, gpu: str | None = None) -> dict[str, Any]:
    """A table, of the GPU with this name; {} where there is none, with a warning where the file is damaged or another's."""
    try:
        return _read(path, gpu)
    except ArgumentError as error:
        warnings.warn(f"{error}; it is passed over", stacklevel=2)
        return {}


def _read(path: Path, gpu: str | None = None) -> dict[str, object]:
    """A table, {} where there is none. Raises ArgumentError where the file is none, or not one of this GPU."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a table of times ({error}): delete it") from error
    sound = isinstance(table, dict) and isinstance(table.get("linear"), dict) and all(map(_is_entry, table["linear"].values()))
    if not sound:
        raise ArgumentError(f"{path} is not a table of times: delete it")
    if gpu is not None and table.get("gpu") != gpu:
        raise ArgumentError(f"{path} is a table of times of {table.get('gpu')!r}, not of {gpu}: delete it")
    return table  # type: ignore[no-any-return]


def _is_entry(by_rows: object) -> bool:
    return isinstance(by_rows, dict) and all(
        isinstance(by_candidate, dict)
        and all(
            isinstance(by_config, dict) and all(isinstance(seconds, float) and seconds > 0 for seconds in by_config.values())
            for by_config in by_candidate.values()
        )
        for by_candidate in by_rows.values()
    )
