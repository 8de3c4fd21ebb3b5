"""Atomic writing of checkpoints: at every moment a reader finds the complete old or the complete new one, even if the writer is killed.

A folder that does not exist yet is written under a temporary name next to it and then renamed: one atomic step.

A folder that exists keeps every file that does not belong to the old checkpoint. There the atomic step is the replacement of
config.json, which names the weight files:

    1. all files are written to a hidden subfolder, .halfbyte-<8 hexadecimal digits>
    2. the weight files move up; their names carry the digits, so no file of the old checkpoint is touched
    3. config.json is replaced                                             <- before: the old checkpoint, after: the new one
    4. the other files (tokenizer, index, …) move up; the old checkpoint's weight files are deleted

A writer killed between 3 and 4 leaves its pending work listed in the manifest, as `staging` and `obsolete`; the next process that
opens the folder completes it. A writer killed before 3 leaves hidden folders, and weight files with digits that no config.json
names; the next writer removes them.

A single file is written in a hidden folder next to it and replaces the old one in one step. Writers to a new place that keep a journal
(io/tensors.py) can be resumed: the next one continues the files of one that was killed. A writer started with `resume` also keeps its
files when it is interrupted from the keyboard.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from halfbyte.checkpoint.native.manifest import CONFIG, SECTION, Manifest, read_manifest
from halfbyte.errors import ArgumentError, CheckpointError, unwritable
from halfbyte.io.safetensors import load_json
from halfbyte.io.tensors import JOURNAL

if sys.platform != "win32":
    import fcntl

_STAGING = re.compile(r"\.halfbyte-[0-9a-f]{8}")
_OURS = re.compile(r"model-[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")
_ANY_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin")
_FILES = (".gguf", ".safetensors", ".onnx")  # suffixes that no folder has


class Staging:
    """Where the files of a new checkpoint are written until `commit`.

    folder the checkpoint's
    path   the folder for all of its files
    stem   the beginning of the names of the weight files
    fresh  whether the checkpoint's folder does not exist yet
    """

    def __init__(self, folder: Path, old: Manifest | None, fresh: bool, path: Path | None = None) -> None:
        digits = secrets.token_hex(4)
        self.folder = folder
        self._old = old
        self.fresh = fresh
        self.path = path or (_temporary_path(folder) if fresh else folder / f".halfbyte-{digits}")
        self.stem = "model" if fresh else f"model-{digits}"

    def commit_folder(self) -> None:
        """Renames `path` to the folder, which did not exist; for folders of other kinds than halfbyte checkpoints."""
        for path in sorted(self.path.rglob("*"), reverse=True):
            _sync(path)
        _sync(self.path)
        try:
            os.rename(self.path, self.folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"another process has written {self.folder} meanwhile, which stays as it is: choose another folder, or remove that one"
            ) from e
        _sync(self.folder.parent)

    def commit(self, config: Mapping[str, object], manifest: Manifest) -> None:
        """Moves everything in `path` to its place."""
        if not self.fresh:
            manifest = replace(manifest, staging=self.path.name, obsolete=self._old.files if self._old else ())
        write_json(self.path / CONFIG, {**config, SECTION: manifest.to_json()})
        if self.fresh:
            self.commit_folder()
            return
        for path in sorted(self.path.rglob("*"), reverse=True):
            _sync(path)
        _sync(self.path)
        for name in manifest.files:
            os.rename(self.path / name, self.folder / name)
        _sync(self.folder)
        os.replace(self.path / CONFIG, self.folder / CONFIG)
        _sync(self.folder)


@contextmanager
def replacing(folder: Path, *, resume: bool = False) -> Iterator[Staging]:
    """A place to write a new checkpoint for `folder`. Without a commit in the block nothing is left behind.

    resume  continue the work of a writer that was killed; `folder` must not exist

    Raises ArgumentError where its name is that of a file of weights, CheckpointError where the folder holds anything but a halfbyte
    checkpoint, where another process writes to it, and for every failure to write.
    """
    folder = Path(os.path.abspath(folder))
    try:
        fresh = not folder.exists()
        if fresh and folder.suffix in _FILES:
            remedy = "then `halfbyte convert` makes a GGUF file of it" if folder.suffix == ".gguf" else "its weights will be in it"
            raise ArgumentError(f"{folder} has the name of a file, and a folder is written: leave {folder.suffix} out, {remedy}")
        if resume and not fresh:
            raise ArgumentError(f"{folder} exists, and only writing to a new place can be resumed: choose another folder")
        if os.path.lexists(folder) and not folder.is_dir():
            what = "a file" if folder.is_file() else "a link to nothing" if folder.is_symlink() else "no folder"
            raise CheckpointError(
                f"cannot write {folder}, which is {what}, and stays: choose another name for the folder of the checkpoint"
            )
        _make_parent(folder)
        if fresh:
            with _work(folder, resume) as path:
                yield Staging(folder, None, fresh, path)
            return
        with _locked(folder):
            old = _present(folder)
            staging = Staging(folder, old, fresh)
            _remove_dead(folder)
            _clean(folder, old)
            staging.path.mkdir()
            with _locked(staging.path):
                try:
                    yield staging
                finally:
                    with suppress(OSError, CheckpointError):  # the next writer cleans up what cannot be removed now
                        _clean(folder, _present(folder))
    except OSError as e:
        raise unwritable(folder, e) from e


@contextmanager
def replacing_file(target: Path, *, resume: bool = False) -> Iterator[Path]:
    """Where to write a file that replaces `target` when the block ends. A failure leaves nothing behind.

    resume  continue the work of a writer that was killed

    Raises CheckpointError where another process writes to it, and for every failure to write.
    """
    target = Path(os.path.abspath(target))
    try:
        _make_parent(target)
        with _work(target, resume) as folder:
            yield folder / target.name
            _sync(folder / target.name)
            os.replace(folder / target.name, target)
            _sync(target.parent)
    except OSError as e:
        raise unwritable(target, e) from e


@contextmanager
def _work(target: Path, resume: bool) -> Iterator[Path]:
    """A locked temporary folder next to `target`; with `resume`, one that a dead writer left. A commit removes it."""
    with ExitStack() as lock:
        path = _remove_dead(target, spare=resume)
        if path is not None:
            lock.enter_context(_locked(path))
        while path is None:
            temporary = _temporary_path(target)
            temporary.mkdir()
            # Until it is locked, a writer that starts at the same moment takes it for a dead one's and removes it.
            with suppress(FileNotFoundError, CheckpointError):
                lock.enter_context(_locked(temporary))
                path = temporary if temporary.is_dir() else None
        try:
            yield path
        except KeyboardInterrupt:
            if not (resume and (path / JOURNAL).is_file()):
                shutil.rmtree(path, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        shutil.rmtree(path, ignore_errors=True)


def _make_parent(target: Path) -> None:
    if (above := next(path for path in target.parents if path.exists())).is_file():
        raise CheckpointError(f"cannot write {target}, as {above} is a file: choose another place")
    target.parent.mkdir(parents=True, exist_ok=True)


def _temporary_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.halfbyte-{secrets.token_hex(4)}")


def complete(folder: Path, manifest: Manifest) -> None:
    """Moves the files that a killed writer left in its staging folder to their places, as far as possible."""
    staged = folder / (manifest.staging or ".")
    if manifest.staging is None or not os.path.isdir(staged) or os.path.islink(staged):
        return
    for path in [Path(parent, name) for parent, _, names in os.walk(staged) for name in names]:  # none where another process removed it
        name = path.relative_to(staged)
        target = folder / name
        if not path.is_file() or path.is_symlink() or name.as_posix() in (CONFIG, *manifest.files):
            continue
        with suppress(OSError):  # another process may have moved it, or the folder may be read-only
            if target.parent.resolve().is_relative_to(folder.resolve()):  # a link must not lead out of the folder
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _present(folder: Path) -> Manifest | None:
    """The manifest of the checkpoint in an existing folder, None where there is none; raises where there is another model."""
    if (folder / CONFIG).exists():
        try:
            if SECTION in load_json(folder / CONFIG):
                return read_manifest(folder)[1]
            why = "but another model"
        except CheckpointError as e:
            why = f"({e})"
        raise CheckpointError(f"{folder} is not overwritten, as it holds no halfbyte checkpoint {why}: choose another folder")
    for path in folder.iterdir():
        if _ANY_WEIGHTS.fullmatch(path.name) and not _OURS.fullmatch(path.name):
            raise CheckpointError(f"{folder} is not overwritten, as it holds another model's {path.name}: choose another folder")
    return None


def _remove_dead(folder: Path, *, spare: bool = False) -> Path | None:
    """Removes temporary folders of killed writers next to `folder`; with `spare`, keeps and returns the first that has a journal.

    Raises CheckpointError where one is a live writer's.
    """
    spared: Path | None = None
    for dead in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.halfbyte-*")):
        with suppress(OSError), _locked(dead, folder):
            if spare and spared is None and (dead / JOURNAL).is_file():
                spared = dead
            else:
                shutil.rmtree(dead, ignore_errors=True)
    return spared


def _clean(folder: Path, manifest: Manifest | None) -> None:
    """Completes the work of a writer killed after its commit, and removes the files of one killed before."""
    named: set[str] = set()
    if manifest is not None:
        complete(folder, manifest)
        named = {*manifest.files}
        # While the staging folder is there, the writer has not finished; later, files of these names may be the user's.
        for name in {*manifest.obsolete} - named if manifest.staging and (folder / manifest.staging).is_dir() else ():
            (folder / name).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if _STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _OURS.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, target: Path | None = None) -> Iterator[None]:
    """Holds the lock of a folder, which the system releases when the process dies. (Windows has none on folders.)

    Raises CheckpointError where another writer holds it, who writes to `target`, by default the folder itself.
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is writing to {target or folder}: wait until it has finished") from None
        yield
    finally:
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too, and with it the lock
        finally:
            os.close(descriptor)


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk, so that they survive a power failure."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
