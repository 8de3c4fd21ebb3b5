"""From IR to callable code: `load` compiles with llvmlite, caches the object on disk, and links it into the process.

A file's name is the SHA-256 of everything that its object depends on: target, compiler version, and either what the IR is generated from
(the specification and the generators' source files), so that code in the cache is found without generating its IR, or the IR itself. The
file begins with the SHA-256 of its name and of what follows (names of functions, object), so that a damaged file, or a copy of another one,
is detected and replaced. The folder must belong to the user with mode 0700: code from a folder that others can write is never run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from halfbyte import env
from halfbyte.errors import KernelError
from halfbyte.kernels.cpu.codegen.ir import IMPORTED, Module
from halfbyte.kernels.cpu.codegen.isa import ISA

_lock = threading.RLock()

_FORMAT_VERSION = 3  # of the files
_ROOT = Path(__file__).parents[3]
# What kernels are generated from. Sizes and formats reach a generator through its specification, from files of these folders too.
_SOURCES = (
    "kernels/cpu/**/*.py",
    "kernels/crossing.py",
    "kernels/layer_kinds.py",
    "kernels/problem.py",
    "layouts/*.py",
    "formats/*.py",
    "machine.py",
)

if hasattr(os, "register_at_fork"):  # a child must not inherit a lock that a thread of its parent holds
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Linked:
    """The kernels that this process has linked, which live as long as it does: as many as it uses, of some kilobytes each.

    Keys hold all that the code depends on, so that nothing is invalidated. Guarded by `_lock`, but for `warned`: threads that meet the
    same failure at the same time may warn twice.

    Attributes:
        linker: LLVM's JIT linker, created with the first kernel.
        libraries: References: llvmlite frees the code of a library without one.
        loaded: Addresses of functions, by name, for each key of a kernel.
        folders: Where objects are looked for after the cache.
        warned: Folders, and failures, about which there was a warning.
    """

    def __init__(self) -> None:
        self.linker: object = None
        self.libraries: list[object] = []
        self.loaded: dict[str, dict[str, int]] = {}
        self.folders: dict[Path, None] = {}
        self.warned: set[str] = set()


_linked = _Linked()


@functools.cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # Function.fence is inline assembly


def _target_machine(isa: ISA) -> object:
    _initialize()
    target = llvm.Target.from_triple(isa.triple)
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, reloc="static", codemodel=isa.code_model)


def _optimized(text: str, isa: ISA) -> tuple[object, Any]:
    machine = _target_machine(isa)
    try:
        module = llvm.parse_assembly(f'target triple = "{isa.triple}"\n{text}')
        module.verify()
    except RuntimeError as error:
        what = f"the code generated for {isa.name} is not valid LLVM IR"
        raise KernelError(f"{what}: this is a fault in halfbyte, please report it ({error})") from error
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The emitter has unrolled and vectorized as it wants it.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


def compile_object(module: Module, isa: ISA) -> bytes:
    """Return the machine code of `module` for `isa`, as a relocatable object. This machine need not be able to run it."""
    with _lock:
        optimized, machine = _optimized(module.text(), isa)
        return bytes(machine.emit_object(optimized))


def compile_assembly(module: Module, isa: ISA) -> str:
    """Return the assembly of `module` for `isa`."""
    with _lock:
        optimized, machine = _optimized(module.text(), isa)
        return str(machine.emit_assembly(optimized))


def cache_folder() -> Path | None:
    """Return the folder of compiled objects, which is created if need be; None, with one warning, where it can't be used safely."""
    root = env.cache()
    folder = None if root is None else root / "cpu"
    reason = env.NO_HOME if folder is None else why_not_trusted(folder)
    if reason is None and folder is not None:
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "it can't be written"
    if reason is None:
        return folder
    if str(folder) not in _linked.warned:
        _linked.warned.add(str(folder))
        warnings.warn(
            f"compiled kernels are not cached{'' if folder is None else f' in {folder}'}: {reason}; "
            "every process compiles them anew until HALFBYTE_CACHE names a usable folder",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def read_from(folder: Path) -> None:
    """Look for compiled objects in a folder, too, as for those that come with an exported program. Nothing is written there."""
    _linked.folders[folder] = None


def why_not_trusted(folder: Path) -> str | None:
    """Return why the files of a folder are not used, as others could have written them; None: they are. Create the folder if need be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if hasattr(os, "getuid") and (info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077):
            owner = f"user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}"
            return f"it belongs to {owner}, and only a folder of your own with mode 700 is trusted"
        return None
    except OSError as error:
        return str(error)


def _checksum(path: Path, body: bytes) -> bytes:
    """Return the SHA-256 of a file's name and content: a valid file under another name is damaged."""
    return hashlib.sha256(f"{path.name}\n".encode() + body).digest()


def _read_cached(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, body = content[:32], content[32:]
    return body if _checksum(path, body) == digest else None


def _write_cached(path: Path, body: bytes) -> None:
    """Write a temporary file and rename it: a reader sees all of it or nothing. A failure, as of a full disk, is a warning alone."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(path, body) + body)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        if "write" not in _linked.warned:
            _linked.warned.add("write")
            message = f"a compiled kernel could not be cached ({error}); it will be compiled again next time"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _dump(name: str, make: Callable[[], Module], isa: ISA) -> None:
    folder = env.dump()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{isa.name}.ll").write_text(make().text())
        (folder / f"{name}.{isa.name}.s").write_text(compile_assembly(make(), isa))


def _why_not_linked(name: str, error: RuntimeError) -> str:
    if refusal := _executable_memory_refused():
        allow = "allow it for this process (systemd: MemoryDenyWriteExecute=no; SELinux: execmem)"
        return f"kernel {name} can't be loaded: the system forbids to execute memory that was written ({refusal}); {allow}"
    return f"kernel {name} can't be loaded: {error}"


def _executable_memory_refused() -> str | None:
    """Return why a page of this process can't be written and then executed, as compiling at run time requires; None if it can."""
    if os.name != "posix":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE)  # readable and writable
    anchor = ctypes.c_char.from_buffer(page)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    failed = libc.mprotect(ctypes.addressof(anchor), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    return os.strerror(ctypes.get_errno()) if failed else None


@functools.cache
def sources(patterns: tuple[str, ...] = _SOURCES) -> tuple[Path, ...]:
    """Return the files whose text is part of a key."""
    return tuple(sorted(path for pattern in patterns for path in _ROOT.glob(pattern)))


@functools.cache
def _digest(patterns: tuple[str, ...]) -> str:
    texts = (f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes() for path in sources(patterns))
    return hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()


def source_digest(patterns: tuple[str, ...] = _SOURCES) -> str | None:
    """Return the SHA-256 of the source files; None: there are none, or one was changed since this process may have imported it."""
    try:
        infos = [path.stat() for path in sources(patterns)]
        changed = any(max(info.st_mtime_ns, info.st_ctime_ns) > IMPORTED for info in infos)
        return None if changed or not infos else _digest(patterns)
    except OSError:
        return None


def _specification(build: Callable[[ISA], Module], isa: ISA) -> str | None:
    """Return what distinguishes the module of `build(isa)` from all others of the same source files; None: only its IR does.

    It is known for a function of this package, or a `partial` of one with dataclasses, which depend on nothing else.
    """
    call = functools.partial(build)  # of a partial: the same one
    function, arguments = call.func, call.args
    kinds: tuple[Any, ...] = (function, type(isa), *map(type, arguments))
    named = all(kind.__module__.startswith("halfbyte.kernels.cpu.") and "<" not in kind.__qualname__ for kind in kinds)
    if not named or call.keywords or not all(map(is_dataclass, arguments)):
        return None
    return repr((function.__module__, function.__qualname__, arguments, type(isa).__qualname__, sorted(vars(isa).items())))


def load(name: str, build: Callable[[ISA], Module], isa: ISA) -> dict[str, int]:
    """Return the addresses of the functions of the module that `build(isa)` generates, by name.

    Args:
        name: For people, in dumps and libraries.
        build: Called only where neither this process nor the cache has the code.
        isa: What the code is compiled for.

    Raises:
        KernelError: This CPU lacks what `isa` needs, or the system lets no process execute what it has written.
    """
    if reason := isa.missing():
        raise KernelError(f"kernels for {isa.name} can't run here: {reason}; unset HALFBYTE_ISA to let halfbyte choose")
    make = functools.cache(lambda: build(isa))
    generators, specification = source_digest(), _specification(build, isa)
    is_known = generators is not None and specification is not None
    source = f"{generators} {specification}" if is_known else make().text()
    target = f"{isa.triple} {isa.cpu} {isa.features} {isa.attributes} {isa.code_model} {llvmlite.__version__} {llvm.llvm_version_info}"
    key = hashlib.sha256(f"{_FORMAT_VERSION} {target}\n{source}".encode()).hexdigest()
    with _lock:
        if key in _linked.loaded:
            return _linked.loaded[key]
        _initialize()
        _dump(name, make, isa)
        folder = cache_folder()
        path = None if folder is None else folder / f"{key}.o"
        cached = [*([] if path is None else [path]), *(other / f"{key}.o" for other in _linked.folders)]
        body = next((body for file in cached if (body := _read_cached(file)) is not None), None)
        if body is None:
            body = f"{' '.join(f.name for f in make().functions)}\n".encode() + compile_object(make(), isa)
            if path is not None:
                _write_cached(path, body)
        names, _, image = body.partition(b"\n")
        functions = names.decode().split()
        if _linked.linker is None:
            _linked.linker = llvm.create_lljit_compiler(_target_machine(isa))
        builder = llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
        for function in functions:
            builder.export_symbol(function)
        try:
            library = builder.link(_linked.linker, f"{name}.{key[:16]}.{len(_linked.libraries)}")
        except RuntimeError as error:
            raise KernelError(_why_not_linked(name, error)) from error
        _linked.libraries.append(library)
        _linked.loaded[key] = {function: int(library[function]) for function in functions}
        return _linked.loaded[key]
