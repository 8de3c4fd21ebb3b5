"""What the machine says of itself, and that it says something on systems that tell nothing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from halfbyte import machine as module
from halfbyte.machine import Caches, machine


def test_this_machine() -> None:
    m = machine()
    assert machine() is m
    assert m.arch
    assert m.arch == m.arch.lower()
    assert m.cpu
    assert m.llvm_cpu
    assert 1 <= m.cores <= (os.cpu_count() or 1)
    assert m.features
    assert all(feature == feature.lower() for feature in m.features)
    assert all(size is None or 1 << 10 <= size < 1 << 34 for size in m.caches)
    assert m.memory is None or m.memory >= 1 << 26


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 flags")
def test_features_agree_with_the_kernel() -> None:
    """The flags that kernels ask for, as Linux spells them."""
    linux = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split(":")[1].split())
    spellings = {
        "avx": "avx",
        "avx2": "avx2",
        "fma": "fma",
        "f16c": "f16c",
        "avxvnni": "avx_vnni",
        "avx512f": "avx512f",
        "avx512bw": "avx512bw",
        "avx512vl": "avx512vl",
        "avx512vnni": "avx512_vnni",
        "avx512bf16": "avx512_bf16",
    }
    assert {name for name in spellings if name in machine().features} == {name for name, flag in spellings.items() if flag in linux}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux can bind a process to CPUs")
def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})
    assert module._usable_cpus() == [3, 5]


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setitem(sys.modules, "llvmlite", None)  # import llvmlite raises ImportError
    monkeypatch.setattr(sys, "platform", "plan9")
    monkeypatch.setattr(module, "_SYSFS_CPUS", tmp_path / "absent")
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.setattr(os, "sysconf", refuse, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    monkeypatch.setattr(platform, "processor", lambda: "")
    m = machine.__wrapped__()
    assert (m.arch, m.cpu, m.vendor, m.features, m.llvm_cpu) == ("aarch64", "generic", None, frozenset({"neon"}), "generic")
    assert (m.cores, m.caches, m.memory) == (1, Caches(None, None, None), None)


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.skipif(sys.platform != "linux", reason="pretends on Linux to be another system")
def test_another_system_without_its_interfaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str) -> None:
    """No sysctlbyname and no winreg here: the answers are missing, the call is not."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(module, "_SYSFS_CPUS", tmp_path / "absent")
    m = machine.__wrapped__()
    assert m.cpu
    assert m.vendor is None
    assert m.cores >= 1
    assert m.caches == Caches(None, None, None)


def test_macos_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "machdep.cpu.brand_string": b"Apple M2\0",
        "hw.perflevel0.l1dcachesize": (131072).to_bytes(4, "little"),
        "hw.l1dcachesize": (65536).to_bytes(8, "little"),
        "hw.l2cachesize": (4 << 20).to_bytes(8, "little"),
    }
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "_sysctl", lambda name: answers.get(name, b""))
    m = machine.__wrapped__()
    assert (m.cpu, m.vendor, m.caches) == ("Apple M2", "Apple", Caches(131072, 4 << 20, None))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: X\n\nprocessor\t: 1\nmodel name\t: Y\n", ("X", "GenuineIntel")),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", ("", "0x41")),
        ("", ("", "")),
        ("nonsense", ("", "")),
    ],
)
def test_cpuinfo(text: str, found: tuple[str, str]) -> None:
    assert module._cpuinfo(text) == found


@pytest.mark.parametrize(
    ("text", "size"), [("32K\n", 32768), ("8M", 8 << 20), ("1G", 1 << 30), ("512", 512), ("0K", None), ("", None), ("K", None)]
)
def test_sizes(text: str, size: int | None) -> None:
    assert module._bytes(text) == size


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's folder of caches")
def test_caches_of_one_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "odd"), ("4", "Unified", "1G")]
    for number, row in enumerate(rows):
        folder = tmp_path / "cpu7" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size"), row, strict=True):
            (folder / name).write_text(value + "\n")
    monkeypatch.setattr(module, "_SYSFS_CPUS", tmp_path)
    assert module._caches(7) == Caches(48 << 10, 2 << 20, None)
    assert module._caches(8) == Caches(None, None, None)
