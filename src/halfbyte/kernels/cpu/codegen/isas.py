"""The instruction sets that kernels are compiled for, and `current`, the one of this process."""

from __future__ import annotations

import functools

from halfbyte import env
from halfbyte.errors import KernelError, lookup
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import AMXInt8
from halfbyte.kernels.cpu.codegen.isa_arm import SVE, Neon, NeonDotprod, NeonI8mm
from halfbyte.kernels.cpu.codegen.isa_riscv import RV64GC, RVV
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX2, AVX512, AVX512BF16, AVX512VNNI, AVXVNNI
from halfbyte.machine import machine

ISAS: tuple[ISA, ...] = (
    *(AMXInt8(), AVX512BF16(), AVX512VNNI(), AVXVNNI(), AVX512(), AVX2()),
    *(SVE(512), NeonI8mm(), SVE(256), NeonDotprod(), Neon()),
    *(RVV(), RV64GC()),
    ISA(),
)  # of each architecture the best first


def native() -> list[ISA]:
    """Return those for this machine's architecture, whether its CPU has them or not, the best first."""
    return [isa for isa in ISAS if isa.arch in ("", machine().arch)]


@functools.cache
def _named(name: str | None) -> ISA:
    if name is None:
        return next(isa for isa in ISAS if isa.missing() is None)
    isa = lookup({isa.name: isa for isa in ISAS}, name, "the instruction set")
    if reason := isa.missing():
        raise KernelError(f"HALFBYTE_ISA asks for {name}, but {reason}; unset it to let halfbyte choose")
    return isa


def current() -> ISA:
    """Return the ISA that kernels are compiled for: the best that this CPU has, or what HALFBYTE_ISA says."""
    return _named(env.isa())
