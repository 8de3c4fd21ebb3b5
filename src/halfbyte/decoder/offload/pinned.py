"""Pins main memory where it is, so that a GPU copies from it by itself, while the CPU computes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from mmap import PAGESIZE

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.memory import size_text

# cudaHostRegisterReadOnly: the GPU only reads, as the CPU may of a mapped file. Not all systems know it, so that none is tried after it.
_FLAGS = 0x08, 0


class Pinned:
    """Main memory that is pinned as long as this object lives. Who copies from it must have ended before.

    Attributes:
        ranges: Addresses of the first byte and of the end of each range of whole pages.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> None:
        """Keep ranges that were pinned, and the tensors that lie in them."""
        self.ranges, self._tensors = ranges, tensors
        for first, _ in ranges:
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, first).atexit = False


def pin(tensors: Sequence[Tensor], device: torch.device) -> Pinned:
    """Pin the memory of tensors. For a CPU, which stands in for a GPU in tests, nothing is pinned.

    Raises:
        UnsupportedError: The system refuses it, as `ulimit -l` or a container may bound it.
    """
    if device.type != "cuda":
        return Pinned((), tensors)
    done = list[tuple[int, int]]()
    for first, end in page_ranges(tensors):
        if (why := _register(first, end - first, device)) is not None:
            Pinned(done, tensors)  # which ends at once
            raise UnsupportedError(f"main memory of {size_text(end - first)} cannot be pinned ({why})")
        done.append((first, end))
    return Pinned(done, tensors)


def _register(first: int, nbytes: int, device: torch.device) -> str | None:
    """Pin pages from an address on; return why the system refuses it, None if it does not."""
    runtime, code = torch.cuda.cudart(), 0
    for flags in _FLAGS:
        if not (code := int(runtime.cudaHostRegister(first, nbytes, flags))):
            return None
        with suppress(RuntimeError):  # the runtime gives its last error to who launches the next kernel
            torch.ones((), dtype=torch.uint8, device=device)
    return str(runtime.cudaGetErrorString(runtime.cudaError(code)))


def page_ranges(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the addresses of the first byte and of the end of the pages on which tensors lie, of those that share a page as one range: no
    page is pinned twice, and a tensor lies in one range."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes)
    ranges = list[tuple[int, int]]()
    for start, stop in spans:
        first, end = start // PAGESIZE * PAGESIZE, -(-stop // PAGESIZE) * PAGESIZE
        if ranges and first < ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((first, end))
    return ranges
