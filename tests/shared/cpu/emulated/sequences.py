"""Chains of steps, as whole layers are: what their arguments point to is copied, and points to the copies."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated.program import IMAGE, Emulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.dispatch import cpu as dispatch
from halfbyte.kernels.cpu.codegen import isas, jit, runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.plan_cache import PLANS, GrowingMemory
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, SEQUENCE
from halfbyte.kernels.cpu.transformer.attend import ATTEND
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE

_TABLES = {"attend_whole": WHOLE, "attend": ATTEND, "chain_kind_norm": NORM, "chain_kind": PRODUCT, "rows": LINEAR, "panels": LINEAR}
_FUNCTIONS = ("first_phase", "second_phase", "row_function", "tile_function", "lesser_tile_function")
_MARGIN = 64


class _Memory(TorchDispatchMode):
    """The tensors that are made meanwhile."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._add(tensors)

    def _add(self, tensors: Iterable[Any]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
        self.storages |= {storage.data_ptr(): storage for storage in storages if storage.data_ptr()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(result if isinstance(result, tuple | list) else (result,))
        return result


class _Image:
    """What a chain's address means, moved to where the emulated CPU has it."""

    def __init__(self, emulator: Emulator, storages: Iterable[torch.UntypedStorage]) -> None:
        self._emulator, self._content = emulator, bytearray()
        self._storages = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._moved: dict[int, tuple[int, int]] = {}  # from the address of a piece of memory to its place in the image, and its size
        self._functions_at, self._counters_at = list[int](), list[int]()

    def run(self, address: int) -> None:
        count = ctypes.c_int64.from_address(address + SEQUENCE.offset("count")).value
        sequence = self._block(SEQUENCE, address)
        steps = self._copied(ctypes.c_int64.from_address(address + SEQUENCE.offset("steps")).value, 8 * count)
        self._write(sequence + SEQUENCE.offset("steps"), IMAGE + steps)
        for i in range(count):
            step = self._read(steps + 8 * i)
            name = self._emulator.functions[ctypes.c_int64.from_address(step).value]
            self._write(steps + 8 * i, IMAGE + self._block(next(table for start, table in _TABLES.items() if name.startswith(start)), step))
        after = bytearray(self._emulator.run(bytes(self._content), self._functions_at))
        for at in (*self._functions_at, *self._counters_at):
            after[at : at + 8] = self._content[at : at + 8]
        for start, (at, size) in self._moved.items():
            if start in self._storages:
                ctypes.memmove(start, bytes(after[at : at + size]), size)
                after[at : at + size] = self._content[at : at + size]
        assert after == self._content, "memory was written that is not the kernel's"

    def _read(self, at: int) -> int:
        return int.from_bytes(self._content[at : at + 8], "little")

    def _write(self, at: int, value: int) -> None:
        self._content[at : at + 8] = value.to_bytes(8, "little", signed=value < 0)

    def _copied(self, address: int, size: int) -> int:
        if address not in self._moved:
            if self._content:  # the chain's own arguments come first
                self._content += b"\xff" * (_MARGIN + -len(self._content) % 64 + address % 64)
            self._moved[address] = len(self._content), size
            self._content += ctypes.string_at(address, size)
        return self._moved[address][0]

    def _block(self, table: Block, address: int) -> int:
        if address in self._moved:
            return self._moved[address][0]
        at = self._copied(address, table.struct().size)
        old = {field: self._read(at + table.offset(field)) for field in table.fields}
        for field, value in old.items():
            place = at + table.offset(field)
            if field in _FUNCTIONS:
                self._functions_at.append(place)
            elif field == "counter":
                self._counters_at.append(place)
            elif field == "linear":
                self._write(place, IMAGE + self._block(LINEAR, value))
            elif field == "shares":
                self._write(place, IMAGE + self._copied(value, 8 * (old["groups"] + 1)))
            elif field == "residual":
                if value:
                    self._write(place, self._moved_to(old["out"] + value) - self._moved_to(old["out"]))
            elif field not in table.floats and value:
                self._write(place, self._moved_to(value))
        return at

    def _moved_to(self, value: int) -> int:
        """Where what is at this address is in the image; a number that is no address stays what it is."""
        value &= (1 << 64) - 1
        start = next((start for start, size in self._storages.items() if start <= value < start + size), None)
        return value if start is None else IMAGE + self._copied(start, self._storages[start]) + value - start


@contextmanager
def emulated(emulator: Emulator, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Layers that are made and called meanwhile run on the emulated CPU; `tensors`: what they are made of, and called with."""
    with pytest.MonkeyPatch.context() as patch, _Memory([*tensors, linear._ZEROS]) as memory:

        def run(address: int, threads: int) -> None:
            assert threads == 1
            _Image(emulator, memory.storages.values()).run(address)

        patch.setattr(isas, "_named", lambda _: emulator.isa)
        patch.setattr(jit, "load", emulator.load)
        patch.setattr(dispatch, "linear_kernel", linear.linear_kernel.__wrapped__)
        patch.setattr(PLANS, "shared", type(PLANS.shared)(PLANS.shared.most))
        patch.setattr(PLANS, "lanes", type(PLANS.lanes)(GrowingMemory))
        patch.setattr(runtime, "threads", lambda: 1)
        patch.setattr(runtime, "openmp_address", lambda: 0)
        patch.setattr(runtime, "runner", lambda: run)
        yield
