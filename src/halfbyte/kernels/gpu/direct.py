"""Recorded launches made again with other operands, at a few microseconds of host time each.

`kernel[grid](...)` looks at every argument to find the compiled kernel, 17 to 25 us. A call with the same shapes, dtypes and
alignment runs the same kernel with the same numbers: only addresses differ. So `bind` keeps the compiled kernel and its
arguments, and a call fills in addresses and goes to Triton's launcher in C.

What it uses of Triton and torch is private to them. `broken` tries it on a small kernel once for each device; where it does
not do what it should, everything goes through `kernel[grid]`, and `halfbyte doctor` and `explain` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu import launch
from halfbyte.kernels.gpu.launch import Call

Addresses = tuple[int, ...]
Replay = Callable[[Addresses], None]


class _Slot(NamedTuple):
    """An argument that is an address: that of an operand, and so many bytes on."""

    operand: int
    offset: int


class _Address(NamedTuple):
    """Stands where Triton asks a tensor for its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Descriptor(NamedTuple):
    """Has what Triton reads of a tensor descriptor. As an argument with a gap, `base` is a slot."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str


class _Step(NamedTuple):
    """One launch: the launcher in C, what it takes before and after the stream, and the arguments with gaps at `slots`."""

    launch: Callable[..., None]
    grid: tuple[int, ...]
    rest: tuple[Any, ...]
    arguments: list[Any]
    slots: tuple[tuple[int, int, int], ...]  # argument, operand, offset
    tuples: tuple[tuple[int, tuple[Any, ...]], ...]  # argument, its members, some of which are slots
    descriptors: tuple[tuple[int, _Descriptor], ...]


def bind(calls: Sequence[Call], operands: Sequence[Tensor | None], device: torch.device) -> Replay | str:
    """A function that makes `calls` again for the addresses of other operands (0 for None), or the reason why there is none.

    Operands must not overlap. Other tensors than they and the scratch memory of `launch` are not for kernels that are made again;
    numbers are frozen. The current device must be `device` at every call.
    """
    ranges = [(0, 0) if operand is None else _range(operand) for operand in operands]
    buffers = [(launch.WORKSPACES, torch.uint8), (launch.LOCKS, torch.int32)]
    scratch = [launch.buffer(buffers, device, 0, dtype) for buffers, dtype in buffers]
    sizes = [tensor.numel() for tensor in scratch]
    ranges += [_range(tensor) for tensor in scratch]
    try:
        steps = [_step(call, ranges) for call in calls]
    except _Unbindable as reason:
        return str(reason)
    used = {slot.operand for step in steps for slot in _slots(step)}
    first = len(operands)
    workspace, locks = sizes[0] if first in used else 0, sizes[1] if first + 1 in used else 0
    index = device.index or 0

    def replay(addresses: Addresses) -> None:
        if workspace:
            addresses += (launch.buffer(launch.WORKSPACES, device, workspace, torch.uint8).data_ptr(),)
        if locks:
            addresses += (0,) * (first + 1 - len(addresses)) + (launch.buffer(launch.LOCKS, device, locks, torch.int32).data_ptr(),)
        stream = launch.current_stream(index)
        for run, grid, rest, arguments, slots, tuples, descriptors in steps:
            filled = arguments.copy()
            for i, operand, offset in slots:
                filled[i] = addresses[operand] + offset
            for i, members in tuples:
                filled[i] = tuple(addresses[m.operand] + m.offset if type(m) is _Slot else m for m in members)
            for i, (base, shape, strides, padding) in descriptors:
                filled[i] = _Descriptor(_Address(addresses[base.operand] + base.offset), shape, strides, padding)
            run(*grid, stream, *rest, *filled)

    return replay


class _Unbindable(Exception):
    pass


def _range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _step(call: Call, ranges: list[tuple[int, int]]) -> _Step:
    compiled, kernel = call.compiled, call.kernel
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        raise _Unbindable(f"{compiled.name} needs memory that Triton allocates at each launch")
    parameters = kernel.signature.parameters
    bound = kernel.signature.bind(*call.args, **{name: value for name, value in call.options.items() if name in parameters})
    bound.apply_defaults()
    arguments: list[Any] = [_argument(value, ranges) for value in bound.arguments.values()]
    grid = (*call.grid, 1, 1)[:3]
    rest = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
    slots = tuple((i, *value) for i, value in enumerate(arguments) if type(value) is _Slot)
    tuples = tuple((i, value) for i, value in enumerate(arguments) if type(value) is tuple and any(type(v) is _Slot for v in value))
    descriptors = tuple((i, value) for i, value in enumerate(arguments) if type(value) is _Descriptor)
    return _Step(run.launch, grid, rest, arguments, slots, tuples, descriptors)


def _argument(value: Any, ranges: list[tuple[int, int]]) -> Any:
    if isinstance(value, Tensor):
        address = value.data_ptr()
        for operand, (start, end) in enumerate(ranges):
            if start <= address < end:
                return _Slot(operand, address - start)
        raise _Unbindable("a kernel was given a tensor of its own")
    if isinstance(value, tuple):
        return tuple(_argument(member, ranges) for member in value)
    if hasattr(value, "base") and hasattr(value, "block_shape"):
        return _Descriptor(_argument(value.base, ranges), tuple(value.shape), tuple(value.strides), value.padding)
    return value


def _slots(step: _Step) -> list[_Slot]:
    found = [_Slot(operand, offset) for _, operand, offset in step.slots]
    found += [base for _, (base, *_) in step.descriptors if type(base) is _Slot]
    return found + [member for _, members in step.tuples for member in members if type(member) is _Slot]


# Does it work?


@triton.jit
def _add(pair, y, n, addend, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(pair[0] + i, mask=i < n) + addend, mask=i < n)


_found: dict[int, str | None] = {}


def broken(device: torch.device) -> str | None:
    """Why launches can't be made again on `device`; None if they can. Waits for the device the first time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _found:
        _found[index] = _try(device)
    return _found[index]


def _try(device: torch.device) -> str | None:
    try:
        x, y = torch.arange(100, device=device), torch.zeros(100, dtype=torch.int64, device=device)
        with launch.recording() as calls:
            launch.run(_add, (2,), (x, None), y, 100, 5, BLOCK=64)
        replay = bind(calls, (x, y), device)
        if isinstance(replay, str):
            return replay
        other, out = x.flip(0), torch.zeros_like(y)
        replay((other.data_ptr(), out.data_ptr()))
        if not torch.equal(out, other + 5) or not torch.equal(y, x + 5):
            return f"Triton {triton.__version__} launched a kernel on wrong arguments"
    except Exception as error:  # whatever a private interface that has changed may raise
        return f"Triton {triton.__version__} is not used as halfbyte expects ({type(error).__name__}: {error})"
    return None
