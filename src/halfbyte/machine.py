"""The machine that halfbyte runs on: its CPU and its GPUs. Properties that the system does not report are None."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from halfbyte.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# Vendors as x86's CPUID, an Arm MIDR register (through /proc/cpuinfo) and Windows spell them.
_VENDORS = {
    "AuthenticAMD": "AMD",
    "GenuineIntel": "Intel",
    "0x41": "Arm",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}
# Arm features that LLVM does not report everywhere: LLVM's name -> the names of Linux (/proc/cpuinfo) and of macOS (sysctl
# hw.optional.arm.*), and Windows' number (IsProcessorFeaturePresent).
_ARM_FEATURES = {
    "dotprod": ("asimddp", "FEAT_DotProd", 43),
    "i8mm": ("i8mm", "FEAT_I8MM", 66),
    "bf16": ("bf16", "FEAT_BF16", 68),
    "fullfp16": ("asimdhp", "FEAT_FP16", 67),
    "sve": ("sve", "", 0),
}
_PR_SVE_GET_VL = 51
_ARCHES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
_SYSFS_CPUS = Path("/sys/devices/system/cpu")


class Caches(NamedTuple):
    """Bytes of the caches that one core sees (a shared one counts whole); None where unknown or absent."""

    l1d: int | None = None
    l2: int | None = None
    l3: int | None = None


@dataclass(frozen=True)
class Machine:
    """What kernels need to know about the CPU.

    arch      "x86_64", "aarch64", or what the operating system says in lower case
    cpu       the brand, for people to read
    vendor    "AMD", "Intel", "Arm", "Apple", …
    features  what the CPU has and the operating system has enabled, as LLVM spells it: "avx2", "fma", "avx512vnni", "dotprod", …;
              and "sve256" for SVE with vectors of 256 bits
    llvm_cpu  LLVM's name, such as "znver3"; a virtual machine may lack features that the name implies, so ask `features`
    cores     logical CPUs that this process may use
    caches    of the first of those CPUs
    memory    bytes of main memory
    """

    arch: str
    cpu: str
    vendor: str | None
    features: frozenset[str]
    llvm_cpu: str
    cores: int
    caches: Caches
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """What kernels need to know about a GPU.

    name        the product, for people to read
    backend     "cuda" or "hip"
    capability  (major, minor): (9, 0) is Hopper
    arch        as compilers spell it: "sm_90", "gfx942"
    sms         multiprocessors (AMD: compute units)
    l2          bytes of the second-level cache
    shared      bytes of shared memory that one block may use
    memory      bytes of device memory
    bandwidth   bytes per second between that memory and the chip, from its clock and width; None where unknown
    clock       Hz that the multiprocessors reach; None where unknown
    """

    name: str
    backend: str
    capability: tuple[int, int]
    arch: str
    sms: int
    l2: int
    shared: int
    memory: int
    bandwidth: float | None = None
    clock: float | None = None


# A reference GPU for each architecture that kernels are compiled for.
GPUS: dict[str, Gpu] = {
    gpu.arch: gpu
    for gpu in (
        Gpu("NVIDIA A100-SXM4-80GB", "cuda", (8, 0), "sm_80", 108, 40 << 20, 163 << 10, 80 << 30, 2.04e12, 1.41e9),
        Gpu("NVIDIA GeForce RTX 3090", "cuda", (8, 6), "sm_86", 82, 6 << 20, 99 << 10, 24 << 30, 0.936e12, 1.70e9),
        Gpu("NVIDIA L40S", "cuda", (8, 9), "sm_89", 142, 96 << 20, 99 << 10, 48 << 30, 0.864e12, 2.52e9),
        Gpu("NVIDIA H200", "cuda", (9, 0), "sm_90", 132, 60 << 20, 227 << 10, 141 << 30, 4.8e12, 1.98e9),
        Gpu("NVIDIA B200", "cuda", (10, 0), "sm_100", 148, 126 << 20, 227 << 10, 180 << 30, 8.0e12, 1.97e9),
        Gpu("NVIDIA GeForce RTX 5090", "cuda", (12, 0), "sm_120", 170, 96 << 20, 99 << 10, 32 << 30, 1.79e12, 2.41e9),
        Gpu("AMD Instinct MI300X", "hip", (9, 4), "gfx942", 304, 4 << 20, 64 << 10, 192 << 30, 5.3e12, 2.10e9),
    )
}


@cache
def machine() -> Machine:
    """This machine; queried once."""
    llvm_cpu, features = _llvm()
    brand, vendor = _brand()
    arch = platform.machine().lower()
    cpus = _usable_cpus()
    return Machine(
        arch=_ARCHES.get(arch, arch),
        cpu=brand or platform.processor() or llvm_cpu,
        vendor=_VENDORS.get(vendor, vendor) or None,
        features=features | _arm_features() if arch in ("aarch64", "arm64") else features,
        llvm_cpu=llvm_cpu,
        cores=len(cpus),
        caches=_caches(cpus[0]),
        memory=_memory(),
    )


def named_device(name: str | torch.device) -> torch.device | None:
    """torch's device of that name; None where there is none."""
    import torch

    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        return None


