"""HALFBYTE_* variables: defaults, values, and one clear error for a bad one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from halfbyte import env
from halfbyte.errors import ArgumentError

ACCESSORS: dict[str, Callable[[], object]] = {
    "HALFBYTE_API_KEY": env.api_key,
    "HALFBYTE_CACHE": env.cache,
    "HALFBYTE_CHECK": env.check,
    "HALFBYTE_DUMP": env.dump,
    "HALFBYTE_ISA": env.isa,
    "HALFBYTE_PACKED_GB": env.packed_bytes,
    "HALFBYTE_THREADS": env.threads,
    "HALFBYTE_TUNE": env.tune,
    "HALFBYTE_VLLM_KERNELS": env.vllm_kernels,
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HALFBYTE_"):
            monkeypatch.delenv(name)


def test_table_lists_every_variable_that_is_read() -> None:
    assert [variable.name for variable in env.VARIABLES] == list(ACCESSORS)
    assert all(variable.meaning and variable.default for variable in env.VARIABLES)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_unset_and_empty_give_the_default(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    for name in ACCESSORS:
        if value is not None:
            monkeypatch.setenv(name, value)
    assert env.cache() == user_cache_path("halfbyte", appauthor=False)
    assert env.api_key() is None
    assert (env.dump(), env.isa(), env.threads(), env.tune(), env.packed_bytes()) == (None, None, None, False, 16 * 10**9)


@pytest.mark.parametrize("name", ["HALFBYTE_CACHE", "HALFBYTE_DUMP"])
def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    read = ACCESSORS[name]
    monkeypatch.setenv(name, str(tmp_path))
    assert read() == tmp_path
    monkeypatch.setenv(name, str(tmp_path / "new"))  # read again at each call; need not exist, is not made
    assert read() == tmp_path / "new"
    assert not (tmp_path / "new").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "relative")
    assert read() == tmp_path / "relative"
    monkeypatch.setenv(name, os.path.join("~", "x"))
    assert read() == Path.home() / "x"


@pytest.mark.parametrize("name", ["HALFBYTE_CACHE", "HALFBYTE_DUMP"])
def test_a_folder_that_another_process_makes_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    folder, stat = tmp_path / "new", os.stat

    def stat_after_the_first(path: str | Path, **options: bool) -> os.stat_result:
        try:
            return stat(path, **options)
        except FileNotFoundError:
            os.makedirs(path, exist_ok=True)
            raise

    monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(os, "stat", stat_after_the_first)
    assert ACCESSORS[name]() == folder
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["HALFBYTE_CACHE", "HALFBYTE_DUMP"])
def test_a_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.touch()
    for value in (str(file), "~no-such-user-here/x", "x" * 5000):
        monkeypatch.setenv(name, value)
        with pytest.raises(ArgumentError, match=name):
            ACCESSORS[name]()


@pytest.mark.parametrize("value", env.ISAS)
def test_isa(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", f" {value.upper()} ")
    assert env.isa() == value


@pytest.mark.parametrize("value", ["avx", "avx2,generic", "sse4.2"])
def test_unknown_isa(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", value)
    with pytest.raises(ArgumentError, match=r"HALFBYTE_ISA is .*avx2, .*generic"):
        env.isa()


@pytest.mark.parametrize(("value", "count"), [("1", 1), (" 8 ", 8), ("004", 4), ("4096", 4096)])
def test_threads(monkeypatch: pytest.MonkeyPatch, value: str, count: int) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", value)
    assert env.threads() == count


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "1_0", "٤", "4097", "9" * 9999, "0x2", "1 2"])
def test_bad_threads(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HALFBYTE_THREADS", value)
    with pytest.raises(ArgumentError, match=r"HALFBYTE_THREADS is .*from 1 to 4096"):
        env.threads()


@pytest.mark.parametrize(("value", "count"), [("0", 0), (" 2.5 ", 2_500_000_000), ("1000000", 10**15)])
def test_packed_bytes(monkeypatch: pytest.MonkeyPatch, value: str, count: int) -> None:
    monkeypatch.setenv("HALFBYTE_PACKED_GB", value)
    assert env.packed_bytes() == count


@pytest.mark.parametrize("value", ["-1", "1e3", "nan", "inf", "16G", "1000001", ".5", "9" * 9999, "٤"])
def test_bad_packed_bytes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HALFBYTE_PACKED_GB", value)
    with pytest.raises(ArgumentError, match=r"HALFBYTE_PACKED_GB is .*from 0 to 1000000"):
        env.packed_bytes()


@pytest.mark.parametrize(("name", "default"), [("HALFBYTE_TUNE", False), ("HALFBYTE_CHECK", True), ("HALFBYTE_VLLM_KERNELS", True)])
def test_switches(name: str, default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ACCESSORS[name]
    assert read() is default
    for value, meaning in ((" 1 ", True), ("0", False)):
        monkeypatch.setenv(name, value)
        assert read() is meaning
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ArgumentError, match=f"{name} is 'yes': use 1 or 0"):
        read()


def test_unknown_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.unknown() == []
    for name in ("HALFBYTE_THREAD", "HALFBYTE_CASHE", "HALFBYTE_ISA", "NOT_HALFBYTE_X"):
        monkeypatch.setenv(name, "1")
    assert env.unknown() == ["HALFBYTE_CASHE", "HALFBYTE_THREAD"]
