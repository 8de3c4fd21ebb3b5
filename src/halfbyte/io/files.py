"""Opens and examines the files and folders that users name: the one place that reads them by `open` or asks whether they are there.
`write_whole` replaces a small file in one step.

FIFOs, devices and sockets are refused: reading from them may block or never end. What the system does not allow to examine is an error,
not absent.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path

from halfbyte.errors import CheckpointError, shortened, unreadable

_IRREGULAR = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}


def is_file(path: Path) -> bool:
    """Whether there is a file; False where there is nothing or a folder.

    Raises:
        CheckpointError: A FIFO, device or socket is there, or the system does not tell what is there.
    """
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False where there is nothing or a file. Raises CheckpointError as `is_file` does."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_there(path: Path) -> bool:
    """Whether there is a file or a folder. Raises CheckpointError as `is_file` does."""
    return _mode(path) is not None


def paths_in(folder: Path) -> list[Path]:
    """The files and folders in a folder, sorted, without those whose links lead nowhere. Raises CheckpointError as `is_file` does."""
    try:
        return [path for path in sorted(folder.iterdir()) if is_there(path)]
    except OSError as e:
        raise unreadable(folder, e) from e


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and its subfolders, without hidden ones, sorted. Raises CheckpointError as `is_file` does."""
    for path in (path for path in _visible(folder) if is_there(path)):
        if is_file(path):
            yield path
        elif not path.is_symlink():
            yield from files_below(path)


def check_regular(folder: Path) -> None:
    """Raise CheckpointError for a FIFO, device or socket among the files of a folder that another library is going to read."""
    for path in _visible(folder):
        is_there(path)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading bytes, as `open` does.

    Raises:
        CheckpointError: It is a FIFO, device or socket.
        OSError: It cannot be opened.
    """
    return BufferedReader(open_unbuffered(path))


def open_unbuffered(path: Path) -> FileIO:
    """Open a file for reading large pieces; raise as `open_file` does."""
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a FIFO would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step: a temporary file next to it takes its place. After an error or Ctrl-C what was there is unchanged, and the
    temporary file is removed.

    Raises:
        OSError: It cannot be written, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # another process may write to the same place
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that they survive a power failure. Windows cannot flush folders."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as e:
        raise unreadable(folder, e) from e


def _mode(path: Path) -> int | None:
    """The type of what is at a path; None where nothing is."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise unreadable(path, e) from e
    if stat.S_IFMT(mode) in _IRREGULAR:
        raise _irregular(path, mode)
    return mode


def _irregular(path: Path, mode: int) -> CheckpointError:
    kind = _IRREGULAR.get(stat.S_IFMT(mode), "no file")
    return CheckpointError(f"{shortened(path)} is {kind}, which is not read: write its data to a file on a disk, and name that")