@cache
def gpu(index: int = 0) -> Gpu:
    """The GPU that torch calls cuda:`index`; queried once. Raises UnsupportedError where there is none."""
    import torch

    if not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
        count = torch.cuda.device_count()
        remedy = "use cuda:0" if count else "use cpu"
        raise UnsupportedError(f"there is no device cuda:{index}, torch {torch.__version__} sees {count} GPUs: {remedy}")
    found = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    # torch gives clocks in kHz; memory transfers data at both edges.
    clock, memory_clock, width = (getattr(found, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width"))
    return Gpu(
        name=found.name,
        backend="hip" if hip else "cuda",
        capability=(found.major, found.minor),
        arch=found.gcnArchName.split(":")[0] if hip else f"sm_{found.major}{found.minor}",
        sms=found.multi_processor_count,
        l2=found.L2_cache_size,
        shared=getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),
        memory=found.total_memory,
        bandwidth=2e3 * memory_clock * width / 8 or None,
        clock=1e3 * clock or None,
    )


def _llvm() -> tuple[str, frozenset[str]]:
    # llvmlite may be missing on a machine that runs GPU kernels only.
    with suppress(ImportError, OSError, RuntimeError):
        from llvmlite import binding

        name = binding.get_host_cpu_name()
        # LLVM asks the CPU and, for the wide registers, whether the operating system saves them.
        return name, frozenset(feature.lower() for feature, present in binding.get_host_cpu_features().items() if present)
    return "generic", frozenset()


def _arm_features() -> frozenset[str]:
    found = set[str]()
    with suppress(OSError, AttributeError):
        if sys.platform == "darwin":
            found = {name for name, (_, apple, _) in _ARM_FEATURES.items() if apple and any(_sysctl(f"hw.optional.arm.{apple}"))}
        elif sys.platform == "win32":
            found = {name for name, (*_, number) in _ARM_FEATURES.items() if number and _windows_has(number)}
        elif sys.platform == "linux":
            words = _fields(Path("/proc/cpuinfo").read_text(errors="replace")).get("features", "").split()
            found = {name for name, (linux, *_) in _ARM_FEATURES.items() if linux in words}
            if "sve" in found:
                found.add(f"sve{8 * _sve_bytes()}")
    return frozenset(found | {"neon"})  # which these systems' calling conventions take for granted


def _windows_has(number: int) -> bool:
    import ctypes

    return bool(ctypes.CDLL("kernel32").IsProcessorFeaturePresent(number))


def _sve_bytes() -> int:
    """Bytes of an SVE vector."""
    import ctypes

    return int(ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)) & 0xFFFF


def _usable_cpus() -> list[int]:
    if sys.platform == "linux":
        with suppress(OSError):
            return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _brand() -> tuple[str, str]:
    """(brand, vendor), empty where unknown."""
    brand = vendor = ""
    with suppress(ImportError, OSError, AttributeError):
        if sys.platform == "win32":
            import winreg

            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                brand = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
                vendor = str(winreg.QueryValueEx(key, "VendorIdentifier")[0]).strip()
        elif sys.platform == "darwin":
            brand = _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode("utf-8", "replace")
            vendor = "Apple" if brand.startswith("Apple") else _sysctl("machdep.cpu.vendor").rstrip(b"\0").decode("utf-8", "replace")
        else:
            brand, vendor = _cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
    return brand, vendor


def _cpuinfo(text: str) -> tuple[str, str]:
    """(brand, vendor) of the first CPU in the text of /proc/cpuinfo. Arm gives no brand."""
    fields = _fields(text)
    return fields.get("model name", ""), fields.get("vendor_id") or fields.get("cpu implementer", "")


def _fields(text: str) -> dict[str, str]:
    """The first value of each field in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    return fields


def _caches(cpu: int) -> Caches:
    sizes: dict[str, int | None] = {}
    with suppress(OSError, AttributeError):
        if sys.platform == "darwin":
            for level in ("l1d", "l2", "l3"):
                # Apple's CPUs list caches by type of core, performance cores first.
                size = _sysctl(f"hw.perflevel0.{level}cachesize") or _sysctl(f"hw.{level}cachesize")
                sizes[level] = int.from_bytes(size, "little") or None
        else:
            for index in sorted((_SYSFS_CPUS / f"cpu{cpu}" / "cache").glob("index*")):
                if (index / "type").read_text().strip() != "Instruction":
                    level = (index / "level").read_text().strip()
                    sizes["l1d" if level == "1" else f"l{level}"] = _bytes((index / "size").read_text())
    return Caches(sizes.get("l1d"), sizes.get("l2"), sizes.get("l3"))


def _bytes(text: str) -> int | None:
    """Bytes that Linux means by "32K" or "8M"."""
    text = text.strip()
    number, unit = text.rstrip("KMG"), text.lstrip("0123456789")
    if not number.isdecimal() or unit not in ("", "K", "M", "G"):
        return None
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit] or None


def _memory() -> int | None:
    with suppress(OSError, ValueError, AttributeError):  # Windows has no sysconf
        if sys.platform != "win32":
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return total if total > 0 else None
    return None


def _sysctl(name: str) -> bytes:
    """The bytes of a macOS kernel variable, empty where there is none of that name."""
    import ctypes

    size = ctypes.c_size_t(256)
    buffer = ctypes.create_string_buffer(size.value)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, 0)
    return b"" if failed else buffer.raw[: size.value]
