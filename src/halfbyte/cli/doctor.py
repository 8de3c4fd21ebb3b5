"""`halfbyte doctor`: shows the machine's properties and tests the kernels on it."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte import __version__, env
from halfbyte.cli.shared.output import Commands, add_command, print_json, progress
from halfbyte.errors import HalfbyteError
from halfbyte.versions import TESTED, installed_version, why_untested

if TYPE_CHECKING:
    from halfbyte.cli.shared.selftest import Result

_PACKAGES = ("torch", "triton", "llvmlite", "numpy", "safetensors", "transformers", "diffusers", "peft", "uvicorn", "vllm")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        run,
        "check the machine and the kernels",
        "Show versions, CPU, GPUs, instruction set, threads, cache and environment variables, and test every kernel against the float64 "
        "reference. The exit code is 1 if anything is wrong.",
    )
    parser.add_argument("--no-test", action="store_true", help="skip the tests of the kernels")


def run(args: argparse.Namespace) -> int:
    parts = {
        "versions": _versions,
        "cpu": _cpu,
        "isa": _isa,
        "threads": _threads,
        "gpus": _gpus,
        "cache": _cache,
        "variables": _variables,
    }
    found: dict[str, dict[str, object] | None] = {}
    faults: list[str] = []
    for name, part in parts.items():
        found[name] = _find(part, faults)
        if not args.json:
            _print_part(name, found[name])
    tests = [] if args.no_test or faults else _test(args)
    failures = [f"{test.op} {test.format} on {test.device}: {test.fault}" for test in tests if test.fault is not None]
    faults += failures
    if args.json:
        print_json({**found, "tests": [test.to_json() for test in tests], "faults": faults})
        return 1 if faults else 0
    if tests:
        print(f"{len(tests) - len(failures)} of {len(tests)} passed")
    for fault in faults:
        print(f"FAULT  {fault}")
    return 1 if faults else 0


def _find(part: Callable[[], dict[str, object]], faults: list[str]) -> dict[str, object] | None:
    try:
        return part()
    except HalfbyteError as error:  # invalid variables are among the faults to report
        faults.append(str(error))
        return None


def _test(args: argparse.Namespace) -> list[Result]:
    """Run all tests; without --json each result is printed as soon as it is known."""
    from halfbyte.cli.shared import selftest

    results = []
    checks = selftest.checks()
    titles = ("kernel", "format", "device")
    widths = [max(map(len, column)) for column in zip(titles, *((c.op, c.format, c.device) for c in checks), strict=True)]

    def line(words: Iterable[str], cases: object, ms: object, result: str) -> str:
        named = (word.ljust(width) for word, width in zip(words, widths, strict=True))
        return f"{'  '.join(named)}  {cases:>5}  {ms:>6}  {result}"

    if not args.json:
        print(line(titles, "cases", "ms", "result"), flush=True)
    with ExitStack() as stack:
        advance = stack.enter_context(progress(args, "testing kernels")) if args.json else None
        for done in selftest.run(checks):
            results.append(done)
            if advance is not None:
                advance(len(results), len(checks), f"{done.op} {done.format} on {done.device}")
            else:
                words = done.op, done.format, done.device
                print(line(words, done.cases, f"{done.ms:.0f}", "PASS" if done.passed else "FAIL"), flush=True)
    return results


def _versions() -> dict[str, object]:
    builds = {name: tested.builds for name, tested in TESTED.items()}
    installed = {name: installed_version(name, *builds.get(name, ())) if find_spec(name) else None for name in _PACKAGES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = {name: tested for name, tested in TESTED.items() if installed[tested.package or name]}
        untested = [f"{reason}: {tested.off}" for name, tested in here.items() if (reason := why_untested(name)) is not None]
    about = {"halfbyte": __version__, "python": platform.python_version(), "system": platform.platform()}
    return {**about, **installed, "untested": untested}


def _cpu() -> dict[str, object]:
    from halfbyte.machine import machine

    here = machine()
    return {
        "name": here.cpu,
        "arch": here.arch,
        "vendor": here.vendor,
        "llvm": here.llvm_cpu,
        "cores": here.cores,
        "memory": here.memory,
        "caches": here.caches._asdict(),
        "features": sorted(here.features),
    }


def _isa() -> dict[str, object]:
    from halfbyte.kernels.cpu.codegen.isas import current, native

    return {"chosen": current().name, "others": {isa.name: isa.missing() or "available" for isa in native() if isa.name != current().name}}


def _threads() -> dict[str, object]:
    from halfbyte.kernels.cpu.codegen import runtime

    return {"count": runtime.threads(), "runtime": runtime.name()}


def _gpus() -> dict[str, object]:
    import torch

    from halfbyte.dispatch import tune
    from halfbyte.dispatch.explain_gpu import launcher
    from halfbyte.dispatch.gpu import why_no_triton
    from halfbyte.machine import gpu

    devices = {}
    for i in range(torch.cuda.device_count()):
        found = gpu(i)
        size = {"multiprocessors": found.sms, "memory": found.memory, "l2": found.l2}
        tuned = tune.written(found) is not None
        devices[f"cuda:{i}"] = {"name": found.name, "arch": found.arch, **size, "launcher": launcher(i), "tuned": tuned}
    return {"devices": devices, "trouble": why_no_triton() if devices else None}


def _cache() -> dict[str, object]:
    from halfbyte.kernels.cpu.codegen import jit
    from halfbyte.language import packed_cache

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = jit.cache_folder() is not None
    folder = env.cache()
    objects = [] if folder is None else list(_sizes(folder))
    problem = "; ".join(str(warning.message) for warning in caught) or None
    name = None if folder is None else str(folder)
    packed = packed_cache.summary()
    return {"folder": name, "usable": usable, "trouble": problem, "files": len(objects), "bytes": sum(objects), "packed": packed}


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file below `folder`; files that another process renames meanwhile are left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.stat(os.path.join(parent, name)).st_size


def _variables() -> dict[str, object]:
    known = {variable.name: os.environ[variable.name] for variable in env.VARIABLES if os.environ.get(variable.name)}
    known |= {name: "set, not shown" for name in known if name in env.SECRET}
    return {"set": known, "unknown": env.unknown()}


def _print_part(name: str, part: dict[str, object] | None) -> None:
    for line in [] if part is None else LINES[name](part):
        print(f"{name:10} {line}", flush=True)
        name = ""


def _lines_versions(versions: dict[str, Any]) -> list[str]:
    named = ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items() if name != "untested")
    return [named, *(f"private fast paths are off: {reason}" for reason in versions["untested"])]


def _lines_cpu(cpu: dict[str, Any]) -> list[str]:
    caches = ", ".join(f"{name.upper()} {level >> 10} KiB" for name, level in cpu["caches"].items() if level)
    memory = "" if cpu["memory"] is None else f", {cpu['memory'] / 1e9:.1f} GB of memory"
    return [f"{cpu['name']} ({cpu['arch']}, {cpu['llvm']}), {cpu['cores']} cores{memory}", caches or "caches unknown"]


def _lines_gpus(gpus: dict[str, Any]) -> list[str]:
    lines = [
        f"{device}: {found['name']} ({found['arch']}), {found['multiprocessors']} multiprocessors, {found['memory'] / 1e9:.1f} GB, "
        f"{'tuned' if found['tuned'] else 'not tuned'}; launcher: {found['launcher']}"
        for device, found in gpus["devices"].items()
    ]
    return [*lines, *filter(None, [gpus["trouble"]])] or ["none"]


def _lines_cache(cache: dict[str, Any]) -> list[str]:
    from halfbyte.memory import size_text

    packed = cache["packed"]
    models = f"packed weights of {packed['models']} models, {size_text(packed['bytes'])} of at most {size_text(packed['limit'])}"
    models += "" if packed["trouble"] is None else f"; none are stored: {packed['trouble']}"
    return [f"{cache['folder'] or 'none'}: {cache['files']} files, {size_text(cache['bytes'])}", models, *filter(None, [cache["trouble"]])]


def _lines_variables(variables: dict[str, Any]) -> list[str]:
    lines = [f"{name}={value}" for name, value in variables["set"].items()] or ["none set"]
    return lines + [f"{name} is not a variable of halfbyte; did you mean {_normalized(name)}?" for name in variables["unknown"]]


def _normalized(name: str) -> str:
    names = [variable.name for variable in env.VARIABLES]
    return (get_close_matches(name, names, 1, 0.0) or names)[0]


LINES: dict[str, Callable[[Any], list[str]]] = {
    "versions": _lines_versions,
    "cpu": _lines_cpu,
    "isa": lambda part: [f"{part['chosen']} is used", *(f"{name}: {reason}" for name, reason in part["others"].items())],
    "threads": lambda part: [f"{part['count']}, {part['runtime']}"],
    "gpus": _lines_gpus,
    "cache": _lines_cache,
    "variables": _lines_variables,
}
