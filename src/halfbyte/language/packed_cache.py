"""Stores the packed weights of language models in the cache folder: opening a model again maps them, and packs nothing.

Used by `checkpoint_tensors.py`. A model has a folder `packed/<key>` in the cache folder, with complete files of some 128 MB
(`packed_files.py`). The key is a SHA-256 of

- the files of the checkpoint: size, inode, times of the last change of content (mtime) and of content or inode (ctime), and samples of the
  content. Whoever writes or replaces a file changes its ctime, which no program can set; the samples see most of what a file system without
  such times or a clock that was set back would hide. Weights of files that were changed within the last 2 seconds, which is as coarse as
  times may be, or while they were packed, are not stored.
- halfbyte's source code that reads, quantizes and packs weights, the instruction set, and the settings.

Files are written by a thread in the background after the model was opened. A process that ends does not wait for it: the files that are
complete stay, and the next process writes the others. The least recently used models are removed beyond `HALFBYTE_PACKED_GB`.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte import env
from halfbyte.dispatch.packed import packed_format
from halfbyte.formats.spec import Format
from halfbyte.io.files import open_unbuffered
from halfbyte.language import packed_files
from halfbyte.language.packed_files import DamagedError, PackedFile, Stored
from halfbyte.layouts import cpu_tiles, experts
from halfbyte.layouts.base import Packed

LEAST = 64 << 20  # bytes of packed weights: smaller models are packed as fast
_FILE = 128 << 20  # bytes of a file, about
_NICE = 10  # of the thread that writes: threads that compute come first
_SETTLED = 2_000_000_000  # ns since the last change of a file
_EDGE_BYTES, _SAMPLES, _SAMPLE_BYTES = 1 << 16, 64, 1 << 12  # read at each end of a file, and in so many places between them
_RESERVE = 10 * 10**9  # bytes of the disk that are left free, or a tenth of it
_FOLDERS = (
    *("checkpoint", "decoder", "formats", "io", "kernels/cpu", "kernels/gpu/runtime", "language", "layouts", "nn", "ops", "quantizers"),
)
_PATTERNS = (*(f"{name}/**/*.py" for name in _FOLDERS), "kernels/*.py", "kernels/gpu/*.py", "dispatch/*.py")


class _Writer(threading.Thread):
    """Stores the packed weights of a model; a type of its own, by which `wait` finds all of them."""


class _StoppedError(Exception):
    """The process ends."""


_stopped = threading.Event()


class _FileState(NamedTuple):
    """What changes with every change of a file."""

    bytes: int
    inode: int
    modified: int
    changed: int


def _state(path: Path) -> _FileState:
    info = path.stat()
    return _FileState(info.st_size, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)


class PackedCache:
    """The packed weights of one model."""

    def __init__(self, folder: Path, states: dict[Path, _FileState]) -> None:
        """Map what is stored of a model.

        Args:
            folder: The model's folder in the cache.
            states: Of the files of its checkpoint, when they were opened.
        """
        self._folder, self._states, self._opened = folder, states, time.time_ns()
        self._stored: dict[str, tuple[PackedFile, Stored]] = {}
        self._read: dict[str, tuple[PackedFile, Stored, Tensor]] = {}
        self._new: dict[str, tuple[Stored, Tensor]] = {}
        self._lock = threading.Lock()
        with suppress(OSError):
            for path in folder.glob(f"*{packed_files.SUFFIX}"):
                self._map(path)
        if self._stored:
            with suppress(OSError):  # of a folder that cannot be written
                os.utime(folder)

    def _map(self, path: Path) -> None:
        """Map a file, or delete it where it is damaged."""
        try:
            file = PackedFile(path)
        except (DamagedError, OSError, ValueError):  # ValueError: of a file that was truncated before it was mapped
            with suppress(OSError):
                path.unlink()  # it is written again
            return
        self._stored |= {weight.name: (file, weight) for weight in file.weights}

    def weight(self, names: Sequence[str], fmt: Format, shape: tuple[int, ...], sparse: bool | None) -> Packed | None:
        """Return a weight of the checkpoint that is stored, or None.

        Args:
            names: The tensors of the checkpoint, joined along N.
            fmt: Of their codes.
            shape: Of all together.
            sparse: As for `ops.pack`.
        """
        here = packed_format(fmt, on_cpu=True)
        source_format = None if here == fmt else fmt
        origin = None if source_format is None else str(source_format), sparse
        found = self._found(names, str(here), shape)
        if found is None:
            return None
        stored, data = found
        layout = stored.layout.removeprefix(experts.PREFIX)
        if layout not in (cpu_tiles.NAME, cpu_tiles.SPARSE) or (stored.source_format, stored.sparse) != origin:
            return None
        matrices = prod(shape[:-2])
        wanted = cpu_tiles.geometry(here, shape[-2:], sparse=layout == cpu_tiles.SPARSE).nbytes
        if stored.layout.startswith(experts.PREFIX) != (len(shape) == 3) or matrices * wanted != stored.bytes:
            return None
        return Packed(here, shape, stored.layout, data, sparse, source_format)

    def table(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return a matrix in floating point that is stored, or None."""
        found = self._found([name], str(dtype), None)
        if found is None or prod(found[0].shape) * dtype.itemsize != found[0].bytes:
            return None
        return found[1].view(dtype).view(found[0].shape)

    def _found(self, names: Sequence[str], fmt: str, shape: tuple[int, ...] | None) -> tuple[Stored, Tensor] | None:
        file, stored = self._stored.get("\n".join(names), (None, None))
        if file is None or stored is None or stored.format != fmt or shape not in (None, stored.shape):
            return None
        try:
            data = file.tensor(stored)
        except DamagedError:
            self._drop(file)
            return None
        self._read[stored.name] = file, stored, data
        return stored, data

    def _drop(self, file: PackedFile) -> None:
        """Delete a file of which a weight is damaged; what was read of it before is stored again."""
        with suppress(OSError):
            file.path.unlink()
        with self._lock:
            for name in [name for name, (other, _) in self._stored.items() if other is file]:
                del self._stored[name]
                if name in self._read:
                    self._new[name] = self._read[name][1:]

    def add(self, names: Sequence[str], packed: Packed | Tensor) -> None:
        """Collect a packed weight for `store`.

        Args:
            names: The tensors of the checkpoint that it was packed from.
            packed: The weight, or a matrix in floating point.
        """
        name = "\n".join(names)
        if isinstance(packed, Packed):
            source_format = None if packed.source_format is None else str(packed.source_format)
            stored = Stored(name, packed.name, packed.shape, packed.layout, packed.sparse, source_format, 0, 0, 0)
            self._new[name] = stored, packed.data
        else:
            self._new[name] = Stored(name, str(packed.dtype), tuple(packed.shape), "", None, None, 0, 0, 0), packed

    def store(self) -> None:
        """Write the collected weights in a thread, if the model is large enough and its files are those that were opened."""
        new = {name: each for name, each in self._new.items() if each[1].nbytes}
        self._new = {}
        size = sum(data.nbytes for _, data in new.values()) + sum(weight.bytes for _, weight in self._stored.values())
        if not new or size < LEAST or not self._is_unchanged():
            return
        _Writer(target=self._write, args=([new[name] for name in sorted(new)],), name="halfbyte-packed-cache", daemon=True).start()

    def _is_unchanged(self) -> bool:
        """Return whether the files are those that were opened, and older than the resolution of their times."""
        newest = max(max(state.modified, state.changed) for state in self._states.values())
        try:
            return newest < self._opened - _SETTLED and all(_state(path) == state for path, state in self._states.items())
        except OSError:
            return False

    def _write(self, weights: list[tuple[Stored, Tensor]]) -> None:
        if sys.platform == "linux":  # elsewhere it would be the priority of all threads
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with _locked(self._folder) as alone:
                if alone:
                    self._write_alone(weights)
        except _StoppedError:
            pass
        except OSError as e:
            _warn(f"packed weights could not be stored in {self._folder.parent} ({e}): the model is packed again when it is opened again")

    def _write_alone(self, weights: list[tuple[Stored, Tensor]]) -> None:
        try:
            for left in self._folder.glob(f"*{packed_files.TEMPORARY}"):  # of a process that was killed
                left.unlink()
            while weights and _make_room(self._folder, sum(data.nbytes for _, data in weights)):
                some = [weights.pop(0)]
                while weights and sum(data.nbytes for _, data in some) + weights[0][1].nbytes <= _FILE:
                    some.append(weights.pop(0))
                packed_files.write(self._folder, some, _check_stopped)
        finally:
            if not any(self._folder.glob(f"*{packed_files.SUFFIX}")):
                shutil.rmtree(self._folder, ignore_errors=True)


