"""Kernels for another CPU, run under qemu-user: the same objects that `jit` would load, linked into a small static program.

The program maps memory at ARENA, reads standard input into it, puts the addresses of functions where the input has their numbers,
runs the kernel that the arguments describe, on one thread, and writes the memory to standard output. It is made by LLVM like the
kernels: no compiler for that CPU and no C library is needed, only a linker.
"""

import copy
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.ir import Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA

ARENA = 1 << 36
IMAGE = ARENA + 4096  # what comes before is a header: bytes in all, how many places hold numbers of functions, the places
_SIZE = 1 << 25
_READ, _WRITE, _EXIT, _MMAP = 63, 64, 93, 222  # the same on every architecture that Linux came to late
_READABLE_WRITABLE, _PRIVATE_FIXED_ANONYMOUS = 3, 0x32
# syscall(six arguments, number): move the number to where the system wants it, call it, return.
_SYSCALL = {"aarch64": (0xAA0603E8, 0xD4000001, 0xD65F03C0), "riscv64": (0x00080893, 0x00000073, 0x00008067)}
_LINKERS = ("ld.lld", *(f"ld.lld-{version}" for version in range(25, 13, -1)), *(f"{arch}-linux-gnu-ld" for arch in _SYSCALL))


def _linker(arch: str) -> str | None:
    names = (name for name in _LINKERS if name.startswith(("ld.lld", arch)))
    return next((found for name in names if (found := shutil.which(name))), None)


def missing(arch: str) -> str | None:
    """Why code for `arch` can't be run here; None if it can."""
    if shutil.which(f"qemu-{arch}") is None:
        return f"qemu-{arch} is not installed (Debian: apt-get install qemu-user)"
    if _linker(arch) is None:
        return f"no linker for {arch} is installed (Debian: apt-get install lld)"
    return None


def _system(isa: ISA) -> str:
    """What takes the C library's place: system calls, and the functions into which LLVM turns loops that copy and fill."""
    module = Module('"no-builtins"')
    for name, kinds in (("memcpy", ["ptr", "ptr", "i64"]), ("memset", ["ptr", "i32", "i64"])):
        f = module.function(name, kinds, "ptr")
        to, source, size = f.parameters
        for i in f.loop(size):
            (to + i).store((source + i).load("i8") if name == "memcpy" else source.to("i8"))
        f.set_result(to)
    # A module apart from the calls: where LLVM saw this body, it would take them for unreachable.
    code = ", ".join(f"i32 {word}" for word in _SYSCALL[isa.arch])
    return f"{module.text()}\ndefine i64 @syscall({', '.join(['i64'] * 7)}) prologue [3 x i32] [{code}] {{ unreachable }}"


def _start(isa: ISA) -> str:
    """The program but for the kernels and the table of them."""
    module = Module(isa.attributes)
    f = module.function("_start", [])
    memory, table = Value(f, "ptr", f"inttoptr (i64 {ARENA} to ptr)"), Value(f, "ptr", "@functions")

    def syscall(number: int, *arguments: Value | int) -> Value:
        padded = [*arguments, *[0] * (6 - len(arguments)), number]
        return f.call("i64", "syscall", *(f.value("i64", a) for a in padded))

    def transfer(number: int, stream: int, size: Value) -> None:
        done = f.variable(f.value("i64", 0))

        def bytes_less_one() -> Value:  # at the stream's end or after a failure, that is greater than any size
            return syscall(number, stream, done.value + ARENA, size - done.value) - 1

        for count in f.draw(bytes_less_one, size):
            done.value = done.value + count + 1

    syscall(_MMAP, ARENA, _SIZE, _READABLE_WRITABLE, _PRIVATE_FIXED_ANONYMOUS, -1)
    transfer(_READ, 0, f.value("i64", _SIZE))
    for i in f.loop(memory.load("i64", 8)):
        place = memory + (memory + i * 8).load("i64", 16)
        place.store((table + place.load("i64") * 8).load("ptr"))
    f.call("void", "run", memory + (IMAGE - ARENA), f.value("i64", 1))
    transfer(_WRITE, 1, memory.load("i64"))
    syscall(_EXIT, 0)
    return f"{module.text()}\n@functions = external constant [0 x ptr]"


def _table(functions: list[str | None]) -> str:
    """The functions that a program has by their numbers, None for those that it has not."""
    declared = [f"declare void @{name}()" for name in functions if name]
    pointers = ", ".join(f"ptr @{name}" if name else "ptr null" for name in functions)
    return "\n".join([*declared, f"@functions = constant [{len(functions)} x ptr] [{pointers}]"])


class Emulator:
    """One CPU: `load` stands in for `jit.load`, `run` for running what is loaded."""

    def __init__(self, isa: ISA, cpu: str, folder: Path) -> None:
        self.isa, self.folder = copy.copy(isa), folder  # one of its own: halfbyte keeps what it compiled for an ISA
        self.qemu = [f"qemu-{isa.arch}", "-cpu", cpu]
        self.functions = [""]  # a function's number stands for its address, and 0 for none
        self.objects: dict[str, Path] = {}  # by function
        self.programs: dict[frozenset[str], Path] = {}
        self.load("runtime", runtime.build, isa)
        self.start, self.system = self._compile("start", _start(isa)), self._compile("system", _system(isa))

    def _compile(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.o"
        module = Module()
        module.text = lambda: text  # type: ignore[method-assign]
        path.write_bytes(jit.compile_object(module, self.isa))
        return path

    def load(self, name: str, build: Callable[[ISA], Module], isa: ISA) -> dict[str, int]:
        """As `jit.load`, with numbers in place of addresses."""
        module = build(isa)
        names = [function.name for function in module.functions]
        if names[0] not in self.objects:
            self.functions += names
            self.objects |= dict.fromkeys(names, self._compile(name, module.text()))
        return {n: self.functions.index(n) for n in names}

    def _program(self, numbers: set[int]) -> Path:
        """The program that has these functions."""
        used = frozenset(self.functions[n] for n in numbers)
        if used not in self.programs:
            table = self._compile("table", _table([name if name in used else None for name in self.functions]))
            linker = _linker(self.isa.arch)
            assert linker is not None
            path = self.folder / f"program{len(self.programs)}"
            objects = {table, self.start, self.system, self.objects["run"], *(self.objects[name] for name in used)}
            subprocess.run([linker, "-static", "-o", path, *sorted(objects)], check=True)
            self.programs[used] = path
        return self.programs[used]

    def run(self, image: bytes, places: list[int]) -> bytes:
        """`image`, which begins with a kernel's arguments and lies at IMAGE, after a run; at `places` it has functions' numbers."""
        before = IMAGE - ARENA
        size = before + len(image)
        assert size <= _SIZE
        header = struct.pack(f"<{2 + len(places)}q", size, len(places), *(before + place for place in places))
        numbers = {struct.unpack_from("<q", image, place)[0] for place in places} - {0}
        command = [*self.qemu, str(self._program(numbers))]
        done = subprocess.run(command, input=header.ljust(before, b"\0") + image, capture_output=True, timeout=600, check=False)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr.decode(errors='replace')}"
        assert len(done.stdout) == size
        return done.stdout[before:]
