"""Atomic writing of checkpoints: at every moment a reader finds the complete old or the complete new one, even if the writer is killed.

`save`, `convert` and exports write within `replacing` (a folder) or `replacing_file` (a single file); `load` calls `complete`.

A folder that does not exist yet is written under a temporary name next to it and then renamed: one atomic step.

A folder that exists keeps every file that does not belong to the old checkpoint. There the atomic step is the replacement of
config.json, which names the weight files:

    1. all files are written to a hidden subfolder, .halfbyte-<8 hexadecimal digits>
    2. the weight files move up; their names carry the digits, so no file of the old checkpoint is touched
    3. config.json is replaced                                             <- before: the old checkpoint, after: the new one
    4. the other files (tokenizer, index, …) move up; the old checkpoint's weight files are deleted

`Staging.commit` does steps 2 and 3, `_clean` at the end of `replacing` step 4. Steps 1 to 3 are flushed to the disk one by one. A writer
holds a lock (flock) on the folders that it works in, by which others tell a live writer from a dead one.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from halfbyte.checkpoint.native.manifest import CONFIG, SECTION, STAGING, Manifest, read_manifest
from halfbyte.errors import ArgumentError, CheckpointError, unwritable
from halfbyte.io.files import sync
from halfbyte.io.safetensors import load_json
from halfbyte.io.tensors import JOURNAL

if sys.platform != "win32":
    import fcntl

_OURS = re.compile(r"model-[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")  # weight files that halfbyte wrote into an existing folder
_ANY_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin")  # weight files of any model
_FILES = (".gguf", ".safetensors", ".onnx")  # suffixes that a checkpoint's folder may not have: the caller has meant a file


class Staging:
    """The temporary folder for the files of a new checkpoint until `commit`, or `commit_folder`, which the caller calls once.

    Attributes:
        folder: The checkpoint's folder.
        path: The temporary folder, to which the caller writes all files.
        stem: What names of weight files have to begin with: "model", or "model-<8 hexadecimal digits>" in a folder that exists.
        fresh: Whether the checkpoint's folder does not exist yet.
    """

    def __init__(self, folder: Path, old: Manifest | None, fresh: bool, path: Path | None = None) -> None:
        """Choose names; no file is touched.

        Args:
            folder, fresh: As the attributes.
            old: The manifest of the checkpoint that is replaced, None if there is none.
            path: The temporary folder, if it exists already (a locked one of `_work`).
        """
        digits = secrets.token_hex(4)
        self.folder = folder
        self._old = old
        self.fresh = fresh
        self.path = path or (_temporary_path(folder) if fresh else folder / f".halfbyte-{digits}")
        self.stem = "model" if fresh else f"model-{digits}"

    def commit_folder(self) -> None:
        """Publish a fresh folder: flush `path` to the disk and rename it to `folder`. Writes no config.json, unlike `commit`.

        `commit` ends with it; exports to other formats call it themselves.

        Raises:
            CheckpointError: Another process has created `folder` meanwhile.
        """
        for path in sorted(self.path.rglob("*"), reverse=True):
            sync(path)
        sync(self.path)
        try:
            os.rename(self.path, self.folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                f"another process has written {self.folder} meanwhile, which stays as it is: choose another folder, or remove that one"
            ) from e
        sync(self.folder.parent)

    def commit(self, config: Mapping[str, object], manifest: Manifest) -> None:
        """Publish the checkpoint: write config.json with the manifest, then rename the fresh folder, or do steps 2 and 3.

        Args:
            config: The model's config.json without halfbyte's section.
            manifest: The section; its `staging` and `obsolete` are filled in here.

        Raises:
            CheckpointError: The folder was fresh, and another process has created it meanwhile.
        """
        if not self.fresh:
            manifest = replace(manifest, staging=self.path.name, obsolete=self._old.files if self._old else ())
        write_json(self.path / CONFIG, {**config, SECTION: manifest.to_json()})
        if self.fresh:
            self.commit_folder()
            return
        for path in sorted(self.path.rglob("*"), reverse=True):
            sync(path)
        sync(self.path)
        # config.json comes last: until its replacement readers find the old checkpoint, from then on the new one.
        for name in manifest.files:
            os.rename(self.path / name, self.folder / name)
        sync(self.folder)
        os.replace(self.path / CONFIG, self.folder / CONFIG)
        sync(self.folder)


@contextmanager
def replacing(folder: Path, *, resume: bool = False) -> Iterator[Staging]:
    """Open a temporary folder for a new checkpoint, which the block fills and commits.

    If the block ends without a commit, or raises, the temporary folder is removed and `folder` is as it was.

    Args:
        folder: The checkpoint's folder. It may exist, with a halfbyte checkpoint or without weights.
        resume: Continue in the temporary folder of a writer that was killed, if there is one with a journal; `folder` must not exist.

    Yields:
        Where to write, and how to commit.

    Raises:
        ArgumentError: The name has a suffix of weight files, or the folder exists and `resume` is asked for.
        CheckpointError: The path is not a folder's, the folder holds another model, another process writes to it, or a write fails.

    Example:
        with replacing(folder) as staging:
            writer = Writer(staging.path, staging.stem, specs)
            ...
            staging.commit(config, manifest)
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
            try:
                staging.path.mkdir()
                with _locked(staging.path):
                    yield staging
            finally:
                # Step 4 after a commit, else the removal of what the block wrote. The next writer cleans up what cannot be removed now.
                with suppress(OSError, CheckpointError):
                    _to_the_end(lambda: _clean(folder, _present(folder)))
    except OSError as e:
        raise unwritable(folder, e) from e