def open_cache(files: Sequence[Path], settings: object) -> PackedCache | None:
    """Open what is stored of a model.

    Args:
        files: Those of the checkpoint.
        settings: What else its packed weights depend on; its `repr` tells all of it.

    Returns:
        None where nothing is stored: it is turned off, or the cache folder is not the user's own, of which a warning is given once.
    """
    if env.packed_bytes() == 0 or (root := _folder()) is None:
        return None
    from halfbyte.kernels.cpu.codegen import jit
    from halfbyte.kernels.cpu.codegen.isas import current

    sources = jit.source_digest(_PATTERNS)
    try:
        states = {path: _state(path) for path in files}
        samples = [_samples(path, state.bytes) for path, state in states.items()]
    except OSError:
        return None  # who reads the tensors says why
    if sources is None or not states:
        return None
    names = [path.name if len(files) > 1 else "" for path in files]
    key = repr((sources, current().name, settings, names, [tuple(state) for state in states.values()], samples))
    return PackedCache(root / hashlib.sha256(key.encode()).hexdigest(), states)


def _folder() -> Path | None:
    """Return the folder of all models; None, with one warning, where there is none that can be trusted."""
    from halfbyte.kernels.cpu.codegen import jit

    cache = env.cache()
    folder = None if cache is None else cache / "packed"
    reason = env.NO_HOME if folder is None else jit.why_not_trusted(folder)
    if reason is not None:
        place = "" if folder is None else f" in {folder}"
        _warn(f"packed weights are not stored{place}: {reason}; models are packed each time until HALFBYTE_CACHE names a usable folder")
        return None
    return folder


