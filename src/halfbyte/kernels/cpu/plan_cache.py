"""Plans of calls and the memory that planned calls run in, cached for each thread, so that repeated calls are not planned again."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.kernels.cpu.codegen.arguments import Buffer

T = TypeVar("T")
_MOST = 1024
_MOST_LINEAR = 4096
_LEAST_SCRATCH, _MOST_CACHED_SCRATCH = 1 << 16, 1 << 24  # bytes


class Call(NamedTuple):
    """A call of one kind and size: the arguments, all but the tensors filled in, and the memory that they point to."""

    buffer: Buffer
    address: int
    threads: int
    memory: Tensor | None

    @classmethod
    def of(cls, buffer: Buffer, threads: int, memory: Tensor | None = None) -> Call:
        """Return a call of these arguments."""
        return cls(buffer, ctypes.addressof(buffer), threads, memory)


class LinearCall(NamedTuple):
    """A call of one linear kernel with one M: the arguments, all but the tensors and the scratch memory filled in."""

    buffer: Buffer
    address: int
    scratch_bytes: int
    threads: int


class Memory(NamedTuple):
    """Addresses in one block of memory."""

    block: Tensor
    starts: tuple[int, ...]


class GrowingMemory:
    """One block of memory, which is allocated anew, at another address, when more is asked for."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.start = 0  # a multiple of 64

    def of(self, size: int) -> int:
        """The address of at least `size` bytes."""
        if self.start + size > self.block.data_ptr() + self.block.numel():
            self.block = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
            self.start = self.block.data_ptr() + 63 & ~63
        return self.start


class PlanCache(threading.local, Generic[T]):
    """Each Python thread has its own plans, since calls may run side by side."""

    def __init__(self, most: int = _MOST) -> None:
        self.entries = Bounded[Hashable, T](most)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.entries.get(key)
        if plan is None:
            plan = self.entries[key] = make()
        return plan


class Plans(threading.local):
    """The plans of this Python thread for operations that no object owns, and the memory that planned calls run in.

    Each thread has its own, so that calls may run in parallel without locks; they are freed with the thread. Keys hold all that a plan
    depends on, so that none gets stale; what depends on addresses is checked by `ops/conv/cpu.py` before it is used. Plans are bounded in
    number: one more drops all others of its kind.

    Attributes:
        elementwise, pool, convolution, experts, qconv2d: Plans by their sizes, at most _MOST of each.
        conv2d, linear_kernels: What `ops/conv/cpu.py` and `ops/cpu.py` share between calls of one kind, at most _MOST_LINEAR of each.
        linear: Calls by kernel, M and the number of threads, at most _MOST_LINEAR.
        scratch: Memory of `memory`, the largest asked for so far that has at most _MOST_CACHED_SCRATCH bytes.
        expert_items: Intermediate results of a mixture of experts for many rows (transformer/experts/items.py).
        lanes: Intermediate results of encoder layers by the index of a parallel lane, as many as there are threads at most.
        shared: Intermediate results of decoder layers by name and sizes, which all layers of these sizes share; at most _MOST.
    """

    def __init__(self) -> None:
        self.elementwise = Bounded[Hashable, Call](_MOST)
        self.pool = Bounded[Hashable, Call](_MOST)
        self.convolution = Bounded[Hashable, Any](_MOST)  # of ConvCall
        self.experts = Bounded[Hashable, tuple[bytes, int]](_MOST)
        self.qconv2d = Bounded[Hashable, Any](_MOST)  # of calls with their operands
        self.conv2d = Bounded[Hashable, Any](_MOST_LINEAR)  # of plans
        self.linear_kernels = Bounded[Hashable, Any](_MOST_LINEAR)  # of LinearKernel
        self.linear = Bounded[tuple[int, int, int], LinearCall](_MOST_LINEAR)
        self.scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.expert_items = GrowingMemory()
        self.lanes = defaultdict[int, GrowingMemory](GrowingMemory)
        self.shared = Bounded[tuple[str, tuple[int, ...]], Memory](_MOST)

    def memory(self, size: int) -> tuple[Tensor, int]:
        """Scratch memory for one call, and an address in it that is a multiple of 64 with `size` bytes after it; small memory is cached."""
        memory = self.scratch
        if memory.numel() < size + 64:
            memory = torch.empty(max(size + 64, _LEAST_SCRATCH), dtype=torch.uint8, device="cpu")
            if size <= _MOST_CACHED_SCRATCH:
                self.scratch = memory
        return memory, memory.data_ptr() + 63 & ~63


PLANS = Plans()
