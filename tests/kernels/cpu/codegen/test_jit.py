"""Compiled objects on disk, dumps, and what is said where code can't be compiled or run."""

import ast
import ctypes
import dataclasses
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import RUNNABLE, changed, tile_spec

import halfbyte as hb
from halfbyte import env
from halfbyte.cli.main import main
from halfbyte.errors import ArgumentError, KernelError
from halfbyte.kernels.cpu.codegen import isa as isa_module
from halfbyte.kernels.cpu.codegen import isas as isas_module
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isas import ISAS, current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.linear import linear, tile
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.machine import machine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has loaded nothing, reads no other folder and warned of nothing yet."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit._linked, "loaded", {})
    monkeypatch.setattr(jit._linked, "folders", {})  # those of exported programs that other tests of this process have loaded
    monkeypatch.setattr(jit._linked, "warned", set())
    return tmp_path / "cache" / "cpu"


def forget() -> None:
    """As if the process had just begun."""
    jit._linked.loaded.clear()


def answer(number: int = 42) -> int:
    """What a compiled function gives back: `number`."""

    def build(_: object) -> Module:
        module = Module()
        f = module.function("answer", ["ptr"])
        f.parameters[0].store(f.value("i64", number))
        return module

    out = torch.zeros(1, dtype=torch.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(jit.load("answer", build, current())["answer"])(out.data_ptr())
    return int(out)


def never(*_: object) -> bytes:
    raise AssertionError("compiled, though the cache has it")


def test_what_was_compiled_once_is_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    assert [path.suffix for path in folder.iterdir()] == [".o"]
    assert folder.stat().st_mode & 0o777 == 0o700
    forget()
    monkeypatch.setattr(jit, "compile_object", never)
    assert answer() == 42
    with pytest.raises(AssertionError, match="though the cache"):
        answer(43)


def test_what_is_loaded_is_not_loaded_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer()
    (path,) = folder.iterdir()
    path.unlink()
    monkeypatch.setattr(jit, "compile_object", never)
    assert answer() == 42


SPEC = tile_spec("int8", 4, "none", (32, True), rows=1, vectors=2)


def runner() -> dict[str, int]:
    return jit.load("runtime", runtime.build, current())


def tiles(**changes: object) -> dict[str, int]:
    return jit.load("tile", functools.partial(tile.build, changed(SPEC, **changes)), current())


def test_kernels_that_the_cache_has_are_loaded_without_making_their_ir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [runner().keys(), tiles().keys()]
    assert len(list(folder.iterdir())) == 2
    forget()
    monkeypatch.setattr(Module, "__init__", never)
    assert [runner().keys(), tiles().keys()] == first
    for change in ({"rows": 2}, {"bits": 8}, {"out": "bf16"}, {"gelu": True}):
        with pytest.raises(AssertionError, match="though the cache"):
            tiles(**change)


def test_the_target_is_part_of_a_kernels_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner()
    for i, (attribute, other) in enumerate({"cpu": "generic", "features": "+bmi2", "attributes": "noinline"}.items()):
        forget()
        monkeypatch.setattr(current(), attribute, other)
        runner()
        assert len(list(folder.iterdir())) == 2 + i


def test_sources_that_changed_while_the_process_runs_are_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles()
    forget()
    newest = max(path.stat().st_mtime_ns for path in jit.sources())
    monkeypatch.setattr(jit, "IMPORTED", newest - 1)
    tiles()  # by the text of its IR
    assert len(list(folder.iterdir())) == 2
    forget()
    monkeypatch.setattr(jit, "compile_object", never)
    tiles()
    monkeypatch.setattr(Module, "__init__", never)
    forget()
    with pytest.raises(AssertionError, match="though the cache"):
        tiles()


def test_without_sources_the_ir_tells_kernels_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "sources", lambda *_: ())
    assert tiles() != tiles(rows=2)
    assert len(list(folder.iterdir())) == 2


