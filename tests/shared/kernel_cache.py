"""What compilers made in earlier sessions of the tests, in a cache of the tests alone: most changes of the sources leave most kernels as
they are, and those are not compiled again.

by_sources()   the folder of CPU kernels that were compiled from the sources as they are
by_ir()        lets this process find the machine code of LLVM IR that any session has compiled, whatever sources it was made by
remembered()   any text or code, by all that it depends on
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llvmlite
import llvmlite.binding
import platformdirs

from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isa import ISA

KEPT_DAYS = 3


def by_sources() -> Path | None:
    """None where it can't be written, or where the sources have changed since they were imported."""
    digest = jit.source_digest()
    folder = _folder("kernels")
    if digest is None or folder is None:
        return None
    try:
        (folder / digest).mkdir(mode=0o700, exist_ok=True)
        os.utime(folder / digest)
    except OSError:
        return None
    return folder / digest


def by_ir() -> None:
    """Nothing but the IR, the target, LLVM and jit.py, which chooses LLVM's passes, decides on the machine code."""
    llvm = f"{llvmlite.__version__} {llvmlite.binding.llvm_version_info}"
    passes, compile_object = hashlib.sha256(Path(jit.__file__).read_bytes()).hexdigest(), jit.compile_object

    def found_or_compiled(module: Module, isa: ISA) -> bytes:
        target = f"{isa.triple} {isa.cpu} {isa.features} {isa.code_model}"
        return remembered("objects", f"{llvm} {passes} {target}\n{module.text()}", lambda: compile_object(module, isa))

    jit.compile_object = found_or_compiled


def remembered(kind: str, key: str, compute: Callable[[], bytes]) -> bytes:
    """What `compute()` returns, or has returned for this key in this session or an earlier one."""
    folder = _folder(kind)
    if folder is None:
        return compute()
    path = folder / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if content[:32] == _checksum(path, content[32:]):
            os.utime(path)
            return content[32:]
    body = compute()
    with contextlib.suppress(OSError):  # of a full disk, say
        handle, name = tempfile.mkstemp(dir=folder, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(path, body) + body)
        os.replace(name, path)
    return body


def _checksum(path: Path, body: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + body).digest()


@functools.cache
def _folder(kind: str) -> Path | None:
    """For the user alone; what no session used for some days is removed. None where it can't be written."""
    try:
        folder = platformdirs.user_cache_path("halfbyte-tests", appauthor=False) / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if path.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    except (OSError, RuntimeError):  # a user without a home
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
