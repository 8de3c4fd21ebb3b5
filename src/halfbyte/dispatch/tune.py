"""Measured times of kernels: from tuning this machine (`halfbyte tune`, HALFBYTE_TUNE=1), or from a table in the package.

A table is JSON that people can read and edit: for each kind of weight, dtype and shape, by the number of rows, the seconds
that each candidate's configs took.

    {"gpu": "NVIDIA H200", "arch": "sm_90", "sms": 132, "bandwidth": 4.8e12,
     "linear": {"w4_none_b128 float16 float 14336x4096": {"1": {"skinny": {"Config(…)": 1.2e-05}}}}}

This machine's stands in the cache folder and is believed for this GPU alone. The package's, in dispatch/tables, serve GPUs of their
architecture with as many multiprocessors, whose configs are the same: that of the nearest bandwidth first. float16 and bfloat16 stand
in for each other. A number of rows between two that were measured counts as the next power of two.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte import env
from halfbyte.errors import ArgumentError
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

Times = dict[str, dict[str, float]]  # candidate -> config -> seconds
_HALVES = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
_TABLES = Path(__file__).parent / "tables"


class Measured(NamedTuple):
    """Times, and the GPU that took them."""

    times: Times
    gpu: str


def measured(gpu: Gpu, problem: Problem, *, here: bool = False) -> Measured:
    """What is known of `problem` on `gpu`: candidate -> config -> seconds; only what was measured `here`. Nothing, as a rule."""
    rows = str(rows_class(problem.m))
    alike = _HALVES.get(problem.dtype, problem.dtype)
    for path in (table_path(gpu), *(() if here else _shipped(gpu))):
        for key in (kind(problem), kind(replace(problem, dtype=alike))):
            times = _table(path).get("linear", {}).get(key, {}).get(rows)
            if times is not None:
                return Measured(times, str(_table(path).get("gpu", gpu.name)))
    return Measured({}, "")


@cache
def _shipped(gpu: Gpu) -> tuple[Path, ...]:
    """The package's tables that serve `gpu`, the one to be believed most first."""
    found = []
    for path in sorted(_TABLES.glob("*.json")):
        table = _table(path)
        if (table.get("arch"), table.get("sms")) == (gpu.arch, gpu.sms):
            apart = abs(math.log(gpu.bandwidth / table["bandwidth"])) if gpu.bandwidth else 0.0
            found.append((table["gpu"] != gpu.name, apart, path))
    return tuple(path for *_, path in sorted(found))


def kind(problem: Problem) -> str:
    """What problems of all M with the same times have in common."""
    fmt, geo = problem.format, gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    scope = ("row" if geo.block_rows == 1 else f"b{geo.padded}") + "_2:4" * problem.sparse
    way = f"{problem.compute}_{problem.activation}" if problem.compute == "int8" else problem.compute
    return f"w{fmt.bits}_{fmt.zero}_{scope} {str(problem.dtype).removeprefix('torch.')} {way} {problem.n}x{problem.k}"


def rows_class(m: int) -> int:
    """The next power of two."""
    return 1 << max(0, m - 1).bit_length()


def table_path(gpu: Gpu) -> Path:
    """Where the times of this machine's GPU are kept."""
    return env.cache() / "tune" / (re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-") + ".json")


def keep(gpu: Gpu, problem: Problem, times: Times, path: Path | None = None) -> None:
    """Add to this machine's table. Two processes or threads may do so at once: the later one wins, and the file is whole at any time."""
    path = path or table_path(gpu)
    table = dict(_read(path)) or {"gpu": gpu.name, "arch": gpu.arch, "sms": gpu.sms, "bandwidth": gpu.bandwidth, "linear": {}}
    table["linear"].setdefault(kind(problem), {})[str(rows_class(problem.m))] = times
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    beside.write_text(json.dumps(table, indent=1), encoding="utf-8")
    os.replace(beside, path)
    _table.cache_clear()


@cache
def _table(path: Path) -> dict[str, Any]:
    try:
        return _read(path)
    except ArgumentError as error:
        warnings.warn(f"{error}; it is passed over", stacklevel=2)
        return {}


def _read(path: Path) -> dict[str, Any]:
    """A table, {} where there is none. Raises ArgumentError where the file is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} is not a table of times ({error}): delete it") from error
    sound = isinstance(table, dict) and isinstance(table.get("linear"), dict) and all(map(_is_entry, table["linear"].values()))
    if not sound:
        raise ArgumentError(f"{path} is not a table of times: delete it")
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