# A process for each run, which has no more of halfbyte than torch has when it begins.
_RUNS = """
import os, sys
from pathlib import Path
import torch

def run():
    import halfbyte as hb
    from halfbyte.kernels.cpu.codegen.ir import Module

    made, start = [], Module.__init__
    Module.__init__ = lambda self, *arguments: made.append(start(self, *arguments))
    weight = hb.pack(hb.quantize(torch.randn(33, 64), "q4_0"))
    for rows in (1, 3):
        hb.linear(torch.randn(rows, 64), weight)
    weight = hb.pack_conv(hb.quantize_conv(torch.randn(16, 8, 3, 3), "int8_channel"), 3)
    hb.conv2d(torch.randn(1, 8, 6, 6), weight, padding=1)
    print(len(made), sum(1 for _ in (Path(os.environ["HALFBYTE_CACHE"]) / "cpu").iterdir()), flush=True)

for edit in (False, False, True):
    if edit:
        with (Path(sys.path[0]) / "halfbyte" / "kernels" / "cpu" / "gelu.py").open("a") as file:
            file.write("# edited")
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a run failed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_second_process_makes_no_ir_until_a_source_is_edited(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(Path(hb.__file__).parent, tmp_path / "halfbyte", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "runs.py").write_text(_RUNS)
    done = subprocess.run([sys.executable, tmp_path / "runs.py"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    first, second, edited = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert first[0] == first[1] >= 6  # modules, files
    assert second == (0, first[1])
    assert edited == (first[0], 2 * first[1])


def test_the_sources_are_all_that_generators_import() -> None:
    root = Path(hb.__file__).parent

    def imported(path: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("halfbyte"):
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    module = root.joinpath(*name.split(".")[1:]).with_suffix(".py")
                    if module.is_file():
                        yield module

    found, todo = set[Path](), [path for path in jit.sources() if "cpu" in path.parts]
    assert len(todo) > 20
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += imported(path)
    outside = {root / f"{name}.py" for name in ("bounded", "env", "errors", "memory")}  # no code depends on them
    assert found - set(jit.sources()) == outside


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[..., Module], isa_module.ISA]]:
    """What is loaded during the test."""
    calls: list[tuple[Callable[..., Module], isa_module.ISA]] = []
    load = jit.load

    def noted(name: str, build: Callable[..., Module], isa: isa_module.ISA) -> dict[str, int]:
        calls.append((build, isa))
        return load(name, build, isa)

    monkeypatch.setattr(jit, "load", noted)
    for kept in (compiled.cache_clear, linear.linear_kernel.cache_clear, PLANS.linear_kernels.clear):  # by tests before
        kept()
    return calls


def test_generators_read_nothing_but_their_specification(loaded: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for fmt in ("q4_0", "int4_g128_zp", "int8_channel"):
        weight = hb.pack(hb.quantize(torch.randn(48, 96), fmt))
        hb.dequantize(weight)
        for rows in (1, 5):
            hb.linear(torch.randn(rows, 96).to(torch.bfloat16), weight)
    for channels, groups in ((16, 1), (1, 16)):
        kernel = hb.pack_conv(hb.quantize_conv(torch.randn(16, channels, 3, 3), "int8_channel"), 3, groups)
        hb.conv2d(torch.randn(1, 16, 9, 9), kernel, padding=1)
    assert len({build.func.__module__ for build, _ in loaded if isinstance(build, functools.partial)}) >= 5
    texts = [build(isa).text() for build, isa in loaded]
    names = [jit._specification(build, isa) for build, isa in loaded]
    assert all(" at 0x" not in name for name in names)
    assert len(set(zip(names, texts, strict=True))) == len(set(names))  # the same specification, the same text
    # Another process may be told otherwise in every other respect.
    isas_module._named.cache_clear()
    monkeypatch.setenv("HALFBYTE_ISA", "generic")
    monkeypatch.setenv("HALFBYTE_THREADS", "1")
    monkeypatch.setattr(isa_module, "machine", lambda: dataclasses.replace(machine(), features=frozenset(), vendor="nobody"))
    assert [build(isa).text() for build, isa in loaded] == texts


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_instruction_sets_have_entries_of_their_own(isa: isa_module.ISA, folder: Path) -> None:
    for each in (isa, isa_module.ISA()):
        jit.load("empty", lambda _: _with_function("f"), each)
        forget()
    assert len(list(folder.iterdir())) == (1 if isa.name == "generic" else 2)


def _with_function(name: str) -> Module:
    module = Module()
    module.function(name, [])
    return module


@pytest.mark.parametrize("length", [0, 10, 31, 32, 33, 400, -1])
def test_a_truncated_object_is_made_anew(length: int, folder: Path) -> None:
    answer()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    forget()
    assert answer() == 42
    assert path.read_bytes() == whole
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("at", [0, 31, 32, 200, -1])
def test_an_object_with_a_flipped_bit_is_made_anew(at: int, folder: Path) -> None:
    answer()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[at] ^= 4
    path.write_bytes(damaged)
    forget()
    assert answer() == 42
    assert path.read_bytes() == whole


def test_an_object_under_another_name_is_made_anew(folder: Path) -> None:
    assert (answer(1), answer(2)) == (1, 2)
    one, two = folder.iterdir()
    whole = two.read_bytes()
    shutil.copyfile(one, two)
    forget()
    assert (answer(1), answer(2)) == (1, 2)
    assert two.read_bytes() == whole


def test_an_object_that_cannot_be_read_is_made_anew(folder: Path) -> None:
    answer()
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()  # neither read nor replaced
    forget()
    with pytest.warns(RuntimeWarning, match=r"could not be cached .* compiled again next time"):
        assert answer() == 42
    assert list(folder.iterdir()) == [path]


def works_with_one_warning(match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match):
        assert answer() == 42
    forget()
    assert (answer(), answer(43)) == (42, 43)  # without another: a warning is an error in these tests


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes mean nothing here")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_a_folder_that_others_can_read_or_write_is_not_used(mode: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    works_with_one_warning(f"not cached in .*: it belongs to user .* with mode {mode:o}, and only a folder of your own with mode 700")
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners mean nothing here")
def test_the_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    (path,) = folder.iterdir()
    path.write_bytes(b"code of somebody else")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    forget()
    works_with_one_warning(f"it belongs to user {owner} with mode 700")
    assert path.read_bytes() == b"code of somebody else"


def test_a_folder_without_write_permission_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # a user who is root may write anywhere
    works_with_one_warning("it can't be written")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "file" / "cache"))
    works_with_one_warning("compiled kernels are not cached in .*file/cache/cpu: .*until HALFBYTE_CACHE names a usable folder")


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HALFBYTE_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    works_with_one_warning("are not cached: this user has no home folder; every process .* until HALFBYTE_CACHE names a usable folder")
    assert main(["doctor", "--no-test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cache"]
    assert (found["folder"], found["usable"], found["files"]) == (None, False, 0)


def test_a_full_disk_costs_the_cache_entry_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    works_with_one_warning(r"a compiled kernel could not be cached \(.*No space left on device\)")
    assert list(folder.iterdir()) == []


def test_dumps_are_named_and_readable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_DUMP", str(tmp_path / "new" / "dump"))
    assert answer() == 42
    name = current().name
    assert sorted(path.name for path in (tmp_path / "new" / "dump").iterdir()) == [f"answer.{name}.ll", f"answer.{name}.s"]
    text, assembly = ((tmp_path / "new" / "dump" / f"answer.{name}.{suffix}").read_text() for suffix in ("ll", "s"))
    assert "define void @answer(ptr %p0)" in text
    assert "store i64 42" in text
    assert "answer:" in assembly
    assert "ret" in assembly
    forget()  # an object that the cache has is dumped all the same
    for path in (tmp_path / "new" / "dump").iterdir():
        path.unlink()
    assert answer() == 42
    assert len(list((tmp_path / "new" / "dump").iterdir())) == 2


_ONE_OF_TWO = """
import ctypes, sys
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.linear.linear import tile
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.ir import Module
print("ready", flush=True)
sys.stdin.readline()
for i in range(8):
    module = Module()
    f = module.function("f", ["i64"], "i64")
    f.set_result(f.parameters[0] * i + 1)
    address = jit.load("f", lambda _: module, current())["f"]
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(10) == 10 * i + 1
"""


def test_two_processes_fill_one_cache_at_once(folder: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([sys.executable, "-W", "error", "-c", _ONE_OF_TWO], **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()
        for process in processes:
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in processes:
            _, error = process.communicate(timeout=600)
            assert process.returncode == 0, error.decode()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sorted(path.suffix for path in folder.iterdir()) == [".o"] * 8


_HARDENED = """
import ctypes
import torch
from halfbyte import ops
from halfbyte.errors import KernelError

