"""The cache that sessions of the tests share: what it finds is what would be compiled."""

from __future__ import annotations

from pathlib import Path

import kernel_cache
import pytest

from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernel_cache, "_folder", lambda _: tmp_path)
    return tmp_path


def test_machine_code_is_that_of_the_ir_and_the_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bytes] = []

    def compile_object(module: Module, isa: ISA) -> bytes:
        compiled.append(f"{isa.features} {module.text()}".encode())
        return compiled[-1]

    monkeypatch.setattr(jit, "compile_object", compile_object)
    kernel_cache.by_ir()
    isa, module, changed = current(), runtime.build(current()), runtime.build(current())
    changed.functions.pop()
    calls = [(module, isa.features), (module, isa.features), (changed, isa.features), (module, "+other"), (module, isa.features)]
    for (asked, features), count in zip(calls, (1, 1, 2, 3, 3), strict=True):
        monkeypatch.setattr(isa, "features", features)
        assert jit.compile_object(asked, isa) == f"{features} {asked.text()}".encode()
        assert len(compiled) == count
    assert len(list(folder.iterdir())) == 3


def test_a_damaged_file_is_replaced(folder: Path) -> None:
    texts = iter((b"first", b"second"))
    assert kernel_cache.remembered("kind", "key", lambda: next(texts)) == b"first"
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert [kernel_cache.remembered("kind", "key", lambda: next(texts)) for _ in range(2)] == [b"second"] * 2


def test_without_a_folder_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_folder", lambda _: None)
    texts = iter((b"first", b"second"))
    assert [kernel_cache.remembered("kind", "key", lambda: next(texts)) for _ in range(2)] == [b"first", b"second"]
    assert kernel_cache.by_sources() is None
