"""Files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfbyte.io import files
from halfbyte.io.files import write_whole


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure there is the old file or all of the new one; the folder's entries are flushed last."""
    done: list[tuple[str, str]] = []
    sync, replace = files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (sync(path), done.append(("sync", path.read_text() if path.is_file() else path.name))))
    monkeypatch.setattr(os, "replace", lambda source, target: (replace(source, target), done.append(("replace", Path(target).name))))
    write_whole(tmp_path / "table.json", b"{}")
    assert done == [("sync", "{}"), ("replace", "table.json"), ("sync", tmp_path.name)]
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.json").write_text("old")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "table.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("table.json", "old")]
