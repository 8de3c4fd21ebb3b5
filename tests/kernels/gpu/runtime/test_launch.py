"""Launching: kernels are started, recorded, and compiled side by side."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from contextlib import nullcontext
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from aot import Job, compile_all
from triton.backends.compiler import GPUTarget
from triton_kernels import add

from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.kernels.gpu.hopper import skinny_tile as skinny_hopper_tile
from halfbyte.kernels.gpu.runtime import compile_time, launch
from halfbyte.machine import Gpu


def test_run_and_record(device: torch.device) -> None:
    x, y = torch.arange(10, device=device), torch.zeros(10, dtype=torch.int64, device=device)
    launch.run(add, (2,), x, y, (None, None), 10, 3, BLOCK=8)
    assert torch.equal(y, x + 3)
    with launch.recording() as recording:
        launch.run(add, (2,), x, y, (x, None), 10, 1, BLOCK=8)
    assert torch.equal(y, 2 * x + 1)
    assert [call.grid for call in recording.launches] == [(2,)]
    with launch.recording(dry=True) as recording:
        launch.run(add, (2,), x, y, (None, None), 10, 9, BLOCK=8, num_warps=2)
    assert torch.equal(y, 2 * x + 1)
    assert recording.launches[0].options == {"BLOCK": 8, "num_warps": 2, "enable_fp_fusion": True}
    launch.run(add, (2,), x, y, (None, None), 10, 0, BLOCK=8)
    assert len(recording.launches) == 1


def test_what_does_not_compile_is_a_kernel_error(device: torch.device) -> None:
    class Fails:
        __name__ = "fails"

        def __init__(self, error: Exception) -> None:
            self.error = error

        def __getitem__(self, grid: object) -> Any:
            raise self.error

    for error in (triton.runtime.errors.OutOfResources(300000, 200000, "shared memory"), RuntimeError("PassManager::run failed")):
        with pytest.raises(KernelError, match="fails does not compile for this GPU"):
            launch.run(Fails(error), (1,))
    for error in (RuntimeError("Failed to find C compiler. Please specify via CC"), CalledProcessError(1, ["/usr/bin/gcc"])):
        with pytest.raises(UnsupportedError, match="install gcc and Python's headers"):
            launch.run(Fails(error), (1,))
    with pytest.raises(RuntimeError, match="illegal"):
        launch.run(Fails(RuntimeError("CUDA error: an illegal memory access")), (1,))


def launch_compiled(gpu: Gpu) -> None:
    """Compiles two kernels side by side for a GPU that is not there, in a process without Triton's interpreter."""
    loaded: list[str] = []

    def load(name: str, *_: object) -> tuple[int, ...]:
        loaded.append(name)
        return 1, 2, 3, 0, 1024

    driver = SimpleNamespace(
        launcher_cls=lambda *_: print,
        utils=SimpleNamespace(load_binary=load, get_device_properties=lambda _: {"max_shared_mem": gpu.shared}),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
    )
    triton.runtime.driver.set_active(driver)  # to the end of this process, which only compiles
    device_class, torch.cuda.device = torch.cuda.device, lambda _: nullcontext()  # type: ignore[assignment, misc]
    try:
        x = torch.zeros(8, device="meta")
        with launch.compiling(torch.device("cuda", 0)):
            for block in (8, 8, 16):
                assert launch.is_compiling()
                launch.run(add, (1,), x, x, (None, None), 8, 3, BLOCK=block)
            launch.run(object(), (1,), x)  # one of torch's
        assert not launch.is_compiling()
        assert loaded == ["add", "add"]
    finally:
        torch.cuda.device = device_class  # type: ignore[misc]
    launch.run(add, (1,), x, x, (None, None), 8, 3, BLOCK=8)


def test_kernels_are_compiled_side_by_side() -> None:
    assert [
        binary.kernel
        for binary in compile_all([Job("tests/kernels/gpu/runtime/test_launch.py:launch_compiled", "sm_90", wanted="resources")])[0]
    ] == ["add"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_what_was_compiled_before_is_not_compiled_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, compiled = torch.arange(10, device=device), torch.zeros(10, dtype=torch.int64, device=device), list[Any]()
    with launch.compiling(device):
        launch.run(add, (1,), x, y, (None, None), 10, 3, BLOCK=32, num_warps=8)
    assert not y.any()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what))
    launch.run(add, (1,), x, y, (None, None), 10, 3, BLOCK=32, num_warps=8)
    assert torch.equal(y, x + 3)
    assert not compiled


def test_compiled_kernels_on_disk_are_found_by_what_their_constants_make_of_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton knows the kernel's source and the fields alone."""
    static = skinny_hopper_tile.Static(8, 1, 1, 2, 4, 1, 1, False, False, 2, False, False, True, False, False, 4, False)
    key = static.cache_key
    assert key.startswith(str(static))
    assert key != dataclasses.replace(static, stages=3).cache_key
    source = inspect.getsource(skinny_hopper_tile)
    monkeypatch.setattr(compile_time, "getsource", lambda module: source.replace("32 if self.integers else 16", "16"))
    compile_time._digest.cache_clear()
    assert static.cache_key != key
    compile_time._digest.cache_clear()
    root = Path(compile_time.__file__).parents[1]
    for path in root.rglob("*.py"):
        module = ".".join(("halfbyte.kernels.gpu", *path.relative_to(root).with_suffix("").parts))
        kind = getattr(importlib.import_module(module), "Static", compile_time.CompileTime)
        assert issubclass(kind, compile_time.CompileTime), path