@contextmanager
def replacing_file(target: Path, *, resume: bool = False) -> Iterator[Path]:
    """Open a temporary folder for a file that replaces `target` when the block ends.

    If the block raises, the temporary folder is removed and `target` is as it was.

    Args:
        target: The file, which may exist.
        resume: Continue in the temporary folder of a writer that was killed, if there is one with a journal.

    Yields:
        The path to write to.

    Raises:
        CheckpointError: Another process writes to `target`, or a write fails.
    """
    target = Path(os.path.abspath(target))
    try:
        _make_parent(target)
        with _work(target, resume) as folder:
            yield folder / target.name
            sync(folder / target.name)
            os.replace(folder / target.name, target)
            sync(target.parent)
    except OSError as e:
        raise unwritable(target, e) from e


@contextmanager
def _work(target: Path, resume: bool) -> Iterator[Path]:
    """Open a temporary folder next to `target`, locked until the block ends, and remove those of dead writers.

    With `resume` it is the one that a dead writer left with a journal, if there is one. It is removed in the end, unless it was renamed to
    `target`, or `resume` is asked for, Ctrl-C ends the block, and there is a journal to continue from.

    Raises:
        CheckpointError: A live writer has a temporary folder for `target`.
    """
    with ExitStack() as lock:
        path = _remove_dead(target, spare=resume)
        if path is not None:
            lock.enter_context(_locked(path))
        while path is None:
            temporary = _temporary_path(target)
            try:
                temporary.mkdir()
                # Until it is locked, a writer that starts at the same moment takes it for a dead one's and removes it; another is made.
                with suppress(FileNotFoundError, CheckpointError):
                    lock.enter_context(_locked(temporary))
                    path = temporary if temporary.is_dir() else None
            except BaseException:
                _remove(temporary)
                raise
        try:
            yield path
        except BaseException as error:
            if not (isinstance(error, KeyboardInterrupt) and resume and (path / JOURNAL).is_file()):
                _remove(path)
            raise
        _remove(path)


def _to_the_end(cleanup: Callable[[], None]) -> None:
    """Call a function that may be called again where it was interrupted; Ctrl-C during it takes effect when it has finished."""
    try:
        cleanup()
    except KeyboardInterrupt:
        cleanup()
        raise


