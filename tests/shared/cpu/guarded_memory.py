"""Memory between pages that may not be touched: what a kernel reads or writes beyond its tensors ends the process."""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support import AVAILABLE
from torch import Tensor

from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.plan_cache import PLANS

PAGE = mmap.PAGESIZE
ENDS = ("end", "start")  # where a buffer lies flush with a forbidden page
FORBIDDEN, READ_ONLY = 0, 1
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def some(cases: Iterable[Any]) -> list[Any]:
    """On the best instruction set all; on the others, which share most code, every other one, in turn."""
    number = AVAILABLE.index(current())
    return list(cases)[number % 2 :: 2] if number else list(cases)


def _memory(nbytes: int, flush: str) -> tuple[mmap.mmap, int]:
    """Whole pages between two forbidden ones, and where in them `nbytes` begin that lie flush with one."""
    size = -(-max(nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + size):
        if _mprotect(page, PAGE, FORBIDDEN):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return memory, PAGE if flush == "start" else PAGE + size - nbytes


def guarded(shape: tuple[int, ...], dtype: torch.dtype, flush: str) -> Tensor:
    """New memory for a tensor, full of 0xFF."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    memory, at = _memory(count * dtype.itemsize, flush)
    memory[at : at + count * dtype.itemsize] = b"\xff" * (count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)


def placed(t: Tensor, flush: str, gap: int = 0) -> Tensor:
    """A read-only copy of t; its rows are `gap` elements apart, and none follow the last."""
    stride = t.shape[-1] + gap
    rows = t.numel() // t.shape[-1]
    memory = guarded(((rows - 1) * stride + t.shape[-1],), t.dtype, flush)
    view = memory.as_strided((*t.shape[:-1], t.shape[-1]), (stride, 1) if t.dim() == 2 else (1,))
    view.copy_(t)
    start = memory.data_ptr() // PAGE * PAGE
    if _mprotect(start, memory.data_ptr() + memory.nbytes - start, READ_ONLY):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    return view


@contextmanager
def guarded_allocations(flush: str) -> Iterator[None]:
    """What kernels allocate lies flush too."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def new(
        *sizes: int | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format | None = None,
        device: str = "cpu",
    ) -> Tensor:
        assert torch.device(device).type == "cpu"
        shape = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
        if memory_format is torch.channels_last:
            return guarded((shape[0], *shape[2:], shape[1]), dtype, flush).permute(0, 3, 1, 2)
        return guarded(shape, dtype, flush)

    def new_like(t: Tensor, *sizes: int | tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return new(*(sizes or (tuple(t.shape),)), dtype=dtype or t.dtype)

    torch.empty, torch.empty_like, Tensor.new_empty = new, lambda t, dtype=None: new_like(t, dtype=dtype), new_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = empty, empty_like, new_empty


def scratch(flush: str) -> None:
    def memory(size: int) -> tuple[Tensor, int]:
        exact = guarded((size,), torch.uint8, flush)
        return exact, exact.data_ptr()

    PLANS.memory = memory
    linear._ZEROS = placed(torch.zeros(32), flush)
    # Templates know where the zeros were that stand for a bias.
    uncached: Any = lambda self, m, threads: (self._filled(m, threads).raw, self.scratch_bytes(m))  # noqa: E731
    linear.LinearKernel._template = uncached  # type: ignore[method-assign]


def same(a: Tensor, b: Tensor) -> None:
    if not torch.equal(a, b):
        raise AssertionError("the result is another than on ordinary memory")