@functools.lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Warn, once in this process."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _samples(path: Path, size: int) -> str:
    """Return the SHA-256 of both ends of a file, where headers are, and of places between them; of a small file that of all of it."""
    digest = hashlib.sha256()
    places = [(0, _EDGE_BYTES), (max(0, size - _EDGE_BYTES), _EDGE_BYTES)]
    places += [(size * i // _SAMPLES, _SAMPLE_BYTES) for i in range(1, _SAMPLES)] if size > _SAMPLES * _SAMPLE_BYTES else [(0, size)]
    with open_unbuffered(path) as file:
        for offset, count in places:
            file.seek(offset)
            digest.update(file.read(count))
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a model's folder, and yield whether this process has the lock, which ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may write the same twice
        yield True
        return
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


class _Model(NamedTuple):
    """A model's folder, when it was last used, and its bytes."""

    used: float
    folder: Path
    bytes: int


def _models(root: Path) -> list[_Model]:
    """All models that are stored, the least recently used first."""
    models = []
    for folder in root.iterdir():
        with suppress(OSError):
            if folder.is_dir() and len(folder.name) == 2 * hashlib.sha256().digest_size:
                models.append(_Model(folder.stat().st_mtime, folder, sum(path.stat().st_size for path in folder.iterdir())))
    return sorted(models)


def _make_room(folder: Path, size: int) -> bool:
    """Remove the least recently used models, so that more can be stored.

    Args:
        folder: Of the model that is stored, which stays.
        size: Bytes that are to be written.

    Returns:
        Whether these are within the bounds now. Where they cannot be, nothing is removed.
    """
    models = _models(folder.parent)
    others = [model for model in models if model.folder != folder]
    disk, used = shutil.disk_usage(folder), sum(model.bytes for model in models)
    surplus = used + size - env.packed_bytes()
    surplus = max(surplus, size + min(_RESERVE, disk.total // 10) - disk.free)
    if surplus > sum(model.bytes for model in others):
        return False
    for model in others:
        if surplus <= 0:
            break
        shutil.rmtree(model.folder, ignore_errors=True)
        surplus -= model.bytes
    return True


def _check_stopped() -> None:
    if _stopped.is_set():
        raise _StoppedError


def _stop() -> None:
    """Let writers remove what is not complete, before the process ends."""
    _stopped.set()
    wait(2.0)


atexit.register(_stop)


def wait(timeout: float | None = None) -> None:
    """Wait until all that is being written is stored, or so many seconds for each writer."""
    for thread in threading.enumerate():
        if isinstance(thread, _Writer):
            thread.join(timeout)


def summary() -> dict[str, object]:
    """Tell what is stored: the number of models, their bytes, the bound, and why nothing is stored where that is so."""
    from halfbyte.kernels.cpu.codegen import jit

    cache, limit = env.cache(), env.packed_bytes()
    root = None if cache is None else cache / "packed"
    reason = env.NO_HOME if root is None else jit.why_not_trusted(root) if limit else "HALFBYTE_PACKED_GB is 0"
    models = [] if root is None or not root.is_dir() else _models(root)
    return {"models": len(models), "bytes": sum(model.bytes for model in models), "limit": limit, "trouble": reason}