weight = torch.randn(33, 64)
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
    raise SystemExit(77)
for _ in range(2):
    try:
        ops.quantize(weight, "q4_0")
    except KernelError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_host_that_forbids_to_execute_written_memory_is_named(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _HARDENED], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "can't be loaded: the system forbids to execute memory that was written (Permission denied); allow it" in line
    # What was compiled meanwhile is whole, and good for a process that may run it.
    assert [path.suffix for path in folder.iterdir()] == [".o"]


def test_threads_that_load_at_once_get_the_same_function() -> None:
    results, start = [], threading.Barrier(4)

    def work() -> None:
        start.wait()
        results.append((answer(5), jit.load("f", lambda _: _with_function("f"), current())["f"]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert len(set(results)) == 1


def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", "avx1024")
    with pytest.raises(ArgumentError, match=f"HALFBYTE_ISA is 'avx1024': use one of {', '.join(env.ISAS)}, or unset it"):
        current()


def test_an_instruction_set_that_the_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    plain = replace(machine(), features=frozenset())
    monkeypatch.setattr(isa_module, "machine", lambda: plain)
    isas_module._named.cache_clear()
    try:
        monkeypatch.setenv("HALFBYTE_ISA", "avx2")
        with pytest.raises(KernelError, match=r"HALFBYTE_ISA asks for avx2, but .*(CPU lacks|is for).*; unset it to let halfbyte choose"):
            current()
        monkeypatch.delenv("HALFBYTE_ISA")
        assert current().name == "generic"
        for isa in ISAS[:-1]:  # and code for it is never run, however one gets there
            with pytest.raises(KernelError, match=f"kernels for {isa.name} can't run here: .*(CPU lacks|is for).*; unset HALFBYTE_ISA"):
                jit.load("f", lambda _: _with_function("f"), isa)
    finally:
        isas_module._named.cache_clear()


def test_the_environment_and_the_classes_name_the_same_instruction_sets() -> None:
    assert tuple(isa.name for isa in ISAS) == env.ISAS
    assert ISAS[-1].missing() is None


def test_generated_code_that_llvm_refuses_is_called_a_fault_of_halfbyte() -> None:
    module = _with_function("f")
    module.functions[0].line("%x = add i32 1.5, 2")
    with pytest.raises(KernelError, match=r"(?s)code generated for .* is not valid LLVM IR.*this is a fault in halfbyte"):
        jit.load("f", lambda _: module, current())