def _remove(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as the system allows; none needs to be there."""
    _to_the_end(lambda: shutil.rmtree(folder, ignore_errors=True))


def _make_parent(target: Path) -> None:
    """Create the folder of `target` and those above it; raise CheckpointError if one of them is a file."""
    if (above := next(path for path in target.parents if path.exists())).is_file():
        raise CheckpointError(f"cannot write {target}, as {above} is a file: choose another place")
    target.parent.mkdir(parents=True, exist_ok=True)


def _temporary_path(target: Path) -> Path:
    """Return a unique hidden name next to `target`, in its file system, so that a rename is atomic; `_remove_dead` finds it by pattern."""
    return target.with_name(f".{target.name}.halfbyte-{secrets.token_hex(4)}")


def complete(folder: Path, manifest: Manifest) -> None:
    """Move files that a killed writer left in its staging folder to their places: the first half of step 4.

    Readers call it, too, as tokenizers and other files belong to the new checkpoint; in a read-only folder it has no effect.
    Neither config.json nor weight files are moved, and no file through a link that leads out of the folder.

    Args:
        folder: The checkpoint's folder.
        manifest: Its manifest, whose `staging` names the staging folder.
    """
    staged = folder / (manifest.staging or ".")
    if manifest.staging is None or not os.path.isdir(staged) or os.path.islink(staged):
        return
    for path in [Path(parent, name) for parent, _, names in os.walk(staged) for name in names]:  # none where another process removed it
        name = path.relative_to(staged)
        target = folder / name
        if not path.is_file() or path.is_symlink() or name.as_posix() in (CONFIG, *manifest.files):
            continue
        with suppress(OSError):  # another process may have moved it, or the folder may be read-only
            if target.parent.resolve().is_relative_to(folder.resolve()):  # checkpoints are downloaded: a link may lead anywhere
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write an indented JSON file in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _present(folder: Path) -> Manifest | None:
    """Read the manifest of the checkpoint in an existing folder; None if the folder has no weights.

    Raises:
        CheckpointError: The folder holds another model, or a halfbyte checkpoint whose manifest is damaged: neither is overwritten.
    """
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
    """Remove the temporary folders that killed writers left next to `folder`.

    Args:
        folder: What they were writing: a folder or a file.
        spare: Keep the first one that has a journal, from which a writer can resume.

    Returns:
        The one that was kept, not locked any more; None if there is none.

    Raises:
        CheckpointError: One is locked: its writer is alive.
    """
    spared: Path | None = None
    for dead in sorted(folder.parent.glob(f".{glob.escape(folder.name)}.halfbyte-*")):
        with suppress(OSError), _locked(dead, folder):  # OSError: another writer has removed it; CheckpointError is raised
            if spare and spared is None and (dead / JOURNAL).is_file():
                spared = dead
            else:
                shutil.rmtree(dead, ignore_errors=True)
    return spared


def _clean(folder: Path, manifest: Manifest | None) -> None:
    """Do step 4 for a writer that has committed, and remove the files of one that has not.

    Args:
        folder: The checkpoint's folder, locked.
        manifest: Its manifest, None if it holds no checkpoint.
    """
    named: set[str] = set()  # weight files of the checkpoint
    if manifest is not None:
        complete(folder, manifest)
        named = {*manifest.files}
        # While the staging folder is there, the writer has not finished; later, files of these names may be the user's.
        for name in {*manifest.obsolete} - named if manifest.staging and (folder / manifest.staging).is_dir() else ():
            (folder / name).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _OURS.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, target: Path | None = None) -> Iterator[None]:
    """Hold an exclusive lock (flock) on a folder, which the system releases when the process dies. Windows has none on folders.

    Args:
        folder: The folder that is locked.
        target: What the error names, where `folder` is a temporary one; None: `folder`.

    Raises:
        CheckpointError: Another process holds the lock.
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
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile shares the lock
        finally:
            os.close(descriptor)
